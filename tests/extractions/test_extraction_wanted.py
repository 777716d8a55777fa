"""Which ids are wanted: ranges, shares of ranks, and what is taken away."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.extractions.wanted import Wanted

SIZE = 60
ranges = st.lists(
    st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda pair: (min(pair), max(pair))),
    max_size=6,
)
some_ids = st.lists(st.integers(0, SIZE - 1), max_size=30)


def ids_of(pairs: list[tuple[int, int]]) -> set[int]:
    """Expand ranges the plain way."""
    return {number for first, last in pairs for number in range(first, last)}


def assert_holds(wanted: Wanted, expected: set[int]) -> None:
    """Check a set by all the ways to look at it."""
    assert list(wanted.ids(SIZE)) == sorted(expected)
    assert wanted.count(SIZE) == len(expected)
    assert {number for number in range(-1, SIZE) if number in wanted} == expected
    assert wanted.within(10, 31).tolist() == [one for one in sorted(expected) if 10 <= one < 31]


@given(ranges)
def test_ranges_hold_what_lies_in_them(pairs: list[tuple[int, int]]) -> None:
    wanted = Wanted.of_ranges(pairs)
    assert_holds(wanted, ids_of(pairs))
    assert (wanted.starts[1:] > wanted.ends[:-1]).all()
    assert (wanted.starts < wanted.ends).all()


@given(some_ids)
def test_ids_hold_themselves(ids: list[int]) -> None:
    assert_holds(Wanted.of_ids(np.array(ids, dtype=np.int64)), set(ids))


@given(ranges, some_ids, ranges)
def test_without_takes_away_ids_and_sets(
    pairs: list[tuple[int, int]], ids: list[int], others: list[tuple[int, int]]
) -> None:
    wanted = Wanted.of_ranges(pairs)
    left = wanted.without(np.array(ids, dtype=np.int64))
    assert_holds(left, ids_of(pairs) - set(ids))
    assert_holds(left.without(Wanted.of_ranges(others)), ids_of(pairs) - set(ids) - ids_of(others))
    assert_holds(wanted, ids_of(pairs))


@given(ranges, some_ids, st.integers(1, 5), st.integers(1, 9))
def test_shares_of_all_ranks_hold_each_id_once(
    pairs: list[tuple[int, int]], ids: list[int], world: int, block: int
) -> None:
    wanted = Wanted.of_ranges(pairs).without(np.array(ids, dtype=np.int64))
    expected = ids_of(pairs) - set(ids)
    found: list[int] = []
    for rank in range(world):
        share = wanted.share(rank, world, block=block)
        assert_holds(share, {one for one in expected if (one // block) % world == rank})
        found += share.ids(SIZE)
    assert sorted(found) == sorted(expected)


@given(ranges, ranges, st.integers(1, 4), st.integers(1, 4))
def test_share_can_be_taken_away_and_shared_again(
    pairs: list[tuple[int, int]], others: list[tuple[int, int]], world: int, again: int
) -> None:
    done = Wanted.of_ranges(others).share(0, world, block=3)
    left = Wanted.of_ranges(pairs).without(done)
    gone = {one for one in ids_of(others) if (one // 3) % world == 0}
    assert_holds(left, ids_of(pairs) - gone)
    last = again - 1
    expected = {one for one in ids_of(pairs) - gone if (one // 2) % again == last and one % 2 == 1}
    assert_holds(left.share(last, again, block=2).share(1, 2, block=1), expected)


def test_everything_has_no_end() -> None:
    wanted = Wanted.everything()
    assert 10**15 in wanted
    assert -1 not in wanted
    assert "1" not in wanted
    assert wanted.count(None) is None
    assert wanted.count(7) == 7
    left = wanted.without(np.arange(3)).share(1, 2, block=2)
    assert list(islice(left.ids(None), 5)) == [3, 6, 7, 10, 11]


def test_ranges_end_where_it_is_said() -> None:
    wanted = Wanted.of_ranges([(8, None), (2, 4)], end=10)
    assert list(wanted.ids(None)) == [2, 3, 8, 9]
    assert wanted.count(None) == 4
    assert wanted.end == 10
    assert Wanted.of_ranges([]).end == 0
    assert list(Wanted.of_ranges([]).ids(None)) == []


def test_ranges_that_touch_or_overlap_are_one() -> None:
    wanted = Wanted.of_ranges([(3, 5), (0, 3), (8, 9), (4, 6), (7, 7)])
    assert wanted.starts.tolist() == [0, 8]
    assert wanted.ends.tolist() == [6, 9]


def test_share_of_a_share_holds_what_is_in_both() -> None:
    twice = Wanted.everything().share(0, 2, block=1).share(0, 2, block=1)
    assert_holds(twice, set(range(0, SIZE, 2)))
    assert_holds(
        Wanted.everything().share(1, 3, block=2).share(0, 2, block=4),
        {number for number in range(SIZE) if (number // 2) % 3 == 1 and (number // 4) % 2 == 0},
    )


def test_ids_cross_the_stretches_they_are_made_in() -> None:
    wanted = Wanted.of_ranges([(5, 70_000), (10_000_000, 10_000_003), (2**40, 2**40 + 1)])
    ids = list(wanted.ids(None))
    assert ids == [*range(5, 70_000), *range(10_000_000, 10_000_003), 2**40]


def test_hundred_million_ids_are_quick_and_small() -> None:
    many = 100_000_000
    done = np.arange(0, many, 500, dtype=np.int64)
    tracemalloc.start()
    began = time.perf_counter()
    wanted = Wanted.everything().without(done)
    shares = [wanted.share(rank, 8) for rank in range(8)]
    assert sum(share.count(many) or 0 for share in shares) == many - len(done)
    assert 123_456_789 % 500 != 0
    assert sum(123_456_789 in share for share in shares) == 1
    assert not any(50_000_000 in share for share in shares)
    first = next(shares[3].ids(many))
    took = time.perf_counter() - began
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert first == 3 * 1024
    assert took < 3
    assert held < 50 * 2**20


def test_set_survives_pickling() -> None:
    wanted = Wanted.of_ranges([(2, 9)]).share(1, 2, block=2)
    assert (
        list(pickle.loads(pickle.dumps(wanted)).ids(None)) == list(wanted.ids(None)) == [2, 3, 6, 7]
    )


@pytest.mark.parametrize("pair", [(-1, 3), (4, 2)])
def test_range_that_is_none_is_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is no range of ids"):
        Wanted.of_ranges([pair])


def test_share_of_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Wanted.everything().share(2, 2)
    with pytest.raises(ValueError, match="blocks of 0"):
        Wanted.everything().share(0, 2, block=0)
    with pytest.raises(ValueError, match="-3 is no id"):
        Wanted.everything().without(np.array([4, -3]))
