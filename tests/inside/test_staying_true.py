"""Names inside a forward stay true: visits, in-place changes, threads, errors, several sessions."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from small_models import is_clean
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from twins import assert_same, make_input, run

import hookline as hl


class Block(nn.Module):
    """A forward with variables, an operation, a loop and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        for _ in range(2):
            h = torch.sin(h)
        if h.dim() == 3:
            extra = h * 2
            h = extra
        y = h + x
        return y


class Model(nn.Module):
    """One block called twice, and the same block under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.alias = self.second

    def forward(self, x: Tensor) -> Tensor:
        z = self.second(self.first(x))
        z = self.alias(z)
        return z


def make_model() -> Model:
    torch.manual_seed(5)
    return Model()


ADDRESSES = ["@y", "@h[1]", "/sin[0]", "/add"]


def by_hand(block: Block, x: Tensor, changed: str = "", factor: float = 2.0) -> Tensor:
    """Compute a block's forward with one value scaled."""

    def change(name: str, value: Tensor) -> Tensor:
        return value * factor if name == changed else value

    h = block.lin(x)
    h = change("@h[1]", change("/sin[0]", torch.sin(h)))
    h = torch.sin(h)
    return change("@y", change("/add", h + x))


@pytest.mark.parametrize("where", ADDRESSES)
def test_each_visit_has_its_own_values(where: str) -> None:
    model, x = make_model(), make_input()
    with hl.capture(model, f"second{where}", grads=True) as got:
        plain = run(model, model)
    assert_same(plain, run(model, model))
    between = model.first(x)
    for visit, start in enumerate([between, model.second(between)]):
        value = model.second.lin(start).sin()
        if where in ("@y", "/add"):
            value = by_hand(model.second, start)
        assert torch.equal(got[f"second{where}", visit], value)
        assert got[f"second{where}", visit].grad is not None
        assert torch.equal(got["second", visit][where], value)
    with pytest.raises(hl.AmbiguousRead, match="ran 2 times"):
        got[f"second{where}"]
    assert len(got.values(f"second{where}")) == 2
    assert torch.equal(got[f"alias{where}", 1], got[f"second{where}", 1])


@pytest.mark.parametrize("where", ADDRESSES)
@pytest.mark.parametrize("visits", [None, 0, 1])
def test_edit_of_chosen_visits_equals_a_change_by_hand(where: str, visits: int | None) -> None:
    def expected(x: Tensor) -> Tensor:
        z = model.first(x)
        for visit in range(2):
            z = by_hand(model.second, z, where if visits in (None, visit) else "")
        return z

    model = make_model()
    plain, changed = run(model, model), run(model, expected)
    with hl.edit(model, {f"second{where}": hl.scale(2)}, visits=visits):
        assert_same(run(model, model), changed)
    assert is_clean(model)
    assert_same(run(model, model), plain)


@pytest.mark.parametrize("where", ADDRESSES)
def test_edit_of_one_call_leaves_the_others(where: str) -> None:
    model, x = make_model().first, make_input()
    with hl.edit(model, {where: hl.scale(2)}, calls=1):
        outs = [model(x) for _ in range(3)]
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[0], model(x))
    assert torch.equal(outs[1], by_hand(model, x, where))


@pytest.mark.parametrize("where", ADDRESSES)
@pytest.mark.parametrize(
    ("new", "match"),
    [
        (lambda value: value[0], "shape"),
        (lambda value: value.double(), "float64"),
        (lambda value: "text", "str"),
    ],
    ids=["shape", "dtype", "type"],
)
def test_edit_that_does_not_fit_is_refused(where: str, new: Any, match: str) -> None:
    model = make_model()
    handle = hl.edit(model, {f"first{where}": lambda value, at: new(value)})
    with pytest.raises(hl.EditError, match=match) as caught:
        model(make_input())
    handle.remove()
    assert f"first{where[:2]}" in str(caught.value)
    assert is_clean(model)


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        z = y * 3
        return z


@pytest.mark.parametrize("where", ["@y", "/mul[0]"])
def test_value_that_is_changed_in_place_later_is_copied_or_refused(where: str) -> None:
    model, x = Overwriting(), make_input()
    with hl.capture(model, where, "@z") as got:
        model(x)
    assert torch.equal(got[where], x * 2)
    with hl.capture(model, where, "@z", clone=False) as got:
        model(x)
    with pytest.raises(hl.Overwritten, match="changed in place"):
        got[where]
    assert torch.equal(got["@z"], (x * 2 + 1) * 3)


def test_last_assignment_is_copied_before_it_is_changed() -> None:
    model, x = Overwriting(), make_input()
    with hl.capture(model, "@y[-1]") as got:
        model(x)
    assert torch.equal(got["@y[-1]"], x * 2)


def test_observer_may_not_change_a_value_in_place() -> None:
    model = make_model()
    handle = hl.hook(model, "first@h[0]", lambda value, at: value.zero_())
    with pytest.raises(hl.HooklineError, match=r"`first@h\[0\]`.* in place"):
        model(make_input())
    handle.remove()
    assert is_clean(model)


