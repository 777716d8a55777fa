"""Modules whose hooks never run: torch says nothing, hookline says which and why."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hookline as hl


class Direct(nn.Module):
    """Use its children without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(2, 2)
        self.forwarded = nn.Linear(2, 2)
        self.weighed = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.forwarded.forward(self.called(x))
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.weighed.weight)


def _outcomes(got: hl.Captured) -> dict[str, tuple[str, str]]:
    return {one.address: (one.status, one.reason) for one in got.report().outcomes}


def test_each_module_that_was_not_called_is_named_with_its_reason() -> None:
    model = Direct()
    with pytest.warns(hl.HooklineWarning) as warned, hl.capture(model, "*") as got:
        model(torch.ones(1, 2))
    outcomes = _outcomes(got)
    assert outcomes["called:output"] == ("captured", "")
    assert outcomes["forwarded:output"][0] == "bypassed"
    assert "`self.forwarded.forward()`" in outcomes["forwarded:output"][1]
    assert outcomes["weighed:output"][0] == "bypassed"
    assert "self.weighed.weight" in outcomes["weighed:output"][1]
    assert outcomes["unused:output"][0] == "never called"
    assert outcomes["layers:output"] == ("never called", "a container: it is never called itself")
    text = str(warned[0].message)
    assert len(warned) == 1
    assert all(name in text for name in ("forwarded", "weighed", "unused"))
    assert "layers:output" not in text  # a pattern met it: no surprise
    assert "called:output: " not in text.replace("forwarded", "")


def test_container_asked_for_by_name_is_warned_about() -> None:
    model = Direct()
    with pytest.warns(hl.HooklineWarning, match=r"layers\.\*"), hl.capture(model, "layers"):
        model(torch.ones(1, 2))


@pytest.mark.parametrize("name", ["forwarded", "weighed", "unused", "layers"])
def test_edit_of_a_module_that_was_not_called_is_warned_about(name: str) -> None:
    model = Direct()
    x = torch.ones(1, 2)
    expected = model(x)
    with (
        pytest.warns(hl.HooklineWarning, match=rf"never applied:\n  {name}:output: zero\(\): "),
        hl.edit(model, {name: hl.zero()}),
    ):
        out = model(x)
    assert torch.equal(out, expected)


def test_reading_a_bypassed_module_says_why() -> None:
    model = Direct()
    with pytest.warns(hl.HooklineWarning), hl.capture(model, "forwarded") as got:
        model(torch.ones(1, 2))
    with pytest.raises(hl.NotCaptured, match="directly, which skips hooks"):
        got["forwarded"].output


def test_attention_output_projection_is_named_as_bypassed() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True))
    attention = model[0]
    x = torch.randn(1, 3, 8, requires_grad=True)
    told = pytest.warns(hl.HooklineWarning, match=r"0\.out_proj:output: bypassed: .*never calls it")
    with (
        told,
        hl.capture(model, "0.out_proj", "0:output[0]", grads=True) as got,
    ):
        out = attention(x, x, x)[0]
        out.sum().backward()
    assert torch.equal(got["0:output[0]"], out)
    assert torch.equal(got["0:output[0].grad"], torch.ones(1, 3, 8))
    assert _outcomes(got)["0.out_proj:output"][0] == "bypassed"


def test_fused_transformer_layer_runs_in_parts_and_that_is_said() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        plain = layer(x)
        with (
            pytest.warns(hl.HooklineWarning, match="fused kernel of the root"),
            hl.capture(layer, "linear1") as got,
        ):
            watched = layer(x)
        hidden = layer.linear1(layer.norm1(x + layer.self_attn(x, x, x)[0]))
    torch.testing.assert_close(watched, plain)
    torch.testing.assert_close(got["linear1"].output, hidden)


def test_transformer_layer_that_torch_would_not_fuse_is_not_warned_about() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).train()
    with hl.capture(layer, "linear1") as got:
        layer(torch.randn(2, 3, 8))
    assert got.report().notes == []


def test_module_swapped_before_the_call_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    swapped = r"0:output: never called: it was replaced after attaching: a `Bilinear` is there"
    told = pytest.warns(hl.HooklineWarning, match=swapped)
    with told, hl.capture(model, "*") as got:
        model[0] = nn.Bilinear(2, 2, 2)
        model[0].forward = lambda x: x  # type: ignore[method-assign, assignment]
        model(torch.ones(1, 2))
    assert "0" not in got
    assert "1" in got


def test_module_swapped_between_calls_is_warned_about() -> None:
    """The old module did run once, so the site has a value; the second call has none."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    told = pytest.warns(hl.HooklineWarning, match="`0` was replaced or removed after attaching")
    with (
        told,
        hl.capture(model, "*") as got,
    ):
        model(torch.ones(1, 2))
        model[0] = nn.Linear(2, 2)
        model(torch.ones(1, 2))
    assert got.calls[0]["0"].output.shape == (1, 2)
    with pytest.raises(hl.NotCaptured):
        got.calls[1]["0"]


def test_edited_module_swapped_between_calls_is_warned_about() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    told = pytest.warns(hl.HooklineWarning, match="`0` was replaced or removed after attaching")
    with (
        told,
        hl.edit(model, {"0": hl.zero()}),
    ):
        assert torch.equal(model(torch.ones(1, 2)), torch.zeros(1, 2))
        model[0] = nn.Linear(2, 2)
        assert not torch.equal(model(torch.ones(1, 2)), torch.zeros(1, 2))


def test_module_wrapped_while_attached_is_still_the_same_site() -> None:
    """A wrapper put around a module after attaching changes nothing about its address."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with hl.capture(model, "*") as got:
        model[0] = checkpoint_wrapper(model[0])
        out = model(torch.ones(1, 2))
    assert torch.equal(got["1"].output, out)
    assert torch.equal(got["0"].output.tanh(), out)


def test_module_swapped_by_another_keeps_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    old = model[0]
    told = pytest.warns(hl.HooklineWarning)
    with told, hl.edit(model, {"0": hl.zero()}):
        model[0] = nn.Linear(2, 2)
        model(torch.ones(1, 2))
    for module in (old, *model.modules()):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_capture_around_no_call_at_all_says_so() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(hl.HooklineWarning, match="the model was not called"), hl.capture(model, "0"):
        pass


def _call_method(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return model.forward


def test_root_run_through_forward_still_captures_its_children() -> None:
    """`model.forward(x)` skips the root's hooks and no one else's."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with (
        pytest.warns(hl.HooklineWarning, match=r":output: never called: only modules below it"),
        hl.capture(model, "", "*") as got,
    ):
        out = _call_method(model)(torch.ones(1, 2))
    assert torch.equal(got["1"].output, out)
    assert got["0"].call == got["1"].call


def test_everything_captured_gives_no_warning() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hl.capture(model, grads=True):
            model(torch.ones(1, 2)).sum().backward()
    assert caught == []
