"""What a rule concludes: one finding, as a value that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

SEVERITIES = ("error", "warning", "info")
"""How bad a finding is, the worst first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Say what is wrong with a training: what, where, when, how much, and what to try."""

    rule: str
    """The name of the rule, such as `non-finite`."""

    severity: str
    """One of `SEVERITIES`."""

    site: str
    """The address where it begins; empty where it is of the training as a whole."""

    step: int
    """The step in which it was found."""

    value: float | None
    """What was measured; None where that is no number, or none that is finite."""

    threshold: float | None
    """What it was held against."""

    message: str
    """One or two sentences: what, where, when, the value against the threshold."""

    source: str = ""
    """The line of the user's code: `model.py:48`."""

    evidence: tuple[str, ...] = ()
    """Short lines with the numbers that show it."""

    hint: str = ""
    """What to try."""

    cause: str = ""
    """The site of the finding that this one follows from; empty for a root cause."""

    others: tuple[str, ...] = ()
    """Further sites: those that only carried it on, or where the same shows."""

    rank: int = 0
    """The rank that saw it."""

    more: Mapping[str, Any] = field(default_factory=dict)
    """Details that JSON can hold, such as the operation and its inputs."""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(
                f"severity={self.severity!r} of the rule `{self.rule}`: give one of "
                f"{', '.join(SEVERITIES)}"
            )
        for name in ("value", "threshold"):
            object.__setattr__(self, name, _to_finite(getattr(self, name)))
        object.__setattr__(self, "evidence", tuple(self.evidence))
        object.__setattr__(self, "others", tuple(self.others))

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.severity}: {self.rule}: {self.message}{where}"

    def to_dict(self) -> dict[str, Any]:
        """Give its facts as JSON can hold them."""
        facts = {one.name: getattr(self, one.name) for one in fields(self)}
        return facts | {
            "evidence": list(self.evidence),
            "others": list(self.others),
            "more": dict(self.more),
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Finding:
        """Make it again from its facts; what is not known here is left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in facts.items() if name in known})


def _to_finite(number: Any) -> float | None:
    """Give a plain number; JSON has no infinity, and a NaN says nothing."""
    if number is None or not math.isfinite(number):
        return None
    return float(number)
