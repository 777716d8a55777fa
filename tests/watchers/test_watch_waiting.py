"""Values that are measured together, and those that must not wait for others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline.runs import SiteFacts
from hookline.stats import TOGETHER, UNLIKE, Extras
from hookline.stats.cpu import CpuLog
from hookline.stats.likeness import Likeness
from hookline.stats.rows import derive
from hookline.watchers import recording, waiting
from hookline.watchers.recording import Recorder
from hookline.watchers.sorting import SiteSorter
from hookline.watchers.units import UnitCounter


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have values on the CPU wait, as those on a GPU do: on one stream."""
    monkeypatch.setattr(waiting, "raw_cuda_stream", lambda device: 0)
    monkeypatch.setattr(waiting, "current_stream", lambda device: None)


def make_recorder(sites: int) -> Recorder:
    """Make a recorder that knows some sites and measures."""
    recorder = Recorder()
    for number in range(sites):
        recorder.new_site(describe, torch.zeros(number))
    recorder.is_on = True
    return recorder


def open_lane(recorder: Recorder, sites: int) -> waiting.Lane:
    """Have a step meet some sites, and a value of the first one wait in the next; give its lane."""
    for site in range(sites):
        recorder.measure_now(site, torch.ones(1))
    recorder.end_step(0)
    recorder.queue.take(0, torch.ones(1))
    return next(iter(recorder.queue._lanes.values()))


def describe(number: int, value: Tensor) -> SiteFacts:
    return SiteFacts(number, f"{number}:output", "value", str(number), "Linear")


def read_means(recorder: Recorder) -> dict[int, float]:
    """End the step and give the mean of each site."""
    record = recorder.end_step(0).arrive(SiteSorter(), UnitCounter())
    means = {}
    for block in record.blocks:
        for site, mean in zip(block.sites, derive(block.values, "mean"), strict=True):
            means[int(site)] = float(mean)
    return means


def test_values_measured_together_go_to_their_sites() -> None:
    recorder = make_recorder(4)
    shared = torch.full((5,), 2.0)
    values = [(0, torch.ones(3)), (1, shared), (2, shared), (3, torch.zeros(2))]
    rows = [one[0] for one in recorder.measure_together(values) if one is not None]
    assert rows == [0, 1, 1, 2]  # a value that comes twice in a row is read once
    assert read_means(recorder) == {0: 1.0, 1: 2.0, 2: 2.0, 3: 0.0}


def test_one_value_that_cannot_be_measured_leaves_the_others() -> None:
    recorder = make_recorder(2)
    values = [(0, torch.ones(3, device="meta")), (1, torch.ones(3))]
    assert recorder.measure_together(values)[0] is None
    assert read_means(recorder) == {1: 1.0}
    assert "meta" in recorder.unmeasured["0:output"]


@pytest.mark.usefixtures("streams")
def test_a_value_that_was_changed_while_it_waited_is_left_out_and_waits_no_more() -> None:
    recorder = make_recorder(2)
    queue, changed, kept = recorder.queue, torch.ones(3), torch.ones(3)
    queue.has_learned = True
    assert queue.take(0, changed)
    assert queue.take(1, kept)
    assert queue.length == 2
    changed.mul_(5)
    queue.settle()
    assert read_means(recorder) == {1: 1.0}
    assert queue.hasty == {0}


def test_the_first_step_finds_values_that_are_changed_soon() -> None:
    recorder = make_recorder(3)
    first, second = torch.ones(3), torch.ones(3)
    recorder.measure_now(0, first)
    recorder.measure_now(1, first)  # a parent that returns the same tensor
    first.mul_(5)
    recorder.measure_now(2, second)
    assert recorder.queue.hasty == {0, 1}
    assert not recorder.queue.has_learned
    assert read_means(recorder) == {0: 1.0, 1: 1.0, 2: 1.0}
    assert recorder.queue.has_learned


