"""State that a module keeps, randomness of its own, and writing into what it was given."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twin_models import pair_blocks, record_both, square

import hookline as hl

ELSEWHERE = torch.Generator().manual_seed(7)
"""A generator that no model holds, so that nobody can put it back."""


class Noisy(nn.Module):
    """Add noise, from torch's generator or from one that is elsewhere."""

    def __init__(self, *, is_own: bool) -> None:
        super().__init__()
        self.is_own = is_own

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=ELSEWHERE if self.is_own else None)


def test_a_that_does_not_repeat_itself_is_told() -> None:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(6, 6), Noisy(is_own=True), nn.Linear(6, 3))
    b = nn.Sequential(nn.Linear(6, 6), Noisy(is_own=False), nn.Linear(6, 3))
    b.load_state_dict(a.state_dict())
    found = hl.diff(a, b, torch.randn(4, 6), loss=square)
    assert (found.same, found.first, found.direction) == (False, "1", "forward")
    assert found.limit < 1e-3
    assert "does not repeat itself" in str(found)
    assert any(note.startswith("A: it does not repeat itself: `1:output`") for note in found.notes)


def test_random_numbers_of_torch_repeat_themselves() -> None:
    a = nn.Sequential(nn.Linear(6, 6), Noisy(is_own=False), nn.Dropout(0.5))
    found = hl.diff(a, copy.deepcopy(a), torch.randn(4, 6), loss=square)
    assert found.same
    assert not found.notes


class Checkpointed(nn.Module):
    """Blocks whose inside is computed again in the backward pass."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        layers = (nn.Linear(6, 6), nn.Dropout(0.3), nn.Identity(), nn.Tanh())
        self.blocks = nn.ModuleList(nn.Sequential(*map(copy.deepcopy, layers)) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_model_has_floors(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    a = Checkpointed(use_reentrant=use_reentrant)
    b = copy.deepcopy(a)
    x = torch.randn(4, 6, requires_grad=True)
    found = hl.diff(a, b, x, loss=square)
    assert found.same
    floors = {pair.site: pair.floor for pair in found.pairs}
    for address in ("blocks.2.3:output", "blocks.0.0.weight:grad"):
        assert 1e-8 < (floors[address] or 0) < 1e-4, address


class Counting(nn.Module):
    """Scale what it gets; in the call number `odd` of a step by something else."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.calls = 0
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1.5 if self.calls == self.odd else 1.25)


class Repeating(nn.Module):
    """Call one module several times."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.cell = Counting(odd)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            x = torch.tanh(self.cell(x))
        return x


def test_state_between_calls_blames_the_module_that_keeps_it() -> None:
    a, b = Repeating(odd=0), Repeating(odd=3)
    b.load_state_dict(a.state_dict())
    found = hl.diff(a, b, torch.randn(4, 6), loss=square)
    assert (found.first, found.site, found.visit) == ("cell", "cell:output", 2)
    assert any(cause.startswith("what it keeps between calls") for cause in found.causes)


class Drawing(nn.Module):
    """Drop some of it, perhaps after having drawn a number that nobody uses."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.draws:
            torch.rand(1)
        return self.drop(x)


def test_other_random_states_are_the_doing_of_who_drew() -> None:
    a = nn.Sequential(nn.Linear(6, 6), Drawing(draws=False))
    b = nn.Sequential(nn.Linear(6, 6), Drawing(draws=True))
    b.load_state_dict(a.state_dict())
    found = hl.diff(a, b, torch.randn(8, 6), loss=square)
    assert (found.site, found.first) == ("1.drop:output", "1")


class Residual(nn.Module):
    """Add to the input what an activation and a layer make of it."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=inplace)
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(x)) + x


class Feeding(nn.Module):
    """An activation on what a layer made, which nobody else uses; `scale` is its own code."""

    def __init__(self, *, inplace: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.act = nn.ReLU(inplace=inplace)
        self.down = nn.Linear(12, 6)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.act(self.up(x)))


@pytest.mark.parametrize("is_first_inplace", [False, True])
def test_a_module_that_writes_into_a_residual_is_to_blame(
    is_first_inplace: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    blocks = [Residual(inplace=one) for one in (is_first_inplace, not is_first_inplace)]
    a, b = pair_blocks(*blocks)
    x = torch.randn(4, 6)
    for found in (hl.diff(a, b, x, loss=square), record_both(a, b, x, tmp_path)):
        assert (found.first, found.site) == ("1.act", "1:output")
        assert any(cause.startswith("inplace=") for cause in found.causes)
        assert found.causes[0].startswith("it writes into its input")


def test_writing_where_nobody_reads_again_is_no_difference(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a, b = pair_blocks(Feeding(inplace=False), Feeding(inplace=True))
    x = torch.randn(4, 6)
    assert hl.diff(a, b, x, loss=square).same
    assert record_both(a, b, x, tmp_path).same


def test_writing_where_nobody_reads_again_is_not_to_blame_for_other_code(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a, b = pair_blocks(Feeding(inplace=False), Feeding(inplace=True, scale=0.9))
    x = torch.randn(4, 6)
    for found in (hl.diff(a, b, x, loss=square), record_both(a, b, x, tmp_path)):
        assert (found.first, found.site) == ("1", "1:output")


def test_a_module_of_the_users_that_writes_into_its_input_is_to_blame(tmp_path: Path) -> None:
    class Gate(nn.Module):
        def __init__(self, *, writes: bool) -> None:
            super().__init__()
            self.writes = writes

        def forward(self, x: Tensor) -> Tensor:
            if self.writes:
                x *= 0.5
                return torch.sigmoid(x)
            return torch.sigmoid(x * 0.5)

    class Gated(nn.Module):
        def __init__(self, *, writes: bool) -> None:
            super().__init__()
            self.inp = nn.Linear(6, 6)
            self.gate = Gate(writes=writes)
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            gate = self.gate(x)
            return self.out(x * gate)

    a, b = Gated(writes=False), Gated(writes=True)
    b.load_state_dict(a.state_dict())
    x = torch.randn(4, 6)
    for found in (hl.diff(a, b, x, loss=square), record_both(a, b, x, tmp_path)):
        assert (found.first, found.site) == ("gate", "out:input.input")
