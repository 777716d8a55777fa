"""Try the rules on tiny trainings: `python bench/rules_bench.py [--seeds N] [--write]`."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rule_trainings import BROKEN, HEALTHY, Case

import hookline as hl
from hookline.rules import Finding, make_rules

PAGE = Path(__file__).parent / "RULES.md"

for _module in (
    "healthy_trainings",
    "healthy_regimes",
    "healthy_scales",
    "broken_trainings",
    "broken_numbers",
    "broken_scales",
):
    importlib.import_module(_module)  # which notes its trainings

CASES = {**HEALTHY, **BROKEN}
"""All trainings by name."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the rules said about a training."""

    case: Case
    """The training."""

    findings: tuple[Finding, ...]
    """What was found."""

    seconds: float
    """How long it took, watched."""

    @property
    def is_right(self) -> bool:
        """Whether that is what had to be said: nothing, or one of the rules at the right site."""
        if self.case.is_healthy:
            return not self.findings
        return any(
            one.rule in self.case.rules and one.site.startswith(self.case.site)
            for one in self.findings
        )


def run_case(case: Case, *, seed: int = 0) -> Outcome:
    """Train under a watch, in memory, with the rules as they are by default."""
    begun = time.perf_counter()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        training = case.make()
        with hl.watch(training.model, keep=2) as watched:
            for number in range(training.steps):
                training.step(number)
    return Outcome(case, tuple(watched.findings), time.perf_counter() - begun)


def main() -> None:
    """Run the trainings asked for, or all; say which came out as they had to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="which trainings to run; all if none is named")
    parser.add_argument("--seeds", type=int, default=1, help="run all with so many seeds, from 0")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    by_seed: list[list[Outcome]] = []
    for seed in range(options.seeds):
        by_seed.append([])
        for name in options.name or CASES:
            by_seed[-1].append(run_case(CASES[name], seed=seed))
            print(_say(by_seed[-1][-1]), flush=True)
        print(f"seed {seed}: {_total(by_seed[-1])}")
    if options.write:
        PAGE.write_text(_write(*by_seed))
    sys.exit(not all(one.is_right for outcomes in by_seed for one in outcomes))


def _say(outcome: Outcome) -> str:
    mark = "ok  " if outcome.is_right else "BAD "
    found = "; ".join(f"{one.rule} at {one.site or 'all'}" for one in outcome.findings)
    return f"{mark}{outcome.case.name} ({outcome.seconds:.1f} s): {found or 'nothing'}"


def _total(outcomes: Iterable[Outcome]) -> str:
    healthy = [one for one in outcomes if one.case.is_healthy]
    broken = [one for one in outcomes if not one.case.is_healthy]
    alarms = sum(not one.is_right for one in healthy)
    caught = sum(one.is_right for one in broken)
    return (
        f"{len(healthy)} healthy trainings, {alarms} false alarms; "
        f"{len(broken)} broken ones, {caught} caught"
    )


def _write(outcomes: list[Outcome], *others: list[Outcome]) -> str:
    """Write the page: how it was made, the totals, what each training showed, the thresholds.

    Trainings are listed with the first seed; of the others only the totals, and what went wrong.
    """
    totals = [f"- seed {seed}: {_total(one)}{_misses(one)}" for seed, one in enumerate(others, 1)]
    lines = [
        "# The rules, tried on tiny trainings",
        "",
        "Made by `python bench/rules_bench.py --seeds 7 --write`, which trains each of them for 4 "
        "to 120 steps under `hl.watch` as it is by default.",
        "A healthy training is right when nothing is found at all, not even an `info`.",
        "A broken one is right when one of the rules named is among the findings, at a site that "
        "begins as given where one is given.",
        "",
        f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, one thread of a CPU.",
        "",
        f"**{_total(outcomes)}.**",
        "",
        "The thresholds were chosen with these trainings at hand, so this is what they must do and "
        "no measure of how they do on others.",
        *(["The same trainings with other seeds:", "", *totals] if totals else []),
        "",
        "## Healthy",
        "",
        "| training | what it is | found | right |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {one.case.name} | {one.case.about} | {_list(one)} | {_tick(one)} |"
        for one in outcomes
        if one.case.is_healthy
    ]
    lines += [
        "",
        "## Broken",
        "",
        "| training | what is wrong | expected | found | right |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.case.name} | {one.case.about} | {_expect(one)} | {_list(one)} | {_tick(one)} |"
        for one in outcomes
        if not one.case.is_healthy
    ]
    lines += ["", "## Thresholds", "", "| rule | arguments |", "|---|---|"]
    for rule in make_rules():
        given = {name: value for name, value in vars(rule).items() if not name.startswith("_")}
        shown = ", ".join(f"{name}={value:g}" for name, value in given.items())
        lines.append(f"| {rule.name} | {shown or 'none'} |")
    lines.append("| rank-disagreement | none: parameters have to agree to the last bit |")
    return "\n".join(lines) + "\n"


def _misses(outcomes: Iterable[Outcome]) -> str:
    names = ", ".join(one.case.name for one in outcomes if not one.is_right)
    return f" (wrong: {names})" if names else ""


def _expect(outcome: Outcome) -> str:
    case = outcome.case
    return " or ".join(case.rules) + (f" at `{case.site}`" if case.site else "")


def _list(outcome: Outcome) -> str:
    found = (
        f"{one.rule} ({one.severity}) at `{one.site or 'the training'}`, step {one.step}"
        for one in outcome.findings
    )
    return "; ".join(found) or "nothing"


def _tick(outcome: Outcome) -> str:
    return "yes" if outcome.is_right else "**no**"


if __name__ == "__main__":
    main()