@pytest.mark.usefixtures("streams")
def test_values_of_two_streams_wait_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make_recorder(4)
    queue, went = recorder.queue, []
    queue.has_learned = True
    for stream in (7, 8):
        monkeypatch.setattr(waiting, "raw_cuda_stream", lambda device, now=stream: now)
        monkeypatch.setattr(waiting, "current_stream", lambda device, now=stream: now)
        queue.take(stream - 7, torch.full((2,), float(stream)))

    def use(stream: int) -> contextlib.nullcontext[None]:
        went.append(stream)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "stream", use)
    assert read_means(recorder) == {0: 7.0, 1: 8.0}
    assert went == [7]  # the other is where work goes now


@pytest.mark.usefixtures("streams")
def test_gradients_wait_in_lists_until_the_first_of_their_group() -> None:
    sites = range(TOGETHER + 1)
    recorder = make_recorder(len(sites))
    queue, lane = recorder.queue, open_lane(recorder, len(sites))
    hooks = [queue.make_box(lane, site, 2) for site in sites]
    lengths = []
    for number, hook in reversed(list(enumerate(hooks))):
        assert hook is not None
        hook(torch.full((2,), float(number)))
        lengths.append(queue.length)
    assert lengths == [*range(1, TOGETHER + 1), 1]  # the one that waits is no gradient
    means = {number: float(number) for number in sites} | {0: 1 / 3}
    assert read_means(recorder) == pytest.approx(means)
    assert queue.make_box(lane, TOGETHER + 2, 2) is None  # not met while it learned


@pytest.mark.usefixtures("streams")
def test_no_more_waits_than_is_worth_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MOST_HELD", 100)
    recorder = make_recorder(8)
    queue, lengths = recorder.queue, []
    queue.has_learned = True
    for site, size in enumerate([40, 40, 40, 90, 60, 60, 1, 1]):
        queue.take(site, torch.full((size,), float(site)))
        lengths.append(queue.length)
    assert lengths == [1, 2, 3, 1, 2, 1, 2, 3]
    assert read_means(recorder) == {site: float(site) for site in range(8)}


@pytest.mark.usefixtures("streams")
def test_gradients_that_are_large_together_wait_in_smaller_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "MOST_HELD", 100)
    recorder = make_recorder(5)
    queue, lane = recorder.queue, open_lane(recorder, 5)
    for site, size in enumerate([40, 40, 30, 70, 1]):
        queue.make_box(lane, site, size)
    assert [group.sites for group in lane.groups] == [(0, 1), (2, 3), (4,)]


def test_the_first_step_holds_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MOST_HELD", 100)
    recorder = make_recorder(5)
    for site in range(5):
        recorder.measure_now(site, torch.ones(60))
    assert [site for site, _, _ in recorder.queue._latest] == [2, 3, 4]
    for _ in range(3 * TOGETHER):
        recorder.measure_now(0, torch.ones(1))
    assert len(recorder.queue._latest) == 2 * TOGETHER


@pytest.mark.usefixtures("streams")
def test_threads_on_one_stream_add_their_sites_one_after_the_other() -> None:
    recorder = make_recorder(2)
    queue, lane = recorder.queue, open_lane(recorder, 2)
    other = threading.Thread(target=queue.make_box, args=(lane, 1, 1))
    with lane.lock:  # as if this one were in the middle of it
        other.start()
        other.join(0.05)
        assert other.is_alive()
        assert not lane.groups
    other.join()
    assert [group.sites for group in lane.groups] == [(1,)]


@pytest.mark.usefixtures("streams")
def test_what_comes_after_the_end_is_let_go() -> None:
    recorder = make_recorder(2)
    queue, lane = recorder.queue, open_lane(recorder, 2)
    last, first = (queue.make_box(lane, site, 1) for site in range(2))
    assert first is not None
    assert last is not None
    queue.close()
    first(torch.ones(1))
    last(torch.ones(1))
    assert not any(lane.boxes)
    for number in range(3):  # a part of the graph is gone through again and again
        first(torch.full((1,), float(number)))
    queue.settle()
    assert not any(lane.boxes)
    assert read_means(recorder) == {0: 1.0}
    del lane, last
    first(torch.ones(1))
    queue.settle()
    assert not first.__self__  # its graph is still there when that of the others is gone
    del first
    queue.settle()
    assert not queue._closed  # with the graph all is gone


