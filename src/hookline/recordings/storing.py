"""A trace in a run folder: how its sites, its facts and its floors are written there.

sites      as the sites of any run; what only a trace knows is in `more`: `port`, `leaf`, `visit`,
           `caller`, `requires_grad`, `same_as`, `of`, `is_part`, `arrival`, `after`. In a run an
           address is there once, so one of a second visit and the like ends with a mark, which is
           `more["mark"]`: `fc:output#1`, `fc:input.x.grad#part`. What a module wrote into its
           input is a value with `after`.
modules    a document: the modules by path, ties, autocast, whether TF32 was allowed
recording  a document: what was asked for
floors     a document: how far rounding alone moves each site, by its number
inputs     a dump: the arguments of a call, and the random states before it; see calls.py
values     a dump for each step, where whole tensors were asked for: by the number of the site
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from hookline.addresses import ModuleTree
from hookline.addresses.pattern import compile_path
from hookline.diffs.traces import TraceFacts, TraceSite
from hookline.recordings.live import LiveSink, LiveTrace
from hookline.runs import Block, DumpFile, RunWriter, SiteFacts, StepRecord

if TYPE_CHECKING:
    import numpy.typing as npt

VALUES = "values"
"""What the dumps of whole tensors are called."""

Wanted = bool | str | list[str] | tuple[str, ...]
"""Which whole tensors are kept: all, none, or those of modules and parameters by pattern."""


def to_site_facts(site: TraceSite) -> SiteFacts:
    """Write a site of a trace as one of a run."""
    mark = _mark(site)
    more: dict[str, Any] = {"port": site.port, "visit": site.visit}
    if site.leaf:
        more["leaf"] = list(site.leaf)
    for name in ("caller", "requires_grad", "same_as", "of"):
        value = getattr(site, name)
        if value is not None:
            more[name] = value
    if site.is_part:
        more["is_part"] = True
    more |= site.more
    if site.kind == "overwritten":
        more["after"] = True
    if mark:
        more["mark"] = mark
    return SiteFacts(
        id=site.id,
        address=site.address + mark,
        kind="value" if site.kind == "overwritten" else site.kind,
        module=site.module,
        type=site.type,
        dtype=site.dtype,
        shape=site.shape,
        source=site.source,
        more=more,
    )


def _mark(site: TraceSite) -> str:
    """Tell a site from others of its address."""
    if site.more.get("after"):
        return "#after"
    visit = f"#{site.visit}" if site.visit else ""
    if site.kind == "overwritten":
        return f"{visit}#after"
    arrival = site.more.get("arrival")
    return visit + ("#part" if site.is_part else "") + (f"#again{arrival}" if arrival else "")


def write_facts(facts: TraceFacts) -> dict[str, Any]:
    """Write what a trace was made of so that JSON can hold it."""
    return {
        "title": facts.title,
        "modules": {
            path: {
                "type": one.type,
                "is_torch": one.is_torch,
                "training": one.training,
                "config": dict(one.config),
                "names": list(one.names),
                "source": one.source,
            }
            for path, one in facts.modules.items()
        },
        "ties": [list(names) for names in facts.ties],
        "autocast": facts.autocast,
        "tf32": facts.has_tf32,
    }


def write_floors(floors: npt.NDArray[np.float64]) -> dict[str, float]:
    """Write floors by the number of the site; those not measured are left out.

    Four digits: they are measured from a few random runs, and more say nothing.
    """
    return {
        str(site): float(f"{floor:.4g}") for site, floor in enumerate(floors) if np.isfinite(floor)
    }


def choose_tensors(wanted: Wanted) -> Callable[[TraceSite | SiteFacts], bool] | None:
    """Say of which sites whole tensors are kept; None: of none."""
    if isinstance(wanted, bool):
        return (lambda site: True) if wanted else None
    patterns = [wanted] if isinstance(wanted, str) else list(wanted)
    matches = [compile_path(one) for one in patterns]

    def is_wanted(site: TraceSite | SiteFacts) -> bool:
        name = site.address.partition(":")[0] if site.kind not in ("value", "gradient") else ""
        names = [site.module, name] if name else [site.module]
        return any(match(one) for match in matches for one in names)

    return is_wanted


def check_tensors(wanted: Wanted, models: Mapping[str, nn.Module]) -> list[str]:
    """Say which patterns of whole tensors name nothing in models, by prefix, and what is near."""
    if isinstance(wanted, bool):
        return []
    names: dict[str, None] = {}
    for prefix, model in models.items():
        tree = ModuleTree(model)
        for entry in tree.entries:
            path = prefix + entry.names[0]
            names[path.rstrip(".")] = None
            own = dict(entry.module._buffers.items())
            names.update({f"{path}.{name}".lstrip("."): None for name in own})
        names.update({prefix + one.names[0]: None for one in tree.parameters})
    found = []
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        matches = compile_path(pattern)
        if not any(matches(name) for name in names):
            near = difflib.get_close_matches(pattern, [one for one in names if one], cutoff=0.5)
            nearest = f"; nearest: {', '.join(f'`{one}`' for one in near)}" if near else ""
            found.append(
                f"no whole tensors are kept of `{pattern}`: it names no module and no parameter"
                + nearest
            )
    return found


class FileSink(LiveSink):
    """Measure values as they come, and write those that are kept whole to a file at once."""

    def __init__(self, file: DumpFile, is_wanted: Callable[[TraceSite], bool]) -> None:
        super().__init__()
        self._file = file
        self._is_wanted = is_wanted

    def keep(self, site: int, tensor: Tensor) -> None:
        """Write a value."""
        if self._is_wanted(self.sites[site]):
            self._file.add(str(site), tensor)


def write_trace(
    writer: RunWriter,
    trace: LiveTrace,
    *,
    tensors: Wanted = False,
    file: DumpFile | None = None,
    scalars: Mapping[str, float] | None = None,
) -> None:
    """Write a trace as the next step of a run: its sites, numbers, floors and tensors.

    `file` is where the tensors are already, if they were written as they came.
    """
    writer.describe("modules", write_facts(trace.facts))
    floors = trace.floors()
    if floors is not None:
        writer.describe("floors", write_floors(floors))
    writer.add_sites([to_site_facts(site) for site in trace.sites])
    measured = trace.measurements(0)
    own = np.array([site.same_as is None for site in trace.sites], bool) & measured.is_there
    sites = np.flatnonzero(own).astype(np.int32)
    step = 0 if writer.last_step is None else writer.last_step + 1
    blocks = [Block("rows", sites, measured.rows[sites])]
    sketched = sites[~np.isnan(measured.sketches[sites, 0])]
    blocks.append(Block("sketch", sketched, measured.sketches[sketched]))
    writer.write(StepRecord(step, time.time(), None, scalars or {}, blocks))
    is_wanted = choose_tensors(tensors)
    if is_wanted is not None and file is None:
        file = writer.open_dump(VALUES)
        for number in sites.tolist():
            kept = trace.tensor(number) if is_wanted(trace.sites[number]) else None
            if kept is not None:
                file.add(str(number), kept)
    if file is not None:
        writer.finish_dump(VALUES, file, {"step": step})
