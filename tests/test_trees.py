"""Every kind of container: looked into, rebuilt, and left alone where nothing changed."""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from hookline import _trees

Point = namedtuple("Point", ["x", "y"])


class Tagged(tuple):
    """A tuple with an attribute and a constructor of its own."""

    tag: str

    def __new__(cls, *items: Any, tag: str) -> Tagged:
        new = super().__new__(cls, items)
        new.tag = tag
        return new


class Stack(list):
    """A list with an attribute."""

    label = ""


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any


@dataclasses.dataclass
class Guarded:
    """A dataclass that refuses to be made with anything but strings."""

    a: Any
    b: Any

    def __init__(self, text: str) -> None:
        raise AssertionError("rebuilding must not call the constructor")


@dataclasses.dataclass
class Output(OrderedDict):
    """What a model of transformers returns: an ordered dict whose items are attributes, too."""

    a: Any = None
    b: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Cache:
    """An object known to torch's pytree only."""

    def __init__(self, keys: Any, values: Any, name: str) -> None:
        self.keys = keys
        self.values = values
        self.name = name


@pytest.fixture(scope="module", autouse=True)
def _cache_in_pytree() -> Any:
    _pytree.register_pytree_node(
        Cache, lambda c: ([c.keys, c.values], c.name), lambda items, name: Cache(*items, name)
    )
    yield
    _pytree._deregister_pytree_node(Cache)


def guarded(a: Any, b: Any) -> Guarded:
    new = object.__new__(Guarded)
    new.a, new.b = a, b
    return new


def default_dict(a: Any, b: Any) -> Any:
    return defaultdict(list, {"a": a, "b": b})


def stack(a: Any, b: Any) -> Stack:
    new = Stack([a, b])
    new.label = "kept"
    return new


MAKERS = {
    "tuple": (lambda a, b: (a, b), (0, 1)),
    "list": (lambda a, b: [a, b], (0, 1)),
    "list subclass": (stack, (0, 1)),
    "dict": (lambda a, b: {"a": a, "b": b}, ("a", "b")),
    "dict of numbers": (lambda a, b: {7: a, 3: b}, (7, 3)),
    "ordered dict": (lambda a, b: OrderedDict(a=a, b=b), ("a", "b")),
    "default dict": (default_dict, ("a", "b")),
    "user dict": (lambda a, b: UserDict(a=a, b=b), ("a", "b")),
    "named tuple": (Point, ("x", "y")),
    "tuple subclass": (lambda a, b: Tagged(a, b, tag="kept"), (0, 1)),
    "frozen dataclass": (Frozen, ("a", "b")),
    "slotted dataclass": (Slotted, ("a", "b")),
    "guarded dataclass": (guarded, ("a", "b")),
    "model output": (Output, ("a", "b")),
    "namespace": (lambda a, b: SimpleNamespace(a=a, b=b), ("a", "b")),
    "pytree node": (lambda a, b: Cache(a, b, "kept"), (0, 1)),
}
if importlib.util.find_spec("attrs"):
    import attrs

    @attrs.frozen
    class Attrs:
        a: Any
        b: Any

    MAKERS["attrs"] = (Attrs, ("a", "b"))

every_kind = pytest.mark.parametrize("kind", MAKERS)


def make(kind: str) -> tuple[Any, Tensor, Tensor, tuple[Any, Any]]:
    maker, keys = MAKERS[kind]
    a, b = torch.zeros(2), torch.ones(3)
    return maker(a, b), a, b, keys


@every_kind
def test_children_lists_items_under_their_own_keys(kind: str) -> None:
    tree, a, b, keys = make(kind)
    (first, one), (second, two) = _trees.children(tree)
    assert (first, second) == keys
    assert one is a
    assert two is b


@every_kind
def test_rebuild_keeps_the_class_and_takes_new_items(kind: str) -> None:
    tree, a, b, keys = make(kind)
    new = _trees.rebuild(tree, [b, a])
    assert type(new) is type(tree)
    assert all(item is other for (_, item), other in zip(_trees.children(new), (b, a), strict=True))
    assert [key for key, _ in _trees.children(new)] == list(keys)
    assert _trees.get(new, (keys[0],)) is b
    assert _trees.get(tree, (keys[0],)) is a, "the original must stay as it was"
    for attribute in ("tag", "label", "name"):
        assert getattr(new, attribute, None) == getattr(tree, attribute, None)


@every_kind
def test_put_replaces_one_item_and_leaves_the_original(kind: str) -> None:
    tree, a, b, (first, second) = make(kind)
    new = _trees.put(tree, (second,), 5)
    assert _trees.get(new, (second,)) == 5
    assert _trees.get(new, (first,)) is a
    assert _trees.get(tree, (second,)) is b


@every_kind
def test_items_are_found_by_position_too(kind: str) -> None:
    tree, a, b, keys = make(kind)
    if kind == "dict of numbers":  # its own numbers go first
        assert _trees.get(tree, (3,)) is b
        assert _trees.get(tree, (0,)) is a
        return
    assert _trees.get(tree, (0,)) is a
    assert _trees.get(tree, (-1,)) is b
    assert _trees.canonical(tree, (-1,)) == (keys[1],)
    assert _trees.get(_trees.put(tree, (-1,), a), (keys[1],)) is a


