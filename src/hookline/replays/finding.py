"""The replay itself: each kept call again, until one shows where a non-finite value comes from."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookline import _trees
from hookline._torch import add_forward_hooks
from hookline.addresses import ModuleTree, format_place
from hookline.addresses.pattern import escape
from hookline.hooks.arguments import bind
from hookline.replays.calls import KeptCall
from hookline.replays.events import BAD, MASK, Event
from hookline.replays.following import Follower
from hookline.replays.looking import look_at
from hookline.replays.nodes import BadNode, NodeTies
from hookline.replays.origins import Origin, not_reproduced
from hookline.replays.staging import CannotReplay, Stage


def find_origin(calls: Sequence[KeptCall], *, backward: bool) -> Origin | None:
    """Run kept calls again and find the operation that made the first non-finite value.

    In backward the latest call comes first, as gradients do. None where the calls run again
    without showing any; an `Origin` whose cause is `not reproduced` where they could not be run,
    or not as they were. Never raises, and leaves everything as it was.
    """
    failed: Origin | None = None
    for call in reversed(calls) if backward else calls:
        try:
            found = _replay_twice(call, backward=backward)
            changes = call.changes()
        except Exception as error:  # the user's code, or ours: a training goes on all the same
            found, changes = None, [_say(error)]
        if found is not None:
            return found
        if changes and failed is None:
            site = escape(call.prefix.rstrip("."))
            failed = not_reproduced("; ".join(changes), is_backward=backward, site=site)
    return failed


def _say(error: Exception) -> str:
    if isinstance(error, CannotReplay):
        return str(error)
    return f"the call could not be run again: {type(error).__name__}: {error}"


def _replay_twice(call: KeptCall, *, backward: bool) -> Origin | None:
    if backward:
        return _replay(call, backward=True, saves=True)
    try:
        return _replay(call, backward=False, saves=False)
    except CannotReplay:
        raise
    except Exception:  # a forward that needs its graph: it takes gradients itself
        return _replay(call, backward=False, saves=True)


def _replay(call: KeptCall, *, backward: bool, saves: bool) -> Origin | None:
    stage = Stage(call)
    if backward and any(not look_at(one).is_fine for one in call.gradients.values()):
        return None  # it comes from what was done with the outputs
    with warnings.catch_warnings(), stage.set_up():
        warnings.simplefilter("ignore")
        ties = NodeTies() if backward else None
        names, sources = _name(stage)
        follower = Follower(
            names,
            sources,
            ties=ties,
            protected=frozenset(stage.storages - {0}),
            start=call.line,
        )
        _listen(stage, follower)
        with _alone(), follower:
            with nullcontext() if saves else _saving_nothing():
                output = call.module(*stage.args, **stage.kwargs)
            found = _choose(follower, output)
            if found is not None:
                return _tell(found, call)
            if ties is not None:
                follower.is_judging = False
                _run_backward(stage, output, ties)
                if ties.found is not None:
                    return _tell_node(ties.found)
    return None


def _name(stage: Stage) -> tuple[dict[int, str], dict[int, tuple[str, str]]]:
    """Name the modules by id, and the tensors that are there from the start."""
    call = stage.call
    tree = ModuleTree(call.module)
    bare = call.prefix.rstrip(".")
    names = {
        id(entry.module): call.prefix + entry.names[0] if entry.names[0] else bare
        for entry in tree.entries
    }
    sources: dict[int, tuple[str, str]] = {}
    for entry in tree.entries:
        path = names[id(entry.module)]
        start = f"{path}." if path else ""
        for kind, tensors in (("buffer", "_buffers"), ("parameter", "_parameters")):
            for name, one in vars(entry.module)[tensors].items():
                if one is not None:
                    sources[id(one)] = (kind, escape(start + name))
    bound = bind(call.module, stage.args, stage.kwargs)
    for leaf, tensor in _trees.leaves(bound):
        sources[id(tensor)] = ("input", format_place(escape(bare), "input", leaf))
    return names, sources


def _listen(stage: Stage, follower: Follower) -> None:
    """Tell the follower of each execution; into hook dictionaries that the stage owns."""
    for module in stage.modules:
        key = add_forward_hooks(module, _Enter(follower), _Leave(follower), place=1)
        hooks: Any = module._forward_hooks
        hooks.move_to_end(key, last=False)  # before what the user's hooks do


class _Enter:
    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        self._follower.enter(module)


class _Leave:
    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def __call__(self, module: nn.Module, *given: Any) -> None:
        self._follower.leave(module, given[-1] if given else None)


@contextmanager
def _saving_nothing() -> Iterator[None]:
    """Build a graph that holds no tensors: it takes no memory, and nobody runs it."""
    nothing: Any = lambda _: None  # noqa: E731  torch wants two functions of a tensor
    with torch.autograd.graph.saved_tensors_hooks(nothing, nothing):
        yield


class _NoCollectives(TorchDispatchMode):
    """Refuse to talk to other ranks, who do not replay anything."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise CannotReplay("it talks to other ranks, which do not run the call again")
        return func(*args, **(kwargs or {}))


