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
cuda.py       the log of a CUDA device; cuda_extras.py its sketches and counts
measuring.py  where a tensor lies there, and the launch that measures it
readings.py   how the kernels read each dtype
slots.py      where they leave partial rows; arriving.py what is on its way from there
waiting.py    waiting for it, out of the way of who gives the device work
shares.py     what the Triton kernels are made of, with grouping.py; kernels.py,
              update_kernels.py and extra_kernels.py those that are launched
launching.py  how they are launched; repeating.py again and again for the same kinds of tensors,
              which likeness.py tells
anywhere.py   the log of any other device, by plain torch operations
"""

from __future__ import annotations

from hookline.stats.logs import (
    NOT_NOW,
    TOGETHER,
    UNLIKE,
    Extras,
    Log,
    Measured,
    Repeat,
    Taken,
    Update,
    open_log,
)

__all__ = [
    "NOT_NOW",
    "TOGETHER",
    "UNLIKE",
    "Extras",
    "Log",
    "Measured",
    "Repeat",
    "Taken",
    "Update",
    "open_log",
]
