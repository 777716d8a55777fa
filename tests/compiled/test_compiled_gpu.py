"""Compiled models on a GPU: the same bits, no wait, and values that a replay never overwrites."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from blocks import Stack, assert_same, run_eagerly
from compared_bits import LENGTH, SAME, WORDS, Outcome, SmallGPT
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import hookline as hl
from hookline.hooks.hearing import Ear, Place
from hookline.hooks.operators import ease_tracing, pass_both

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # torch makes one
    pytest.mark.filterwarnings("ignore:Logical operators 'and' and 'or':UserWarning"),
]

MODES = ["default", "reduce-overhead"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
def test_two_hundred_steps_are_the_same_to_the_last_bit(dtype: str, mode: str) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(Path(hl.__file__).parent.parent), str(here)])
    ran = subprocess.run(
        [sys.executable, str(here / "compared_bits.py"), "cuda", dtype, mode, "200"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["control"] == SAME
    assert told["watched"] == SAME
    assert told["measured"] == 200
    assert told["notes"] == []
    assert told["last"] < told["first"] / 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_the_eager_twin(dtype: str, mode: str) -> None:
    options: Any = {"device": "cuda", "dtype": dtype, "steps": 4}
    watches = [Outcome(mode=one, is_watched=True, **options).watch for one in ("eager", mode)]
    eager, compiled = (watch.history for watch in watches if watch is not None)
    assert eager.steps.tolist() == compiled.steps.tolist()
    # Reductions and fused arithmetic round otherwise; in 8 bits of a bfloat16 that is seen.
    rel = 1e-4 if dtype == "float32" else 1e-2
    for row in eager.sites():
        address = str(row["site"])
        for stat in ("count", "nan", "inf"):
            mine, theirs = (one.series(address, stat).values[0] for one in (compiled, eager))
            assert mine == theirs, (address, stat)
        rms = [float(one.series(address, "rms").values[0]) for one in (compiled, eager)]
        assert rms[0] == pytest.approx(rms[1], rel=rel, abs=1e-9), address


@contextmanager
def raise_at_waits() -> Iterator[None]:
    """Make calls that wait for the device raise."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_training(mode: str) -> tuple[nn.Module, Any]:
    """Make a compiled model, and a function that takes a step with it."""
    model = SmallGPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(0, WORDS, (4, LENGTH), device="cuda")
    model.compile(fullgraph=True, mode=None if mode == "default" else mode)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    return model, step


@pytest.mark.parametrize("mode", MODES)
def test_a_watched_step_adds_no_wait(mode: str) -> None:
    model, step = make_training(mode)
    with hl.watch(model) as watched:
        for _ in range(6):  # compiles, warms CUDA graphs up and records them
            step()
        watched.flush()
        with raise_at_waits():
            for _ in range(4):
                step()
    assert len(watched.history.steps) == 10
    assert watched.history.series("blocks.1.attn.proj:output.grad", "count").values[-1] > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", ["cpu", None])
def test_a_capture_adds_no_wait(device: str | None, mode: str) -> None:
    model, step = make_training(mode)
    with hl.capture(model, "blocks.*", device=device, grads=True) as got:
        for _ in range(4):
            step()
        with raise_at_waits():
            step()
    assert len(got.calls) == 5
    assert got.calls[-1]["blocks.1"].output.device.type == (device or "cuda")


@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize("mode", MODES)
def test_captures_of_calls_are_never_overwritten(mode: str, device: str | None) -> None:
    model = Stack(2).cuda()
    inputs = [torch.randn(3, 6, device="cuda") for _ in range(6)]
    eager = [run_eagerly(model, one) for one in inputs]
    compiled = torch.compile(model, fullgraph=True, mode=None if mode == "default" else mode)
    with hl.capture(model, "blocks.**", grads=True, device=device) as got:
        for one in inputs:
            model.zero_grad()  # a replay writes over its gradients too, and torch refuses to add
            compiled(one).square().sum().backward()
    torch.cuda.synchronize()
    assert len(got.calls) == len(inputs)
    for mine, theirs in zip(got.calls, eager, strict=True):
        for path in ("blocks.0.act", "blocks.0", "blocks.1.narrow", "blocks.1"):
            value, expected = mine[path].output, theirs[path].output
            torch.testing.assert_close(value.cuda(), expected)
            torch.testing.assert_close(value.grad.cuda(), expected.grad)


