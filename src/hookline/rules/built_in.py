"""The rules that are applied by default, and those for a single step."""

from __future__ import annotations

from hookline.rules.depth import Vanishing
from hookline.rules.divergence import Exploding
from hookline.rules.initial import InitScale
from hookline.rules.no_gradient import NoGradient
from hookline.rules.non_finite import NonFinite
from hookline.rules.precision import Headroom, LostUpdates, Underflow
from hookline.rules.rule import Rule, register_rule
from hookline.rules.saturation import Saturation
from hookline.rules.spikes import Spike
from hookline.rules.units import DeadUnits, OutlierChannels
from hookline.rules.updates import UpdateRatio

# In this order they are asked, so that a cause is found before what follows from it.
for _rule in (
    NonFinite,
    InitScale,
    UpdateRatio,
    LostUpdates,
    Headroom,
    Underflow,
    DeadUnits,
    Saturation,
    Exploding,
    Vanishing,
    NoGradient,
    OutlierChannels,
    Spike,
):
    register_rule(_rule)


def checkup_rules() -> list[Rule]:
    """Make the rules for a single step: those that look at a window look at this one.

    One batch leaves many units at zero that others would wake, and a layer that begins at zero lets
    no gradient through yet: only what no batch can change is told.
    """
    return [
        NonFinite(),
        InitScale(),
        Headroom(),
        Underflow(times=1),
        DeadUnits(share=0.95, most=0.95, error=0.95, window=1),
        Saturation(window=1, passes=0.0),
        Exploding(window=1),
        Vanishing(window=1),
        NoGradient(window=1, counts_zeros=False),
        OutlierChannels(times=1),
    ]