@pytest.mark.usefixtures("streams")
def test_a_version_that_was_never_so_high_has_the_next_step_look_at_every_value() -> None:
    recorder = make_recorder(3)
    queue, lane = recorder.queue, open_lane(recorder, 3)
    hooks = [queue.make_box(lane, site, 1) for site in range(3)]
    steady = []
    for step in range(7):
        recorder.start_step(Extras(0), is_on=True)
        steady.append(recorder.is_steady)
        for site in reversed(range(3)):
            grad, hook = torch.ones(2), hooks[site]
            if (site, step) in ((2, 0), (2, 6), (1, 4)):  # at a site where it was not, once
                grad.add_(0)
            assert hook is not None
            hook(grad)
        queue.settle()
    assert steady == [True, False, True, False, True, False, True]  # else the sixth were, too


class RepeatingLog(CpuLog):
    """A log that knows tensors that come together again, as that of a GPU does."""

    repeated = 0
    """How often it met some again."""
    known = 0
    """How often it was asked to know some."""

    def repeat(self, tensors: Sequence[Tensor]) -> Any:
        RepeatingLog.known += 1
        return Again(self, tensors)


class Again:
    """Measure tensors one by one if they are like those."""

    def __init__(self, log: RepeatingLog, tensors: Sequence[Tensor]) -> None:
        self.likeness, self.log = Likeness(tensors), log
        self.offsets = list(range(len(tensors)))

    def __call__(self, tensors: Sequence[Tensor]) -> int:
        if not self.is_like(tensors):
            return UNLIKE
        RepeatingLog.repeated += 1
        first, *_ = [self.log.add(one) for one in tensors]
        return first

    def is_like(self, tensors: Sequence[Tensor]) -> bool:
        return self.likeness.holds(tensors)


@pytest.fixture
def repeating(monkeypatch: pytest.MonkeyPatch) -> type[RepeatingLog]:
    """Have recorders measure with a log that knows what comes again."""
    monkeypatch.setattr(recording, "open_log", lambda device: RepeatingLog())
    monkeypatch.setattr(RepeatingLog, "repeated", 0)
    monkeypatch.setattr(RepeatingLog, "known", 0)
    return RepeatingLog


def test_values_that_come_again_are_measured_as_before(repeating: type[RepeatingLog]) -> None:
    recorder = make_recorder(3)
    for step in range(4):
        for turn in range(2):  # the second time the rows have other numbers
            number = float(10 * step + turn)
            recorder.measure_waiting((0, 1), [torch.full((3,), number), torch.zeros(2)])
        recorder.measure_waiting((2,), [torch.full((4,), number)])
        means = {0: 10 * step + 0.5, 1: 0.0, 2: number}
        assert read_means(recorder) == pytest.approx(means)
        recorder.is_on = True
    assert (repeating.known, repeating.repeated) == (2, 8)


