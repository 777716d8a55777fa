"""Alignment where names say nothing: values, weights, classes and the order of execution."""

from __future__ import annotations

import re
import time
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_models import FusedBlock, Stack, make_input, make_ports
from made_traces import MemoryTrace, TraceMaker, follow, rename
from torch import Tensor, nn

from hookline.diffs.aligning import align
from hookline.diffs.matches import Alignment, Match


def addresses_of(a: MemoryTrace, b: MemoryTrace, found: Alignment) -> dict[str, str]:
    """Give the matched addresses with their visits, groups joined by a plus."""

    def write(trace: MemoryTrace, sites: tuple[int, ...]) -> str:
        known = [trace.sites[site] for site in sites]
        return "+".join(f"{one.address}#{one.visit}".removesuffix("#0") for one in known)

    return {write(a, match.a): write(b, match.b) for match in found.matches}


def measure_error(a: MemoryTrace, b: MemoryTrace, match: Match) -> float:
    """Give the relative error of a match as its layout says to take it."""

    def join(trace: MemoryTrace, sites: tuple[int, ...]) -> Tensor:
        tensors = [trace.tensor(site, 0).double() for site in sites]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, match.dim)

    x, y = join(a, match.a), join(b, match.b)
    y = y.T if match.how == "transposed" else y
    assert x.shape == y.shape or match.how == "reshaped"
    return float((x.flatten() - y.flatten()).norm() / x.norm().clamp(min=1e-30))


def assert_pairs_with_itself(a: MemoryTrace, b: MemoryTrace, found: Alignment) -> None:
    wrong = [match for match in found.matches if match.a != match.b]
    assert wrong == []
    assert (found.alone_a, found.alone_b) == ([], [])


def scramble(path: str) -> str:
    """Rename every segment so that nothing is left of it but where it is."""
    return ".".join(f"n{hash_name(part)}" for part in path.split(".")) if path else ""


def hash_name(name: str) -> int:
    return int.from_bytes(name.encode(), "big") % 9973


@pytest.fixture(scope="module")
def ports() -> tuple[MemoryTrace, MemoryTrace]:
    fused, split = make_ports()
    x = make_input()
    loss = torch.Tensor.sum
    return follow(fused, x, loss=loss, lr=0.1), follow(split, x, loss=loss, lr=0.1)


def test_other_names_and_nesting_pair_every_value(ports: tuple[MemoryTrace, MemoryTrace]) -> None:
    a, b = ports
    found = align(a, b)
    assert (found.alone_a, found.alone_b, found.notes) == ([], [], [])
    assert max(measure_error(a, b, match) for match in found.matches) < 1e-5
    pairs = addresses_of(a, b, found)
    assert pairs["blocks.1.ln_2:input"] == "h.1.norm_b:input"
    assert pairs["blocks.1.mlp.fc:output"] == "h.1.up:output"
    assert pairs["blocks.1.mlp.proj:output.grad"] == "h.1.down:output.grad"
    assert pairs["blocks.1.mlp.proj.weight:update"] == "h.1.down.weight:update"
    assert found.names["blocks.2"] == "h.2"
    assert found.names["blocks.2.attn"] == "h.2.mixer"
    assert "blocks.2.mlp" not in found.names


def test_both_directions_say_the_same(ports: tuple[MemoryTrace, MemoryTrace]) -> None:
    a, b = ports
    there, back = align(a, b), align(b, a)
    assert {(match.a, match.b) for match in there.matches} == {
        (match.b, match.a) for match in back.matches
    }
    assert there.names == {path: other for other, path in back.names.items()}


def test_bug_early_on_does_not_undo_the_pairs(ports: tuple[MemoryTrace, MemoryTrace]) -> None:
    """With every value after it changed, weights and kinds say where everything is."""
    _, split = make_ports()
    split.h[0].norm_a.register_forward_hook(lambda module, given, out: out * 1.5 + 1)
    a, b = ports[0], follow(split, make_input(), loss=torch.Tensor.sum, lr=0.1)
    assert addresses_of(a, b, align(a, b)) == addresses_of(*ports, align(*ports))


def test_container_that_changes_its_result_is_still_itself(
    ports: tuple[MemoryTrace, MemoryTrace],
) -> None:
    """Here attention gives what its projection gave, there a new value; no child tells of it."""
    _, split = make_ports()
    split.h[1].mixer.register_forward_hook(lambda module, given, out: out * 1.5)
    a, b = ports[0], follow(split, make_input())
    found = align(a, b)
    pairs = addresses_of(a, b, found)
    assert pairs["blocks.1.attn:output"] == "h.1.mixer:output"
    assert pairs["blocks.1.attn.proj:output"] == "h.1.mixer.out:output"
    assert found.names["blocks"] == "h"


