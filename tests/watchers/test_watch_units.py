"""Channels one by one: dead units, outliers, saturation, against what torch says of the values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainings import batches, plain_loop

import hookline as hl
from hookline.watchers.units import WINDOW, choose_probe


class Fed(nn.Module):
    """Layers around an activation, with inputs that decide what is zero."""

    def __init__(self, act: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(3, width), act, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


def watch_steps(model: nn.Module, count: int, **options: Any) -> hl.Watch:
    """Train without moving the weights, watched."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with hl.watch(model, rules=False, keep=200, **options) as watched:
        for batch in batches(8, 3, count=count):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
    return watched


def values(watched: hl.Watch, site: str, stat: str) -> list[float]:
    """Give a statistic over the steps, without those that lack it."""
    found = watched.series(site, stat).values
    return [one for one in found.tolist() if one == one]


def kill(layer: nn.Linear, units: int) -> None:
    """Let the first units of a layer never pass zero."""
    with torch.no_grad():
        layer.weight[:units] = 0
        layer.bias[:units] = -1


def test_units_that_are_always_zero_are_dead_in_the_activation_and_in_the_gradient() -> None:
    model = Fed(nn.ReLU())
    kill(model.fc1, 2)
    watched = watch_steps(model, WINDOW + 5)
    assert values(watched, "act", "units") == [6.0] * (WINDOW + 5)
    assert values(watched, "act", "dead")[-1] == 2
    assert values(watched, "act", "window") == [float(min(n + 1, WINDOW)) for n in range(25)]
    assert values(watched, "act", "dead_share")[-1] == pytest.approx(2 / 6)
    assert values(watched, "fc1.weight:grad", "dead")[-1] == 2
    assert values(watched, "fc2.weight:grad", "dead")[-1] == 0


def test_a_unit_that_is_alive_now_and_then_is_not_dead() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()
            self.weight = nn.Parameter(torch.ones(4))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            sign = torch.tensor([1.0, -1.0, 1.0 if self.calls % 10 == 0 else -1.0, -1.0])
            out: Tensor = self.act(sign * self.weight + 0 * x[:, :1])
            return out

    watched = watch_steps(Sometimes(), 35)
    dead = values(watched, "act", "dead")
    assert dead[8] == 3
    assert set(dead[9:]) == {2.0}


def test_a_relu_in_the_forward_shows_in_the_gradient_of_the_weight() -> None:
    class Inline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc2(F.relu(self.fc1(x)))
            return out

    model = Inline()
    kill(model.fc1, 5)
    watched = watch_steps(model, WINDOW)
    assert values(watched, "fc1.weight:grad", "dead")[-1] == 5


def test_micro_batches_and_visits_count_together() -> None:
    model = Fed(nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with hl.watch(model, rules=False) as watched:
        for batch in batches(8, 3, count=3):
            for part in batch.split(1):
                model(part).sum().backward()
            optimizer.step()
    expected = []
    alive = torch.zeros(6, dtype=torch.bool)
    for count, batch in enumerate(batches(8, 3, count=3), 1):
        alive |= (F.relu(model.fc1(batch)) != 0).any(0)
        expected.append(6 - int(alive.sum()))
        assert count <= WINDOW
    assert values(watched, "act", "dead") == expected


@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_are_found_in_images_and_in_sequences(channels_last: bool) -> None:
    layer: nn.Module = nn.Linear(3, 5) if channels_last else nn.Conv1d(3, 5, 1)
    model = nn.Sequential(layer, nn.ReLU())
    with torch.no_grad():
        layer.weight[:2] = 0
        layer.bias[:2] = -1
    x = torch.randn(4, 7, 3)
    with hl.watch(model, rules=False) as watched:
        model(x if channels_last else x.transpose(1, 2)).sum().backward()
        watched.step()
    assert values(watched, "1", "units") == [5.0]
    alive = model(x if channels_last else x.transpose(1, 2)).transpose(
        1, -1 if channels_last else 1
    )
    assert values(watched, "1", "dead") == [float((alive.flatten(2).amax((0, 2)) == 0).sum())]


def test_images_have_their_channels_second() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6())
    with hl.watch(model, rules=False) as watched:
        model(torch.randn(2, 3, 6, 6)).sum().backward()
        watched.step()
    for site in ("0", "1", "2"):
        assert values(watched, site, "units") == [4.0]


