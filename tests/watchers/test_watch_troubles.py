"""What goes wrong around a watch ends with a message, and never the training."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Net, is_clean
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import optimizer as torch_optimizer
from trainings import assert_same, batches, finish, plain_loop

import hookline as hl
from hookline.runs import RunWriter
from hookline.views import read_report

OWN_SCALER_STEP = GradScaler.step


def is_torch_as_before() -> bool:
    """Tell whether nothing of hookline is left in torch."""
    return (
        not torch_optimizer._global_optimizer_pre_hooks
        and not torch_optimizer._global_optimizer_post_hooks
        and GradScaler.step is OWN_SCALER_STEP
    )


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return plain_loop(5, 3)(model, optimizer)


def assert_trained(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Any) -> None:
    """Compare a training with a plain one from the same start."""
    ended = finish(losses, model, optimizer)
    model, optimizer = make()
    assert_same(finish(train(model, optimizer), model, optimizer), ended)


def test_closing_leaves_everything_as_before(tmp_path: Path) -> None:
    model, optimizer = make()
    before = {name: dict(vars(one)) for name, one in model.named_modules()}
    with hl.watch(model, tmp_path / "run") as watched:
        assert not is_torch_as_before()
        assert len(hl.inventory(model))
        train(model, optimizer)
    assert is_torch_as_before()
    assert not len(hl.inventory(model))
    assert is_clean(model)
    assert {name: dict(vars(one)) for name, one in model.named_modules()} == before
    watched.close()
    with pytest.raises(hl.SessionError, match="this watch is closed"):
        watched.log(loss=1.0)


def test_torch_is_as_before_once_the_last_of_two_watches_is_closed() -> None:
    model, optimizer = make()
    first, second = hl.watch(model), hl.watch(model, sites="fc1")
    train(model, optimizer)
    first.close()
    train(model, optimizer)
    assert not is_torch_as_before()
    second.close()
    assert is_torch_as_before()
    assert is_clean(model)
    assert len(first.series("fc1").steps) == 4
    assert len(second.series("fc1").steps) == 8


def test_an_error_in_the_loop_keeps_the_step_that_it_broke_off(tmp_path: Path) -> None:
    model, optimizer = make()

    def break_off() -> None:
        with hl.watch(model, tmp_path / "run"):
            train(model, optimizer)
            model(torch.randn(5, 3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    run = hl.open_run(tmp_path / "run")
    assert run.status == "failed"
    assert run.series("fc1", "count").values.tolist() == [20.0] * 5
    assert np.isnan(run.series("fc1:output.grad", "count").values[4])
    assert run.scalar("partial").values.tolist()[4] == 1
    assert is_torch_as_before()


def test_an_error_inside_a_forward_is_the_users_own() -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 1:
                raise ValueError("a row alone")
            return super().forward(x)

    model = Fails()
    with hl.watch(model) as watched:
        model(torch.randn(5, 3)).sum().backward()
        watched.step()
        with pytest.raises(ValueError, match="a row alone"):
            model(torch.randn(1, 3))
        model(torch.randn(5, 3)).sum().backward()
        watched.step()
    assert watched.series("fc1", "count").values.tolist() == [20.0, 20.0]


def fail_from_step_1(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let writing fail after the first step."""
    written = RunWriter.write

    def fail(self: RunWriter, step: Any) -> None:
        if step.step >= 1:
            raise error
        written(self, step)

    monkeypatch.setattr(RunWriter, "write", fail)


def test_a_disk_that_fails_leaves_the_judging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_from_step_1(monkeypatch, hl.RunWriteError("the disk is gone"))
    model, optimizer = make()
    watched = hl.watch(model, tmp_path / "run", on_finding="dump")

    def train_on() -> None:
        for number, batch in enumerate(batches(5, 3)):
            optimizer.zero_grad()
            (model(batch).square().mean() * (math.nan if number == 3 else 1)).backward()
            optimizer.step()
        watched.close()

    with pytest.warns(hl.HooklineWarning, match="the disk is gone") as warned:
        train_on()
    assert len(warned) == 1
    assert (watched.failure, watched.gap) == (None, "")
    assert "step 3" in watched.verdict
    assert [one.step for one in watched.findings if one.severity == "error"][:1] == [3]
    (note,) = [one for one in watched.notes if "the disk is gone" in one]
    assert note.startswith("nothing is kept after step 0, steps are judged all the same.")
    run = hl.open_run(tmp_path / "run")
    assert run.steps.tolist() == [0]
    assert run.status == "failed"
    assert note in run.document("notes")["notes"]


