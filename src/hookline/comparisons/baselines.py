"""A run in the place of an older one, without a moment in which there is neither."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hookline.runs.belonging import refuse_others


def replace_run(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a run beside a folder, and put it there once it is whole.

    Nothing of an older run is lost when this is interrupted. A folder that holds anything else is
    refused: it would go with the older run.
    """
    refuse_others(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as place:
        new, old = Path(place) / "new", Path(place) / "old"
        make(new)
        refuse_others(folder)  # it took a while
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
