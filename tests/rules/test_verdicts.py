from __future__ import annotations

from hookline.rules import Finding, fold, say_verdict
from hookline.rules.linking import link


def finding(rule, severity, site, step, **more):
    return Finding(rule, severity, site, step, 9.0, 1.0, f"{rule} at {site}.", **more)


def test_errors_come_first_then_the_earlier():
    found = [
        finding("spike", "info", "a", 1),
        finding("exploding", "warning", "b", 9),
        finding("vanishing", "warning", "d", 3),
        finding("non-finite", "error", "c", 20),
    ]
    assert [one.root.site for one in fold(found)] == ["c", "d", "b", "a"]


def test_findings_are_folded_under_their_cause():
    dead = finding("dead-units", "error", "act", 19)
    gradient = finding("no-gradient", "error", "fc.weight", 19, cause="act")
    (group,) = fold([gradient, dead])
    assert (group.root, group.follows) == (dead, [gradient])


def test_cause_that_is_not_there_makes_a_root():
    (group,) = fold([finding("no-gradient", "error", "fc.weight", 19, cause="act")])
    assert group.follows == []


def test_two_findings_at_one_site_are_two_groups():
    found = [finding("spike", "info", "a", 5), finding("headroom", "warning", "a", 3)]
    assert [one.root.rule for one in fold(found)] == ["headroom", "spike"]


def test_group_is_as_bad_as_the_worst_in_it():
    rate = finding("update-ratio", "warning", "w", 3)
    dead = finding("dead-units", "error", "act", 30, cause="w")
    other = finding("saturation", "info", "t", 1)
    assert [one.root for one in fold([other, rate, dead])] == [rate, other]


def test_verdict_without_findings():
    assert say_verdict([], steps=100, sites=251) == "No findings in 100 steps of 251 sites."


def test_verdict_is_the_worst_finding_and_counts_the_rest():
    found = [finding("spike", "info", "a", 1), finding("vanishing", "warning", "d", 3)]
    assert say_verdict(found, steps=5, sites=5) == "vanishing at d. (1 more finding)"


def test_verdict_of_a_nan_names_its_first_sign():
    found = [finding("update-ratio", "warning", "w", 3), finding("non-finite", "error", "a", 9)]
    assert say_verdict(found, steps=9, sites=5) == (
        "non-finite at a; the first sign was update-ratio of w at step 3."
    )


def test_finding_follows_from_what_brings_it_about():
    dead = finding("dead-units", "error", "act", 19)
    late = finding("no-gradient", "error", "fc.weight", 19)
    assert link(late, [dead]).cause == "act"
    assert link(late, [finding("dead-units", "warning", "act", 19)]).cause == ""
    assert link(dead, [late]).cause == ""


def test_rate_that_is_too_small_kills_no_unit():
    small = Finding("update-ratio", "warning", "w", 19, 0.0, 1e-7, "too small")
    assert link(finding("dead-units", "error", "act", 30), [small]).cause == ""


def test_nan_stays_a_root_and_lists_the_signs():
    nan = finding("non-finite", "error", "a", 9)
    linked = link(nan, [finding("exploding", "warning", "b", 4)])
    assert (linked.cause, linked.evidence) == ("", ("before it, at step 4: exploding at b",))


def spread(site, step, phase, rank, **more):
    return finding("non-finite", "error", site, step, rank=rank, more={"phase": phase, **more})


def test_rank_that_made_the_nan_comes_before_those_that_got_it():
    got = spread("0.weight:grad", 5, "parameter gradient", rank=0)
    made = spread("0", 5, "value", rank=1)
    later = spread("0.weight", 6, "parameter", rank=2)
    (group,) = fold([got, later, made])
    assert (group.root, group.follows) == (made, [got, later])
    assert say_verdict([got, made], steps=9, sites=5) == "non-finite at 0."


def test_forward_operation_of_an_origin_comes_before_gradients():
    got = spread("0.weight:grad", 5, "gradient", rank=0)
    made = spread("train.py:3/log", 5, "gradient", rank=1, origin={"cause": "operation"})
    assert fold([got, made])[0].root is made


def test_nan_of_other_ranks_is_not_folded_under_an_earlier_finding_at_its_site():
    sign = finding("headroom", "warning", "a", 1)
    made, got = spread("a", 5, "value", rank=0), spread("b", 6, "gradient", rank=1)
    groups = fold([sign, got, made])
    assert [(one.root, one.follows) for one in groups] == [(made, [got]), (sign, [])]
