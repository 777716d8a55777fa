"""What is done about a finding: nothing, an exception in the training, a dump of the batch, a call.

Findings are made in the thread that takes steps away; an exception has to wait until the training
comes by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hookline import _trees
from hookline._errors import BadTraining
from hookline.replays import KeptCall
from hookline.rules import Finding
from hookline.watchers.working import say

OnFinding = str | Callable[[Finding], Any]
"""`continue`, `raise`, `dump`, or a function that gets the finding."""

CHOICES = ("continue", "raise", "dump")

_MOST_DUMPS = 10
_MOST_BYTES = 1 << 30

Dump = Callable[[str, Mapping[str, Tensor], Mapping[str, Any]], Any]
"""Keep tensors beside the run: name, tensors, facts."""


class Reaction:
    """Do what was asked for about each finding."""

    def __init__(self, on_finding: OnFinding, dump: Dump | None) -> None:
        self._on_finding = on_finding
        self._dump = dump
        self._dumps = 0
        self._waiting: Finding | None = None

    @property
    def acts(self) -> bool:
        """Whether anything is done about findings, so that they are wanted soon."""
        return self._on_finding != "continue"

    @property
    def raises(self) -> bool:
        """Whether an error among findings is to end the training."""
        return self._on_finding == "raise"

    @property
    def wants_calls(self) -> bool:
        """Whether the arguments of a step's calls may be asked for."""
        return self._on_finding == "dump" and self._dump is not None

    def take(self, finding: Finding, calls: Sequence[KeptCall]) -> None:
        """Take a finding, and the calls of its step where they were asked for."""
        if callable(self._on_finding):
            try:
                self._on_finding(finding)
            except Exception as error:
                name = getattr(self._on_finding, "__qualname__", repr(self._on_finding))
                say(f"`{name}` gets no more findings: {type(error).__name__}: {error}")
                self._on_finding = "continue"
        elif self.raises and finding.severity == "error":
            self._waiting = self._waiting or finding
        elif self.wants_calls and finding.severity == "error":
            self._dump_calls(finding, calls)

    def raise_waiting(self) -> None:
        """Raise what waits; call this in the training's thread."""
        finding, self._waiting = self._waiting, None
        if finding is not None:
            raise BadTraining(f"{finding.message} {finding.hint}".rstrip(), finding)

    def _dump_calls(self, finding: Finding, calls: Sequence[KeptCall]) -> None:
        tensors = _gather(calls)
        if tensors and self._dump is not None and self._dumps < _MOST_DUMPS:
            self._dumps += 1
            name = f"finding-{finding.rule}-step-{finding.step}"
            self._dump(name, tensors, {"step": finding.step, "finding": finding.to_dict()})


def _gather(calls: Sequence[KeptCall]) -> dict[str, Tensor]:
    """Copy the arguments of calls, as many as there is room for; the latest call comes first."""
    found: dict[str, Tensor] = {}
    room = _MOST_BYTES
    for number, call in reversed(list(enumerate(calls))):
        # An argument by position is `0`, `1`, ...; one by keyword has its name.
        given = {**{str(at): one for at, one in enumerate(call.args)}, **call.kwargs}
        for path, tensor in _trees.leaves(given):
            room -= tensor.numel() * tensor.element_size()
            if room < 0:
                return found
            name = ".".join(map(str, (call.prefix.rstrip("."), f"call{number}", *path)))
            found[name.lstrip(".")] = tensor.detach().to("cpu", copy=True)
    return found
