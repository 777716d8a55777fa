"""What is captured on a GPU and kept on the host: copied beside the model, whole, without waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from small_models import is_clean
from torch import Tensor, nn

import hookline as hl
from hookline._errors import OutOfMemory
from hookline.captures import transfers
from hookline.captures.pinning import PinnedShare

pytestmark = pytest.mark.gpu

LONG = 1_000_000_000
"""Clock cycles that keep a stream busy for half a second, also beside other work on the host."""


class Overwriting(nn.Module):
    """Layers whose output is changed in place as soon as it is there."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            with torch.no_grad():
                x.mul_(0.5).add_(1)
        return x


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 32)).cuda()


def side_stream() -> torch.cuda.Stream:
    """Give the stream that copies from the first device."""
    return transfers._side_stream(torch.device("cuda", 0))


def delay(stream: torch.cuda.Stream) -> None:
    """Keep a stream busy for a while, so that what is sent there is late."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)


@contextmanager
def raise_at_waits() -> Iterator[None]:
    """Make calls that wait for the device raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> int:
    """Give the limit of a ring that is soon full."""
    limit = 64 * 1024
    monkeypatch.setattr(transfers, "_FIRST_RING", 8 * 1024)
    monkeypatch.setattr(transfers, "_LEAST_LIMIT", limit)
    monkeypatch.setattr(transfers, "_MOST_LIMIT", limit)
    monkeypatch.setattr(transfers, "_reached", {})
    return limit


def test_values_and_gradients_are_those_on_the_device() -> None:
    model, x = net(), torch.randn(16, 64, device="cuda")
    with hl.capture(model, "**", inputs=True, grads=True, params=True) as near:
        model(x).square().sum().backward()
    model.zero_grad()
    with hl.capture(model, "**", inputs=True, grads=True, params=True, device="cpu") as far:
        model(x).square().sum().backward()
    wanted, found = near.tensors(), far.tensors()
    assert list(found) == list(wanted)
    assert all(tensor.device.type == "cpu" for tensor in found.values())
    assert all(torch.equal(found[name], wanted[name].cpu()) for name in wanted)
    assert torch.equal(far["0"].output.grad, near["0"].output.grad.cpu())
    assert torch.equal(far["0.weight"].grad, near["0.weight"].grad.cpu())


def test_capturing_waits_for_nothing() -> None:
    model, x = net(), torch.randn(16, 64, device="cuda")
    with raise_at_waits():
        with hl.capture(model, "**", inputs=True, grads=True, params=True, device="cpu") as got:
            model(x).square().sum().backward()
        with torch.inference_mode(), hl.capture(model, "**", device="cpu") as later:
            model(x)
        del later
    assert got["2"].output.is_pinned()


def test_host_goes_on_while_the_copies_are_late() -> None:
    model, x = net(), torch.randn(16, 64, device="cuda")
    with hl.capture(model, "**", device="cpu"):
        model(x)
    torch.cuda.synchronize()
    side = side_stream()
    delay(side)
    with hl.capture(model, "**", device="cpu") as got:
        out = model(x)
    assert not side.query(), "the host waited for the transfer"
    torch.cuda.current_stream().synchronize()
    assert not side.query(), "the model waited for the transfer"
    assert torch.equal(got["2"].output, out.detach().cpu())


def test_reading_waits_for_that_value_alone() -> None:
    model, x = net(), torch.randn(16, 64, device="cuda")
    side = side_stream()
    first = model[0](x).detach().cpu()
    with hl.capture(model, "0", device="cpu") as got:
        model(x)
        delay(side)
        model(x * 2)
        assert torch.equal(got.calls[0]["0"].output, first)
        assert not side.query()
    assert torch.equal(got.calls[1]["0"].output, model[0](x * 2).detach().cpu())
    assert side.query()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_value_overwritten_at_once_is_kept_as_it_flowed(mode: type) -> None:
    model, x = Overwriting().cuda(), torch.randn(512, 256, device="cuda")
    wanted = []
    with mode():
        y = x
        for layer in model.layers:
            y = layer(y)
            wanted.append(y.detach().cpu())
            with torch.no_grad():
                y.mul_(0.5).add_(1)
        for is_late in (False, True):
            if is_late:
                delay(side_stream())
            with hl.capture(model, "layers.*", device="cpu") as got:
                model(x)
                torch.empty(64 * 2**20, device="cuda").fill_(7)  # what was freed is used again
            for number, value in enumerate(wanted):
                assert torch.equal(got[f"layers.{number}"].output, value)
                assert not got[f"layers.{number}"].output.is_inference()


def test_values_pass_through_a_ring_that_is_too_small(small_ring: int) -> None:
    model, x = Overwriting(width=300, depth=12).cuda(), torch.randn(111, 300, device="cuda")
    assert x.nbytes > small_ring  # one value alone goes in pieces
    with hl.capture(model, "layers.*", clone=True) as near, torch.no_grad():
        model(x)
    before = torch.cuda.memory_allocated()
    delay(side_stream())
    with hl.capture(model, "layers.*", device="cpu") as far, torch.no_grad():
        model(x)
        # The rings before this one are freed when what is in them has gone.
        assert torch.cuda.memory_allocated() - before <= 2 * small_ring
    for number in range(12):
        name = f"layers.{number}"
        assert torch.equal(far[name].output, near[name].output.cpu())


