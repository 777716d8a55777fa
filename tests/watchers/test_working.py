"""The thread that takes steps away: jobs gather for a moment, unless somebody waits for them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import hookline as hl
from hookline.watchers import working
from hookline.watchers.working import Worker

LONG = 60.0


@pytest.fixture
def failures() -> list[BaseException]:
    """Give a list of what has failed in a worker."""
    return []


@pytest.fixture
def patient(failures: list[BaseException]) -> Iterator[Worker]:
    """Give a worker that lets jobs gather for longer than any test takes."""
    worker = Worker("patient", failures.append, gathering=LONG)
    yield worker
    worker.stop()


def test_jobs_gather_and_are_done_in_order_when_somebody_waits(patient: Worker) -> None:
    done: list[int] = []
    for number in range(5):
        patient.put(lambda number=number: done.append(number))
    time.sleep(0.05)
    assert done == []
    assert patient.flush()
    assert done == [0, 1, 2, 3, 4]
    patient.put(lambda: done.append(5))
    time.sleep(0.05)
    assert len(done) == 5  # the next ones gather again
    patient.stop()
    assert done[-1] == 5


def test_a_moment_is_enough(failures: list[BaseException]) -> None:
    worker = Worker("quick", failures.append, gathering=0.05)
    is_done = threading.Event()
    began = time.monotonic()
    worker.put(is_done.set)
    assert is_done.wait(LONG)
    assert time.monotonic() - began >= 0.05
    worker.stop()


def test_many_jobs_do_not_wait_for_more(patient: Worker) -> None:
    is_done = threading.Event()
    patient.put(is_done.set)
    for _ in itertools.repeat(None, working._ENOUGH):
        patient.put(lambda: None)
    assert is_done.wait(LONG / 2)


def test_a_job_that_fails_ends_what_waits_with_it(
    patient: Worker, failures: list[BaseException]
) -> None:
    done: list[int] = []
    patient.put(lambda: done.append(1))
    patient.put(lambda: done.append(1 // 0))
    patient.put(lambda: done.append(3))
    assert not patient.flush()
    assert done == [1]
    assert [type(one) for one in failures] == [ZeroDivisionError]


@pytest.mark.parametrize(("on_finding", "gathers"), [("continue", True), ("raise", False)])
def test_steps_are_judged_at_once_where_findings_are_acted_on(
    on_finding: str, gathers: bool, tmp_path: Path
) -> None:
    with hl.watch(nn.Linear(2, 2), tmp_path / "run", on_finding=on_finding) as watched:
        assert (watched._delivery._worker._gathering > 0) == gathers
