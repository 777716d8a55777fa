"""The contract of a rule, and the rules that a judge applies by default."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from hookline.rules.findings import Finding
from hookline.rules.steps import Step, name_site
from hookline.runs import SiteFacts


class Rule:
    """Look at each step of a training, and say what is wrong with it.

        class LargeOutput(hl.Rule):
            name = "large-output"

            def see(self, step):
                for site in step.find(step.stat("absmax") > 1e6):
                    yield self.find(step, site, message=f"{site.address} passes 1e6")

    A rule sees every watched step once and in order, and keeps what it needs of earlier ones. It
    looks at numbers and never at tensors, so the same rule judges a training while it runs and a
    run folder long after.
    """

    name: ClassVar[str] = ""
    """What its findings are called, in words joined by `-`."""

    severity: ClassVar[str] = "warning"
    """How bad its findings are unless they say so themselves."""

    sees_broken: ClassVar[bool] = True
    """Whether it wants the steps in which gradients or parameters are not finite."""

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at a step; give what was found in it."""
        raise NotImplementedError(f"the rule {type(self).__name__} has no `see(self, step)`")

    def end(self) -> Iterable[Finding]:
        """Give what can only be said once the training is over."""
        return ()

    def find(
        self,
        step: Step | int,
        site: SiteFacts | str,
        *,
        message: str,
        value: float | None = None,
        threshold: float | None = None,
        severity: str | None = None,
        source: str | None = None,
        evidence: Sequence[str] = (),
        hint: str = "",
        cause: str = "",
        others: Sequence[str] = (),
        more: Mapping[str, Any] | None = None,
    ) -> Finding:
        """Make a finding of this rule."""
        if isinstance(site, SiteFacts):
            source = site.source if source is None else source
            site = name_site(site)
        return Finding(
            rule=self.name or type(self).__name__,
            severity=severity or self.severity,
            site=site,
            step=step.number if isinstance(step, Step) else step,
            value=_round(value),
            threshold=_round(threshold),
            message=message,
            source=source or "",
            evidence=tuple(evidence),
            hint=hint,
            cause=cause,
            others=tuple(others),
            more=dict(more or {}),
        )


def _round(number: float | None) -> float | None:
    """Leave out the last digits, which depend on how many sites are computed with at once."""
    return None if number is None else float(f"{number:.12g}")


RuleClass = TypeVar("RuleClass", bound=type[Rule])

_registered: dict[str, Callable[[], Rule]] = {}


def register_rule(rule: RuleClass) -> RuleClass:
    """Add a rule to those that every watch applies; also as a decorator of its class.

    One of the same name is replaced. It is made without arguments, anew for every training.
    """
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise TypeError(f"`hl.register_rule({rule!r})`: give a class that is derived from hl.Rule")
    if not rule.name:
        raise ValueError(f"{rule.__name__} has no name: give it one, such as name = 'my-rule'")
    _registered[rule.name] = rule
    return rule


def make_rules() -> list[Rule]:
    """Make one of each registered rule, in the order of registration."""
    return [make() for make in _registered.values()]