def test_other_weights_still_pair_by_kind_and_order() -> None:
    """Two trainings of one network in two code bases, with nothing equal but the structure."""
    a = follow(make_ports()[0], make_input())
    torch.manual_seed(5)
    b = rename(
        follow(Stack("blocks", [FusedBlock() for _ in range(3)]), torch.randn(3, 4, 8)), scramble
    )
    assert_pairs_with_itself(a, b, align(a, b))


def test_twelve_equal_blocks_do_not_shift() -> None:
    """One block twelve times, its weights the same each time, and a bug at the very start."""
    torch.manual_seed(0)
    block = FusedBlock()
    blocks = [FusedBlock() for _ in range(12)]
    for one in blocks:
        one.load_state_dict(block.state_dict())
    model = Stack("blocks", blocks)
    a = follow(model, make_input())
    b = rename(follow(model, -2 * make_input().flip(0)), scramble)
    assert_pairs_with_itself(a, b, align(a, b))


def test_sketches_alone_suffice(ports: tuple[MemoryTrace, MemoryTrace]) -> None:
    a, b = (MemoryTrace(one.sites, one.values, keeps_tensors=False) for one in ports)
    assert addresses_of(a, b, align(a, b)) == addresses_of(*ports, align(*ports))


def test_extra_and_missing_modules_stay_alone() -> None:
    class Chain(nn.Sequential):
        """A sequence whose names say nothing on the other side."""

    torch.manual_seed(0)
    shared = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6)]
    extra = nn.LayerNorm(6)
    ours = OrderedDict(zip("abcde", shared, strict=True))
    theirs = OrderedDict(zip("uvwxyz", [*shared[:3], extra, *shared[3:]], strict=True))
    x = torch.randn(4, 6)
    a, b = follow(Chain(ours), x), follow(Chain(theirs), x)
    found = align(a, b)
    assert found.names == {"": "", "a": "u", "b": "v", "c": "w", "d": "y", "e": "z"}
    assert [b.sites[site].address for site in found.alone_b] == [
        "x:output",
        "x.weight",
        "x.bias",
    ]
    back = align(b, a)
    assert [b.sites[site].address for site in back.alone_a] == ["x:output", "x.weight", "x.bias"]


def test_shared_module_pairs_visit_by_visit_with_separate_ones() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lins = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            for lin in self.lins:
                x = self.act(lin(x))
            return x

    torch.manual_seed(0)
    shared, x = Shared(), torch.randn(4, 5)
    separate = nn.Sequential(
        OrderedDict(
            (f"{kind}{number}", shared.lins[number] if kind == "fc" else nn.Tanh())
            for number in range(3)
            for kind in ("fc", "nonlin")
        )
    )
    a, b = follow(shared, x), follow(separate, x)
    pairs = addresses_of(a, b, align(a, b))
    assert [pairs[f"act:output{visit}"] for visit in ("", "#1", "#2")] == [
        "nonlin0:output",
        "nonlin1:output",
        "nonlin2:output",
    ]
    assert pairs["lins.2.weight"] == "fc2.weight"


def test_independent_branches_in_another_order() -> None:
    class Branches(nn.Module):
        def __init__(self, order: str) -> None:
            super().__init__()
            self.order = order

        def forward(self, x: Tensor) -> Tensor:
            made = {name: self.get_submodule(f"{name}")(x) for name in self.order}
            return made["l"] * made["r"]

    torch.manual_seed(0)
    left = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    right = nn.Sequential(nn.Linear(5, 5), nn.Sigmoid())
    one, other = Branches("lr"), Branches("rl")
    for model in (one, other):
        model.l, model.r = left, right
    x = torch.randn(3, 5)
    a, b = (
        follow(one, x),
        rename(follow(other, x), lambda path: path.replace("l", "x.p").replace("r", "x.q")),
    )
    found = align(a, b)
    assert (found.alone_a, found.alone_b) == ([], [])
    pairs = addresses_of(a, b, found)
    assert pairs["l.2:output"] == "x.p.2:output"
    assert pairs["r.1:output"] == "x.q.1:output"


def test_unrelated_models_hardly_align_and_notes_say_so() -> None:
    torch.manual_seed(0)
    a = follow(make_ports()[0], make_input())
    images = nn.Sequential(
        OrderedDict(c1=nn.Conv2d(1, 4, 3), r1=nn.ReLU(), c2=nn.Conv2d(4, 4, 3), flat=nn.Flatten())
    )
    b = follow(images, torch.randn(2, 1, 8, 8))
    found = align(a, b)
    assert {match.rule for match in found.matches} <= {"name"}
    assert len(found.matches) <= 2
    assert re.match(r"only [012] of 5 values align", found.notes[0])


