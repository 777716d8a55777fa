"""What a script does with the output of its model: the code of the loss.

Where a loss is not finite and the model's output was, the operation is one of the script's own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hookline import _trees
from hookline.replays import Origin, OutsideOperations

_MOST_OUTPUTS = 8


class LossCode:
    """Follow the operations of a script from the end of a call to the backward."""

    def __init__(self) -> None:
        self._operations = OutsideOperations()
        self._step = -1
        self._sums: list[Tensor] = []
        """A sum of each output of this step: NaN or infinite where anything in there is."""

    def follow(self, output: Any, *, step: int) -> None:
        """Note operations from now on, in a step that may be new."""
        if step != self._step:
            self._step = step
            self._operations.reset()
            self._sums.clear()
        self._add(output)
        self._operations.start()

    def stop(self) -> None:
        """Note no more; does nothing the second time."""
        self._operations.stop()

    def find(self) -> Origin | None:
        """Give the operation that made the first value that is not finite.

        None where it came out of a model already. Sums tell that, since the output itself may be
        gone by now; a `-inf` in it is a mask.
        """
        sums = [float(one) for one in self._sums]
        if any(math.isnan(one) or one == math.inf for one in sums):
            return None
        return self._operations.find()

    def _add(self, output: Any) -> None:
        with torch.no_grad():
            for number, (_, tensor) in enumerate(_trees.leaves(output)):
                if number == _MOST_OUTPUTS:
                    break
                is_plain = tensor.layout is torch.strided and tensor.device.type != "meta"
                if tensor.is_floating_point() and is_plain and type(tensor) is Tensor:
                    self._sums.append(tensor.sum(dtype=torch.float32))
