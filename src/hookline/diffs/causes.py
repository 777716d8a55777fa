"""What is set otherwise on the two sides: the likely cause of a difference.

Compares what is known of two modules: class, attributes, training flag, parameters and buffers.
"here" is the first side, "there" the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hookline.diffs.gaps import Gaps
from hookline.diffs.phases import STATE, Pair
from hookline.diffs.tolerances import TELLING_UNITS, Limits, read_precision
from hookline.diffs.traces import ModuleFacts, Trace, TraceFacts
from hookline.diffs.writing import write_r

if TYPE_CHECKING:
    from hookline.diffs.matches import Alignment

_HOOKS = "hooks"
_MOST_LETTERS = 60


class Settings:
    """Know for each module of the first side what is set otherwise on the second."""

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        alignment: Alignment,
        pairs: Sequence[Pair],
        *,
        gaps: Gaps,
        limits: Limits,
    ) -> None:
        self.facts = traces[0].facts, traces[1].facts
        self.names = alignment.names
        self._kept: dict[str, list[str]] = {}
        for pair in pairs:
            if pair.phase == STATE and pair.is_early_state and not pair.missing:
                text = _compare_kept(pair, gaps, limits)
                if text:
                    self._kept.setdefault(pair.a.module, []).append(text)

    def counterpart(self, path: str) -> str | None:
        """Give the path of a module on the second side; None where it has none."""
        return self.names.get(path, path if path in self.facts[1].modules else None)

    def is_telling(self, path: str) -> bool:
        """Tell whether a setting, a parameter or a buffer of a module differs."""
        return path in self._kept or any(self._differing(path))

    def is_other_class(self, path: str) -> bool:
        """Tell whether a module is of another class on the second side."""
        a, b = self._both(path)
        return a is not None and b is not None and bool(a.type and b.type) and a.type != b.type

    def has_other_hooks(self, path: str) -> bool:
        """Tell whether a module has other hooks of others on the second side."""
        a, b = self._both(path)
        if a is None or b is None or not (a.is_known and b.is_known):
            return False
        return a.config.get(_HOOKS) != b.config.get(_HOOKS)

    def is_equal_leaf(self, path: str) -> bool:
        """Tell whether a module is torch's own, and set alike on both sides."""
        a, b = self._both(path)
        return (
            a is not None
            and b is not None
            and a.is_torch
            and b.is_torch
            and a.type == b.type
            and not self.is_telling(path)
        )

    def causes(self, path: str) -> list[str]:
        """List in words what is otherwise at a module."""
        return [*compare_modules(*self._both(path)), *self._kept.get(path, ())]

    def _both(self, path: str) -> tuple[ModuleFacts | None, ModuleFacts | None]:
        other = self.counterpart(path)
        there = None if other is None else self.facts[1].modules.get(other)
        return self.facts[0].modules.get(path), there

    def _differing(self, path: str) -> Iterator[str]:
        return _compare_both(*self._both(path))


def compare_modules(a: ModuleFacts | None, b: ModuleFacts | None) -> list[str]:
    """List in words what is set otherwise at two modules."""
    found = list(_compare_both(a, b))
    if a is not None and b is not None:
        if a.type != b.type:
            found.append(f"{a.type} here, {b.type} there")
        elif a.is_known and b.is_known:
            found.extend(_find_extra(a.config, b.config))
    return found


def _compare_both(a: ModuleFacts | None, b: ModuleFacts | None) -> Iterator[str]:
    if a is None or b is None or not (a.is_known and b.is_known):
        return
    if a.training != b.training:
        words = {True: "in training", False: "not in training"}
        yield f"{words[a.training]} here, {words[b.training]} there"
    # Other classes spell the same thing otherwise: only what both have can be compared.
    for name in a.config:
        if name != _HOOKS and name in b.config and a.config[name] != b.config[name]:
            yield f"{name}={_cut(a.config[name])} here, {_cut(b.config[name])} there"
    yield from _compare_hooks(a.config.get(_HOOKS, ""), b.config.get(_HOOKS, ""))


