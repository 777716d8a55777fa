"""What a test of a model needs: `hl.testing.assert_same_run`, a model against its baseline.

A baseline is a run that `hl.record` made, kept beside the tests. With `--hookline-update` for
pytest, or `HOOKLINE_UPDATE=1` in the environment, it is recorded again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookline.comparisons import diff
from hookline.comparisons.baselines import replace_run
from hookline.comparisons.showing import Difference
from hookline.pytest_plugin import UPDATE
from hookline.recordings import record
from hookline.runs.schema import is_run

_MOST_ROWS = 8


def assert_same_run(
    model: nn.Module,
    baseline: str | os.PathLike[str],
    inputs: Any = None,
    *,
    loss: Any = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    names: Mapping[str, str] | None = None,
    allow: Mapping[str, float] | None = None,
    tolerance: float | None = None,
    tensors: bool | str | Iterable[str] = False,
    update: bool | None = None,
) -> Difference | None:
    """Fail where a model does not compute what its baseline holds; say where it parts from it.

    The model is called with the inputs and the random states of the baseline, unless `inputs` are
    given. `loss` makes gradients part of it, `optimizer` the update. `update=True`, the option
    `--hookline-update` of pytest or `HOOKLINE_UPDATE=1` record the baseline instead, for which
    `inputs` are needed where there is none yet; then None is returned.
    """
    folder = Path(baseline)
    if _is_asked(update):
        _record(model, folder, inputs, loss=loss, optimizer=optimizer, tensors=tensors)
        return None
    if not is_run(folder):
        raise AssertionError(
            f"there is no baseline at `{baseline}`. Record it once: `pytest --hookline-update`, or "
            f"with `{UPDATE}=1` in the environment."
        )
    found = diff(
        folder,
        model,
        inputs,
        loss=loss,
        optimizer=optimizer,
        names=names,
        allow=allow,
        tolerance=tolerance,
    )
    if not found.same:
        raise AssertionError(_explain(found, folder))
    return found


def _is_asked(update: bool | None) -> bool:
    if update is not None:
        return update
    return os.environ.get(UPDATE, "") not in ("", "0", "false")


def _record(model: nn.Module, folder: Path, inputs: Any, **options: Any) -> None:
    if inputs is None:
        inputs = _stored_inputs(folder)
    replace_run(folder, lambda made: record(model, made, inputs, **options))


def _stored_inputs(folder: Path) -> Any:
    from hookline.recordings import read_call

    stored = read_call(folder) if is_run(folder) else None
    if stored is None:
        raise AssertionError(
            f"a baseline at `{folder}` needs inputs to be recorded: "
            '`assert_same_run(model, "baseline", (x,))`'
        )
    args, kwargs, _ = stored
    if args and kwargs:
        raise AssertionError(
            f"give the inputs again: those of `{folder}` are by position and by name"
        )
    return kwargs or args


def _explain(found: Difference, folder: Path) -> str:
    table = found.table(differing=True)
    lines = str(table).splitlines()
    start = 1 if table.title else 0
    shown = lines[start : start + 2 + _MOST_ROWS]
    more = len(table.rows) - _MOST_ROWS
    parts = [found.sentence, *shown]
    if more > 0:
        parts.append(f"+{more} sites after it")
    if found.graft:
        parts.append(str(found.graft["sentence"]))
    parts.append(f"If it is meant to be so: `pytest --hookline-update` records `{folder}` again.")
    return "\n".join(parts)
