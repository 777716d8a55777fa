"""The result of a comparison: its sentence, its table, what a program reads."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from made_gpt import Gpt, compare_planted
from made_traces import MemoryTrace, TraceMaker

from hookline._errors import NoSuchSite
from hookline.diffs.comparing import compare
from hookline.diffs.difference import Difference, PairResult
from hookline.diffs.matches import Alignment, Match
from hookline.diffs.phases import make_pairs
from hookline.diffs.ranking import compare_runs
from hookline.diffs.traces import Trace
from hookline.diffs.writing import write_r, write_rough, write_times
from hookline.runs import Block, RunWriter, SiteFacts, StepRecord


def pair(verdict: str, r: float | None = 1e-7, kind: str = "value") -> PairResult:
    return PairResult("a:output", "a:output", kind, "name", r, 2e-5, None, verdict)


def plant_tanh(model: Gpt) -> None:
    model.blocks[1].mlp.act.approximate = "tanh"


@pytest.mark.parametrize(
    ("number", "exact", "rough"),
    [
        (0.000203, "2.0e-4", "2e-4"),
        (3.4e-7, "3.4e-7", "3e-7"),
        (0.25, "0.25", "0.25"),
        (0, "0", "0"),
        (math.inf, "infinity", "infinity"),
        (math.nan, "NaN", "NaN"),
        (140.0, "140", "140"),
        (None, "nothing", "nothing"),
    ],
)
def test_numbers_in_sentences(number: float | None, exact: str, rough: str) -> None:
    assert (write_r(number), write_rough(number)) == (exact, rough)


@pytest.mark.parametrize(
    ("factor", "text"),
    [(332.1, "x330"), (8.42, "x8.4"), (123456, "x1e5"), (47, "x47"), (math.inf, "xinfinity")],
)
def test_factors_in_sentences(factor: float, text: str) -> None:
    assert write_times(factor) == text


def test_sentence_of_a_leaf() -> None:
    found = Difference(
        same=False,
        first="blocks.5.mlp.act",
        site="blocks.5.mlp.act:output",
        direction="forward",
        introduced=2.0e-4,
        floor=6e-7,
        limit=6e-6,
        gain=330,
        agree_to=3e-7,
        type="GELU",
        causes=("approximate='tanh' here, 'none' there",),
        pairs=[pair("agrees"), pair("introduces", 2e-4), pair("inherits", 2e-4)],
    )
    assert str(found) == (
        "Runs agree to 3e-7 up to blocks.5.mlp.act (GELU); it introduces 2.0e-4 (floor 6e-7, "
        "x330); everything after inherits it; approximate='tanh' here, 'none' there."
    )


def test_sentence_of_code_between_modules() -> None:
    found = Difference(
        same=False,
        first="blocks.5",
        site="blocks.5.ln2:input",
        direction="forward",
        introduced=0.5,
        limit=2e-5,
        agree_to=0.0,
        type="Block",
        is_own_code=True,
        before="blocks.5.ln2",
        operation="blocks.5/add",
        source="model.py:48",
        pairs=[pair("introduces", 0.5), pair("agrees")],
    )
    assert str(found) == (
        "Runs agree exactly up to the code of blocks.5 (Block) itself, before it calls ln2; it "
        "introduces 0.5 (limit 2e-5, x2e4); at blocks.5/add (model.py:48)."
    )


def test_sentence_of_other_directions() -> None:
    base = {"same": False, "introduced": 0.5, "limit": 2e-5, "agree_to": 1e-7, "type": "Linear"}
    gradient = Difference(first="fc", direction="backward", site="fc:input.grad", **base)
    assert str(gradient) == (
        "Runs agree to 1e-7 forward and up to fc (Linear); it introduces 0.5 in the gradient "
        "(limit 2e-5, x2e4)."
    )
    update = Difference(first="fc", direction="update", site="fc.weight:update", **base)
    assert str(update) == (
        "Runs agree to 1e-7 in all but the update, up to fc (Linear); it introduces 0.5 in the "
        "update of fc.weight (limit 2e-5, x2e4)."
    )
    missing = Difference(first="", direction="backward", word="no gradient reaches fc here", **base)
    assert str(missing) == (
        "Runs agree to 1e-7 forward and up to the model (Linear); no gradient reaches fc here."
    )
    given = Difference(first="", direction="input", site=":input.x", **base)
    assert str(given) == "The inputs differ: :input.x by 0.5 (limit 2e-5, x2e4)."


def test_sentence_of_the_same() -> None:
    found = Difference(same=True, agree_to=3e-7, limit=2e-5, pairs=[pair("agrees")] * 251)
    assert str(found) == "No difference: 251 sites agree to 3e-7 (limit 2e-5)."


def test_difference_is_neither_true_nor_false() -> None:
    with pytest.raises(TypeError, match=r"ask for `\.same`"):
        bool(Difference(same=True))


def test_table_has_all_pairs_or_those_that_differ() -> None:
    found = compare_planted(plant_tanh)
    table = found.table()
    assert table.columns == (
        "site",
        "site_b",
        "rule",
        "kind",
        "r",
        "limit",
        "floor",
        "r/limit",
        "verdict",
    )
    assert len(table) == len(found.pairs)
    row = next(row for row in table if row["verdict"] == "introduces")
    assert (row["site"], row["site_b"]) == ("blocks.1.mlp.act:output", "")
    assert row["r/limit"] == pytest.approx(found.introduced / 2e-5)
    differing = found.table(differing=True)
    assert {row["verdict"] for row in differing} == {"introduces", "inherits"}
    assert {row["kind"] for row in found.table("update")} == {"update"}


def test_dictionary_is_json_with_stable_keys() -> None:
    found = compare_planted(plant_tanh)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["schema"] == 1
    assert plain["sentence"] == str(found)
    assert plain["first"] == "blocks.1.mlp.act"
    assert plain["introduced"] == found.introduced
    assert set(plain) == {
        "agree_to",
        "agree_to_word",
        "alone_a",
        "alone_b",
        "before",
        "candidates",
        "causes",
        "direction",
        "first",
        "first_b",
        "floor",
        "floor_word",
        "gain",
        "gain_word",
        "graft",
        "introduced",
        "introduced_word",
        "is_gradual",
        "is_own_code",
        "limit",
        "limit_word",
        "notes",
        "operation",
        "pairs",
        "r_in",
        "r_in_word",
        "same",
        "schema",
        "sentence",
        "site",
        "site_b",
        "source",
        "source_b",
        "step",
        "steps",
        "titles",
        "type",
        "type_b",
        "visit",
        "word",
    }
    assert plain["pairs"][0]["verdict"] == "agrees"


def test_dictionary_writes_what_is_not_finite_as_words() -> None:
    found = Difference(
        same=False,
        introduced=math.inf,
        gain=math.inf,
        pairs=[pair("introduces", math.inf)],
        graft={"verdict": "itself", "error": math.nan},
    )
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (plain["introduced"], plain["introduced_word"]) == (None, "infinity")
    assert (plain["pairs"][0]["r"], plain["pairs"][0]["r_word"]) == (None, "infinity")
    assert plain["graft"] == {"verdict": "itself", "error": None, "error_word": "nan"}


def test_profile_is_there_with_tensors() -> None:
    found = compare_planted(plant_tanh)
    detail = found.profile("blocks.1.mlp.act")
    assert detail.r == pytest.approx(found.introduced)
    assert detail.shape == (2, 6, 64)
    assert sorted(detail.profile) == [0, 1, 2]
    assert compare_planted(plant_tanh, tensors=False).profile("blocks.1.mlp.act") is None
    with pytest.raises(NoSuchSite, match=r"`blocks\.9` was not compared"):
        found.profile("blocks.9")


def make_projection(*, fused: bool, turned: bool = False, wrong: float = 0.0) -> MemoryTrace:
    """Trace three projections, or one of all three; with a weight that may lie the other way."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 4), torch.randn(12, 4)
    y = x @ weight.T
    y[:, 4:8] += wrong
    maker = TraceMaker()
    maker.value("attn", "input", x, caller="", type="Attention")
    if fused:
        maker.value("attn.qkv", "output", y)
        maker.parameter("attn.qkv", "weight", weight.T if turned else weight)
    else:
        for name, part in zip("qkv", y.split(4, dim=1), strict=True):
            maker.value(f"attn.{name}", "output", part)
        for name, part in zip("qkv", weight.split(4), strict=True):
            maker.parameter(f"attn.{name}", "weight", part)
    return maker.build()


