"""Ports that are cut otherwise, arguments that are not passed, rows that go another way."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from twin_models import pair_blocks, patch, record_both, square

import hookline as hl


class Unit(nn.Module):
    """A convolution and a norm, as one."""

    def __init__(self, given: int, made: int, stride: int = 1) -> None:
        super().__init__()
        self.c = nn.Conv2d(given, made, 3, stride, 1)
        self.n = nn.BatchNorm2d(made)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.n(self.c(x)))


class Flat(nn.Module):
    """Two convolutions with a way around them; norms and activations are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(y))) + x[..., ::2, ::2]


class Nested(nn.Module):
    """The same with other modules; `strides` and `scale` may be wrong."""

    def __init__(self, strides: tuple[int, int] = (2, 1), scale: float = 1.0) -> None:
        super().__init__()
        self.one, self.two = Unit(4, 4, strides[0]), Unit(4, 4, strides[1])
        self.scale = scale

    def forward(self, inputs: Tensor) -> Tensor:
        return self.two(self.one(inputs)) + self.scale * inputs[..., ::2, ::2]


class NetA(nn.Module):
    """A stem, one block, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.body = nn.Sequential(Flat())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class NetB(nn.Module):
    """The same under other names."""

    def __init__(self, block: Nested) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, 4, 1)
        self.unit = block
        self.classify = nn.Linear(4, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.classify(self.unit(self.begin(image)).mean(dim=(-2, -1)))


def port(block: Nested) -> tuple[NetA, NetB]:
    """Make both with the same weights."""
    torch.manual_seed(0)
    a, b = NetA(), NetB(block)
    names = {
        "stem": "begin",
        "body.0.conv1": "unit.one.c",
        "body.0.norm1": "unit.one.n",
        "body.0.conv2": "unit.two.c",
        "body.0.norm2": "unit.two.n",
        "head": "classify",
    }
    for name, other in names.items():
        b.get_submodule(other).load_state_dict(a.get_submodule(name).state_dict())
    return a, b


@pytest.mark.parametrize(
    ("block", "first"),
    [
        (Nested(), None),
        (Nested(strides=(1, 2)), "body.0.conv1"),
        (Nested(scale=0.98), "body.0"),
    ],
)
def test_a_port_is_blamed_where_it_parts(block: Nested, first: str | None, tmp_path: Path) -> None:
    a, b = port(block)
    x = torch.randn(2, 3, 8, 8)
    for found in (hl.diff(a, b, x, loss=square), record_both(a, b, x, tmp_path)):
        assert found.first == first


def test_a_value_is_of_its_first_maker_where_that_has_no_counterpart(tmp_path: Path) -> None:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return x.flip(0) + self.shift

    class A(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = Embed()
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(self.embed(x))

    class B(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(6))
            self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4)

        def forward(self, data: Tensor) -> Tensor:
            return self.last(self.norm(self.first(data.flip(0) + 0.9 * self.shift)))

    a, b = A(), B()
    for name, other in (("0", "first"), ("1", "norm"), ("2", "last")):
        source = a.layers.get_submodule(name).state_dict()
        b.get_submodule(other).load_state_dict(source)
    with torch.no_grad():
        b.shift.copy_(a.embed.shift)
    x = torch.randn(4, 6)
    for found in (hl.diff(a, b, x, loss=square), record_both(a, b, x, tmp_path)):
        assert found.first == "embed"


class Masked(nn.Module):
    """Hide some of what a layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.fc(x)
        return y if mask is None else y * mask


class Masking(nn.Module):
    """A block that passes the mask on, or forgets to."""

    def __init__(self, *, passes: bool = True) -> None:
        super().__init__()
        self.inner = Masked()
        self.passes = passes

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + (self.inner(x, mask=mask) if self.passes else self.inner(x))


