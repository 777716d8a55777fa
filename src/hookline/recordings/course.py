"""The values of a step in the order in which they are made, and the sites that they are.

Whoever listens at modules tells what comes in and what goes out. Here it gets a number, the module
whose code called, the earlier site whose very tensor it is; and its gradient, when that arrives.
What is done with the numbers of a value is a sink's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hookline._trees import Path
from hookline.addresses import format_place
from hookline.addresses.pattern import escape
from hookline.diffs.traces import TraceSite
from hookline.hooks.visits import Visit
from hookline.recordings.identities import Identities
from hookline.recordings.shards import find_shard
from hookline.recordings.unusual import find_obstacle, to_plain
from hookline.watchers.describing import source_of

WHY_LOST = "its gradient is not recorded: it is a view, and was changed in place after it was made"

MakeSite = Callable[[int, Tensor], TraceSite]
"""Say what a site is, given its number and the first value seen there."""

_KINDS = {"parameter": "", "buffer": "", "parameter gradient": ":grad", "update": ":update"}
"""What follows the name of a parameter or buffer in an address."""


class Sink(Protocol):
    """Whoever numbers sites and takes their values."""

    def number(self, make: MakeSite, tensor: Tensor) -> int:
        """Number a site that was met for the first time."""
        ...

    def measure(self, site: int, tensor: Tensor) -> None:
        """Take the value of a site as it is now."""
        ...

    def share(self, site: int, first: int, tensor: Tensor) -> None:
        """Learn that the value of a site is the very tensor of an earlier one in this step."""
        ...


class View(Protocol):
    """What hears of the gradient of a view."""

    site: int

    @property
    def is_changed(self) -> bool:
        """Whether the view was changed in place: then it hears nothing."""
        ...


class Post:
    """One module, as a course knows it from step to step."""

    __slots__ = ("_source", "ids", "is_wanted", "module", "path", "type")

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.type = type(module).__name__
        self.is_wanted = True
        """Whether its values are taken; where not, it is only known to run."""
        self.ids: dict[tuple[str, Path, int], int] = {}
        """The sites of its values, by port, leaf and visit."""
        self._source: str | None = None

    @property
    def source(self) -> str:
        """Where its forward is written."""
        if self._source is None:
            self._source = source_of(self.module, "output")
        return self._source


class Passage:
    """One execution of a module in a step."""

    __slots__ = ("caller", "changes", "given", "post", "sites", "visit")

    def __init__(self, post: Post, visit: int, caller: str | None) -> None:
        self.post = post
        self.visit = visit
        self.caller = caller
        self.sites: dict[tuple[str, Path], int] = {}
        """The sites of its values, by port and leaf."""
        self.given: list[tuple[Path, Tensor, int]] = []
        """What it was given, and the version that was, as long as it runs."""
        self.changes: dict[Path, int] = {}
        """The numbers of what was put in the place of its outputs, by leaf."""


class Course:
    """Number what flows by in a step, and hand it on."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.sites: dict[int, TraceSite] = {}
        """The sites of values, parameters and buffers by number."""
        self.has_gradient: set[int] = set()
        """The sites whose gradient is heard of in the step under way."""
        self.unmeasured: dict[str, str] = {}
        """Addresses of values that cannot be measured, with the reason."""
        self.views: list[View] = []
        """The views whose gradient is heard of in the step under way."""
        self._identities = Identities()
        self._firsts: dict[int, int] = {}
        self._visits: dict[Post, int] = {}
        self._stacks: dict[int, tuple[object, list[Passage]]] = {}
        self._arrivals: dict[tuple[int, bool], int] = {}
        self._gradients: dict[tuple[int, bool, int], int] = {}
        self._states: dict[tuple[str, str, bool], int] = {}
        self._change_count = 0
        self._lock = RLock()

    def begin_step(self) -> None:
        """Forget which tensors were met, and count visits anew."""
        self._identities.clear()
        self._firsts.clear()
        self._visits.clear()
        self._stacks.clear()
        self._arrivals.clear()
        self.has_gradient.clear()
        self.views.clear()

    def find_lost(self) -> list[str]:
        """Name the views that were changed in place, so that their gradient was not told."""
        return [self.sites[one.site].address for one in self.views if one.is_changed]

    # Modules.

    def enter(self, post: Post, visit: Visit) -> Passage:
        """Learn that a module begins to run."""
        call, stack = self._stacks.get(visit.call.thread, (None, []))
        if call is not visit.call:  # what an interrupted call left behind is not under way
            stack = []
            self._stacks[visit.call.thread] = (visit.call, stack)
        number = self._visits.get(post, 0)
        self._visits[post] = number + 1
        passage = Passage(post, number, stack[-1].post.path if stack else None)
        stack.append(passage)
        visit.record = passage
        return passage

    def leave(self, visit: Visit) -> Passage | None:
        """Learn that a module ends, or has raised."""
        passage: Passage | None = visit.record
        _, stack = self._stacks.get(visit.call.thread, (None, []))
        if stack and stack[-1] is passage:
            stack.pop()
        elif passage in stack:  # those above it were interrupted
            del stack[stack.index(passage) :]
        return passage

    def begin_inside(self, post: Post, visit: Visit) -> Passage:
        """Learn that a module begins to run inside a compiled graph, which tells of no ends."""
        number = self._visits.get(post, 0)
        self._visits[post] = number + 1
        visit.record = passage = Passage(post, number, self._around(post.path))
        return passage

    def _around(self, path: str) -> str | None:
        """Give the module around another one, as far as it has run."""
        ran = {post.path for post in self._visits}
        while path:
            path = path.rpartition(".")[0]
            if path in ran:
                return path
        return None

    def note_given(self, passage: Passage, leaf: Path, tensor: Tensor) -> None:
        """Remember what a module is given, to see whether it writes into that."""
        if not tensor.is_inference():
            passage.given.append((leaf, tensor, tensor._version))

    def end(self, passage: Passage) -> None:
        """Take what a module has written into, once its outputs were taken.

        Of modules inside of one another that is the innermost, which ends first.
        """
        for leaf, tensor, version in passage.given:
            if tensor._version != version and self._identities.note_overwritten(tensor):
                self._overwrite(passage, leaf, tensor)
        passage.given.clear()

    def _overwrite(self, passage: Passage, leaf: Path, tensor: Tensor) -> None:
        of = self.sites[passage.sites["input", leaf]]
        first = self._identities.find(tensor)

        def make(number: int, value: Tensor) -> TraceSite:
            return replace(
                of,
                id=number,
                kind="overwritten",
                requires_grad=None,
                same_as=first,
                of=of.id,
                more=_place(value),
                **_describe(value),
            )

        key = ("overwritten", leaf, passage.visit)
        with self._lock:
            number = passage.post.ids.get(key)
            if number is None:
                number = passage.post.ids[key] = self.sink.number(make, tensor)
        if first is None:
            self._measure(number, tensor, of.address)
        else:
            self.sink.share(number, first, tensor)

    # Values and their gradients.

    def value(self, passage: Passage, port: str, leaf: Path, tensor: Tensor) -> tuple[int, bool]:
        """Take a value; give its site, and whether its tensor was met before in this step."""
        key = (port, leaf, passage.visit)
        number = passage.post.ids.get(key)
        if number is None:
            number = self._meet_value(passage, port, leaf, tensor)
        passage.sites[port, leaf] = number
        first = self._identities.meet(tensor, number)
        if first is None:
            self._measure(number, tensor, self.sites[number].address)
            return number, False
        self._firsts[number] = first
        self.sink.share(number, first, tensor)
        return number, first in self.has_gradient

    def value_inside(self, passage: Passage, port: str, leaf: Path, tensor: Tensor) -> None:
        """Take a value of a compiled graph: nobody knows whose tensor it is."""
        number = passage.post.ids.get((port, leaf, passage.visit))
        if number is None:
            number = self._meet_value(passage, port, leaf, tensor, is_inside=True)
        passage.sites[port, leaf] = number
        self._measure(number, tensor, self.sites[number].address)

    def first_of(self, site: int) -> int:
        """Give the site whose very tensor a value of this step is: itself, or an earlier one."""
        return self._firsts.get(site, site)

    def is_known(self, tensor: Tensor) -> bool:
        """Tell whether a tensor was met in this step."""
        return self._identities.knows(tensor)

    def count_change(self) -> int:
        """Give a number to something that is put in the place of a value."""
        with self._lock:
            self._change_count += 1
            return self._change_count

    def _meet_value(
        self, passage: Passage, port: str, leaf: Path, tensor: Tensor, *, is_inside: bool = False
    ) -> int:
        post = passage.post
        has_mode = torch.is_grad_enabled() and not is_inside

        def make(number: int, value: Tensor) -> TraceSite:
            site = TraceSite(
                id=number,
                kind="value",
                address=format_place(escape(post.path), port, leaf),
                module=post.path,
                port=port,
                leaf=leaf,
                visit=passage.visit,
                type=post.type,
                caller=passage.caller,
                requires_grad=value.requires_grad if has_mode else None,
                same_as=None if is_inside else self._identities.meet(value, number),
                source=post.source,
                more=_describe_mode(value),
                **_describe(value),
            )
            self.sites[number] = site
            return site

        key = (port, leaf, passage.visit)
        with self._lock:
            number = post.ids.get(key)
            if number is None:
                number = post.ids[key] = self.sink.number(make, tensor)
        return number

    def gradient(self, value: int, grad: Tensor, *, is_part: bool = False) -> None:
        """Take the gradient of a value, or the part of it that one module sends."""
        shape = self.sites[value].shape
        if not grad.is_nested and grad.shape != shape and grad.numel() == math.prod(shape):
            grad = grad.reshape(shape)  # heard of at the node that made what a view shows
        with self._lock:
            arrival = self._arrivals.get((value, is_part), 0)
            self._arrivals[value, is_part] = arrival + 1
            key = (value, is_part, arrival)
            number = self._gradients.get(key)
            if number is None:
                number = self._gradients[key] = self._meet_gradient(*key, grad)
        self._measure(number, grad, f"{self.sites[value].address}.grad")

    def _meet_gradient(self, value: int, is_part: bool, arrival: int, grad: Tensor) -> int:
        of = self.sites[value]

        def make(number: int, tensor: Tensor) -> TraceSite:
            return replace(
                of,
                id=number,
                kind="gradient",
                address=format_place(escape(of.module), of.port, of.leaf, is_grad=True),
                requires_grad=None,
                same_as=None,
                of=value,
                is_part=is_part,
                more=_place(tensor) | ({"arrival": arrival} if arrival else {}),
                **_describe(tensor),
            )

        return self.sink.number(make, grad)

    # Parameters and buffers.

    def state(
        self,
        kind: str,
        name: str,
        tensor: Tensor,
        *,
        owner: nn.Module,
        requires_grad: bool | None = None,
        is_after: bool = False,
    ) -> int:
        """Take a parameter or buffer by its full name, its gradient or its update."""
        key = (kind, name, is_after)
        number = self._states.get(key)
        if number is None:
            of = (
                None
                if kind in ("parameter", "buffer")
                else self._states.get(("parameter", name, False))
            )
            more: dict[str, Any] = {"after": True} if is_after else {}
            module, _, own = name.rpartition(".")

            def make(number: int, value: Tensor) -> TraceSite:
                return TraceSite(
                    id=number,
                    kind=kind,
                    address=escape(name) + _KINDS[kind],
                    module=module,
                    port="buffer" if kind == "buffer" else "parameter",
                    leaf=(own,),
                    visit=int(is_after),
                    type=type(owner).__name__,
                    requires_grad=requires_grad,
                    of=of,
                    more=_place(value) | more,
                    **_describe(value),
                )

            number = self._states[key] = self.sink.number(make, tensor)
        self._measure(number, tensor, escape(name) + _KINDS[kind])
        return number

    def _measure(self, number: int, tensor: Tensor, address: str) -> None:
        """Have a value measured; one that cannot be is noted."""
        why = find_obstacle(tensor)
        if why is None:
            self.sink.measure(number, to_plain(tensor))
        else:
            self.unmeasured.setdefault(address, why)


def _describe(tensor: Tensor) -> dict[str, Any]:
    shape = () if tensor.is_nested else tuple(tensor.shape)  # that of a nested one is no numbers
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}


def _describe_mode(tensor: Tensor) -> dict[str, Any]:
    """Say where autocast is on: what is coarser then was meant to be."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return {}
    return {"autocast": str(torch.get_autocast_dtype(device)).removeprefix("torch.")}


def _place(tensor: Tensor) -> dict[str, Any]:
    """Say which part of a tensor this rank has, where it is spread over ranks."""
    shard = None if type(tensor) is Tensor else find_shard(tensor)
    return {} if shard is None else {"shard": shard.facts()}