class Aligned:
    """An alignment by hand, for what is measured of groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *matches: Match) -> None:
        def align(a: Trace, b: Trace, **options: object) -> Alignment:
            return Alignment(list(matches), names={"attn": "attn"})

        monkeypatch.setattr("hookline.diffs.comparing.align", align)


@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_group_is_put_together(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    Aligned(
        monkeypatch,
        Match((0,), (0,), "name"),
        Match((1, 2, 3), (1,), "order", "concat", 1),
        Match((4, 5, 6), (2,), "order", "transposed", 0),
    )
    a = make_projection(fused=False)
    b = make_projection(fused=True, turned=True, wrong=wrong)
    found = compare(a, b)
    assert found.same is (wrong == 0)
    assert [one.how for one in found.pairs] == ["same", "concat", "transposed"]
    assert {one.measured for one in found.pairs} == {"tensor"}
    assert found.profile("attn.q").shape == (5, 12)


def test_group_without_tensors_is_bounded_by_its_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Aligned(monkeypatch, Match((1, 2, 3), (1,), "order", "concat", 1))
    a = make_projection(fused=False)
    for wrong in (0.0, 0.5):
        b = make_projection(fused=True, wrong=wrong)
        b.keeps_tensors = False
        found = compare(a, b)
        assert found.pairs[0].measured == "statistics"
        assert found.same is (wrong == 0)


def test_pairs_are_in_the_order_of_the_phases() -> None:
    maker = TraceMaker()
    weight = maker.parameter("m", "weight", torch.ones(2))
    maker.update(weight, torch.ones(2))
    maker.parameter_gradient(weight, torch.ones(2))
    value = maker.value("m", "output", torch.ones(2), caller="")
    maker.gradient(value, torch.ones(2))
    trace = maker.build()
    matches = [Match((site.id,), (site.id,), "name") for site in trace.sites]
    pairs = make_pairs((trace, trace), Alignment(matches))
    assert [one.kind for one in pairs] == [
        "value",
        "gradient",
        "parameter",
        "parameter gradient",
        "update",
    ]


def test_thousand_sites_and_hundred_steps_are_quick(tmp_path: Path) -> None:
    """The bound is loose, because machines are: it takes a fraction of it."""
    generator = np.random.default_rng(0)
    facts = [
        SiteFacts(
            number,
            f"layers.{number}:output",
            "value",
            f"layers.{number}",
            "Linear",
            "float32",
            (64, 64),
            more={"port": "output", "visit": 0, "caller": ""},
        )
        for number in range(1000)
    ]
    sites = np.arange(1000, dtype=np.int32)
    rows = np.tile([4096.0, 0, 0, 0, -3, 3, 0, 4096], (1000, 1))
    steps = [8 * generator.standard_normal((1000, 64), np.float32) for _ in range(100)]
    for name in ("a", "b"):
        with RunWriter(tmp_path / name) as writer:
            writer.add_sites(facts)
            for step, sketches in enumerate(steps):
                blocks = [Block("rows", sites, rows), Block("sketch", sites, sketches)]
                writer.write(StepRecord(step, 0.0, blocks=blocks))
    begun = time.process_time()
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.same
    assert len(found.history.steps) == 100
    assert time.process_time() - begun < 4
