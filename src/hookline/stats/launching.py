"""How Triton kernels are launched in a few microseconds. Knows no kernel by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hookline.stats.preparing import undisturbed


class Launcher:
    """Launch a kernel; after the first time for a kind of arguments, in a few microseconds.

    Triton looks at every argument anew at each launch, which takes longer than many a kernel.
    """

    is_quick: ClassVar[bool | None] = None
    """Whether the short way gives what the usual one gives; None before that was tried."""

    def __init__(self, kernel: Any, *, warps: int = 8, **constants: Any) -> None:
        self._kernel = kernel
        self._warps = warps
        self._constants = constants
        self.compiled: dict[Any, Any] = {}

    def __call__(
        self,
        key: Any,
        programs: int,
        stream: int,
        args: Sequence[int | float],
        make_tensors: Callable[[], Sequence[Any]],
    ) -> None:
        """Run with addresses and numbers; `make_tensors` gives the same as tensors and numbers.

        `key` tells apart what is compiled differently: dtypes, and which addresses are aligned.
        """
        compiled = self.compiled.get(key)
        if compiled is None or not Launcher.is_quick:
            with undisturbed():
                tensors = make_tensors()
                self.compiled[key] = self._kernel[(programs,)](
                    *tensors, **self._constants, num_warps=self._warps
                )
            return
        compiled.run(
            programs,
            1,
            1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *args,
            *self._constants.values(),
        )
