"""Memory that is lent piece by piece, in turn, and lent again when a piece has been given back.

Knows nothing of devices: a ticket is whatever tells that a piece is free again.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Ticket = TypeVar("Ticket")

ALIGNMENT = 512


class Ring(Generic[Ticket]):
    """Lend pieces of a stretch of memory one after the other, from the start again at its end.

    Pieces are given back in the order they were lent: when one is free, so are those before it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._next = 0
        self._lent: deque[tuple[int, int, Ticket]] = deque()

    def take(self, size: int, ticket: Ticket) -> tuple[int, Ticket | None]:
        """Lend a piece: where it begins, and the ticket that has to be free before it is used.

        `ticket` will tell when this piece is free again.
        """
        size = align(size)
        if size > self.size:
            raise ValueError(f"a piece of {size:,} bytes from a ring of {self.size:,}")
        start = self._next if self._next + size <= self.size else 0
        end = start + size
        # A piece skipped at the ring's end may be older than one that lies here, and need not
        # overlap it; it is free before that one all the same.
        count = 0
        for number, (other_start, other_end, _) in enumerate(self._lent, 1):
            if other_start < end and start < other_end:
                count = number
        before = None
        for _ in range(count):
            before = self._lent.popleft()[2]
        self._lent.append((start, end, ticket))
        self._next = end
        return start, before


def align(size: int) -> int:
    """Round a size up to where a tensor of any type may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT
