"""Edits as a part of compiled graphs: the bits of eager edits, and no compilation for a number."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from blocks import count
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

# The compiler looks at the .grad of what goes into a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

VECTOR = torch.tensor([1.0, -2.0, 3.0])

ACTIONS: dict[str, Callable[[int], Any]] = {
    "set number": lambda k: hl.set(0.3 * k),
    "set tensor": lambda k: hl.set(torch.full((4, 3), 0.5 * k)),
    "add number": lambda k: hl.add(0.1 * k),
    "add tensor": lambda k: hl.add(VECTOR * k),
    "scale number": lambda k: hl.scale(0.3 * k),
    "scale by a whole number": lambda k: hl.scale(-k),
    "scale tensor": lambda k: hl.scale(VECTOR * k),
    "zero": lambda k: hl.zero(),
    "clip": lambda k: hl.clip(0.1 * k),
    "clip norm": lambda k: hl.clip(norm=0.3 * k),
    "clip norm of rows": lambda k: hl.clip(norm=0.3 * k, dim=-1),
    "mask": lambda k: hl.mask(torch.tensor(2 - k) < VECTOR, fill=0.1 * k),
    "swap rows": lambda k: hl.swap_rows(0, k),
    "swap the last": lambda k: hl.swap_rows(-k, 1),
    "order": lambda k: hl.swap_rows([3, 2, 1, 0] if k == 1 else [1, 0, 3, 2]),
    "one row": lambda k: hl.add(1.5).where(rows=k),
    "rows": lambda k: hl.scale(2).where(rows=[0, -k]),
    "position": lambda k: hl.add(VECTOR).where(positions=-k),
    "slices": lambda k: hl.add(3).where(rows=slice(k, None, 2), positions=slice(-2, None)),
}
"""Each action with two numbers, which one graph has to serve."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(3, 3), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.act(self.fc(x))
        return out


class Net(nn.Module):
    """Two blocks, the first in a checkpoint if asked for."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            x = self.first(x)
        else:
            x = checkpoint(self.first, x, use_reentrant=self.reentrant)
        out: Tensor = self.last(x)
        return out


class Result(NamedTuple):
    """What a run gave."""

    values: dict[str, Tensor]
    grads: list[Tensor | None]
    report: str


def run(model: nn.Module, x: Tensor, edits: Any, *where: str) -> Result:
    """Run forward and backward with edits; give values, gradients, and the report."""
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)  # of what zeros keep gradients from
        with hl.edit(model, edits) as handle, hl.capture(model, *where, grads=True) as got:
            model(x).square().sum().backward()
    grads = [one.grad for one in model.parameters()]
    return Result(got.tensors(), grads, str(handle.report()))


def compare(
    model: nn.Module,
    edits: Callable[[int], Any],
    *,
    where: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
    same_report: bool = True,
) -> None:
    """Edit an eager copy and a compiled model, with two numbers; require the same bits."""
    model = model.to(dtype)
    twin, x = copy.deepcopy(model), torch.randn(4, 3, dtype=dtype, requires_grad=True)
    counter = count("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for k in (1, 2):
        expected, found = run(twin, x, edits(k), *where), run(compiled, x, edits(k), *where)
        assert found.values.keys() == expected.values.keys()
        for address, value in expected.values.items():
            assert torch.equal(found.values[address], value), address
        for mine, theirs in zip(found.grads, expected.grads, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or torch.equal(mine, theirs)
        assert not same_report or found.report == expected.report
    assert counter.frame_count == 1


class Row(nn.Module):
    """One layer for each action, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in ACTIONS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_actions_give_the_bits_of_an_eager_run(dtype: torch.dtype) -> None:
    """On values and on gradients, in one graph: one compilation, whatever the numbers."""

    def edits(k: int) -> dict[str, Any]:
        found = {}
        for number, make in enumerate(ACTIONS.values()):
            action = make(k)
            if action.kind == "replace":  # what is set has the type of the value
                action = hl.set(action.operands[0].to(dtype))
            found[f"layers.{number}"] = action
            found[f"layers.{number}:output.grad"] = action
        return found

    compare(Row(), edits, where=("layers.*",), dtype=dtype)


