"""Several captures and edits on the same modules at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class Nested(nn.Module):
    """A root with a part that is a model of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.part = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.part(self.stem(x)))


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_nested_captures_hold_the_same_values_and_gradients() -> None:
    model = Nested()
    x = torch.randn(1, 2)
    with hl.capture(model, "stem", grads=True) as outer:
        with hl.capture(model, "stem", grads=True) as inner:
            model(x).sum().backward()
        model(x + 1).sum().backward()
    assert len(inner.calls) == 1
    assert len(outer.calls) == 2
    for address in ("stem:output", "stem:output.grad"):
        assert torch.equal(inner[address], outer.calls[0][address])
        assert not torch.equal(inner[address], outer.calls[1][address])
    assert _hooks(model) == 0


def test_sessions_closed_out_of_order_leave_each_other_alone() -> None:
    model = Nested()
    first = hl.capture(model, "stem")
    second = hl.capture(model, "stem", "part.0")
    got = first.__enter__()
    more = second.__enter__()
    model(torch.ones(1, 2))
    first.__exit__(None, None, None)
    out = model(torch.zeros(1, 2))
    second.__exit__(None, None, None)
    assert (len(got.calls), len(more.calls)) == (1, 2)
    assert torch.equal(more.calls[1]["part.0", 1].output.tanh(), out)
    assert _hooks(model) == 0


def test_two_roots_count_their_own_calls_on_the_same_modules() -> None:
    model = Nested()
    with hl.capture(model, "part.0") as whole, hl.capture(model.part, "0") as part:
        model(torch.ones(1, 2))
        model(torch.zeros(1, 2))
    # The part is called twice in each call of the model: four calls of the part, one visit each.
    assert [(one.call, one.visit) for one in whole] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(one.call, one.visit) for one in part] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for mine, theirs in zip(whole, part, strict=True):
        assert torch.equal(mine.output, theirs.output)


def test_interrupt_under_two_roots_leaves_both_counting_right() -> None:
    model = Nested()
    interrupting = hl.hook(model, "part.0", _interrupt, edit=True, visits=1, calls=0)
    with hl.capture(model, "**") as whole, hl.capture(model.part, "**") as part, interrupting:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2))
        out = model(torch.zeros(1, 2))
    assert [(one.path, one.visit) for one in whole.calls[1]] == [
        ("stem", 0),
        ("part.0", 0),
        ("part.1", 0),
        ("part", 0),
        ("part.0", 1),
        ("part.1", 1),
        ("part", 1),
        ("", 0),
    ]
    assert torch.equal(whole.calls[1][""].output, out)
    assert torch.equal(part.calls[-1][""].output, out)
    assert [len(call) for call in part.calls] == [3, 3, 3]  # the one interrupted kept nothing


def _interrupt(value: Any, at: hl.At) -> Any:
    raise KeyboardInterrupt


def test_capture_around_an_edit_sees_what_flows_on() -> None:
    model = Nested()
    x = torch.ones(1, 2)
    with hl.capture(model, "stem") as got, hl.edit(model, {"stem": hl.zero()}):
        model(x)
    assert torch.equal(got["stem"].output, torch.zeros(1, 2))


def test_edit_around_a_capture_sees_what_flows_on() -> None:
    model = Nested()
    x = torch.ones(1, 2)
    with hl.edit(model, {"stem": hl.scale(2)}), hl.capture(model, "stem", grads=True) as got:
        out = model(x)
        out.sum().backward()
    start = (model.stem(x) * 2).detach().requires_grad_()
    expected = model.part(model.part(start))
    expected.sum().backward()
    assert torch.equal(got["stem"].output, start)
    assert torch.equal(out, expected)
    assert torch.equal(got["stem:output.grad"], start.grad)


def test_value_that_an_edit_cut_from_the_graph_is_said_to_have_no_gradient() -> None:
    model = Nested()
    cut = pytest.warns(hl.HooklineWarning, match="stem:output.grad: no gradient")
    with cut, hl.edit(model, {"stem": hl.zero()}), hl.capture(model, "stem", grads=True) as got:
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(hl.NotCaptured, match="requires grad"):
        got["stem:output.grad"]


