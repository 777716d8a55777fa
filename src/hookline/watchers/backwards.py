"""Backward passes between steps: what tells that a training steps its weights by hand.

Nobody is told of an update that is written out in the script. But where one backward follows the
other, no optimizer ever steps, and the weights move or the gradients are gone each time, a
backward is as good as a step. Accumulation over many micro-batches looks the same but for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import nn

_ENOUGH = 8
"""Backward passes without a step before a training may be taken for one by hand."""

_CERTAIN = 64
"""As many are no accumulation any more, whatever the weights do."""

_MOST_CALLS = 64
"""Calls with grad and without a backward before they are taken for a step of their own."""

_SAMPLED = 4


class Backwards:
    """Count calls and backward passes since the last step."""

    def __init__(self) -> None:
        self.is_by_hand = False
        """Whether a backward ends the step, since nothing else does."""
        self.may_be_by_hand = True
        """Whether no optimizer was ever told of."""
        self._passes = 0
        self._calls = 0
        self._has_filled = False
        """Whether a pass has filled the gradients of parameters, and not just given them."""
        self._sample: list[tuple[nn.Parameter, int]] = []

    @property
    def has_idle_calls(self) -> bool:
        """Whether calls follow each other that lead to nothing."""
        return self._calls >= _MOST_CALLS

    def turns_by_hand(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Learn that a call begins; tell whether what became of the weights says so now."""
        self._calls += 1
        if not self.may_be_by_hand or self.is_by_hand or not self._passes:
            return False
        if not self._sample:
            moving = (one for one in parameters if one.requires_grad)
            self._sample = [(one, one._version) for one in itertools.islice(moving, _SAMPLED)]
        if self._passes >= _CERTAIN or (self._passes >= _ENOUGH and self._has_moved()):
            self.is_by_hand = True
            self._sample = []
        return self.is_by_hand

    def note_backward(self, *, fills: bool = True) -> None:
        """Learn that a backward pass is over; `torch.autograd.grad` fills no parameter's."""
        self._passes += 1
        self._calls = 0
        self._has_filled = self._has_filled or fills

    def take_by_hand(self) -> None:
        """Take each backward for a step from now on."""
        self.is_by_hand = True

    def note_step(self, *, is_told: bool) -> None:
        """Learn that a step ends; where that was told, nothing is done by hand."""
        self._passes = self._calls = 0
        self._has_filled = False
        self._sample = []
        if is_told:
            self.may_be_by_hand = self.is_by_hand = False

    def _has_moved(self) -> bool:
        if any(one._version != version for one, version in self._sample):
            return True
        return self._has_filled and all(one.grad is None for one, _ in self._sample)
