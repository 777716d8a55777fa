"""Which values travel to the host beside the model, by which lane, and what the others do."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from small_models import Net, same
from torch import Tensor, nn

import hookline as hl
from hookline.captures import transfers
from hookline.captures.keeping import Keeper
from hookline.captures.pinning import PinnedShare
from hookline.captures.transfers import Transfers, can_travel


class Subclass(Tensor):
    """A tensor of a class of its own."""


class OnePerDevice:
    """Stands where a lane stands, and knows its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> type[OnePerDevice]:
    """Make lanes for devices that this machine need not have."""
    monkeypatch.setattr(transfers, "Lane", OnePerDevice)
    return OnePerDevice


def test_each_device_has_a_lane_that_captures_share(lanes: type[OnePerDevice]) -> None:
    first, second = Transfers(), Transfers()
    devices = [torch.device("cuda", number) for number in (0, 1)]
    found = [[one._lane(device) for device in devices] for one in (first, second)]
    assert found[0] == found[1]
    assert [lane.device for lane in found[0]] == devices
    assert found[0][0] is not found[0][1]


def test_lane_goes_with_the_last_capture_that_uses_it(lanes: type[OnePerDevice]) -> None:
    first, second = Transfers(), Transfers()
    device = torch.device("cuda", 5)
    first._lane(device)
    second._lane(device)
    first.rest()
    assert 5 in transfers._lanes
    second.rest()
    gc.collect()
    assert 5 not in transfers._lanes


def test_values_that_are_not_on_a_gpu_do_not_travel() -> None:
    assert not can_travel(torch.zeros(2))
    assert not can_travel(torch.zeros(2, device="meta"))
    assert not can_travel(torch.zeros(2).as_subclass(Subclass))
    assert not can_travel(torch.zeros(2).to_sparse())


def test_capture_with_a_graph_makes_copies_that_autograd_knows() -> None:
    assert Keeper(device="cpu")._transfers is not None
    assert Keeper(device=torch.device("cpu"))._transfers is not None
    assert Keeper(device="cpu", keep_graph=True)._transfers is None
    assert Keeper(device="meta")._transfers is None
    assert Keeper()._transfers is None


def test_unknown_device_is_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match="nowhere"):
        hl.capture(Net(), "fc1", device="nowhere")


def test_values_on_the_host_already_are_kept_as_ever() -> None:
    net, x = Net(), torch.ones(2, 3)
    with hl.capture(net, "**", inputs=True, grads=True, params=True, device="cpu") as got:
        net(x).sum().backward()
    assert same(got["fc1"].output, net.fc1(x).detach())
    assert same(got["fc2"].output.grad, torch.ones(2, 2))
    assert same(got["fc1.weight"].grad, net.fc1.weight.grad)


def test_parameters_without_data_stay_so() -> None:
    """Models whose weights are loaded layer by layer have them nowhere in between."""
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    wanted = model[0](x).detach()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with torch.no_grad(), hl.capture(model, "*", params=True, device="cpu") as got:
        model(x)
    assert same(got["0"].output, wanted)
    assert got["0.weight"].is_meta


def test_model_without_data_is_captured_without_data() -> None:
    with torch.device("meta"):
        net = Net()
    with hl.capture(net, "fc1", device="cpu", dtype=torch.float64) as got:
        net(torch.ones(2, 3, device="meta"))
    assert got["fc1"].output.is_meta
    assert got["fc1"].output.dtype == torch.float64


def test_budget_counts_what_the_type_asked_for_takes() -> None:
    net, x = Net(), torch.ones(2, 3)
    with hl.capture(net, "fc1", dtype=torch.bfloat16, max_bytes=16):
        net(x)
    with (
        pytest.raises(hl.OutOfBudget, match=r"\(64 bytes\)"),
        hl.capture(net, "fc1", dtype=torch.float64, max_bytes=63),
    ):
        net(x)


class Marker:
    """Stands where a CUDA event or stream stands, on a device that does everything at once."""

    def __init__(self, device: object = None) -> None:
        self.waited = 0

    def record(self, stream: object) -> None:
        """Note nothing: all that came before is over."""

    def query(self) -> bool:
        return False  # so that the ring grows as far as it may

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait_event(self, event: object) -> None:
        self.waited += 1

    def wait_stream(self, stream: object) -> None:
        self.waited += 1


@pytest.fixture
def instant_device(monkeypatch: pytest.MonkeyPatch) -> Marker:
    """Let lanes run without a GPU; what is left is which bytes go where."""
    stream = Marker()
    plain = {name: getattr(torch, name) for name in ("empty", "empty_like")}
    for name, make in plain.items():
        monkeypatch.setattr(torch, name, lambda *a, make=make, pin_memory=0, **k: make(*a, **k))
    monkeypatch.setattr(torch.cuda, "Event", Marker)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Marker())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    properties = SimpleNamespace(total_memory=2**24)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    for name, size in (("_FIRST_RING", 8192), ("_LEAST_LIMIT", 65536), ("_MOST_LIMIT", 65536)):
        monkeypatch.setattr(transfers, name, size)
    for name in ("_reached", "_streams"):
        monkeypatch.setattr(transfers, name, {})
    return stream


LAYOUTS = {
    "larger than the ring": lambda: torch.randn(111, 300),
    "small": lambda: torch.randn(3),
    "strided": lambda: torch.randn(8, 32)[:, ::3],
    "turned, in pieces": lambda: torch.randn(64, 64, 5).transpose(0, 2),
    "strided, in pieces": lambda: torch.randn(300, 300)[::2, 1::2],
    "channels last": lambda: torch.randn(40, 3, 9, 9).to(memory_format=torch.channels_last),
    "repeated": lambda: torch.randn(1, 50).expand(400, 50),
    "scalar": lambda: torch.tensor(2.0),
    "empty": lambda: torch.empty(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("limit", [2**30, 0], ids=["page-locked", "ordinary"])
def test_every_layout_arrives_whole_through_a_small_ring(
    layout: str, limit: int, instant_device: Marker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "pinned_share", PinnedShare(limit))
    brought = Transfers()
    value = LAYOUTS[layout]()
    for dtype in (None, torch.float64, torch.bfloat16):
        for _ in range(3):
            host, transfer = brought.bring(value, dtype)
            if transfer is not None:
                transfer.wait()
            assert same(host, value.to(dtype or value.dtype))
            assert host.stride() == torch.empty_like(value).stride()
    assert all(size <= 65536 for size in transfers._reached.values())
    assert bool(instant_device.waited) == bool(value.numel())
