"""Dicts in compiled graphs: which keys can be told of, and what happens where one cannot."""

from __future__ import annotations

import copy
import enum
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class Colour(enum.Enum):
    RED = 1


class Kind(str, enum.Enum):  # noqa: UP042 its `str` is another text than the one it equals
    QUERY = "query"


class Size(enum.IntEnum):
    LARGE = 3


class Text(str):
    """Equals the text it is made of."""

    __slots__ = ()


class Keyed(nn.Module):
    """Two tensors by two keys, and what they add up to."""

    class Made(nn.Module):
        def __init__(self, keys: tuple[Any, Any]) -> None:
            super().__init__()
            self.keys = keys

        def forward(self, x: Tensor) -> dict[Any, Tensor]:
            return {self.keys[0]: x * 2, self.keys[1]: x * 3}

    def __init__(self, *keys: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.made = self.Made((keys[0], keys[1]))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.made(self.fc(x)).values()
        total: Tensor = first.sum() - second.square().sum()
        return total


KEYS: list[tuple[Any, Any]] = [
    ("a", 1),
    (1, "a"),
    (-1, 2),
    (0, 10**9),
    (True, False),
    (None, "None"),
    (("t", 1), ("t", (None, True))),
    (0.5, 1.5),
    (Kind.QUERY, "key"),
    ((Kind.QUERY, 0), (Size.LARGE, "t")),
    (Text("a"), Size.LARGE),
    ((Text("a"), None), "a\tb"),
]


@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_keys_of_every_plain_kind_are_as_in_an_eager_run(keys: tuple[Any, Any]) -> None:
    model, x = Keyed(*keys), torch.randn(2, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for one in (copy.deepcopy(model), compiled):
        with hl.capture(one, "made", grads=True) as got:
            one(x).backward()
        found.append(got["made"].output)
    expected, made = found
    assert type(made) is dict
    assert list(made) == list(expected)
    for key in keys:
        assert torch.equal(made[key], expected[key])
        assert torch.equal(made[key].grad, expected[key].grad)


def test_another_text_of_a_class_of_its_own_is_told_as_that() -> None:
    model, x = Keyed(Text("a"), 1), torch.randn(2, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for text in "abcde":
        model.made.keys = ()  # so that the next text may lie where this one lay
        model.made.keys = (Text(text), 1)
        with hl.capture(compiled, "made") as got:
            compiled(x)
        assert list(got["made"].output) == [text, 1]


def test_the_same_text_of_a_class_of_its_own_makes_no_other_graph() -> None:
    model, x = Keyed(Text("a"), 1), torch.randn(2, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.capture(compiled, "made") as got:
        for _ in range(torch._dynamo.config.recompile_limit + 2):
            model.made.keys = (Text("a"), 1)
            compiled(x)
    assert all(list(call["made"].output) == ["a", 1] for call in got.calls)


NAMES = {
    Colour.RED: "<Colour.RED>",
    torch.float32: "<dtype 0>",
    frozenset((1,)): "<frozenset 0>",
    (1, Colour.RED): "<tuple 0>",
    "a\x01b": repr("a\x01b"),
    "a\x04b": repr("a\x04b"),
    "a\0b": repr("a\0b"),
    "\ud800": repr("\ud800"),
}
"""Keys that cannot be written, and what they are called."""


@pytest.mark.parametrize("key", NAMES, ids=repr)
def test_a_key_that_cannot_be_written_is_told(key: Any) -> None:
    model, x = Keyed(key, "a"), torch.randn(2, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    name = re.escape(NAMES[key])
    text = f'it has the key {name}.* Ask for the model to be run eagerly: compiled="eager"'
    for sites in ("made", "made:output.grad", "made:output.nothing"):
        with pytest.raises(hl.UnsupportedModel, match=text), hl.capture(compiled, sites):
            compiled(x)
    with (
        pytest.raises(hl.UnsupportedModel, match=text),
        hl.edit(compiled, {"made:output.nothing": hl.zero()}),
    ):
        compiled(x)
    with hl.capture(compiled, "made", compiled="eager") as got:
        compiled(x)
    assert list(got["made"].output) == [key, "a"]


def test_an_item_beside_a_key_that_cannot_be_written_is_reached() -> None:
    model, x = Keyed(Colour.RED, "a"), torch.randn(2, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = model.fc(x)
    with hl.capture(compiled, "made:output.a", "made:output[0]") as got:
        compiled(x)
    assert torch.equal(got["made:output.a"], plain * 3)
    assert torch.equal(got["made:output[0]"], plain * 2)
    with hl.edit(compiled, {"made:output[0]": hl.zero()}):
        torch.testing.assert_close(compiled(x), -(plain * 3).square().sum())
    with hl.watch(model, None, rules=False) as watcher:  # leaves out what it cannot name
        compiled(x).backward()
        compiled(x).backward()
    (note,) = watcher.notes
    assert note.startswith("`made:output`: what has the key <Colour.RED> is not measured.")
    sites = {str(row["site"]) for row in watcher.history.sites()}
    assert {one for one in sites if one.startswith("made")} == {
        "made:output.a",
        "made:output.a.grad",
    }


def test_a_dict_of_a_class_that_is_not_found_stays_one() -> None:
    class Own(dict[int, Tensor]):
        pass

    class Making(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Own({0: x * 2, 1: x * 3})

    model, x = nn.Sequential(Making()), torch.randn(2, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.capture(compiled, "0") as got:
        compiled(x)
    assert isinstance(got["0"].output, dict)
    assert torch.equal(got["0"].output[1], x * 3)
