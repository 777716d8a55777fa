"""Adding to a log leaves no trace on the tensor, the graph or the process, from any thread."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.stats import Extras
from hookline.stats.cpu import CpuLog

ALL = Extras.SKETCH | Extras.COUNTS


class NoFunctions(TorchFunctionMode):
    """A mode that sees every function and method of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"the mode saw {func}")


class NoOperations(TorchDispatchMode):
    """A mode that sees every operation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"the mode saw {func}")


def variants(device: torch.device) -> list[torch.Tensor]:
    """Give tensors that take each way through a log."""
    x = torch.randn(60, 40, device=device)
    return [x, x.t(), x[:, 3:30], x[:, ::2], x[:1].expand(9, 40), x.to(torch.float8_e5m2), x[0, 0]]


def test_adding_is_unseen_by_modes(implementation) -> None:
    tensors = variants(implementation.device)
    log = implementation.open()
    with NoFunctions():
        for x in tensors:
            log.add(x, ALL)
            log.add(x)
        log.add_update(tensors[0], tensors[0])
        taken = log.take()
        taken.wait()
    with NoOperations():
        for x in tensors:
            log.add(x, ALL)
            log.add(x)
        log.add_update(tensors[0], tensors[0])
        log.take().wait()


def test_adding_leaves_tensor_graph_and_random_numbers_alone(implementation) -> None:
    log = implementation.open()
    leaf = torch.randn(30, 40, device=implementation.device, requires_grad=True)
    result = (leaf * 2).t()
    states = [result._version, result.grad_fn, torch.get_rng_state().tolist(), result.is_leaf]
    before = result.detach().clone()
    for x in (result, leaf):
        log.add(x, ALL)
        log.add(x)
        log.add_update(x, x, x)
    assert [
        result._version,
        result.grad_fn,
        torch.get_rng_state().tolist(),
        result.is_leaf,
    ] == states
    assert torch.equal(result, before)
    result.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2))


def test_a_row_is_of_the_moment_it_was_added(implementation) -> None:
    log = implementation.open()
    x = torch.ones(5, device=implementation.device)
    log.add(x)
    x.mul_(7)
    log.add(x)
    assert log.take().wait().rows[:, 6].tolist() == [1, 7]


def test_a_log_keeps_no_tensor(implementation) -> None:
    log = implementation.open()
    gone = []
    for x in variants(implementation.device):
        copy = x.clone()
        gone.append(weakref.ref(copy))
        log.add(copy, ALL)
        log.add(copy)
    del copy, x
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_tensors_of_inference_are_measured(implementation, mode) -> None:
    with mode():
        x = torch.ones(4, 3, device=implementation.device)
        log = implementation.open()
        log.add(x, ALL)
        log.add_update(x, x)
    log.add(x.t(), ALL)
    assert log.take().wait().rows[:, 0].tolist() == [12, 12, 12]


def test_autocast_does_not_change_what_is_measured(implementation) -> None:
    x = torch.randn(500, device=implementation.device)
    log = implementation.open()
    log.add(x, ALL)
    with torch.autocast(implementation.device.type, dtype=torch.bfloat16):
        log.add(x, ALL)
    got = log.take().wait()
    assert got.rows[0].tolist() == got.rows[1].tolist()
    assert got.sketches[0].tolist() == got.sketches[1].tolist()


def test_threads_add_at_once_and_each_row_is_its_own(implementation) -> None:
    log = implementation.open()
    sizes = [3, 20_000, 700]
    numbers: dict[int, float] = {}

    def work(start: int) -> None:
        for i in range(start, start + 60):
            x = torch.full((sizes[i % 3],), float(i), device=implementation.device)
            numbers[log.add(x, Extras.SKETCH if i % 5 == 0 else 0)] = float(i)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 1000, 2000, 3000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = log.take().wait()
    assert sorted(numbers) == list(range(240))
    assert got.rows[:, 6].tolist() == [numbers[number] for number in range(240)]
    assert {numbers[number] % 5 for number in got.sketched.tolist()} == {0}


def test_taking_while_threads_add_loses_and_tears_nothing(implementation) -> None:
    log = implementation.open()
    is_done = threading.Event()
    added = []

    def work() -> None:
        for i in range(150):
            log.add(torch.full((30_000,), float(i), device=implementation.device))
            added.append(float(i))

    def run() -> None:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        is_done.set()

    runner = threading.Thread(target=run)
    runner.start()
    parts = []
    while not is_done.wait(0.001):
        parts.append(log.take().wait().rows)
    runner.join()
    rows = np.concatenate([*parts, log.take().wait().rows])
    assert sorted(rows[:, 6].tolist()) == sorted(added)
    assert (rows[:, 0] == 30_000).all()
    assert (rows[:, 4] == rows[:, 5]).all()


class InterruptedLock:
    """A lock after which Ctrl-C comes, once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_due = True

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
        if self._is_due:
            self._is_due = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("is_update", [False, True])
def test_a_measurement_that_is_interrupted_is_not_waited_for(is_update: bool) -> None:
    """An interrupt comes between any two calls; who takes the rows must not wait for ever."""
    log, large = CpuLog(), torch.ones(100_000)
    log.add(torch.ones(3))
    log._lock = InterruptedLock()
    with pytest.raises(KeyboardInterrupt):
        log.add_update(large, large) if is_update else log.add(large)
    taken, heard = log.take(), []
    waiting = threading.Thread(target=lambda: heard.append(taken.wait()), daemon=True)
    waiting.start()
    waiting.join(10)
    assert heard[0].rows[0, 0] == 3
