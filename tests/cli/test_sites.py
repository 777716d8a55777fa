"""`hookline sites`: what a person at a terminal sees, and what a program reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import hookline as hl
from hookline.cli import main

SCRIPT = """
import torch
from torch import nn

print("noise that is no data")


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(3, width)

    def forward(self, x, scale=1.0):
        y = self.fc(x) * scale
        return torch.softmax(y, -1)


class Needs(nn.Module):
    def __init__(self, width):
        super().__init__()


model = Net()
batch = torch.ones(2, 3)
pair = (batch, 2.0)
number = 3


def make_model():
    return Net(5)


def make_named():
    print("more noise")
    return {"x": batch, "scale": 2.0}


def make_nothing():
    return None


def make_error():
    raise ValueError("no weights")


def make_wide():
    return torch.ones(2, 7)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the script of a user, and stand in its folder."""
    (tmp_path / "user_script.py").write_text(SCRIPT)
    (tmp_path / "broken_script.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("user_script", "broken_script"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "user_script.py"


Run = Callable[..., Result]


@pytest.fixture
def run(script: str) -> Run:
    def run(*args: str) -> Result:
        return CliRunner().invoke(main, list(args), prog_name="hookline")

    return run


def test_lists_the_modules_of_a_model(run: Run) -> None:
    done = run("sites", "user_script.py:model")
    assert done.exit_code == 0
    assert done.stdout == (
        "2 sites in `Net`\naddress    type\n---------  ------\n:output    Net\nfc:output  Linear\n"
    )
    assert done.stderr == "noise that is no data\n"


@pytest.mark.parametrize("model", ["user_script:make_model", "user_script.py:make_model"])
def test_model_may_be_made_by_a_function_or_class(run: Run, model: str) -> None:
    done = run("sites", model, "fc.weight", "--json")
    assert json.loads(done.stdout)["sites"][0]["shape"] == [5, 3]
    done = run("sites", "user_script:Net", "fc.weight", "--json")
    assert json.loads(done.stdout)["sites"][0]["shape"] == [4, 3]


@pytest.mark.parametrize("example", ["batch", "pair", "make_named"])
def test_example_shows_what_flowed(run: Run, example: str) -> None:
    done = run(
        "sites", "user_script.py:model", "@*", "/*", "--example", f"user_script.py:{example}"
    )
    assert done.exit_code == 0, done.stderr
    addresses = [line.split()[0] for line in done.stdout.splitlines()[3:]]
    assert addresses == ["@x", "@scale", "@y", "@return", "/mul", "/softmax"]
    assert "(2, 4)" in done.stdout


def test_json_is_what_sites_gives(run: Run) -> None:
    done = run("sites", "user_script.py:model", "--example", "user_script.py:batch", "--json")
    assert json.loads(done.stdout) == {
        "sites": [
            {
                "address": address,
                "type": kind,
                "shape": [2, 4],
                "dtype": "float32",
                "device": "cpu",
                "visits": 1,
            }
            for address, kind in ((":output", "Net"), ("fc:output", "Linear"))
        ],
        "notes": [],
    }


def test_source_is_what_source_prints(run: Run) -> None:
    done = run("sites", "user_script.py:model", "", "--source")
    assert done.exit_code == 0
    model = sys.modules["user_script"].model
    assert done.stdout == f"{hl.source(model, '')}\n"
    assert "@y /mul" in done.stdout


def test_source_as_json_has_addresses_and_labels(run: Run) -> None:
    command = ["user_script.py:model", "", "--source", "--example", "user_script.py:batch"]
    found = json.loads(run("sites", *command, "--json").stdout)
    assert found["addresses"] == ["@x", "@scale", "@y", "/mul", "@return", "/softmax"]
    (forward,) = found["forwards"]
    assert forward["paths"] == [""]
    assert forward["lines"][1]["code"] == "    y = self.fc(x) * scale"
    assert forward["lines"][1]["labels"] == [
        {"text": "@y", "look": "2x4"},
        {"text": "/mul", "look": "2x4"},
    ]


@pytest.mark.parametrize(
    ("command", "code", "error", "hint"),
    [
        (
            ["sites"],
            2,
            "Missing argument 'MODEL'.",
            "`hookline sites --help` shows how it is used",
        ),
        (
            ["site"],
            2,
            "No such command 'site'.",
            "`hookline --help` shows how it is used",
        ),
        (
            ["sites", "user_script.py:model", "--exmple", "x"],
            2,
            "No such option '--exmple'.",
            "`hookline sites --help` shows how it is used",
        ),
        (
            ["sites", "user_script.py"],
            2,
            "`user_script.py` does not say what to load",
            "write `package.module:name` or `path/to/file.py:name`",
        ),
        (
            ["sites", "user_script.py:model", "fc:foo"],
            2,
            "unknown port `foo`",
            "`hookline sites user_script.py:model` lists the modules of the model",
        ),
        (
            ["sites", "user_script.py:model", "fc2"],
            1,
            "`fc2` matches no site in `Net` (2 sites). Nearest: `fc`.",
            "`hookline sites user_script.py:model` lists the modules of the model",
        ),
        (
            ["sites", "use_script.py:model"],
            1,
            "there is no file `use_script.py`",
            "did you mean `user_script.py`",
        ),
        (
            ["sites", "user_script.py:modle"],
            1,
            "`user_script.py` has no `modle`",
            "did you mean `model`",
        ),
        (
            ["sites", "not_there.models:x"],
            1,
            "there is no module `not_there`",
            "run where it can be imported",
        ),
        (
            ["sites", "user_script.py:Needs"],
            1,
            "`user_script.py:Needs` cannot be called without arguments: "
            "missing a required argument: 'width'",
            "write a function that does it, `def make(): return Needs(...)`",
        ),
        (
            ["sites", "user_script.py:number"],
            1,
            "`user_script.py:number` is a `int`, not a model",
            "name an nn.Module",
        ),
        (
            ["sites", "user_script.py:make_nothing"],
            1,
            "`user_script.py:make_nothing` gave a `NoneType`, not a model",
            "name an nn.Module",
        ),
        (
            ["sites", "user_script.py:make_error"],
            1,
            "making the model `user_script.py:make_error` failed (user_script.py line 43): "
            "ValueError: no weights",
            "`hookline --traceback ...` shows the whole way to the error",
        ),
        (
            ["sites", "broken_script.py:model"],
            1,
            "importing `broken_script.py` failed (broken_script.py line 1): ModuleNotFoundError",
            "`hookline --traceback ...` shows the whole way to the error",
        ),
        (
            ["sites", "user_script.py:model", "--example", "user_script.py:make_wide"],
            1,
            "running the model on the example failed",
            "`hookline --traceback ...` shows the whole way to the error",
        ),
    ],
)
def test_mistakes_get_an_error_and_a_hint(
    run: Run, command: list[str], code: int, error: str, hint: str
) -> None:
    done = run(*command)
    assert done.exit_code == code
    assert f"error: {error}" in done.stderr
    assert f"hint: {hint}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_traceback_is_shown_when_asked_for(run: Run) -> None:
    done = run("--traceback", "sites", "user_script.py:make_error")
    assert isinstance(done.exception, ValueError)


def test_help_teaches_by_example(run: Run) -> None:
    for command in ([], ["--help"], ["-h"]):
        done = run(*command)
        assert done.exit_code == 0
        assert "sites       List the values of a model, by address." in done.stdout
        assert "  2  the command line cannot be understood" in done.stdout
    text = run("sites", "--help").stdout
    assert "hookline sites train.py:model layers.0.attn --source" in text


def test_help_needs_no_torch_and_import_no_click() -> None:
    """Seconds at a prompt; and who only imports the library does not load a command line."""
    probe = (
        "import sys, hookline.cli\n"
        "try: hookline.cli.main(['sites', '--help'])\n"
        "except SystemExit as done: assert done.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True)
    probe = "import sys, hookline as hl; hl.sites; assert 'click' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True)


def test_runs_as_a_module_without_colour(tmp_path: Path) -> None:
    script = tmp_path / "user_script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "hookline", "sites", f"{script}:model"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("2 sites in `Net`\n")
    assert "\x1b" not in done.stdout
