"""The parameters and buffers of a model around one step, for a trace."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.addresses import ModuleTree, ParameterEntry
from hookline.recordings.course import Course
from hookline.recordings.unusual import find_obstacle


class Buffers:
    """Take the buffers of a model before each step, and after it those that it has changed.

    In later steps a buffer is looked at only if it ever changed: most are constants.
    """

    def __init__(self, tree: ModuleTree, course: Course, prefix: str = "") -> None:
        self._tree = tree
        self._course = course
        self._prefix = prefix
        self._copies: dict[str, tuple[nn.Module, str, Tensor]] = {}
        """By full name: the owner, the name there, and what it was."""
        self._constant: dict[str, int] = {}
        """Those that have not changed so far, with their version."""

    def begin(self) -> None:
        """Copy the buffers, and take them as they are."""
        self.copy()
        self.take()

    def copy(self) -> None:
        """Copy the buffers: the step may change them."""
        self._copies.clear()
        seen: dict[int, Tensor] = {}
        for entry in self._tree.entries:
            for name, buffer in entry.module._buffers.items():
                if buffer is None or is_lazy(buffer) or id(buffer) in seen:
                    continue
                seen[id(buffer)] = buffer
                path = self._prefix + (f"{entry.names[0]}.{name}" if entry.names[0] else name)
                why = find_obstacle(buffer)
                if why is not None:
                    self._course.unmeasured.setdefault(path, why)
                elif self._constant.get(path) != _version(buffer):
                    self._copies[path] = (entry.module, name, buffer.detach().clone())

    def take(self) -> None:
        """Take the copies as the buffers before the step."""
        for path, (owner, _, copy) in self._copies.items():
            self._course.state("buffer", path, copy, owner=owner)

    def end(self) -> None:
        """Take the buffers that the step has changed."""
        for path, (owner, name, copy) in self._copies.items():
            now = dict(owner._buffers.items()).get(name)  # TorchScript's are no dict
            if now is None or find_obstacle(now) is not None:
                continue
            # By value: batch normalisation changes its statistics and not their version.
            if _is_equal(now, copy):
                self._constant[path] = _version(now)
            else:
                self._constant[path] = -1
                self._course.state("buffer", path, now.detach(), owner=owner, is_after=True)
        self._copies.clear()


class States:
    """Take the buffers, parameters, gradients and updates of one step."""

    def __init__(self, tree: ModuleTree, course: Course) -> None:
        self._tree = tree
        self._course = course
        self._buffers = Buffers(tree, course)
        self._before: list[tuple[ParameterEntry, Tensor]] = []

    def begin(self) -> None:
        """Copy what the step may change."""
        self._buffers.copy()
        self._before.clear()

    def take(self, *, is_stepped: bool) -> None:
        """Take buffers and parameters as they were, then gradients as they are.

        `is_stepped` says that an optimizer will change the parameters: they are copied.
        """
        self._buffers.take()
        entries = [one for one in self._tree.parameters if not is_lazy(one.parameter)]
        for entry in entries:
            self._course.state(
                "parameter",
                entry.names[0],
                entry.parameter.detach(),
                owner=entry.places[0][0],
                requires_grad=entry.parameter.requires_grad,
            )
        for entry in entries:
            grad = entry.parameter.grad
            if grad is not None:
                self._course.state(
                    "parameter gradient", entry.names[0], grad.detach(), owner=entry.places[0][0]
                )
        if is_stepped:
            self._before = [(entry, entry.parameter.detach().clone()) for entry in entries]

    def take_updates(self) -> None:
        """Take what an optimizer has added to the parameters."""
        with torch.no_grad():
            for entry, before in self._before:
                if entry.parameter.requires_grad:
                    update = entry.parameter.detach() - before
                    self._course.state("update", entry.names[0], update, owner=entry.places[0][0])
        self._before.clear()

    def end(self) -> None:
        """Take the buffers that the step has changed."""
        self._buffers.end()


def _is_equal(now: Tensor, before: Tensor) -> bool:
    if now.shape != before.shape or now.dtype != before.dtype or now.layout != before.layout:
        return False
    if now.layout is not torch.strided:
        now, before = now.to_dense(), before.to_dense()
    return torch.equal(now, before)


def _version(tensor: Tensor) -> int:
    """Give a number that changes when a tensor is changed in place, or exchanged."""
    return -2 if tensor.is_inference() else hash((id(tensor), tensor._version))
