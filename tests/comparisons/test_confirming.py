"""What the modules themselves say of a difference: up, down, and what is excused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from planted_gpt import (
    Attention,
    Gpt,
    exchange_forward,
    loss_of,
    make_gpt,
    make_words,
    tanh_gelu,
)
from torch import Tensor, nn

from hookline.comparisons import diff
from hookline.diffs.difference import Difference


class Router(nn.Module):
    """Choose the best of some experts; what it gives is whole numbers alone."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).topk(self.count, dim=-1).indices


class Mixture(nn.Module):
    """Add up the chosen experts."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = Router(count)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x)
        return x + torch.einsum("bd,bkdo->bo", x, self.experts[chosen])


def test_child_that_differs_itself_takes_the_blame() -> None:
    """One index for two has nothing to be compared with: the mixture is what shows."""
    a = nn.Sequential(nn.Linear(8, 8), Mixture(2), nn.Linear(8, 2))
    b = copy.deepcopy(a)
    b[1].router.count = 1
    found = diff(a, b, (torch.randn(6, 8),))
    assert found.first == "1.router"
    assert found.operation == "1.router/topk"
    assert any("k=2 here, 1 there" in cause for cause in found.causes)


class Mirrored(nn.Module):
    """An odd function of what comes in, also computed on the other side of zero."""

    def __init__(self, is_mirrored: bool) -> None:
        super().__init__()
        self.is_mirrored = is_mirrored
        self.odd = nn.Linear(8, 8, bias=False)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(-self.odd(-x) if self.is_mirrored else self.odd(x))


def test_inside_of_a_module_that_gives_the_same_is_excused() -> None:
    a = nn.Sequential(nn.Linear(8, 8), Mirrored(False), nn.Linear(8, 2))
    b = copy.deepcopy(a)
    b[1].is_mirrored = True
    x = torch.randn(5, 8)
    assert not diff(a, b, (x,), confirm=False).same
    found = diff(a, b, (x,), loss=lambda out: out.square().mean())
    assert found.same
    assert found.agree_to < 1e-5
    assert any("what is inside of `1` differs" in note for note in found.notes)
    excused = [pair for pair in found.pairs if "which gives the same" in pair.word]
    assert {pair.module for pair in excused} == {"1.odd"}
    assert {pair.verdict for pair in excused} == {"not compared"}


def test_excused_module_does_not_hide_what_comes_after_it() -> None:
    a = nn.Sequential(nn.Linear(8, 8), Mirrored(False), nn.GELU(), nn.Linear(8, 2))
    b = copy.deepcopy(a)
    b[1].is_mirrored = True
    b[2].approximate = "tanh"
    found = diff(a, b, (torch.randn(5, 8),))
    assert (found.first, found.operation) == ("2", "2/gelu")
    assert found.agree_to < 1e-5


def test_excused_module_does_not_hide_what_is_wrong_in_it() -> None:
    a = nn.Sequential(nn.Linear(8, 8), Mirrored(False), nn.Linear(8, 2))
    b = copy.deepcopy(a)
    b[1].is_mirrored = True
    with torch.no_grad():
        b[1].fc.bias[3] += 0.01
    found = diff(a, b, (torch.randn(5, 8),))
    assert found.first == "1.fc"


class Scaled(nn.Module):
    """Scale by a number that is handed over."""

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return x * factor


class Through(nn.Module):
    """Hand a number to another module."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.fc, self.scaled = nn.Linear(3, 3), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.fc(x), self.factor)


def test_module_that_only_inherits_hands_the_blame_up() -> None:
    """No trace shows the number; called with the same one, the module gives the same."""
    a, b = nn.Sequential(Through(2.0)), nn.Sequential(Through(3.0))
    b.load_state_dict(a.state_dict())
    x = torch.randn(4, 3)
    assert diff(a, b, (x,), confirm=False).first == "0.scaled"
    found = diff(a, b, (x,))
    assert found.first == "0"
    assert found.operation == "0.scaled"
    assert "factor=2.0 here, 3.0 there" in found.causes
    assert found.graft is not None
    assert found.graft["verdict"] == "itself"


