"""Numbers as sentences about differences write them."""

from __future__ import annotations

import math


def write_r(r: float | None) -> str:
    """Write a relative error with two digits.

    >>> write_r(0.000203), write_r(0.25), write_r(0), write_r(float("inf"))
    ('2.0e-4', '0.25', '0', 'infinity')
    """
    if r is None:
        return "nothing"
    if math.isnan(r):
        return "NaN"
    if math.isinf(r):
        return "infinity"
    if r == 0:
        return "0"
    if 0.01 <= r < 1000:
        return f"{r:.2g}" if r < 100 else f"{r:.0f}"
    return shorten(f"{r:.1e}")


def write_rough(r: float | None) -> str:
    """Write a relative error with one digit.

    >>> write_rough(3.4e-7), write_rough(2e-5), write_rough(0.02)
    ('3e-7', '2e-5', '0.02')
    """
    if r is None or not math.isfinite(r) or r == 0 or r >= 0.01:
        return write_r(r)
    return shorten(f"{r:.0e}")


def write_times(factor: float) -> str:
    """Write by how much something is larger.

    >>> write_times(332.1), write_times(8.4), write_times(123456)
    ('x330', 'x8.4', 'x1e5')
    """
    if not math.isfinite(factor) or factor >= 10_000:
        return f"x{'infinity' if not math.isfinite(factor) else shorten(f'{factor:.0e}')}"
    if factor < 10:
        return f"x{factor:.2g}"
    digits = 10 ** max(0, len(str(int(factor))) - 2)
    return f"x{round(factor / digits) * digits}"


def shorten(text: str) -> str:
    """Write an exponent without padding: `3e-7`, not `3e-07`."""
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}"
