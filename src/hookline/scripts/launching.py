"""Run a script or a module as `__main__`, as `python script.py` and `python -m module` do.

The script's namespace is the module `__main__`: pickle finds its classes there, and processes that
it spawns find its file.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from hookline._errors import HooklineError


class NoSuchScript(HooklineError, FileNotFoundError):
    """Say that there is nothing to run, and what to write instead."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be run: a file or a module, and its arguments."""

    target: str
    """The file, as it was given, or the dotted name of the module."""

    args: tuple[str, ...] = ()
    """What follows it on the command line."""

    is_module: bool = False
    """Whether the target is a module."""

    @property
    def name(self) -> str:
        """A short name for it: `train` for `src/train.py` and for `project.train`."""
        return self.target.rpartition(".")[2] if self.is_module else Path(self.target).stem

    def check(self) -> None:
        """Raise where there is no such file; a module is looked for when it is run."""
        if not self.is_module:
            _check_file(self.target)

    def run(self) -> None:
        """Run it to its end; what it raises comes through, and `__main__` stays the script."""
        if self.is_module:
            self._run_module()
        else:
            self._run_file()

    def _run_file(self) -> None:
        path = _check_file(self.target)
        sys.argv = [self.target, *self.args]
        _set_first_path(str(path.resolve().parent))
        file = str(path.absolute())
        loader = SourceFileLoader("__main__", file)
        namespace = _make_main(file=file, loader=loader, spec=None, package=None)
        with io.open_code(file) as stream:
            text = stream.read()
        exec(compile(text, file, "exec", dont_inherit=True), namespace)

    def _run_module(self) -> None:
        sys.argv = ["-m", *self.args]
        _set_first_path(str(Path.cwd()))
        spec = find_module(self.target)
        loader: Any = spec.loader
        code = loader.get_code(spec.name)
        if code is None:
            raise NoSuchScript(f"the module `{self.target}` has no code that can be run")
        sys.argv[0] = spec.origin or self.target
        namespace = _make_main(
            file=spec.origin, loader=loader, spec=spec, package=spec.parent, cached=spec.cached
        )
        exec(code, namespace)


def find_module(name: str) -> ModuleSpec:
    """Find a module by its dotted name; a package stands for its `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package on the way could not be imported for a reason of its own
        spec = None
    if spec is None or spec.loader is None:
        raise NoSuchScript(
            f"there is no module `{name}`",
            "run where it can be imported, or give a file: `hookline run script.py`",
        )
    return spec


def _check_file(target: str) -> Path:
    path = Path(target)
    if path.is_dir():
        names = [one for one in sorted(path.glob("*.py")) if one.name != "__init__.py"]
        inside = "".join(f"; is it `{one}`?" for one in names[:1])
        raise NoSuchScript(f"`{target}` is a folder, not a script", f"name a Python file{inside}")
    if not path.is_file():
        raise NoSuchScript(f"there is no file `{target}`", _suggest(path))
    return path


def _suggest(path: Path) -> str:
    from difflib import get_close_matches

    names = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = [str(path.parent / one) for one in get_close_matches(path.name, names, 3)]
    if near:
        return "did you mean " + " or ".join(f"`{one}`" for one in near) + "?"
    return "options of hookline come before the script, and those of the script after it"


def _set_first_path(folder: str) -> None:
    """Let the script find what lies beside it where Python put the place of its own script."""
    if getattr(sys.flags, "safe_path", False):
        return
    if sys.path:
        sys.path[0] = folder
    else:
        sys.path.append(folder)


def _make_main(
    *,
    file: str | None,
    loader: Any,
    spec: ModuleSpec | None,
    package: str | None,
    cached: str | None = None,
) -> dict[str, Any]:
    main = types.ModuleType("__main__")
    namespace = vars(main)
    namespace.update(
        __builtins__=builtins,
        __cached__=cached,
        __file__=file,
        __loader__=loader,
        __package__=package,
        __spec__=spec,
    )
    if sys.version_info < (3, 14):  # a script that has none may still read it
        namespace["__annotations__"] = {}
    sys.modules["__main__"] = main
    return namespace


def split_command(words: Sequence[str], *, module: str | None) -> Launch | None:
    """Tell from what is left on a command line what is to be run."""
    if module is not None:
        return Launch(module, tuple(words), is_module=True)
    return Launch(words[0], tuple(words[1:])) if words else None
