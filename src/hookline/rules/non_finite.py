"""non-finite: a NaN or an infinity, who made it, and who only carried it on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from hookline.rules.findings import Finding
from hookline.rules.rule import Rule
from hookline.rules.steps import Step, name_site
from hookline.rules.telling import HINTS, hint_at, is_shown, say, show_origin
from hookline.rules.windows import grow
from hookline.rules.wording import count_of, say_number
from hookline.runs.step_sources import Flags, Floats, Integers
from hookline.stats.rows import NAN, NEGINF, POSINF


class NonFinite(Rule):
    """Find the first NaN or infinity, and who made it.

    Masks of -inf do not count, nor gradients that overflow in a step that a gradient scaler leaves
    out, unless it does so again and again.
    """

    name = "non-finite"
    severity = "error"

    def __init__(self, skips: int = 8, skips_at_start: int = 14) -> None:
        self.skips = skips
        """So many steps in a row that a scaler leaves out are too many."""
        self.skips_at_start = skips_at_start
        """The same before its first good step, while it looks for a scale."""
        self._is_found = False
        self._seen = 0
        self._good = 0
        self._skipped = 0
        self._with_minus: Floats = np.zeros(0)
        """Which outputs had a -inf in an earlier step: masks."""
        self._with_plus: Floats = np.zeros(0)
        """Which outputs had a +inf from the first step on that did no harm."""
        self._before: tuple[int, Floats, Floats] | None = None

    def see(self, step: Step) -> Iterable[Finding]:
        """Look for what is not finite; once found, it only spreads."""
        if self._is_found:
            return
        self._with_minus = grow(self._with_minus, len(step.sites), 0.0)
        self._with_plus = grow(self._with_plus, len(step.sites), 0.0)
        bad = step.nans | step.infinities
        loss = step.scalars.get("loss", 0.0)
        if bad.any() or not np.isfinite(loss):
            yield from self._judge(step, bad, is_loss_bad=not np.isfinite(loss))
        elif step.is_whole:
            self._before = step.number, step.stat("rms"), step.stat("absmax")
        if not step.is_skipped:
            self._skipped = 0
            self._good += 1
        self._seen += 1
        self._with_minus += step.spread("rows")[0][:, NEGINF] > 0

    def _judge(self, step: Step, bad: Flags, *, is_loss_bad: bool) -> Iterator[Finding]:
        roster = step.roster
        is_later = roster.is_gradient | roster.is_local_gradient | roster.is_parameter_gradient
        has_nan = bool(step.nans.any())
        if not has_nan and not is_loss_bad and not (bad & ~roster.is_value).any():
            # Infinite outputs that everything after them takes well: a mask of +inf, say.
            is_taken_well = (step.is_measured & is_later).any()
            if not self._seen and is_taken_well:
                self._with_plus += bad
            bad = bad & (self._with_plus == 0)
            if not bad.any():
                return
        if step.is_skipped and not is_loss_bad and not (bad & ~is_later).any():
            self._skipped += 1
            yield from self._judge_skips(step, bad)
            return
        self._is_found = True
        yield self._explain(step, bad, is_loss_bad=is_loss_bad)

    def _judge_skips(self, step: Step, bad: Flags) -> Iterator[Finding]:
        scale = step.scalars.get("grad_scale", np.nan)
        limit = self.skips if self._good else self.skips_at_start
        if self._skipped < limit and not scale < 1:
            return
        self._is_found = True
        order = _order(step, bad)
        site = step.sites[order[0]]
        at = f", and its scale fell to {say_number(scale)}" if np.isfinite(scale) else ""
        yield self.find(
            step,
            site,
            value=self._skipped,
            threshold=limit,
            message=(
                f"The gradient scaler left out {count_of(self._skipped, 'step')} in a row up to "
                f"step {step.number}{at}: the gradients are not finite at any scale, in the "
                f"backward pass first at {name_site(site)}."
            ),
            evidence=[_count_bad(step, order[0])],
            hint=HINTS["gradient"],
            others=[name_site(step.sites[one]) for one in order[1:]],
            more={"kind": "nan" if step.nans.any() else "inf", "phase": "gradient"},
        )

    def _explain(self, step: Step, bad: Flags, *, is_loss_bad: bool) -> Finding:
        """Name the first that is not finite in the order of the step."""
        roster = step.roster
        candidates = bad.copy()
        has_minus = (step.spread("rows")[0][:, NEGINF] > 0) & roster.is_value
        if self._seen or not (bad & roster.is_value).any():
            candidates |= has_minus & (self._with_minus == 0)
        order = _order(step, candidates)
        number = int(order[0]) if len(order) else -1
        phase = step.sites[number].kind if number >= 0 else "loss"
        is_after_loss = phase not in ("value", "parameter")
        if is_loss_bad and is_after_loss:
            number, phase = -1, "loss"
        origin = step.origin
        others = [name_site(step.sites[one]) for one in order if one != number]
        site = "" if number < 0 else name_site(step.sites[number])
        source = "" if number < 0 else step.sites[number].source
        if origin and is_shown(origin):
            if site and origin.get("site") != site:
                others = [site, *others]
            site = str(origin.get("site") or site)
            source = str(origin.get("source") or source)
        kind = _kind_of(step, number, origin)
        is_of_data = self._is_of_data(step, number) and not is_shown(origin)
        hint = hint_at(origin) or HINTS["data" if is_of_data else phase]
        return self.find(
            step,
            site,
            severity="error",
            value=_count_elements(step, number),
            threshold=0.0,
            message=say(
                site,
                step=step.number,
                source=source,
                kind=kind,
                phase=phase,
                origin=origin,
                carried=len(others),
            ),
            source=source,
            evidence=[*self._show(step, number), *show_origin(origin)],
            hint=hint,
            others=others,
            more={"kind": kind, "phase": phase, **({"origin": dict(origin)} if origin else {})},
        )

    def _is_of_data(self, step: Step, number: int) -> bool:
        values = np.flatnonzero(step.roster.is_value & step.is_measured)
        return number >= 0 and len(values) > 0 and number == values[0]

    def _show(self, step: Step, number: int) -> list[str]:
        lines = []
        if number >= 0:
            lines.append(_count_bad(step, number))
            if self._before is not None and number < len(self._before[1]):
                at, rms, absmax = self._before
                if np.isfinite(rms[number]):
                    lines.append(
                        f"step {at}: finite, rms {say_number(rms[number])}, "
                        f"largest {say_number(absmax[number])}"
                    )
        loss = step.scalars.get("loss")
        if loss is not None:
            lines.append(f"loss {loss:g}")
        return lines


def _order(step: Step, bad: Flags) -> Integers:
    """Put sites in the order of a step: what was there, forward, backward, the optimizer."""
    roster = step.roster
    phases = (
        roster.is_parameter,
        roster.is_value,
        roster.is_gradient,
        roster.is_local_gradient,
        roster.is_parameter_gradient,
        roster.is_update,
    )
    rest = ~np.logical_or.reduce(phases)
    return np.concatenate([np.flatnonzero(bad & phase) for phase in (*phases, rest)])


def _kind_of(step: Step, number: int, origin: Mapping[str, Any] | None) -> str:
    if origin and origin.get("kind"):
        return str(origin["kind"])
    if number < 0:
        return "nan" if np.isnan(step.scalars.get("loss", np.nan)) else "inf"
    return "nan" if step.nans[number] else "inf"


def _count_elements(step: Step, number: int) -> float | None:
    if number < 0:
        return None
    return float(step.spread("rows")[0][number, NAN : NEGINF + 1].sum())


def _count_bad(step: Step, number: int) -> str:
    row = step.spread("rows")[0][number]
    counts = {"NaN": row[NAN], "+inf": row[POSINF], "-inf": row[NEGINF]}
    found = ", ".join(f"{count:.0f} {name}" for name, count in counts.items() if count)
    total = row[: NEGINF + 1].sum()
    return f"step {step.number}: {name_site(step.sites[number])} has {found} of {total:.0f}"
