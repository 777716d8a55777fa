"""Read the database of one rank, whatever state it is in.

It may be growing at this moment, left behind by a process that was killed, cut off, empty, on a
medium that cannot be written, or no database at all. What cannot be read is left out and named in
`notes`. The database is opened anew for every question, so that nothing is held between them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hookline.runs.documents import from_json
from hookline.runs.encoding import Encoded, decode, unpack_integers
from hookline.runs.records import SiteFacts
from hookline.runs.schema import LATER, read_version
from hookline.runs.step_sources import (
    Array,
    Flags,
    Integers,
    ScalarColumns,
    StepIndex,
    keep_current,
    make_values,
)

_WAIT = 5.0
_AT_ONCE = 128
"""How many steps are decoded together."""

_DAMAGE = (ValueError, KeyError, IndexError, TypeError, zlib.error)
"""What damaged bytes lead to."""

_BESIDES = ("-wal", "-journal")
"""What a killed process leaves beside a database; without it the last steps would be missing."""


class RankReader:
    """Give what one rank measured, from its database."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self.notes: dict[str, None] = {}
        """What could not be read, in the order in which it was found."""
        self._sites: tuple[int, list[SiteFacts], Array] | None = None
        self._copy: tuple[tuple[Any, ...], weakref.finalize[..., Any], Path] | None = None

    def index(self) -> StepIndex:
        """List the steps that are there now."""
        rows: list[tuple[int, int, float, float]] = []
        for step, key, moment, seconds in self.select(
            "SELECT step, id, time, seconds FROM step ORDER BY id"
        ):
            with self._noting():
                lasted = np.nan if seconds is None else float(seconds)
                rows.append((_whole(step), _whole(key), float(moment), lasted))
        # In a damaged database even the ids may be out of order.
        rows = [row for at, row in enumerate(rows) if not at or row[1] > rows[at - 1][1]]
        return keep_current(*zip(*rows, strict=True)) if rows else keep_current([], [], [], [])

    def sites(self) -> Sequence[SiteFacts]:
        """List the sites; of an address that was described again, the last description."""
        return self._read_sites()[0]

    def read(self, kind: str, keys: Integers, *, sites: Integers) -> tuple[Array, Flags]:
        """Read one kind of measurement at some steps."""
        values, is_there = make_values(kind, len(keys), len(sites))
        if not len(keys) or not len(sites) or not self._has_blocks(kind):
            return values, is_there
        known, place_of_id = self._read_sites()
        wanted = np.full(len(known) + 1, -1)  # the last for -1: a site that this rank does not have
        wanted[sites] = np.arange(len(sites))
        wanted[-1] = -1
        shared = self._read_shared(kind, keys)
        layouts: dict[int, tuple[Array, Array, int]] = {}
        for batch in self._read_blocks(kind, keys, shared):
            for layout in dict.fromkeys(one[1] for one in batch):
                own = [(key, block) for key, of, block in batch if of == layout]
                with self._noting():
                    if layout not in layouts:
                        ids = unpack_integers(shared[layout])
                        columns = wanted[place_of_id[ids]]
                        at = np.flatnonzero(columns >= 0)
                        layouts[layout] = columns[at], at, len(ids)
                    columns, at, count = layouts[layout]
                    for numbers, found in self._decode(kind, own, count, at=at):
                        here = np.ix_(np.searchsorted(keys, numbers), columns)
                        values[here], is_there[here] = found, True
        return values, is_there

    def _has_blocks(self, kind: str) -> bool:
        """Tell whether the database has a table for a kind of blocks; an older one may not."""
        table = "SELECT 1 FROM sqlite_master WHERE name=?"
        return kind not in LATER or any(self.select(table, (f"block_{kind}",)))

    def _decode(
        self, kind: str, blocks: Sequence[tuple[int, Encoded]], count: int, *, at: Array
    ) -> Iterator[tuple[list[int], Array]]:
        """Decode blocks together, or, where one is damaged, each on its own."""
        try:
            found = decode(kind, [block for _, block in blocks], count, at=at)
        except _DAMAGE:
            for key, block in blocks:
                with self._noting():
                    yield [key], decode(kind, [block], count, at=at)
        else:
            yield [key for key, _ in blocks], found

    def scalars(self, keys: Integers) -> ScalarColumns:
        """Read the numbers of some steps by name."""
        found = ScalarColumns(keys)
        if not len(keys):
            return found
        names: dict[int, list[str]] = {}
        query = (
            "SELECT step.id, names, scalars, shared.data FROM step JOIN shared ON shared.id=names"
            " WHERE step.id BETWEEN ? AND ? ORDER BY step.id"
        )
        for key, layout, data, text in self.select(query, (int(keys[0]), int(keys[-1]))):
            with self._noting():
                if layout not in names:
                    names[layout] = json.loads(text)
                for name, value in zip(names[layout], np.frombuffer(data, "<f8"), strict=True):
                    found.add(key, name, value=value)
        return found

    def attempt(self) -> dict[str, Any]:
        """Read who wrote it last, and how that ended."""
        return next(self._read_facts("SELECT facts FROM attempt ORDER BY id DESC LIMIT 1"), {})

    def document(self, name: str) -> dict[str, Any] | None:
        """Read a document."""
        return next(self._read_facts("SELECT text FROM document WHERE name=?", (name,)), None)

    def findings(self) -> list[dict[str, Any]]:
        """Read the findings."""
        return list(self._read_facts("SELECT text FROM finding ORDER BY id"))

    def dumps(self) -> list[tuple[str, str, dict[str, Any]]]:
        """List the dumps: name, file, facts."""
        found = []
        for name, file, text in self.select("SELECT name, file, facts FROM dump ORDER BY id"):
            with self._noting():
                found.append((str(name), str(file), from_json(text)))
        return found

    def select(self, query: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Give rows as far as they can be read."""
        with self._noting(), self._connect() as connection:
            if not read_version(connection, self.path):
                self._note(
                    "is empty: its writer was cut off before the first step, or has just begun"
                )
                return
            yield from connection.execute(query, values)

    def _read_facts(self, query: str, values: tuple[Any, ...] = ()) -> Iterator[dict[str, Any]]:
        for (text,) in self.select(query, values):
            with self._noting():
                yield from_json(text)

    def _read_sites(self) -> tuple[list[SiteFacts], Array]:
        """Read the sites, and the place of each id among them."""
        last = next(self.select("SELECT coalesce(max(id), 0) FROM site"), (0,))[0]
        if self._sites is not None and self._sites[0] == last:
            return self._sites[1:]
        facts: dict[str, SiteFacts] = {}
        place_of: dict[int, int] = {}
        order: dict[str, int] = {}
        for row in self.select("SELECT * FROM site ORDER BY id"):
            with self._noting():
                number, address, kind, module, name, dtype, shape, source, more = row
                place = order.setdefault(address, len(order))
                place_of[number] = place
                facts[address] = SiteFacts(
                    id=place,
                    address=address,
                    kind=kind,
                    module=module,
                    type=name,
                    dtype=dtype,
                    shape=tuple(json.loads(shape)),
                    source=source,
                    more=from_json(more),
                )
        places = np.full(max(place_of, default=0) + 1, -1)
        places[list(place_of)] = list(place_of.values())
        self._sites = last, list(facts.values()), places
        return self._sites[1:]

    def _read_shared(self, kind: str, keys: Integers) -> dict[int, bytes]:
        """Read what the blocks of some steps share."""
        blocks = f"FROM block_{kind} WHERE id BETWEEN ? AND ?"
        query = (
            f"SELECT id, data FROM shared WHERE id IN (SELECT layout {blocks} UNION"
            f" SELECT shared {blocks})"
        )
        return dict(self.select(query, (int(keys[0]), int(keys[-1])) * 2))

    def _read_blocks(
        self, kind: str, keys: Integers, shared: dict[int, bytes]
    ) -> Iterator[list[tuple[int, int, Encoded]]]:
        """Give the blocks of some steps with their layouts, in groups."""
        query = f"SELECT * FROM block_{kind} WHERE id BETWEEN ? AND ? ORDER BY id"
        wanted = set(keys.tolist())
        batch: list[tuple[int, int, Encoded]] = []
        for key, layout, common, data, rare in self.select(query, (int(keys[0]), int(keys[-1]))):
            if key not in wanted:
                continue
            batch.append((key, layout, Encoded(data, shared.get(common), rare)))
            if len(batch) == _AT_ONCE:
                yield batch
                batch = []
        if batch:
            yield batch

    @contextlib.contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Open the database for reading; where even that needs to write, a copy of it."""
        uri = self.path.absolute().as_uri()
        try:
            connection = _open(f"{uri}?mode=ro")
        except sqlite3.OperationalError:
            # Never in the usual way: closing a plain file would drop the locks of a writer in
            # this process.
            connection = _open(self._find_readable(uri))
        with contextlib.closing(connection):
            yield connection

    def _find_readable(self, uri: str) -> str:
        """Find a way to read a database in a folder that cannot be written."""
        besides = [path for end in _BESIDES if (path := Path(f"{self.path}{end}")).exists()]
        if not any(path.stat().st_size for path in besides):
            return f"{uri}?immutable=1"
        state = tuple((one.stat().st_mtime_ns, one.stat().st_size) for one in (self.path, *besides))
        if self._copy is None or self._copy[0] != state:
            if self._copy is not None:
                self._copy[1]()
            folder = Path(tempfile.mkdtemp(prefix="hookline-"))
            remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            for path in (*besides, self.path):
                shutil.copyfile(path, folder / path.name)
            self._copy = state, remove, folder
        return (self._copy[2] / self.path.name).as_uri()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Go on without what cannot be read, and note that."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self._note(f"cannot be read in full: {error}")
        except _DAMAGE as error:
            self._note(f"holds something that cannot be read: {type(error).__name__}: {error}")

    def _note(self, what: str) -> None:
        self.notes[f"`{self.path.name}` {what}"] = None


def _whole(number: object) -> int:
    if not isinstance(number, int):
        raise ValueError(f"a whole number is expected, not {number!r}")
    return number


def _open(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=_WAIT, isolation_level=None)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection
