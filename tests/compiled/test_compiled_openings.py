"""Sessions that are opened inside of a compiled function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import Stack, count
from torch import Tensor, nn

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

SITE = "blocks.0.act"
Result = tuple[Tensor, Any]


def capture(model: nn.Module, x: Tensor, **how: Any) -> Result:
    with hl.capture(model, SITE, **how) as got:
        y = model(x * 2)
    return y + 1, got[SITE].output


def capture_later(model: nn.Module, x: Tensor) -> Result:
    made = hl.capture(model, SITE)
    with made as got:
        y = model(x * 2)
    return y + 1, got[SITE].output


def edit(model: nn.Module, x: Tensor) -> Result:
    with hl.edit(model, {SITE: hl.zero()}):
        y = model(x)
    return y, model(x)


def watch(model: nn.Module, x: Tensor) -> Result:
    with hl.watch(model, None, rules=False) as watcher:
        y = model(x)
        y.sum().backward()
        watcher.step()
    return y, torch.tensor(watcher.series(f"{SITE}:output.grad", "absmax").values)


def register(model: nn.Module, x: Tensor) -> Result:
    handle = hl.register_forward_hook(model, SITE, lambda module, args, output: output * 0)
    y = model(x)
    handle.remove()
    return y, model(x)


def hook(model: nn.Module, x: Tensor, **how: Any) -> Result:
    seen: list[Tensor] = []
    with hl.hook(model, SITE, lambda value, at: seen.append(value), **how):
        y = model(x)
    return y, seen[0]


def record(model: nn.Module, x: Tensor, folder: Path) -> Tensor:
    with hl.record(model, folder, calibrate=False) as recording:
        y: Tensor = model(x)
        y.sum().backward()
        recording.step()
    return y


OPENING: list[Callable[..., Result]] = [capture, capture_later, edit, watch, register, hook]


@pytest.mark.parametrize("opening", OPENING)
def test_session_inside_is_heard_past_a_break(opening: Callable[..., Result]) -> None:
    model, x = Stack(1), torch.randn(3, 6)
    truth, heard = opening(model, x)
    compiled = torch.compile(opening, backend="aot_eager")
    for _ in range(2):
        y, value = compiled(model, x)
        assert torch.equal(y, truth)
        assert torch.equal(value, heard)
    assert not len(hl.inventory(model))


@pytest.mark.parametrize("opening", OPENING)
def test_with_a_full_graph_the_way_out_is_named(opening: Callable[..., Result]) -> None:
    model, x = Stack(1), torch.randn(3, 6)
    compiled = torch.compile(opening, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="open it around the call of what is compiled"):
        compiled(model, x)
    assert not len(hl.inventory(model))


def test_recording_inside_is_that_of_an_eager_run(tmp_path: Path) -> None:
    model, x = Stack(1), torch.randn(3, 6)
    compiled = torch.compile(record, backend="aot_eager")
    assert torch.equal(compiled(model, x, tmp_path / "a"), record(model, x, tmp_path / "b"))
    one, other = (
        hl.open_run(tmp_path / name).series(f"{SITE}:output.grad", "absmax").values for name in "ab"
    )
    assert len(one) == 1
    assert one == pytest.approx(other, abs=0)
    assert not len(hl.inventory(model))


@pytest.mark.parametrize("opening", [capture, hook])
def test_running_eagerly_cannot_begin_inside(opening: Callable[..., Result]) -> None:
    model, x = Stack(1), torch.randn(3, 6)
    compiled = torch.compile(opening, backend="aot_eager")
    with pytest.raises(hl.UnsupportedModel, match="Open the session around the call"):
        compiled(model, x, compiled="eager")
    assert not len(hl.inventory(model))
    with torch.compiler.set_stance("force_eager"):
        compiled(model, x, compiled="eager")
    away = torch.compiler.disable(opening)
    call = torch.compile(lambda: away(model, x, compiled="eager"), backend="aot_eager")
    assert torch.equal(call()[1], opening(model, x)[1])


def test_decorated_function_that_is_compiled_keeps_its_graph() -> None:
    model, x, counter = Stack(1), torch.randn(3, 6), count("aot_eager")

    @hl.capture(model, SITE)
    def call(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    assert torch.equal(
        call.captured[SITE].output,
        model.blocks[0].act(  # type: ignore[attr-defined]
            model.blocks[0].wide(model.blocks[0].norm(x))
        ),
    )
    assert counter.frame_count == 1
