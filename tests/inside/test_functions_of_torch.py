"""Variables of torch's own functions, which call themselves again where a mode is active."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import is_clean
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from twins import make_input

import hookline as hl


class Passing(TorchFunctionMode):
    """Somebody else's mode."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def several():
    with Passing(), torch.device("cpu"), Passing():
        yield


MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "device": lambda: torch.device("cpu"),
    "mode": Passing,
    "several": several,
}


@pytest.mark.parametrize("mode", MODES)
def test_multihead_attention_of_torch_is_open_to_both(mode: str) -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = make_input()[None].detach()
    plain, weights = attention(x, x, x)
    where = "@multi_head_attention_forward.attn_output_weights"
    names = (where, "@attn_output", "/multi_head_attention_forward")
    with MODES[mode](), hl.capture(attention, *names) as got:
        out, _ = attention(x, x, x)
    assert torch.equal(out, plain)
    last = got.values(where)[-1]
    assert torch.equal(last, weights)
    assert torch.equal(got["/multi_head_attention_forward:output[1]"], weights)
    with MODES[mode](), hl.edit(attention, {f"{where}[1]": hl.zero()}):
        edited, _ = attention(x, x, x)
    assert torch.equal(edited[0, 0], attention.out_proj.bias)
    assert torch.equal(attention(x, x, x)[0], plain)
    assert is_clean(attention)


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x * 2, dim=-1) + 1


NAMES = ["input", "ret", "return"]


@pytest.mark.parametrize("also", [[], ["/softmax"], ["/*"]], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_each_variable_is_met_once_whatever_the_mode(name: str, mode: str, also: list[str]) -> None:
    model, x = Softmax(), make_input()
    where = f"@softmax.{name}"
    with MODES[mode](), hl.capture(model, where, *also) as got:
        out = model(x)
    assert torch.equal(out, F.softmax(x * 2, dim=-1) + 1)
    assert torch.equal(got[where], x * 2 if name == "input" else F.softmax(x * 2, dim=-1))
    assert is_clean(model)


@pytest.mark.parametrize("also", [[], ["/softmax"]], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_edit_is_applied_once_whatever_the_mode(name: str, mode: str, also: list[str]) -> None:
    model, x = Softmax(), make_input()
    edits = {f"@softmax.{name}": hl.scale(3), **{one: hl.scale(1) for one in also}}
    with MODES[mode](), hl.edit(model, edits):
        out = model(x)
    by_hand = F.softmax(x * 2 * 3, dim=-1) if name == "input" else F.softmax(x * 2, dim=-1) * 3
    assert torch.equal(out, by_hand + 1)


def test_model_is_freed_after_its_functions_were_copied() -> None:
    model = Softmax()
    with hl.capture(model, "@softmax.ret", "/softmax") as got:
        model(make_input())
    assert got["/softmax"].shape == (3, 4)
    gone = weakref.ref(model)
    del model, got
    gc.collect()
    assert gone() is None
