"""Numbers and names as findings write them."""

from __future__ import annotations

from collections.abc import Sequence

from hookline._tables import format_number


def say_number(number: float) -> str:
    """Write a number with three digits."""
    return format_number(float(number))


def say_share(share: float) -> str:
    """Write a share as percent."""
    return f"{100 * share:.0f}%" if share >= 0.01 or share == 0 else f"{100 * share:.2g}%"


def say_times(factor: float) -> str:
    """Write by how much something grew."""
    return f"{factor:.0f} times" if 9.5 <= factor < 10000 else f"{say_number(factor)} times"


def count_of(number: int, what: str) -> str:
    """Write how many there are of something."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def say_others(names: Sequence[str], what: str) -> str:
    """Write that the same holds of others; empty where there are none."""
    if not names:
        return ""
    return f" The same holds of {count_of(len(names), f'other {what}')}."