def _find_extra(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[str]:
    """Say which settings one side alone has."""
    for name in [*a, *b]:
        if name != _HOOKS and (name in a) != (name in b):
            side, config = ("here", a) if name in a else ("there", b)
            yield f"{name}={_cut(config[name])} only {side}"


def _compare_hooks(a: str, b: str) -> Iterator[str]:
    if a == b:
        return
    if not a or not b:
        yield f"hooks of others: {_cut(a or b)} {'here' if a else 'there'} alone"
    else:
        yield f"hooks of others: {_cut(a)} here, {_cut(b)} there"


def _compare_kept(pair: Pair, gaps: Gaps, limits: Limits) -> str:
    """Say how a parameter or buffer differs; empty where it does not."""
    name = ".".join(map(str, pair.a.leaf)) or pair.a.address
    r = float(gaps.r[pair.place])
    a, b = pair.a, pair.b
    if a.shape != b.shape and r == float("inf") and pair.match.how == "same":
        return f"{name} has the shape {_shape(a.shape)} here, {_shape(b.shape)} there"
    if r > TELLING_UNITS * limits.units[pair.place]:
        return f"{name} differs by {write_r(r)}"
    if a.requires_grad is not None and b.requires_grad is not None:
        if a.requires_grad and not b.requires_grad:
            return f"{name} requires no gradient there"
        if b.requires_grad and not a.requires_grad:
            return f"{name} requires no gradient here"
    return ""


def compare_site(pair: Pair) -> list[str]:
    """Say what is otherwise at the very site: dtype, shape."""
    found = []
    a, b = pair.a, pair.b
    if a.dtype and b.dtype and read_precision(a.dtype) != read_precision(b.dtype):
        found.append(f"{a.dtype} here, {b.dtype} there")
    if a.shape != b.shape and pair.match.how == "same" and not pair.missing:
        found.append(f"shape {_shape(a.shape)} here, {_shape(b.shape)} there")
    return found


def compare_settings(a: TraceFacts, b: TraceFacts) -> list[str]:
    """Say what was set otherwise for all of a run."""
    found: list[str] = []
    if not (a.is_known and b.is_known):
        return found
    if a.autocast != b.autocast:
        found.append(f"autocast {a.autocast or 'off'} here, {b.autocast or 'off'} there")
    if a.has_tf32 != b.has_tf32:
        words = {True: "allowed", False: "not allowed"}
        found.append(f"TF32 {words[a.has_tf32]} here, {words[b.has_tf32]} there")
    return found


def find_broken_tie(
    facts: tuple[TraceFacts, TraceFacts], names: Mapping[str, str]
) -> tuple[str, str] | None:
    """Find parameters that are one tensor on one side alone: the later name, and words."""
    if not all(side.is_known for side in facts):
        return None
    known = [{frozenset(group) for group in side.ties if len(group) > 1} for side in facts]
    back = {theirs: own for own, theirs in names.items()}
    own_b = {frozenset(_rename(name, back) for name in group) for group in known[1]}
    for group, side in (
        *((tuple(one), "here") for one in facts[0].ties),
        *((tuple(_rename(name, back) for name in one), "there") for one in facts[1].ties),
    ):
        if len(group) < 2:
            continue
        others = own_b if side == "here" else known[0]
        if not any(set(group) <= other for other in others):
            listed = f"{', '.join(group[:-1])} and {group[-1]}"
            rest = "there" if side == "here" else "here"
            count = {2: "two", 3: "three"}.get(len(group), str(len(group)))
            return group[-1], f"{listed} are one tensor {side}, {count} {rest}"
    return None


def _rename(name: str, names: Mapping[str, str]) -> str:
    path, dot, last = name.rpartition(".")
    return f"{names[path]}.{last}" if dot and names.get(path) else name


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"
