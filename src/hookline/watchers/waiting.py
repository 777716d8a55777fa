"""Values on a GPU that wait a little, to be measured several in one launch.

Launching a kernel takes the host longer than the kernel takes to read most values. A value may
wait as long as nobody changes it: its version tells. Sites whose value is changed in place soon
after it was made are found in the first step, or the first time it happens, and wait no more.

Gradients that may wait come without any Python: the hook on the tensor is a list's own `append`,
and the last one of each group is a function that measures what has come since. Their version when
they came is not known then. But autograd adds in place only to what nobody else holds, and who else
changes gradients in place is found in the first step, and in those that are heard the longer way:
now and then, and after a version that was never seen so high.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline._torch import (
    is_capturing_cuda_graph,
    is_functorch_active,
    is_tracing,
    raw_cuda_stream,
)
from hookline.stats import TOGETHER

if TYPE_CHECKING:
    from hookline.watchers.recording import Recorder

LARGE = 1 << 25
"""Elements of a value that may wait: a larger one is not worth its memory."""

MOST_HELD = 1 << 28
"""Elements of all that wait for each other: more are not worth their memory."""

_version_of = attrgetter("_version")


class Box(list["Tensor | None"]):
    """Gradients of a site that wait; where autograd made none, None is among them."""

    __slots__ = ("__weakref__",)


class Group:
    """Gradients of a few sites, which wait for each other."""

    __slots__ = ("boxes", "sites", "size", "versions")

    def __init__(self) -> None:
        self.sites: tuple[int, ...] = ()
        self.size = 0
        """How many elements they had together when they were first met."""
        self.boxes: list[Box] = []
        """What those of each site are put into."""
        self.versions: tuple[int, ...] = ()
        """What versions they had when they were measured last."""

    def has_room(self, size: int) -> bool:
        """Tell whether a site with so many elements may be added."""
        return len(self.sites) < TOGETHER and self.size + size <= MOST_HELD

    def add(self, site: int, size: int) -> Box:
        """Add a site, and give what its gradients are put into."""
        self.size += size
        box = Box()
        self.boxes.append(box)  # first, so that no site is without one
        self.sites += (site,)
        return box

    def empty(self) -> tuple[tuple[int, ...], list[Tensor | None]]:
        """Take out what waits: whose it is, and the gradients."""
        found: list[Tensor | None] = []
        try:
            for box in self.boxes:
                found.append(box.pop())  # noqa: PERF401 -- where one has none, these are kept
        except IndexError:
            pass
        else:
            if len(found) == len(self.sites) and not any(self.boxes):
                return self.sites, found
        # A module that ran twice or not at all, or another thread was faster.
        sites = list(self.sites[: len(found)])
        for site, box in zip(self.sites, self.boxes, strict=False):
            while box:
                with contextlib.suppress(IndexError):
                    found.append(box.pop())
                    sites.append(site)
        return tuple(sites), found


class Lane:
    """What waits for one stream of one device: it was made there and may be read there."""

    __slots__ = (
        "boxes",
        "device",
        "groups",
        "held",
        "is_closed",
        "lock",
        "stream",
        "streamed",
        "waiting",
    )

    def __init__(self, device: int, stream: int) -> None:
        self.device = device
        self.stream = stream
        self.streamed: Any = current_stream(device)
        """The stream itself, to go back to it."""
        self.waiting: list[tuple[int, Tensor, int]] = []
        """Site, value and version; one list for good, so that others may hold on to it."""
        self.held = 0
        """Elements of the values among them, about: threads that share a lane do not wait."""
        self.groups: list[Group] = []
        """Gradients, in the order in which the outputs were first met, some together."""
        self.boxes: list[Box] = []
        """What they are put into, site by site."""
        self.is_closed = False
        """Whether what still comes is of no interest any more."""
        self.lock = threading.Lock()


def current_stream(device: int) -> Any:
    """Give the stream that work for a CUDA device goes to now."""
    return torch.cuda.current_stream(device)


class Queue:
    """Hold a few values until they are measured together."""

    def __init__(self, recorder: Recorder) -> None:
        self.has_learned = False
        """Whether a step has shown which values must not wait; before, none does."""
        self.hasty: frozenset[int] = frozenset()
        """Sites whose values are measured at once; another object whenever one is added."""
        self.open: Lane | None = None
        """The lane used last, where its values may be put without more ado; else None."""
        self._recorder = weakref.ref(recorder)
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._known: set[int] = set()
        """Sites that were met while it learned."""
        self._closed: list[weakref.ref[Box]] = []
        """Boxes of lanes that are closed: gradients of a graph that is still there come there."""
        self._highest: dict[int, int] = {}
        """The highest version that a gradient of a site had when it was measured."""
        self._latest: deque[tuple[int, Tensor, int]] = deque()
        """While it learns, the latest values, held as if they waited."""
        self._held = 0
        """Elements of those."""
        self._learning = threading.Lock()
        """Held while these change: each device has a thread of its own in backward."""

    @property
    def length(self) -> int:
        """How many values wait."""
        lanes = self._lanes.values()
        return sum(len(lane.waiting) + sum(map(len, lane.boxes)) for lane in lanes)

    def take(self, site: int, value: Tensor) -> bool:
        """Let a value of a CUDA device wait; false where it must be measured at once."""
        if not self.has_learned or site in self.hasty or value.numel() > LARGE:
            return False
        if value.is_inference() or is_capturing_cuda_graph(value):  # no version, or no value yet
            return False
        device = value.get_device()
        stream = raw_cuda_stream(device)
        lane = self._lanes.get((device, stream))
        if lane is None:
            lane = self._lanes[device, stream] = Lane(device, stream)
        recorder = self._recorder()
        self.open = lane if recorder is not None and recorder.is_steady else None
        if len(lane.waiting) >= TOGETHER or lane.held > MOST_HELD:
            self.settle_values(lane)
        lane.held += value.numel()
        lane.waiting.append((site, value, value._version))
        return True

    def make_box(self, lane: Lane, site: int, size: int) -> Callable[[Tensor | None], None] | None:
        """Make what takes the gradients of a site, of about a size; None if they must not wait."""
        if site not in self._known or site in self.hasty:
            return None
        with lane.lock:  # threads whose work goes to one stream share a lane
            is_first = not lane.groups or not lane.groups[-1].has_room(size)
            if is_first:
                lane.groups.append(Group())
            group = lane.groups[-1]
            box = group.add(site, size)
            lane.boxes.append(box)
        if not is_first:
            return box.append

        def take(grad: Tensor | None) -> None:
            # It comes last of its group, unless the order is not the reverse: then others wait
            # for the end of the backward pass.
            box.append(grad)
            self._settle_gradients(lane, group)

        return take

    def settle(self) -> None:
        """Measure what waits, and hold it no longer."""
        with self._learning:
            self._look_back()
            self._latest.clear()
            self._held = 0
        if self._closed:
            there = [(known, box) for known in self._closed if (box := known()) is not None]
            self._closed = [known for known, _ in there]
            for _, box in there:
                box.clear()  # nobody wants them
        for lane in tuple(self._lanes.values()):
            self.settle_values(lane)
            if any(lane.boxes):
                for group in lane.groups:
                    if any(group.boxes):
                        self._settle_gradients(lane, group)

    def close(self) -> None:
        """Measure what waits, and take no gradient of what was met so far."""
        self.settle()
        for lane in self._lanes.values():
            lane.is_closed = True
            self._closed += map(weakref.ref, lane.boxes)
        self._lanes, self.open = {}, None

    def settle_values(self, lane: Lane) -> None:
        """Measure the values of a lane that wait; other threads may put some there meanwhile."""
        with lane.lock:
            waiting = lane.waiting[:]
            del lane.waiting[: len(waiting)]
            lane.held = 0
        if not waiting:
            return
        sites, values, versions = zip(*waiting, strict=True)
        if tuple(map(_version_of, values)) == versions:
            self._measure(lane, sites, values)
            return
        # What flowed there is gone where one was changed: nothing is better than another.
        self.hasty |= {site for site, value, version in waiting if value._version != version}
        kept = [(site, value) for site, value, version in waiting if value._version == version]
        if kept:
            sites, values = zip(*kept, strict=True)
            self._measure(lane, sites, values)

    def _settle_gradients(self, lane: Lane, group: Group) -> None:
        sites, grads = group.empty()
        if not sites:
            return
        try:
            versions = tuple(map(_version_of, grads))
        except (AttributeError, RuntimeError):  # one was not made, or in inference mode
            pass
        else:
            if versions != group.versions:
                self._note_versions(sites, versions)
                group.versions = versions
        self._measure(lane, sites, grads)

    def _note_versions(self, sites: Sequence[int], versions: Sequence[int]) -> None:
        """Have the next step look at every value if a gradient was changed as never before."""
        highest = self._highest
        for site, version in zip(sites, versions, strict=True):
            if version <= highest.setdefault(site, version):
                continue
            highest[site] = version
            recorder = self._recorder()
            if recorder is not None:
                recorder.look_again()

    def _measure(self, lane: Lane, sites: tuple[int, ...], values: Sequence[Tensor | None]) -> None:
        recorder = self._recorder()
        if recorder is None or lane.is_closed or not recorder.is_on:
            return
        if is_functorch_active() or is_tracing():
            return
        try:
            if raw_cuda_stream(lane.device) == lane.stream:
                recorder.measure_waiting(sites, values)
            else:
                with torch.cuda.stream(lane.streamed):
                    recorder.measure_waiting(sites, values)
        except Exception as error:
            recorder.guard.take(error)

    def learn(self, site: int, value: Tensor) -> None:
        """Look whether the latest values are still what they were.

        They are held meanwhile, as they will be: a gradient that somebody holds is not added to
        in place, where one that nobody needs any more would be.
        """
        if self.has_learned:
            return
        size = value.numel()
        with self._learning:
            self._known.add(site)
            if size > LARGE:
                self.hasty |= {site}
                return
            self._look_back()
            self._latest.append((site, value, value._version))
            self._held += size
            while len(self._latest) > 2 * TOGETHER or self._held > 2 * MOST_HELD:
                self._held -= self._latest.popleft()[1].numel()

    def _look_back(self) -> None:
        changed = {site for site, one, version in self._latest if one._version != version}
        if changed:
            self.hasty |= changed
