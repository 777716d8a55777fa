"""Running compiled models eagerly while somebody needs Python at every value."""

from __future__ import annotations

import threading
from typing import Any, Literal

import torch

Compiled = Literal["graph", "eager"]
"""What a session does with compiled models: reach into their graphs, or run them without."""


def check_compiled(compiled: str) -> bool:
    """Tell whether compiled models are to be run eagerly; raise for what means nothing."""
    if compiled not in ("graph", "eager"):
        raise ValueError(
            f'compiled={compiled!r} means nothing: "graph" hears values inside of compiled graphs, '
            '"eager" runs compiled models without them meanwhile'
        )
    return compiled == "eager"


class _Stance:
    """Hold torch's stance as long as anybody wants models to run eagerly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._held: Any = None

    def take(self) -> None:
        """Run compiled models eagerly from now on."""
        with self._lock:
            if not self._count:
                self._held = torch.compiler.set_stance("force_eager")
                self._held.__enter__()
            self._count += 1

    def leave(self) -> None:
        """Let them run as before when everybody has left."""
        with self._lock:
            self._count -= 1
            if not self._count:
                self._held.__exit__(None, None, None)
                self._held = None


stance = _Stance()
"""The one stance of the process, which is torch's own."""
