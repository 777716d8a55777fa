"""The steps of a watch in TensorBoard: scalars, never histograms.

TensorBoard itself is needed only to make a sink; importing this file needs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from hookline._tables import import_optional
from hookline.stats.rows import STATS
from hookline.watchers import Scalars


class TensorBoard:
    """Write the numbers of each step to event files that TensorBoard shows.

        with hl.watch(model, to=[TensorBoard("runs/tb")]):
            train()

    A statistic is a group of its own there: `rms/layers.0:output`, `absmax/layers.0:output`. What
    was logged keeps its name. A sink serves one watch, which closes it.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str], *, stats: Sequence[str] = ("rms", "absmax")
    ) -> None:
        self.stats = (stats,) if isinstance(stats, str) else tuple(stats)
        """The statistics of each site that are written."""
        for stat in self.stats:
            if stat not in STATS:
                raise ValueError(
                    f"stats={stats!r}: TensorBoard gets statistics of each site, and {stat!r} is "
                    f"none; there are {', '.join(STATS)}"
                )
        # Asked for by name first: the error of torch's own module does not say what to install.
        import_optional("tensorboard")
        writing: Any = import_module("torch.utils.tensorboard")
        self._writer = writing.SummaryWriter(os.fspath(log_dir))

    def __call__(self, scalars: Scalars) -> None:
        """Write the numbers of one step."""
        for name, value in scalars.values.items():
            self._writer.add_scalar(name, value, scalars.step)

    def close(self) -> None:
        """Write what is left, and close the files."""
        self._writer.close()
