"""What a hook returns, in which order hooks run, and who owns them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class Anything(nn.Module):
    """Return what it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def _is_clean(model: nn.Module) -> bool:
    return not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        for module in model.modules()
    )


def test_observer_that_returns_something_changes_nothing() -> None:
    model = nn.Sequential(nn.Identity())
    first: dict[str, Tensor] = {}
    with hl.hook(model, "0", lambda value, at: first.setdefault("x", value)):
        assert model(torch.tensor([1.0])).item() == 1.0
        assert model(torch.tensor([2.0])).item() == 2.0
    with hl.hook(model, "0", lambda value, at: value.requires_grad and None):
        assert model(torch.tensor([3.0])).item() == 3.0


def test_observer_that_writes_into_the_value_raises_and_is_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    handle = hl.hook(model, "0", lambda value, at: value.zero_())
    with pytest.raises(hl.HooklineError, match=r"0:output.*changed the value in place"):
        model(torch.ones(1, 2))
    assert not handle.is_live
    assert _is_clean(model)


def test_edit_that_returns_none_raises() -> None:
    model = nn.Sequential(nn.Identity())
    with (
        pytest.raises(hl.EditError, match="returned None"),
        hl.edit(model, {"0": lambda value, at: None}),
    ):
        model(torch.ones(1))
    assert _is_clean(model)


def test_edits_that_an_error_removed_are_named_even_if_the_error_was_caught() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    removed = r"1:output: zero\(\): an error in a hook removed all edits before"
    told = pytest.warns(hl.HooklineWarning, match=removed)
    with (
        told,
        hl.edit(model, {"0": lambda value, at: None, "1": hl.zero()}),
    ):
        with pytest.raises(hl.EditError, match="returned None"):
            model(torch.ones(1))
        assert model(torch.ones(1)).item() == 1.0


@pytest.mark.parametrize("bad", [False, [1], torch.ones(3), torch.ones(1, dtype=torch.int64)])
def test_edit_that_returns_something_else_raises(bad: Any) -> None:
    model = nn.Sequential(nn.Identity())
    with (
        pytest.raises(hl.EditError, match="`0:output`, call 0, visit 0"),
        hl.edit(model, {"0": lambda value, at: bad}),
    ):
        model(torch.ones(1))
    assert _is_clean(model)


def test_pre_hook_returning_a_list_raises_instead_of_guessing() -> None:
    model = nn.Sequential(Anything())
    with (
        hl.register_forward_pre_hook(model, "0", lambda module, args: [7, 8]),
        pytest.raises(hl.EditError, match="may mean one argument or several"),
    ):
        model[0](1)


@pytest.mark.parametrize("bad", [(7, 8), (7,), 7, [[7], {}]])
def test_pre_hook_with_kwargs_returning_anything_but_args_and_kwargs_raises(bad: Any) -> None:
    model = nn.Sequential(Anything())
    with (
        hl.register_forward_pre_hook(model, "0", lambda m, a, k: bad, with_kwargs=True),
        pytest.raises(hl.EditError, match=r"Return \(args, kwargs\)"),
    ):
        model[0](1)


def test_pre_hook_returning_args_and_kwargs_is_heard() -> None:
    model = nn.Sequential(Anything())
    with hl.register_forward_pre_hook(
        model, "0", lambda m, a, k: (a[::-1], {**k, "d": 4}), with_kwargs=True
    ):
        assert model[0](1, 2, c=3) == ((2, 1), {"c": 3, "d": 4})


