"""A run in the place of an older one, without a moment in which there is neither."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hookline.runs.schema import is_run


def replace_run(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a run beside a folder, and put it there once it is whole.

    Nothing of an older run is lost when this is interrupted. A folder that is no run is refused.
    """
    if folder.exists() and not is_run(folder) and (folder.is_file() or any(folder.iterdir())):
        raise FileExistsError(f"`{folder}` is there already, and is no run")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as place:
        new, old = Path(place) / "new", Path(place) / "old"
        make(new)
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