def test_a_write_that_fails_otherwise_ends_the_watch_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = MemoryError("no room")
    fail_from_step_1(monkeypatch, error)
    model, optimizer = make()
    watched = hl.watch(model, tmp_path / "run")
    losses = []

    def train_on() -> None:
        for batch in batches(5, 3):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
            watched.log(loss=loss)
            watched.flush()

    with pytest.warns(hl.HooklineWarning, match="the watch has stopped") as warned:
        train_on()
    assert len(warned) == 1
    assert str(error) in str(warned[0].message)
    assert is_clean(model)
    assert is_torch_as_before()
    assert_trained(model, optimizer, losses)
    watched.step()
    with watched.pause():
        pass
    watched.close()
    run = hl.open_run(tmp_path / "run")
    assert run.steps.tolist() == [0]
    assert run.status == "failed"
    gap = "The watch stopped at step 0: nothing after that was judged."
    assert watched.verdict.startswith(gap)
    assert run.document("notes")["gap"] == gap
    assert read_report(run).verdict.startswith(gap)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_ends_the_watch_and_not_the_training(tmp_path: Path) -> None:
    model, optimizer = make()
    tmp_path.chmod(0o500)
    try:
        with pytest.warns(hl.HooklineWarning, match="nothing is watched, and the training goes on"):
            watched = hl.watch(model, tmp_path / "run")
    finally:
        tmp_path.chmod(0o700)
    assert_trained(model, optimizer, train(model, optimizer))
    watched.close()


def test_a_folder_that_cannot_be_made_ends_the_watch_and_not_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model, optimizer = make()
    with pytest.warns(hl.HooklineWarning, match="nothing is watched, and the training goes on"):
        watched = hl.watch(model, tmp_path / "file" / "run")
    assert is_clean(model)
    assert is_torch_as_before()
    with watched:
        losses = train(model, optimizer)
        watched.log(loss=losses[0])
        watched.step()
        with watched.pause():
            pass
        watched.flush()
    assert_trained(model, optimizer, losses)


def test_a_sink_that_raises_gets_no_more_steps(tmp_path: Path) -> None:
    model, optimizer = make()
    heard: list[int] = []

    def breaks(scalars: Any) -> None:
        heard.append(scalars.step)
        raise OSError("no such server")

    kept: list[Any] = []
    losses: list[Tensor] = []

    def train_watched() -> hl.Watch:
        with hl.watch(model, tmp_path / "run", to=[breaks, kept.append]) as watched:
            losses.extend(train(model, optimizer))
            watched.log(loss=2.5)
        return watched

    with pytest.warns(hl.HooklineWarning, match="breaks` gets no more steps: OSError: no such"):
        watched = train_watched()
    assert heard == [0]
    assert [one.step for one in kept] == [0, 1, 2, 3]
    assert kept[3].values["loss"] == 2.5
    assert kept[0].values["rms/fc1:output"] == watched.series("fc1", "rms").values[0]
    assert kept[0].values["lost/fc1.weight:update"] == 0
    assert hl.open_run(tmp_path / "run").steps.tolist() == [0, 1, 2, 3]
    assert_trained(model, optimizer, losses)


def test_a_sink_whose_close_raises_does_not_end_the_training() -> None:
    class Sink:
        def __call__(self, scalars: Any) -> None: ...

        def close(self) -> None:
            raise OSError("no such server")

    model, optimizer = make()
    with pytest.warns(hl.HooklineWarning, match="no such server"), hl.watch(model, to=[Sink()]):
        train(model, optimizer)
    assert is_torch_as_before()


def test_copies_of_a_watched_model_are_free_of_it() -> None:
    model, optimizer = make()
    with hl.watch(model) as watched:
        train(model, optimizer)
        average = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=False)
        assert list(model.state_dict()) == list(Net().state_dict())
        before = len(watched.series("fc1").steps)
        for other in (average, loaded, saved):
            other(torch.randn(50, 3)).sum().backward()
            assert torch.equal(other.fc1.weight, model.fc1.weight)
        train(model, optimizer)
    assert len(watched.series("fc1").steps) == before + 4
    assert watched.series("fc1", "count").values.tolist() == [20.0] * 8


