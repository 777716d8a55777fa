"""Which finding follows from which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hookline.rules.findings import Finding

_FOLLOWS = {
    "no-gradient": ("dead-units", "non-finite"),
    "vanishing": ("dead-units", "init-scale", "saturation"),
    "saturation": ("init-scale", "update-ratio", "exploding"),
    "exploding": ("init-scale", "update-ratio"),
    "dead-units": ("init-scale", "update-ratio", "exploding"),
    "spike": ("exploding", "update-ratio"),
    "headroom": ("init-scale", "exploding", "update-ratio", "spike"),
    "outlier-channels": ("init-scale", "update-ratio", "exploding"),
    "underflow": ("vanishing",),
}
"""By rule: those whose findings bring it about when they came before."""

_SIGNS = ("init-scale", "update-ratio", "exploding", "headroom", "spike")
"""Those that are signs of a NaN to come."""


def link(finding: Finding, earlier: Sequence[Finding]) -> Finding:
    """Say what a finding follows from, among those that were there before it."""
    if finding.cause:
        return finding
    if finding.rule == "non-finite":
        signs = [one for one in earlier if is_sign(one)]
        lines = [f"before it, at step {one.step}: {one.rule} at {_where(one)}" for one in signs]
        return replace(finding, evidence=(*finding.evidence, *lines)) if lines else finding
    causes = _FOLLOWS.get(finding.rule, ())
    for one in earlier:
        is_root = not one.cause and bool(one.site) and one.site != finding.site
        if one.rule in causes and is_root and _brings_about(one, finding):
            return replace(finding, cause=one.site)
    return finding


def is_sign(finding: Finding) -> bool:
    """Tell whether it is a sign of a NaN to come."""
    return finding.rule in _SIGNS


def _brings_about(one: Finding, finding: Finding) -> bool:
    """Tell whether it is bad enough, and of the kind, to have brought about the other."""
    if one.rule == "dead-units":
        return one.severity == "error"
    if one.rule == "update-ratio":  # too large, not too small
        return one.value is not None and one.threshold is not None and one.value > one.threshold
    return True


def _where(finding: Finding) -> str:
    return finding.site or "the training as a whole"
