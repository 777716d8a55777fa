"""Alignment by names: equal ones, wrappers and prefixes, the user's map, numbers, visits."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

import pytest
import torch
from made_traces import MemoryTrace, TraceMaker, follow, rename
from torch import Tensor, nn

from hookline.diffs.aligning import align
from hookline.diffs.matches import Alignment


def pairs_of(a: MemoryTrace, b: MemoryTrace, found: Alignment) -> dict[str, str]:
    """Give the matched addresses, groups joined by a plus."""
    return {
        "+".join(a.sites[site].address for site in match.a): "+".join(
            b.sites[site].address for site in match.b
        )
        for match in found.matches
    }


def rules_of(found: Alignment) -> Counter[str]:
    return Counter(match.rule for match in found.matches)


def assert_everything_pairs_with_itself(a: MemoryTrace, found: Alignment, rule: str) -> None:
    assert [(match.a, match.b) for match in found.matches] == [
        ((site.id,), (site.id,)) for site in a.sites
    ]
    assert (found.alone_a, found.alone_b, found.notes) == ([], [], [])
    assert set(rules_of(found)) <= {rule, "name"}
    assert rules_of(found)[rule]


def chain(*modules: nn.Module, names: str = "abcdefgh") -> nn.Sequential:
    return nn.Sequential(OrderedDict(zip(names, modules, strict=False)))


@pytest.fixture(scope="module")
def nested() -> MemoryTrace:
    """A step of a small network with containers, a buffer, gradients and updates."""
    torch.manual_seed(0)
    block = chain(nn.Linear(4, 4), nn.ReLU(), names="xy")
    model = chain(block, nn.BatchNorm1d(4), chain(nn.Linear(4, 4), nn.Tanh(), names="xy"))
    return follow(model, torch.randn(6, 4), loss=lambda out: out.square().mean(), lr=0.1)


def test_equal_names_pair_every_site(nested: MemoryTrace) -> None:
    found = align(nested, nested)
    assert_everything_pairs_with_itself(nested, found, "name")
    assert found.names == {path: path for path in ("", "a", "a.x", "a.y", "b", "c", "c.x", "c.y")}
    assert {match.how for match in found.matches} == {"same"}


@pytest.mark.parametrize(
    "change",
    [
        lambda path: f"model.{path}" if path else "model",
        lambda path: "transformer.core." + path if path else "",
        lambda path: ".".join(f"{part}._orig_mod" for part in path.split(".")) if path else "",
        lambda path: path.replace("c", "module.c._checkpoint_wrapped_module"),
    ],
    ids=["root too", "two segments", "compiled", "inner"],
)
def test_wrappers_and_prefixes_pair_every_site(
    nested: MemoryTrace, change: Callable[[str], str]
) -> None:
    renamed = rename(nested, change)
    assert_everything_pairs_with_itself(nested, align(nested, renamed), "wrapper")
    assert_everything_pairs_with_itself(nested, align(renamed, nested), "wrapper")


def test_module_around_another_is_left_alone(nested: MemoryTrace) -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    torch.manual_seed(0)
    model, x = chain(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    plain, around = follow(model, x), follow(Around(model), x)
    found = align(around, plain)
    assert found.names == {"inner": "", "inner.a": "a", "inner.b": "b"}
    assert (found.alone_a, found.alone_b) == ([], [])
    assert align(plain, around).names == {"": "inner", "a": "inner.a", "b": "inner.b"}


def test_root_that_does_more_stays_the_root() -> None:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = chain(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).sum(-1)

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)).sum(-1)

    found = align(follow(Headed(), torch.randn(2, 4)), follow(Flat(), torch.randn(2, 4)))
    assert found.names == {"": "", "body.a": "a", "body.b": "b"}


def test_map_of_a_path_takes_what_is_below(nested: MemoryTrace) -> None:
    renamed = rename(nested, lambda path: {"a": "z.deep"}.get(path, path.replace("a.", "z.deep.")))
    found = align(nested, renamed, names={"a": "z.deep"})
    assert_everything_pairs_with_itself(nested, found, "map")
    assert rules_of(found)["map"] == sum(site.module.startswith("a") for site in nested.sites)


def test_map_comes_before_equal_names(nested: MemoryTrace) -> None:
    found = align(nested, nested, names={"a": "c", "c": "a"})
    assert found.names["a.x"] == "c.x"
    assert found.names["c.x"] == "a.x"
    pairs = pairs_of(nested, nested, found)
    assert pairs["a.x:output"] == "c.x:output"
    assert pairs["c.x.weight"] == "a.x.weight"
    assert pairs["a.x.weight:grad"] == "c.x.weight:grad"


def test_map_by_regular_expression(nested: MemoryTrace) -> None:
    renamed = rename(nested, lambda path: path.replace("x", "lin").replace("y", "act"))
    found = align(nested, renamed, names={r"(\w)\.x": r"\1.lin", r"(\w)\.y": r"\1.act"})
    assert_everything_pairs_with_itself(nested, found, "map")


def test_map_of_one_parameter() -> None:
    maker, other = TraceMaker(), TraceMaker()
    for name in ("one", "two"):
        maker.parameter("", name, torch.randn(2, 3))
    for name in ("eins", "zwei"):
        other.parameter("", name, torch.randn(2, 3))
    a, b = maker.build(), other.build()
    found = align(a, b, names={"two": "eins"})
    assert pairs_of(a, b, found) == {"one": "zwei", "two": "eins"}
    assert rules_of(found) == {"map": 1, "order": 1}


def test_map_that_matches_nothing_names_what_is_near(nested: MemoryTrace) -> None:
    with pytest.raises(ValueError, match=r"the first model has no `a\.z`.*Nearest: `a\.[xy]`"):
        align(nested, nested, names={"a.z": "c.x"})
    with pytest.raises(ValueError, match=r"the second model has no `c\.z`.*Nearest: `c\.[xy]`"):
        align(nested, nested, names={"a.x": "c.z"})
    with pytest.raises(ValueError, match="is no regular expression"):
        align(nested, nested, names={"(a.x": "c.x"})
    with pytest.raises(ValueError, match="is no regular expression"):
        align(nested, nested, names={r"(a)\.x+": r"\2.x"})


def test_module_put_into_a_sequence_moves_the_numbers() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(2, 4)
    a = follow(nn.Sequential(first, nn.ReLU(), last), x)
    b = follow(nn.Sequential(first, nn.Dropout(0.5), nn.ReLU(), last), x)
    found = align(a, b)
    assert found.names == {"": "", "0": "0", "1": "2", "2": "3"}
    assert pairs_of(a, b, found)["2.weight"] == "3.weight"
    assert [b.sites[site].address for site in found.alone_b] == ["1:output"]
    assert "matched in order, not by number" in found.notes[0]


def test_block_left_out_is_found_by_its_weights() -> None:
    torch.manual_seed(0)
    blocks = [chain(nn.Linear(4, 4), nn.ReLU()) for _ in range(6)]
    x = torch.randn(2, 4)
    a = follow(nn.Sequential(*blocks), x)
    b = follow(nn.Sequential(*blocks[:2], *blocks[3:]), x)
    found = align(a, b)
    blocks_found = {path: other for path, other in found.names.items() if path.isdecimal()}
    assert blocks_found == {"0": "0", "1": "1", "3": "2", "4": "3", "5": "4"}


def test_another_class_at_the_same_number_stays_matched() -> None:
    torch.manual_seed(0)
    first, x = nn.Linear(4, 4), torch.randn(2, 4)
    a = follow(nn.Sequential(first, nn.ReLU()), x)
    b = follow(nn.Sequential(first, nn.GELU()), x)
    found = align(a, b)
    assert pairs_of(a, b, found)["1:output"] == "1:output"
    assert set(rules_of(found)) == {"name"}


def test_one_name_with_another_shape_stays_matched_and_is_told() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 1, 8)
    a = follow(chain(nn.Conv1d(1, 2, 3)), x)
    b = follow(chain(nn.Conv1d(1, 2, 3, stride=2)), x)
    found = align(a, b)
    assert pairs_of(a, b, found)["a:output"] == "a:output"
    assert found.notes[0] == "`a:output` has shape 2x2x6 here and 2x2x3 there"


def test_visits_match_from_the_front() -> None:
    a, b = TraceMaker(), TraceMaker()
    for visit in range(3):
        a.value("shared", "output", torch.randn(2, 3), visit=visit)
    for visit in range(2):
        b.value("shared", "output", torch.randn(2, 3), visit=visit)
    found = align(a.build(), b.build())
    assert [(match.a, match.b) for match in found.matches] == [((0,), (0,)), ((1,), (1,))]
    assert found.alone_a == [2]


def test_batch_in_halves_is_put_together() -> None:
    """The whole model runs twice there; a module that runs twice a call keeps its order."""
    a, b = TraceMaker(), TraceMaker()
    first, second = torch.randn(4, 3), torch.randn(4, 3)
    a.value("", "input", torch.randn(4, 2), type="Net")
    a.value("twice", "output", first)
    a.value("twice", "output", second, visit=1)
    for half in range(2):
        b.value("", "input", torch.randn(2, 2), type="Net", visit=half)
        b.value("twice", "output", first.chunk(2)[half], visit=2 * half)
        b.value("twice", "output", second.chunk(2)[half], visit=2 * half + 1)
    for half in reversed(range(2)):
        b.gradient(2 + 3 * half, second.chunk(2)[half])
    a.gradient(2, second)
    found = align(a.build(), b.build())
    assert [(m.a, m.b, m.how, m.dim) for m in found.matches] == [
        ((0,), (0, 3), "concat", 0),
        ((1,), (1, 4), "concat", 0),
        ((2,), (2, 5), "concat", 0),
        ((3,), (7, 6), "concat", 0),
    ]
    assert (found.alone_a, found.alone_b) == ([], [])


def test_leaves_called_otherwise_pair_by_shape() -> None:
    a, b = TraceMaker(), TraceMaker()
    x, mask = torch.randn(2, 3), torch.ones(2)
    a.value("attn", "input", x, leaf=("hidden",))
    a.value("attn", "input", mask, leaf=("mask",))
    a.value("attn", "output", x + 1)
    b.value("attn", "input", mask, leaf=(1,))
    b.value("attn", "input", x, leaf=(0,))
    b.value("attn", "output", x + 1, leaf=(0,))
    found = align(a.build(), b.build())
    assert [(match.a, match.b) for match in found.matches] == [
        ((0,), (1,)),
        ((1,), (0,)),
        ((2,), (2,)),
    ]


def test_gradients_pair_arrival_by_arrival_and_parts_apart() -> None:
    def make(arrivals: int) -> MemoryTrace:
        maker = TraceMaker()
        value = maker.value("a", "output", torch.randn(2, 3))
        taken = maker.value("b", "input", torch.zeros(2, 3), same_as=value)
        maker.gradient(taken, torch.randn(2, 3), is_part=True)
        for _ in range(arrivals):
            maker.gradient(value, torch.randn(2, 3))
        return maker.build()

    found = align(make(2), make(1))
    assert [(match.a, match.b) for match in found.matches] == [
        ((site,), (site,)) for site in range(4)
    ]
    assert found.alone_a == [4]


def test_gradient_of_a_copy_is_not_that_of_the_original() -> None:
    """There b takes a itself, so the gradient of a is that of all its consumers."""
    a, b = TraceMaker(), TraceMaker()
    x = torch.randn(2, 3)
    for maker in (a, b):
        maker.value("a", "output", x)
    a.value("b", "input", x)
    b.value("b", "input", x, same_as=0)
    a.gradient(1, x)
    b.gradient(0, x)
    found = align(a.build(), b.build())
    assert [(match.a, match.b) for match in found.matches] == [((0,), (0,)), ((1,), (1,))]
    assert (found.alone_a, found.alone_b) == ([2], [2])


def test_buffer_after_the_step_is_another_site() -> None:
    maker = TraceMaker()
    maker.parameter("bn", "mean", torch.zeros(3), kind="buffer")
    maker.parameter("bn", "mean", torch.ones(3), kind="buffer", more={"after": True})
    trace = maker.build()
    assert [(match.a, match.b) for match in align(trace, trace).matches] == [
        ((0,), (0,)),
        ((1,), (1,)),
    ]


def test_empty_traces_align_with_anything(nested: MemoryTrace) -> None:
    empty = MemoryTrace([], [])
    assert align(empty, empty) == Alignment([])
    found = align(nested, empty)
    assert found.matches == []
    assert found.alone_a == [site.id for site in nested.sites if site.same_as is None]
