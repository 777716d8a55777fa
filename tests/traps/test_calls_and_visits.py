"""Which call and which visit a value belongs to, where torch's hooks only say `a module ran`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class Twice(nn.Module):
    """Call one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Tied(nn.Module):
    """Hold one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(2, 2)
        self.dec = self.enc

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(torch.relu(self.enc(x)))


class Recursive(nn.Module):
    """Call itself."""

    def forward(self, x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else self(x * 2, depth - 1) + 1


class Failing(nn.Module):
    """Raise what it is told to, after its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.error is not None:
            raise self.error
        return self.second(x)


def test_module_called_twice_pairs_each_value_with_its_own_gradient() -> None:
    model = Twice()
    x = torch.randn(3, 2)
    first = model.layer(x)
    second = model.layer(first.tanh())
    gradients = torch.autograd.grad(second.square().sum(), [first, second])

    with hl.capture(model, "layer", grads=True) as got:
        model(x).square().sum().backward()

    for visit, (value, gradient) in enumerate(zip((first, second), gradients, strict=True)):
        assert torch.equal(got["layer", visit].output, value)
        assert torch.equal(got["layer", visit].output.grad, gradient)


def test_module_called_twice_is_not_read_without_a_visit() -> None:
    model = Twice()
    with hl.capture(model, "layer") as got:
        model(torch.ones(1, 2))
    with pytest.raises(hl.AmbiguousRead, match="ran 2 times"):
        got["layer"]


def test_tied_module_has_both_names_and_one_series_of_visits() -> None:
    model = Tied()
    x = torch.randn(1, 2)
    with hl.capture(model, "enc", "dec") as got:
        out = model(x)
    assert got["enc", 0].names == ("enc", "dec")
    assert torch.equal(got["enc", 0].output, model.enc(x))
    assert torch.equal(got["dec", 1].output, out)
    assert len(got) == 2


def test_edit_of_a_tied_module_by_either_name_applies_to_every_visit() -> None:
    model = Tied()
    x = torch.randn(1, 2)
    for name in ("enc", "dec"):
        with hl.edit(model, {name: hl.zero()}):
            assert torch.equal(model(x), torch.zeros(1, 2))


def test_recursive_root_is_one_call_with_a_visit_for_each_level() -> None:
    model = Recursive()
    x = torch.ones(1)
    with hl.capture(model, "", inputs=True) as got:
        model(x, 2)
        model(x, 1)
    assert len(got.calls) == 2
    seen = [(one.call, one.visit, one.inputs["depth"], one.output.item()) for one in got]
    # x=1 goes in at depth 2, 2 at depth 1, 4 at depth 0; each way out adds one.
    assert sorted(seen) == [
        (0, 0, 2, 6.0),
        (0, 1, 1, 5.0),
        (0, 2, 0, 4.0),
        (1, 0, 1, 3.0),
        (1, 1, 0, 2.0),
    ]


def test_recursive_root_has_the_gradient_of_each_level() -> None:
    model = Recursive()
    x = torch.ones(1, requires_grad=True)
    with hl.capture(model, "", ":input.x", grads=True) as got:
        (model(x, 2) * 3).sum().backward()
    assert [got["", level].output.grad.item() for level in range(3)] == [3.0, 3.0, 3.0]
    assert [got[":input.x.grad", level].item() for level in range(3)] == [12.0, 6.0, 3.0]
    assert x.grad.item() == 12.0


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_call_that_raised_does_not_shift_the_next_one(error: BaseException) -> None:
    model = Failing()
    x = torch.randn(1, 2)
    with hl.capture(model, "**", inputs=True, grads=True) as got:
        model.error = error
        with pytest.raises(type(error)):
            model(x)
        model.error = None
        out = model(x)
        out.sum().backward()

    broken, whole = got.calls
    assert torch.equal(broken["first"].output, whole["first"].output)
    with pytest.raises(hl.NotCaptured):
        broken["second"]
    assert [(one.path, one.visit) for one in whole] == [("", 0), ("first", 0), ("second", 0)]
    assert torch.equal(whole[""].output, out)
    assert torch.equal(whole["second:output.grad"], torch.ones(1, 2))


def test_interrupt_deep_inside_leaves_no_visit_behind() -> None:
    """A BaseException skips torch's own post hooks; no frame of it may stay on the stack."""

    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.interrupts = True

        def forward(self, x: Tensor) -> Tensor:
            if self.interrupts:
                raise KeyboardInterrupt
            return x + 1

    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), Interrupted()))
    seen: list[tuple[str, int, int | None]] = []
    with hl.hook(model, "**", lambda value, at: seen.append((at.path, at.call, at.visit))):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model(torch.ones(1))
        model[1][1].interrupts = False
        seen.clear()
        assert model(torch.ones(1)).item() == 2.0
    assert seen == [("0", 2, 0), ("1.0", 2, 0), ("1.1", 2, 0), ("1", 2, 0), ("", 2, 0)]


