"""What `hl.check` gives: what was found, by what it was judged, and what was not."""

from __future__ import annotations

import html
from dataclasses import dataclass

from hookline.rules import Finding
from hookline.views import format_findings


@dataclass(frozen=True, slots=True, repr=False)
class Checkup:
    """The result of a check of a model: print it, or ask whether it is `ok`."""

    verdict: str
    """What was found, in one sentence."""

    findings: tuple[Finding, ...]
    """Everything that the rules found."""

    loss: str
    """What was run backward from, in words."""

    steps: int
    """How many steps were judged."""

    sites: int
    """How many sites were measured."""

    judged: tuple[str, ...]
    """The rules that were asked."""

    not_judged: tuple[str, ...]
    """The rules that need a training, and say nothing about a model at rest."""

    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not any(one.severity == "error" for one in self.findings)

    def __str__(self) -> str:
        lines = [self.verdict]
        if self.findings:
            lines += ["", format_findings(self.findings)]
        lines += ["", *self._facts()]
        return "\n".join(lines)

    __repr__ = __str__

    def to_dict(self) -> dict[str, object]:
        """Write it as JSON can hold it."""
        return {
            "verdict": self.verdict,
            "findings": [one.to_dict() for one in self.findings],
            "loss": self.loss,
            "steps": self.steps,
            "sites": self.sites,
            "judged": list(self.judged),
            "not_judged": list(self.not_judged),
            "notes": list(self.notes),
        }

    def _facts(self) -> list[str]:
        steps = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        lines = [f"judged from {steps} of {self.sites} sites, backward from {self.loss}"]
        if self.not_judged:
            lines.append(f"not judged, for want of a training: {', '.join(self.not_judged)}")
        return [*lines, *self.notes]

    def _repr_html_(self) -> str:
        """Write it for a notebook."""
        rows = "".join(
            f"<tr><td>{html.escape(one.severity)}</td><td>{html.escape(one.rule)}</td>"
            f"<td>{html.escape(one.site)}</td><td>{html.escape(one.message)}</td>"
            f"<td>{html.escape(one.hint)}</td></tr>"
            for one in self.findings
        )
        table = f"<table><tbody>{rows}</tbody></table>" if rows else ""
        facts = "".join(f"<div>{html.escape(line)}</div>" for line in self._facts())
        return (
            f"<div><strong>{html.escape(self.verdict)}</strong>{table}<small>{facts}</small></div>"
        )
