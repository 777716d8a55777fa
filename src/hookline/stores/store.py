"""Read a store: its samples in the order of their numbers, whoever wrote them and when."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hookline._errors import StoreError
from hookline.stores.exporting import make_arrow, make_datasets, write_parquet, write_zarr
from hookline.stores.failures import read_failed
from hookline.stores.indexing import list_shards, need_about
from hookline.stores.layout import Column
from hookline.stores.places import Place, open_place
from hookline.stores.rows_at import RowReader
from hookline.stores.shard_reading import Integers, Shard, open_shards, read_integers
from hookline.stores.stored_columns import StoredColumn

if TYPE_CHECKING:
    from hookline.stores.datasets import StoreDataset, StoreIterable


class Store:
    """A folder of samples that was written by `hl.extract` or a `StoreWriter`.

    Samples are in the order of their numbers:

        store = hl.open_store("features")
        store["layers.20"][:100]        # of the first 100 samples, where they lie on the disk
        store["layers.20"].of([7, 99])  # of the samples with these numbers
    """

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.place: Place = open_place(where)
        about = need_about(self.place)
        self.columns: dict[str, Column] = about.columns
        """What is kept of each sample."""
        self.facts: dict[str, Any] = about.facts
        """What its writer said of it: which model, which data."""
        self.shards = list(open_shards(self.place, list_shards(self.place), self.columns))
        self.reader = RowReader(self.place)

    def __getstate__(self) -> dict[str, Any]:
        """Give what another process needs to open the same: where it is, and the heads."""
        where = self.place.name if self.place.local is None else str(self.place.local)
        return {"where": where, "shards": self.shards, "columns": self.columns, "facts": self.facts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.place = open_place(state["where"])
        self.columns, self.facts = state["columns"], state["facts"]
        self.shards = [one.at(self.place) for one in state["shards"]]
        self.reader = RowReader(self.place)

    def __repr__(self) -> str:
        names = ", ".join(self.columns)
        return f"<Store {self.place.name}: {len(self):,} samples; {names}>"

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, column: object) -> bool:
        return column in self.columns

    def __getitem__(self, column: str) -> StoredColumn:
        """Give a column."""
        return StoredColumn(self, self._find(column))

    @property
    def ids(self) -> Integers:
        """The numbers of the samples, in order."""
        return self._samples[0]

    @property
    def failed(self) -> dict[int, str]:
        """By number, the samples that an extraction skipped and that are not there since: why."""
        return read_failed(self.place, self.ids)

    @property
    def nbytes(self) -> int:
        """How many bytes the rows take."""
        return sum(
            shard.extent(group, name).end - shard.extent(group, name).begin
            for shard in self.shards
            for group in range(len(shard.groups))
            for name in self.columns
        )

    @cached_property
    def _groups(self) -> list[tuple[Shard, int]]:
        return [(shard, group) for shard in self.shards for group in range(len(shard.groups))]

    @cached_property
    def _files(self) -> list[str]:
        return [one.path for one in self.shards]

    @cached_property
    def _shards_of_groups(self) -> Integers:
        return np.repeat(np.arange(len(self.shards)), [len(one.groups) for one in self.shards])

    @cached_property
    def _spans(self) -> dict[str, tuple[Integers, Integers]]:
        """Keep by column what was found of its samples."""
        return {}

    @cached_property
    def _begins(self) -> dict[str, Integers]:
        """Keep by column what was found of its groups."""
        return {}

    @cached_property
    def _samples(self) -> tuple[Integers, Integers, Integers]:
        """Give the samples in order: their numbers, their groups, their places in these."""
        none = np.empty(0, np.int64)
        own = read_integers(self.place, [shard.ids_part(group) for shard, group in self._groups])
        ids = np.concatenate([none, *own])
        groups = np.repeat(np.arange(len(own)), [len(one) for one in own])
        places = np.concatenate([none, *(np.arange(len(one)) for one in own)])
        # Of a sample that is there twice, as after a task was run again, the first counts.
        ids, first = np.unique(ids, return_index=True)
        return ids, groups[first], places[first]

    def positions(self, ids: Sequence[int] | Integers) -> Integers:
        """Find samples by their numbers; give their positions in the order of the store."""
        wanted = np.asarray(ids, np.int64).reshape(-1)
        at = np.searchsorted(self.ids, wanted)
        found = np.minimum(at, max(len(self) - 1, 0))
        missing = wanted[self.ids[found] != wanted] if len(self) else wanted
        if len(missing):
            raise StoreError(
                f"`{self.place.name}` holds no sample {missing[0]}"
                + (
                    f" (nor {len(missing) - 1} others that were asked for)"
                    if len(missing) > 1
                    else ""
                )
            )
        return found

    def dataset(self, columns: Sequence[str] | None = None) -> StoreDataset:
        """Give samples by position to torch's `DataLoader`; see `StoreDataset`."""
        from hookline.stores.datasets import StoreDataset

        return StoreDataset(self, columns)

    def iterate(
        self,
        columns: Sequence[str] | None = None,
        *,
        batch_size: int = 256,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        drop_last: bool = False,
    ) -> StoreIterable:
        """Give ready batches, to iterate or for torch's `DataLoader`; see `StoreIterable`."""
        from hookline.stores.datasets import StoreIterable

        return StoreIterable(
            self,
            columns,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world=world,
            drop_last=drop_last,
        )

    def to_arrow(self, columns: Sequence[str] | None = None) -> Any:
        """Give samples as a `pyarrow.Table`, with their numbers as `id`.

        A row that is a vector is a list of fixed size; one of more dimensions is flattened, and
        its shape is in the metadata of the field. A ragged column has a list of these for each
        sample. bfloat16 and 8 bit floats become float32, complex numbers two float32.
        """
        return make_arrow(self, columns)

    def to_parquet(
        self, path: str | os.PathLike[str], columns: Sequence[str] | None = None
    ) -> None:
        """Write samples into a file of Parquet, as `to_arrow` gives them; never all in memory."""
        write_parquet(self, path, columns)

    def to_datasets(self, columns: Sequence[str] | None = None) -> Any:
        """Give samples as a `datasets.Dataset`, as `to_arrow` gives them."""
        return make_datasets(self, columns)

    def to_zarr(self, path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> None:
        """Write samples into a new group of zarr: `ids`, and an array for each column.

        A ragged column is a group of `rows` and `ends`, where the rows of each sample end.
        bfloat16 and 8 bit floats become float32.
        """
        write_zarr(self, path, columns)

    def _find(self, column: str) -> str:
        for name in (column, f"{column}:output"):
            if name in self.columns:
                return name
        raise StoreError(
            f"`{self.place.name}` has no column `{column}`; it has {', '.join(self.columns)}"
        )


def open_store(where: str | os.PathLike[str]) -> Store:
    """Open a tensor store: a folder, or an address that fsspec knows."""
    return Store(where)
