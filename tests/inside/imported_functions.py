"""Functions that cases import from another file, each with a twin."""

from __future__ import annotations

from twins import note

SCALE = 3.0


def far_scale(a):
    w = a * SCALE
    return w


def far_scale_twin(a, name="far_scale"):
    w = note(f"{name}.w", a * SCALE)
    return note(f"{name}.return", w)


class Tools:
    """Functions that a class holds."""

    factor = 2.0

    @staticmethod
    def shift(a, by=1.0):
        moved = a + by
        return moved

    @classmethod
    def stretch(cls, a):
        longer = a * cls.factor
        return longer