def test_averaged_weights_beside_the_watch_are_left_alone() -> None:
    model, optimizer = make()
    with hl.watch(model) as watched:
        average = torch.optim.swa_utils.AveragedModel(model)
        for batch in batches(5, 3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
            with torch.no_grad():
                average(batch)
    assert watched.series("fc1", "count").values.tolist() == [20.0] * 4


def test_edits_and_captures_work_beside_a_watch() -> None:
    model, optimizer = make()
    (batch,) = batches(5, 3, count=1)
    with hl.watch(model) as watched:
        with hl.edit(model, {"act": hl.scale(0)}), hl.capture(model, "act", grads=True) as got:
            model(batch).square().sum().backward()
            optimizer.step()
        train(model, optimizer)
    assert got["act"].output.abs().max() == 0
    assert watched.series("act", "absmax").values[0] == 0
    assert (watched.series("act", "absmax").values[1:] > 0).all()
    assert is_clean(model)


def test_a_tensor_that_cannot_be_measured_becomes_a_note() -> None:
    class Shape(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to("meta")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shape = Shape()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.shape(x)
            return self.fc(x)

    model = Model()
    with hl.watch(model) as watched:
        for _ in range(2):
            model(torch.randn(5, 3)).sum().backward()
            watched.step()
    assert any(note.startswith("`shape:output`: ") for note in watched.notes)
    assert watched.series("fc", "count").values.tolist() == [10.0, 10.0]


def test_subclasses_of_tensor_do_not_end_the_training() -> None:
    class Marked(Tensor):
        pass

    class Marking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.as_subclass(Marked) * 2

    model = nn.Sequential(nn.Linear(3, 3), Marking(), nn.Linear(3, 2))
    with hl.watch(model) as watched:
        for _ in range(3):
            model(torch.randn(5, 3)).sum().backward()
            watched.step()
    assert watched.series("0", "count").values.tolist() == [15.0] * 3


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"sites": "fc9"}, hl.NoSuchSite, "fc1"),
        ({"sites": "fc1:outptu"}, hl.AddressError, "outptu"),
        ({"every": 0}, ValueError, "every=0"),
        ({"every": 2.5}, ValueError, "every=2.5"),
        ({"every": {}}, ValueError, "every"),
        ({"every": {"fc9": 2}}, hl.NoSuchSite, "fc1"),
        ({"every": True}, ValueError, "every=True"),
        ({"budget": -1}, ValueError, "budget=-1"),
        ({"budget": 0}, ValueError, "budget=0"),
        ({"keep": 0}, ValueError, "keep=0"),
        ({"sketch_every": -1}, ValueError, "sketch_every=-1"),
        ({"parameters": "fc9.*"}, hl.NoSuchSite, "fc9"),
        ({"to": [3]}, TypeError, "to=3"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_before_anything_is_made(
    tmp_path: Path, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    model = Net()
    with pytest.raises(kind, match=words):
        hl.watch(model, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    assert is_clean(model)
    assert is_torch_as_before()


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"hl\.watch takes a model"):
        hl.watch(3)  # type: ignore[arg-type]


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    model, optimizer = make()
    with hl.watch(model, tmp_path / "run"):
        train(model, optimizer)
    with pytest.raises(hl.RunExists):
        hl.watch(model, tmp_path / "run")
    assert is_clean(model)
    assert is_torch_as_before()
    assert hl.open_run(tmp_path / "run").status == "finished"


def test_a_warning_is_not_lost_where_the_training_ignores_others_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_quiet = threading.Event()

    def fail(self: RunWriter, step: Any) -> None:
        is_quiet.wait(30)
        raise hl.RunWriteError("the disk is gone")

    monkeypatch.setattr(RunWriter, "write", fail)
    model, optimizer = make()
    watched = hl.watch(model, tmp_path / "run")

    def train_on() -> None:
        for batch in batches(3, 3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        with warnings.catch_warnings():  # as torch does: it holds for the whole process
            warnings.simplefilter("ignore")
            is_quiet.set()
            deadline = time.monotonic() + 30
            while not watched.notes and time.monotonic() < deadline:
                time.sleep(0.01)
            assert "the disk is gone" in watched.notes[0]
        watched.close()

    with pytest.warns(hl.HooklineWarning, match="the disk is gone"):
        train_on()
