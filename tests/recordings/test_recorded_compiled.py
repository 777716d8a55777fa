"""Recording models that are compiled: the sites of the eager twin, the bits of the unrecorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.diffs.reading import open_trace
from hookline.recordings.tracing import trace_step

# The compiler asks inputs that are no leaves for their gradients.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


class Layer(nn.Module):
    """A layer that gives two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, gain: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(self.norm(x)).tanh() * gain
        return x + y, y


class Model(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x, gain=self.gain)
        return self.head(x)


def whole(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def in_place(model: nn.Module) -> Callable[..., Any]:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def in_parts(model: nn.Module) -> Callable[..., Any]:
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return model


def in_function(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)


WAYS = [whole, in_place, in_parts, in_function]


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def make_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=generator) for _ in range(3)]


def train(
    compile: Callable[..., Any] | None, folder: Path | None = None
) -> tuple[list[Tensor], list[str]]:
    """Train a model; give what came of it, and the notes of the recording."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model()
    call: Any = model if compile is None else compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = None if folder is None else hl.record(model, folder)
    losses = []
    for batch in make_batches():
        optimizer.zero_grad()
        loss = square(call(batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if recording is not None:
        recording.close()
    found = [*losses, *(one.detach().clone() for one in model.state_dict().values())]
    return found, [] if recording is None else recording.notes


@pytest.mark.parametrize("way", WAYS)
def test_a_recorded_training_is_the_eager_one_and_keeps_every_bit(
    tmp_path: Path, way: Callable[..., Any]
) -> None:
    plain, _ = train(way)
    recorded, notes = train(way, tmp_path / "compiled")
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))
    train(None, tmp_path / "eager")
    traces = [open_trace(tmp_path / name) for name in ("eager", "compiled")]
    eager, compiled = ({(s.kind, s.address, s.visit) for s in one.sites} for one in traces)
    # Whether a module gives what another one made is not known inside of a graph.
    known = {":output.grad"}
    if way is in_parts:  # where a graph gives several, what they are for each other stays inside
        known |= {f"layers.{index}:input.x.grad" for index in (0, 1)} | {"head:input.input.grad"}
        lost = {f"layers.{index}:output[{leaf}].grad" for index in (0, 1) for leaf in (0, 1)}
        assert {address for _, address, _ in eager - compiled} == lost
    else:
        assert eager - compiled == set()
    assert {address for _, address, _ in compiled - eager} <= known
    found = hl.diff(tmp_path / "eager", tmp_path / "compiled")
    assert found.same, str(found)
    is_unseen = way is in_function
    assert [("inputs are not kept" in note) for note in notes] == [True] * is_unseen


def test_a_step_is_traced_inside_of_the_graph() -> None:
    torch.manual_seed(0)
    model = Model()
    x = make_batches()[0]
    eager = trace_step(model, (x,), loss=square)
    compiled = trace_step(whole(model), (x,), loss=square)
    assert compiled.notes == []

    def names(trace: Any) -> set[tuple[Any, ...]]:
        return {(s.kind, s.address, s.visit, s.is_part, s.caller) for s in trace.sites}

    # Whether a module gives what another one made is not known inside of a graph.
    assert names(compiled) - names(eager) == {("gradient", ":output.grad", 0, False, None)}
    assert names(eager) <= names(compiled)
    known = eager.index()
    for key, number in known.items():
        site = compiled.sites[compiled.index()[key]]
        torch.testing.assert_close(compiled.tensor(site.id), eager.tensor(number))
    assert model.training
    assert all(one.grad is None for one in model.parameters())


def test_a_step_of_a_compiled_model_is_recorded_with_floors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    x = make_batches()[0]
    hl.record(whole(model), tmp_path / "compiled", (x,), loss=square)
    trace = open_trace(tmp_path / "compiled")
    floors = trace.floors()
    assert floors is not None
    at = next(s.id for s in trace.sites if s.address == "layers.1.linear:output")
    assert 0 < floors[at] < 1e-4
    assert hl.diff(tmp_path / "compiled", model).same


def test_whole_tensors_of_graphs_are_what_flowed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    x = make_batches()[0]
    with hl.capture(model, "layers.0.linear") as got:
        model(x)
    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(model, backend="aot_eager")
    with hl.record(compiled, tmp_path / "run", tensors=True) as recording:
        square(compiled(x)).backward()
        recording.step()
    trace = open_trace(tmp_path / "run")
    at = next(s.id for s in trace.sites if s.address == "layers.0.linear:output")
    assert torch.equal(trace.tensor(at, 0), got["layers.0.linear"].output)
