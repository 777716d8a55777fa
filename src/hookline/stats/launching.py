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
        self._last = tuple(constants.values())
        self.ready: dict[Any, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {}
        """By key what is called: a function, the arguments before and after the kernel's own."""

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
        ready = self.ready.get(key)
        if ready is not None and Launcher.is_quick:
            launch, first, last = ready
            launch(programs, 1, 1, stream, *first, *args, *last)
            return
        with undisturbed():
            compiled = self._kernel[(programs,)](
                *make_tensors(), **self._constants, num_warps=self._warps
            )
        if Launcher.is_quick is not False:
            launch, first = _shorten(compiled)
            self.ready[key] = launch, first, self._last


def _shorten(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """Find what launches a compiled kernel, and what it takes before the kernel's own arguments."""
    run = compiled.run
    hooks = (compiled.packed_metadata, None, None, None)
    if run.global_scratch_size or run.profile_scratch_size:
        return run, (compiled.function, *hooks)
    # What `run` does besides takes a microsecond: it looks for memory that no kernel here needs.
    modes = (run.launch_cooperative_grid, run.launch_pdl)
    return run.launch, (compiled.function, *modes, None, None, *hooks)
