"""Numbers by which the graph of a whole model knows who hears, in the place of a key for each.

Every input of a graph takes the host its time, before and after the graph runs, and a watch of a
large model has hundreds of ears. So these have numbers, written down in the graph, and one key goes
into it: that of the board where the numbers are listed. A number is given anew when its ear is
gone, so the next session has the same ones and the same graph. A backward that was put off goes
with the board of its own forward, which says who had the number then.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

_KEPT = 64
"""How many boards are kept: as many times somebody may have come before a backward runs."""

BOARDS: dict[torch.device, Tensor] = {}
"""The key of the latest board, by device. Read where graphs are traced, and whenever they run."""

_current: dict[torch.device, Board] = {}
_by_address: dict[int, Board] = {}
_kept: deque[Board] = deque()
_free: list[int] = []
_new = itertools.count(1)


class Board:
    """Who has which number."""

    def __init__(self, device: torch.device, ears: dict[int, weakref.ref[Any]]) -> None:
        with torch.inference_mode(False):
            self.key = torch.zeros(1, dtype=torch.int64, device=device)
        dynamo = sys.modules.get("torch._dynamo")
        if device.type == "cuda" and dynamo is not None:
            dynamo.mark_static_address(self.key, guard=False)
        self.address = self.key.data_ptr()
        self.ears = {number: ear for number, ear in ears.items() if ear() is not None}
        self.is_used = False
        """Whether a graph was given its key: then it stays as it is."""


def take_number(ear: Any, device: torch.device) -> int:
    """Give an ear a number, and list it."""
    number = heapq.heappop(_free) if _free else next(_new)
    weakref.finalize(ear, heapq.heappush, _free, number).atexit = False
    board = _current.get(device)
    if board is None or board.is_used:
        board = _current[device] = Board(device, {} if board is None else board.ears)
        BOARDS[device] = board.key
        _by_address[board.address] = board
        _kept.append(board)
        if len(_kept) > _KEPT:
            old = _kept.popleft()
            if _by_address.get(old.address) is old:
                del _by_address[old.address]
    board.ears[number] = weakref.ref(ear)
    return number


def find_numbered(address: int, number: int) -> Any:
    """Give the ear that had a number when the board with a key was the latest; None if gone."""
    board = _by_address.get(address)
    if board is None:
        return None
    board.is_used = True
    ear = board.ears.get(number)
    return None if ear is None else ear()
