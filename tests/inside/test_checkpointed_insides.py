"""Names inside a forward under activation checkpointing: right or refused, never wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small_models import is_clean
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import make_input

import hookline as hl

CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "none": lambda function, *args: function(*args),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "other": partial(checkpoint, use_reentrant=False),
    "no early stop": partial(checkpoint, use_reentrant=False, early_stop=False)
    if "early_stop" in checkpoint.__code__.co_varnames
    else partial(checkpoint, use_reentrant=False),
}


class Block(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.run = run

    def part(self, h: Tensor) -> Tensor:
        z = torch.tanh(h) * h
        return z.sin()


class Inside(Block):
    """The whole module is in the region."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        z = torch.tanh(h) * h
        y = z.sin() + x
        return y


class NestedRegion(Block):
    """A function that forward defines is the region."""

    def forward(self, x: Tensor) -> Tensor:
        def part(h: Tensor) -> Tensor:
            z = torch.tanh(h) * h
            return z.sin()

        h = self.lin(x)
        y = self.run(part, h) + x
        return y


class MethodRegion(Block):
    """A method that forward hands on is the region."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        y = self.run(self.part, h) + x
        return y


class Model(nn.Module):
    def __init__(self, kind: type[Block], run: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = kind(CHECKPOINTS["none"] if kind is Inside else run)
        self.run = run if kind is Inside else CHECKPOINTS["none"]

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.block, self.first(x)) * 2


KINDS = [Inside, NestedRegion, MethodRegion]
WHERE = {
    Inside: ["@h", "@z", "@y", "/tanh", "/mul", "/add", "@x"],
    NestedRegion: ["@h", "@part.z", "@part.h", "@y", "/tanh", "/mul", "/add"],
    MethodRegion: ["@h", "@y", "/tanh", "/mul", "/add"],
}
CASES = [(kind, where) for kind in KINDS for where in WHERE[kind]]
RUNS = list(CHECKPOINTS)[1:]


def is_hidden(kind: type[Block], where: str, run: str) -> bool:
    """Tell whether an operation is in an autograd function: a reentrant region is one."""
    return kind is not Inside and where in ("/tanh", "/mul") and run == "reentrant"


SEEN = [
    (kind, where, run) for kind, where in CASES for run in RUNS if not is_hidden(kind, where, run)
]
HIDDEN = [(kind, where) for kind, where in CASES if is_hidden(kind, where, "reentrant")]
EDITS: dict[str, Any] = {"scale": lambda: hl.scale(2), "noise": lambda: hl.noise(0.5, seed=3)}


def step(
    kind: type[Block], run: str, edits: dict[str, Any], *, closes_early: bool = False
) -> list[Tensor | None]:
    torch.manual_seed(5)
    model = Model(kind, CHECKPOINTS[run])
    x = make_input()
    handle = hl.edit(model, edits) if edits else None
    try:
        out = model(x)
        if handle is not None and closes_early:
            handle.remove()
        out.square().sum().backward()
    finally:
        if handle is not None:
            handle.remove()
    if handle is not None:
        assert [row["applied"] for row in handle.report()] != [0]
    return [out.detach(), x.grad, *(one.grad for one in model.parameters())]


@pytest.mark.parametrize("closes_early", [False, True], ids=["inside", "after"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("kind", "where", "run"), SEEN)
def test_edit_in_a_region_is_right_or_refused(
    kind: type[Block], where: str, run: str, edit: str, closes_early: bool
) -> None:
    expected = step(kind, "none", {f"block{where}": EDITS[edit]()})
    try:
        result = step(kind, run, {f"block{where}": EDITS[edit]()}, closes_early=closes_early)
    except hl.EditError as error:
        if kind is Inside or "checkpoint" not in str(error):
            raise
        return
    for left, right in zip(result, expected, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("closes_early", [False, True], ids=["inside", "after"])
@pytest.mark.parametrize("run", RUNS)
def test_edit_of_one_assignment_in_a_region_is_right(run: str, closes_early: bool) -> None:
    class Loop(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = x
            for _ in range(3):
                h = torch.sin(self.lin(h))
            return h

    class Looping(Model):
        def __init__(self, kind: type[Block], run: Callable[..., Any]) -> None:
            super().__init__(Inside, run)
            self.block = Loop(run)

    for where in ("@h[2]", "/sin[1]"):
        results = []
        for name, early in (("none", False), (run, closes_early)):
            torch.manual_seed(5)
            model = Looping(Inside, CHECKPOINTS[name])
            x = make_input()
            handle = hl.edit(model, {f"block{where}": hl.scale(2)})
            out = model(x)
            if early:
                handle.remove()
            out.square().sum().backward()
            handle.remove()
            results.append([out.detach(), x.grad, *(one.grad for one in model.parameters())])
        for left, right in zip(*results, strict=True):
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize(("kind", "where", "run"), SEEN)
def test_values_in_a_region_are_captured_once(kind: type[Block], where: str, run: str) -> None:
    def capture(run: str, **options: Any) -> tuple[hl.Captured, list[Tensor | None]]:
        torch.manual_seed(5)
        model = Model(kind, CHECKPOINTS[run])
        x = make_input()
        with hl.capture(model, f"block{where}", **options) as got:
            model(x).square().sum().backward()
        assert is_clean(model)
        return got, [x.grad, *(one.grad for one in model.parameters())]

    plain, expected = capture("none", grads=True, clone=True)
    got, grads = capture(run)
    for left, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(left, right)
    assert len(got.values(f"block{where}")) == len(plain.values(f"block{where}")) == 1
    assert torch.equal(got[f"block{where}"], plain[f"block{where}"])


@pytest.mark.filterwarnings("ignore::hookline.HooklineWarning")
@pytest.mark.parametrize(("kind", "where", "run"), SEEN)
def test_gradients_in_a_region_are_right_or_missing_with_a_reason(
    kind: type[Block], where: str, run: str
) -> None:
    def capture(run: str) -> tuple[hl.Captured, list[Tensor | None]]:
        torch.manual_seed(5)
        model = Model(kind, CHECKPOINTS[run])
        x = make_input()
        with hl.capture(model, f"block{where}", grads=True, clone=True) as got:
            model(x).square().sum().backward()
        return got, [x.grad, *(one.grad for one in model.parameters())]

    plain, expected = capture("none")
    got, grads = capture(run)
    for left, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(left, right)
    found = got[f"block{where}"].grad
    if found is None:
        assert [one.address for one in got.report().problems] == [f"block{where}:grad"]
    else:
        torch.testing.assert_close(found, plain[f"block{where}"].grad)


@pytest.mark.parametrize(("kind", "where"), HIDDEN)
def test_operation_in_a_reentrant_region_is_reported(kind: type[Block], where: str) -> None:
    """It is below autograd, where an edit would be lost to the gradient."""
    model, x = Model(kind, CHECKPOINTS["reentrant"]), make_input()
    plain = model(x)
    with (
        pytest.warns(hl.HooklineWarning, match=f"block{where}: .*no operation of that name"),
        hl.edit(model, {f"block{where}": hl.scale(2)}),
    ):
        assert torch.equal(model(x), plain)
    with (
        pytest.warns(hl.HooklineWarning, match=f"block{where}: never called"),
        hl.capture(model, f"block{where}"),
    ):
        model(x)


@pytest.mark.parametrize("run", RUNS)
def test_edit_that_depends_on_the_assignment_is_right_in_a_region_run_twice(run: str) -> None:
    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            def part(h: Tensor) -> Tensor:
                z = torch.tanh(h) * h
                return z.sin()

            return self.run(part, self.run(part, self.lin(x)))

    def by_number(value: Tensor, at: hl.At) -> Tensor:
        return value * (3 if at.index == 1 else 2)

    torch.manual_seed(5)
    for where, edit in {
        "block@part.z": hl.scale(2),
        "block@part.z[1]": hl.scale(2),
        "block@part.z[0]": hl.add(1.0),
        "block@part.*": hl.noise(0.5),
    }.items():
        expected = step(Twice, "none", {where: edit})
        for left, right in zip(step(Twice, run, {where: edit}), expected, strict=True):
            torch.testing.assert_close(left, right)
    expected = step(Twice, "none", {"block@part.z": by_number})
    for left, right in zip(step(Twice, run, {"block@part.z": by_number}), expected, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("run", ["other", "no early stop"])
def test_edit_that_depends_on_the_assignment_is_right_in_a_region_in_a_region(run: str) -> None:
    class Within(Block):
        def forward(self, x: Tensor) -> Tensor:
            def part(h: Tensor) -> Tensor:
                z = torch.tanh(h) * h
                return z.sin()

            def twice(h: Tensor) -> Tensor:
                return self.run(part, self.run(part, h))

            return self.run(twice, self.lin(x))

    torch.manual_seed(5)
    for edits in (
        {"block@part.z": hl.scale(2)},
        {"block@part.z": hl.noise(0.5)},
        {"block@part.z[1]": hl.scale(2)},
    ):
        expected = step(Within, "none", edits)
        for left, right in zip(step(Within, run, edits), expected, strict=True):
            torch.testing.assert_close(left, right)
