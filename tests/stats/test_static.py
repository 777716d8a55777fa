"""Slots that do not move add up what CUDA graphs measure, replay after replay."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from hookline._errors import UnsupportedTensor

pytestmark = pytest.mark.gpu


def open_slots(count: int):
    """Make slots; their module needs Triton."""
    from hookline.stats.static import StaticSlots

    return StaticSlots("cuda", count)


def row_of(*parts: Tensor) -> list[float]:
    """Give the row of all parts together, by float64 operations of torch."""
    wide = torch.cat([part.double().flatten() for part in parts])
    finite = wide[wide.isfinite()]
    counts = [len(finite), wide.isnan().sum(), (wide == math.inf).sum(), (wide == -math.inf).sum()]
    numbers = [finite.min(), finite.max(), finite.mean(), (finite - finite.mean()).square().sum()]
    return [float(one) for one in (*counts, *numbers)]


def test_slots_merge_what_is_measured_into_them() -> None:
    slots = open_slots(3)
    parts = [
        torch.randn(5000, device="cuda") * 3 + 100,
        torch.randn(700_000, device="cuda") - 5,
        torch.randn(3, device="cuda").double(),
        torch.randn(90, 80, device="cuda")[:, 10:70],
        torch.randn(90, 80, device="cuda").t(),
        torch.randn(40, 1, 90, device="cuda").expand(40, 3, 90),
        torch.tensor([math.nan, math.inf, -math.inf, 1.0, 2.0], device="cuda"),
        torch.zeros(0, device="cuda"),
    ]
    for part in parts:
        slots.accumulate(part, slots.slot(1))
    taken = slots.take()
    rows = taken.wait().rows
    assert rows.shape == (3, 8)
    assert rows[1] == pytest.approx(row_of(*parts), rel=1e-12)
    nothing = [0, 0, 0, 0, math.inf, -math.inf, 0, 0]
    assert rows[[0, 2]].tolist() == [nothing] * 2
    assert taken.wait_visits().tolist() == [0, 8, 0]


def test_slots_are_empty_once_they_are_taken() -> None:
    slots = open_slots(2)
    x = torch.ones(1000, device="cuda")
    slots.accumulate(x, slots.slot(0))
    first = slots.take()
    slots.accumulate(2 * x, slots.slot(0))
    second = slots.take()
    third = slots.take()
    assert second.wait().rows[0].tolist() == [1000, 0, 0, 0, 2, 2, 2, 0]
    assert first.wait().rows[0].tolist() == [1000, 0, 0, 0, 1, 1, 1, 0]
    assert third.wait_visits().tolist() == [0, 0]


def test_equal_numbers_in_unlike_shares_have_no_spread() -> None:
    slots = open_slots(1)
    for count in (1000, 777, 3_000_000):
        x = torch.full((count,), 0.1, dtype=torch.float64, device="cuda")
        slots.accumulate(x, slots.slot(0))
    assert slots.take().wait().rows[0].tolist() == [3_001_777, 0, 0, 0, 0.1, 0.1, 0.1, 0]


def test_replays_add_up_without_waiting_and_recording_counts_nothing() -> None:
    slots = open_slots(6)
    x = torch.randn(300, 500, device="cuda")
    y, z = torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)

    def work() -> None:
        y.copy_(x * 2 + 1)
        z.copy_(y)
        for number, value in enumerate((y, z, y.t(), y[:, :256], y[:1].expand(7, 500))):
            slots.accumulate(value, slots.slot(number))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    slots.take().wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    assert slots.take().wait_visits().tolist() == [0] * 6

    seen = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            x.normal_()
            graph.replay()
            seen.append(y.clone())
        taken = slots.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert taken.wait_visits().tolist() == [5] * 5 + [0]
    rows = taken.wait().rows
    assert rows[0] == pytest.approx(row_of(*seen), rel=1e-10)
    assert rows[1] == pytest.approx(row_of(*(one.bfloat16() for one in seen)), rel=1e-6)
    assert rows[2] == pytest.approx(row_of(*seen), rel=1e-10)
    assert rows[3] == pytest.approx(row_of(*(one[:, :256] for one in seen)), rel=1e-10)
    assert rows[4] == pytest.approx(row_of(*(one[:1].expand(7, 500) for one in seen)), rel=1e-10)


def test_a_graph_of_a_dtype_that_was_warmed_can_be_recorded_at_once() -> None:
    slots = open_slots(1)
    x = torch.arange(100, device="cuda").to(torch.int16)
    slots.warm(torch.int16)
    assert slots.take().wait_visits().tolist() == [0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots.accumulate(x, slots.slot(0))
        slots.accumulate(x[1:], slots.slot(0))
    graph.replay()
    assert slots.take().wait().rows[0] == pytest.approx(row_of(x, x[1:]), rel=1e-12)


def test_the_same_replays_give_the_same_bits() -> None:
    slots = open_slots(1)
    x = torch.randn(4_000_000, device="cuda").bfloat16()
    rows = []
    for _ in range(3):
        for part in x.split(1_300_000):
            slots.accumulate(part, slots.slot(0))
        rows.append(slots.take().wait().rows)
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_another_thread_waits() -> None:
    slots, got = open_slots(1), []
    slots.accumulate(torch.ones(3, device="cuda"), slots.slot(0))
    taken = slots.take()
    thread = threading.Thread(target=lambda: got.append(taken.wait()))
    thread.start()
    thread.join(30)
    assert got[0].rows[0].tolist() == [3, 0, 0, 0, 1, 1, 1, 0]
    assert (len(got[0].sketched), len(got[0].counted), len(got[0].updated)) == (0, 0, 0)


def test_a_number_without_a_slot_and_a_sparse_tensor_are_refused() -> None:
    slots = open_slots(2)
    for number in (-1, 2):
        with pytest.raises(IndexError, match=f"There are 2 slots, and none has number {number}"):
            slots.slot(number)
    with pytest.raises(UnsupportedTensor, match=r"Measure `tensor.to_dense\(\)`"):
        slots.accumulate(torch.eye(3, device="cuda").to_sparse(), slots.slot(0))
    assert len(slots) == 2
