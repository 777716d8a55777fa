"""Where the lines of a file begin, so that it is known how many there are and any can be read.

Knows bytes alone, nothing of what a line holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hookline.extractions.wanted import Flags, Ids, Wanted

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What some editors put before the first line."""

STRETCH = 1024
"""So many lines lie between two of which it is kept where they begin."""

_CHUNK = 4 << 20
_SPACE = 32
"""No byte of white space is greater."""


class ReadableBytes(Protocol):
    """A file that is open for its bytes."""

    def read(self, size: int, /) -> bytes:
        """Give the next bytes."""

    def seek(self, place: int, /) -> Any:
        """Go to a place."""

    def __iter__(self) -> Iterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class LineTable:
    """How many lines a file has, and where some of them begin."""

    count: int
    """How many there are; blank ones too, unless these are left out."""
    begins: Ids
    """Where the first line begins, and each that comes `STRETCH` lines after one of these."""
    leaves_out_blank: bool = False
    """Whether lines of nothing but white space do not count."""

    def read(
        self, file: ReadableBytes, wanted: Wanted, start: int = 0
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the wanted lines of the file, each after its number; the first one's is `start`."""
        if not wanted.starts.size:
            return
        first = max(int(wanted.starts[0]) - start, 0) // STRETCH
        last = -(-(min(wanted.end - start, self.count)) // STRETCH)
        for at in range(first, last):
            low = start + at * STRETCH
            ids = wanted.within(low, min(low + STRETCH, start + self.count))
            if ids.size:
                yield from self._read_stretch(file, at, low, ids)

    def _read_stretch(
        self, file: ReadableBytes, at: int, low: int, ids: Ids
    ) -> Iterator[tuple[int, bytes]]:
        begin = int(self.begins[at])
        file.seek(begin)
        left = ids.tolist()[::-1]
        number = low
        for line in file:
            if not begin:
                line, begin = line.removeprefix(BYTE_ORDER_MARK), 1
            if self.leaves_out_blank and not line.strip():
                continue
            if number == left[-1]:
                yield left.pop(), line
                if not left:
                    return
            number += 1
        raise ValueError("it has fewer lines than when it was opened: leave it as it is meanwhile")


def count_lines(file: ReadableBytes, *, leaves_out_blank: bool = False) -> LineTable:
    """Read a file once, in large parts, and find where its lines begin."""
    begins: list[Ids] = []
    count = size = line = 0  # lines, bytes, and where the line begins that is not at its end
    is_blank = True  # as far as that line was read

    def add(found: Ids) -> None:
        nonlocal count
        begins.append(found[-count % STRETCH :: STRETCH])
        count += len(found)

    while chunk := file.read(_CHUNK):
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n"))
        head = len(BYTE_ORDER_MARK) if not size and chunk.startswith(BYTE_ORDER_MARK) else 0
        if not len(ends):
            is_blank = is_blank and not chunk[head:].strip()
            size += len(chunk)
            continue
        found = np.concatenate([[line], size + ends[:-1] + 1])
        if leaves_out_blank:
            is_blank = is_blank and not chunk[head : ends[0]].strip()
            kept = _find_filled(chunk, ends)
            kept[0] = not is_blank
            found = found[kept]
        add(found)
        line = size + int(ends[-1]) + 1
        is_blank = not chunk[int(ends[-1]) + 1 :].strip()
        size += len(chunk)
    if line < size and not (leaves_out_blank and is_blank):
        add(np.array([line], np.int64))
    return LineTable(
        count, np.concatenate([np.empty(0, np.int64), *begins]), leaves_out_blank=leaves_out_blank
    )


def _find_filled(chunk: bytes, ends: Ids) -> Flags:
    """Tell of the lines that end in a chunk which hold more than white space."""
    bytes_ = np.frombuffer(chunk, np.uint8)
    begins = np.concatenate([[0], ends[:-1] + 1])
    filled: Flags = bytes_[begins] > _SPACE
    # Few lines begin with white space, and most of these are blank at once.
    for at in np.flatnonzero(~filled & (begins < ends)).tolist():
        filled[at] = bool(chunk[begins[at] : ends[at]].strip())
    return filled
