"""Which cluster of Ray does an extraction, and having Ray there.

Knows nothing of what is extracted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hookline._errors import HooklineError

_LEVEL = "RAY_BACKEND_LOG_LEVEL"
_CAUSED = "The above exception was the direct cause"


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Which cluster does it, and how much of it."""

    address: str | None = None
    """Of a cluster that runs, `auto` for the one this machine is part of; None starts one here."""

    actors: int | tuple[int, int] = 1
    """How many hold the model: a number, or the fewest and the most."""

    gpus: float = 0.0
    """GPUs of each."""

    cpus: float = 1.0
    """Cores of each."""

    task: int | None = None
    """Samples of a task, which is what is done again after an actor was lost; found from the
    number of samples unless given."""

    @property
    def pool(self) -> tuple[int, int]:
        """The fewest actors and the most."""
        return self.actors if isinstance(self.actors, tuple) else (self.actors, self.actors)


@contextlib.contextmanager
def running_ray(ray: Any, cluster: RayCluster) -> Iterator[None]:
    """Have Ray run: as it does already, or one of its own, which says nothing that need not be."""
    if ray.is_initialized():
        yield
        return
    level = os.environ.get(_LEVEL)
    os.environ.setdefault(_LEVEL, "fatal")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if cluster.address is None and "RAY_ADDRESS" not in os.environ:
        options["include_dashboard"] = False
    try:
        with _hushed():
            ray.init(address=cluster.address, **options)
        yield
    finally:
        ray.shutdown()
        if level is None:
            os.environ.pop(_LEVEL, None)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Keep what is written to the standard error, from any language; pass it on after an error."""
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        shown = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        except BaseException:
            file.seek(0)
            os.write(shown, file.read())
            raise
        finally:
            os.dup2(shown, 2)
            os.close(shown)


def give_up(error: Exception) -> HooklineError:
    """Give what is raised where Ray itself does not go on."""
    return HooklineError(
        f"Ray gave up: {_shorten(error)}. Every finished shard stays; run the same again to go on"
    )


def _shorten(error: Exception) -> str:
    """Give the line that an error of Ray says most in."""
    text = str(error).partition(_CAUSED)[0]
    lines = [one.strip() for one in text.splitlines() if one.strip()]
    if lines and isinstance(error, import_ray().exceptions.RayTaskError):
        return lines[-1].rstrip(". ")  # of what was raised first, far away
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(". ")


def import_ray() -> Any:
    """Give Ray with its data sets, or say how to get it."""
    # Its own word about what it sends home, and about a file system it may not need.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError(f'this needs Ray ({error}): pip install "hookline[ray]"') from None
    return ray
