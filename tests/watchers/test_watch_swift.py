"""The short way of eager values and gradients, on the CPU as if it were a GPU: the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pretended_device import pretend_device
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from trainings import addresses

import hookline as hl
from hookline.watchers import recording, swift_ears, waiting
from hookline.watchers.listening import WatchListener
from hookline.watchers.recording import Recorder

STEPS = 5
KINDS = ["plain", "reentrant", "other", "changed", "frozen"]
OPTIONS: dict[str, Any] = {
    "parameters": None,
    "sketch_every": 0,
    "counts_every": 0,
    "units_every": 0,
    "strict": True,
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Give what makes values on the CPU wait for others, from the second step on."""

    def measure(self: Recorder, site: int, value: Tensor) -> None:
        if self.extras or not self.queue.take(site, value):
            self.measure_now(site, value)

    @contextlib.contextmanager
    def pretend() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(waiting, "raw_cuda_stream", lambda device: 0)
            patch.setattr(waiting, "current_stream", lambda device: None)
            patch.setattr(swift_ears, "raw_cuda_stream", lambda device: 0)
            patch.setattr(Recorder, "measure", measure)
            yield

    return pretend


class Passing(nn.Module):
    """Return what the child returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Doubling(torch.autograd.Function):
    """Change the gradient in place, which nobody should."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].mul_(2)


class Net(nn.Module):
    """What goes wrong most easily: residuals, views, values changed in place, parts used twice."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), Passing(), nn.GELU(), Passing()) for _ in range(3)
        )
        self.shared = nn.Linear(6, 6)
        self.same = nn.Identity()
        self.flat = nn.Flatten()
        self.relu = nn.ReLU(inplace=True)
        self.idle = nn.Linear(6, 6)
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.kind in ("reentrant", "other"):
                x = x + checkpoint(block, x, use_reentrant=self.kind == "reentrant")
            else:
                x = x + block(x)
        x = self.same(self.shared(self.shared(x)))
        self.idle(x)
        if self.kind == "changed":
            x = F.relu_(self.shared(x))
            x = Doubling.apply(self.blocks[0](x))
        if self.kind == "frozen":
            with torch.no_grad():
                x = x + self.blocks[1](x)
        return self.head(self.flat(self.relu(self.shared(x))))


def train(
    kind: str, backward: Callable[[Tensor], None] = Tensor.backward, **more: Any
) -> tuple[hl.Watch, list[Tensor]]:
    """Train a network under a watch; give both what was measured and the losses."""
    torch.manual_seed(0)
    net = Net(kind)
    optimizer = SGD(net.parameters(), lr=0.1)
    losses = []
    with hl.watch(net, **OPTIONS | more) as watched:
        for _ in range(STEPS):
            for _ in range(2):  # two parts of a batch
                loss = net(torch.randn(4, 2, 6, requires_grad=True)).square().mean()
                backward(loss)
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return watched, losses


def numbers_of(watched: hl.Watch) -> dict[str, list[Any]]:
    """Read what was measured of every site."""
    stats = ("count", "mean", "rms", "min", "max")
    return {
        f"{site} {stat}": watched.series(site, stat).values.tolist()
        for site in addresses(watched)
        for stat in stats
    }


def assert_same(watched: hl.Watch, expected: hl.Watch) -> None:
    """Compare what was measured, but for the order in which parts were added up."""
    found, right = numbers_of(watched), numbers_of(expected)
    assert list(found) == list(right)
    for name, values in right.items():
        assert found[name] == pytest.approx(values, rel=1e-9, abs=1e-12, nan_ok=True), name


def backward_twice(loss: Tensor) -> None:
    """Go through the graph two times."""
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    ("kind", "backward"),
    [
        *((kind, Tensor.backward) for kind in KINDS),
        *((kind, backward_twice) for kind in ("plain", "frozen")),
    ],
)
def test_the_short_way_measures_the_same(
    kind: str, backward: Callable[[Tensor], None], as_on_a_gpu: Callable[[], Any]
) -> None:
    expected, plain = train(kind, backward)
    with as_on_a_gpu():
        watched, losses = train(kind, backward)
    assert [one.item() for one in losses] == [one.item() for one in plain]
    assert_same(watched, expected)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_log_of_a_gpu_measures_the_same(
    kind: str, every: int, as_on_a_gpu: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = train(kind, every=every)
    with pretend_device(monkeypatch) as device, as_on_a_gpu():
        monkeypatch.setattr(recording, "open_log", lambda where: device.open_log())
        watched, _ = train(kind, every=every)
    assert_same(watched, expected)
    assert device.launches.count(("measure_eight", "short")) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_every_other_step_measures_the_same(kind: str, as_on_a_gpu: Callable[[], Any]) -> None:
    expected, _ = train(kind, every=2)
    with as_on_a_gpu():
        watched, _ = train(kind, every=2)
    assert_same(watched, expected)


def test_a_step_after_one_without_goes_the_short_way_at_once(
    as_on_a_gpu: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of the first step that is watched again take the listener's way no more."""
    longer: list[str] = []
    on_light = WatchListener.on_light

    def note(self: WatchListener, output: Tensor, *, has_grad: bool) -> None:
        longer.append(self.address)
        on_light(self, output, has_grad=has_grad)

    monkeypatch.setattr(WatchListener, "on_light", note)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    optimizer = SGD(net.parameters(), lr=0.1)
    taken = []
    with as_on_a_gpu(), hl.watch(net, every=2, **OPTIONS) as watched:
        for _ in range(6):
            net(torch.randn(3)).sum().backward()
            optimizer.step()
            taken.append(len(longer))
            longer.clear()
    assert taken == [12, 0, 1, 0, 1, 0]  # after the first step, only the first value of a step
    assert watched.series("11:output.grad", "count").values.tolist() == [3, 3, 3]