def test_late_copies_hold_no_more_of_the_device_than_the_ring() -> None:
    model, x = nn.Sequential(*(nn.Tanh() for _ in range(64))), torch.randn(2**22, device="cuda")
    limit = 16 * x.nbytes
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        delay(side_stream())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfers, "_LEAST_LIMIT", limit)
            patch.setattr(transfers, "_MOST_LIMIT", limit)
            patch.setattr(transfers, "_reached", {})
            with hl.capture(model, "*", device="cpu") as got:
                out = model(x)
    # The ring that was too small, a quarter as large, is freed when what is in it has gone.
    assert torch.cuda.max_memory_allocated() - before <= limit * 1.25 + 4 * x.nbytes
    assert torch.equal(got["63"].output, out.cpu())
    del out
    torch.cuda.empty_cache()  # only so does torch look which freed memory nobody reads any more
    assert torch.cuda.memory_allocated() == before


ODD = {
    "strided": lambda: torch.randn(8, 32, device="cuda")[:, ::3],
    "transposed": lambda: torch.randn(8, 32, device="cuda").t(),
    "channels last": lambda: torch.randn(2, 3, 5, 7, device="cuda").to(
        memory_format=torch.channels_last
    ),
    "expanded": lambda: torch.randn(1, 5, device="cuda").expand(4, 5),
    "part": lambda: torch.randn(100, device="cuda")[17:43],
    "scalar": lambda: torch.tensor(3.5, device="cuda"),
    "empty": lambda: torch.empty(0, 3, device="cuda"),
    "complex": lambda: torch.randn(4, 3, dtype=torch.complex64, device="cuda").conj(),
    "bool": lambda: torch.randn(9, device="cuda") > 0,
    "integer": lambda: torch.arange(7, device="cuda"),
    "bfloat16": lambda: torch.randn(33, device="cuda").bfloat16(),
    "float8": lambda: torch.randn(33, device="cuda").to(torch.float8_e4m3fn),
    "double": lambda: torch.randn(33, device="cuda", dtype=torch.float64),
}


@pytest.mark.parametrize("kind", ODD)
def test_tensor_of_any_layout_and_type_arrives(kind: str) -> None:
    x = ODD[kind]()
    model = nn.Identity()
    with hl.capture(model, "", device="cpu") as got:
        model(x)
    found, wanted = got[""].output, x.cpu()
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if kind != "expanded":
        assert found.stride() == torch.empty_like(x, device="cpu").stride()
    if wanted.dtype.itemsize == 1:
        found, wanted = found.view(torch.uint8), wanted.view(torch.uint8)
    assert torch.equal(found, wanted)


def test_select_reduce_and_dtype_come_before_the_transfer() -> None:
    model, x = net(), torch.randn(16, 64, device="cuda")
    out = model(x).detach().cpu()
    with hl.capture(model, "2", device="cpu", select=(slice(None), -1)) as got:
        model(x)
    assert torch.equal(got["2"].output, out[:, -1])
    assert got.nbytes == 16 * 4
    with hl.capture(model, "2", device="cpu", reduce="absmax", dtype=torch.float64) as got:
        model(x)
    assert torch.equal(got["2"].output, out.abs().amax().double())
    with (
        pytest.raises(hl.OutOfBudget, match=r"\(4,096 bytes\)"),
        hl.capture(model, "2", device="cpu", dtype=torch.float64, max_bytes=4095),
    ):
        model(x)


def test_gradient_of_a_value_that_was_read_before_backward_is_whole() -> None:
    model, x = net(), torch.randn(16, 64, device="cuda")
    with hl.capture(model, "0", grads=True) as near:
        model(x).square().sum().backward()
    with hl.capture(model, "0", grads=True, device="cpu") as got:
        out = model(x)
        value = got["0"].output
        delay(side_stream())
        out.square().sum().backward()
        assert torch.equal(value.grad, near["0"].output.grad.cpu())


def test_gradients_of_two_passes_add_up_on_the_host() -> None:
    model, x = net(), torch.randn(16, 64, device="cuda")
    with hl.capture(model, "0", grads=True, device="cpu") as got:
        loss = model(x).square().sum()
        delay(side_stream())
        with raise_at_waits():
            loss.backward(retain_graph=True)
            loss.backward()
    once, twice = got["0"].grads()
    assert torch.equal(once, twice)
    assert torch.equal(got["0"].output.grad, once * 2)


def test_results_dropped_while_they_travel_disturb_nobody() -> None:
    model = net()
    for number in range(20):
        x = torch.full((64, 64), float(number), device="cuda")
        torch.cuda._sleep(1_000_000)
        with torch.no_grad(), hl.capture(model, "**", device="cpu") as got:
            out = model(x)
        if number % 3 == 0:
            assert torch.equal(got["2"].output, out.cpu())


