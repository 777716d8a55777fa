"""Scripts as people write them, recorded: what is kept, what is said, and how they end."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import BEGINNING
from torch import nn

import hookline as hl
from hookline.diffs.reading import open_trace
from hookline.scripts.launching import Launch
from hookline.scripts.options import RunOptions
from hookline.scripts.recording import ScriptRecord, show_size

TRAIN = "model = make()\ntrain(model, torch.optim.SGD(model.parameters(), lr=0.01))\n"


@pytest.fixture
def record_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    only_new_objects: None,
) -> Any:
    """Give a function that records a script in this process, and tells what came of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run(text: str, **options: Any) -> SimpleNamespace:
        script = tmp_path / "script.py"
        script.write_text(BEGINNING + text)
        options.setdefault("folder", tmp_path / "run")
        own = nn.Module.__call__, torch.autograd.backward
        done = ScriptRecord(Launch(str(script), ()), RunOptions(**options, is_replayed=False))
        code = done.run()
        assert (nn.Module.__call__, torch.autograd.backward) == own
        for name in ("last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        written = capfd.readouterr()
        return SimpleNamespace(code=code, done=done, out=written.out, err=written.err)

    return run


def test_a_script_is_recorded_and_goes_on_after_the_steps(record_here: Any, tmp_path: Path) -> None:
    done = record_here(TRAIN + "print('end')\n", recorded=2)
    trace = open_trace(tmp_path / "run")
    assert (done.code, done.out) == (0, "end\n")
    assert list(trace.steps) == [0, 1]
    assert {site.kind for site in trace.sites} == {
        "value",
        "gradient",
        "parameter",
        "parameter gradient",
        "update",
    }
    lines = done.err.strip().splitlines()
    assert lines[0].startswith(f"hookline: recorded 2 steps of {len(trace.sites)} sites, ")
    assert lines[0].endswith(": run")
    assert lines[1] == "hookline: compare it with another: hookline diff run OTHER"


def test_numbers_are_those_of_the_script_alone(record_here: Any) -> None:
    text = (
        "model = nn.Sequential(make(), nn.Dropout(0.5), nn.Linear(4, 4))\n"
        "train(model, torch.optim.Adam(model.parameters(), lr=0.01), 12)\n"
        "print([one.sum().item().hex() for one in model.parameters()], torch.rand(1).item())\n"
    )
    recorded = record_here(text, recorded=5, tensors=("**",))
    printed: list[str] = []
    spaces = {
        "__name__": "__main__",
        "print": lambda *words: printed.append(" ".join(map(str, words))),
    }
    exec((Path.cwd() / "script.py").read_text(), spaces)
    assert recorded.out == printed[0] + "\n"


def test_a_model_that_comes_later_is_not_recorded_any_more(
    record_here: Any, tmp_path: Path
) -> None:
    text = TRAIN + "other = make()\ntrain(other, torch.optim.SGD(other.parameters(), lr=0.01))\n"
    done = record_here(text, recorded=1)
    assert done.code == 0
    assert list(hl.open_run(tmp_path / "run").steps) == [0]
    assert "error" not in done.err


def test_two_models_have_their_names(record_here: Any, tmp_path: Path) -> None:
    text = (
        "first, second = make(), make(4)\n"
        "both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01)\n"
        "for _ in range(3):\n"
        "    both.zero_grad()\n"
        "    second(first(x)).square().mean().backward()\n"
        "    both.step()\n"
    )
    record_here(text)
    trace = open_trace(tmp_path / "run")
    paths = {site.module for site in trace.sites if site.kind == "value"}
    assert {"second.0", "second"} <= paths
    assert any(one in paths for one in ("0", "first.0"))


def test_an_error_of_the_script_is_its_own(record_here: Any, tmp_path: Path) -> None:
    done = record_here(TRAIN + "model(torch.ones(1, 99))\n")
    assert done.code == 1
    assert hl.open_run(tmp_path / "run").status == "failed"
    assert re.search("RuntimeError: .*mat1 and mat2", done.err)
    assert done.err.index("RuntimeError") < done.err.index("hookline: recorded 6 steps")
    partial = hl.open_run(tmp_path / "run").scalar("partial").values
    assert [one == 1 for one in partial] == [False] * 5 + [True]


def test_a_script_without_a_training_says_so(record_here: Any, tmp_path: Path) -> None:
    done = record_here("print('nothing')\n")
    assert done.code == 0
    assert "hookline: nothing was recorded: no module with trainable parameters" in done.err
    assert not (tmp_path / "run").exists()


def test_quiet_says_nothing(record_here: Any) -> None:
    assert record_here(TRAIN, is_quiet=True).err == ""


def test_a_site_that_is_not_there_is_said(record_here: Any) -> None:
    done = record_here(TRAIN, sites=("layers.*",))
    assert done.code == 0
    assert "nothing was recorded: `layers.*` matches no site" in done.err


@pytest.mark.parametrize(("size", "text"), [(12, "12 bytes"), (2500, "2.5 kB"), (0, "0 bytes")])
def test_a_size_is_written_for_people(tmp_path: Path, size: int, text: str) -> None:
    (tmp_path / "file").write_bytes(b"x" * size)
    assert show_size(tmp_path) == text


COMPILED_FUNCTION = """
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


@torch.compile(backend="aot_eager")
def find_loss(a, b):
    return (model(a) - b).square().mean()


for _ in range(5):
    optimizer.zero_grad()
    find_loss(x, y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("kind", ["a model", "a function"])
def test_a_compiled_script_is_recorded_as_the_eager_one(
    record_here: Any, tmp_path: Path, kind: str
) -> None:
    torch._dynamo.reset()
    record_here(TRAIN, folder=tmp_path / "eager", recorded=2)
    wrapped = TRAIN.replace("make()", "torch.compile(make(), backend='aot_eager')")
    text = wrapped if kind == "a model" else COMPILED_FUNCTION
    done = record_here(text, folder=tmp_path / "compiled", recorded=2)
    assert done.code == 0
    found = hl.diff(tmp_path / "eager", tmp_path / "compiled")
    assert found.same, str(found)
    sites = {site.address for site in open_trace(tmp_path / "compiled").sites}
    assert {"0:input.input", "1:output", "2:output.grad"} <= sites