def test_gradient_that_a_hook_changes_is_not_called_inherited() -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    b.blocks[1].mlp.fc1.weight.register_hook(lambda grad: grad * 1.5)
    found = diff(a, b, (make_words(),), loss=loss_of)
    assert (found.first, found.direction) == ("blocks.1.mlp.fc1", "parameter gradient")
    assert found.graft is not None
    assert "a hook or another use" in found.graft["sentence"]


def test_frozen_parameter_is_found() -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    b.blocks[1].mlp.fc1.weight.requires_grad_(False)
    found = diff(a, b, (make_words(),), loss=loss_of)
    assert (found.first, found.direction) == ("blocks.1.mlp.fc1", "parameter gradient")


def test_pair_of_optimizers() -> None:
    a = make_gpt()
    make = [lambda p, lr=lr: torch.optim.SGD(p, lr=lr) for lr in (0.1, 0.2)]
    same = diff(a, a, (make_words(),), loss=loss_of, optimizer=make[0])
    assert same.same
    found = diff(a, a, (make_words(),), loss=loss_of, optimizer=(make[0], make[1]))
    assert (found.direction, found.first) == ("update", "")
    with pytest.raises(TypeError, match="a function of parameters"):
        diff(a, a, (make_words(),), loss=loss_of, optimizer=0.1)


class OtherNames(nn.Module):
    """The same model with other names, written by somebody else."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.tokens, self.places = gpt.wte, gpt.wpe
        self.layers = nn.ModuleList(Layer(block) for block in gpt.blocks)
        self.last, self.out = gpt.norm, gpt.head

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(self.last(hidden))


class Layer(nn.Module):
    """A block of it."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.before, self.mix = block.ln1, block.attn
        self.after, self.up, self.act, self.down = (
            block.ln2,
            block.mlp.fc1,
            block.mlp.act,
            block.mlp.fc2,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mix(self.before(hidden))
        return hidden + self.down(self.act(self.up(self.after(hidden))))


def port(plant: Any = None) -> tuple[Gpt, OtherNames]:
    a = make_gpt()
    copied = copy.deepcopy(a)
    if plant is not None:
        plant(copied)
    return a, OtherNames(copied)


def find(plant: Any = None) -> Difference:
    a, b = port(plant)
    return diff(a, b, (make_words(),), loss=loss_of)


def test_port_with_other_names_and_nesting_is_the_same() -> None:
    assert find().same


def test_bug_in_a_port_is_found_and_descended_into() -> None:
    found = find(tanh_gelu)
    assert (found.first, found.first_b) == ("blocks.1.mlp.act", "layers.1.act")
    assert found.operation == "blocks.1.mlp.act/gelu"

    def unscaled(gpt: Gpt) -> None:
        def forward(self: Attention, x: Tensor) -> Tensor:
            return Attention.forward(self, x) * 0.99

        exchange_forward(gpt.blocks[1].attn, forward)

    found = find(unscaled)
    assert (found.first, found.first_b) == ("blocks.1.attn", "layers.1.mix")
    assert found.operation == "blocks.1.attn/mul[1]"


def test_values_that_agree_are_not_kept() -> None:
    """The second model's values are compared as they flow."""
    a = make_gpt()
    found = diff(a, copy.deepcopy(a), (make_words(),), loss=loss_of)
    assert found.traces is not None
    assert found.traces[1].kept_bytes == 0  # type: ignore[attr-defined]
    assert {pair.measured for pair in found.pairs if pair.r is not None} == {"tensor"}
    b = copy.deepcopy(a)
    tanh_gelu(b)
    found = diff(a, b, (make_words(),), loss=loss_of)
    profile = found.profile("blocks.1.mlp.act")
    assert profile is not None
    assert profile.r == pytest.approx(found.introduced)
