"""Do something as soon as torch is imported, and not a moment before.

A script may set what torch reads when it is imported, such as `OMP_NUM_THREADS`; so hookline waits
until the script itself imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_AWAITED = "torch"


class TorchArrival:
    """Call a function once, right after `import torch` is done."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._finder: _Finder | None = None

    def start(self) -> None:
        """Wait for torch; where it is there already, act at once."""
        if _AWAITED in sys.modules:
            self._act()
            return
        self._finder = _Finder(self._arrive)
        sys.meta_path.insert(0, self._finder)

    def stop(self) -> None:
        """Wait no longer."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder = None

    def _arrive(self) -> None:
        self.stop()
        self._act()


class _Finder(MetaPathFinder):
    """Find torch as everybody else would, with a loader that tells when it is done."""

    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive = arrive
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AWAITED or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _TellingLoader(spec.loader, self._arrive)
        return spec


class _TellingLoader(Loader):
    """Load with another loader; what is asked of it besides goes there too."""

    def __init__(self, loader: Loader, arrive: Callable[[], None]) -> None:
        self._loader = loader
        self._arrive = arrive

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # From here on the module is as it would be without us.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._arrive()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
