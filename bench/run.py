"""Measure what hooks cost: `python bench/run.py [group ...] [--quick] [--peers] [--write]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from backwards import measure_grads, measure_module_backward
from compiled import measure_compiled
from forwards import measure_capture, measure_edit
from insides import measure_inside
from leftovers import measure_idle, measure_import, measure_memory
from recordings import measure_record
from tables import Table, write_page
from trainings import measure_watch

PAGE = Path(__file__).parent / "RESULTS.md"


def main() -> None:
    """Run the groups asked for, or all; print each table as it is ready."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", nargs="*", help="which groups to measure; all if none is named")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: seconds, more noise")
    parser.add_argument("--peers", action="store_true", help="also other tools, where installed")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {PAGE.name}")
    options = parser.parse_args()
    rounds = 30 if options.quick else 300
    groups: dict[str, Callable[[], Table]] = {
        "capture": lambda: measure_capture(rounds, options.peers),
        "grads": lambda: measure_grads(rounds // 2),
        "module_backward": lambda: measure_module_backward(rounds),
        "idle": lambda: measure_idle(rounds),
        "edit": lambda: measure_edit(rounds),
        "inside": lambda: measure_inside(rounds, options.peers),
        "watch": lambda: measure_watch(20 if options.quick else 150, options.peers),
        "compiled": lambda: measure_compiled(4 if options.quick else 20),
        "record": lambda: measure_record(20 if options.quick else 150),
        "import": lambda: measure_import(3 if options.quick else 10),
        "memory": measure_memory,
    }
    unknown = [name for name in options.group if name not in groups]
    if unknown:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(groups)}")
    torch.set_num_threads(1)
    tables = []
    for name in options.group or groups:
        tables.append(groups[name]())
        print(tables[-1].markdown(), end="\n\n", flush=True)
    if options.write:
        write_page(PAGE, tables, sys.argv[1:])
        print(f"written to {PAGE.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