def test_outliers_are_the_largest_channel_over_the_median_one() -> None:
    model = Fed(nn.GELU())
    with torch.no_grad():
        model.fc1.weight[3] *= 1000
    watched = watch_steps(model, 3, counts_every=2)
    found = watched.series("fc1", "outlier").values
    for number, batch in enumerate(batches(8, 3, count=3)):
        largest = model.fc1(batch).detach().abs().amax(0)
        # NumPy takes the mean of the two in the middle, torch the lower one.
        middle = largest.sort().values[2:4].mean()
        if number % 2 == 0:
            assert found[number] == pytest.approx(float(largest.max() / middle), rel=1e-5)
        else:
            assert found[number] != found[number]


@pytest.mark.parametrize(
    ("act", "low", "high"),
    [(nn.Tanh(), -1.0, 1.0), (nn.Sigmoid(), 0.0, 1.0), (nn.Hardtanh(), -1.0, 1.0)],
)
def test_saturation_is_the_share_at_the_bound(act: nn.Module, low: float, high: float) -> None:
    model = Fed(act)
    with torch.no_grad():
        model.fc1.weight *= 20
    watched = watch_steps(model, 2)
    found = values(watched, "act", "saturated")
    for share, batch in zip(found, batches(8, 3, count=2), strict=True):
        out = act(model.fc1(batch))
        wanted = ((out < low + 1e-3) | (out > high - 1e-3)).float().mean()
        assert share == pytest.approx(float(wanted), abs=1e-6)
    assert values(watched, "fc1", "saturated") == []


def test_which_activations_can_have_dead_units() -> None:
    relu_like = type("ReLUSquaredActivation", (nn.Module,), {})
    for module in (nn.ReLU(), nn.ReLU6(), nn.Hardswish(), relu_like()):
        probe = choose_probe(module)
        assert probe is not None
        assert probe.is_relu
    for module in (nn.GELU(), nn.SiLU(), nn.LeakyReLU(), nn.Dropout(), nn.Sequential(nn.ReLU())):
        assert choose_probe(module) is None
    probe = choose_probe(nn.PReLU())
    assert probe is not None
    assert not probe.is_relu


def test_after_the_first_steps_one_in_ten_is_looked_at() -> None:
    watched = watch_steps(Fed(nn.ReLU()), 75, counts_every=0)
    found = watched.series("act", "units").values == 6
    assert found.nonzero()[0].tolist() == [*range(40), 40, 50, 60, 70]


@pytest.mark.parametrize(("stride", "steps"), [(0, []), (3, [0, 3, 6])])
def test_the_stride_can_be_chosen(stride: int, steps: list[int]) -> None:
    watched = watch_steps(Fed(nn.ReLU()), 7, units_every=stride)
    found = watched.series("act", "units").values
    assert (found == found).nonzero()[0].tolist() == steps


def test_a_value_that_changes_its_width_begins_again() -> None:
    act = nn.ReLU()
    with hl.watch(act, rules=False) as watched:
        for width in (4, 4, 6):
            act(torch.zeros(2, width, requires_grad=True) - 1).sum().backward()
            watched.step()
    assert values(watched, "", "window") == [1.0, 2.0, 1.0]
    assert values(watched, "", "dead") == [4.0, 4.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_looked_at_too(dtype: torch.dtype) -> None:
    model = Fed(nn.ReLU()).to(dtype)
    kill(model.fc1, 3)
    x = torch.randn(8, 3, dtype=dtype)
    with hl.watch(model, rules=False) as watched:
        model(x).sum().backward()
        torch.optim.SGD(model.parameters(), 0.0).step()
    dead = (model.act(model.fc1(x)) == 0).all(0).sum()
    assert values(watched, "act", "dead") == [float(dead)]
    assert dead >= 3


def test_values_without_channels_are_left_alone() -> None:
    model = nn.Sequential(nn.Flatten(0), nn.ReLU(), nn.Tanh())
    with hl.watch(model, rules=False) as watched:
        model(torch.randn(3, 2, requires_grad=True)).sum().backward()
        watched.step()
        model(torch.randn(0, 2, requires_grad=True)).sum().backward()
        watched.step()
    assert values(watched, "1", "units") == [6.0]
    assert not watched.notes


def test_looking_at_channels_is_not_seen_by_a_mode_of_the_user() -> None:
    class Seeing(torch.overrides.TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    model = Fed(nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with hl.watch(model) as watched, Seeing() as seeing:
        plain_loop(4, 3)(model, optimizer)
    assert values(watched, "act", "dead")
    assert not {"amax", "amin", "count_nonzero"} & set(seeing.names)