def test_interrupted_call_is_forgotten_when_a_child_is_called_next() -> None:
    model = Failing()
    with hl.capture(model, "**") as got:
        model.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2))
        model.error = None
        model.second(torch.ones(1, 2))
        model(torch.zeros(1, 2))
    last = got.calls[-1]
    assert torch.equal(last["second"].output, model(torch.zeros(1, 2)))
    assert [(one.path, one.visit) for one in last] == [("first", 0), ("second", 0), ("", 0)]


def test_exception_caught_inside_forward_keeps_the_order_of_visits() -> None:
    class Retrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flaky = Failing()
            self.last = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.flaky.error = RuntimeError("once")
            try:
                x = self.flaky(x)
            except RuntimeError:
                self.flaky.error = None
                x = self.flaky(x)
            return self.last(x)

    model = Retrying()
    x = torch.randn(1, 2)
    with hl.capture(model, "**", grads=True) as got:
        out = model(x)
        out.sum().backward()
    assert len(got.calls) == 1
    # The visit that raised counts, and has no value.
    assert torch.equal(got["flaky"].output, model.flaky(x))
    assert got["flaky"].visit == 1
    assert torch.equal(got["flaky.first", 0].output, got["flaky.first", 1].output)
    assert torch.equal(got["flaky.second"].output, got["flaky"].output)
    assert torch.equal(got["last"].output, out)
    assert torch.equal(got["flaky:output.grad"], torch.ones(1, 2) @ model.last.weight)


def test_call_by_keyword_names_the_same_values_as_by_position() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    layer = model[0]
    with hl.capture(model, "0", inputs=True) as got:
        layer(torch.ones(1, 2))
        layer(input=torch.zeros(1, 2))
    assert torch.equal(got["0:input.input", 0], torch.ones(1, 2))
    assert torch.equal(got["0:input.input", 1], torch.zeros(1, 2))


def test_edit_of_an_input_reaches_a_keyword_argument() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)

        def forward(self, *, hidden_states: Tensor) -> Tensor:
            return self.body(input=hidden_states)

    model = Root()
    with hl.edit(model, {":input.hidden_states": hl.zero(), "body:input.input": hl.add(1)}):
        out = model(hidden_states=torch.randn(1, 2))
    assert torch.equal(out, model.body(torch.ones(1, 2)))


def test_passed_and_received_arguments_are_both_there() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = hl.capture(model, "0:input", before_edits=True)
    after = hl.capture(model, "0:input")
    with hl.edit(model, {"0:input.input": hl.zero()}), before as passed, after as received:
        model(torch.ones(1, 2))
    assert torch.equal(passed["0:input.input"], torch.ones(1, 2))
    assert torch.equal(received["0:input.input"], torch.zeros(1, 2))


def test_submodule_called_outside_the_root_is_a_call_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x, other = torch.randn(1, 2), torch.randn(1, 2)
    with hl.capture(model, "*") as got:
        model(x)
        alone = model[0](other)
        again = model[0](other + 1)
        model(x)
    assert [[(one.path, one.visit) for one in call] for call in got.calls] == [
        [("0", 0), ("1", 0)],
        [("0", 0), ("0", 1)],
        [("0", 0), ("1", 0)],
    ]
    assert torch.equal(got.calls[1]["0", 0].output, alone)
    assert torch.equal(got.calls[1]["0", 1].output, again)


def test_root_called_without_grad_keeps_values_and_says_why_there_is_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with (
        pytest.warns(hl.HooklineWarning, match=r"0:output\.grad: no gradient: it ran under"),
        hl.capture(model, "0", grads=True) as got,
        torch.no_grad(),
    ):
        out = model(torch.ones(1, 2))
    assert torch.equal(got["0"].output, out)
    with pytest.raises(hl.NotCaptured, match="no_grad"):
        got["0:output.grad"]


def test_gradient_comes_for_the_call_with_grad_among_those_without() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.capture(model, "0", grads=True) as got:
        with torch.no_grad():
            model(torch.ones(1, 2))
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(hl.NotCaptured, match="no_grad"):
        got.calls[0]["0:output.grad"]
    assert torch.equal(got.calls[1]["0:output.grad"], torch.ones(1, 2))