@every_kind
def test_identity_is_kept_where_nothing_changed(kind: str) -> None:
    tree, a, _, keys = make(kind)
    outer = [tree, (a, "x")]
    assert _trees.replace_tensors(outer, {}) is outer
    assert _trees.replace_tensors(outer, {id(torch.ones(1)): a}) is outer
    changed = _trees.replace_tensors(outer, {id(a): torch.ones(9)})
    assert _trees.get(changed, (0, keys[0])).shape == (9,)
    assert _trees.get(tree, (keys[0],)) is a


def test_replacing_leaves_untouched_parts_the_same_objects() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    left, right = (a, 1), {"b": b}
    new = _trees.replace_tensors([left, right], {id(a): b})
    assert new[0] == (b, 1)
    assert new[1] is right


@every_kind
def test_freeze_copies_the_container_and_keeps_tensors_through_the_function(kind: str) -> None:
    tree, a, b, keys = make(kind)
    kept = _trees.freeze([tree], lambda path, tensor: (path, tensor))[0]
    assert kept is not tree
    assert _trees.get(kept, (keys[0],)) == ((0, keys[0]), a)
    assert _trees.get(kept, (keys[1],))[1] is b


def test_model_output_attributes_follow_its_items() -> None:
    output = Output(a=torch.zeros(1), b=torch.ones(1))
    new = _trees.put(output, ("a",), torch.full((1,), 5.0))
    assert new.a.item() == new["a"].item() == 5
    assert output.a.item() == output["a"].item() == 0


def test_model_output_skips_items_that_are_none() -> None:
    assert [key for key, _ in _trees.children(Output(a=torch.zeros(1)))] == ["a"]


def test_dataclass_field_that_was_never_set_is_skipped() -> None:
    bare = object.__new__(Guarded)
    bare.b = torch.ones(1)
    assert [key for key, _ in _trees.children(bare)] == ["b"]
    assert not hasattr(_trees.put(bare, ("b",), 2), "a")


def test_structseq_of_torch_is_rebuilt_as_itself() -> None:
    found = torch.eye(3).max(dim=0)
    new = _trees.put(found, (1,), torch.zeros(3))
    assert type(new) is torch.return_types.max
    assert new.indices is new[1]
    assert new.values is found.values
    assert [path for path, _ in _trees.leaves(found)] == [(0,), (1,)]


def test_size_is_one_plain_item() -> None:
    tree = (torch.zeros(2, 3), torch.zeros(2, 3).shape)
    assert _trees.children(tree[1]) is None
    assert _trees.map_tensors(tree, lambda _, t: t + 1)[1] is tree[1]
    assert _trees.freeze(tree, lambda _, t: t)[1] == (2, 3)


@pytest.mark.parametrize(
    "item", [None, 1, 2.5, "text", b"b", torch.float32, torch.device("cpu"), 1j, True]
)
def test_plain_values_are_kept_as_they_are(item: Any) -> None:
    assert _trees.children(item) is None
    assert _trees.freeze([item], lambda _, t: t)[0] is item


def test_unknown_objects_modules_and_classes_are_not_looked_into() -> None:
    class Thing:
        pass

    for item in (Thing(), nn.Linear(1, 1), Frozen, {1, 2}, len):
        assert _trees.children(item) is None
        assert isinstance(_trees.freeze([item], lambda _, t: t)[0], _trees.Opaque)
    assert repr(_trees.freeze(nn.ReLU(), lambda _, t: t)) == "<ReLU: not kept>"


def test_keys_that_are_no_names_are_written_out() -> None:
    tree = {("q", 1): torch.zeros(1), torch.float32: torch.ones(1)}
    assert [key for key, _ in _trees.children(tree)] == ["('q', 1)", "torch.float32"]
    assert list(_trees.put(tree, ("torch.float32",), 3).values())[1] == 3


def test_text_and_number_keys_are_told_apart() -> None:
    tree = {"0": "text", 0: "number"}
    assert _trees.get(tree, ("0",)) == "text"
    assert _trees.get(tree, (0,)) == "number"


def test_keys_that_read_alike_are_told_apart() -> None:
    tree = {None: "none", "None": "text", True: "true", 2: "number"}
    assert [key for key, _ in _trees.children(tree)] == ["<None>", "None", "True", 2]
    assert _trees.get(tree, ("True",)) == "true"
    assert _trees.get(tree, ("<None>",)) == "none"


def test_keys_of_an_enumeration_are_what_they_equal() -> None:
    kinds = enum.Enum("kinds", {"QUERY": "query"}, type=str)
    tree = {kinds.QUERY: "text"}
    assert [key for key, _ in _trees.children(tree)] == ["query"]
    assert type(_trees.canonical(tree, ("query",))[0]) is str


@pytest.mark.parametrize("path", [("c",), (2,), (-3,), ("a", 0), ("b", "x")])
def test_path_that_leads_nowhere_raises(path: _trees.Path) -> None:
    tree = {"a": torch.zeros(1), "b": [1]}
    for function in (_trees.get, _trees.canonical, lambda t, p: _trees.put(t, p, 0)):
        with pytest.raises(_trees.NoSuchLeaf):
            function(tree, path)
