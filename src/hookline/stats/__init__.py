"""One-pass mergeable statistics of tensors. Knows no models.

rows.py       a row of statistics: merging, scaling, what follows from it; numpy alone
logs.py       what a log does on any device, and which one measures a device
preparing.py  from any tensor to plain numbers in memory
reference.py  the statistics by plain torch operations: the definition
cpu.py        the log of tensors on the CPU
sheets.py     where it writes until somebody takes it
compiled.py   the kernel compiled on this machine, and why not
kernel.c      the kernel: rows, sketches and counts in one pass
elements.h    the kernel's elements: reading any dtype block by block
blocks.py     the CPU path where nothing can be compiled
cuda.py       the log of a CUDA device
arriving.py   what is on its way from there
kernels.py    its Triton kernels; extra_kernels.py those that run more rarely
launching.py  how they are launched
anywhere.py   the log of any other device, by plain torch operations
"""

from __future__ import annotations

from hookline.stats.logs import Extras, Log, Measured, Taken, Update, open_log

__all__ = ["Extras", "Log", "Measured", "Taken", "Update", "open_log"]
