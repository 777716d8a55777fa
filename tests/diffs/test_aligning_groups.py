"""Alignment of one tensor with several: fused projections, weights in pieces, turned weights."""

from __future__ import annotations

import pytest
import torch
from made_models import WIDTH, FusedAttention, SplitAttention, TurnedLinear, make_input, make_ports
from made_traces import MemoryTrace, TraceMaker, follow
from torch import Tensor, nn

from hookline.diffs.aligning import align
from hookline.diffs.matches import Match


def find(a: MemoryTrace, matches: list[Match], address: str) -> Match:
    return next(match for match in matches if a.sites[match.a[0]].address == address)


def names_of(trace: MemoryTrace, sites: tuple[int, ...]) -> list[str]:
    return [trace.sites[site].address for site in sites]


@pytest.mark.parametrize("order", ["qkv", "vqk"])
@pytest.mark.parametrize("keeps", [True, False], ids=["tensors", "sketches"])
def test_fused_projection_is_q_k_and_v_in_order(order: str, keeps: bool) -> None:
    fused, split = make_ports(order=order)
    loss = torch.Tensor.sum
    a = follow(fused, make_input(), loss=loss, lr=0.1, keeps_tensors=keeps)
    b = follow(split, make_input(), loss=loss, lr=0.1, keeps_tensors=keeps)
    found = align(a, b)
    pieces = [f"h.1.mixer.{name}_lin" for name in "qkv"]
    for ending, dim in [
        (":output", 2),
        (":output.grad", 2),
        (".weight", 0),
        (".bias", 0),
        (".weight:grad", 0),
        (".bias:update", 0),
    ]:
        match = find(a, found.matches, f"blocks.1.attn.qkv{ending}")
        assert names_of(b, match.b) == [piece + ending for piece in pieces]
        assert (match.how, match.dim, match.rule) == ("concat", dim, "order")
    assert (found.alone_a, found.alone_b) == ([], [])


def test_turned_weights_are_transposed_also_when_square() -> None:
    fused, split = make_ports(linear=TurnedLinear)
    a = follow(fused, make_input(), loss=torch.Tensor.sum)
    b = follow(split, make_input(), loss=torch.Tensor.sum)
    for one, other in ((a, b), (b, a)):
        matches = align(one, other).matches
        ways = {
            (one.sites[match.a[0]].address, match.how, match.dim)
            for match in matches
            if one.sites[match.a[0]].kind == "parameter"
        }
        ours = one is a
        assert (
            "blocks.0.attn.proj.weight" if ours else "h.0.mixer.out.weight",
            "transposed",
            None,
        ) in ways
        assert ("blocks.0.mlp.fc.weight" if ours else "h.0.up.weight", "transposed", None) in ways
        assert (
            "blocks.0.attn.qkv.weight" if ours else "h.0.mixer.q_lin.weight",
            "transposed",
            0,
        ) in ways
        assert ("blocks.0.mlp.fc.bias" if ours else "h.0.up.bias", "same", None) in ways


def test_square_weight_of_one_name_and_another_class_is_transposed() -> None:
    torch.manual_seed(0)
    turned, plain = TurnedLinear(6, 6), nn.Linear(6, 6)
    plain.weight.data = turned.weight.data.T.contiguous()
    a, b = (
        follow(nn.Sequential(turned), torch.randn(2, 6)),
        follow(nn.Sequential(plain), torch.randn(2, 6)),
    )
    match = find(a, align(a, b).matches, "0.weight")
    assert (match.how, match.rule) == ("transposed", "name")


def test_square_weight_turned_in_one_class_is_no_layout() -> None:
    """A weight that somebody transposed by mistake must not be turned back."""
    torch.manual_seed(0)
    right, wrong = nn.Sequential(nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 6))
    wrong[0].weight.data = right[0].weight.data.T.contiguous()
    a, b = follow(right, torch.randn(2, 6)), follow(wrong, torch.randn(2, 6))
    assert find(a, align(a, b).matches, "0.weight").how == "same"


