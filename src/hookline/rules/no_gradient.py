"""no-gradient: parameters that an optimizer steps and no gradient reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from hookline.rules.findings import Finding
from hookline.rules.roster import Roster
from hookline.rules.rule import Rule
from hookline.rules.steps import Step, name_site
from hookline.rules.windows import grow
from hookline.rules.wording import count_of
from hookline.runs.step_sources import Floats, Integers


class NoGradient(Rule):
    """Find trainable parameters whose gradient is missing or exactly zero, step after step.

    Only from the start of a training: a parameter that once had a gradient and has none now has
    often learned what there was to learn.
    """

    name = "no-gradient"
    severity = "error"
    sees_broken = False

    def __init__(self, window: int = 20, *, counts_zeros: bool = True) -> None:
        self.window = window
        """So many steps of its optimizer without a gradient are too many."""
        self.counts_zeros = counts_zeros
        """Whether a gradient of zeros is none; in a first step many are, and not for long."""
        self._silent: Floats = np.zeros(0)
        """For how many steps each parameter has had no gradient; NaN for one that had any."""
        self._missing: Floats = np.zeros(0)
        """In how many of them there was none at all, not even zeros."""
        self._ran: set[str] = set()
        """The modules that ran."""

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at the parameters whose optimizer stepped in this step."""
        roster = step.roster
        parameters = roster.parameters
        self._silent = grow(self._silent, len(roster), 0.0)
        self._missing = grow(self._missing, len(roster), 0.0)
        at = parameters[step.is_measured[parameters] & roster.is_trainable[parameters]]
        if not len(at) or step.is_skipped or not step.is_complete:
            return
        norms = _find(step.stat("l2"), roster.gradient_of[at])
        changes = _find(step.stat("l2"), roster.update_of[at])
        # An update without a gradient that could be measured: it had one of an unusual kind.
        is_silent = ~(norms > 0) & ~(np.isnan(norms) & (changes > 0))
        if is_silent.all() and np.isnan(self._silent[at]).any():
            return  # all have learned what there was to learn
        self._silent[at] = np.where(is_silent, self._silent[at] + 1, np.nan)
        self._missing[at] += np.isnan(norms)
        if not np.isnan(self._silent[at]).all():
            self._note_modules(step)
        due = at[self._silent[at] == self.window]
        if len(due):
            yield from self._judge(step, due)

    def _note_modules(self, step: Step) -> None:
        counts = step.stat("count")
        if len(self._ran) < len(step.roster.first_value):
            values = step.roster.first_value.items()
            self._ran.update(module for module, number in values if counts[number] > 0)

    def _judge(self, step: Step, due: Integers) -> Iterator[Finding]:
        alive = {
            step.sites[one].module for one in step.roster.parameters if np.isnan(self._silent[one])
        }
        used: list[int] = []
        unused: list[int] = []
        for number in due:
            module = step.sites[number].module
            if module in alive and step.roster.dimensions[number] < 2:
                continue  # its gradient may be zero by nature: a bias before a normalisation
            if _is_in_pooler(step.roster, module):
                continue
            is_missing = self._missing[number] >= self.window
            if not is_missing and (module in alive or not self.counts_zeros):
                continue  # what it is multiplied with is zero: a first state, a dead layer before
            is_spare = module not in self._ran or module in alive
            (unused if is_spare else used).append(int(number))
        if used:
            # A last layer that nobody listens to is no disaster; a part that is cut off is.
            share = len(used) / max(1, len(step.roster.parameters))
            yield self._explain(step, used, severity="error" if share >= _LARGE else "warning")
        if unused:
            yield self._explain(step, unused, severity="info")

    def _explain(self, step: Step, at: list[int], *, severity: str) -> Finding:
        site = step.sites[at[0]]
        names = [name_site(step.sites[one]) for one in at]
        is_missing = self._missing[at[0]] >= self.window
        how = "no gradient at all" if is_missing else "a gradient of exactly zero"
        if severity != "info":
            why = "though its module ran"
            hint = (
                "Look for .detach(), .data, torch.no_grad() or .item() between this module and "
                "the loss, for an output that nothing uses, and for an activation that is zero "
                "everywhere."
            )
            if not is_missing and any(one.dtype == "float16" for one in step.sites):
                hint = (
                    "Values are float16, in which small gradients become zero: scale the loss "
                    f"with torch.amp.GradScaler, or use bfloat16. {hint}"
                )
        else:
            why = "since nothing that the loss depends on uses it"
            hint = "If that is meant, leave it out of the optimizer."
        rest = f" So do {count_of(len(at) - 1, 'other parameter')}." if len(at) > 1 else ""
        return self.find(
            step,
            site,
            severity=severity,
            value=float(self.window),
            threshold=float(self.window),
            source=self._find_source(step, site.module),
            message=(
                f"{names[0]} is given to the optimizer and got {how} in {self.window} steps up to "
                f"step {step.number}, {why}.{rest}"
            ),
            evidence=[
                f"{name}: {'missing' if self._missing[one] >= self.window else 'exactly zero'} "
                f"in {self.window} steps"
                for name, one in zip(names[:4], at, strict=False)
            ],
            hint=hint,
            others=names[1:],
        )

    def _find_source(self, step: Step, module: str) -> str:
        number = step.roster.first_value.get(module)
        return "" if number is None else step.sites[number].source


_LARGE = 0.1
"""From this share of all parameters on, those without a gradient are an error."""


def _find(values: Floats, at: Integers) -> Floats:
    """Read values of sites; NaN for those that are not there."""
    return np.where(at >= 0, values[at], np.nan)


def _is_in_pooler(roster: Roster, module: str) -> bool:
    """Tell whether a module is part of a pooler, which transformers run whether used or not."""
    while module:
        number = roster.first_value.get(module)
        if number is not None and roster.sites[number].type.endswith("Pooler"):
            return True
        module = module.rpartition(".")[0]
    return False
