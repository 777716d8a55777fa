"""What stays in memory: nothing after its last use, also when a backward fails half-way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """Let reference counts alone decide, as they do for memory in a training loop."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def _watch_outputs(model: nn.Module) -> list[weakref.ref[Tensor]]:
    """Collect weak references to every output of the first layer."""
    seen: list[weakref.ref[Tensor]] = []
    model[0].register_forward_hook(lambda m, args, output: seen.append(weakref.ref(output)))
    return seen


ATTACH: dict[str, Callable[[nn.Module], Any]] = {
    "output gradient": lambda m: hl.hook(m, "*:output.grad", lambda grad, at: None),
    "input gradient": lambda m: hl.hook(m, "*:input.grad", lambda grad, at: None),
    "backward hook": lambda m: hl.register_backward_hook(m, "*", lambda *a: None),
    "backward pre hook": lambda m: hl.register_backward_pre_hook(m, "*", lambda *a: None),
    "value": lambda m: hl.hook(m, "*", lambda value, at: None),
    "parameter": lambda m: hl.hook(m, "*.weight:grad", lambda grad, at: None),
    "edit": lambda m: hl.edit(m, {"0": hl.scale(2), "0:output.grad": hl.scale(2)}),
}


@pytest.mark.parametrize("kind", ATTACH)
def test_many_steps_leave_no_objects_behind(kind: str) -> None:
    """Torch's multi-grad hook in `any` mode keeps an entry for every backward."""
    model = _net()
    ATTACH[kind](model)
    x = torch.ones(2, 4, requires_grad=True)

    def steps(count: int) -> int:
        for _ in range(count):
            model(x).sum().backward()
        gc.collect()
        return len(gc.get_objects())

    steps(3)
    before = steps(3)
    assert steps(100) - before < 20


@pytest.mark.parametrize("kind", ATTACH)
def test_activations_go_with_the_graph(kind: str) -> None:
    model = _net()
    outputs = _watch_outputs(model)
    ATTACH[kind](model)
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    model(torch.ones(2, 4))
    assert [output() for output in outputs] == [None, None]


@pytest.mark.parametrize("kind", ["backward hook", "output gradient", "input gradient"])
def test_failing_backwards_keep_no_gradients(kind: str) -> None:
    """Torch's multi-grad hook in `all` mode keeps the gradients of every pass that failed."""
    model = _net()
    grads: list[weakref.ref[Tensor]] = []

    def fail(grad: Tensor) -> None:
        grads.append(weakref.ref(grad))
        raise ValueError("on purpose")

    ATTACH[kind](model)
    for _ in range(20):
        x = torch.ones(2, 4, requires_grad=True)
        hidden = x * 2
        hidden.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            model(hidden).sum().backward()
    del x, hidden
    assert len(grads) == 20
    assert [grad() for grad in grads] == [None] * 20


def test_failing_backwards_keep_no_visits_of_backward_hooks() -> None:
    """A pass that fails never ends, so what waits for its end must not wait for ever."""
    model = _net()
    hl.register_backward_hook(model, "*", lambda *a: None)
    model[1].register_forward_hook(lambda m, args, output: None)

    def fail_once() -> None:
        hidden = model[0](torch.ones(2, 4))
        hidden.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[2](model[1](hidden)).sum().backward()

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    fail_once()
    before = objects()
    for _ in range(50):
        fail_once()
    assert objects() - before < 20


def test_capture_does_not_hold_the_graph() -> None:
    """A stored output keeps every activation before it alive."""
    model = _net()
    outputs = _watch_outputs(model)
    with hl.capture(model, "2") as got:
        model(torch.ones(2, 4))
    assert outputs[0]() is None
    assert not got["2"].output.requires_grad


def test_capture_holds_the_graph_when_asked() -> None:
    model = _net()
    outputs = _watch_outputs(model)
    with hl.capture(model, "2", keep_graph=True) as got:
        model(torch.ones(2, 4))
    assert got["2"].output.requires_grad
    got["2"].output.sum().backward()
    assert model[0].weight.grad is not None
    assert len(outputs) == 1


def test_dropped_results_free_the_tensors_at_once() -> None:
    model = _net()
    with hl.capture(model, "*", grads=True, inputs=True) as got:
        model(torch.ones(2, 4)).sum().backward()
    kept = [weakref.ref(value) for value in got.tensors().values()]
    assert all(one() is not None for one in kept)
    del got
    assert all(one() is None for one in kept)


def test_captured_select_does_not_hold_the_whole_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, 1000))
    with hl.capture(model, "0", select=(slice(None), 0)) as got:
        model(torch.ones(2, 4))
    assert got["0"].output.untyped_storage().nbytes() == 8


def test_model_is_freed_at_once_after_a_capture() -> None:
    model = _net()
    with hl.capture(model, "*", grads=True) as got:
        model(torch.ones(2, 4)).sum().backward()
    gone = weakref.ref(model)
    del model
    assert gone() is None
    assert got["0"].output.shape == (2, 4)


def test_model_with_hooks_still_attached_is_freed_by_the_collector() -> None:
    """A bound method as hook is a cycle through the model; the collector can break it."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.handle = hl.hook(self, "linear", self.note)

        def note(self, value: Tensor, at: hl.At) -> None:
            self.noted = value

    model = Own()
    model.linear(torch.ones(1, 2))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_tensor_hook_does_not_keep_its_tensor() -> None:
    """Hookline's own part holds the tensor weakly; so a plain function leaves no cycle."""
    y = torch.ones(10, requires_grad=True) * 2
    hl.register_hook(y, lambda grad: None)
    view = y.view(2, 5)
    hl.register_hook(view, lambda grad: None)
    gone = weakref.ref(y), weakref.ref(view)
    del y, view
    assert [one() for one in gone] == [None, None]


def test_error_in_a_forward_leaves_no_activations() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("on purpose")

    model = nn.Sequential(nn.Linear(4, 4), Failing())
    outputs = _watch_outputs(model)
    for kind in ("output gradient", "input gradient", "backward hook", "value"):
        ATTACH[kind](model)
    for _ in range(5):
        with pytest.raises(ValueError, match="on purpose"):
            model(torch.ones(2, 4, requires_grad=True))
    assert [output() for output in outputs] == [None] * 5


def test_graph_dropped_without_backward_frees_everything() -> None:
    model = _net()
    outputs = _watch_outputs(model)
    hl.register_backward_hook(model, "**", lambda *a: None)
    hl.hook(model, "**:input.grad", lambda grad, at: None)
    loss = model(torch.ones(2, 4, requires_grad=True)).sum()
    del loss
    assert outputs[0]() is None