def test_values_of_different_sizes_never_pair_by_order() -> None:
    torch.manual_seed(0)
    a = follow(nn.Sequential(OrderedDict(a=nn.Linear(4, 6), b=nn.ReLU())), torch.randn(2, 4))
    b = follow(nn.Sequential(OrderedDict(x=nn.Linear(4, 7), y=nn.ReLU())), torch.randn(2, 4))
    found = align(a, b)
    assert all(match.rule == "name" for match in found.matches)


def test_flattened_value_is_reshaped_and_permuted_one_is_alone() -> None:
    x = torch.randn(3, 4, 5)
    a, b = TraceMaker(), TraceMaker()
    a.value("p", "output", x)
    b.value("q", "output", x.flatten(0, 1))
    a.value("r", "output", x + 1, type="Tanh")
    b.value("s", "output", (x + 1).transpose(0, 1), type="Tanh")
    found = align(a.build(), b.build())
    assert [(match.a, match.b, match.how) for match in found.matches] == [((0,), (0,), "reshaped")]
    assert (found.alone_a, found.alone_b) == ([1], [1])


def test_values_that_are_not_finite_or_constant_pair_by_kind() -> None:
    a, b = TraceMaker(), TraceMaker()
    bad = torch.full((3, 4), torch.nan)
    for maker, names in ((a, "pqr"), (b, "xyz")):
        maker.value(names[0], "output", torch.zeros(3, 4), type="Tanh")
        maker.value(names[1], "output", bad, type="Linear")
        maker.value(names[2], "output", torch.ones(3, 4, dtype=torch.bool), type="Mask")
    found = align(a.build(), b.build())
    assert [(match.a, match.b) for match in found.matches] == [((n,), (n,)) for n in range(3)]


def test_half_precision_pairs_with_single() -> None:
    fused, split = make_ports()
    a, b = follow(fused, make_input()), follow(split, make_input())
    half = follow(split.bfloat16(), make_input().bfloat16())
    assert addresses_of(a, half, align(a, half)) == addresses_of(a, b, align(a, b))


names = st.lists(
    st.text("abcdefgh0123", min_size=1, max_size=3), min_size=40, max_size=40, unique=True
)


@settings(max_examples=25, deadline=None)
@given(
    widths=st.lists(st.integers(2, 5), min_size=1, max_size=6),
    kinds=st.lists(st.sampled_from(["linear", "tanh", "relu", "norm", "nested"]), max_size=6),
    words=names,
    seed=st.integers(0, 5),
)
def test_renamed_copy_pairs_every_site_with_itself(
    widths: list[int], kinds: list[str], words: list[str], seed: int
) -> None:
    torch.manual_seed(seed)
    model = grow(widths, kinds)
    trace = follow(model, torch.randn(3, widths[0]), loss=torch.Tensor.sum, lr=0.1)
    order = list(dict.fromkeys(part for site in trace.sites for part in site.module.split(".")))
    new = dict(zip(order, words, strict=False)) | {"": ""}
    renamed = rename(trace, lambda path: ".".join(new[part] for part in path.split(".")))
    assert_pairs_with_itself(trace, renamed, align(trace, renamed))


def grow(widths: list[int], kinds: list[str]) -> nn.Sequential:
    """Make a network of the given widths, with something of each kind in between."""
    layers: list[nn.Module] = []
    for number, (width, after) in enumerate(zip(widths, [*widths[1:], 3], strict=True)):
        made = {
            "linear": lambda width=width: nn.Linear(width, width),
            "tanh": nn.Tanh,
            "relu": nn.ReLU,
            "norm": lambda width=width: nn.LayerNorm(width),
            "nested": lambda width=width: nn.Sequential(nn.Linear(width, width), nn.Tanh()),
        }
        layers += [made[kind]() for kind in kinds[number : number + 2]]
        layers.append(nn.Linear(width, after))
    return nn.Sequential(OrderedDict((f"m{number}", one) for number, one in enumerate(layers)))


def make_deep(blocks: int, *, prefix: str) -> MemoryTrace:
    """Make a trace of many fresh values, ten a block."""
    generator = torch.Generator().manual_seed(0)
    maker = TraceMaker()
    for block in range(blocks):
        for place in range(10):
            value = torch.randn(2, 40, generator=generator)
            path = f"{prefix}{block}.{prefix}{place}"
            maker.value(path, "output", value, type=f"Kind{place % 3}")
    trace = maker.build()
    trace.measurements(0)
    return trace


def test_two_thousand_sites_align_quickly_with_names_and_without() -> None:
    a = make_deep(200, prefix="a")
    b = rename(a, lambda path: path.replace("a", "b"))
    b.measurements(0)
    for other, most in ((a, 1.0), (b, 5.0)):
        start = time.perf_counter()
        found = align(a, other)
        assert time.perf_counter() - start < most
        assert_pairs_with_itself(a, other, found)