def test_values_that_came_together_by_chance_are_not_known(
    repeating: type[RepeatingLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_MOST_COMPANIONS", 4)
    recorder = make_recorder(40)
    for site in range(0, 40, 2):
        for sites in ((0, 1), (site, 39)):
            recorder.measure_waiting(sites, [torch.ones(2), torch.ones(3)])
    assert (repeating.known, repeating.repeated) == (1, 18)  # those that came by chance made room
    assert read_means(recorder) == dict.fromkeys((*range(0, 40, 2), 1, 39), 1.0)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_values_wait_with_others(repeating: type[RepeatingLog], place: int) -> None:
    recorder = make_recorder(3)
    for turn in range(8):
        values = [torch.ones(2), torch.ones(3), torch.ones(4)]
        if turn % 2:
            values[place] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        recorder.measure_waiting((0, 1, 2), values)
    assert read_means(recorder) == {0: 1.0, 1: 1.0, 2: 1.0}
    assert (repeating.known, repeating.repeated) == (1, 2)


def test_threads_that_come_first_share_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(2, timeout=20)
    opened: list[CpuLog] = []

    def open_log(device: torch.device) -> CpuLog:
        log = CpuLog()
        opened.append(log)
        time.sleep(0.05)
        return log

    monkeypatch.setattr(recording, "open_log", open_log)
    recorder = make_recorder(2)

    def measure(site: int) -> None:
        barrier.wait()
        recorder.measure_now(site, torch.full((2,), float(site)))

    threads = [threading.Thread(target=measure, args=(site,)) for site in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1
    assert read_means(recorder) == {0: 0.0, 1: 1.0}


def measure_sizes(recorder: Recorder, sizes: Sequence[int]) -> None:
    """Measure values of two sites together, in these sizes one after the other."""
    for size in sizes:
        recorder.measure_waiting((0, 1), [torch.ones(size), torch.ones(2, size)])


def test_values_whose_sizes_take_turns_are_all_known(repeating: type[RepeatingLog]) -> None:
    recorder = make_recorder(2)
    measure_sizes(recorder, [3, 4, 5, 6] * 5)
    assert (repeating.known, repeating.repeated) == (4, 15)
    assert read_means(recorder) == {0: 1.0, 1: 1.0}


def test_values_of_many_sizes_are_known_now_and_then(repeating: type[RepeatingLog]) -> None:
    recorder = make_recorder(2)
    measure_sizes(recorder, range(1, 51))
    assert 16 < repeating.known < 20
    assert repeating.repeated == 0
    measure_sizes(recorder, range(51, 500))
    known = repeating.known
    assert known < 30
    measure_sizes(recorder, [777] * 80)
    assert repeating.known == known + 1
    assert repeating.repeated >= 15
    assert read_means(recorder) == {0: 1.0, 1: 1.0}


def test_values_that_cannot_be_repeated_are_not_asked_about_each_time(
    repeating: type[RepeatingLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(repeating, "repeat", lambda self, tensors: asked.append(len(tensors)))
    recorder = make_recorder(2)
    measure_sizes(recorder, [3] * 400)
    assert 16 < len(asked) < 24
    assert read_means(recorder) == {0: 1.0, 1: 1.0}


def test_where_autograd_made_no_gradient_the_others_are_measured(
    repeating: type[RepeatingLog],
) -> None:
    recorder = make_recorder(2)
    recorder.measure_waiting((0, 1), [None, torch.ones(2)])
    assert not repeating.known
    recorder.measure_waiting((0, 1), [torch.ones(2), torch.ones(2)])
    recorder.measure_waiting((0, 1), [torch.full((2,), 4.0), None])
    assert read_means(recorder) == {0: 2.5, 1: 1.0}
    assert repeating.known == 1


def test_a_group_gives_up_what_waits_of_every_site() -> None:
    group = waiting.Group()
    boxes = [group.add(site, 1) for site in (5, 6, 7)]
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    for box, grad in zip(boxes, (one, None, three), strict=True):
        box.append(grad)
    sites, grads = group.empty()
    assert sites == (5, 6, 7)
    assert grads[0] is one
    assert grads[1] is None
    assert grads[2] is three
    assert group.empty() == ((), [])
    boxes[0] += [one, two]  # a module that ran twice
    boxes[2].append(three)  # and one that did not
    sites, grads = group.empty()
    assert sites == (5, 5, 7)
    assert [len(one) for one in grads if one is not None] == [2, 1, 3]
    assert not any(boxes)


@pytest.mark.parametrize("every", [1, 2, 10, 16])
def test_one_watched_step_of_sixteen_is_looked_at(every: int) -> None:
    recorder = make_recorder(1)
    looked: list[int] = []
    for step in range(100 * every):
        recorder.start_step(Extras(0), is_on=step % every == 0)
        if recorder.is_on and not recorder.is_steady:
            looked.append(step // every + 1)
    assert looked == [2, 4, 8, 16, 32, 48, 64, 80, 96]


def test_steps_in_which_more_is_measured_do_not_count_as_looked_at() -> None:
    recorder = make_recorder(1)
    looked = []
    for step in range(1, 65):
        recorder.start_step(Extras.SKETCH if step % 16 == 0 else Extras(0), is_on=True)
        looked.append(recorder.extras == 0 and not recorder.is_steady)
    assert sum(looked) == 3 + 3
