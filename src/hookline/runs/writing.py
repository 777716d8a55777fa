"""Write a run: one rank's part of a run folder.

Everything is written at once and in whole transactions, so that a reader sees whole steps and a
process that is killed loses nothing it has written. Knows neither models nor threads: whoever
calls it decides when.
"""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from hookline.runs.database import Database, explain_failure
from hookline.runs.documents import to_json, write_document
from hookline.runs.dump_files import DumpFile
from hookline.runs.dumps import save_tensors
from hookline.runs.encoding import encode, pack_shared
from hookline.runs.environment import read_command, read_hookline_version
from hookline.runs.occupancy import refuse_other_run
from hookline.runs.processes import mark_process
from hookline.runs.records import SITE_KINDS, Block, SiteFacts, StepRecord
from hookline.runs.schema import RUN_FILE, TENSORS, VERSION, rank_file

if TYPE_CHECKING:
    import sqlite3

    import numpy.typing as npt
    from torch import Tensor

ENDINGS = ("finished", "interrupted", "failed")
"""How a run can end, in the words of the one who closes it."""

_MOST_SHARED = 256
"""How many shared blobs are remembered; batches that all differ in size would fill the memory."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*")


def name_ending(error: BaseException | None) -> str:
    """Tell how a run ended from what ended it, if anything did."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "finished"
    return "failed" if isinstance(error, (Exception, SystemExit)) else "interrupted"


