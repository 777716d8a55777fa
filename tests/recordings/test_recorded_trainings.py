"""`hl.record` around a training: the same bits, and a folder that can be compared."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from small_models import Net, is_clean
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from traced_models import Small, assert_same, find, of_kind, plain_loop, square, tokens, train

import hookline as hl
from hookline.comparisons import diff
from hookline.diffs.reading import open_trace
from hookline.recordings import read_call, record, trace_step
from hookline.runs import RunWriter
from hookline.stats.rows import FINITE, MEAN


def accumulating(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    losses = []
    for step in range(6):
        loss = square(model(tokens(step))) / 2
        loss.backward()
        losses.append(loss.detach())
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def scaled(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    scaler = GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = square(model(tokens(step)).float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


def by_closure(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = square(model(tokens()))
        loss.backward()
        return loss

    return [optimizer.step(closure).detach() for _ in range(3)]


@pytest.mark.parametrize("loop", [plain_loop, accumulating, scaled, by_closure])
@pytest.mark.parametrize("way", ["plain", "reentrant", "not reentrant"])
def test_a_recorded_training_is_the_same_to_the_last_bit(
    tmp_path: Path, way: str, loop: Any
) -> None:
    make = functools.partial(Small, way=way, dropout=0.3)
    assert_same(train(make, loop), train(make, loop, tmp_path / "run"))


@pytest.mark.parametrize(
    "options",
    [{"tensors": True}, {"gradients": False}, {"parameters": False}, {"sites": "blocks.**"}],
    ids=str,
)
def test_no_option_changes_the_training(tmp_path: Path, options: dict[str, Any]) -> None:
    make = functools.partial(Small, dropout=0.3)
    assert_same(train(make), train(make, plain_loop, tmp_path / "run", **options))


def test_a_recording_has_the_sites_and_numbers_of_the_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Small()
    live = trace_step(model, (tokens(0),), loss=square, taps=False)
    train(Small, plain_loop, tmp_path / "run")
    trace = open_trace(tmp_path / "run")
    assert list(trace.steps) == [0, 1, 2, 3]
    assert of_kind(trace, "value") == of_kind(live, "value")
    assert of_kind(trace, "gradient") == of_kind(live, "gradient")
    assert of_kind(trace, "update") == [f"{name}:update" for name in of_kind(live, "parameter")]
    ours, theirs = live.measurements(0), trace.measurements(0)
    for site in live.sites:
        same = find(trace, site.address, visit=site.visit)
        for name in ("kind", "caller", "port", "leaf", "requires_grad", "shape", "dtype", "more"):
            assert getattr(same, name) == getattr(site, name), (site.address, name)
        assert np.allclose(ours.rows[site.id], theirs.rows[same.id], rtol=1e-6), site.address
        assert np.array_equal(ours.sketches[site.id], theirs.sketches[same.id]), site.address
    assert trace.facts.modules == live.facts.modules
    assert trace.facts.ties == live.facts.ties


def test_two_recordings_agree_and_one_with_a_bug_does_not(tmp_path: Path) -> None:
    def make(approximate: str = "none") -> Small:
        model = Small()
        model.blocks[1].mlp[1] = nn.GELU(approximate=approximate)
        return model

    for name, kind in (("a", "none"), ("b", "none"), ("c", "tanh")):
        train(functools.partial(make, kind), plain_loop, tmp_path / name)
    assert diff(tmp_path / "a", tmp_path / "b").same
    found = diff(tmp_path / "a", tmp_path / "c")
    assert (found.first, found.step) == ("blocks.1.mlp.1", 0)
    assert "approximate='none' here, 'tanh' there" in found.causes


def test_whole_tensors_are_those_that_flowed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Small()
    before = model.head.weight.detach().clone()
    live = trace_step(model, (tokens(0),), loss=square, taps=False)
    train(Small, plain_loop, tmp_path / "run", tensors=True)
    trace = open_trace(tmp_path / "run")
    for address in ("blocks.1:output", "blocks.0:output.grad", "embed.weight:grad", "embed.weight"):
        kept = trace.tensor(find(trace, address).id, 0)
        assert kept is not None
        assert kept.equal(live.tensor(find(live, address).id)), address
    assert trace.tensor(find(trace, "embed.weight").id, 0).equal(before)
    assert trace.tensor(find(trace, "embed.weight:update").id, 3) is not None
    assert trace.tensor(find(trace, "blocks.1.ln1:input.input").id, 0) is not None


def test_tensors_are_chosen_by_pattern(tmp_path: Path) -> None:
    train(Small, plain_loop, tmp_path / "run", tensors=["blocks.1.mlp.*", "embed.weight"], steps=1)
    run = hl.open_run(tmp_path / "run")
    addresses = [str(row["site"]) for row in run.sites()]
    kept = {addresses[int(key)] for key in run.tensors["values"].keys()}  # noqa: SIM118 (a file)
    assert "blocks.1.mlp.1:output" in kept
    assert "embed.weight:grad" in kept
    assert not any(one.startswith(("blocks.0", "norm", "head")) for one in kept)
    (path,) = (tmp_path / "run" / "tensors").glob("values*")
    with safe_open(str(path), framework="pt") as file:
        assert set(file.keys()) == set(run.tensors["values"])


def test_micro_batches_are_visits_of_one_step(tmp_path: Path) -> None:
    train(Small, accumulating, tmp_path / "run")
    trace = open_trace(tmp_path / "run")
    assert list(trace.steps) == [0, 1, 2]
    sites = [site for site in trace.sites if site.address == "head:output"]
    assert [site.visit for site in sites] == [0, 1]
    rows = trace.measurements(0).rows
    assert rows[sites[0].id, FINITE] == 4 * 5 * 10
    assert rows[sites[0].id, MEAN] != rows[sites[1].id, MEAN]


def test_gradients_of_a_scaled_loss_are_without_the_factor(tmp_path: Path) -> None:
    train(Small, scaled, tmp_path / "run")
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        live = trace_step(
            Small(), (tokens(0),), loss=lambda out: square(out.float()), taps=False, seed=1
        )
    trace = open_trace(tmp_path / "run")
    for address in ("head:output.grad", "embed.weight:grad"):
        mine = trace.measurements(0).sketches[find(trace, address).id]
        plain = live.measurements(0).sketches[find(live, address).id]
        assert np.allclose(mine, plain, rtol=0.05, atol=0.02 * np.abs(plain).max()), address
    assert trace.facts.autocast == "bfloat16"


def test_steps_are_as_many_as_asked_for_and_the_training_goes_on(tmp_path: Path) -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path / "run", steps=2) as recording:
        plain_loop(model, optimizer)
        assert not recording.is_open
        assert is_clean(model)
        assert list(hl.open_run(tmp_path / "run").steps) == [0, 1]
    assert recording.run.status == "finished"


def test_buffers_are_there_before_and_after_a_step(tmp_path: Path) -> None:
    train(Small, plain_loop, tmp_path / "run", tensors="norm")
    trace = open_trace(tmp_path / "run")
    after = find(trace, "norm.running_mean", visit=1)
    before = find(trace, "norm.running_mean", visit=0)
    for step in (0, 1, 2):
        left, right = trace.tensor(after.id, step), trace.tensor(before.id, step + 1)
        assert left is not None
        assert left.equal(right)
        assert not left.equal(trace.tensor(before.id, step))


def test_constant_buffers_are_kept_once(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.embed = nn.Embedding(10, 8)
            self.register_buffer("mask", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.embed(x)) * self.mask

    train(Masked, plain_loop, tmp_path / "run")
    trace = open_trace(tmp_path / "run")
    mask = find(trace, "mask").id
    assert [bool(trace.measurements(step).is_there[mask]) for step in trace.steps] == [
        True,
        False,
        False,
        False,
    ]


def test_frozen_parameters_and_loops_by_hand_have_their_gradients(tmp_path: Path) -> None:
    model = Net()
    model.fc1.weight.requires_grad_(False)
    with record(model, tmp_path / "run") as recording:
        for _ in range(3):
            model(torch.ones(2, 3)).square().sum().backward()
            recording.step()
            with torch.no_grad():
                for one in model.parameters():
                    if one.grad is not None:
                        one -= 0.1 * one.grad
                        one.grad = None
    trace = open_trace(tmp_path / "run")
    assert find(trace, "fc1.weight").requires_grad is False
    assert of_kind(trace, "parameter gradient") == [
        "fc1.bias:grad",
        "fc2.weight:grad",
        "fc2.bias:grad",
    ]
    there = trace.measurements(2).is_there
    assert there[find(trace, "fc2.weight:grad").id]
    assert not there[find(trace, "fc1.weight").id]  # it is what it was


def test_calls_without_grad_are_left_out(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        with torch.no_grad():
            model(tokens())
        return plain_loop(model, optimizer)

    train(Small, loop, tmp_path / "run")
    trace = open_trace(tmp_path / "run")
    assert {site.visit for site in trace.sites if site.kind == "value"} == {0}


def test_sites_can_be_chosen_and_callers_stay_right(tmp_path: Path) -> None:
    train(Small, plain_loop, tmp_path / "run", sites="blocks.1.mlp.*", parameters=False)
    trace = open_trace(tmp_path / "run")
    assert {site.module for site in trace.sites} == {f"blocks.1.mlp.{one}" for one in range(3)}
    assert {site.caller for site in trace.sites} == {"blocks.1.mlp"}


def test_an_error_in_the_training_closes_the_run(tmp_path: Path) -> None:
    model = Small()

    def fail(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        plain_loop(model, optimizer)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(lambda: model, fail, tmp_path / "run")
    run = hl.open_run(tmp_path / "run")
    assert (run.status, len(run.steps)) == ("failed", 4)
    assert is_clean(model)


def test_a_disk_that_fails_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: RunWriter, step: Any) -> None:
        raise hl.RunWriteError("the disk is gone")

    plain = train(Small)
    monkeypatch.setattr(RunWriter, "write", fail)
    with pytest.warns(hl.HooklineWarning, match="the disk is gone"):
        assert_same(plain, train(Small, plain_loop, tmp_path / "run"))


def test_a_folder_that_holds_a_run_is_refused_or_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(Small, plain_loop, folder)
    with pytest.raises(hl.RunExists):
        record(Small(), folder)
    with pytest.raises(hl.RunExists):
        record(Small(), folder, (tokens(),))
    record(Small(), folder, (tokens(),), loss=square, overwrite=True)
    assert list(hl.open_run(folder).steps) == [0]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(hl.RunExists, match="holds other files"):
        record(Small(), tmp_path / "other", (tokens(),), overwrite=True)


def test_of_a_scripted_model_parameters_alone_are_recorded(tmp_path: Path) -> None:
    model = torch.jit.script(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path / "run") as recording:
        square(model(torch.ones(4, 3))).backward()
        optimizer.step()
    trace = open_trace(tmp_path / "run")
    assert {site.kind for site in trace.sites} == {"parameter", "parameter gradient", "update"}
    assert any("only parameters" in note for note in recording.notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": square}, "needs inputs"),
        ({"steps": 0}, "from 1"),
        ({"optimizer": torch.optim.SGD}, "needs inputs"),
    ],
    ids=["loss", "steps", "optimizer"],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        record(Small(), tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_one_step_with_inputs_is_run_and_calibrated(tmp_path: Path) -> None:
    model = Small(dropout=0.3)
    recording = record(
        model, tmp_path / "run", (tokens(),), loss=square, optimizer=torch.optim.AdamW, tensors=True
    )
    assert not recording.is_open
    trace = open_trace(tmp_path / "run")
    floors = trace.floors()
    assert floors is not None
    assert not np.isnan(floors).any()
    assert any(site.is_part for site in trace.sites)
    live = trace_step(model, (tokens(),), loss=square, optimizer=torch.optim.AdamW)
    assert [site.address for site in trace.sites] == [site.address for site in live.sites]
    assert [site.same_as for site in trace.sites] == [site.same_as for site in live.sites]
    for site in live.sites:
        assert torch.equal(trace.tensor(site.id, 0), live.tensor(site.id)), site.address
    assert diff(tmp_path / "run", model, loss=square, optimizer=torch.optim.AdamW).same
    assert hl.open_run(tmp_path / "run").scalar("loss").values[0] == pytest.approx(live.loss)


def test_a_recorded_step_takes_few_bytes(tmp_path: Path) -> None:
    sizes = []
    for steps in (1, 4):
        train(Small, plain_loop, tmp_path / str(steps), steps=steps)
        folder = tmp_path / str(steps)
        sizes.append(sum(one.stat().st_size for one in folder.rglob("*") if one.is_file()))
    trace = open_trace(tmp_path / "4")
    measured = int(trace.measurements(0).is_there.sum())
    assert (sizes[1] - sizes[0]) / 3 < 400 * measured


def test_each_rank_writes_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        train(Small, plain_loop, tmp_path / "run", steps=1)
    run = hl.open_run(tmp_path / "run")
    assert list(run.ranks) == [0, 1]
    assert (tmp_path / "run" / "rank-00001.sqlite").exists()
    one, two = (open_trace(run, rank=rank) for rank in (0, 1))
    assert [site.address for site in one.sites] == [site.address for site in two.sites]


def test_a_recording_has_the_order_of_the_training_before(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(functools.partial(Small, dropout=0.3), plain_loop, tmp_path / name)
    one, two = (open_trace(tmp_path / name) for name in ("a", "b"))
    assert one.sites == two.sites
    assert np.array_equal(
        one.measurements(3).sketches, two.measurements(3).sketches, equal_nan=True
    )


def test_tensors_of_a_step_are_written_as_they_come_where_no_floors_are_measured(
    tmp_path: Path,
) -> None:
    model = Small()
    live = trace_step(model, (tokens(),), loss=square)
    record(model, tmp_path / "run", (tokens(),), loss=square, tensors=True, calibrate=False)
    trace = open_trace(tmp_path / "run")
    assert trace.floors() is None
    assert [site.address for site in trace.sites] == [site.address for site in live.sites]
    for site in live.sites:
        assert torch.equal(trace.tensor(site.id, 0), live.tensor(site.id)), site.address


class Holder(nn.Module):
    """A model that is never called itself: its step calls a part."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, x: Tensor) -> Tensor:
        """Give the loss of a batch."""
        out: Tensor = self.net(x)
        return out.square().mean()


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_model_of_which_only_a_part_is_called(tmp_path: Path, has_optimizer: bool) -> None:
    model = Holder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path / "run", strict=True) as recording:
        for _ in range(2):
            optimizer.zero_grad()
            model.training_step(torch.randn(5, 3)).backward()
            if has_optimizer:
                optimizer.step()
            else:
                recording.step()
    assert recording.notes == []
    trace = open_trace(tmp_path / "run")
    assert trace.facts.modules["net.0"].config["in_features"] == "3"
    there = {trace.sites[one].kind for one in np.flatnonzero(trace.measurements(0).is_there)}
    expected = {"value", "gradient", "buffer", "parameter", "parameter gradient"}
    assert there == expected | ({"update"} if has_optimizer else set())
    dumps = hl.open_run(tmp_path / "run").tensors
    assert [one.facts["part"] for one in dumps.values()] == ["net"]
    assert read_call(tmp_path / "run") is None  # it is no call of the model


