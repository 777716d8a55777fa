"""A store as torch's data loaders want it: sample by sample, or in batches that are ready.

    loader = DataLoader(store.dataset(), batch_size=256, shuffle=True, num_workers=4)
    loader = DataLoader(store.iterate(batch_size=256, shuffle=True), batch_size=None, num_workers=4)

The second hands over batches as they were read; nothing is taken apart and put together again.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hookline._errors import StoreError
from hookline.stores.shard_reading import Integers
from hookline.stores.store import Store

Batch = dict[str, Any]
"""By column a tensor, or of a ragged column a list of tensors; and the numbers of the samples."""


class _Columns:
    """Some columns of a store, in whichever process they are read."""

    def __init__(self, store: Store, columns: Sequence[str] | None, number: str) -> None:
        asked = list(store.columns) if columns is None else list(columns)
        self.names = {name: store[name].name for name in asked}
        """By the name that was asked for the one that the store has."""
        if number in self.names:
            raise StoreError(
                f"`{number}` is what the number of a sample is called, and a column of the store "
                f"`{store.place.name}` as well: leave it out with `columns=[...]`"
            )
        self._store = store
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_process": None}

    @property
    def store(self) -> Store:
        """The store; opened again in a process that came about by a fork or got this from another.

        Connections do not survive a fork; what was found out about the samples does.
        """
        if self._process != os.getpid():
            if self._process is not None:
                known = {key: one for key, one in vars(self._store).items() if key == "_samples"}
                self._store = copy.copy(self._store)
                vars(self._store).update(known)
            self._process = os.getpid()
        return self._store

    def read(self, positions: Integers) -> Batch:
        """Read samples, all of a column at once."""
        return {name: self.store[own][positions] for name, own in self.names.items()}


class StoreDataset(Dataset[dict[str, Any]]):
    """Samples of a store by position: for each column a tensor, and the sample's number as `id`.

    Data loaders ask for a whole batch at once, and so it is read.

    Args:
        store: the store.
        columns: those that are wanted; without it all of them.
    """

    def __init__(self, store: Store, columns: Sequence[str] | None = None) -> None:
        self._columns = _Columns(store, columns, "id")

    def __len__(self) -> int:
        return len(self._columns.store)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Give a sample."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Give samples, read together."""
        store = self._columns.store
        positions = np.asarray(indices, np.int64)
        found = self._columns.read(positions)
        return [
            {"id": int(number), **{name: values[at] for name, values in found.items()}}
            for at, number in enumerate(store.ids[positions])
        ]


class StoreIterable(IterableDataset[Batch]):
    """Ready batches of a store, each sample once over all ranks and workers together.

    A batch is a dict: for each column a tensor with a row for each sample, or of a ragged column a
    list of tensors, and `ids`. Batches are the same whatever the number of ranks and workers; only
    who reads which differs. Give it to a `DataLoader` with `batch_size=None`, or iterate it as is.

    Args:
        store: the store.
        columns: those that are wanted; without it all of them.
        batch_size: samples of a batch.
        shuffle: mix all samples of the store, anew in each epoch (see `set_epoch`).
        seed: of the mixing, the same for all ranks.
        rank: of this process; without it that of torch.distributed, or of `RANK`, or 0.
        world: how many ranks there are; found in the same way.
        drop_last: leave out what fills no batch, and batches that not every rank has one of.
    """

    def __init__(
        self,
        store: Store,
        columns: Sequence[str] | None = None,
        *,
        batch_size: int = 256,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"a batch has at least one sample, not {batch_size}")
        if (rank is None) != (world is None):
            raise ValueError("`rank` and `world` belong together: give both or neither")
        if rank is not None and world is not None and not 0 <= rank < world:
            raise ValueError(f"there is no rank {rank} of {world}: the first is 0")
        self._columns = _Columns(store, columns, "ids")
        self._batch_size, self._is_shuffled, self._seed = batch_size, shuffle, seed
        self._is_last_dropped = drop_last
        self._ranks = None if rank is None or world is None else (rank, world)
        # Shared, so that workers that outlive an epoch learn of the next.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __getstate__(self) -> dict[str, Any]:
        """Say which rank this is: a worker that is started anew cannot ask torch.distributed."""
        return self.__dict__ | {"_ranks": self._find_ranks()}

    def __len__(self) -> int:
        """Give how many batches this rank gets."""
        rank, world = self._find_ranks()
        return len(range(rank, self._count(world), world))

    def __iter__(self) -> Iterator[Batch]:
        """Go through the batches of this rank and worker."""
        rank, world = self._find_ranks()
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        store, size = self._columns.store, self._batch_size
        order = self._order(len(store))
        # In turn, so that the loader, which asks worker after worker, keeps the order.
        for number in range(rank + first * world, self._count(world), world * step):
            begin = number * size
            positions = (
                np.arange(begin, min(begin + size, len(store)))
                if order is None
                else order[begin : begin + size]
            )
            ids = torch.from_numpy(store.ids[positions])
            yield {"ids": ids, **self._columns.read(positions)}

    def set_epoch(self, epoch: int) -> None:
        """Have the samples mixed in another order; call it before each epoch, on every rank."""
        self._epoch.fill_(epoch)

    def _order(self, count: int) -> Integers | None:
        if not self._is_shuffled:
            return None
        return np.random.default_rng([self._seed, int(self._epoch)]).permutation(count)

    def _count(self, world: int) -> int:
        """Give how many batches all ranks get together."""
        samples = len(self._columns.store)
        if self._is_last_dropped:
            return samples // self._batch_size // world * world
        return -(-samples // self._batch_size)

    def _find_ranks(self) -> tuple[int, int]:
        if self._ranks is not None:
            return self._ranks
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return 0, 1
