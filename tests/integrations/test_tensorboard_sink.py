"""The sink for TensorBoard: what it writes, and what it says where TensorBoard is missing."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.integrations.tensorboard import TensorBoard


class FakeWriter:
    """Stand in for torch's SummaryWriter and remember what it is told."""

    made: ClassVar[list[FakeWriter]] = []

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir
        self.written: list[tuple[str, float, int]] = []
        self.threads: set[str] = set()
        self.closed = 0
        FakeWriter.made.append(self)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert not self.closed
        self.threads.add(threading.current_thread().name)
        self.written.append((tag, value, step))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWriter]:
    """Put a stand-in for TensorBoard where it would be imported from; list the writers made."""
    fake: Any = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setattr(FakeWriter, "made", [])
    return FakeWriter.made


def train(model: nn.Module, steps: int, watched: hl.Watch | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        if watched is not None:
            watched.log(loss=loss)


def test_sink_writes_its_statistics_and_what_was_logged(writers: list[FakeWriter]) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    seen: list[Any] = []
    with hl.watch(model, to=[TensorBoard(Path("runs") / "tb"), seen.append]) as w:
        train(model, 3, w)
    (writer,) = writers
    assert writer.log_dir == str(Path("runs") / "tb")
    tags = {tag for tag, _, _ in writer.written}
    assert {"loss", "lr", "rms/0:output", "absmax/0:output.grad", "lost/0.weight:update"} <= tags
    assert {tag.partition("/")[0] for tag in tags} == {"loss", "lr", "rms", "absmax", "lost"}
    told = {(tag, step): value for tag, value, step in writer.written}
    expected = {
        (name, one.step): value
        for one in seen
        for name, value in one.values.items()
        if not name.startswith(("nan/", "inf/"))
    }
    assert told == expected
    assert {step for _, step in told} == {0, 1, 2}


def test_sink_writes_away_from_the_training_and_is_closed_once(writers: list[FakeWriter]) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with hl.watch(model, to=[TensorBoard("tb")]) as w:
        train(model, 1)
        w.flush()
        assert writers[0].written
        assert not writers[0].closed
    assert threading.current_thread().name not in writers[0].threads
    assert writers[0].closed == 1


def test_statistics_are_those_asked_for(writers: list[FakeWriter]) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with hl.watch(model, parameters=None, to=[TensorBoard("tb", stats=["mean", "nan"])]):
        train(model, 1)
    groups = {tag.partition("/")[0] for tag, _, _ in writers[0].written if "/" in tag}
    assert groups == {"mean", "nan"}


def test_one_statistic_may_be_a_plain_name(writers: list[FakeWriter]) -> None:
    assert TensorBoard("tb", stats="rms").stats == ("rms",)


def test_unknown_statistic_raises_before_a_writer_is_made(writers: list[FakeWriter]) -> None:
    with pytest.raises(ValueError, match=r"'rsm' is none; there are count, .*rms"):
        TensorBoard("tb", stats=("mean", "rsm"))
    assert writers == []


def test_missing_package_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError) as caught:
        TensorBoard(tmp_path / "tb")
    assert str(caught.value) == (
        'tensorboard is not installed; install it with: pip install "hookline[tensorboard]"'
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed"
)
def test_tensorboard_reads_what_the_watch_measured(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = nn.Sequential(nn.Linear(4, 2))
    with hl.watch(model, to=[TensorBoard(tmp_path)]) as w:
        train(model, 3, w)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert found.Tags()["histograms"] == []
    for name, series in {"rms/0:output": w.series("0", "rms"), "loss": w.scalar("loss")}.items():
        events = found.Scalars(name)
        assert [event.step for event in events] == series.steps.tolist()
        values = torch.tensor([event.value for event in events])
        torch.testing.assert_close(values, torch.tensor(series.values, dtype=torch.float32))
