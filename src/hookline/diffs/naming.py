"""Pair the modules of two traces by their names: the user's map, equal names, prefixes.

Knows paths and classes; the values come later.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from hookline.diffs.outlines import Outline

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""The names under which wrappers hold what they wrap."""

# A suffix such as `attn.q` is in every block and says nothing about what precedes it.
_MOST_PREFIXES_OF_SUFFIX = 8
_MOST_ROUNDS = 8
_MOST_SUGGESTIONS = 3
_LEAST_VOTES = 2
_LEAST_SHARE = 0.25


class ModulePairs:
    """Which module of A is which of B, and by which rule."""

    def __init__(self) -> None:
        self.forward: dict[str, str] = {}
        """From the paths of A to those of B."""
        self.backward: dict[str, str] = {}
        self.rules: dict[str, str] = {}
        """The rule by the path of A."""
        self.exchanges: list[tuple[str, str]] = []
        """The prefixes that stand for each other."""

    def add(self, a: str, b: str, rule: str) -> bool:
        """Pair two modules unless one of them has a counterpart already."""
        if a in self.forward or b in self.backward:
            return False
        self.forward[a], self.backward[b], self.rules[a] = b, a, rule
        return True

    def remove(self, a: str) -> None:
        """Undo a pair."""
        del self.backward[self.forward.pop(a)], self.rules[a]

    def allow(self, a: str, b: str) -> bool:
        """Tell whether two paths can be one place: the pairs above both must lead there."""
        return _leads(a, b, self.forward) and _leads(b, a, self.backward)


def pair_by_map(
    a: Outline, b: Outline, names: Mapping[str, str], pairs: ModulePairs
) -> dict[int, int]:
    """Pair what the user's map names; give the parameters that it names one by one.

    A path maps itself and everything below it, anything else is a regular expression for a whole
    path. Raises ValueError where one matches nothing.
    """
    slots_a, slots_b = _name_slots(a), _name_slots(b)
    mapped: dict[int, int] = {}
    for source, target in names.items():
        if source in slots_a or source in a.types or _is_above(source, a.types):
            found = _map_path(source, target, [*a.types, *slots_a])
            whole = [target]
        else:
            found = _map_expression(source, target, [*a.types, *slots_a])
            whole = list(found.values())
        if not found:
            raise ValueError(_explain(source, "first", [*a.types, *slots_a], names))
        if not any(one in b.types or one in slots_b or _is_above(one, b.types) for one in whole):
            raise ValueError(_explain(whole[0], "second", [*b.types, *slots_b], names))
        for path_a, path_b in found.items():
            if path_a in a.types and path_b in b.types:
                pairs.add(path_a, path_b, "map")
            elif path_a in slots_a and path_b in slots_b:
                mapped[slots_a[path_a]] = slots_b[path_b]
    return mapped


def pair_by_name(a: Outline, b: Outline, pairs: ModulePairs) -> None:
    """Pair modules of equal names, then of names that are equal but for wrappers or a prefix."""
    for path in a.types:
        if path in b.types:
            pairs.add(path, path, "name")
    bare_a = _index_bare(path for path in a.types if path not in pairs.forward)
    bare_b = _index_bare(path for path in b.types if path not in pairs.backward)
    for bare, path in bare_a.items():
        if bare in bare_b:
            pairs.add(path, bare_b[bare], "wrapper")
        elif bare in b.types:
            pairs.add(path, bare, "wrapper")
    for bare, path in bare_b.items():
        if bare in a.types:
            pairs.add(bare, path, "wrapper")
    for _ in range(_MOST_ROUNDS):
        prefix = _vote(
            [path for path in a.types if path not in pairs.forward],
            [path for path in b.types if path not in pairs.backward],
            pairs,
        )
        if prefix is None:
            break
        pairs.exchanges.append(prefix)
        _apply_prefix(a, b, *prefix, pairs=pairs)


def settle_prefixes(a: Outline, b: Outline, pairs: ModulePairs) -> None:
    """Pair what a prefix leads to, `model` with the root, where that is what the root is.

    A root that only wraps, or that gives something else than the other root, is not the one.
    """
    for prefix_a, prefix_b in pairs.exchanges:
        outer_a, outer_b = pairs.backward.get(prefix_b), pairs.forward.get(prefix_a)
        if outer_a is not None and outer_b is None:
            if _is_better(a, outer_a, prefix_a, b, prefix_b):
                pairs.remove(outer_a)
        elif outer_b is not None and outer_a is None:  # noqa: SIM102  two sides of one thing
            if _is_better(b, outer_b, prefix_b, a, prefix_a):
                pairs.remove(prefix_a)
        pairs.add(prefix_a, prefix_b, "wrapper")


def strip_wrappers(path: str) -> str:
    """Leave out the segments under which wrappers hold what they wrap."""
    return ".".join(one for one in path.split(".") if one not in WRAPPERS)


def _index_bare(paths: Iterable[str]) -> dict[str, str]:
    """Index paths by what they are without wrappers, where that is another and a single name."""
    paths = list(paths)
    counts = Counter(map(strip_wrappers, paths))
    return {
        bare: path for path in paths if counts[bare := strip_wrappers(path)] == 1 and bare != path
    }


