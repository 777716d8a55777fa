"""Properties of trees that hold whatever is nested in what."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hookline import _trees

Pair = namedtuple("Pair", ["left", "right"])
names = st.text("abc_", min_size=1, max_size=3)
items = st.one_of(
    st.builds(lambda n: torch.full((2,), float(n)), st.integers(0, 9)),
    st.none(),
    st.integers(),
    st.text(max_size=2),
)
trees = st.recursive(
    items,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(names, st.integers(-2, 5)), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.dictionaries(names, inner, max_size=2).map(lambda d: SimpleNamespace(**d)),
    ),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    """Compare two trees, tensors by value."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    mine, other = _trees.children(left), _trees.children(right)
    if mine is None or other is None:
        return mine is other and left == right
    return type(left) is type(right) and all(
        a == b and same(x, y) for (a, x), (b, y) in zip(mine, other, strict=True)
    )


@given(trees)
def test_rebuilding_from_its_own_children_gives_the_same_tree(tree: Any) -> None:
    found = _trees.children(tree)
    if found is not None:
        assert same(_trees.rebuild(tree, [item for _, item in found]), tree)


@given(trees)
def test_every_leaf_is_got_by_its_path(tree: Any) -> None:
    for path, tensor in _trees.leaves(tree):
        assert _trees.get(tree, path) is tensor
        assert _trees.canonical(tree, path) == path


@given(trees)
def test_putting_back_what_is_there_changes_nothing(tree: Any) -> None:
    for path, tensor in _trees.leaves(tree):
        assert same(_trees.put(tree, path, tensor), tree)


@given(trees)
def test_putting_changes_one_place_only(tree: Any) -> None:
    before = list(_trees.leaves(tree))
    for path, _ in before:
        new = dict(_trees.leaves(_trees.put(tree, path, torch.full((3,), -1.0))))
        assert new.pop(path).shape == (3,)
        assert all(new[other] is tensor for other, tensor in before if other != path)
    assert all(_trees.get(tree, path) is tensor for path, tensor in before)


@given(trees)
def test_mapping_there_and_back_is_the_identity(tree: Any) -> None:
    there = _trees.map_tensors(tree, lambda _, tensor: tensor + 1)
    assert same(_trees.map_tensors(there, lambda _, tensor: tensor - 1), tree)
    assert [path for path, _ in _trees.leaves(there)] == [path for path, _ in _trees.leaves(tree)]


@given(trees)
def test_freezing_gives_own_containers_with_equal_content(tree: Any) -> None:
    frozen = _trees.freeze(tree, lambda _, tensor: tensor.clone())
    assert same(frozen, tree)
    if isinstance(tree, (list, dict)):
        count = len(tree)
        tree.clear()
        assert len(frozen) == count


@given(trees)
def test_swapping_nothing_gives_the_very_object(tree: Any) -> None:
    assert _trees.replace_tensors(tree, {}) is tree
