"""A script runs as `python script.py` would run it: compared with Python itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hookline.scripts.launching import Launch, NoSuchScript, find_module, split_command

# Everything a script can see of the way in which it was started.
CURIOUS = '''"""Say how it was started."""
import atexit
import multiprocessing
import os
import pickle
import sys


class Thing:
    def __eq__(self, other):
        return type(other) is Thing


def double(number):
    return 2 * number


def main():
    print(__name__, __file__, __package__, __doc__, type(__loader__).__name__, __spec__ is None)
    print(sorted(name for name in globals() if name.startswith("__")))
    print(sys.argv, sys.path[0], os.getcwd(), "torch" in sys.modules)
    print(pickle.loads(pickle.dumps(Thing())) == Thing(), sys.modules["__main__"].Thing is Thing)
    for way in ("spawn", "fork"):
        with multiprocessing.get_context(way).Pool(1) as pool:
            print(way, pool.map(double, [1, 2]))
    import lies_beside

    print(lies_beside.value)
    print("to stderr", file=sys.stderr)


def fail():
    raise ValueError("as it should")


if __name__ == "__main__":
    atexit.register(print, "at the end")
    main()
    fail()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a package of two files, and stand in it."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "curious.py").write_text(CURIOUS)
    (package / "__init__.py").touch()
    (package / "lies_beside.py").write_text("value = 3\n")
    (tmp_path / "lies_beside.py").write_text("value = 4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", [["package/curious.py"], ["-m", "package.curious"]])
def test_script_sees_what_python_shows_it(folder: Path, target: list[str]) -> None:
    plain = run(*target, "--lr", "3", "-m", "x")
    ours = run("-m", "hookline", "run", *target, "--lr", "3", "-m", "x")
    assert ours.stdout == plain.stdout
    assert "as it should" in plain.stderr
    # `python -m` shows its own way into the module.
    assert ours.stderr.splitlines() == [
        line for line in plain.stderr.splitlines() if "<frozen runpy>" not in line
    ]
    assert "hookline" not in ours.stderr
    assert ours.returncode == plain.returncode == 1
    assert ours.stdout.endswith("at the end\n")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('a word')", 1),
        ("raise KeyboardInterrupt", 130),
        ("x = (", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('y') from e", 1),
    ],
)
def test_ends_as_python_does(folder: Path, text: str, code: int) -> None:
    (folder / "short.py").write_text(text)
    plain, ours = run("short.py"), run("-m", "hookline", "run", "--quiet", "short.py")
    assert (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)
    assert ours.returncode == code
    assert plain.returncode in (code, -2)  # Python ends itself by the signal where it was Ctrl-C


def test_module_may_be_a_package_with_a_main(folder: Path) -> None:
    assert find_module("json.tool").name == "json.tool"
    assert find_module("json.tool").origin.endswith("tool.py")
    (folder / "package" / "__main__.py").write_text("print(__name__, __package__)\n")
    assert run("-m", "hookline", "run", "-q", "-m", "package").stdout == "__main__ package\n"


def test_names_nothing_to_run() -> None:
    assert split_command([], module=None) is None
    assert split_command(["a.py", "-x"], module=None) == Launch("a.py", ("-x",))
    assert split_command(["-x"], module="a.b") == Launch("a.b", ("-x",), is_module=True)
    assert Launch("a.b", is_module=True).name == "b"
    assert Launch("x/a.b.py").name == "a.b"


def test_missing_file_gets_a_suggestion(folder: Path) -> None:
    with pytest.raises(NoSuchScript, match=r"there is no file `package/curios\.py`") as raised:
        Launch("package/curios.py").check()
    assert raised.value.hint == "did you mean `package/curious.py`?"
    with pytest.raises(NoSuchScript, match="`package` is a folder") as raised:
        Launch("package").check()
    assert raised.value.hint == "name a Python file; is it `package/curious.py`?"


def test_missing_module_is_told_from_one_that_fails(folder: Path) -> None:
    with pytest.raises(NoSuchScript, match="there is no module `not_there_at_all`"):
        find_module("not_there_at_all")
    (folder / "package" / "__init__.py").write_text("import not_there_either\n")
    done = run("-m", "hookline", "run", "-m", "package.curious")
    assert "ModuleNotFoundError: No module named 'not_there_either'" in done.stderr
    assert done.returncode == 1