@pytest.mark.parametrize("mode", MODES)
def test_several_forwards_before_a_backward(mode: str) -> None:
    model = Stack(2).cuda()
    inputs = [torch.randn(3, 6, device="cuda") for _ in range(3)]
    expected = run_eagerly(model, *inputs)
    compiled = torch.compile(model, fullgraph=True, mode=None if mode == "default" else mode)
    with hl.capture(model, "blocks.**", grads=True) as got:
        losses = [compiled(one).square().sum() for one in inputs]
        torch.stack(losses).sum().backward()
    assert_same(got, expected, 2)


class Listening(Ear):
    """Note on which thread what came."""

    __slots__ = ("heard",)

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0))
        self.heard: list[tuple[str, int]] = []

    def hear(self, tensor: Tensor, place: Place) -> None:
        self.heard.append((place.port, threading.get_ident()))


def test_gradients_come_on_the_thread_of_autograd() -> None:
    ear = Listening()
    ease_tracing()

    @torch.compile(fullgraph=True)
    def call(x: Tensor, key: Tensor) -> Tensor:
        return pass_both(x.sin(), key, "output", True).cos().sum()

    call(torch.randn(5, device="cuda", requires_grad=True), ear.key).backward()
    assert [port for port, _ in ear.heard] == ["output", "output.grad"]
    forward, backward = (thread for _, thread in ear.heard)
    assert forward == threading.get_ident() != backward


def test_a_watch_leaves_the_model_as_fast_as_it_was_found() -> None:
    """The plain graph is there again, and nothing is compiled for it."""
    from torch._dynamo.utils import counters

    model, step = make_training("default")
    twin = copy.deepcopy(list(model.parameters()))
    step()
    plain = counters["stats"]["unique_graphs"]
    for _ in range(3):
        with hl.watch(model):
            step()
        step()
    assert counters["stats"]["unique_graphs"] == plain + 1
    assert not all(map(torch.equal, twin, model.parameters()))


def test_copies_for_the_operators_are_not_tuned() -> None:
    def call(x: Tensor) -> Tensor:
        return model(x).sum()

    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Tanh()).cuda()
    plain = run_and_get_code(torch.compile(call, fullgraph=True), torch.ones(64, 64).cuda())[1]
    torch._dynamo.reset()
    with hl.watch(model):
        seen = run_and_get_code(torch.compile(call, fullgraph=True), torch.ones(64, 64).cuda())[1]
    untuned = "'autotune_pointwise': False"
    assert untuned not in plain[0]
    assert untuned in seen[0]
    assert seen[0].count("'autotune_pointwise': True") == plain[0].count(
        "'autotune_pointwise': True"
    )


def test_a_shortage_of_memory_is_told_and_leaves_the_model_usable() -> None:
    """Some of the values have room, all of them together have not."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]).cuda()
    call = torch.compile(model, fullgraph=True)
    rows = 1 << 18  # each value is 64 MiB
    with torch.no_grad():
        x = torch.randn(rows, 64, device="cuda")
        truth = call(x)
        with hl.capture(model, "**", last=True):  # so that it is compiled
            call(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        used = torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction((used + (5 * rows * 64 * 4)) / total)
        try:
            with (
                pytest.raises((hl.OutOfMemory, torch.OutOfMemoryError)) as caught,
                hl.capture(model, "**", last=True),
            ):
                call(x)
            told = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
            assert "capture held" in told  # whether it was a copy that failed, or the model
            del caught
            gc.collect()
            torch.cuda.empty_cache()
            assert torch.equal(call(x), truth)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
