"""From the text on a command line to the object it names: a model, an example.

package.module:name        imported, with the current folder first
path/to/file.py:name       run as a module of its own
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hookline.cli.failing import Failure, Misused, running_code

if TYPE_CHECKING:
    from torch import nn

_NOTATION = "write `package.module:name` or `path/to/file.py:name`"


def load_model(text: str) -> nn.Module:
    """Load a model: a module, or a function or class that makes one without arguments."""
    from torch import nn

    found = load(text)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise Failure(f"`{text}` is a `{type(found).__name__}`, not a model", _MODEL_HINT)
        _refuse_arguments(text, found)
        with running_code(f"making the model `{text}`"):
            found = found()
    if not isinstance(found, nn.Module):
        raise Failure(f"`{text}` gave a `{type(found).__name__}`, not a model", _MODEL_HINT)
    return found


_MODEL_HINT = (
    "name an nn.Module, or a function or class that makes one when it is called without arguments"
)


def load_example(text: str) -> Any:
    """Load an example: a value, a tuple of arguments, a dict of them, or what makes one."""
    from torch import Tensor

    found = load(text)
    if not callable(found) or isinstance(found, Tensor):
        return found
    _refuse_arguments(text, found)
    with running_code(f"making the example `{text}`"):
        return found()


def load(text: str) -> Any:
    """Load what `package.module:name` or `path/to/file.py:name` names."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name or not all(map(str.isidentifier, name.split("."))):
        raise Misused(f"`{text}` does not say what to load", _NOTATION)
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    value: Any = _load_file(place) if is_file else _load_module(place)
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise Failure(f"`{place}` has no `{name}`", _suggest(value, part)) from None
    return value


def _suggest(owner: Any, name: str) -> str:
    names = [one for one in dir(owner) if not one.startswith("_")]
    near = difflib.get_close_matches(name, names, 3)
    if near:
        return "did you mean " + " or ".join(f"`{one}`" for one in near) + "?"
    return f"it has: {', '.join(names[:12]) or 'nothing'}{', ...' if len(names) > 12 else ''}"


def _load_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise Failure(f"there is no file `{place}`", _suggest_file(Path(place)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Failure(f"`{place}` is no Python file", _NOTATION)
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    module = importlib.util.module_from_spec(spec)
    # As for a script: what lies beside the file can be imported, and pickle finds its classes.
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    try:
        with running_code(f"importing `{place}`"):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(path.stem, None)
        if known is not None:
            sys.modules[path.stem] = known
        raise
    return module


def _suggest_file(path: Path) -> str:
    names = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, 3)
    beside = [str(path.parent / one) for one in near]
    return "did you mean " + " or ".join(f"`{one}`" for one in beside) + "?" if near else _NOTATION


def _load_module(name: str) -> ModuleType:
    # A script that pip installs does not look into the current folder; `python -m` does.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with running_code(f"importing `{name}`"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise Failure(
                f"there is no module `{error.name}`",
                f"run where it can be imported, or give a file: {_NOTATION}",
            ) from None


def _refuse_arguments(text: str, maker: Any) -> None:
    """Raise for what cannot be called without arguments."""
    try:
        signature = inspect.signature(maker)
    except ValueError:  # written in C
        return
    try:
        signature.bind()
    except TypeError as error:
        name = text.rpartition(":")[2]
        raise Failure(
            f"`{text}` cannot be called without arguments: {error}",
            f"write a function that does it, `def make(): return {name}(...)`, and name that",
        ) from None
