"""What is said about a run, gathered once for every form in which it is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hookline._errors import NotRecorded
from hookline.rules import SEVERITIES, Finding, Group, fold, judge_run, say_verdict
from hookline.runs import Run


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """Hold everything that a report says of a run."""

    source: Run
    """The run."""

    verdict: str
    """What happened, in one sentence."""

    findings: tuple[Finding, ...]
    """All that the rules found: the worst first, each followed by what follows from it."""

    groups: tuple[Group, ...]
    """The same, each with what follows from it; the worst first."""

    run: Mapping[str, Any]
    """Facts of the run: its path, status, steps, sites and ranks."""

    cost: Mapping[str, Any]
    """What watching cost; empty where that was not written."""

    notes: tuple[str, ...]
    """What is missing, or should be known when reading the rest."""

    @property
    def severity(self) -> str:
        """The worst severity of a finding; empty where there is none."""
        found = {one.severity for one in self.findings}
        return next((one for one in SEVERITIES if one in found), "")

    def count(self, severity: str) -> int:
        """Count the findings of one severity."""
        return sum(one.severity == severity for one in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Write it as JSON can hold it."""
        return {
            "verdict": self.verdict,
            "findings": [finding.to_dict() for finding in self.findings],
            "run": dict(self.run),
            "cost": dict(self.cost),
            "notes": list(self.notes),
        }


def read_report(run: Run) -> Report:
    """Gather what is said about a run; one that no rule has seen yet is judged now."""
    steps = run.steps
    ranks = run.ranks
    sites = len(run.sites())
    notes = list(run.notes)
    stored = _merge_ranks([Finding.from_dict(one) for one in run.findings], of=len(ranks))
    if stored or _was_judged(run):
        findings = stored
        if len(ranks) > 1:  # whether they agree is seen by none of them alone
            findings = [*stored, *judge_run(run, rules=[])]
    else:
        findings = judge_run(run)
        notes.append("no rules ran while this was recorded; it was judged from what is in the run")
    if len(ranks) > 1:
        notes.append(f"statistics are of all {len(ranks)} ranks together")
    written = _read(run, "notes")
    notes.extend(str(note) for note in written.get("notes", ()))
    groups = fold(findings)
    verdict = say_verdict(findings, steps=len(steps), sites=sites)
    if written.get("gap"):  # a watch that stopped has not found nothing: it has not looked
        verdict = f"{written['gap']} {verdict}"
    return Report(
        source=run,
        verdict=verdict,
        findings=tuple(one for group in groups for one in (group.root, *group.follows)),
        groups=tuple(groups),
        run={
            "path": str(run.path),
            "status": run.status,
            "first_step": int(steps[0]) if len(steps) else None,
            "last_step": int(steps[-1]) if len(steps) else None,
            "steps": len(steps),
            "sites": sites,
            "ranks": len(ranks),
        },
        cost=run.cost,
        notes=tuple(dict.fromkeys(notes)),
    )


def describe_cost(cost: Mapping[str, Any]) -> str:
    """Say what watching cost in one line; empty where that is not known."""
    watched, steps = cost.get("watched"), cost.get("steps")
    if watched is None or steps is None:
        return ""
    line = f"watched {watched} of {steps} steps"
    overhead, ratio = cost.get("overhead"), cost.get("ratio")
    if overhead is None or ratio is None:
        return f"{line}; too few to tell the cost"
    how = "against plain steps" if cost.get("plain_seconds") else "by hookline's own time"
    return f"{line}; the run took {1 + overhead:.2f}x as long ({how})"


def as_report(given: Run | Report) -> Report:
    """Give a report of a run, or the report itself."""
    return given if isinstance(given, Report) else read_report(given)


def _merge_ranks(findings: Iterable[Finding], *, of: int) -> list[Finding]:
    """Say once what several of so many ranks found, each on its own, and who made a NaN alone."""
    alike: dict[tuple[str, str, int], list[Finding]] = {}
    for one in findings:
        alike.setdefault((one.rule, one.site, one.step), []).append(one)
    merged = []
    for first, *others in alike.values():
        ranks = sorted({first.rank, *(one.rank for one in others)})
        line = ""
        if len(ranks) > 1:
            line = f"seen by ranks {', '.join(map(str, ranks))}"
        elif of > 1 and first.rule == "non-finite":
            line = f"seen by rank {first.rank} alone"
        if line:
            first = dataclasses.replace(first, evidence=(*first.evidence, line))
        merged.append(first)
    return merged


def _was_judged(run: Run) -> bool:
    """Tell whether rules ran while it was recorded; a run without findings may be a healthy one."""
    return bool(_read(run, "watch").get("rules", False))


def _read(run: Run, name: str) -> dict[str, Any]:
    try:
        return run.document(name)
    except NotRecorded:
        return {}