@pytest.mark.parametrize("where", ADDRESSES)
def test_threads_each_have_their_own(where: str) -> None:
    model = make_model().first
    inputs = [torch.full((2, 4), 0.1 * number) for number in range(4)]
    expected = [by_hand(model, x, where).detach() for x in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        outs = [model(inputs[number]) for _ in range(20)]
        wrong.extend(number for out in outs if not torch.equal(out, expected[number]))

    with hl.edit(model, {where: hl.scale(2)}), hl.capture(model, where) as got:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(got.calls) == 80
    assert all(len(call.values(where)) == 1 for call in got.calls)


def _attach(model: Model, number: int) -> Any:
    wheres = [
        {"first@h[1]": hl.scale(2)},
        {"first@y": hl.scale(3)},
        {"first/sin[0]": hl.scale(5)},
        {"first": hl.scale(7)},
    ]
    return hl.edit(model, wheres[number])


def _apply(model: Model, x: Tensor, which: set[int]) -> Tensor:
    h = model.first.lin(x).sin()
    h = h * 5 if 2 in which else h
    h = (h * 2 if 0 in which else h).sin() + x
    h = h * 3 if 1 in which else h
    h = h * 7 if 3 in which else h
    return model.second(model.second(h))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_sessions_may_close_in_every_order(order: tuple[int, ...]) -> None:
    model, x = make_model(), make_input()
    handles = {number: _attach(model, number) for number in range(4)}
    left = set(handles)
    assert torch.equal(model(x), _apply(model, x, left))
    for number in order:
        handles[number].remove()
        left.discard(number)
        assert torch.equal(model(x), _apply(model, x, left))
    assert is_clean(model)


def test_session_that_opens_again_after_another_one() -> None:
    model, x = make_model(), make_input()
    capture = hl.capture(model, "first@h")
    with capture as one:
        model(x)
    with hl.edit(model, {"first@h[0]": hl.zero()}), capture as two:
        model(x)
    assert two["first@h[0]"].count_nonzero() == 0
    assert one["first@h[0]"].count_nonzero() > 0
    assert is_clean(model)


def test_captures_see_what_edits_made_or_what_was_there_before() -> None:
    model, x = make_model(), make_input()
    with (
        hl.edit(model, {"first@y": hl.scale(2), "first/add": hl.scale(3)}),
        hl.capture(model, "first@y", "first/add") as after,
        hl.capture(model, "first@y", "first/add", before_edits=True) as before,
    ):
        model(x)
    plain = by_hand(model.first, x)
    assert torch.equal(before["first/add"], plain)
    assert torch.equal(after["first/add"], plain * 3)
    assert torch.equal(before["first@y"], plain * 3)
    assert torch.equal(after["first@y"], plain * 3 * 2)


def test_closing_within_a_forward_takes_effect_at_once() -> None:
    model, x = make_model().first, make_input()
    seen: list[str] = []

    def close(value: Tensor, at: hl.At) -> None:
        seen.append(at.address)
        handle.remove()

    handle = hl.hook(model, "@h", close)
    out = model(x)
    assert seen == ["@h[0]"]
    assert torch.equal(out, by_hand(model, x))
    assert is_clean(model)


def test_opening_within_a_forward_counts_from_the_next_call() -> None:
    model, x = make_model().first, make_input()
    seen: list[str] = []
    inner: list[hl.Handle] = []

    def open_another(value: Tensor, at: hl.At) -> None:
        if not inner:
            inner.append(hl.hook(model, "@h", lambda value, at: seen.append(at.address)))

    with hl.hook(model, "@h[0]", open_another):
        model(x)
        assert seen == []
        model(x)
    assert seen == ["@h[0]", "@h[1]", "@h[2]"]
    inner[0].remove()
    assert is_clean(model)


@pytest.mark.parametrize("kind", [LookupError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("where", ["@h[1]", "/sin[1]"])
def test_error_in_a_hook_leaves_nothing_behind(kind: type[BaseException], where: str) -> None:
    model, x = make_model(), make_input()

    def fail(value: Any, at: hl.At) -> None:
        raise kind("on purpose")

    handle = hl.hook(model, f"first{where}", fail)
    with pytest.raises(kind):
        model(x)
    assert _get_current_function_mode_stack() == []
    handle.remove()
    assert is_clean(model)
    out = by_hand(model.second, by_hand(model.second, by_hand(model.first, x)))
    assert torch.equal(model(x), out)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if self.kind is not None:
            raise self.kind("on purpose")
        return y * 3


@pytest.mark.parametrize("kind", [LookupError, KeyboardInterrupt])
def test_error_in_the_forward_does_not_confuse_the_next_call(kind: type[BaseException]) -> None:
    model, x = Failing(), make_input()
    with hl.capture(model, "@y", "/mul", clone=True) as got:
        model.kind = kind
        with pytest.raises(kind, match="on purpose"):
            model(x)
        assert _get_current_function_mode_stack() == []
        model.kind = None
        model(x)
    assert torch.equal(got.calls[-1]["@y"], x * 2)
    assert torch.equal(got.calls[-1]["/mul[1]"], x * 6)
    assert is_clean(model)


def test_skipped_module_and_its_variables() -> None:
    model, x = make_model(), make_input()
    with hl.edit(model, {"first@h[1]": hl.scale(2)}):
        with hl.edit(model, {"first": hl.skip(lambda at: at.inputs["x"])}):
            assert torch.equal(model(x), model.second(model.second(x)))
        changed = by_hand(model.first, x, "@h[1]")
        assert torch.equal(model(x), model.second(model.second(changed)))
    twice = hl.skip(lambda at: at.inputs["x"] * 2).where(visits=1)
    with hl.edit(model, {"second": twice}), hl.capture(model, "second@y", "first@y") as got:
        out = model(x)
    assert torch.equal(out, got["second@y"] * 2)
    assert is_clean(model)
