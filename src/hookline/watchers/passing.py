"""What a watch hears of a compiled graph: values in passing, whose memory is used again at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hookline._torch import graph_task_id
from hookline.hooks.hearing import FAULT, Ear, Gradient, Place, Ready, read_about

if TYPE_CHECKING:
    from hookline.watchers.listening import WatchListener

GRAD = ".grad"
"""What the port of a gradient ends in."""


class WatchEar(Ear):
    """Have what a compiled graph shows measured."""

    __slots__ = ("listener",)

    def __init__(self, device: torch.device, listener: WatchListener) -> None:
        super().__init__(device)
        self.listener = listener

    def hear(self, tensor: Tensor, place: Place) -> None:
        self.listener.on_passing(place, tensor)

    @classmethod
    def hear_all(cls, heard: Sequence[tuple[WatchEar, Tensor, Place]]) -> Ready | None:
        """Have values that come together measured together, where no more is asked of them."""
        recorder, first = heard[0][0].listener.recorder, heard[0][1]
        is_one = all(
            ear.listener.recorder is recorder and one.device == first.device
            for ear, one, _ in heard
        )
        sites: list[int] = []
        values: list[Tensor] = []
        try:
            for ear, tensor, place in heard:
                number = ear.listener.meet_passing(place, tensor)  # this may begin a step
                if number is not None:
                    sites.append(number)
                    values.append(tensor)
            if is_one and not (recorder.extras or recorder.units.is_on):
                recorder.measure_passing_together(sites, values)
                return _make_ready(heard, sites, values)
        except Exception as error:
            recorder.guard.take(error)
            return None
        for ear, tensor, place in heard:
            ear.hear(tensor, place)
        return None

    def take(self, tensor: Tensor, place: Place) -> Gradient | None:
        # Inside a checkpoint that is compiled, values may come while the backward computes them.
        listener = self.listener
        if place.port == FAULT:
            key, where = read_about(place)
            listener.no_key(key, where)
            return None
        if listener.values:
            self.hear(tensor, place)
        if not listener.gradients:
            return None
        of_grad = Place(place.port + GRAD, place.leaf)
        return lambda grad: self.hear(grad, of_grad)


def _make_ready(
    heard: Sequence[tuple[WatchEar, Tensor, Place]], sites: Sequence[int], values: Sequence[Tensor]
) -> Ready | None:
    """Make what measures the same values next time, all of them known and of one watch."""
    listeners = tuple(dict.fromkeys(ear.listener for ear, _, _ in heard))
    recorder, session = listeners[0].recorder, listeners[0].session
    has_values = any(not place.port.endswith(GRAD) for _, _, place in heard)
    is_plain = all(place.has_grad or place.port.endswith(GRAD) for _, _, place in heard)
    if len(sites) < len(heard) or not is_plain:
        return None
    if any(one.session is not session for one in listeners):
        return None
    measure_all = recorder.prepare_passing(sites, values)

    def measure(values: Sequence[Tensor]) -> bool:
        if not recorder.is_on or recorder.extras or recorder.units.is_on or not session.is_open:
            return False
        if has_values and (recorder.tell_begin is not None or graph_task_id() != -1):
            return False
        for one in listeners:
            if not one.is_due:
                return False
        try:
            measure_all(values)
        except Exception as error:
            recorder.guard.take(error)
        return True

    return measure
