"""Values on a GPU that wait a little, to be measured several in one launch.

Launching a kernel takes the host longer than the kernel takes to read most values. A value may
wait as long as nobody changes it: its version tells. Sites whose value is changed in place soon
after it was made are found in the first step, or the first time it happens, and wait no more.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

from torch import Tensor

from hookline._torch import raw_cuda_stream

if TYPE_CHECKING:
    from hookline.watchers.recording import Recorder

TOGETHER = 8
"""How many values are measured in one launch."""

_LOOK_BACK = 2 * TOGETHER
"""How many values later one is looked at again, to see whether it is changed in place soon."""

_LARGE = 1 << 26
"""Elements of a value that is measured at once: not worth its memory to wait."""

_MOST_HELD = 1 << 28
"""Elements of all values that wait."""


class Queue:
    """Hold a few values until they are measured together."""

    def __init__(self, recorder: Recorder) -> None:
        self.has_learned = False
        """Whether a step has shown which values must not wait; before, none does."""
        self.hasty: set[int] = set()
        """Sites whose values are measured at once."""
        self._recorder = weakref.ref(recorder)
        self._waiting: list[tuple[int, Tensor, int]] = []
        self._sizes: dict[int, int] = {}
        self._held = 0
        self._stream: tuple[int, int] = (-1, -1)
        self._latest: deque[tuple[weakref.ref[Tensor], int, int]] = deque(maxlen=_LOOK_BACK)

    @property
    def length(self) -> int:
        """How many values wait."""
        return len(self._waiting)

    def take(self, site: int, value: Tensor) -> bool:
        """Let a value wait; false where it must be measured at once."""
        recorder = self._recorder()
        if recorder is None or not self.has_learned or recorder.extras or site in self.hasty:
            return False
        if value.is_inference():  # it has no version
            return False
        device = value.get_device()
        stream = (device, raw_cuda_stream(device))
        if stream != self._stream:
            self.settle()
            self._stream = stream
        self._waiting.append((site, value, value._version))
        self._held += self._sizes.get(site, 0)
        if len(self._waiting) == TOGETHER or self._held > _MOST_HELD:
            self.settle()
        return True

    def settle(self) -> None:
        """Measure what waits, and hold it no longer."""
        waiting, self._waiting = self._waiting, []
        self._held = 0
        recorder = self._recorder()
        if not waiting or recorder is None:
            return
        ready = []
        for site, value, version in waiting:
            if value._version == version:
                ready.append((site, value))
            else:
                self.hasty.add(site)  # what flowed there is gone: nothing is better than another
        if ready:
            recorder.measure_together(ready)

    def learn(self, site: int, value: Tensor) -> None:
        """Look whether the values of some sites ago are still what they were."""
        if self.has_learned:
            return
        self._sizes[site] = value.numel()
        if self._sizes[site] >= _LARGE:
            self.hasty.add(site)
        for known, version, seen in self._latest:  # it may be gone by the time it is the oldest
            tensor = known()
            if tensor is not None and tensor._version != version:
                self.hasty.add(seen)
        self._latest.append((weakref.ref(value), value._version, site))
