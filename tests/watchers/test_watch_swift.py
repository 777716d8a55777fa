"""The short way of eager values and gradients, on the CPU as if it were a GPU: the same numbers."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pretended_device import have_values_wait, pretend_device
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from trainings import addresses

import hookline as hl
from hookline.hooks import module_hooks
from hookline.stats import TOGETHER
from hookline.watchers import recording, swift_ears, waiting
from hookline.watchers.listening import WatchListener
from hookline.watchers.waiting import Lane, Queue

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

    @contextlib.contextmanager
    def pretend() -> Iterator[None]:
        with monkeypatch.context() as patch:
            have_values_wait(patch)
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
    assert device.launches.count(("measure_several", "short")) > 10


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
    optimizer = SGD(net.parameters(), lr=0.001)
    taken = []
    with as_on_a_gpu(), hl.watch(net, every=2, **OPTIONS) as watched:
        for _ in range(10):
            net(torch.randn(3)).sum().backward()
            optimizer.step()
            taken.append(len(longer))
            longer.clear()
    # In the first, the second and the fourth watched step all are looked at; else the first value.
    assert taken == [12, 0, 12, 0, 1, 0, 12, 0, 1, 0]
    assert watched.series("11:output.grad", "count").values.tolist() == [3] * 5


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


def test_sites_that_are_due_more_seldom_have_gradients_as_seldom(
    as_on_a_gpu: Callable[[], Any],
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    optimizer = SGD(net.parameters(), lr=0.1)
    with as_on_a_gpu(), hl.watch(net, every={"**": 1, "5": 3}, **OPTIONS) as watched:
        for _ in range(7):
            net(torch.randn(3)).sum().backward()
            optimizer.step()
    for site in ("5:output", "5:output.grad"):
        assert [*watched.series(site, "count").values] == pytest.approx(
            [3, *[math.nan] * 2, 3, *[math.nan] * 2, 3], nan_ok=True
        )
    assert watched.series("6:output.grad", "count").values.tolist() == [3] * 7


@pytest.mark.parametrize("every", [1, 2])
def test_values_that_have_become_large_do_not_wait(
    every: int, as_on_a_gpu: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    optimizer = SGD(net.parameters(), lr=1e-9)
    waited: list[int] = []
    settle = Queue.settle_values

    def note(self: Queue, lane: Lane) -> None:
        waited.extend(value.numel() for _, value, _ in lane.waiting)
        settle(self, lane)

    monkeypatch.setattr(Queue, "settle_values", note)
    for module in (waiting, swift_ears):
        monkeypatch.setattr(module, "LARGE", 20)
    with as_on_a_gpu(), hl.watch(net, every=every, **OPTIONS) as watched:
        for step in range(9):
            net(torch.randn(100 if step in (4, 6) else 2, 3)).sum().backward()
            optimizer.step()
    assert set(waited) == {6}
    counts = watched.series("11:output", "count").values.tolist()
    assert counts == [6, 6, 6, 6, 300, 6, 300, 6, 6][::every]


def test_threads_that_share_an_ear_keep_their_lanes(
    as_on_a_gpu: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under DataParallel, where one runs while the other lets go of Python's lock."""
    stream = threading.local()
    monkeypatch.setattr(stream, "number", 1, raising=False)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    optimizer = SGD([one.bias for one in net], lr=0.1)
    settle, hook_output = Queue.settle_values, module_hooks.hook_output
    mixed: list[int] = []

    def run_on_another_stream() -> None:
        stream.number = 2
        net(torch.randn(3))

    def settle_meanwhile(self: Queue, lane: Lane) -> None:
        settle(self, lane)
        is_heard = sys._getframe(1).f_code.co_name == "hear"
        if is_heard and stream.number == 1:
            thread = threading.Thread(target=run_on_another_stream)
            thread.start()
            thread.join()

    def check(module: nn.Module, output: Tensor, hook: Any) -> bool:
        lanes = watched._recorder.queue._lanes.values()
        cells = [one.cell_contents for one in getattr(hook, "__closure__", None) or ()]
        held = [getattr(hook, "__self__", None), *cells]  # a box, or a lane, by the kind of hook
        own = [
            lane.stream
            for lane in lanes
            if any(one is thing for one in (*lane.boxes, lane) for thing in held)
        ]
        mixed.extend({one - stream.number for one in own})
        return hook_output(module, output, hook)

    monkeypatch.setattr(Queue, "settle_values", settle_meanwhile)
    monkeypatch.setattr(module_hooks, "hook_output", check)
    with as_on_a_gpu():
        for module in (waiting, swift_ears):
            monkeypatch.setattr(module, "raw_cuda_stream", lambda device: stream.number)
        with hl.watch(net, **OPTIONS) as watched:
            for _ in range(7):
                net(torch.randn(3)).sum().backward()
                optimizer.step()
    assert len(mixed) > 40
    assert not any(mixed)


def test_most_gradients_come_without_python(as_on_a_gpu: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), *(nn.Tanh() for _ in range(2 * TOGETHER + 3)))
    kept: list[Tensor] = []
    for layer in net:
        layer.register_forward_hook(lambda module, args, output: kept.append(output))
    optimizer = SGD(net.parameters(), lr=0.1)
    with as_on_a_gpu(), hl.watch(net, replay=False, **OPTIONS):
        for _ in range(3):
            kept.clear()
            loss = net(torch.randn(2, 3)).sum()
            hooks = [hook for one in kept for hook in (one._backward_hooks or {}).values()]
            loss.backward()
            optimizer.step()
    names = [getattr(hook, "__name__", "") for hook in hooks]
    assert len(names) == 2 * TOGETHER + 5
    # Three end a group; the root's is of its own kind.
    assert names.count("append") == len(names) - 4


@pytest.mark.parametrize("every", [1, 2, 10])
@pytest.mark.parametrize("begin", [1, 45])
def test_a_gradient_that_is_changed_in_place_from_some_step_on(
    every: int, begin: int, as_on_a_gpu: Callable[[], Any]
) -> None:
    """A hook of the user's that runs later changes what waits; autograd does not tell of it."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    optimizer = SGD(net.parameters(), lr=0.0)
    with as_on_a_gpu(), hl.watch(net, every=every, **OPTIONS) as watched:
        for step in range(100):
            x = net[:6](torch.ones(1, 3))
            if step >= begin:
                x.register_hook(lambda grad: grad.zero_())
            net[6:](x).sum().backward()
            optimizer.step()
    assert len(watched.series("5:output.grad", "absmax").values) == 100 / every
    assert (watched.series("5:output.grad", "absmax").values == 0).sum() <= (begin == 45)
    assert (watched.series("4:output.grad", "absmax").values == 0).sum() >= 50 / every


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
