"""Tensors of many samples on disk: a folder of shards that are written once and read in any order.

    layout.py          the folder, the names in it, what a column is
    places.py          a folder of this machine, or one that fsspec reaches
    direct_files.py    a large file, written past the page cache
    shard_writing.py   one shard; writing.py all of them
    locking.py         who writes under a name, and what writers that are gone have begun
    shard_reading.py   one shard; store.py all of them, stored_columns.py by column
    rows_at.py         rows from all over, many on their way at once
    indexing.py        what the store says of itself, and a line for each shard
    failures.py        the samples that were left out, and why
    datasets.py        `StoreDataset` and `StoreIterable`, for torch's data loaders
    exporting.py       Arrow, Parquet, datasets, zarr
    verifying.py       `verify`: whether everything is as it was written, and what to do if not

Knows no models.
"""

from __future__ import annotations

from hookline.stores.datasets import StoreDataset, StoreIterable
from hookline.stores.layout import Column
from hookline.stores.store import Store, open_store
from hookline.stores.stored_columns import StoredColumn
from hookline.stores.verifying import Verdict, verify
from hookline.stores.writing import StoreWriter

__all__ = [
    "Column",
    "Store",
    "StoreDataset",
    "StoreIterable",
    "StoreWriter",
    "StoredColumn",
    "Verdict",
    "open_store",
    "verify",
]
