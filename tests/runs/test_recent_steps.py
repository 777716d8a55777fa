"""The last steps in memory; what they share with a run on disk is tested with that."""

from __future__ import annotations

import itertools
import threading

import pytest
from made_runs import make_sites, make_step

from hookline.runs import RecentSteps


def test_only_the_last_steps_are_kept() -> None:
    recent = RecentSteps(3)
    recent.add_sites(make_sites())
    for step in range(10):
        recent.write(make_step(step))
    assert recent.limit == 3
    assert recent.steps.tolist() == [7, 8, 9]
    assert recent.series("layers.0.mlp", "mean").values.tolist() == [7, 8, 9]
    assert recent.scalar("loss").values[-1] == 0.1


def test_steps_that_went_back_are_superseded() -> None:
    recent = RecentSteps(10)
    recent.add_sites(make_sites())
    for step in (5, 6, 7, 6):
        recent.write(make_step(step))
    assert recent.steps.tolist() == [5, 6]
    assert len(recent.map("mean").steps) == 2


def test_nothing_yet_is_no_error() -> None:
    recent = RecentSteps()
    assert recent.steps.tolist() == []
    assert recent.scalars == ("time", "seconds")
    assert recent.map("rms").values.shape == (0, 0)
    recent.add_sites(make_sites())
    assert recent.series("layers.0.mlp", "rms").values.tolist() == []
    with pytest.raises(LookupError, match="no steps yet"):
        recent.table()


def test_ids_and_limit_are_checked() -> None:
    with pytest.raises(ValueError, match="limit=0 keeps nothing"):
        RecentSteps(0)
    with pytest.raises(ValueError, match="the next id is 0"):
        RecentSteps().add_sites(make_sites()[1:])


def test_reading_while_another_thread_writes() -> None:
    recent = RecentSteps(20)
    recent.add_sites(make_sites())
    recent.write(make_step(0))

    is_read = threading.Event()

    def write() -> None:
        for step in itertools.count(1):
            recent.write(make_step(step))
            if is_read.is_set():
                return

    thread = threading.Thread(target=write)
    thread.start()
    try:
        readings = 0
        while readings < 50 or recent.steps[-1] < 50:  # both threads had their turns
            assert thread.is_alive()
            readings += 1
            steps, values = recent.series("layers.0.mlp", "mean")
            kept = values == values  # a step that fell out of the ring meanwhile is not measured
            assert values[kept].tolist() == steps[kept].tolist()
    finally:
        is_read.set()
        thread.join()
