"""The judge: every rule over every step, while a training runs or from its run folder."""

from __future__ import annotations

import copy
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hookline._errors import NotRecorded
from hookline.rules.agreement import RankDisagreement, rows_of_parameters
from hookline.rules.findings import Finding
from hookline.rules.linking import link
from hookline.rules.reading import read_steps
from hookline.rules.roster import Roster
from hookline.rules.rule import Rule, make_rules
from hookline.rules.steps import Step
from hookline.runs import Run, SiteFacts, StepRecord
from hookline.runs.step_sources import StepSource


class Judge:
    """Show each step to all rules, and keep what they find.

    A rule that raises is dropped and noted in `failures`; the others go on.
    """

    def __init__(self, rules: Iterable[Rule] | None = None, *, rank: int = 0) -> None:
        self.findings: list[Finding] = []
        """What was found so far."""
        self.failures: list[str] = []
        """Which rules were dropped, and why."""
        self.latest: Step | None = None
        """The step that was judged last."""
        self._rules = make_rules() if rules is None else list(rules)
        self._rank = rank
        self._roster = Roster(())
        self._known: set[tuple[str, str]] = set()

    def see(self, record: StepRecord, sites: Sequence[SiteFacts]) -> list[Finding]:
        """Judge a step; `sites` are all that were met so far, by id. Gives what is new."""
        if len(sites) != len(self._roster):
            self._roster = Roster(list(sites))
        step = self.latest = Step(record, self._roster)
        found: list[Finding] = []
        for rule in tuple(self._rules):
            if step.is_whole or rule.sees_broken:
                found += self._ask(rule, step)
        return self._take(found)

    def end(self) -> list[Finding]:
        """Judge the training as a whole, now that it is over. Gives what is new."""
        found: list[Finding] = []
        for rule in tuple(self._rules):
            found += self._ask(rule, None)
        self._rules.clear()
        return self._take(found)

    def _ask(self, rule: Rule, step: Step | None) -> list[Finding]:
        try:
            with np.errstate(all="ignore"):
                return list((rule.end() if step is None else rule.see(step)) or ())
        except Exception as error:  # a rule of somebody must not end the training
            self._rules.remove(rule)
            where = "at the end" if step is None else f"at step {step.number}"
            self.failures.append(
                f"the rule `{rule.name or type(rule).__name__}` failed {where} and is not asked "
                f"any more: {type(error).__name__}: {error}"
            )
            return []

    def _take(self, found: list[Finding]) -> list[Finding]:
        """Keep what was not found before of the same rule at the same site."""
        new: list[Finding] = []
        for finding in found:
            key = finding.rule, finding.site
            if key not in self._known:
                self._known.add(key)
                new.append(link(replace(finding, rank=self._rank), self.findings))
                self.findings.append(new[-1])
        return new


def judge_run(
    run: Run, rules: Iterable[Rule] | None = None, rank: int | None = None
) -> list[Finding]:
    """Judge a run folder: every rank, or one; of all ranks together, also whether they agree.

    Steps are read a few at a time. What several ranks show alike is told once, of the first.
    """
    sources = [one for one in run._sources() if rank in (None, one.rank)]
    if rank is not None and not sources:
        ranks = ", ".join(map(str, run.ranks)) or "none"
        raise NotRecorded(f"there is no rank {rank}; there are {ranks}.")
    given = None if rules is None else list(rules)
    origins = _find_origins(run)
    panel = [
        _RankJudge(one, Judge(copy.deepcopy(given), rank=one.rank), origins.get(one.rank, {}))
        for one in sources
    ]
    agreement = RankDisagreement()
    disagreements: list[Finding] = []
    steps = heapq.merge(*(one.judge() for one in panel), key=lambda shown: shown[1].number)
    for number, group in itertools.groupby(steps, key=lambda shown: shown[1].number):
        # All of them are judged here, step by step, so that no rank runs ahead of the others.
        shown = list(group)
        if len(panel) < 2:
            continue
        rows = {rank: rows_of_parameters(step) for rank, step in shown}
        disagreement = agreement.compare(number, rows)
        if disagreement is not None:
            disagreements.append(disagreement)
    for one in panel:
        one.jury.end()
    return _unite([*disagreements, *(found for one in panel for found in one.jury.findings)])


class _RankJudge:
    """The judge of one rank, and where its steps come from."""

    def __init__(self, source: StepSource, jury: Judge, origins: Mapping[int, Any]) -> None:
        self.jury = jury
        self._source = source
        self._origins = origins

    def judge(self) -> Iterator[tuple[int, Step]]:
        """Judge step after step."""
        sites = list(self._source.sites())
        for record in read_steps(self._source, self._origins):
            self.jury.see(record, sites)
            assert self.jury.latest is not None
            yield self._source.rank, self.jury.latest


def _find_origins(run: Run) -> dict[int, dict[int, Any]]:
    """Read from stored findings where a NaN came from: by rank and step. A replay cannot be."""
    found: dict[int, dict[int, Any]] = {}
    for facts in run.findings:
        origin = (facts.get("more") or {}).get("origin")
        if origin and isinstance(facts.get("step"), int):
            found.setdefault(facts.get("rank", 0), {})[facts["step"]] = origin
    return found


def _unite(findings: Iterable[Finding]) -> list[Finding]:
    """Tell once what several ranks show: of the earliest step, and there of the lowest rank."""
    first: dict[tuple[str, str], Finding] = {}
    for one in sorted(findings, key=lambda one: (one.step, one.rank)):
        first.setdefault((one.rule, one.site), one)
    return list(first.values())
