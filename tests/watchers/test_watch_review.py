"""Likely mistakes around a watch, how a run ends, and what its files say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Net
from torch import nn
from training_processes import finish, start
from trainings import batches

import hookline as hl
from hookline.runs.documents import from_json, to_json


def train(model: nn.Module, *, steps: int = 4) -> torch.optim.Optimizer:
    """Train a little, and give the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches(5, 3, count=steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return optimizer


def test_the_cost_is_told_where_every_step_has_extras() -> None:
    model = Net()
    with hl.watch(model, sketch_every=1, counts_every=1) as watched:
        train(model, steps=6)
    assert watched.cost.with_extras == watched.cost.watched == 6
    assert watched.cost.ratio is not None
    assert watched.cost.overhead is not None


@pytest.mark.parametrize("name", ["time", "seconds"])
def test_a_number_cannot_have_the_name_of_the_runs_own(name: str, tmp_path: Path) -> None:
    model = Net()
    with hl.watch(model, tmp_path / "run") as watched:
        with pytest.raises(ValueError, match=f"'{name}' is a number that the run keeps"):
            watched.log(error=1.0, **{name: 2.0})
        watched.log(accuracy=0.5)
        train(model)
    scalars = hl.open_run(tmp_path / "run").scalars
    assert len(set(scalars)) == len(scalars)
    assert {"accuracy", name} <= set(scalars)
    assert "error" not in scalars


@pytest.mark.parametrize(
    ("ending", "code", "status"),
    [
        ("raise RuntimeError('on purpose')", 1, "failed"),
        ("raise KeyboardInterrupt", -2, "interrupted"),
        ("", 0, "finished"),
    ],
)
def test_a_watch_that_nobody_closes_says_how_the_process_ended(
    ending: str, code: int, status: str, tmp_path: Path
) -> None:
    script = f"watched = hl.watch(model, sys.argv[1])\nstep()\n{ending}\n"
    finish(start(script, str(tmp_path / "run")), code=code)
    run = hl.open_run(tmp_path / "run")
    assert run.status == status
    assert run.steps.tolist() == [0]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SystemExit(), "finished"),
        (SystemExit(0), "finished"),
        (SystemExit(3), "failed"),
        (SystemExit("no data"), "failed"),
        (ValueError(), "failed"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_leaving_the_block_says_how_the_run_ended(
    error: BaseException, status: str, tmp_path: Path
) -> None:

    def leave() -> None:
        with hl.watch(Net(), tmp_path / "run"):
            raise error

    with pytest.raises(type(error)):
        leave()
    assert hl.open_run(tmp_path / "run").status == status


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_numbers_of_other_libraries_are_written_as_numbers(tmp_path: Path) -> None:
    model = Net()
    finding = {
        "step": np.int64(3),
        "value": np.float32(0.5),
        "is_bad": np.bool_(True),
        "tensor": torch.tensor(2.5),
        "array": np.array(7),
        "long": np.longdouble(1.5),
        "nested": [np.float64(0.25), {np.int64(1): torch.tensor(True)}],
        "empty": torch.empty((), device="meta"),
        "stat": "nan",
    }
    with hl.watch(model, tmp_path / "run") as watched:
        train(model)
        watched.add_finding(finding)
    (found,) = hl.open_run(tmp_path / "run").findings
    assert found == {
        "rank": 0,
        "step": 3,
        "value": 0.5,
        "is_bad": True,
        "tensor": 2.5,
        "array": 7,
        "long": 1.5,
        "nested": [0.25, {"1": True}],
        "empty": str(finding["empty"]),
        "stat": "nan",
    }
    assert type(found["is_bad"]) is bool


def test_what_is_not_finite_is_valid_json_and_reads_as_before(tmp_path: Path) -> None:
    facts = {"a": math.nan, "b": [math.inf, {"c": np.float32(-math.inf)}], "d": torch.tensor(1e39)}
    text = to_json(facts)
    assert json.loads(text, parse_constant=refuse_constant)["a"] == "NaN"
    found = from_json(text)
    assert math.isnan(found["a"])
    assert found["b"] == [math.inf, {"c": -math.inf}]
    assert found["d"] == math.inf
    assert math.isnan(from_json('{"a": NaN}')["a"]), "a run of before"
    model = Net()
    with hl.watch(model, tmp_path / "run") as watched:
        train(model)
        watched.add_finding(facts)
        watched.dump("bad", {"x": torch.zeros(2)}, loss=math.nan)
    run = hl.open_run(tmp_path / "run")
    assert run.findings[0]["d"] == math.inf
    assert math.isnan(run.tensors["bad"].facts["loss"])
    for path in (tmp_path / "run").glob("*.json"):
        json.loads(path.read_text(), parse_constant=refuse_constant)


def test_one_optimizer_and_one_function_need_no_list() -> None:
    model, seen = Net(), []
    other = torch.optim.SGD(model.fc1.parameters(), 0.1)
    with hl.watch(model, optimizers=other, to=seen.append) as watched:
        train(model)
        assert watched.step_number == 0
        other.step()
        model(torch.randn(2, 3))
        assert watched.step_number == 1
    assert [one.step for one in seen] == [0, 1]


def test_parameters_come_by_several_patterns(tmp_path: Path) -> None:
    model = Net()
    with hl.watch(model, tmp_path / "run", parameters=["fc1.w*", "fc2.bias"]) as watched:
        train(model)
    named = {row["site"] for row in watched.history.sites(kind="parameter")}
    assert named == {"fc1.weight", "fc2.bias"}
    assert hl.open_run(tmp_path / "run").document("watch")["parameters"] == ["fc1.w*", "fc2.bias"]
    with pytest.raises(hl.NoSuchSite, match="'fc9' matches none of 4 parameters"):
        hl.watch(model, parameters=["fc1.weight", "fc9"])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"keep": "x"}, ValueError, "keep='x': give how many steps"),
        ({"first_step": -5}, ValueError, "first_step=-5: give the number of a step, from 0"),
        ({"first_step": 1.5}, ValueError, "first_step=1.5"),
        ({"budget": "much"}, ValueError, "budget='much': give a share of the time"),
        ({"optimizers": [nn.Linear(1, 1)]}, TypeError, "optimizers has a Linear: give optimizers"),
        ({"optimizers": 3}, TypeError, "optimizers=3: give an optimizer"),
        ({"to": 3}, TypeError, "to=3: give a function"),
        ({"parameters": [nn.Linear]}, TypeError, "give a pattern of their names"),
        ({"parameters": True}, TypeError, "parameters=True: give a pattern"),
        ({"sites": None, "every": {"zzz": 2}}, hl.NoSuchSite, "`zzz` matches no"),
    ],
)
def test_a_likely_mistake_is_named(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    model = Net()
    with pytest.raises(kind, match=message):
        hl.watch(model, **options)
    assert not any(one._forward_hooks for one in model.modules())


def test_strides_of_parameters_alone_are_by_pattern() -> None:
    model = Net()
    with hl.watch(model, sites=None, every={"fc1": 2, "fc2.bias": 4}) as watched:
        train(model, steps=8)
    found = {
        name: np.isfinite(watched.series(name).values).sum()
        for name in ("fc1.weight", "fc2.weight", "fc2.bias")
    }
    assert found == {"fc1.weight": 4, "fc2.weight": 8, "fc2.bias": 2}


def test_calls_without_grad_alone_say_why_nothing_is_there(tmp_path: Path) -> None:
    model = Net()
    with hl.watch(model, tmp_path / "run") as watched, torch.no_grad():
        model(torch.randn(2, 3))
        with pytest.raises(hl.NotRecorded, match=r"no steps yet.*with_inference=True"):
            watched.table()
        with pytest.raises(hl.NoSuchSite, match=r"`fc1` matches no site.*with_inference=True"):
            watched.series("fc1")
        watched.log(loss=1.0)
        watched.step()
        assert "with_inference=True" in str(watched.table())
    (note,) = watched.notes
    assert note == (
        "nothing was measured at any site: no call with grad was heard of in a watched step "
        "(calls without grad are measured with `with_inference=True` alone)"
    )
    assert hl.open_run(tmp_path / "run").document("notes") == {"notes": [note]}
    with hl.watch(model, with_inference=True) as watched, torch.no_grad():
        (note,) = watched.notes
        assert note.endswith("no call was heard of in a watched step")
        model(torch.randn(2, 3))
        assert watched.notes == []