def test_pre_hook_sees_and_replaces_arguments_passed_by_keyword() -> None:
    """Torch shows such a hook `()` and then passes the argument twice."""

    class Layer(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states

    model = nn.Sequential(Layer())
    seen = []

    def zeros(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(len(args))
        return (torch.zeros_like(args[0]),)

    with hl.register_forward_pre_hook(model, "0", zeros):
        assert model[0](hidden_states=torch.ones(1)).item() == 0.0
        assert model[0](torch.ones(1)).item() == 0.0
    assert seen == [1, 1]


def test_generator_and_coroutine_forwards_are_refused_by_name_and_passed_over_by_patterns() -> None:
    class Generating(nn.Module):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            yield x * 1
            yield x * 2

    class Awaiting(nn.Module):
        async def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)
            self.generating = Generating()
            self.awaiting = Awaiting()

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            return sum(self.generating(x)) + asyncio.run(self.awaiting(x))

    model = Model()
    for name, kind in (("generating", "generator"), ("awaiting", "coroutine")):
        for attach in (hl.capture, lambda m, n: hl.edit(m, {n: hl.zero()})):
            with pytest.raises(hl.UnsupportedModel, match=f"its forward is a {kind}"):
                attach(model, name).__enter__()
    assert _is_clean(model)
    with hl.capture(model) as got:
        out = model(torch.ones(1, 2))
    assert {one.path for one in got} == {"", "body"}
    assert torch.equal(got[""].output, out)


def test_generator_returned_by_a_plain_forward_is_refused_when_it_shows() -> None:
    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            return iter(item for item in (x, x))

    model = nn.Sequential(Hidden())
    never = pytest.warns(hl.HooklineWarning, match="0:output: never returned: it was called, but")
    refused = pytest.raises(hl.UnsupportedModel, match="has not run yet")
    with never, hl.capture(model, "0"), refused:
        model[0](torch.ones(1))


def test_hooks_run_in_the_documented_order() -> None:
    """Before edits, edits (prepended first), then observers; torch's own hooks came first."""
    model = nn.Sequential(nn.Identity())
    order: list[str] = []

    def note(name: str) -> Any:
        return lambda value, at: order.append(name) or hl.KEEP

    model[0].register_forward_hook(lambda *_: order.append("torch's"))
    handles = [
        hl.hook(model, "0", note("observer")),
        hl.hook(model, "0", note("edit 1"), edit=True),
        hl.hook(model, "0", note("edit 2"), edit=True),
        hl.hook(model, "0", note("prepended edit"), edit=True, prepend=True),
        hl.hook(model, "0", note("second observer")),
        hl.hook(model, "0", note("prepended observer"), prepend=True),
        hl.hook(model, "0", note("before edits"), before_edits=True),
    ]
    model(torch.ones(1))
    assert order == [
        "torch's",
        "before edits",
        "prepended edit",
        "edit 1",
        "edit 2",
        "prepended observer",
        "observer",
        "second observer",
    ]
    for handle in handles:
        handle.remove()


def test_torch_hook_added_while_attached_is_seen_by_a_later_capture() -> None:
    """What a capture holds is what the next module receives, whoever changed it."""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with hl.hook(model, "0", lambda value, at: None):
        handle = model[0].register_forward_hook(lambda module, args, output: output * 10)
        with hl.capture(model, "0", "1:input") as got:
            model(torch.ones(1))
        handle.remove()
    assert got["0"].output.item() == 10.0
    assert got["1:input.input"].item() == 10.0


def test_dropped_handles_are_listed_and_removable() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    calls: list[int] = []

    def install() -> None:
        hl.hook(model, "0", lambda value, at: calls.append(1))

    install()
    install()
    model(torch.ones(1, 2))
    assert len(calls) == 2
    rows = [row for row in hl.inventory(model) if row["where"] == "0"]
    assert [row["kind"] for row in rows] == ["hookline"]
    assert rows[0]["function"].count("hl.hook('0')") == 2


def test_handle_is_idempotent_and_leaves_others_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    seen: list[str] = []
    first = hl.hook(model, "0", lambda value, at: seen.append("first"))
    second = hl.hook(model, "0", lambda value, at: seen.append("second"))
    first.remove()
    first.remove()
    model(torch.ones(1, 2))
    assert seen == ["second"]
    assert (first.is_live, second.is_live) == (False, True)
    with second:
        pass
    assert _is_clean(model)


def test_handle_removed_inside_its_own_hook_is_safe() -> None:
    """Torch's own self-removing hooks break the loop over them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    seen: list[str] = []

    def once(value: Tensor, at: hl.At) -> None:
        seen.append(at.path)
        handle.remove()

    handle = hl.hook(model, "**", once)
    x = torch.ones(1, 2)
    out = model(x)
    assert seen == ["0"]
    assert _is_clean(model)
    assert torch.equal(model(x), out)
