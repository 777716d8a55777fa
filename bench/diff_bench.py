"""Try comparisons on planted bugs and benign changes: `python bench/diff_bench.py [--write]`."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diff_cases import BENIGN, BUGS, WAYS, Case, Outcome, Side, make_other, make_reference, set_seed
from diff_page import write_page

import hookline as hl

for _module in (
    "diff_examples",
    "diff_bugs_transformers",
    "diff_bugs_networks",
    "diff_bugs_gradients",
    "diff_bugs_ports",
    "diff_bugs_others",
    "diff_benign",
    "diff_benign_hard",
):
    importlib.import_module(_module)  # which notes its models and cases

_NOISE = 0.1
"""Where rounding alone moves a value by so much, it is the rest of a sum that cancels."""

CASES = {**BUGS, **BENIGN}
"""All cases by name."""


class Recordings:
    """Recordings of the sides of cases; that of a reference is made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reference = cache(self._record_reference)

    def of_reference(self, name: str) -> Path:
        """Give the recording of an example, with floors."""
        return self._reference(name)

    def _record_reference(self, name: str) -> Path:
        return self._record(make_reference(name), f"reference-{name}", calibrate=True)

    def of_other(self, case: Case) -> Path:
        """Record the changed side of a case."""
        path = self._folder / case.name
        return path if path.exists() else self._record(make_other(case), case.name, calibrate=False)

    def _record(self, side: Side, name: str, *, calibrate: bool) -> Path:
        path = self._folder / name
        torch.manual_seed(0)
        hl.record(
            side.model,
            path,
            side.inputs,
            loss=side.loss,
            optimizer=side.optimizer,
            calibrate=calibrate,
        )
        return path


def compare(case: Case, way: str, recordings: Recordings) -> hl.Difference:
    """Compare the two sides of a case."""
    if way == "tensors":
        return _compare_live(case)
    paths = recordings.of_reference(case.example), recordings.of_other(case)
    calibrate = False if way == "sketches" else None
    return hl.diff(*paths, calibrate=calibrate, **case.options)


def _compare_live(case: Case) -> hl.Difference:
    a, b = make_reference(case.example), make_other(case)
    options: dict[str, Any] = dict(case.options)
    if b.inputs is not a.inputs:
        options["inputs_b"] = b.inputs
    options["loss"] = a.loss if b.loss is a.loss else (a.loss, b.loss)
    options["optimizer"] = a.optimizer
    if b.optimizer is not a.optimizer:
        options["optimizer"] = (a.optimizer, b.optimizer)
    return hl.diff(a.model, b.model, a.inputs, **options)


def run_case(case: Case, way: str, recordings: Recordings) -> Outcome:
    """Compare the two sides of a case, and keep what was said."""
    begun = time.process_time()
    found = compare(case, way, recordings)
    seconds = time.process_time() - begun
    over = _over(found.introduced, found.limit)
    if found.same:
        over = max((_over(one.r, one.limit) for one in found.pairs if _counts(one)), default=0.0)
    return Outcome(case, way, found.first, found.direction, over, str(found), seconds)


def _counts(pair: Any) -> bool:
    """Tell whether a pair says how near a limit is: not where a value is nothing but rounding."""
    is_noise = pair.floor is not None and pair.floor > _NOISE
    return bool(pair.r) and pair.verdict == "agrees" and not is_noise


def _over(r: float | None, limit: float) -> float:
    if r is None:
        return math.inf
    return r / limit if limit else math.inf


def main() -> None:
    """Run the cases asked for, or all; say which came out as they had to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="which cases to run; all if none is named")
    parser.add_argument("--way", choices=WAYS, action="append", help="how to compare; all if none")
    parser.add_argument("--seeds", type=int, default=1, help="run all with so many seeds, from 0")
    parser.add_argument("--write", action="store_true", help="write the tables to DIFF.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [CASES[name] for name in options.name or CASES]
    by_seed = [_run_seed(seed, chosen, options.way or WAYS) for seed in range(options.seeds)]
    if options.write:
        set_seed(0)
        write_page(*by_seed)
    sys.exit(not all(one.is_right for outcomes in by_seed for one in outcomes))


def _run_seed(seed: int, cases: Sequence[Case], ways: Sequence[str]) -> list[Outcome]:
    """Run some cases with the weights and batches of one seed."""
    set_seed(seed)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        recordings = Recordings(Path(folder))
        for case in cases:
            for way in ways:
                outcomes.append(_try(case, way, recordings))
                print(_say(outcomes[-1]), flush=True)
    print(f"seed {seed}: {sum(one.is_right for one in outcomes)} of {len(outcomes)} right")
    return outcomes


def _try(case: Case, way: str, recordings: Recordings) -> Outcome:
    """Run a case; an error is an answer too, and a wrong one."""
    try:
        return run_case(case, way, recordings)
    except Exception as error:
        return Outcome(case, way, f"{type(error).__name__}: {error}"[:200])


def _say(outcome: Outcome) -> str:
    mark = "ok  " if outcome.is_right else "BAD "
    place = f"{outcome.case.name} by {outcome.way} ({outcome.seconds:.2f} s, x{outcome.over:.2g})"
    if outcome.is_right:
        return f"{mark}{place}"
    said = f"{outcome.first!r} {outcome.direction}"
    wanted = f"{outcome.case.at!r} {outcome.case.direction}"
    return f"{mark}{place}: {said}, not {wanted}\n     {outcome.sentence}"


if __name__ == "__main__":
    main()