def test_capture_before_edits_sees_what_the_module_made() -> None:
    model = Nested()
    x = torch.ones(1, 2)
    with (
        hl.capture(model, "stem", before_edits=True) as got,
        hl.edit(model, {"stem": hl.scale(2)}),
    ):
        model(x)
    assert torch.equal(got["stem"].output, model.stem(x))


def test_gradient_edit_and_gradient_capture_in_either_order() -> None:
    """A capture shows the gradient as it flows on, whichever was attached first."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    edits = {"0:output.grad": hl.scale(10)}
    with (
        hl.capture(model, "0", grads=True) as outer,
        hl.edit(model, edits),
        hl.capture(model, "0", grads=True) as inner,
    ):
        model(x).sum().backward()
    expected = 10 * model[1].weight.sum(0, keepdim=True)
    torch.testing.assert_close(outer["0:output.grad"], expected)
    assert torch.equal(inner["0:output.grad"], outer["0:output.grad"])
    torch.testing.assert_close(model[0].bias.grad, expected[0])


def test_capture_opened_in_the_middle_of_a_forward_does_not_disturb_the_outer_one() -> None:
    class Curious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)
            self.tail = nn.Tanh()
            self.inner: hl.Captured | None = None

        def forward(self, x: Tensor) -> Tensor:
            with hl.capture(self, "body") as self.inner:
                x = self.body(x)
            return self.tail(x)

    model = Curious()
    with hl.capture(model, "**", inputs=True) as got:
        out = model(torch.ones(1, 2))
    assert [(one.path, one.call, one.visit) for one in got] == [
        ("", 0, 0),
        ("body", 0, 0),
        ("tail", 0, 0),
    ]
    assert torch.equal(got[""].output, out)
    assert model.inner is not None
    assert torch.equal(model.inner["body"].output, got["body"].output)
    assert _hooks(model) == 0


def test_observer_that_calls_the_model_again_makes_calls_of_its_own() -> None:
    """A hook may run the model itself; those values are not the outer call's."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    depth: list[int] = []

    def again(value: Tensor, at: hl.At) -> None:
        if not depth:
            depth.append(1)
            model(torch.zeros(1, 2))

    with hl.capture(model, "*") as got, hl.hook(model, "0", again):
        out = model(torch.ones(1, 2))
    outputs = [one.output for one in got if one.path == "1"]
    assert len(outputs) == 2
    assert sum(torch.equal(one, out) for one in outputs) == 1
    assert _hooks(model) == 0


def test_same_capture_cannot_be_open_twice() -> None:
    model = Nested()
    capture = hl.capture(model, "stem")
    with pytest.warns(hl.HooklineWarning), capture, pytest.raises(hl.SessionError, match="open"):
        capture.__enter__()


def test_same_capture_entered_again_gives_new_results() -> None:
    model = Nested()
    capture = hl.capture(model, "stem")
    with capture as first:
        model(torch.ones(1, 2))
    model.stem = nn.Linear(2, 2)  # exchanged in between: the address means the new one
    with capture as second:
        model(torch.ones(1, 2))
    assert torch.equal(second["stem"].output, model.stem(torch.ones(1, 2)))
    assert not torch.equal(first["stem"].output, second["stem"].output)


def test_edits_of_two_sessions_compose_in_the_order_they_were_attached() -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.ones(1)
    with hl.edit(model, {"0": hl.add(1)}), hl.edit(model, {"0": hl.scale(10)}):
        assert model(x).item() == 20.0
    with hl.edit(model, {"0": hl.scale(10)}), hl.edit(model, {"0": hl.add(1)}):
        assert model(x).item() == 11.0
    with hl.edit(model, {"0": hl.scale(10)}), hl.edit(model, {"0": hl.add(1)}, prepend=True):
        assert model(x).item() == 20.0


def test_skip_inside_a_capture_shows_the_value_given() -> None:
    model = Nested()
    x = torch.ones(1, 2)
    with (
        hl.edit(model, {"part": hl.skip(lambda at: at.inputs["input"])}),
        hl.capture(model, "part", "stem") as got,
    ):
        out = model(x)
    assert torch.equal(out, model.stem(x))
    assert torch.equal(got["part", 1].output, out)
    assert "forward" not in vars(model.part)
