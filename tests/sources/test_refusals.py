"""Where there is no source, or not the one that runs, the reason is said."""

from __future__ import annotations

import importlib
import linecache
import os
import sys
from pathlib import Path

import pytest
from recording_taps import RecordingTaps

from hookline.sources import NoSource, read

TEXT = "def f(x):\n    y = x * 2\n    return y\n"


def made_from(text, file, name="f"):
    space: dict[str, object] = {"__name__": "made"}
    exec(compile(text, file, "exec"), space)
    return space[name]


def refusal(function):
    with pytest.raises(NoSource) as caught:
        read(function)
    return str(caught.value)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A file of its own that a test may change."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "changing.py").write_text("\n" + TEXT)
    importlib.invalidate_caches()
    import changing

    yield changing
    del sys.modules["changing"]


def change(module, text):
    Path(module.__file__).write_text(text, encoding="utf-8")
    os.utime(module.__file__, (1, 1))


def test_exec_has_no_source():
    reason = "there is no source (made by exec or typed in `python -c`)"
    assert refusal(made_from(TEXT, "<string>")) == reason


def test_missing_file_has_no_source():
    assert refusal(made_from(TEXT, "gone.py")) == "there is no source (its file cannot be read)"


def test_lambda_is_refused():
    assert refusal(lambda x: x) == "it is a lambda"


def test_what_is_no_python_function_is_refused():
    assert refusal(len) == "it is no Python function (builtin_function_or_method)"
    assert refusal(dict) == "it is no Python function (type)"


@pytest.mark.parametrize(
    "text",
    [
        "\ndef f(x):\n    y = x * 3\n    return y\n",
        "\n\n" + TEXT,
        "\ndef g(x):\n    y = x * 2\n    return y\n",
        "\ndef f(x):\n    y = (x * 2\n    return y\n",
        "\nclass f:\n    y = 2\n",
        "\n",
    ],
    ids=["constant", "moved", "renamed", "broken", "class", "short"],
)
def test_changed_file_is_refused(module, text):
    change(module, text)
    assert refusal(module.f).startswith("its file was changed since it was imported")


def test_changed_comment_is_none_of_the_function(module):
    change(module, "# new\n" + TEXT.replace("* 2", "* 2  # twice"))
    assert RecordingTaps(module.f, {"y"})(2) == 4


def test_function_read_before_its_file_changed_stays_read(module):
    read(module.f)
    change(module, "nothing = 1\n")
    assert RecordingTaps(module.f, {"y"})(2) == 4


def test_reloaded_file_is_read_anew(module):
    old = module.f
    change(module, "\ndef f(x):\n    z = x * 3\n    return z\n")
    importlib.reload(module)
    assert "z" in read(module.f).names
    assert refusal(old).startswith("its file was changed")


def test_notebook_cell_is_read():
    file = "<ipython-input-1-abc>"
    linecache.cache[file] = (len(TEXT), None, TEXT.splitlines(True), file)
    try:
        assert RecordingTaps(made_from(TEXT, file), {"y"}).table == ("y",)
    finally:
        del linecache.cache[file]


def test_generated_code_under_the_name_of_a_file_is_refused(module):
    assert refusal(made_from("\ndef f(x):\n    return x\n", module.__file__)).startswith(
        "its file was changed since it was imported"
    )


def test_function_renamed_in_its_code_is_refused(module):
    module.f.__code__ = module.f.__code__.replace(co_qualname="<made>.f")
    assert refusal(module.f) == "its definition was not found under the name `<made>.f`"
