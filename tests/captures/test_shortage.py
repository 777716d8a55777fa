"""Memory that runs out while values are captured: what is said, and what is left."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from small_models import Net, is_clean, same
from torch import Tensor, nn

import hookline as hl
from hookline._errors import OutOfMemory
from hookline.captures.shortage import explain_shortage, is_out_of_memory

FAR_TOO_MANY = 2**58


def ask_too_much(tensor: Tensor) -> Tensor:
    """Ask torch for more memory than any machine has."""
    return tensor.reshape(-1)[:1].expand(FAR_TOO_MANY).contiguous()


class Picky:
    """Keep some values whole and ask too much at the next."""

    def __init__(self, allowed: int) -> None:
        self.left = allowed

    def __call__(self, tensor: Tensor) -> Tensor:
        self.left -= 1
        return tensor.clone() if self.left >= 0 else ask_too_much(tensor)


def test_shortage_names_the_site_and_what_was_held() -> None:
    net = Net()
    with pytest.raises(OutOfMemory) as caught, hl.capture(net, "*", select=Picky(2)):
        net(torch.ones(5, 3))
    assert str(caught.value) == (
        "`fc2:output` (5x2, 40 bytes) could not be captured: memory ran out on the host. This "
        "capture held 160 bytes, and has let go of them. Keep less of each with select= or "
        "reduce=, or name fewer sites, or set a bound with max_bytes=."
    )
    assert isinstance(caught.value, MemoryError)
    assert "allocate" in str(caught.value.__cause__)


def test_model_is_as_before_and_nothing_is_held() -> None:
    net, x = Net(), torch.ones(5, 3)
    wanted = net(x)
    kept: list[weakref.ref[Tensor]] = []

    def keep_then_ask(tensor: Tensor) -> Tensor:
        if len(kept) == 2:
            return ask_too_much(tensor)
        copy = tensor.clone()
        kept.append(weakref.ref(copy))
        return copy

    with pytest.raises(OutOfMemory), hl.capture(net, "*", select=keep_then_ask) as got:
        net(x)
    assert is_clean(net)
    assert same(net(x), wanted)
    assert len(got) == 0
    assert got.nbytes == 0
    gc.collect()
    assert [one() for one in kept] == [None, None]
    with hl.capture(net, "fc2") as again:
        net(x)
    assert same(again["fc2"].output, wanted.detach())


def test_reading_afterwards_says_why_there_is_nothing() -> None:
    net = Net()
    with pytest.raises(OutOfMemory), hl.capture(net, "*", select=Picky(1)) as got:
        net(torch.ones(5, 3))
    with pytest.raises(hl.NotCaptured, match=r"in this capture\..*could not be captured: memory"):
        got["fc1"]


def test_capture_goes_on_where_the_error_is_caught_inside_the_block() -> None:
    net, x = Net(), torch.ones(5, 3)
    select = Picky(1)
    with hl.capture(net, "*", select=select) as got:
        with pytest.raises(OutOfMemory):
            net(x)
        assert len(got) == 0
        select.left = 3
        net(x)
    assert same(got["fc2"].output, net(x).detach())
    assert len(got.calls) == 1
    assert is_clean(net)


def test_shortage_in_backward_names_the_gradient() -> None:
    net = Net()
    with (
        pytest.raises(OutOfMemory, match=r"^`fc2:output\.grad` .* could not be captured"),
        hl.capture(net, "fc2", grads=True, select=Picky(1)),
    ):
        net(torch.ones(5, 3)).sum().backward()
    assert is_clean(net)
    net.zero_grad()
    net(torch.ones(5, 3)).sum().backward()
    assert net.fc1.weight.grad is not None


def test_shortage_at_a_parameter_names_it() -> None:
    net = Net()
    with (
        pytest.raises(OutOfMemory, match=r"^`fc1.weight` \(4x3, 48 bytes\) could not"),
        hl.capture(net, "fc1.weight", select=Picky(0)),
    ):
        net(torch.ones(5, 3))
    assert is_clean(net)


def test_shortage_of_the_model_itself_stays_its_own() -> None:
    class Greedy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ask_too_much(x)

    with pytest.raises(RuntimeError, match="allocate") as caught, hl.capture(Greedy(), "") as got:
        Greedy()(torch.ones(1))
    assert not isinstance(caught.value, hl.HooklineError)
    assert len(got) == 0


def test_other_errors_in_select_stay_as_they_are() -> None:
    def fail(tensor: Tensor) -> Tensor:
        raise RuntimeError("shapes do not fit")

    net = Net()
    with (
        pytest.raises(RuntimeError, match="shapes do not fit") as caught,
        hl.capture(net, "fc1", select=fail),
    ):
        net(torch.ones(5, 3))
    assert caught.value.__notes__ == ["in select/reduce of a capture at `fc1:output`"]


def test_budget_is_no_shortage() -> None:
    net, x = Net(), torch.ones(5, 3)
    with pytest.raises(hl.OutOfBudget), hl.capture(net, "*", max_bytes=90) as got:
        net(x)
    assert same(got["fc1"].output, net.fc1(x).detach())  # what came before it is still there


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (hl.OutOfBudget("would pass max_bytes"), False),
        (OSError(12, "Cannot allocate memory"), False),
    ],
)
def test_errors_that_mean_a_shortage(error: Any, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_device_that_is_full_is_named_with_the_way_out() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.")
    value = torch.empty(4, 8, device="meta")
    text = explain_shortage(error, value, where="h.3:output", held=12_000, to_host=False)
    assert text == (
        "`h.3:output` (4x8, 128 bytes) could not be captured: memory ran out on meta. This capture "
        'held 12,000 bytes, and has let go of them. Keep values on the host with device="cpu", or '
        "keep less of each with select= or reduce=, or name fewer sites, or set a bound with "
        "max_bytes=."
    )
    to_host = explain_shortage(error, value, where="h.3:output", held=0, to_host=True)
    assert 'device="cpu"' not in to_host


def test_a_shortage_of_the_model_itself_says_what_was_held() -> None:
    net = Net()
    with pytest.raises(RuntimeError) as caught, hl.capture(net, "*"):
        ask_too_much(net(torch.ones(5, 3)))
    assert caught.value.__notes__ == [
        "hl.capture held 200 bytes when memory ran out. Keep less of each with select= or reduce=, "
        "or name fewer sites, or set a bound with max_bytes=."
    ]
