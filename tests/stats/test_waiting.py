"""Waiting for a device does not get in the way of the threads that use it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hookline.stats import open_log
from hookline.stats.waiting import wait_for


class Late:
    """An event that is passed when somebody has asked often enough."""

    def __init__(self, asks: int) -> None:
        self.asks = asks

    def query(self) -> bool:
        self.asks -= 1
        return self.asks < 0


def test_it_asks_until_the_event_was_passed() -> None:
    event = Late(5)
    began = time.perf_counter()
    wait_for(event)
    assert event.asks == -1
    assert time.perf_counter() - began > 2e-3  # slept between


def test_it_asks_more_and_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    wait_for(Late(12))
    assert len(pauses) == 12
    assert pauses == sorted(pauses)
    assert sum(pauses[:8]) < 0.06  # 50 ms take nine looks
    assert max(pauses) < 0.02  # and whoever waits for the end of it does not wait much longer


@pytest.mark.gpu
def test_who_waits_does_not_end_a_recording_elsewhere() -> None:
    log = open_log(torch.device("cuda"))
    values = torch.randn(1000, device="cuda")
    square, graph, side = torch.empty_like(values), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    log.add(values)
    log.take().wait()  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(2**30)  # about half a second
    log.add(values)
    taken = log.take()
    waiting = threading.Thread(target=taken.wait)
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="global")
        waiting.start()
        time.sleep(0.05)
        torch.mul(values, values, out=square)
        graph.capture_end()
    assert waiting.is_alive()  # so it has asked while the graph was recorded
    waiting.join()
    graph.replay()
    assert torch.equal(square, values * values)