def test_a_graph_of_an_earlier_step_is_not_heard_when_steps_are_watched_again(
    as_on_a_gpu: Callable[[], Any],
) -> None:
    def measure() -> dict[str, list[Any]]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
        optimizer = SGD([one.bias for one in net], lr=0.1)  # no backward needs biases
        older: list[Tensor] = []
        with hl.watch(net, every=2, **OPTIONS) as watched:
            for step in range(6):
                loss = net(torch.randn(3)).sum()
                if step == 4:
                    older[2].backward()
                loss.backward(retain_graph=True)
                older.append(loss)
                optimizer.step()
        return numbers_of(watched)

    expected = measure()
    with as_on_a_gpu():
        found = measure()
    assert expected["11:output.grad count"] == [3, 3, 3]
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-9, abs=1e-12, nan_ok=True), name


def test_most_gradients_come_without_python(as_on_a_gpu: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), *(nn.Tanh() for _ in range(19)))
    kept: list[Tensor] = []
    for layer in net:
        layer.register_forward_hook(lambda module, args, output: kept.append(output))
    optimizer = SGD(net.parameters(), lr=0.1)
    with as_on_a_gpu(), hl.watch(net, replay=False, **OPTIONS):
        for _ in range(3):
            kept.clear()
            loss = net(torch.randn(3)).sum()
            hooks = [hook for one in kept for hook in (one._backward_hooks or {}).values()]
            loss.backward()
            optimizer.step()
    names = [getattr(hook, "__name__", "") for hook in hooks]
    assert len(names) == 20
    assert names.count("append") == 17


def test_a_pause_between_forward_and_backward_is_kept(as_on_a_gpu: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with as_on_a_gpu(), hl.watch(net, **OPTIONS) as watched:
        for number in range(4):
            loss = net(torch.randn(4, 2, 6)).square().mean()
            if number == 2:
                with watched.pause():
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not watched._recorder.queue.length
    gradients = watched.series("blocks.0.2:output.grad", "count").values.tolist()
    assert gradients == pytest.approx([48, 48, float("nan"), 48], nan_ok=True)
    assert watched.series("blocks.0.2:output", "count").values.tolist() == [48] * 4
