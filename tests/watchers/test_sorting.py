"""Rows in the order of their sites, also where they come in an order that was seen before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hookline.stats import Extras, Log, Measured, open_log
from hookline.stats.rows import derive
from hookline.watchers import sorting
from hookline.watchers.sorting import Event, SiteSorter


@pytest.fixture
def sorted_anew(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give a list that grows whenever events are sorted for want of an order that is known."""
    times: list[int] = []
    sort = sorting._sort_by_site

    def count(events: Sequence[Event], measured: dict[Log, Measured]) -> list[sorting.Block]:
        times.append(len(events))
        return sort(events, measured)

    monkeypatch.setattr(sorting, "_sort_by_site", count)
    return times


def measure(log: Log, sites: Sequence[int], extras: int = 0, *, turn: int = 0) -> list[Event]:
    """Measure a value of each site whose mean tells which it is, and when."""
    return [
        (site, log.add(torch.full((3,), float(site + 100 * turn)), extras), log) for site in sites
    ]


def sort(sorter: SiteSorter, events: Sequence[Event]) -> dict[int, float]:
    """Give the mean of each site, which are to come in order."""
    blocks = sorter.sort(events, {log: log.take().wait() for log in {log for *_, log in events}})
    (rows,) = [block for block in blocks if block.kind == "rows"]
    assert rows.sites.tolist() == sorted(rows.sites.tolist())
    means = derive(rows.values, "mean")
    return {int(site): float(mean) for site, mean in zip(rows.sites, means, strict=True)}


def test_orders_that_come_in_turn_are_all_known(sorted_anew: list[int]) -> None:
    sorter, log = SiteSorter(), open_log("cpu")
    orders = [[2, 0, 1], [0, 1, 2], [1, 2]]
    for turn in range(4):
        for order in orders:
            means = sort(sorter, measure(log, order, turn=turn))
            assert means == {site: site + 100 * turn for site in order}
    assert len(sorted_anew) == len(orders)


def test_orders_that_never_come_again_are_forgotten(sorted_anew: list[int]) -> None:
    sorter, log = SiteSorter(), open_log("cpu")
    for turn in range(2):
        for first in range(9):
            sort(sorter, measure(log, [first, 20, 10], turn=turn))
    assert len(sorter._known) < 9
    assert len(sorted_anew) == 18


def test_a_known_order_with_a_sketch_has_the_sketch_too(sorted_anew: list[int]) -> None:
    sorter, log = SiteSorter(), open_log("cpu")
    sort(sorter, measure(log, [1, 0]))
    events = measure(log, [1, 0], Extras.SKETCH)
    blocks = sorter.sort(events, {log: log.take().wait()})
    assert [block.kind for block in blocks] == ["rows", "sketch"]
    assert sort(sorter, measure(log, [1, 0], turn=1)) == {0: 100, 1: 101}
    assert len(sorted_anew) == 2


def test_a_site_that_comes_twice_is_merged_each_time(sorted_anew: list[int]) -> None:
    sorter, log = SiteSorter(), open_log("cpu")
    for turn in range(3):
        events = [*measure(log, [4, 5], turn=turn), *measure(log, [4], turn=turn + 1)]
        assert sort(sorter, events) == {4: 54 + 100 * turn, 5: 5 + 100 * turn}
    assert len(sorted_anew) == 3


def test_rows_of_two_logs_are_put_together_each_time(sorted_anew: list[int]) -> None:
    sorter, logs = SiteSorter(), [open_log("cpu"), open_log("cpu")]
    for turn in range(2):
        events = [*measure(logs[0], [1], turn=turn), *measure(logs[1], [0], turn=turn)]
        assert sort(sorter, events) == {0: 100 * turn, 1: 1 + 100 * turn}
    assert len(sorted_anew) == 2


def test_a_step_without_events_has_no_block() -> None:
    sorter = SiteSorter()
    assert sorter.sort([], {}) == []
    assert sorter.sort([], {}) == []