def _leads(path: str, other: str, known: Mapping[str, str]) -> bool:
    """Tell whether the nearest module above that has a counterpart leads to the other path."""
    while path:
        if path in known:
            return other == known[path] or other.startswith(f"{known[path]}.")
        path = path.rpartition(".")[0]
    return True


def _vote(paths_a: list[str], paths_b: list[str], pairs: ModulePairs) -> tuple[str, str] | None:
    """Find the two prefixes whose exchange makes most of the paths equal."""
    if not paths_a or not paths_b:
        return None
    prefixes_b: dict[str, list[str]] = {}
    for path in paths_b:
        for prefix, suffix in _split_everywhere(path):
            prefixes_b.setdefault(suffix, []).append(prefix)
    prefixes_a = Counter(suffix for path in paths_a for _, suffix in _split_everywhere(path))
    votes: Counter[tuple[str, str]] = Counter()
    for path in paths_a:
        for prefix, suffix in _split_everywhere(path):
            others = prefixes_b.get(suffix, ())
            if max(len(others), prefixes_a[suffix]) <= _MOST_PREFIXES_OF_SUFFIX:
                votes.update((prefix, other) for other in others)
    ranked = [(pair, count) for pair, count in votes.most_common() if pairs.allow(*pair)]
    if not ranked:
        return None
    most = ranked[0][1]
    # The same exchange said shorter or longer: `x` for ``, and `x.blocks` for `blocks`.
    same = [pair for pair, count in ranked if count == most]
    first_a, first_b = min(same, key=lambda pair: len(pair[0]) + len(pair[1]))
    rivals = [(one_a, one_b) for one_a, one_b in same if (one_a == first_a) != (one_b == first_b)]
    enough = max(_LEAST_VOTES, _LEAST_SHARE * min(len(paths_a), len(paths_b)))
    if rivals or most < enough:
        return None
    return first_a, first_b


def _is_better(one: Outline, outer: str, inner: str, other: Outline, path: str) -> bool:
    """Tell whether the inner of two modules is the counterpart of one on the other side."""
    sizes = [other.size(site) for site in other.ends(path, "output").values()]
    outputs = list(one.ends(outer, "output").values())
    inners = list(one.ends(inner, "output").values())
    if not inners or [one.size(site) for site in inners] != sizes:
        return False
    is_wrapper = [one.origin(site) for site in outputs] == [one.origin(site) for site in inners]
    return is_wrapper or [one.size(site) for site in outputs] != sizes


def _apply_prefix(
    a: Outline, b: Outline, prefix_a: str, prefix_b: str, *, pairs: ModulePairs
) -> None:
    for path in list(a.iterate_below(prefix_a)):
        rest = path[len(prefix_a) :].lstrip(".") if prefix_a else path
        other = ".".join(part for part in (prefix_b, rest) if part)
        if other in b.types and (rest or other):
            pairs.add(path, other, "wrapper")


def _split_everywhere(path: str) -> list[tuple[str, str]]:
    """Split a path at each of its dots, and before its first segment."""
    segments = path.split(".") if path else []
    return [(".".join(segments[:cut]), ".".join(segments[cut:])) for cut in range(len(segments))]


def _name_slots(outline: Outline) -> dict[str, int]:
    """Index parameters and buffers by their full names."""
    found: dict[str, int] = {}
    for path, slots in outline.slots.items():
        for slot, site in slots.items():
            if not slot.is_after:
                name = ".".join(map(str, slot.name))
                found[f"{path}.{name}" if path else name] = site
    return found


def _is_above(path: str, paths: Iterable[str]) -> bool:
    return any(one.startswith(f"{path}.") for one in paths)


def _map_path(source: str, target: str, paths: Iterable[str]) -> dict[str, str]:
    """Map a path and everything below it."""
    start = f"{source}." if source else ""
    found = {}
    for path in paths:
        if path == source:
            found[path] = target
        elif path.startswith(start):
            rest = path[len(start) :]
            found[path] = f"{target}.{rest}" if target else rest
    return found


def _map_expression(source: str, target: str, paths: Iterable[str]) -> dict[str, str]:
    try:
        expression = re.compile(source)
        hits = [(path, expression.fullmatch(path)) for path in paths]
        return {path: hit.expand(target) for path, hit in hits if hit is not None}
    except (re.error, IndexError) as error:
        raise ValueError(
            f"`{source}: {target}` in `names` is no regular expression with its replacement: "
            f"{error}. A path of the first model maps to a path of the second, "
            r"or `r'layers\.(\d+)'` to `r'blocks.\1'`."
        ) from None


def _explain(missing: str, which: str, paths: list[str], names: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(missing, paths, n=_MOST_SUGGESTIONS, cutoff=0.4)
    hint = f" Nearest: {', '.join(f'`{one}`' for one in near)}." if near else ""
    entry = next(
        (f"`{source}: {target}`" for source, target in names.items() if missing == source), ""
    )
    said = f"{entry} in `names`" if entry else "`names`"
    return (
        f"{said} matches nothing: the {which} model has no `{missing}` "
        f"({len(paths)} modules and parameters).{hint}"
    )
