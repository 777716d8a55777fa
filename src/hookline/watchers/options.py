"""What is asked of a watch, checked before anything is attached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from hookline.addresses import Selector
from hookline.rules import Rule
from hookline.stats import Extras
from hookline.watchers.reacting import CHOICES, OnFinding
from hookline.watchers.sinks import Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The keyword arguments of `hl.watch`, which says what each means."""

    sites: Selector | None
    """The values to measure."""

    every: int | Mapping[str, int]
    """One step in so many; or by pattern, where the last that matches counts."""

    gradients: bool
    """Whether the gradients that reach these values are measured."""

    parameters: str | Sequence[str] | None
    """The patterns of the parameters to measure."""

    updates: bool
    """Whether the change that an optimizer makes is measured."""

    local_gradients: bool = False
    """Whether what this rank computes of their gradients is measured before it is reduced."""

    sketch_every: int | None
    """One watched step in so many has a sketch of each value; None: as it can be afforded."""

    counts_every: int | None
    """One watched step in so many has counts and an exponent histogram of each value."""

    moments_every: int | None
    """One watched step in so many has the optimizers' moments."""

    units_every: int | None = None
    """One watched step in so many has the channels; None: the first forty, then one in ten."""

    rules: bool | Sequence[Rule] = True
    """The rules that judge each step: those by default, none, or these."""

    on_finding: OnFinding = "continue"
    """What is done about a finding."""

    replay: bool = True
    """Whether a step that goes wrong is repeated to find the operation."""

    strict: bool = False
    """Whether errors inside hookline are raised."""

    budget: float | None
    """The share of the training's time that watching may take."""

    budget_from: int = 0
    """How many steps at the start are watched whatever they cost."""

    optimizers: Sequence[Optimizer] | None
    """The optimizers whose steps count; None: all that have a watched parameter."""

    with_inference: bool
    """Whether calls without grad are measured."""

    first_step: int | None
    """The number of the first step."""

    resume: bool
    """Whether to go on in a folder that holds a run."""

    keep: int
    """How many steps stay in memory."""

    to: Sequence[Sink]
    """What gets the scalars of each step."""

    progress: bool
    """Whether a line on the terminal says how far it is."""

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) and not (isinstance(self.every, Mapping) and self.every):
            raise ValueError(
                f"every={self.every!r}: give a whole number from 1, or one for each pattern"
            )
        for pattern, stride in self.strides.items():
            if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
                raise ValueError(f"every={stride!r} for `{pattern}`: give a whole number from 1")
        for name in ("sketch_every", "counts_every", "moments_every", "units_every"):
            stride = getattr(self, name)
            if stride is not None and (not isinstance(stride, int) or stride < 0):
                raise ValueError(f"{name}={stride!r}: give a whole number, 0 for never")
        self._check_judging()
        if self.budget is not None and not (
            isinstance(self.budget, (int, float)) and 0 < self.budget < 10
        ):
            raise ValueError(
                f"budget={self.budget!r}: give a share of the time, 0.03 for three percent"
            )
        if not isinstance(self.budget_from, int) or self.budget_from < 0:
            raise ValueError(f"budget_from={self.budget_from!r}: give a number of steps, from 0")
        if self.budget is not None and len(self.strides) > 1:
            raise ValueError(
                "budget chooses one stride for all: give every as a number, or leave it"
            )
        if not isinstance(self.keep, int) or self.keep < 1:
            raise ValueError(f"keep={self.keep!r}: give how many steps stay in memory, from 1")
        first = self.first_step
        if first is not None and (not isinstance(first, int) or first < 0):
            raise ValueError(f"first_step={first!r}: give the number of a step, from 0")
        self._check_kinds()

    def _check_judging(self) -> None:
        """Refuse rules that are none, and a reaction that is not known."""
        if not isinstance(self.rules, bool):
            if not isinstance(self.rules, Sequence) or isinstance(self.rules, str):
                raise TypeError(f"rules={self.rules!r}: give True, False, or a list of rules")
            for rule in self.rules:
                if not isinstance(rule, Rule):
                    raise TypeError(
                        f"rules has {rule!r}: give rules, made of classes that are derived from "
                        "hl.Rule, such as rules=[MyRule()]"
                    )
        if not callable(self.on_finding) and self.on_finding not in CHOICES:
            raise ValueError(
                f"on_finding={self.on_finding!r}: give one of {', '.join(map(repr, CHOICES))}, or "
                "a function that gets the finding"
            )

    def _check_kinds(self) -> None:
        """Refuse what cannot be meant, before it fails far from here."""
        if self.parameters is not None and not (
            isinstance(self.parameters, Sequence)
            and all(isinstance(one, str) for one in self.parameters)
        ):
            raise TypeError(
                f"parameters={self.parameters!r}: give a pattern of their names such as "
                "'layers.**', a list of patterns, or None"
            )
        if not isinstance(self.to, Sequence):
            raise TypeError(f"to={self.to!r}: give a function, or a list of functions")
        for sink in self.to:
            if not callable(sink):
                raise TypeError(f"to={sink!r} cannot be called with the scalars of a step")
        if self.optimizers is None:
            return
        if not isinstance(self.optimizers, Sequence):
            raise TypeError(
                f"optimizers={self.optimizers!r}: give an optimizer of torch.optim, or a list"
            )
        for one in self.optimizers:
            if not isinstance(one, Optimizer):
                raise TypeError(
                    f"optimizers has a {type(one).__qualname__}: give optimizers of torch.optim, "
                    "such as optimizers=[optimizer]"
                )

    @property
    def parameter_patterns(self) -> Sequence[str]:
        """The patterns of the parameters to measure; none for none."""
        if self.parameters is None:
            return ()
        return (self.parameters,) if isinstance(self.parameters, str) else tuple(self.parameters)

    @property
    def strides(self) -> Mapping[str, int]:
        """The strides by pattern; what none of them names is measured at every step."""
        if isinstance(self.every, int):
            return {"**": self.every}
        return self.every if "**" in self.every else {"**": 1, **self.every}

    @property
    def extras_every(self) -> Mapping[Extras, int | None]:
        """How often each extra is measured."""
        return {Extras.SKETCH: self.sketch_every, Extras.COUNTS: self.counts_every}

    def facts(self) -> dict[str, Any]:
        """Write them so that JSON can hold them."""
        names = ("gradients", "local_gradients", "updates", "budget", "with_inference", "replay")
        strides = ("sketch_every", "counts_every", "moments_every", "units_every")
        return {
            "sites": None if self.sites is None else str(self.sites),
            "every": dict(self.strides),
            "parameters": self.parameters,
            "rules": self.rules if isinstance(self.rules, bool) else [r.name for r in self.rules],
            **{name: getattr(self, name) for name in (*names, *strides)},
        }
