"""Scripts that compile their models: what is heard inside, and the operation behind a NaN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import hookline as hl

pytestmark = pytest.mark.usefixtures("fresh_compiler")

RunHere = Callable[..., SimpleNamespace]


COMPILED = {
    "wrapped": (
        "model = torch.compile(make(), backend='aot_eager')\n"
        "train(model, torch.optim.SGD(model.parameters(), lr=0.01))\n"
    ),
    "in place": (
        "model = make()\n"
        "model.compile(backend='aot_eager')\n"
        "train(model, torch.optim.SGD(model.parameters(), lr=0.01))\n"
    ),
    "a function": (
        "model = make()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "@torch.compile(backend='aot_eager')\n"
        "def find_loss(a, b):\n"
        "    return (model(a) - b).square().mean()\n"
        "for _ in range(5):\n"
        "    optimizer.zero_grad()\n"
        "    find_loss(x, y).backward()\n"
        "    optimizer.step()\n"
    ),
}


@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_model_is_watched_inside(run_here: RunHere, tmp_path: Path, kind: str) -> None:
    done = run_here(COMPILED[kind])
    run = hl.open_run(tmp_path / "run")
    assert done.code == 0
    assert {"0.weight:update", "0:output", "2:output.grad", ":output"} <= {
        str(row["site"]) for row in run.sites()
    }
    assert len(run.steps) == 5
    assert run.series("0:output.grad", "count").values.tolist() == [512.0] * 5
    assert not [note for note in run.document("notes")["notes"] if "compile" in note]


def test_operation_is_found_where_the_compiled_model_has_a_name_of_its_own(
    run_here: RunHere,
) -> None:
    done = run_here(
        "class Root(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = torch.nn.Linear(8, 2)\n"
        "    def forward(self, x):\n"
        "        return self.fc(x).sqrt()\n"
        "model = Root()\n"
        "call = torch.compile(model, backend='aot_eager', fullgraph=True)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for _ in range(2):\n"
        "    call(x).sum().backward()\n"
        "    optimizer.step()\n"
    )
    assert "/sqrt made the first NaN at step 0" in done.out + done.err
