"""What is measured more rarely than at every watched step, and whose turn it is."""

from __future__ import annotations

from collections.abc import Mapping

from hookline.stats import Extras
from hookline.watchers.units import FIRST

_UNITS_STRIDE = 10


class Turns:
    """Count watched steps, and say what comes in the one under way."""

    def __init__(
        self, extras: Mapping[Extras, int | None], *, moments: int | None, units: int | None
    ) -> None:
        self._extras = extras
        self.moments = moments
        """One watched step in so many has the optimizers' moments."""
        self._units = units
        self._watched = 0
        self._since_extras = 0
        """Watched steps since the last that had the extras whose stride is left to the pace."""

    def is_due(self, stride: int | None) -> bool:
        """Tell whether what has this stride comes in this step."""
        if stride is None:
            return self._since_extras == 0
        return stride > 0 and self._watched % stride == 0

    @property
    def extras(self) -> Extras:
        """What is measured of each value besides its row."""
        found = Extras(0)
        for extra, stride in self._extras.items():
            if self.is_due(stride):
                found |= extra
        return found

    @property
    def has_units(self) -> bool:
        """Whether channels are looked at."""
        if self._units is not None:
            return self.is_due(self._units)
        is_counted = bool(self.extras & Extras.COUNTS)  # outliers are looked for then
        return is_counted or self._watched < FIRST or self._watched % _UNITS_STRIDE == 0

    def pass_on(self, extra_stride: int) -> None:
        """Learn that a watched step has ended."""
        self._watched += 1
        self._since_extras = (self._since_extras + 1) % extra_stride
