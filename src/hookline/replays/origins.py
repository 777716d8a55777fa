"""What a replay found: the operation that made the first non-finite value, and what it was given.

Knows no tensors: what it holds can be written as JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CAUSES = ("operation", "input", "parameter", "not reproduced")
"""What can be behind a non-finite value: an operation made it of finite ones, it came in with the
call, it was in a parameter or buffer, or the replay could not show it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the first non-finite value came from."""

    site: str
    """The address of the operation, input or parameter: `blocks.5.attn/softmax`."""
    operation: str = ""
    """What the operation is called: `softmax`; in backward the node of the graph:
    `SqrtBackward0`."""
    is_backward: bool = False
    """Whether a gradient is meant, and not a value of the forward."""
    source: str = ""
    """File and line of the user's code that calls it: `model.py:48`."""
    line: str = ""
    """The text of that line."""
    kind: str = "nan"
    """`nan`, or `inf` where there was no NaN yet."""
    cause: str = "operation"
    """One of `CAUSES`."""
    why: str = ""
    """The reason in words: `softmax of a row that is all -inf (2 rows)`."""
    inputs: list[dict[str, Any]] = field(default_factory=list)
    """What it was given: name, shape, dtype, min, max, mean, nan, inf, zeros of each tensor."""
    output: dict[str, Any] = field(default_factory=dict)
    """The same of what it gave."""
    evidence: tuple[str, ...] = ()
    """Further remarks: short lines."""
    visit: int = 0
    """Which execution of the module in the call it was."""

    def to_dict(self) -> dict[str, Any]:
        """Give what JSON can hold."""
        facts = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        facts["evidence"] = list(self.evidence)
        facts["inputs"] = [dict(one) for one in self.inputs]
        facts["output"] = dict(self.output)
        return facts

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Origin:
        """Make one of what `to_dict` gave; what it does not know it leaves out."""
        names = {one.name for one in dataclasses.fields(cls)}
        known = {name: value for name, value in facts.items() if name in names}
        known["evidence"] = tuple(known.get("evidence", ()))
        return cls(**known)

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        if self.cause == "not reproduced":
            return f"not reproduced: {self.why}"
        return f"{self.site}{where}: {self.why}"


def not_reproduced(why: str, *, is_backward: bool, site: str = "") -> Origin:
    """Say that a replay could not show it, and why."""
    return Origin(
        site=site, is_backward=is_backward, cause="not reproduced", why=why, evidence=(why,)
    )
