"""Run a user's function so that watching changes nothing and failing says where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline import _trees
from hookline._errors import HooklineError
from hookline._torch import is_capturing_cuda_graph
from hookline.hooks.visits import At, Visit, describe

if TYPE_CHECKING:
    from hookline.hooks.sessions import Session

_DEVICES_WITH_AUTOCAST = ("cpu", "cuda", "xpu", "mps")


def run(
    session: Session, visit: Visit, address: str, function: Callable[..., Any], *args: Any
) -> Any:
    """Call a user's function; an error gains a note that names the site and closes the session."""
    try:
        return function(*args)
    except Exception as error:
        explain(error, session, visit, address)
        raise


def explain(error: Exception, session: Session, visit: Visit, address: str) -> None:
    """Note on a user's error where it came up, and take the hook away."""
    error.add_note(
        f"in a hook of {session.purpose} at {describe(visit, address)}; the hook was removed"
    )
    session.close()


def observe(
    session: Session, visit: Visit, function: Callable[[Any, At], Any], value: Any, at: At
) -> None:
    """Call an observer: its return is ignored, and nothing it does reaches the model."""
    tensors = [tensor for _, tensor in _trees.leaves(value)]
    if any(tensor.is_inference() for tensor in tensors):
        # They count no versions; on copies that do, a change in place is noticed as elsewhere.
        with torch.inference_mode(False):
            value = _trees.map_tensors(value, lambda _, tensor: tensor.clone())
        tensors = [tensor for _, tensor in _trees.leaves(value)]
    versions = [tensor._version for tensor in tensors]
    with _quiet(tensors):
        run(session, visit, at.address, function, value, at)
    at.forget()
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            session.close()
            raise HooklineError(
                f"the hook at {describe(visit, at.address)} changed the value in place; a hook "
                "only looks. To change values use hl.edit, or hl.hook(..., edit=True)."
            )


@contextmanager
def _quiet(tensors: list[Tensor]) -> Iterator[None]:
    """Switch off grad and autocast, and put the random state back afterwards."""
    generators = [torch.default_generator]
    on_cuda = [tensor for tensor in tensors if tensor.is_cuda]
    if on_cuda and not any(map(is_capturing_cuda_graph, on_cuda)):
        devices = {tensor.device.index or 0 for tensor in on_cuda}
        generators.extend(torch.cuda.default_generators[index] for index in devices)
    states = [generator.get_state() for generator in generators]
    enabled = [kind for kind in _DEVICES_WITH_AUTOCAST if torch.is_autocast_enabled(kind)]
    grad = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    for kind in enabled:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        for kind in enabled:
            torch.set_autocast_enabled(kind, True)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