def test_arguments_and_their_gradients_are_edited() -> None:
    compare(
        Net(),
        lambda k: {
            "first.act:input": hl.scale(0.3 * k),
            "last:input.x": hl.add(VECTOR * k),
            "first.act:input.grad": hl.clip(0.1 * k),
            "last:input.grad": hl.scale(2).where(rows=k),
        },
        where=("**:input", "**:input.grad"),
    )


def test_the_same_edits_of_a_part_of_a_nested_value() -> None:
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": x + 1, "b": (x * 2, [x * 3]), "n": 7}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.parts = nn.Linear(3, 3), Parts()

        def forward(self, x: Tensor) -> Tensor:
            found = self.parts(self.fc(x))
            out: Tensor = found["a"] + found["b"][0] * found["b"][1][0]
            return out

    compare(
        Outer(),
        lambda k: {
            "parts:output.b[1][0]": hl.scale(0.5 * k),
            "parts:input.x": hl.add(k),
            "parts:output.a.grad": hl.scale(k),
            "parts:output.grad": hl.add(1),
        },
    )


def test_edits_at_one_site_are_made_in_their_order() -> None:
    compare(
        Net(),
        lambda k: [
            ("first", hl.add(k)),
            ("first", hl.scale(2.5)),
            ("first:output.grad", hl.scale(k)),
            ("first:output.grad", hl.add(1)),
            ("last.fc:input.grad", hl.scale(3)),
            ("last.fc:input.grad", hl.add(k)),
        ],
    )


def test_captures_see_values_before_and_after_edits() -> None:
    model, x = Net(), torch.randn(4, 3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for one in (copy.deepcopy(model), compiled):
        with (
            hl.edit(one, {"first": hl.scale(2), "first:output.grad": hl.scale(5)}),
            hl.capture(one, "first", grads=True, before_edits=True) as before,
            hl.capture(one, "first", grads=True) as after,
        ):
            one(x).sum().backward()
        found.append([before["first"].output, after["first"].output])
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine.grad, theirs.grad)
    assert torch.equal(found[1][1], found[1][0] * 2)
    assert torch.equal(found[1][1].grad, found[1][0].grad * 5)


