"""Findings folded by root cause, and what they come to in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hookline.rules.findings import SEVERITIES, Finding
from hookline.rules.linking import is_sign
from hookline.rules.wording import count_of

_SPREADING = "non-finite"
"""The rule of what goes from rank to rank, with the gradients."""

_PHASES = (
    *("parameter", "value", "loss", "gradient"),
    *("local gradient", "parameter gradient", "update"),
)
"""The parts of a step in which a NaN can come up, in their order."""


@dataclass(frozen=True, slots=True)
class Group:
    """A root cause, and what follows from it."""

    root: Finding
    """The finding that the others follow from."""

    follows: list[Finding] = field(default_factory=list)
    """Those that name its site as their cause, in the order of steps."""


def fold(findings: Iterable[Finding]) -> list[Group]:
    """Put findings under the one they follow from: errors first, then by step.

    A group is as bad as the worst in it: a layer that dies because of a learning rate makes that
    the first to look at. Where one rank makes a NaN the others get it from that one.
    """
    ordered = sorted(findings, key=_time)
    roots = {one.site: Group(one) for one in reversed(ordered) if not one.cause}
    first = next((one for one in ordered if one.rule == _SPREADING and not one.cause), None)
    source = None if first is None else roots[first.site]
    if first is not None and source is not None and source.root is not first:
        source = Group(first)
    groups = []
    for one in ordered:
        home = roots.get(one.cause) if one.cause else None
        if first is not None and one.rule == _SPREADING and one.rank != first.rank:
            home = source
        if one is first and source is not None:
            groups.append(source)
        elif home is not None:
            home.follows.append(one)
        elif roots.get(one.site) is not None and roots[one.site].root is one:
            groups.append(roots[one.site])
        else:
            groups.append(Group(one))
    return sorted(groups, key=_weigh)


def say_verdict(findings: Sequence[Finding], *, steps: int, sites: int) -> str:
    """Say in one sentence what happened: the worst, and what came before it as a sign."""
    groups = fold(findings)
    if not groups:
        return f"No findings in {count_of(steps, 'step')} of {count_of(sites, 'site')}."
    root = groups[0].root
    sentence = root.message
    signs = [one.root for one in groups[1:] if root.rule == "non-finite" and is_sign(one.root)]
    if signs:
        first = min(signs, key=lambda one: one.step)
        where = f" of {first.site}" if first.site else ""
        sentence = f"{sentence[:-1]}; the first sign was {first.rule}{where} at step {first.step}."
    rest = len(groups) - 1 - bool(signs)
    return f"{sentence} ({count_of(rest, 'more finding')})" if rest else sentence


def _weigh(group: Group) -> tuple[int, int, tuple[int, int]]:
    worst = min(SEVERITIES.index(one.severity) for one in (group.root, *group.follows))
    return worst, SEVERITIES.index(group.root.severity), _time(group.root)


def _time(finding: Finding) -> tuple[int, int]:
    """Tell when in a training something happened: the step, and how far into the step."""
    phase = str(finding.more.get("phase", ""))
    origin = finding.more.get("origin") or {}
    if origin.get("cause") == "operation" and not origin.get("is_backward"):
        phase = "value" if phase != "parameter" else phase
    return finding.step, _PHASES.index(phase) if phase in _PHASES else 0