class RunWriter:
    """Write one rank's part of a run folder.

    A folder holds one run. One that holds a run already is refused, unless `resume=True`, which
    goes on in it; a run that never came to its first step is taken over. When the steps go back,
    as they do after a resume from a checkpoint, those written from there on are superseded.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, rank: int = 0, world: int = 1, resume: bool = False
    ) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.rank = rank
        self.world = world
        self.last_step: int | None = None
        """The number of the step written last, also by the run that is resumed."""
        self.started = time.time()
        self._shared: OrderedDict[bytes, int] = OrderedDict()
        self._site_ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        path = rank_file(self.folder, rank)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_failure(path, error) from error
        self._database = Database(path)
        try:
            self._begin(resume)
        except BaseException:
            self._database.close(fold=False)  # it may be another writer's
            raise

    @property
    def path(self) -> Path:
        """The database that is written."""
        return self._database.path

    def describe(self, name: str, facts: Mapping[str, Any]) -> None:
        """Keep a small document, such as `environment` or `model`; it replaces an earlier one.

        Rank 0 also writes it as a JSON file, for people.
        """
        if not _NAME.fullmatch(name) or f"{name}.json" == RUN_FILE:
            raise ValueError(f"`{name}` cannot name a document; a name is like `environment`.")
        with self._database.transaction() as connection:
            connection.execute("REPLACE INTO document VALUES (?, ?)", (name, to_json(facts)))
        if self.rank == 0:
            with self._database.reporting():
                write_document(self.folder / f"{name}.json", facts)

    def add_sites(self, sites: Iterable[SiteFacts]) -> None:
        """Say what sites are, before something measured of them is written."""
        new: list[int] = []
        with self._database.transaction() as connection:
            for site in sites:
                if site.id != len(self._site_ids) + len(new):
                    raise ValueError(
                        f"the site `{site.address}` has the id {site.id}; the next id is "
                        f"{len(self._site_ids) + len(new)}, since sites count from 0 on"
                    )
                if site.kind not in SITE_KINDS:
                    raise ValueError(
                        f"`{site.address}` is of the kind {site.kind!r}; the kinds are {SITE_KINDS}"
                    )
                new.append(_store_site(connection, site))
        self._site_ids = np.concatenate([self._site_ids, np.array(new, np.int32)])

    def write(self, step: StepRecord) -> None:
        """Write one step; when this returns, it survives the process."""
        try:
            with self._database.transaction() as connection:
                key = self._write_step(connection, step)
                for block in step.blocks:
                    self._write_block(connection, block, key=key)
        except BaseException:
            self._shared.clear()  # what was shared in this transaction is gone with it
            raise
        self.last_step = step.step

    def add_finding(self, finding: Mapping[str, Any]) -> None:
        """Keep what a rule concluded."""
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO finding (time, text) VALUES (?, ?)", (time.time(), to_json(finding))
            )

    def dump(
        self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None
    ) -> Path:
        """Keep tensors in a file of their own; return its path."""
        with self._database.transaction() as connection:
            path = save_tensors(
                self.folder, name, rank=self.rank, tensors=tensors, facts=facts or {}
            )
            _note_dump(connection, name, path, facts or {})
        return path

    def open_dump(self, name: str) -> DumpFile:
        """Begin a dump whose tensors come one by one; `finish_dump` completes it."""
        with self._database.reporting():
            return DumpFile(self.folder, name, rank=self.rank)

    def finish_dump(self, name: str, file: DumpFile, facts: Mapping[str, Any]) -> Path:
        """Keep a dump whose tensors are all there; return its path."""
        with self._database.transaction() as connection:
            path = file.finish(facts)
            _note_dump(connection, name, path, facts)
        return path

    def close(self, ending: str = "finished") -> None:
        """Say how the run ended and close it; closing it again, or in a child, does nothing."""
        if ending not in ENDINGS:
            raise ValueError(f"a run ends as one of {ENDINGS}, not {ending!r}")
        if not self._database.is_usable:
            return
        try:
            ended = {"status": ending, "ended": time.time()}
            with self._database.transaction() as connection:
                facts = to_json({**self._facts, **ended})
                connection.execute("UPDATE attempt SET facts=? WHERE id=?", (facts, self._attempt))
            self._write_run_file(ending)
        finally:
            self._database.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close(name_ending(error))

    def _begin(self, resume: bool) -> None:
        refuse_other_run(
            self._database, self.folder, rank=self.rank, world=self.world, resume=resume
        )
        self._database.prepare()
        self._facts = {
            "rank": self.rank,
            "world": self.world,
            "hookline": read_hookline_version(),
            "started": self.started,
            "status": "running",
            "process": mark_process(),
        }
        with self._database.transaction() as connection:
            cursor = connection.execute(
                "INSERT INTO attempt (facts) VALUES (?)", (to_json(self._facts),)
            )
            self._attempt = cursor.lastrowid
        last = self._database.select("SELECT step FROM step ORDER BY id DESC LIMIT 1")
        self.last_step = last[0][0] if last else None
        self._write_run_file("running")

    def _write_run_file(self, status: str) -> None:
        """Write what a person sees first; programs read the databases."""
        if self.rank != 0:
            return
        facts = {
            "format": "hookline.run",
            "version": VERSION,
            "hookline": read_hookline_version(),
            "status": status,
            "started": _format_time(self.started),
            "ended": None if status == "running" else _format_time(time.time()),
            "last_step": self.last_step,
            "world": self.world,
            "command": read_command(),
            "read_with": f"hookline.open_run({str(self.folder)!r})",
        }
        with self._database.reporting():
            write_document(self.folder / RUN_FILE, facts)

    def _place(self, block: Block) -> npt.NDArray[np.int32]:
        """Give the sites of a block the ids they have in the database."""
        known = len(self._site_ids)
        if len(block.sites) and not (block.sites.min() >= 0 and block.sites.max() < known):
            raise ValueError(
                f"sites {block.sites.min()} to {block.sites.max()} are written, but `add_sites` "
                f"was told of {known}"
            )
        return np.asarray(self._site_ids[block.sites])

    def _write_step(self, connection: sqlite3.Connection, step: StepRecord) -> int:
        names, scalars = None, None
        if step.scalars:
            names = self._share(connection, to_json(list(step.scalars)).encode())
            scalars = np.array([float(one) for one in step.scalars.values()], "<f8").tobytes()
        cursor = connection.execute(
            "INSERT INTO step (step, time, seconds, names, scalars) VALUES (?, ?, ?, ?, ?)",
            (int(step.step), float(step.time), step.seconds, names, scalars),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _write_block(self, connection: sqlite3.Connection, block: Block, *, key: int) -> None:
        layout = self._place(block)
        encoded = encode(block.kind, block.values)
        shared = None if encoded.shared is None else self._share(connection, encoded.shared)
        connection.execute(
            f"INSERT INTO block_{block.kind} VALUES (?, ?, ?, ?, ?)",
            (
                key,
                self._share(connection, pack_shared(layout)),
                shared,
                encoded.data,
                encoded.rare,
            ),
        )

    def _share(self, connection: sqlite3.Connection, data: bytes) -> int:
        """Store bytes once for all steps that have the same; give their number."""
        number = self._shared.get(data)
        if number is None:
            cursor = connection.execute("INSERT INTO shared (data) VALUES (?)", (data,))
            number = cursor.lastrowid
            assert number is not None
            self._shared[data] = number
            if len(self._shared) > _MOST_SHARED:
                self._shared.popitem(last=False)
        else:
            self._shared.move_to_end(data)
        return number


def _store_site(connection: sqlite3.Connection, site: SiteFacts) -> int:
    """Store the facts of a site, once where a resumed run says the same again."""
    values = (
        *(_to_text(one) for one in (site.address, site.kind, site.module, site.type, site.dtype)),
        to_json(list(site.shape)),
        _to_text(site.source),
        to_json(site.more),
    )
    known = connection.execute(
        "SELECT id FROM site WHERE address=? AND kind=? AND module=? AND type=? AND dtype=?"
        " AND shape=? AND source=? AND more=?",
        values,
    ).fetchone()
    if known:
        return int(known[0])
    cursor = connection.execute(
        "INSERT INTO site (address, kind, module, type, dtype, shape, source, more)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        values,
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _note_dump(
    connection: sqlite3.Connection, name: str, path: Path, facts: Mapping[str, Any]
) -> None:
    connection.execute(
        "INSERT INTO dump (time, name, file, facts) VALUES (?, ?, ?, ?)",
        (time.time(), name, f"{TENSORS}/{path.name}", to_json(facts)),
    )


def _to_text(text: str) -> str:
    """Write what is no Unicode text, such as a file name in an old encoding, with escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
