"""From a value that is not finite to the operation that made it: the calls of a step are repeated.

The latest calls of the watched models are kept for as long as their step lasts, as references.
When something of a step is not finite they are run again before the optimizer changes the weights
that they ran with. That happens once in a training, or a few times where it shows nothing.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline._torch import CreationMeta, add_tensor_hook, creation_meta, is_functorch_active
from hookline.hooks.caution import maker_of
from hookline.hooks.gradients import NodeRelay
from hookline.replays import KeptCall, Origin, find_origin_apart, keep_call
from hookline.watchers.recording import Recorder

MOST_CALLS = 8
"""Calls of one step that are kept, the latest."""

_MOST_TRIES = 3
_MOST_SECONDS = 10.0
"""A search that takes longer is not made again."""

_MOST_LEAVES = 16
_MOST_BYTES = 1 << 28
"""Bytes of gradients that are held for one step; those of larger outputs are let go."""

_UNSEEN = (
    "the operation behind a value that is not finite was not looked for: the call of the model is "
    "compiled together with it, and its arguments stay in the graph"
)
_EAGERLY = "the step was run again without torch.compile to find the operation"

OF_BACKWARD = frozenset({"gradient", "local gradient", "parameter gradient"})
"""The kinds of sites that backward fills."""

OF_STEPS = frozenset({"update", "moment"})
"""Those that an optimizer fills: no call shows where they come from."""


class Seeker:
    """Keep the calls of a step, and find where a value that is not finite comes from."""

    def __init__(self, recorder: Recorder, *, is_wanted: bool, is_kept: bool = False) -> None:
        self.is_wanted = is_wanted
        """Whether calls are repeated at all."""
        self._is_kept = is_kept
        """Whether calls are kept also where they are not repeated."""
        self.others: list[Callable[[], Origin | None]] = []
        """Who is asked when no call shows it."""
        self.notes: list[str] = []
        """Why an operation was not found."""
        self._recorder = recorder
        self._calls: deque[KeptCall] = deque(maxlen=MOST_CALLS)
        self._count = 0
        """How many calls were ever kept: the number of the latest."""
        self._open: KeptCall | None = None
        """The call that has begun and not ended."""
        self.has_unseen = False
        """Whether a call of the step under way ran inside a compiled graph, with its arguments."""
        self._held = 0
        self._tries = 0

    @property
    def is_seeking(self) -> bool:
        """Whether it would still look for something."""
        return self.is_wanted and self._tries < _MOST_TRIES

    @property
    def calls(self) -> Sequence[KeptCall]:
        """The calls of the step under way, the oldest first."""
        return tuple(self._calls)

    def keep(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], prefix: str
    ) -> None:
        """Keep a call that begins."""
        if self.is_seeking or self._is_kept:
            self._open = keep_call(module, args, kwargs, prefix=prefix)
            self._calls.append(self._open)
            self._count += 1

    def note_output(self, module: nn.Module, output: Any) -> None:
        """Learn what a call gave, and have the gradients of that as they come."""
        call, self._open = self._open, None
        if call is None or is_functorch_active():
            return
        for number, (path, tensor) in enumerate(_trees.leaves(output)):
            if number == _MOST_LEAVES:
                break
            if not tensor.requires_grad or tensor.is_leaf or type(tensor) is not Tensor:
                continue
            keeper = _GradientKeeper(self, self._count, path)
            # Only where a hook can change nothing: see `hooks.light`.
            if not tensor._is_view() or creation_meta(tensor) == CreationMeta.MULTI_OUTPUT_NODE:
                add_tensor_hook(tensor, keeper)
            elif (maker := maker_of(tensor, module)) is not None:
                maker.register_prehook(NodeRelay(keeper))

    def take(self, number: int, path: _trees.Path, grad: Tensor) -> None:
        """Take the gradient of an output as it comes."""
        try:
            self.hold(number, path, grad)
        except Exception as error:
            self._recorder.guard.take(error)

    def hold(self, number: int, path: _trees.Path, grad: Tensor) -> None:
        """Hold the gradient of an output of a call, unless it is too large for that."""
        place = number - self._count + len(self._calls) - 1
        if self._recorder.is_deaf or not 0 <= place < len(self._calls):
            return
        call = self._calls[place]
        self._held += grad.numel() * grad.element_size()
        if self._held <= _MOST_BYTES:
            with torch._C.DisableTorchFunction():  # no mode is to see that
                call.note_gradients({path: grad.detach() if grad.requires_grad else grad})

    def drop(self) -> None:
        """Let go of the calls: their step is over."""
        self._calls.clear()
        self._open = None
        self.has_unseen = False
        self._held = 0

    def seek(self, kinds: Set[str]) -> Origin | None:
        """Find the operation behind what is not finite; `kinds` are the sites where that shows."""
        self._tries += 1
        began = time.monotonic()
        is_backward = not (kinds - OF_BACKWARD)
        with self._recorder.deaf():
            origin = find_origin_apart(self.calls, backward=is_backward) if self._calls else None
            if origin is None or origin.cause == "not reproduced":
                for ask in self.others:
                    other = ask()
                    if other is not None:
                        origin = other
                        break
        is_found = origin is not None and origin.cause != "not reproduced"
        if is_found or time.monotonic() - began > _MOST_SECONDS:
            self._tries = _MOST_TRIES
        if origin is None and self.has_unseen:
            self._note(_UNSEEN)
        if is_found and self._recorder.has_graphs:
            self._note(_EAGERLY)
        if origin is not None and not is_found:
            note = f"the operation behind a value that is not finite was not found: {origin.why}"
            self._note(note)
        return origin

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class _GradientKeeper:
    """Serve as a hook of an output, and hold its gradient."""

    __slots__ = ("number", "path", "seeker")

    __torch_unserializable__ = True
    """Who saves the output need not be warned that this does not go along."""

    def __init__(self, seeker: Seeker, number: int, path: _trees.Path) -> None:
        self.seeker = weakref.ref(seeker)  # an output may outlive the watch
        self.number = number
        self.path = path

    def __call__(self, grad: Tensor | None) -> None:
        seeker = self.seeker()
        if grad is not None and seeker is not None:
            seeker.take(self.number, self.path, grad)
