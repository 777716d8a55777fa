"""Who hears for a trace inside of compiled graphs.

Whose memory a value lies in is not known there, so no value is told to be another's tensor, and a
module is taken to be called by the one around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hookline.hooks.ears import VisitEar, is_remark
from hookline.hooks.hearing import Ear, Gradient, Place

if TYPE_CHECKING:
    from hookline.recordings.course import Passage
    from hookline.recordings.listening import TraceListener


class TraceEar(Ear):
    """Hand what a graph delivers to a listener of a trace, and its gradient when that comes."""

    __slots__ = ("listener", "visits")

    def __init__(self, device: torch.device, listener: TraceListener, visits: VisitEar) -> None:
        super().__init__(device)
        self.listener = listener
        self.visits = visits

    def take(self, tensor: Tensor, place: Place) -> Gradient | None:
        visit = self.visits.visit_of(self, place)
        listener = self.listener
        if visit is None or not listener.session.is_open or is_remark(place):
            return None
        if not visit.is_recompute:
            listener.on_delivery(visit, place, tensor)
        passage: Passage | None = (visit.original or visit).record
        number = None if passage is None else passage.sites.get((place.port, place.leaf))
        if number is None or not listener.asks_gradients:
            return None
        site, epoch = number, listener.session.epoch

        def tell(grad: Tensor) -> None:
            if listener.session.epoch is epoch:
                listener.on_delivered_total(site, grad.detach())

        return tell
