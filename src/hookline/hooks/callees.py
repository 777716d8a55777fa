"""Functions that a module's forward calls: copies of those of which variables are asked."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import nn

from hookline._errors import NoSuchSite, UnsupportedModel
from hookline.addresses.inside import Inside
from hookline.addresses.pattern import escape
from hookline.addresses.variables import called_function
from hookline.hooks.frames import Frame
from hookline.hooks.variables import Spots, Taps, prefix_names
from hookline.sources import NoSource, read, rewrite, unwrap

if TYPE_CHECKING:
    from hookline.hooks.junctions import Junction

_DEEPEST = 3
"""How many functions may call each other for their variables to be made ready."""


class Callees:
    """Rewritten copies of the functions that one module's forward calls."""

    def __init__(self, junction: Junction) -> None:
        self._junction = junction
        self._known: dict[tuple[int, Spots, frozenset[str]], tuple[Any, Any]] = {}
        """Each function, which stays alive for its id to stay its own, and its copy."""
        self.ready: tuple[tuple[Any, Spots, Any], ...] = ()
        """Copies that are made before they are called, as the compiler needs them."""

    def replace(self, callee: Any, prefixes: Spots, frame: Frame | None = None) -> Any:
        """Give a copy of a function that hands over what is asked of it; itself if nothing is.

        With a frame it is a copy for that execution alone.
        """
        this = None
        function = callee
        if isinstance(callee, types.MethodType):
            this, function = callee.__self__, callee.__func__
        if isinstance(callee, (nn.Module, type)) or not callable(callee):
            return callee
        copied = getattr(function, "hookline_copied", None)
        if copied is not None:  # handed over before it is called, and known by both names
            function, earlier = copied
            prefixes = tuple(dict.fromkeys([*earlier, *prefixes]))
        wanted = self._wanted(prefixes)
        if not wanted:
            return callee
        key = (id(function), prefixes, wanted)
        known = self._known.get(key) if frame is None else None
        if known is None:
            known = function, self._rewrite(function, prefixes, wanted, frame)
        if frame is None:
            self._known[key] = known
        _, copy = known
        return copy if this is None else types.MethodType(copy, this)

    def make_ready(
        self, function: Any, module: nn.Module | None, *, starts: Spots = ("",), depth: int = 0
    ) -> None:
        """Make the copies of all functions that are known to be called: while the compiler traces
        there is no making any."""
        with suppress(NoSource):
            reading = read(function)
            for callee in dict.fromkeys((*reading.callees, *reading.handed)):
                found = called_function(callee, module)
                if found is None or depth > _DEEPEST:
                    continue
                names = prefix_names(found, callee.name, starts)
                inner = getattr(found, "__func__", found)
                if any(one is inner and known == names for one, known, _ in self.ready):
                    continue
                with suppress(NoSuchSite):  # it is said where it is called
                    copy = self.replace(found, names)
                    if copy is not found:
                        self.ready += ((inner, names, getattr(copy, "__func__", copy)),)
                        owner = module if callee.function is None else None
                        self.make_ready(inner, owner, starts=names, depth=depth + 1)

    def find_ready(self, callee: Any, prefixes: Spots) -> Any:
        """Give the copy of a function where the compiler looks on; raise where none was made."""
        if isinstance(callee, (nn.Module, type)) or not callable(callee):
            return callee
        is_method = isinstance(callee, types.MethodType)
        function = callee.__func__ if is_method else callee
        for one, names, copy in self.ready:
            if one is function and names == prefixes:
                return functools.partial(copy, callee.__self__) if is_method else copy
        raise UnsupportedModel(
            f"`@{prefixes[0]}...`: which function is called there is known only when it is "
            "called, too late for a graph that torch.compile makes. "
            'Ask for the model to be run eagerly: compiled="eager"'
        )

    def called(self, prefix: str) -> list[Callable[..., Any]]:
        """List the functions that were called under a name such as `helper.`."""
        found = {id(one): one for key, (one, _) in self._known.items() if prefix in key[1]}
        return list(found.values())

    def _wanted(self, prefixes: Spots) -> frozenset[str]:
        names = self._junction.plan.inside.variables
        return frozenset(
            name[len(prefix) :]
            for prefix in prefixes
            for name in names
            if name.startswith(prefix) and len(name) > len(prefix)
        )

    def _rewrite(
        self, function: Any, prefixes: Spots, wanted: frozenset[str], frame: Frame | None
    ) -> Any:
        try:
            reading = read(function)
        except NoSource as error:
            self._refuse(function, prefixes, wanted, str(error))
            return function
        exact = {name for name in wanted if Inside("@", name).is_exact}
        names = set(exact)
        for pattern in wanted - exact:
            matches = Inside("@", pattern).matches
            names.update(name for name in reading.names if matches(name))
        calls = set(reading.called)
        unknown = [
            name
            for name in exact
            if name not in reading.names
            and name.rpartition(".")[0] not in calls
            and "." not in name
        ]
        if unknown:
            there = ", ".join(f"`{name}`" for name in reading.names)
            self._refuse(function, prefixes, frozenset(unknown), f"it has only {there or 'none'}")
        taps = Taps(self._junction, prefixes, frame)
        copy: Any
        try:
            copy, table = rewrite(function, frozenset(names), taps)
        except NoSource as error:
            self._refuse(function, prefixes, wanted, str(error))
            return function
        taps.name(table)
        copy.hookline_copied = (function, prefixes)
        return copy

    def _refuse(self, function: Any, prefixes: Spots, names: frozenset[str], reason: str) -> None:
        """Raise if one of the names was asked for by itself, not by a pattern."""
        asked = {f"{prefix}{name}" for prefix in prefixes for name in names}
        for listener in self._junction.listeners():
            inside = listener.inside
            if inside is None or inside.mark != "@" or inside.name not in asked:
                continue
            if inside.is_exact:
                called = getattr(unwrap(function)[-1], "__qualname__", repr(function))
                path = escape(listener.station.path)
                raise NoSuchSite(
                    f"`{path}{inside}`: what is called there is `{called}`, and {reason}. "
                    f"See `print(hl.source(model, '{path}'))`."
                )
