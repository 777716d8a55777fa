"""Samples of objects: data sets and sequences by index, streams in order, batches of a loader.

Hugging Face data sets are known by what they offer, and never imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from hookline._torch import end_loading
from hookline.extractions.collating import size_of
from hookline.extractions.probing import Probe, probe_samples
from hookline.extractions.samples import (
    Broken,
    Source,
    digest,
    follow,
    pick_column,
    read_sample,
)
from hookline.extractions.wanted import Ids, Wanted


class Rows(Source):
    """Samples that can be read one by one, in any order; only the wanted ones are touched."""

    def __init__(
        self,
        read: Callable[[int], Any],
        size: int,
        *,
        name: str,
        fingerprint: str,
        column: str | None = None,
    ) -> None:
        super().__init__(name, size)
        self._read = read
        self._fingerprint = fingerprint
        self._column = column

    def fingerprint(self) -> str:
        """Give what was said of the rows when they were opened."""
        return self._fingerprint

    def probe(self) -> Probe | None:
        """Give digests of a few rows."""
        assert self.size is not None
        return probe_samples(self._take, self.size)

    def samples(self, wanted: Wanted) -> Generator[tuple[int, Any]]:
        """Yield the wanted rows, and read no other."""
        for number in wanted.ids(self.size):
            yield number, self._take(number)

    def _take(self, number: int) -> Any:
        return read_sample(number, self._read, number, self._column)


def rows_of(data: Any, *, column: str | None = None) -> Rows:
    """Take anything with a length and an index as rows."""
    return Rows(
        select_column(data, column).__getitem__,
        len(data),
        name=type(data).__name__,
        fingerprint=_describe(data, f"{len(data)} samples", column),
        column=column,
    )


class Stream(Source):
    """Samples of anything that can only be read from its beginning."""

    def __init__(self, data: Iterable[Any], *, column: str | None = None) -> None:
        is_repeatable = not isinstance(data, Iterator)
        super().__init__(type(data).__name__, _length(data), is_repeatable=is_repeatable)
        self._data = select_column(data, column)
        self._column = column
        self._fingerprint = _describe(data, "a stream", column)
        self._has_begun = False

    def fingerprint(self) -> str:
        """Give the type: nothing else is known before it is read."""
        return self._fingerprint

    def samples(self, wanted: Wanted) -> Generator[tuple[int, Any]]:
        """Yield the wanted samples; what the iterator itself raises is passed on."""
        if self._has_begun and not self.is_repeatable:
            raise RuntimeError(
                f"the samples of a `{self.name}` can be read once only, and they have been; give "
                "data that can be read again: a list, a data set, or a file"
            )
        self._has_begun = True
        data, start = self._data, 0
        if is_hugging_face(data) and hasattr(data, "skip") and wanted.starts.size:
            # Its own way past the first samples neither decodes nor formats them.
            start = int(wanted.starts[0])
            data = data.skip(start) if start else data
        for number, sample in follow(wanted, data, start):
            yield number, read_sample(number, _as_it_is, sample, self._column)


def _as_it_is(sample: Any) -> Any:
    """Give a sample that has been read already."""
    return sample


class Batches(Source):
    """Batches of a DataLoader as it makes them, numbered by the rows of each."""

    is_batched = True

    def __init__(self, loader: DataLoader[Any], *, column: str | None = None) -> None:
        _refuse_other_orders(loader)
        super().__init__(f"DataLoader of {type(loader.dataset).__name__}", _count_rows(loader))
        self._loader = loader
        self._column = column
        self.batch = getattr(loader.batch_sampler, "batch_size", None)

    def fingerprint(self) -> str:
        """Give the type of the data set and its length; of a stream, what its order depends on."""
        data = self._loader.dataset
        if not isinstance(data, IterableDataset):
            return _describe(data, f"{self.size} samples in batches", self._column)
        workers, batch = self._loader.num_workers, self._loader.batch_size
        order = f", batches of {batch} by {workers} workers" if workers > 1 else " in batches"
        return _describe(data, f"a stream{order}", self._column)

    def probe(self) -> Probe | None:
        """Give digests of a few samples of the data set, where it has any by position."""
        data: Any = self._loader.dataset
        if isinstance(data, IterableDataset) or self.size is None:
            return None
        return probe_samples(
            lambda number: read_sample(number, data.__getitem__, number), self.size
        )

    def samples(self, wanted: Wanted) -> Generator[tuple[Ids, Any]]:
        """Yield the batches that hold a wanted sample, each after the ids of all its rows."""
        batches: Iterator[Any] = iter(self._loader) if wanted.end else iter(())
        try:
            yield from self._follow(wanted, batches)
        finally:
            end_loading(batches)

    def _follow(self, wanted: Wanted, batches: Iterator[Any]) -> Iterator[tuple[Ids, Any]]:
        start = 0
        while start < wanted.end:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                end = self._find_end(start)
                if end is None:
                    error.add_note(_tell_batch(start, end))
                    raise
                yield from self._read_apart(start, end, wanted, error)
            else:
                end = start + size_of(batch)
                if wanted.within(start, end).size:
                    yield np.arange(start, end, dtype=np.int64), pick_column(batch, self._column)
            start = end

    def _find_end(self, start: int) -> int | None:
        """Give where the batch ends that begins at a sample; None where only the loader knows."""
        if isinstance(self._loader.dataset, IterableDataset) or self.batch is None:
            return None
        return min(start + self.batch, len(self._loader.dataset))  # type: ignore[arg-type]

    def _read_apart(
        self, start: int, end: int, wanted: Wanted, error: Exception
    ) -> Iterator[tuple[Ids, Any]]:
        """Read the samples of a batch that the loader could not make one by one."""
        data: Any = self._loader.dataset
        join: Any = self._loader.collate_fn
        kept: list[tuple[int, Any]] = []
        for number in wanted.within(start, end).tolist():
            # Alone in a batch as well: it may be what cannot be joined.
            sample = read_sample(number, data.__getitem__, number)
            alone = sample if isinstance(sample, Broken) else _join_alone(number, join, sample)
            if isinstance(alone, Broken):
                yield np.array([number], dtype=np.int64), alone
            else:
                kept.append((number, sample))
        if len(kept) == end - start:
            error.add_note(_tell_batch(start, end))
            raise error  # each of them can be read, but not together
        if kept:
            ids = np.array([number for number, _ in kept], dtype=np.int64)
            yield ids, pick_column(join([sample for _, sample in kept]), self._column)


def _join_alone(number: int, join: Callable[[list[Any]], Any], sample: Any) -> Any:
    """Make a batch of one sample, so that it is known whether one can be made."""
    return read_sample(number, join, [sample])


def _tell_batch(start: int, end: int | None) -> str:
    """Say which batch of a loader cannot be made, and what to do."""
    which = f"that begins at sample {start}" if end is None else f"of samples {start} to {end - 1}"
    return (
        f"while the DataLoader made the batch {which}. Give the data set itself in the place of "
        'the DataLoader, and samples are read one by one: on_error="skip" leaves out bad ones'
    )


def is_hugging_face(data: Any) -> bool:
    """Tell whether data is a data set of `datasets`, of rows or a stream."""
    return all(hasattr(data, name) for name in ("features", "column_names", "select_columns"))


def select_column(data: Any, column: str | None) -> Any:
    """Have a Hugging Face data set decode no other column; give any other data as it is."""
    if column is None or not is_hugging_face(data):
        return data
    names = data.column_names
    if names is not None and column not in names:
        raise ValueError(f"column={column!r} is not among the columns: {', '.join(names)}")
    return data.select_columns([column])


def _describe(data: Any, size: str, column: str | None) -> str:
    """Say what tells data apart, in words."""
    facts = [type(data).__qualname__, size]
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        facts += [f"shape {tuple(data.shape)}", str(data.dtype)]
    if is_hugging_face(data):
        facts.append(f"features {digest([data.features])}")
    if column is not None:
        facts.append(f"column {column}")
    return ", ".join(facts)


def _length(data: Any) -> int | None:
    """Give the length of an iterable that has one."""
    # What a torch stream says of its length is a guess: its loader only warns where it is wrong.
    if isinstance(data, IterableDataset):
        return None
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(data)
    return None


def _count_rows(loader: DataLoader[Any]) -> int | None:
    """Give how many samples the batches of a loader will hold."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    if loader.drop_last:
        return len(loader) * loader.batch_size
    return len(loader.dataset)  # type: ignore[arg-type]


def _refuse_other_orders(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose batches do not hold the samples in the order of the data."""
    if isinstance(loader.dataset, IterableDataset):
        return
    order: Any = loader.sampler
    if loader.batch_sampler is not None:
        order = loader.batch_sampler
        if type(order) is BatchSampler:
            order = order.sampler
    if isinstance(order, SequentialSampler):
        return
    raise ValueError(
        f"this DataLoader takes its samples in the order of a `{type(order).__name__}`; a sample's "
        "id is its position in the data, so they must come in order: make the DataLoader with "
        "shuffle=False and without a sampler (ranks are given their shares all the same), or give "
        "the data set itself"
    )