def test_model_on_a_stream_of_its_own_is_followed() -> None:
    model, x = Overwriting().cuda(), torch.randn(512, 256, device="cuda")
    with hl.capture(model, "layers.*", clone=True) as near, torch.no_grad():
        model(x)
    torch.cuda.synchronize()
    own = torch.cuda.Stream()
    with torch.cuda.stream(own), torch.no_grad(), hl.capture(model, "**", device="cpu") as far:
        torch.cuda._sleep(LONG)
        model(x)
    for number in range(4):
        name = f"layers.{number}"
        assert torch.equal(far[name].output, near[name].output.cpu())


def test_values_beyond_the_share_lie_in_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    share = PinnedShare(2 * 512 * 256 * 4)
    monkeypatch.setattr(transfers, "pinned_share", share)
    model, x = Overwriting().cuda(), torch.randn(512, 256, device="cuda")
    with hl.capture(model, "layers.*", clone=True) as near, torch.no_grad():
        model(x)
    with raise_at_waits(), torch.no_grad(), hl.capture(model, "layers.*", device="cpu") as far:
        model(x)
    values = [far[f"layers.{number}"].output for number in range(4)]
    assert [value.is_pinned() for value in values] == [True, True, False, False]
    for number, value in enumerate(values):
        assert torch.equal(value, near[f"layers.{number}"].output.cpu())
    assert share.held == share.limit
    del far, values, value
    assert share.held == 0


def test_memory_that_cannot_be_locked_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(transfers.pinned_share, "allocate_like", refuse)
    model, x = net(), torch.randn(16, 64, device="cuda")
    with hl.capture(model, "2", device="cpu") as got:
        out = model(x)
    assert torch.equal(got["2"].output, out.detach().cpu())
    assert not got["2"].output.is_pinned()


def test_model_spread_over_devices_is_captured_from_each() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near, self.far = nn.Linear(8, 8), nn.Linear(8, 8).cuda()

        def forward(self, x: Tensor) -> Tensor:
            return self.far(self.near(x).cuda()).cpu()

    model, x = Spread(), torch.randn(3, 8)
    with hl.capture(model, "**", inputs=True, grads=True, device="cpu") as got:
        model(x).sum().backward()
    assert {tensor.device.type for tensor in got.tensors().values()} == {"cpu"}
    assert torch.equal(got["far"].input, got["near"].output)
    assert torch.equal(got["far"].output, got[""].output)
    assert torch.equal(got["far"].output.grad, torch.ones(3, 8))


def test_device_map_is_captured_from_each_device() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(3, 8)
    with torch.no_grad():
        wanted = [model[0](x), model[1](model[0](x))]
    model = accelerate.dispatch_model(model, {"0": 0, "1": "cpu", "2": 0}, main_device="cuda:0")
    with torch.no_grad(), hl.capture(model, "*", device="cpu") as got:
        model(x)
    torch.testing.assert_close(got["0"].output, wanted[0])
    torch.testing.assert_close(got["1"].output, wanted[1])


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_recording_of_a_cuda_graph_is_refused() -> None:
    model, x = net(), torch.randn(16, 64, device="cuda")
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        with (
            pytest.raises(hl.UnsupportedModel, match="CUDA graph"),
            hl.capture(model, "0", device="cpu"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            model(x)
    torch.cuda.synchronize()


def test_values_inside_a_compiled_graph_arrive() -> None:
    """The graph uses their memory again as soon as they were delivered."""
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).cuda(), torch.randn(512, 256)
    x = x.cuda()
    with hl.capture(model, "*", grads=True) as near:
        model(x).square().sum().backward()
    compiled = torch.compile(model, fullgraph=True)
    delay(side_stream())
    with hl.capture(compiled, "*", grads=True, device="cpu") as far:
        for _ in range(2):
            compiled(x).square().sum().backward()
    for call in far.calls:
        for number in range(6):
            wanted, found = near[str(number)].output, call[str(number)].output
            assert found.device.type == "cpu"
            torch.testing.assert_close(found, wanted.cpu(), rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(found.grad, wanted.grad.cpu(), rtol=1e-3, atol=1e-3)


@pytest.fixture
def little_memory() -> Iterator[int]:
    """Leave this process 512 MiB beyond what it has."""
    torch.cuda.empty_cache()
    spare = 512 * 2**20
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)
    try:
        yield spare
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_device_that_is_full_raises_and_lets_go(little_memory: int) -> None:
    model = nn.Sequential(*(nn.Tanh() for _ in range(24)))
    x = torch.randn(2**23, device="cuda")  # 32 MiB
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        with pytest.raises(OutOfMemory) as caught, hl.capture(model, "*", clone=True) as got:
            model(x)
        assert "memory ran out on cuda:0" in str(caught.value)
        assert "(8388608, 33,554,432 bytes)" in str(caught.value)
        assert 'device="cpu"' in str(caught.value)
        caught = None
        assert is_clean(model)
        assert len(got) == 0
        assert torch.cuda.memory_allocated() == before
        with pytest.raises(hl.NotCaptured, match="memory ran out on cuda:0"):
            got["0"]
        wanted = model(x)
        with hl.capture(model, "*", device="cpu") as got:
            model(x)
        assert torch.equal(got["23"].output, wanted.cpu())