def _alone() -> Any:
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_initialized and torch.distributed.get_world_size() > 1:
        return _NoCollectives()  # type: ignore[no-untyped-call]
    return nullcontext()


def _choose(follower: Follower, output: Any) -> Event | None:
    """Choose the event to blame: of an output, else one that left its module.

    Else what an output shows that is no mask: -inf that was not put there, or inf.
    """
    reached = [
        (event, look_at(tensor))
        for _, tensor in _trees.leaves(output)
        if (event := follower.trace(tensor)) is not None
    ]
    bad = [event for event, _ in reached if event.level == BAD]
    if bad:
        return min(bad, key=lambda event: event.order)
    left = [event for event in follower.events if event.has_left]
    if left:
        return min(left, key=lambda event: event.order)
    return next((event for event, look in reached if event.level != MASK or look.posinf), None)


def _tell(event: Event, call: KeptCall) -> Origin:
    operation = event.operation
    return Origin(
        site=event.site or operation.site(),
        operation=operation.name,
        source=operation.line.place,
        line=operation.line.text,
        kind=event.kind,
        cause=event.cause,
        why=event.why,
        inputs=event.inputs,
        output=event.output,
        evidence=(*event.evidence, *call.changes()),
        visit=operation.execution.number,
    )


def _tell_node(found: BadNode) -> Origin:
    operation = found.maker
    site = operation.site()
    if found.is_single and operation.index >= 0:
        site = operation.site(":input", (found.names[found.slot],))
    return Origin(
        site=site,
        operation=found.name,
        is_backward=True,
        source=operation.line.place,
        line=operation.line.text,
        kind=found.kind,
        why=found.why,
        inputs=found.inputs,
        output=found.output,
        evidence=(f"in its backward: {found.inside}",) if found.inside else (),
        visit=operation.execution.number,
    )


def _run_backward(stage: Stage, output: Any, ties: NodeTies) -> None:
    """Run backward from the outputs with the gradients that were kept."""
    call = stage.call
    tensors: list[Tensor] = []
    grads: list[Tensor | None] = []
    for path, tensor in _trees.leaves(output):
        if not tensor.requires_grad:
            continue
        grad = call.gradients.get(path)
        if grad is None and (call.gradients or tensor.numel() != 1):
            continue
        tensors.append(tensor)
        grads.append(torch.ones_like(tensor) if grad is None else grad.to(tensor.dtype))
    if not tensors:
        raise CannotReplay("no gradient of its outputs is known")
    leaves = [one for one in stage.leaves.values() if one.requires_grad and one.is_leaf]
    # Not `torch.autograd.backward`, which a watch may have put itself around.
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tuple(tensors),
        tuple(grads),
        False,
        False,
        # Only into what stands for parameters; a backward inside a backward wants all or nothing.
        () if ties.has_reentrant or not leaves else tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=True,
    )
