"""Corners of looking inside a forward: threads, a backward in it, calls past hooks, copies."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from small_models import is_clean
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import make_input

import hookline as hl


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lin(x))
        z = y * y
        return z


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + x


def test_threads_that_begin_together_lose_nothing() -> None:
    model, x = Whole(), make_input()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            errors: list[BaseException] = []
            start = threading.Barrier(6)

            def work(start: threading.Barrier = start, errors: list[Any] = errors) -> None:
                start.wait()
                try:
                    model(x)
                except BaseException as error:
                    errors.append(error)

            with hl.capture(model, "part@y", "part@z", "part") as got:
                threads = [threading.Thread(target=work) for _ in range(6)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            assert errors == []
            assert sorted(call.number for call in got.calls) == list(range(6))
            assert len(got.values("part@y")) == len(got.values("part@z")) == 6
    finally:
        sys.setswitchinterval(before)


class Energy(nn.Module):
    """Give forces: a gradient that is taken inside forward."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.part = Part()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            energy = self.part(x)
        else:
            energy = checkpoint(self.part, x, use_reentrant=self.use_reentrant)
        energy.sum().backward()
        assert x.grad is not None
        return torch.relu(x.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_operation_edit_is_repeated_in_a_recompute_inside_a_forward(use_reentrant: bool) -> None:
    found = []
    for how in (None, use_reentrant):
        torch.manual_seed(0)
        model, x = Energy(how), make_input().detach().requires_grad_()
        with hl.edit(model, {"part/tanh": hl.scale(0.5), "/relu": hl.scale(1.0)}):
            found.append(model(x))
    torch.testing.assert_close(found[0], found[1])


class Direct(nn.Module):
    """Call another forward past its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        a = self.inner.forward(x)
        return torch.relu(a * -1) + x


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * 3


def test_operations_of_a_forward_called_directly_are_its_own() -> None:
    model, x = Direct(), make_input()
    for more in ([], ["inner/relu"], ["inner@return"]):
        with hl.capture(model, "/relu", *more) as got:
            model(x)
        assert torch.equal(got["/relu"], torch.relu(torch.relu(x) * -3))


def test_gradient_of_an_argument_is_its_part_also_when_forward_is_called_directly() -> None:
    model = Direct()
    x = make_input().detach().abs().requires_grad_()
    with hl.capture(model, "inner@x", grads=True) as got:
        model(x).sum().backward()
    assert torch.equal(got["inner@x"].grad, torch.zeros_like(x))
    with hl.capture(model, "inner@x", "inner/relu:input[0]", grads=True) as got:
        model.inner.forward(x).sum().backward()
    assert torch.equal(got["inner@x"].grad, torch.full_like(x, 3))


class Recurring(nn.Module):
    def forward(self, x: Tensor, left: int = 2) -> Tensor:
        y = x * 2
        return self.again(y, left - 1) if left else y

    def again(self, x: Tensor, left: int) -> Tensor:
        return self.forward(x, left)


@pytest.mark.parametrize("options", [{}, {"grads": True}, {"clone": True}])
def test_forward_that_calls_itself_through_a_method_is_one_visit(options: dict[str, Any]) -> None:
    model = nn.Sequential(Recurring())
    with hl.capture(model, "0@y", **options) as got:
        model(make_input()).sum().backward()
    assert [visit.visit for visit in got] == [0]
    assert len(got.values("0@y")) == 3


class Keeping(nn.Module):
    """Have an attribute that notices how often it is set and read."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    @property
    def state(self) -> Tensor:
        self.log.append("read")
        return self._state

    @state.setter
    def state(self, value: Tensor) -> None:
        self.log.append("set")
        self._state = value

    def forward(self, x: Tensor) -> Tensor:
        self.state, y = x + 1, x + 2
        self.state += y
        _, z, _ = x + 3, x + 4, x + 5
        return self.state + z


def test_properties_are_set_and_read_as_often_as_without() -> None:
    model, x = Keeping(), make_input()
    plain = model(x)
    expected, model.log = model.log, []
    with hl.capture(model, "@self.state", "@_") as got:
        assert torch.equal(model(x), plain)
    assert model.log == expected
    assert torch.equal(got["@self.state[1]"], (x + 1) + (x + 2))
    assert [torch.equal(a, x + b) for a, b in zip(got.values("@_"), (3, 5), strict=True)] == [
        True,
        True,
    ]
    with hl.edit(model, {"@self.state[0]": hl.zero()}):
        assert torch.equal(model(x), (torch.zeros_like(x) + (x + 2)) + (x + 4))


class Handing(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def part(self, h: Tensor) -> Tensor:
        z = torch.tanh(h) * h
        return z.sin()

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if self.use_reentrant is None:
            return self.part(h)
        return checkpoint(self.part, h, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("edits", [{"@part.z": hl.scale(3)}, {"@part.z[0]": hl.noise(0.5)}])
def test_function_that_is_handed_over_is_edited_in_its_recompute_too(
    use_reentrant: bool, is_after: bool, edits: dict[str, Any]
) -> None:
    found = []
    for how in (None, use_reentrant):
        torch.manual_seed(3)
        model = Handing(how)
        handle = hl.edit(model, edits)
        out = model(make_input())
        if is_after:
            handle.remove()
        out.sum().backward()
        handle.remove()
        found.append([out.detach(), *(p.grad for p in model.parameters())])
        del out
        gc.collect()
        assert is_clean(model)
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right)


def test_values_of_a_function_that_is_handed_over_are_kept_once() -> None:
    model = Handing(False)
    with hl.capture(model, "@part.z", grads=True) as got:
        model(make_input()).sum().backward()
    assert len(got.values("@part.z")) == 1
    assert got["@part.z"].grad is not None


class CopiesItself(Part):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new


@pytest.mark.parametrize("where", ["0@y", "0/tanh", "0@y:grad"])
def test_copy_that_a_class_makes_itself_is_its_own(where: str) -> None:
    model, x = nn.Sequential(CopiesItself()), make_input()
    with hl.edit(model, {where: hl.scale(2)}):
        twin = copy.deepcopy(model)
        model(x).sum().backward()
    nn.init.ones_(twin[0].lin.weight)
    assert torch.equal(twin(x), torch.tanh(twin[0].lin(x)) ** 2)
    with hl.capture(twin, "0@y", "0") as got:
        twin(x)
    assert torch.equal(got["0@y"], torch.tanh(twin[0].lin(x)))
    assert not {"forward", "__getstate__"} & set(vars(twin[0]))


@pytest.mark.parametrize("where", ["part@y", "part/tanh", "part@y[-1]", "**@**", "**/*"])
def test_model_is_freed_at_once(where: str) -> None:
    model = Whole()
    gc.collect()
    gc.disable()
    try:
        with hl.capture(model, where):
            model(make_input())
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore")  # the compiler's remarks about what it cannot trace
@pytest.mark.parametrize("where", ["part/tanh", "part@y"])
def test_compiling_while_attached_is_refused_or_right(where: str) -> None:
    model, x = Whole(), make_input()
    plain = model(x)
    with hl.edit(model, {where: hl.scale(2)}), hl.capture(model, where) as got:
        edited = model(x)
        try:
            compiled = torch.compile(model, backend="eager")(x)
        except hl.UnsupportedModel:
            compiled = edited
        else:
            assert len(got.values(where)) == 2
        assert torch.equal(compiled, edited)
    torch._dynamo.reset()
    assert not torch.equal(edited, plain)
    assert torch.equal(torch.compile(model, backend="eager")(x), plain)


def test_closing_in_mid_forward_ends_the_capture() -> None:
    class Closing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = x + 1
            close()
            b = a + 1
            return b

    model = nn.Sequential(Closing())
    capture = hl.capture(model, "0@a", "0@b")
    got = capture.__enter__()

    def close() -> None:
        with pytest.warns(hl.HooklineWarning):
            capture.__exit__(None, None, None)

    model(make_input())
    assert "0@a" in got
    assert "0@b" not in got
    assert is_clean(model)


class Binding:
    """A decorator that binds as it likes."""

    def __init__(self, function: Any) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __get__(self, owner: Any, kind: type) -> Any:
        return functools.partial(self.function, owner)


class Bound(nn.Module):
    @Binding
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return torch.tanh(y)


@pytest.mark.parametrize("where", ["0@y", "0/mul"])
def test_forward_behind_a_descriptor_is_reached(where: str) -> None:
    model, x = nn.Sequential(Bound()), make_input()
    with hl.capture(model, where, grads=True) as got:
        model(x).sum().backward()
    assert torch.equal(got[where], x * 2)
    torch.testing.assert_close(got[where].grad, 1 - torch.tanh(x.detach() * 2) ** 2)
    with hl.edit(model, {where: hl.zero()}):
        assert torch.equal(model(x), torch.zeros_like(x))
    assert is_clean(model)