def test_projection_fused_head_by_head_is_refused() -> None:
    """The weights are the same, but the outputs are not the pieces one after the other."""
    fused, split = FusedAttention(), SplitAttention()
    with torch.no_grad():
        names = [split.get_submodule(f"{name}_lin") for name in "qkv"]
        heads = [one.weight.unflatten(0, (2, -1)) for one in names]
        fused.qkv.weight.copy_(torch.cat(heads, dim=1).flatten(0, 1))
    a, b = follow(fused, make_input()), follow(split, make_input())
    found = align(a, b)
    alone = names_of(a, tuple(found.alone_a))
    assert alone == ["qkv:output", "qkv.weight", "qkv.bias"]
    assert any("`qkv` is put together otherwise" in note for note in found.notes)


def test_one_wrong_piece_does_not_hide_the_group() -> None:
    fused, split = make_ports(layers=1)
    with torch.no_grad():
        split.h[0].mixer.k_lin.weight.add_(1.0)
    a, b = follow(fused, make_input()), follow(split, make_input())
    match = find(a, align(a, b).matches, "blocks.0.attn.qkv:output")
    assert names_of(b, match.b) == [f"h.0.mixer.{name}_lin:output" for name in "qkv"]


def test_pieces_of_unequal_width_are_put_together() -> None:
    """Grouped queries: k and v are narrower than q."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused = nn.Linear(6, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.fused(x).sum(-1)

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.query(x), self.key(x), self.value(x)], -1).sum(-1)

    torch.manual_seed(0)
    wide, narrow = Wide(), Narrow()
    with torch.no_grad():
        for name in ("weight", "bias"):
            pieces = [getattr(one, name) for one in (narrow.query, narrow.key, narrow.value)]
            getattr(wide.fused, name).copy_(torch.cat(pieces))
    a, b = follow(wide, torch.randn(2, 6)), follow(narrow, torch.randn(2, 6))
    match = find(a, align(a, b).matches, "fused:output")
    assert names_of(b, match.b) == ["query:output", "key:output", "value:output"]


def test_summed_halves_of_a_linear_are_pieces_of_the_weight_only() -> None:
    class Halves(nn.Module):
        def __init__(self, whole: nn.Linear) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(3, 4, bias=False), nn.Linear(3, 4)
            for part, piece in zip((self.low, self.high), whole.weight.chunk(2, 1), strict=True):
                part.weight.data = piece.detach().clone()
            self.high.bias.data = whole.bias.detach().clone()

        def forward(self, x: Tensor) -> Tensor:
            low, high = x.chunk(2, -1)
            return self.low(low) + self.high(high)

    torch.manual_seed(0)
    whole, x = nn.Linear(6, 4), torch.randn(2, 6)
    a = follow(nn.Sequential(whole), x, loss=torch.Tensor.sum)
    b = follow(nn.Sequential(Halves(whole)), x, loss=torch.Tensor.sum)
    found = align(a, b)
    output = find(a, found.matches, "0:output")
    assert (names_of(b, output.b), output.rule) == (["0:output"], "name")
    weight = find(a, found.matches, "0.weight")
    assert (names_of(b, weight.b), weight.dim) == (["0.low.weight", "0.high.weight"], 1)
    assert names_of(b, find(a, found.matches, "0.bias").b) == ["0.high.bias"]
    grads = find(a, found.matches, "0.weight:grad")
    assert names_of(b, grads.b) == ["0.low.weight:grad", "0.high.weight:grad"]


def test_packed_weights_of_torch_attention_meet_separate_ones() -> None:
    packed = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    maker = TraceMaker()
    for name, piece in zip("qkv", packed.in_proj_weight.detach().chunk(3), strict=True):
        maker.parameter(f"attn.{name}", "weight", piece)
    other = TraceMaker()
    other.parameter("mha", "in_proj_weight", packed.in_proj_weight, type="MultiheadAttention")
    a, b = maker.build(), other.build()
    assert align(a, b).matches == [Match((0, 1, 2), (0,), "order", "concat", 0)]


def test_kind_alone_groups_what_adds_up() -> None:
    """Other weights on both sides: neighbours of one class between two matched values."""
    torch.manual_seed(0)
    fused, split = make_ports(layers=2)
    for parameter in split.parameters():
        nn.init.normal_(parameter)
    a = follow(fused, make_input(), keeps_tensors=False)
    b = follow(split, make_input(), keeps_tensors=False)
    matches = align(a, b).matches
    for number in range(2):
        match = find(a, matches, f"blocks.{number}.attn.qkv:output")
        assert names_of(b, match.b) == [f"h.{number}.mixer.{name}_lin:output" for name in "qkv"]
