"""What a function is called, and where it is written, without the folders of this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from hookline.sources import Reading, unwrap

_INSTALLED = {"site-packages", "dist-packages"}


def qualified_name(function: Callable[..., Any], module: nn.Module | None = None) -> str:
    """Name a function as its source does: `Attention.forward`."""
    inner = unwrap(function)[-1]
    name = getattr(inner, "__qualname__", None)
    if name is None:
        return f"{type(module).__name__}.forward" if module is not None else repr(inner)
    return str(name).rpartition("<locals>.")[2]


def describe_function(function: Callable[..., Any], reading: Reading) -> str:
    """Name a function with its file and line: ``` `Attention.forward`, models.py line 12 ```."""
    return f"`{qualified_name(function)}`, {show_file(reading.file)} line {reading.first_line}"


def show_file(file: str) -> str:
    """Write a file from the current folder or from its package on; a notebook cell as it is."""
    return file if file.startswith("<") else _shorten(file, str(Path.cwd()), tuple(sys.path))


@lru_cache(maxsize=1024)  # asked for at every site of a model, of which many share a file
def _shorten(file: str, here: str, folders: tuple[str, ...]) -> str:
    path = Path(file)
    if not _INSTALLED & set(path.parts):
        relative = _relative(path, here)
        if relative is not None:
            return relative
    found = [each for folder in folders if folder and (each := _relative(path, folder))]
    return min(found, key=len, default=path.name)


def _relative(path: Path, folder: str) -> str | None:
    try:
        return path.relative_to(folder).as_posix()
    except ValueError:
        return None


def is_of_torch(function: Callable[..., Any]) -> bool:
    """Tell whether a function is torch's own."""
    return (getattr(unwrap(function)[-1], "__module__", None) or "").split(".")[0] == "torch"
