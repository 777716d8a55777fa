"""Memory lent in turn: no piece is given out before what lies there is free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.captures.rings import ALIGNMENT, Ring, align


def test_pieces_follow_one_another_and_begin_again() -> None:
    ring: Ring[str] = Ring(4 * ALIGNMENT)
    assert ring.take(ALIGNMENT, "a") == (0, None)
    assert ring.take(2 * ALIGNMENT - 5, "b") == (ALIGNMENT, None)
    assert ring.take(2 * ALIGNMENT, "c") == (0, "b")
    assert ring.take(2 * ALIGNMENT, "d") == (2 * ALIGNMENT, None)
    assert ring.take(1, "e") == (0, "c")


def test_older_piece_elsewhere_is_free_before_one_that_is_waited_for() -> None:
    ring: Ring[str] = Ring(10 * ALIGNMENT)
    for name, size in (("a", 3), ("b", 3), ("c", 3), ("d", 3), ("e", 2)):
        ring.take(size * ALIGNMENT, name)
    assert ring.take(6 * ALIGNMENT, "f") == (0, "e")  # `c` is not in the way, and is older
    assert ring.take(3 * ALIGNMENT, "g") == (6 * ALIGNMENT, None)


def test_piece_larger_than_the_ring_is_refused() -> None:
    with pytest.raises(ValueError, match="a piece of 1,024 bytes from a ring of 512"):
        Ring[int](512).take(513, 0)


@given(
    size=st.integers(1, 12),
    wanted=st.lists(st.integers(0, 12 * ALIGNMENT), max_size=60),
    finished=st.lists(st.integers(0, 3), min_size=60, max_size=60),
)
def test_pieces_in_use_never_overlap(size: int, wanted: list[int], finished: list[int]) -> None:
    """Some pieces become free by themselves, in order; others when they are waited for."""
    ring: Ring[int] = Ring(size * ALIGNMENT)
    in_use: dict[int, tuple[int, int]] = {}
    for number, one in enumerate(wanted):
        if align(one) > ring.size:
            continue
        start, before = ring.take(one, number)
        assert start % ALIGNMENT == 0
        assert start + one <= ring.size
        if before is not None:
            for older in [ticket for ticket in in_use if ticket <= before]:
                del in_use[older]
        for other_start, other_end in in_use.values():
            assert start + one <= other_start or other_end <= start
        in_use[number] = (start, start + one)
        for ticket in sorted(in_use)[: finished[number]]:
            del in_use[ticket]