class Stack(nn.Module):
    """Some blocks."""

    def __init__(self, passes: tuple[bool, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masking(passes=one) for one in passes)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.mark.parametrize("is_swapped", [False, True])
def test_an_argument_that_is_not_passed_is_the_doing_of_the_caller(
    is_swapped: bool, tmp_path: Path
) -> None:
    a, b = Stack((True, True, True)), Stack((True, False, True))
    b.load_state_dict(a.state_dict())
    a, b = (b, a) if is_swapped else (a, b)
    inputs = (torch.randn(4, 6), (torch.rand(4, 6) > 0.5).float())
    for found in (hl.diff(a, b, inputs, loss=square), record_both(a, b, inputs, tmp_path)):
        assert found.first == "blocks.1"
    assert any("passes `mask` to blocks.1.inner" in cause for cause in found.causes)


class Straight(nn.Module):
    """Round, and let the gradient through, or not."""

    def __init__(self, *, passes: bool) -> None:
        super().__init__()
        self.codes = nn.Linear(6, 6)
        self.passes = passes

    def forward(self, z: Tensor) -> Tensor:
        q = self.codes(z.detach().round())
        return z + (q - z).detach() + 0.1 * q - 0.1 * q.detach() if self.passes else q


@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_gradient_goes_wrong_where_a_value_is_handed_on_otherwise(is_swapped: bool) -> None:
    torch.manual_seed(0)
    a, b = pair_blocks(Straight(passes=True), Straight(passes=False))
    a, b = (b, a) if is_swapped else (a, b)
    found = hl.diff(a, b, torch.randn(4, 6), loss=square)
    assert (found.first, found.direction) == ("1", "backward")


def test_a_large_input_of_few_numbers_hides_nothing(tmp_path: Path) -> None:
    class Clocked(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.factor = factor

        def forward(self, x: Tensor, seconds: Tensor) -> Tensor:
            phase = (seconds % 60 / 60).float()[:, None]
            return x + self.factor * torch.tanh(self.fc(x)) + phase

    a, b = Clocked(0.5), Clocked(0.51)
    b.load_state_dict(a.state_dict())
    inputs = (torch.randn(4, 6), 1.7e9 + torch.arange(4, dtype=torch.float64))
    assert record_both(a, b, inputs, tmp_path).site == ":output"


class Routed(nn.Module):
    """Two experts, each on its own rows or on all of them with the others put to zero."""

    def __init__(self, *, is_dense: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.is_dense = is_dense
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        is_first = x[:, 0] > 0
        made = torch.zeros_like(x)
        for expert, rows in zip(self.experts, (is_first, ~is_first), strict=True):
            if self.is_dense:
                made = made + expert(x) * rows[:, None]
            else:
                made = made.index_add(0, rows.nonzero()[:, 0], expert(x[rows]))
        return made * self.scale


def test_rows_that_are_routed_otherwise_are_no_difference_where_they_come_to_the_same(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    a, b = pair_blocks(Routed(is_dense=False), Routed(is_dense=True))
    x = torch.randn(8, 6)
    found = record_both(a, b, x, tmp_path)
    assert found.same
    verdicts = {pair.site: pair.verdict for pair in found.pairs}
    assert verdicts["1.experts.0:output"] == "not compared"
    b[1].scale = 1.01  # type: ignore[index, union-attr, assignment]
    assert record_both(a, b, x, tmp_path / "other").first == "1"


def test_rounding_that_grows_slowly_is_no_difference_without_a_floor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [one for _ in range(40) for one in (nn.Linear(32, 32), nn.LayerNorm(32))]
    a = nn.Sequential(*layers).bfloat16()
    b = copy.deepcopy(a)
    for layer in b:
        if isinstance(layer, nn.Linear):  # rounded once more
            patch(layer, lambda self, x: F.linear(x, self.weight) + self.bias)
    x = torch.randn(8, 32).bfloat16()
    for name, model in (("a", a), ("b", b)):
        hl.record(model, tmp_path / name, x, calibrate=False)
    found = hl.diff(tmp_path / "a", tmp_path / "b")
    assert found.same, str(found)
    past = [pair for pair in found.pairs if (pair.r or 0) > pair.limit]
    assert past
    assert {pair.verdict for pair in past} == {"noise"}
    b[41].eps = 0.1  # type: ignore[assignment]
    hl.record(b, tmp_path / "c", x, calibrate=False)
    assert not hl.diff(tmp_path / "a", tmp_path / "c").same
