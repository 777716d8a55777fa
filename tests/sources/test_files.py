"""Layouts of source files in which a definition has to be found and compiled as it was."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest
from file_layouts import LAYOUTS
from recording_taps import RecordingTaps

from hookline.sources import locating, read
from hookline.sources.compiling import quiet_compile

numbers = itertools.count()


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write a file and import it."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write_and_import(text):
        name = f"layout_{next(numbers)}"
        names.append(name)
        content = text if isinstance(text, bytes) else text.encode()
        (tmp_path / f"{name}.py").write_bytes(content)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield write_and_import
    for name in names:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_definition_is_found_in_any_layout(load, layout):
    module = load(LAYOUTS[layout])
    taps = RecordingTaps(module.C.f, {"y"})

    assert taps(module.C(), 5) == module.C().f(5) == 5
    assert taps.values("y") == [5]
    assert taps.function.__code__.co_firstlineno == module.C.f.__code__.co_firstlineno


def test_lines_of_a_definition_end_with_it(load):
    reading = read(load(LAYOUTS["brackets at the left"]).C.f)

    assert reading.lines[-1] == ")\n"
    assert (reading.first_line, reading.last_line) == (2, 8)


def test_names_used_in_many_ways_are_told_apart_as_imports_or_not(load):
    """Attributes of more than 256 names take longer instructions."""
    many = "".join(f"        x.attribute_{at} = {at}\n" for at in range(300))
    module = load(
        "import math\nimport types\nother = math\nclass C:\n    def f(self, x):\n"
        f"        x = types.SimpleNamespace()\n{many}"
        "        y = math.floor(2.5) + other.floor(2.5)\n        return y\n"
    )
    assert RecordingTaps(module.C.f, {"y"})(module.C(), 5) == 4


def test_rest_of_a_long_file_is_not_parsed(load, monkeypatch):
    filler = "".join(f"def filler_{at}(x):\n    return x\n" for at in range(1000))
    module = load(filler + LAYOUTS["super"] + filler)
    parsed = []

    def record(source, *rest):
        parsed.append(source)
        return quiet_compile(source, *rest)

    monkeypatch.setattr(locating, "quiet_compile", record)
    RecordingTaps(module.C.f, {"y"})

    assert len(parsed) == 2
    assert all(len(text.strip().splitlines()) == 5 for text in parsed)
