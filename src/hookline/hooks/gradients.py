"""How a gradient reaches a listener, at a module's inputs and outputs.

A fresh output tensor carries a tensor hook: no alias, the object stays the same. Inputs, views and
inputs handed straight back get a tap: an identity node whose result is a detached alias, which
shares storage and version counter with the original, is no view, and so survives in-place
operations. Where a tapped input was changed in place, the original's history is put right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hookline import _trees
from hookline._torch import (
    add_tensor_hook,
    apply_function,
    graph_task_id,
    in_forward_mode,
    is_functorch_active,
)
from hookline._trees import Path
from hookline.addresses import format_place
from hookline.addresses.pattern import escape
from hookline.hooks.aliases import Audit, InputTaps
from hookline.hooks.caution import Way, choose_way, maker_of, needs_tap
from hookline.hooks.visits import Listener, Visit

Ear = tuple[Listener, Visit, Path]
"""A listener, the visit it listens in, and its leaf as the tree at hand spells it."""


def ears_for(tree: Any, asked: Sequence[tuple[Listener, Visit]]) -> list[Ear]:
    """Pair listeners with the place they ask for in this tree; drop those whose leaf is absent."""
    ears = []
    for listener, visit in asked:
        leaf = listener.leaf
        if leaf:
            try:
                leaf = _trees.canonical(tree, leaf)
            except _trees.NoSuchLeaf:
                listener.no_leaf(visit, tree)
                continue
        ears.append((listener, visit, leaf))
    return ears


class Tap(Function):
    """Pass tensors through unchanged and hand their gradients to a relay in backward."""

    @staticmethod
    def forward(ctx: Any, relay: Relay, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.relay = relay
        ctx.set_materialize_grads(in_forward_mode())  # forward mode takes no None for a tangent
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, *ctx.relay.deliver(list(grads)))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple([tangent.view_as(tangent) for tangent in tangents])


class _TapOne(Function):
    """Do what `Tap` does for a single tensor, which most modules take and return."""

    @staticmethod
    def forward(ctx: Any, relay: RelayOne, tensor: Tensor) -> Tensor:
        ctx.relay = relay
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, ctx.relay.deliver(grads)[0]

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


class _FunctorchTap(Function):
    """Do what `Tap` does under `torch.func` transforms, which want a separate set-up."""

    generate_vmap_rule = True

    @staticmethod
    def forward(relay: Relay | RelayOne, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.relay = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, *ctx.relay.deliver(list(grads)))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple([None if one is None else one.view_as(one) for one in tangents])


class Relay:
    """Bring the gradients of some tensors of one port to the listeners, in order."""

    __slots__ = ("audits", "ears", "paths", "port")

    def __init__(self, port: str, paths: list[list[Path]], ears: Sequence[Ear]) -> None:
        self.port = port
        self.paths = paths
        """Where each tensor stands in the port's tree; one tensor may stand in several places."""
        self.ears = ears
        self.audits: dict[int, Audit] = {}
        """Who watches over a tapped tensor, by its position."""

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """Serve as a tensor hook."""
        new = self.deliver([grad])[0]
        return None if new is grad else new

    def deliver(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        task = graph_task_id()
        for listener, visit, wanted in self.ears:
            if visit.call.epoch is not listener.session.epoch:
                continue
            heard = {}
            for position, places in enumerate(self.paths):
                path = _first_below(places, wanted)
                if path is not None:
                    grads[position] = listener.on_gradient(
                        visit, self.port, path, grads[position], task
                    )
                    heard[path] = position
            if listener.is_collective and heard:
                given = {path: grads[position] for path, position in heard.items()}
                for path, new in listener.on_gradients(visit, self.port, given, task).items():
                    grads[heard[path]] = new
        for position, audit in self.audits.items():
            audit.pass_through(grads[position], task)
        return grads

    def listeners(self) -> list[Ear]:
        """List who would hear of the first tensor, and where it stands for them."""
        found = [(*ear[:2], _first_below(self.paths[0], ear[2])) for ear in self.ears]
        return [(listener, visit, path) for listener, visit, path in found if path is not None]


class RelayOne:
    """Bring the gradient of the one tensor of a port to its one listener."""

    __slots__ = ("audits", "listener", "path", "port", "visit")

    def __init__(self, port: str, path: Path, listener: Listener, visit: Visit) -> None:
        self.port = port
        self.path = path
        self.listener = listener
        self.visit = visit
        self.audits: dict[int, Audit] = {}

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """Serve as a tensor hook."""
        new = self.deliver((grad,))[0]
        return None if new is grad else new

    def deliver(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        listener, visit = self.listener, self.visit
        task = graph_task_id()
        if visit.call.epoch is listener.session.epoch:
            grads = (listener.on_only_gradient(visit, self.port, self.path, grads[0], task),)
        if self.audits:
            self.audits[0].pass_through(grads[0], task)
        return grads

    def listeners(self) -> list[Ear]:
        return [(self.listener, self.visit, self.path)]


class NodeRelay:
    """Deliver what a hook on the node hears that made a tensor."""

    __slots__ = ("relay",)

    def __init__(self, relay: Callable[[Tensor | None], object]) -> None:
        self.relay = relay

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Serve as a pre hook of the node."""
        self.relay(grads[0])


class ViewRelay:
    """Deliver what a hook on a view hears, unless the view's memory was changed since.

    Inside a forward a view is not tapped: another name may hold the same object, and a later change
    of its base would not reach an alias. But once its memory was changed in place, torch makes the
    history of a view anew, and the hook hears of a part at most.
    """

    __slots__ = ("is_told", "relay", "version", "witness")

    def __init__(self, view: Tensor, relay: Relay | RelayOne) -> None:
        self.relay = relay
        self.version = view._version
        self.witness = witness_of(view)
        self.is_told = False

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """Serve as a tensor hook."""
        return None if self.tell_change() else self.relay(grad)

    def tell_change(self) -> bool:
        """Tell whether the memory was changed; the first time, also those who listen."""
        if self.witness._version == self.version:
            return False
        if not self.is_told:
            self.is_told = True
            for listener, visit, leaf in self.relay.listeners():
                listener.no_gradient(visit, self.relay.port, leaf, "changed view")
        return True


_nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def witness_of(tensor: Tensor) -> Tensor:
    """Make a tensor that shares the version counter of another and holds none of its memory."""
    key = tensor.dtype, tensor.device
    nothing = _nothing.get(key)
    if nothing is None:
        nothing = _nothing[key] = tensor.detach().new_empty(0)
    witness = tensor.detach()
    witness.data = nothing
    return witness


def is_plain_view(tensor: Tensor, received: Mapping[int, int]) -> bool:
    """Tell whether a tensor is a view that was made here, of which a hook hears all."""
    return (
        not tensor.is_leaf
        and tensor._is_view()
        and received.get(id(tensor)) != tensor._version
        and not is_functorch_active()
    )


def _hear_carefully(
    tensor: Tensor, relay: Relay | RelayOne, way: Way, module: nn.Module | None
) -> None:
    """Hear of a gradient in a way that does not change it, or say that there is none."""
    if way is Way.HOOK:
        add_tensor_hook(tensor, relay)
    elif way is Way.NODE:
        maker = maker_of(tensor, module)
        assert maker is not None
        maker.register_prehook(NodeRelay(relay))
    elif way is Way.VIEW:
        view = ViewRelay(tensor, relay)
        add_tensor_hook(tensor, view)
        for listener, _, leaf in relay.listeners():
            listener.on_hooked_view(leaf, view.witness, view.version)
    else:
        for listener, visit, leaf in relay.listeners():
            listener.no_gradient(visit, relay.port, leaf, "shared memory")


def _hook_view(tensor: Tensor, relay: Relay | RelayOne, views: list[ViewRelay]) -> None:
    view = ViewRelay(tensor, relay)
    views.append(view)
    add_tensor_hook(tensor, view)


def tap_one(
    tensor: Tensor, path: Path, listener: Listener, visit: Visit
) -> tuple[Tensor, RelayOne] | None:
    """Tap a module's only argument for its only listener; None where it has no gradient."""
    if not tensor.requires_grad:
        listener.no_gradient(visit, "input", path, "no-grad tensor")
        return None
    relay = RelayOne("input", path, listener, visit)
    return _tap_one(relay, tensor), relay


def wire_one(
    output: Tensor,
    listener: Listener,
    visit: Visit,
    received: Mapping[int, int],
    *,
    port: str = "output",
    views: list[ViewRelay] | None = None,
) -> Tensor:
    """Do what `wire_outputs` does for a single tensor and a single listener."""
    if not output.requires_grad:
        listener.no_gradient(visit, port, (), "no-grad tensor")
        return output
    relay = RelayOne(port, (), listener, visit)
    if listener.is_careful and not is_functorch_active():
        way = choose_way(
            output,
            received,
            module=visit.station.module,
            hooks_views=listener.hooks_views,
            is_inside=views is not None,
        )
        _hear_carefully(output, relay, way, visit.station.module)
        return output
    if views is not None and is_plain_view(output, received):
        _hook_view(output, relay, views)
        return output
    if not needs_tap(output, received):
        add_tensor_hook(output, relay)
        return output
    if not is_functorch_active():
        address = format_place(escape(visit.station.path), port, is_grad=True)
        relay.audits[0] = Audit(output, address)
    return _tap_one(relay, output)


def _tap_one(relay: RelayOne, tensor: Tensor) -> Tensor:
    alias: Tensor
    if is_functorch_active():
        (alias,) = _FunctorchTap.apply(relay, tensor)  # type: ignore[no-untyped-call]
    else:
        alias = apply_function(_TapOne, relay, tensor)
    if tensor.__dict__:
        alias.__dict__.update(tensor.__dict__)
    return alias


def _first_below(places: list[Path], leaf: Path) -> Path | None:
    return next((path for path in places if path[: len(leaf)] == leaf), None)


def _tap(relay: Relay, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    tap = _FunctorchTap if is_functorch_active() else Tap
    aliases: tuple[Tensor, ...] = tap.apply(relay, *tensors)  # type: ignore[no-untyped-call]
    for original, alias in zip(tensors, aliases, strict=True):
        if original.__dict__:
            alias.__dict__.update(original.__dict__)
    return aliases


def _make_relays(port: str, paths: list[list[Path]], ears: Sequence[Ear]) -> list[Relay]:
    """Make one relay for all tensors of a port if a listener wants to hear of all, else one each.

    A tap of several tensors runs the backward behind all of them once a gradient reaches one: a
    checkpoint there would run again, and parameters that had no gradient could get zeros.
    """
    if any(listener.hears_missing for listener, _, _ in ears):
        return [Relay(port, paths, ears)]
    return [Relay(port, [places], ears) for places in paths]


def _relay_of(relays: list[Relay], index: int) -> tuple[Relay, int]:
    """Give the relay of a tensor, and the tensor's position in it."""
    return (relays[0], index) if len(relays) == 1 else (relays[index], 0)


def _tap_through(relays: list[Relay], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    if len(relays) == 1:
        return _tap(relays[0], tensors)
    pairs = zip(relays, tensors, strict=True)
    return tuple([_tap(relay, [tensor])[0] for relay, tensor in pairs])


def _gather(tree: Any, ears: Sequence[Ear], port: str) -> tuple[list[Tensor], list[list[Path]]]:
    """List the distinct tensors some listener wants, with every place each stands in."""
    places: dict[int, tuple[Tensor, list[Path]]] = {}
    for path, tensor in _trees.leaves(tree):
        places.setdefault(id(tensor), (tensor, []))[1].append(path)
    tensors, paths = [], []
    for tensor, where in places.values():
        wanted = False
        for listener, visit, leaf in ears:
            place = _first_below(where, leaf)
            if place is None:
                continue
            if tensor.requires_grad:
                wanted = True
            else:
                listener.no_gradient(visit, port, place, "no-grad tensor")
        if wanted:
            tensors.append(tensor)
            paths.append(where)
    return tensors, paths


def tap_inputs(
    bound: dict[Any, Any], ears: Sequence[Ear], *, port: str = "input"
) -> tuple[dict[int, Tensor], InputTaps | None]:
    """Tap the wanted tensors among the named arguments; give the swaps and the taps made."""
    tensors, paths = _gather(bound, ears, port)
    if not tensors:
        return {}, None
    relays = _make_relays(port, paths, ears)
    aliases = _tap_through(relays, tensors)
    swaps = {id(tensor): alias for tensor, alias in zip(tensors, aliases, strict=True)}
    watched = [_relay_of(relays, index) for index in range(len(tensors))]
    path = ears[0][1].station.path
    return swaps, InputTaps(tensors, aliases, [*watched], bound, path)


def wire_outputs(
    output: Any,
    ears: Sequence[Ear],
    received: Mapping[int, int],
    path_of_module: str,
    *,
    port: str = "output",
    views: list[ViewRelay] | None = None,
) -> Any:
    """Have the gradients of the wanted output tensors delivered; give the output that flows on.

    `received` maps the ids of the module's input tensors to the version they came in with. With
    `views`, views are hooked and noted there, not tapped.
    """
    tensors, paths = _gather(output, ears, port)
    if not tensors:
        return output
    together = len(tensors) > 1 and any(listener.is_collective for listener, _, _ in ears)
    swaps: dict[int, Tensor] = {}
    tapped: list[Tensor] = []
    tapped_paths: list[list[Path]] = []
    is_careful = all(one.is_careful for one, _, _ in ears) and not is_functorch_active()
    hooks_views, is_inside = any(one.hooks_views for one, _, _ in ears), views is not None
    for tensor, places in zip(tensors, paths, strict=True):
        if is_careful:
            way = choose_way(
                tensor, received, module=None, hooks_views=hooks_views, is_inside=is_inside
            )
            _hear_carefully(tensor, Relay(port, [places], ears), way, None)
        elif views is not None and not together and is_plain_view(tensor, received):
            _hook_view(tensor, Relay(port, [places], ears), views)
        elif together or needs_tap(tensor, received):
            tapped.append(tensor)
            tapped_paths.append(places)
        else:
            add_tensor_hook(tensor, Relay(port, [places], ears))
    if tapped:
        relays = _make_relays(port, tapped_paths, ears)
        if not is_functorch_active():
            for index, (tensor, places) in enumerate(zip(tapped, tapped_paths, strict=True)):
                address = format_place(escape(path_of_module), port, places[0], is_grad=True)
                relay, position = _relay_of(relays, index)
                audit = relay.audits[position] = Audit(tensor, address)
                if audit.is_one_of_several:
                    ears[0][0].session.audits.append(audit)
        aliases = _tap_through(relays, tapped)
        swaps = {id(tensor): alias for tensor, alias in zip(tapped, aliases, strict=True)}
    return _trees.replace_tensors(output, swaps) if swaps else output
