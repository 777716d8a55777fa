"""Running compiled models eagerly while somebody needs Python at every value."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from hookline._compiler import force_eager, is_called_compiled
from hookline._errors import UnsupportedModel

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
        self._end: Callable[[], None] | None = None

    def refuse_inside(self) -> None:
        """Raise where a compiled function is running: what it calls would be compiled anyway."""
        if is_called_compiled():
            raise UnsupportedModel(
                'compiled="eager" has no effect on what runs already, and this is called by a '
                "compiled function. Open the session around the call of that function."
            )

    def take(self) -> None:
        """Run compiled models eagerly from now on."""
        with self._lock:
            if not self._count:
                self._end = force_eager()
            self._count += 1

    def leave(self) -> None:
        """Let them run as before when everybody has left."""
        with self._lock:
            self._count -= 1
            if not self._count and self._end is not None:
                self._end()
                self._end = None


stance = _Stance()
"""The one stance of the process, which is torch's own."""
