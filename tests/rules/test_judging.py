from __future__ import annotations

import json

import pytest
import torch
from made_steps import Network, judge
from torch import nn

import hookline as hl
from hookline.rules import Finding, Judge, Rule, Step, judge_run, make_rules, register_rule
from hookline.rules.rule import _registered
from hookline.runs import RunWriter, open_run

NETWORK = Network("a", "b", "c")
ALL = [
    "non-finite",
    "init-scale",
    "update-ratio",
    "lost-updates",
    "headroom",
    "underflow",
    "dead-units",
    "saturation",
    "exploding",
    "vanishing",
    "no-gradient",
    "outlier-channels",
    "spike",
]


class Large(Rule):
    """A rule as a user writes one."""

    name = "large"

    def see(self, step: Step):
        for site in step.find(step.stat("absmax") > 100):
            yield self.find(step, site, message=f"{site.address} is large", value=1.0)


def test_rules_by_default_are_those_of_the_documentation():
    assert [rule.name for rule in make_rules()] == ALL


def test_rule_of_a_user_finds_once_at_each_site():
    large = {"b:output": {"rms": 50.0}}
    found = judge(Large(), NETWORK, [NETWORK.step(n, large) for n in range(3)])
    assert [(one.rule, one.site, one.step, one.severity) for one in found] == [
        ("large", "b", 0, "warning")
    ]
    assert found[0].source == "model.py:1"


def test_registered_rule_is_applied_by_default():
    try:
        register_rule(Large)
        assert [rule.name for rule in make_rules()] == [*ALL, "large"]
        judge = Judge()
        found = judge.see(NETWORK.step(0, {"b:output": {"rms": 50.0}}), NETWORK.sites)
        assert [one.rule for one in found] == ["large"]
    finally:
        del _registered["large"]


def test_register_refuses_what_is_no_rule():
    with pytest.raises(TypeError, match=r"derived from hl\.Rule"):
        register_rule(int)
    with pytest.raises(ValueError, match="has no name"):
        register_rule(type("Nameless", (Rule,), {}))


def test_rule_that_raises_is_dropped_and_the_others_go_on():
    class Broken(Rule):
        name = "broken"

        def see(self, step: Step):
            raise KeyError("nothing")

    court = Judge([Broken(), Large()])
    large = {"b:output": {"rms": 50.0}}
    found = [court.see(NETWORK.step(n, large), NETWORK.sites) for n in range(2)]
    assert [len(one) for one in found] == [1, 0]
    assert court.failures == [
        "the rule `broken` failed at step 0 and is not asked any more: KeyError: 'nothing'"
    ]


def test_end_asks_every_rule_once():
    class Late(Rule):
        name = "late"

        def see(self, step: Step):
            return ()

        def end(self):
            yield self.find(9, "", message="too late")

    court = Judge([Late()])
    court.see(NETWORK.step(0), NETWORK.sites)
    assert [one.message for one in court.end()] == ["too late"]
    assert court.end() == []


def test_sites_may_be_added_while_it_goes_on():
    small, large = Network("a"), Network("a", "b", "c", "d")
    court = Judge()
    for number in range(30):
        network = small if number < 10 else large
        court.see(network.step(number, loss=1.0), network.sites)
    assert court.failures == []


def test_finding_survives_json():
    found = Finding(
        "spike", "info", "a", 3, float("inf"), 10.0, "text", evidence=("x",), more={"n": 1}
    )
    again = Finding.from_dict({**json.loads(json.dumps(found.to_dict())), "later": 1})
    assert again == found
    assert found.value is None


def test_finding_refuses_another_severity():
    with pytest.raises(ValueError, match="give one of error, warning, info"):
        Finding("a", "fatal", "", 0, None, None, "text")


@pytest.fixture
def broken_run(tmp_path):
    """A run in which a NaN comes at step 12 and a layer has no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    with hl.watch(model, tmp_path / "run") as watched:
        for number in range(12):
            optimizer.zero_grad()
            x = torch.randn(8, 8)
            if number == 11:
                x[0, 0] = float("nan")
            model(x).square().mean().backward()
            optimizer.step()
    return tmp_path / "run", watched.findings


def test_run_folder_is_judged_as_it_was_live(broken_run):
    path, live = broken_run
    found = judge_run(open_run(path))
    assert [one.rule for one in found] == [one.rule for one in live]
    assert [one.to_dict() for one in found] == [one.to_dict() for one in live]
    assert "non-finite" in [one.rule for one in found]


def test_run_is_judged_by_given_rules_and_rank(broken_run):
    path, _ = broken_run
    assert {one.rule for one in judge_run(open_run(path), [Large()])} <= {"large"}
    with pytest.raises(hl.NotRecorded, match="there is no rank 3; there are 0"):
        judge_run(open_run(path), rank=3)


def write_ranks(folder, *courses):
    """Write one rank for each course: the means of a parameter, step by step."""
    for rank, means in enumerate(courses):
        writer = RunWriter(folder, rank=rank, world=len(courses))
        writer.add_sites(NETWORK.sites)
        for number, mean in enumerate(means):
            writer.write(NETWORK.step(number, {"b.weight": {"rms": 1.0, "mean": mean}}))
        writer.close("finished")
    return open_run(folder)


def test_ranks_that_agree_give_no_finding(tmp_path):
    assert judge_run(write_ranks(tmp_path, [0.1, 0.2, 0.3], [0.1, 0.2, 0.3])) == []


def test_ranks_that_part_are_found_at_the_first_step_that_shows_it(tmp_path):
    run = write_ranks(tmp_path, [0.1, 0.2, 0.3], [0.1, 0.2, 0.300001], [0.1, 0.2, 0.3])
    (finding,) = judge_run(run)
    assert (finding.rule, finding.site, finding.step) == ("rank-disagreement", "b.weight", 2)
    assert finding.severity == "error"
    assert finding.more["ranks"] == [0, 1]
    assert "differs between ranks 0 and 1 at step 2" in finding.message


def test_shards_that_differ_from_the_start_are_left_out(tmp_path):
    assert judge_run(write_ranks(tmp_path, [0.1, 0.2], [0.7, 0.9])) == []


def test_one_rank_alone_cannot_disagree(tmp_path):
    run = write_ranks(tmp_path, [0.1, 0.2], [0.1, 0.9])
    assert judge_run(run, rank=1) == []