def test_a_part_that_is_called_without_grad_is_described(tmp_path: Path) -> None:
    model = Holder()
    with record(model, tmp_path / "run", with_inference=True) as recording, torch.no_grad():
        model.net(torch.randn(5, 3))
        recording.step()
    trace = open_trace(tmp_path / "run")
    assert trace.facts.modules["net.0"].type == "Linear"
    assert "buffer" in {site.kind for site in trace.sites}


def test_a_recording_without_grad_says_how_it_would_be_one(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with record(model, tmp_path / "silent") as silent, torch.no_grad():
        model(torch.ones(2, 3))
        silent.step()
    assert any("`with_inference=True`" in one for one in silent.notes)
    with record(model, tmp_path / "mixed") as mixed:
        with torch.no_grad():
            model(torch.ones(2, 3))
        model(torch.ones(2, 3)).sum().backward()
        mixed.step()
    assert mixed.notes == []


def test_whole_tensors_of_what_is_not_there_are_refused(tmp_path: Path) -> None:
    model = Small()
    for given in ({}, {"inputs": (tokens(),)}):
        with pytest.raises(hl.NoSuchSite, match=r"`blocks.1.mxi`.*nearest.*`blocks\.1\.mix`"):
            record(model, tmp_path / "run", tensors=["embed", "blocks.1.mxi"], **given)
    assert not (tmp_path / "run").exists()
    record(model, tmp_path / "run", (tokens(),), tensors=["blocks.*.ln1.weight"])
