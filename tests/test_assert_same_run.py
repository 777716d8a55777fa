"""`hl.testing.assert_same_run` and the option of pytest that records baselines again."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hookline.pytest_plugin import UPDATE
from hookline.testing import assert_same_run

PLUGIN_PROBE = """
import sys
import hookline.pytest_plugin
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "numpy", "click", "pytest"}))
"""

TESTS = """
import os
import torch
from hookline.testing import assert_same_run

def compare(name, how="none"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(how))
    assert_same_run(model, name, (torch.ones(2, 4),), loss=torch.sum)

def test_same():
    compare("baseline")

def test_changed():
    compare("changed", "none" if os.environ.get("HOOKLINE_UPDATE") else "tanh")

def test_missing():
    if not os.environ.get("HOOKLINE_UPDATE"):
        compare("missing")
"""


@pytest.fixture(autouse=True)
def no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what the tests themselves were called with."""
    monkeypatch.delenv(UPDATE, raising=False)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def mean_square(out: Tensor) -> Tensor:
    return out.square().mean()


def test_missing_baseline_fails_and_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="pytest --hookline-update"):
        assert_same_run(make_model(), tmp_path / "baseline", (torch.ones(2, 4),))
    assert not (tmp_path / "baseline").exists()


def test_baseline_is_recorded_and_holds(tmp_path: Path) -> None:
    model, folder = make_model(), tmp_path / "deep" / "baseline"
    made = assert_same_run(model, folder, (torch.randn(3, 4),), loss=mean_square, update=True)
    assert made is None
    found = assert_same_run(make_model(), folder, loss=mean_square)
    assert found is not None
    assert found.same


def test_changed_model_fails_with_the_sentence_and_the_sites(tmp_path: Path) -> None:
    model, folder = make_model(), tmp_path / "baseline"
    assert_same_run(model, folder, (torch.randn(3, 4),), loss=mean_square, update=True)
    changed = copy.deepcopy(model)
    changed[1].approximate = "tanh"
    with pytest.raises(AssertionError) as caught:
        assert_same_run(changed, folder, loss=mean_square)
    text = str(caught.value)
    assert "1 (GELU)" in text.splitlines()[0]
    assert "1:output" in text
    assert "--hookline-update" in text.splitlines()[-1]
    assert_same_run(changed, folder, loss=mean_square, tolerance=0.5)
    assert_same_run(changed, folder, loss=mean_square, allow={"**": 0.5})


def test_environment_asks_for_new_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = make_model(), tmp_path / "baseline"
    assert_same_run(model, folder, (torch.randn(3, 4),), update=True)
    model[1].approximate = "tanh"
    monkeypatch.setenv(UPDATE, "1")
    assert assert_same_run(model, folder) is None  # with the inputs that the old one holds
    monkeypatch.setenv(UPDATE, "0")
    assert assert_same_run(model, folder) is not None


def test_update_without_any_inputs_says_so(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="needs inputs to be recorded"):
        assert_same_run(make_model(), tmp_path / "baseline", update=True)


def test_plugin_loads_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLUGIN_PROBE], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_option_records_the_baselines(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """With the option they are made; without, what has changed or has none fails."""
    (tmp_path / "test_it.py").write_text(TESTS)
    is_installed = request.config.pluginmanager.has_plugin("hookline")
    plugins = [] if is_installed else ["-p", "hookline.pytest_plugin"]

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", *plugins, "-p", "no:cacheprovider", "-rA"]
        done = subprocess.run(
            [*command, "-c", os.devnull, "--rootdir", ".", *options, "test_it.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        return done.stdout

    assert "3 passed" in run("--hookline-update")
    found = run()
    assert "1 passed" in found
    assert "PASSED test_it.py::test_same" in found
    assert "FAILED test_it.py::test_changed - AssertionError: Runs agree" in found
    assert "FAILED test_it.py::test_missing - AssertionError: there is no baseline" in found
