"""A trace sorted by module, port and visit, as the rules of aligning look things up in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hookline._trees import Path
from hookline.diffs.traces import Trace, TraceSite

Moment = tuple[str, int]
"""A port of a module and the visit."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Name what a module has besides values: a parameter, or a buffer before or after the step."""

    kind: str
    """`parameter` or `buffer`."""

    name: Path
    """Its name in the module."""

    is_after: bool = False
    """Whether a buffer was read after the step."""


class Outline:
    """What is where in a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.sites = trace.sites
        self.types: dict[str, str] = {}
        """The class of each module by path, in the order of execution."""
        self.values: dict[str, dict[Moment, dict[Path, int]]] = {}
        """The values of each module: by port and visit, by leaf."""
        self.slots: dict[str, dict[Slot, int]] = {}
        """The parameters and buffers of each module."""
        self.fresh: list[int] = []
        """The values that no site showed before, in the order of execution."""
        self.followers: list[int] = []
        """The gradients and updates."""
        self._origins: dict[int, int] = {}
        for site in trace.sites:
            self._place(site)
        for path, facts in trace.facts.modules.items():
            self.types.setdefault(path, facts.type)
        self._parents = {path.rpartition(".")[0] for path in self.types if path}

    def origin(self, site: int) -> int:
        """Give the site that first showed the value of this one."""
        return self._origins.get(site, site)

    def size(self, site: int) -> int:
        """Count the elements of a site."""
        return math.prod(self.sites[site].shape)

    def count_visits(self, path: str) -> int:
        """Count how often a module ran in the step."""
        return 1 + max((visit for _, visit in self.values.get(path, ())), default=-1)

    def ends(self, path: str, port: str, visit: int = 0) -> dict[Path, int]:
        """Give the sites at a port of a module by leaf."""
        return self.values.get(path, {}).get((port, visit), {})

    def parameters(self, path: str) -> dict[Path, int]:
        """Give the parameters of a module itself by name."""
        found = self.slots.get(path, {})
        return {slot.name: site for slot, site in found.items() if slot.kind == "parameter"}

    def has_children(self, path: str) -> bool:
        """Tell whether a module has modules in it."""
        return path in self._parents

    def iterate_below(self, path: str) -> Iterator[str]:
        """Go through a module and everything below it."""
        start = f"{path}."
        return (one for one in self.types if not path or one == path or one.startswith(start))

    def _place(self, site: TraceSite) -> None:
        if site.kind == "value":
            self.types.setdefault(site.module, site.type)
            at = self.values.setdefault(site.module, {}).setdefault((site.port, site.visit), {})
            at.setdefault(site.leaf, site.id)
            if site.same_as is None:
                self.fresh.append(site.id)
            else:
                self._origins[site.id] = self.origin(site.same_as)
        elif site.kind in ("parameter", "buffer"):
            self.types.setdefault(site.module, site.type)
            slot = Slot(site.kind, site.leaf, bool(site.more.get("after", False)))
            self.slots.setdefault(site.module, {}).setdefault(slot, site.id)
        elif site.kind != "overwritten":  # not a value of its own: nobody need ever read it
            self.followers.append(site.id)