def test_what_is_handed_back_is_edited_there_alone() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.same = nn.Linear(3, 3), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            out: Tensor = self.same(h) * 2 + h
            return out

    compare(
        Residual(),
        lambda k: {
            "same": hl.scale(k),
            "same:output.grad": hl.scale(3 * k),
            "same:input.grad": hl.add(k),
        },
    )


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)], ids=["rows", "a view"])
def test_what_is_written_over_has_its_gradient_before_edits_of_what_made_it(
    shape: tuple[int, ...],
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, found = torch.randn(shape), []
    for one in (copy.deepcopy(model), compiled):
        with (
            hl.edit(one, {"0:output.grad": hl.scale(3)}),
            hl.capture(one, "1:input.grad", "0:output.grad") as got,
        ):
            one(x).square().sum().backward()
        found.append((got["1:input.grad"]["input"], got["0:output.grad"]))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(found[1][0] * 3, found[1][1])


@pytest.mark.parametrize(("reentrant", "action"), [(False, "scale number"), (True, "add tensor")])
def test_a_recompute_inside_the_graph_sees_the_edit(reentrant: bool, action: str) -> None:
    # The eager report counts the recompute too.
    make, model = ACTIONS[action], Net(reentrant=reentrant)
    sites = ["first.fc", "first:output.grad"]
    compare(model, lambda k: {site: make(k) for site in sites}, same_report=False)


def test_edits_in_a_checkpointed_region_of_a_graph_are_counted() -> None:
    compiled = torch.compile(Net(reentrant=False), backend="aot_eager", fullgraph=True)
    with hl.edit(compiled, {"first.fc": hl.zero()}) as handle:  # it would warn of none
        compiled(torch.randn(4, 3)).sum().backward()
    assert "first.fc:output  zero()        1" in str(handle.report())


def test_a_recompute_around_a_graph_sees_an_edit_that_is_gone() -> None:
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Net(reentrant=False)
        if is_compiled:
            model.first.compile(backend="aot_eager")
        with hl.edit(model, {"first.fc": hl.scale(0.5)}):
            loss = model(torch.ones(4, 3)).sum()
        loss.backward()
        found.append([one.grad for one in model.parameters()])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_parameters_are_edited() -> None:
    compare(Net(), lambda k: {"first.fc.weight": hl.scale(0.5 * k), "last.fc.bias:grad": hl.add(k)})


def test_a_vector_is_trained_through_the_graph() -> None:
    model = Net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    grads = []
    for one in (copy.deepcopy(model), compiled):
        vector = torch.ones(3, requires_grad=True)
        with hl.edit(one, {"first": hl.add(vector)}):
            one(torch.ones(4, 3)).square().sum().backward()
        grads.append(vector.grad)
    assert grads[0] is not None
    assert grads[1] is not None
    assert torch.equal(grads[0], grads[1])


def test_patches_take_the_value_of_another_run() -> None:
    model, x = Net(), torch.randn(4, 3)
    counter = count("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for k in (1, 2):
        with hl.capture(compiled, "first", "last.fc") as got:
            compiled(x * k + 1)
        edits = {
            "first": hl.patch(got),
            "last.fc": hl.patch(got, "first:output", visit=0).where(rows=k),
        }
        results = []
        for one in (copy.deepcopy(model), compiled):
            with hl.edit(one, edits):
                results.append(one(x))
        assert torch.equal(*results)
    assert counter.frame_count == 2  # with the capture, and with the edits


def test_variables_are_edited() -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            h = h * 2
            return h.tanh() + x

    compare(
        nn.Sequential(Scored()),
        lambda k: {"0@h[0]": hl.scale(k), "0@h[1]": hl.add(0.5 * k), "0@h[1].grad": hl.scale(k)},
    )


def test_a_graph_that_was_there_comes_back() -> None:
    model, x = Net(), torch.randn(4, 3)
    counter = count("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    before = compiled(x)
    for k in (1, 2, 3):
        with hl.edit(compiled, {"first": hl.add(k)}):
            assert not torch.equal(compiled(x), before)
        assert torch.equal(compiled(x), before)
    assert counter.frame_count == 2


def test_blocks_compiled_one_by_one_share_a_graph() -> None:
    model = nn.Sequential(*[Block() for _ in range(10)])
    counter = count("aot_eager")
    twin, x = copy.deepcopy(model), torch.randn(4, 3, requires_grad=True)
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    with (
        hl.edit(model, {"*.fc": hl.add(VECTOR)}) as handle,
        hl.edit(twin, {"*.fc": hl.add(VECTOR)}),
    ):
        assert torch.equal(model(x), twin(x))
    assert counter.frame_count == 1
    assert str(handle.report()).count("add(tensor(3,))        1") == 10


def test_other_sizes_take_no_other_graph() -> None:
    model = Net()
    counter = count("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    edits = {"first": hl.scale(2).where(rows=-1), "last.fc": hl.swap_rows(0, 1)}
    for size in (4, 5, 8):
        x = torch.randn(size, 3)
        with hl.edit(compiled, edits):
            found = compiled(x)
        with hl.edit(twin := copy.deepcopy(model), edits):
            assert torch.equal(found, twin(x))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_inductor_makes_the_edits_too() -> None:
    model, x = Net(), torch.randn(4, 3)
    compiled = torch.compile(model, fullgraph=True)
    edits = {"first.fc": hl.scale(0.5), "first:output.grad": hl.clip(0.1), "last": hl.add(VECTOR)}
    expected, found = run(copy.deepcopy(model), x, edits), run(compiled, x, edits)
    for address, value in expected.values.items():
        torch.testing.assert_close(found.values[address], value)


@dataclass
class Batch:
    x: Tensor


class Batched(nn.Module):
    def forward(self, batch: Batch | dict[str, Tensor]) -> Tensor:
        return (batch["x"] if isinstance(batch, dict) else batch.x) + 1


@pytest.mark.parametrize(
    "make",
    [Batch, lambda x: OrderedDict(x=x), lambda x: {"x": x}],
    ids=["dataclass", "ordered", "dict"],
)
def test_what_the_caller_has_is_not_changed(make: Callable[[Tensor], Any]) -> None:
    model = nn.Sequential(OrderedDict(part=Batched()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    batch = make(torch.ones(2))
    with hl.edit(compiled, {"part:input.batch.x": hl.scale(3)}):
        outs = [compiled(batch) for _ in range(2)]
    assert [out.tolist() for out in outs] == [[4.0, 4.0]] * 2
    assert (batch["x"] if isinstance(batch, dict) else batch.x).tolist() == [1.0, 1.0]


@dataclass
class Doubled(Batch):
    """Has an attribute that is no field, and may have another one."""

    def __post_init__(self) -> None:
        self.double = self.x * 2


class Making(nn.Module):
    def forward(self, x: Tensor) -> Doubled:
        batch = Doubled(x)
        batch.extra = x + 10
        del batch.double
        return batch


class Adding(nn.Module):
    def forward(self, batch: Doubled) -> Tensor:
        return batch.x + getattr(batch, "double", 0) + getattr(batch, "extra", 0)


def test_a_copied_dataclass_keeps_what_is_no_field() -> None:
    model = nn.Sequential(OrderedDict(part=Adding()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(2)
    plain, extended = Doubled(x), Doubled(x)
    extended.extra = x * 10
    with hl.edit(compiled, {"part:input.batch.x": hl.scale(3)}):
        outs = [compiled(batch).tolist() for batch in (plain, extended, plain)]
    assert outs == [[5.0, 5.0], [15.0, 15.0], [5.0, 5.0]]
    assert vars(plain).keys() == {"x", "double"}
    assert vars(extended).keys() == {"x", "double", "extra"}


def test_a_dataclass_made_in_the_graph_keeps_what_is_no_field() -> None:
    model = nn.Sequential(OrderedDict(made=Making(), part=Adding()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.edit(compiled, {"made:output.x": hl.scale(3)}):
        assert compiled(torch.ones(2)).tolist() == [14.0, 14.0]


@dataclass
class Nothing:
    """Has no attributes at all."""


class Choosing(nn.Module):
    def forward(self, pair: tuple[Nothing, Tensor]) -> Tensor:
        return pair[1] + 1


def test_a_dataclass_without_attributes_is_copied() -> None:
    model = nn.Sequential(OrderedDict(part=Choosing()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.edit(compiled, {"part:input": hl.scale(3)}):
        assert compiled((Nothing(), torch.ones(2))).tolist() == [4.0, 4.0]


@pytest.mark.filterwarnings("ignore::hookline.HooklineWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_edit_of_a_gradient_ends_with_its_block(backend: str) -> None:
    """Also where the graph of the backward that is still to come has it in it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 4)
    compiled = torch.compile(model, backend=backend)

    def find_gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, model[0].weight)[0]

    plain = find_gradient(compiled(x).square().sum())
    with hl.edit(compiled, {"1:output.grad": hl.scale(10.0)}) as edit:
        edited = find_gradient(compiled(x).square().sum())
        late = compiled(x).square().sum()
    torch.testing.assert_close(edited, 10 * plain)
    torch.testing.assert_close(find_gradient(late), plain)
    assert "scale(10.0)        1" in str(edit.report())
