"""A run folder as a trace: one rank's recording, or one of a watch as far as it goes.

A recording has all that a trace needs. A watch has the outputs of modules with statistics, and
with sketches at some steps; those steps can be compared. Ranks that are to be one trace are put
together elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hookline._errors import AddressError, NotComparable, NotRecorded
from hookline.addresses import parse
from hookline.diffs.rank_merging import MergedTrace
from hookline.diffs.traces import (
    KINDS,
    Measurements,
    ModuleFacts,
    Trace,
    TraceFacts,
    TraceSite,
)
from hookline.runs import Dump, Run, SiteFacts, open_run
from hookline.runs.ranks import RankReader
from hookline.runs.schema import find_ranks

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

_AT_ONCE = 4_000_000
"""How many numbers are read together."""

_VALUES = "values"
"""What the dumps of whole tensors are called."""

_OUTPUTS_ONLY = (
    "the run holds outputs of modules and not their inputs: what is wrong may lie in the code that "
    "calls the named module; hl.record keeps both"
)


class RunTrace(Trace):
    """One rank of a run folder."""

    def __init__(self, run: Run, reader: RankReader) -> None:
        self.run = run
        self.rank = reader.rank
        self.notes: list[str] = []
        """What could not be read, and what to know of it."""
        self._reader = reader
        self._keys = _find_steps(reader)
        written = reader.sites()
        places = [place for place, site in enumerate(written) if site.kind in KINDS]
        self._places = np.array(places, np.int64)
        number_of = {place: number for number, place in enumerate(places)}
        facts = [written[place] for place in places]
        by_address = {site.address: number for number, site in enumerate(facts)}
        modules = {site.module for site in facts}
        self.sites: Sequence[TraceSite] = [
            _read_site(number, site, number_of, by_address, modules)
            for number, site in enumerate(facts)
        ]
        self.facts = _read_facts(run, reader, self.sites)
        self._first = np.array(
            [site.id if site.same_as is None else site.same_as for site in self.sites], np.int64
        )
        self._chunk: tuple[dict[int, int], Any, Any] | None = None
        self._dumps: dict[int, Dump] | None = None
        self._file: tuple[int, Any, frozenset[str]] | None = None
        values = [site for site in self.sites if site.kind == "value"]
        if values and not any(site.port == "input" for site in values):
            self.notes.append(_OUTPUTS_ONLY)
        self.notes.extend(reader.notes)
        if (reader.document("recording") or {}).get("calibrated") and not self._reader.document(
            "floors"
        ):
            self.notes.append("the floors that were measured are gone: usual limits are used")
        told = reader.document("notes") or {}
        self.notes.extend(str(note) for note in told.get("notes", ()))
        self.notes.extend(note for note in run.notes if note not in self.notes)

    @property
    def steps(self) -> Sequence[int]:
        return list(self._keys)

    def measurements(self, step: int) -> Measurements:
        if self._chunk is None or step not in self._chunk[0]:
            self._chunk = self._read_chunk(step)
        place_of, rows, sketches = self._chunk
        place = place_of[step]
        return Measurements(rows[place], sketches[place])

    def tensor(self, site: int, step: int) -> Tensor | None:
        file = self._open_dump(step)
        if file is None:
            return None
        for number in dict.fromkeys((site, int(self._first[site]))):
            key = str(self._places[number])
            if key in file[1]:
                tensor: Tensor = file[0].get_tensor(key)
                return tensor
        return None

    def has_tensors(self, step: int) -> bool:
        return self._open_dump(step) is not None

    def floors(self) -> npt.NDArray[np.float64] | None:
        kept = self._reader.document("floors")
        if not kept:
            return None
        found = np.full(len(self.sites), np.nan)
        for number, place in enumerate(self._places):
            floor = kept.get(str(place))
            if isinstance(floor, int | float):
                found[number] = floor
        return found

    def _read_chunk(self, step: int) -> tuple[dict[int, int], Any, Any]:
        """Read some steps from this one on at once."""
        steps = self.steps
        start = steps.index(step)
        count = max(1, _AT_ONCE // max(1, len(self.sites) * 72))
        chosen = steps[start : start + count]
        keys = np.array([self._keys[one] for one in chosen], np.int64)
        rows, has_rows = self._reader.read("rows", keys, sites=self._places)
        sketches, has_sketches = self._reader.read("sketch", keys, sites=self._places)
        rows = np.where(has_rows[..., None], rows, np.nan)
        sketches = np.where(has_sketches[..., None], sketches, np.float32(np.nan))
        shares = np.flatnonzero(self._first != np.arange(len(self._first)))
        if len(shares):
            firsts = self._first[shares]
            lacking = ~has_rows[:, shares]
            rows[:, shares] = np.where(lacking[..., None], rows[:, firsts], rows[:, shares])
            sketches[:, shares] = np.where(
                lacking[..., None], sketches[:, firsts], sketches[:, shares]
            )
        return {one: place for place, one in enumerate(chosen)}, rows, sketches

    def _open_dump(self, step: int) -> tuple[Any, frozenset[str]] | None:
        """Open the tensors of a step; the file stays open until another is asked for."""
        if self._dumps is None:
            self._dumps = {
                dump.facts["step"]: dump
                for dump in self.run.tensors.values()
                if dump.name == _VALUES and dump.rank == self.rank and "step" in dump.facts
            }
        dump = self._dumps.get(step)
        if dump is None:
            return None
        if self._file is None or self._file[0] != step:
            from safetensors import SafetensorError, safe_open

            try:
                # Never closed by hand: it is let go of with the trace, or for another step.
                file: Any = safe_open(str(dump.path), framework="pt")
                self._file = step, file, frozenset(file.keys())
            except (SafetensorError, OSError) as error:
                raise NotComparable(
                    f"`{dump.path}` is listed in the run and cannot be read: {error}. Without it "
                    "the run is not what was recorded."
                ) from error
        return self._file[1], self._file[2]


def open_trace(path: str | os.PathLike[str] | Run, *, rank: int | None = None) -> Trace:
    """Open a run folder as a trace: one rank of it, or all put together."""
    run = path if isinstance(path, Run) else open_run(path)
    readers = {number: RankReader(file, number) for number, file in find_ranks(run.path).items()}
    if rank is not None and rank not in readers:
        there = ", ".join(map(str, readers)) or "none"
        raise NotComparable(f"`{run.path}` has no rank {rank}; there are {there}.")
    traces = [RunTrace(run, reader) for number, reader in readers.items() if rank in (None, number)]
    for trace in traces:
        _refuse_empty(run, trace)
    if not traces:
        raise NotComparable(f"`{run.path}` is empty: no rank has written anything.")
    if len(traces) == 1:
        return traces[0]
    return MergedTrace(traces)


def list_ranks(run: Run) -> tuple[int, ...]:
    """List the ranks that have written to a run."""
    return tuple(find_ranks(run.path))


def _find_steps(reader: RankReader) -> dict[int, int]:
    """Find the steps that have sketches: their numbers, and by what the reader knows them."""
    index = reader.index()
    sketched = {int(key) for (key,) in reader.select("SELECT id FROM block_sketch")}
    return {
        int(step): int(key)
        for step, key in zip(index.steps, index.keys, strict=True)
        if int(key) in sketched
    }


def _refuse_empty(run: Run, trace: RunTrace) -> None:
    """Say what is wrong with a run that nothing can be compared of."""
    if trace.sites and trace.steps:
        return
    why = "; ".join(trace.notes + [note for note in run.notes if note not in trace.notes])
    why = f" ({why})" if why else ""
    if len(run.steps):
        raise NotComparable(
            f"`{run.path}` holds statistics alone, by which two runs cannot be told apart{why}. "
            f"Record it for comparison: `hl.record(model, path, inputs)`, or "
            "`hookline record script.py`."
        )
    raise NotComparable(
        f"`{run.path}` has no steps{why}. Record one with `hl.record(model, path, inputs)`."
    )


def _read_site(
    number: int,
    site: SiteFacts,
    number_of: Mapping[int, int],
    by_address: Mapping[str, int],
    modules: set[str],
) -> TraceSite:
    """Read a site of a recording; of a watch, guess what is not written."""
    more = dict(site.more)
    if "port" not in more:
        more.update(_guess(site, by_address, modules))
    mark = more.pop("mark", "")
    is_overwritten = site.kind == "value" and bool(more.pop("after", False))
    return TraceSite(
        id=number,
        kind="overwritten" if is_overwritten else site.kind,
        address=site.address.removesuffix(mark) if mark else site.address,
        module=site.module,
        port=more.pop("port"),
        leaf=tuple(more.pop("leaf", ())),
        visit=int(more.pop("visit", 0)),
        type=site.type,
        caller=more.pop("caller", None),
        dtype=site.dtype,
        shape=site.shape,
        requires_grad=more.pop("requires_grad", None),
        same_as=_renumber(more.pop("same_as", None), number_of),
        of=_renumber(more.pop("of", None), number_of),
        is_part=bool(more.pop("is_part", False)),
        source=site.source,
        more=more,
    )


def _renumber(place: int | None, number_of: Mapping[int, int]) -> int | None:
    return None if place is None else number_of.get(place)


def _guess(site: SiteFacts, by_address: Mapping[str, int], modules: set[str]) -> dict[str, Any]:
    """Guess from its address what a site of a watch is."""
    if site.kind in ("value", "gradient"):
        try:
            address = parse(site.address)
        except AddressError:
            address = None
        found: dict[str, Any] = {"port": "output", "caller": _find_parent(site.module, modules)}
        if address is not None and address.port in ("input", "output"):
            found.update(port=address.port, leaf=address.leaf)
        if site.kind == "gradient":
            found["of"] = by_address.get(site.address.removesuffix(".grad"))
        return found
    name = site.address.removesuffix(":grad").removesuffix(":update")
    own = name[len(site.module) + 1 :] if site.module else name
    found = {"port": "buffer" if site.kind == "buffer" else "parameter", "leaf": (own,)}
    if site.kind in ("parameter gradient", "update"):
        found["of"] = by_address.get(name)
    return found


def _find_parent(path: str, modules: set[str]) -> str | None:
    """Find the nearest module around another that was watched, too."""
    if not path:
        return None
    while path:
        path = path.rpartition(".")[0]
        if path in modules:
            return path
    return ""


def _read_facts(run: Run, reader: RankReader, sites: Sequence[TraceSite]) -> TraceFacts:
    kept = reader.document("modules") or run_document(run, "modules")
    modules = {
        path: ModuleFacts(
            type=str(one.get("type", "")),
            is_torch=bool(one.get("is_torch", False)),
            training=bool(one.get("training", False)),
            config={str(name): str(value) for name, value in one.get("config", {}).items()},
            names=tuple(one.get("names", ())),
            source=str(one.get("source", "")),
        )
        for path, one in kept.get("modules", {}).items()
    }
    if not modules:
        modules = {
            site.module: ModuleFacts(type=site.type, source=site.source, is_known=False)
            for site in sites
            if site.kind == "value"
        }
    return TraceFacts(
        title=run.path.name,
        modules=modules,
        ties=tuple(tuple(names) for names in kept.get("ties", ())),
        autocast=str(kept.get("autocast", "") or ""),
        has_tf32=bool(kept.get("tf32", False)),
        environment=run.environment,
        is_known=bool(kept),
    )


def run_document(run: Run, name: str) -> Mapping[str, Any]:
    """Read a document that any rank may have written; empty where none has."""
    try:
        return run.document(name)
    except NotRecorded:
        return {}
