"""What compiled graphs deliver to a capture: tensor by tensor, then what they were parts of."""

from __future__ import annotations

from typing import Any

from hookline._trees import Opaque, Path
from hookline.captures.keeping import Kept
from hookline.captures.records import VisitRecord
from hookline.hooks.structures import build, links


def put_tensor(record: VisitRecord, port: str, leaf: Path, kept: Kept, *, asked: Path) -> None:
    """Put a tensor where it belongs in the value that was asked for."""
    record.kept[port, leaf] = kept
    root = leaf[: len(asked)]
    if root != asked:
        record.spellings[port, asked] = root
    so_far = record.trees.get((port, root))
    record.trees[port, root] = _grow(so_far, leaf[len(root) :], kept.tensor)


def put_structure(record: VisitRecord, port: str, root: Path, text: str, *, asked: Path) -> None:
    """Make the value out of its tensors, now that all are there."""
    for path, first in links(text).items():
        kept = record.kept.get((port, (*root, *first)))
        if kept is not None:
            record.kept[port, (*root, *path)] = kept

    def find(path: Path) -> Any:
        kept = record.kept.get((port, (*root, *path)))
        return Opaque("Tensor") if kept is None else kept.tensor

    if root != asked:
        record.spellings[port, asked] = root
    record.trees[port, root] = build(text, find)


def _grow(tree: Any, path: Path, item: Any) -> Any:
    """Give a tree with one more item: by name, until it is known what the whole is made of.

    In a checkpointed region nobody tells: what is numbered from 0 on is a tuple there.
    """
    if not path:
        return item
    named = dict(enumerate(tree) if isinstance(tree, tuple) else tree or {})
    named[path[0]] = _grow(named.get(path[0]), path[1:], item)
    return tuple(named.values()) if list(named) == list(range(len(named))) else named
