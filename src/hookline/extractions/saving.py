"""Write what a model made of samples while it works on the next ones."""

from __future__ import annotations

import queue
import threading

import numpy as np

from hookline.extractions.running import Made, bytes_of
from hookline.extractions.wanted import Ids
from hookline.stores.writing import StoreWriter

_AHEAD = 2
"""Batches that wait for the disk; the model waits when there are more."""


class Saver:
    """Hand batches to a store's writer in a thread of their own."""

    def __init__(self, writer: StoreWriter, shard: str | None = None) -> None:
        self._writer = writer
        writer.begin_task(shard)
        self._waiting: queue.Queue[tuple[Made, Ids | None] | None] = queue.Queue(_AHEAD)
        self._error: BaseException | None = None
        self.samples = 0
        """How many were handed to the writer."""
        self.bytes = 0
        """How many bytes their rows have."""
        self._thread = threading.Thread(target=self._work, name="hookline-save", daemon=True)
        self._thread.start()

    def save(self, made: Made, wanted: Ids | None) -> None:
        """Have samples written; of a batch that holds others too, the wanted ones alone."""
        while True:
            self._raise()
            try:
                self._waiting.put((made, wanted), timeout=0.2)
            except queue.Full:
                continue
            return

    def close(self) -> None:
        """Have all of it on the disk."""
        while self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=0.2)
            except queue.Full:
                continue
            self._thread.join()
        try:
            self._raise()
        finally:
            self._writer.finish_shard()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            found = self._waiting.get()
            if found is None:
                return
            if self._error is None:
                try:
                    self._write(*found)
                except BaseException as error:
                    self._error = error

    def _write(self, made: Made, wanted: Ids | None) -> None:
        values, ids = made.arrive(), made.ids
        if wanted is not None:
            places = np.flatnonzero(np.isin(ids, wanted))
            if not len(places):
                return
            ids = ids[places]
            values = {
                name: [rows[one] for one in places] if isinstance(rows, list) else rows[places]
                for name, rows in values.items()
            }
        self._writer.add(ids, values)
        self.samples += len(ids)
        self.bytes += sum(map(bytes_of, values.values()))
