"""How a gradient reaches a listener, at a module's inputs and outputs.

A fresh output tensor carries a tensor hook: no alias, the object stays the same. Inputs, views and
inputs handed straight back get a tap: an identity node whose result is a detached alias, which
shares storage and version counter with the original, is no view, and so survives in-place
operations. Where a tapped input was changed in place, the original's history is put right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hookline import _trees
from hookline._errors import GradientError
from hookline._torch import (
    CreationMeta,
    add_tensor_hook,
    apply_function,
    creation_meta,
    graph_task_id,
    in_forward_mode,
    is_functorch_active,
    preserve_version,
)
from hookline._trees import Path
from hookline.addresses import format_leaf
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


class _Rebase(Function):
    """Make a tensor's history run through an alias of it that was changed in place."""

    @staticmethod
    def forward(ctx: Any, original: Tensor, alias: Tensor) -> Tensor:
        ctx.mark_dirty(original)
        return original

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        # Zeros, not None: None would lose the rest of a view's base.
        return torch.zeros_like(grad), grad


class Relay:
    """Bring the gradients of some tensors of one port to the listeners, in order."""

    __slots__ = ("audits", "ears", "paths", "port")

    def __init__(self, port: str, paths: list[list[Path]], ears: Sequence[Ear]) -> None:
        self.port = port
        self.paths = paths
        """Where each tensor stands in the port's tree; one tensor may stand in several places."""
        self.ears = ears
        self.audits: list[_Audit] = []
        """One for each tensor, where they are outputs that were tapped."""

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
        for audit, grad in zip(self.audits, grads, strict=False):
            audit.pass_through(grad, task)
        return grads


class RelayOne:
    """Bring the gradient of the one tensor of a port to its one listener."""

    __slots__ = ("audit", "listener", "path", "port", "visit")

    def __init__(self, port: str, path: Path, listener: Listener, visit: Visit) -> None:
        self.port = port
        self.path = path
        self.listener = listener
        self.visit = visit
        self.audit: _Audit | None = None

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """Serve as a tensor hook."""
        new = self.deliver((grad,))[0]
        return None if new is grad else new

    def deliver(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        listener, visit = self.listener, self.visit
        task = graph_task_id()
        if visit.call.epoch is listener.session.epoch:
            grads = (listener.on_only_gradient(visit, self.port, self.path, grads[0], task),)
        if self.audit is not None:
            self.audit.pass_through(grads[0], task)
        return grads


def tap_one(tensor: Tensor, path: Path, listener: Listener, visit: Visit) -> Tensor | None:
    """Tap a module's only argument for its only listener; None where it has no gradient."""
    if not tensor.requires_grad:
        listener.no_gradient(visit, "input", path, "no-grad tensor")
        return None
    return _tap_one(RelayOne("input", path, listener, visit), tensor)


def wire_one(output: Tensor, listener: Listener, visit: Visit, received: dict[int, int]) -> Tensor:
    """Do what `wire_outputs` does for a single tensor and a single listener."""
    if not output.requires_grad:
        listener.no_gradient(visit, "output", (), "no-grad tensor")
        return output
    relay = RelayOne("output", (), listener, visit)
    if not _needs_tap(output, received):
        add_tensor_hook(output, relay)
        return output
    if not is_functorch_active():
        relay.audit = _Audit(output, f"{visit.station.path}:output.grad")
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


class _Audit:
    """Watch over a tapped output that shares memory with a tensor somebody else may use.

    When the alias is changed in place, later uses of the original, or of the base of a view, miss
    that change in their history. So once it was changed, everything in the gradient of the
    original must have come through the tap; anything else is refused.
    """

    __slots__ = ("address", "place", "root", "through", "version", "witness")

    def __init__(self, original: Tensor, address: str) -> None:
        self.address = address
        self.through: dict[int, Tensor | None] = {}
        """The gradients that came through the tap, by backward pass."""
        self.version = original._version
        # It shares the version counter and holds no memory.
        self.witness = original.detach()
        self.witness.data = original.new_empty(0)
        root = original
        if original._is_view() and original._base is not None:
            root = original._base
        offset = original.storage_offset() - root.storage_offset()
        self.place = (original.shape, original.stride(), offset)
        self.root = (root.shape, root.stride())
        if root.requires_grad and not root.is_leaf:
            add_tensor_hook(root, self.check)

    @property
    def is_changed(self) -> bool:
        return self.witness._version != self.version

    def pass_through(self, grad: Tensor | None, task: int) -> None:
        """Note what comes through the tap; before the original has its gradient."""
        if self.is_changed:
            self.through[task] = grad

    def check(self, grad: Tensor | None) -> None:
        """Run when the gradient of the original, or of its base, is there."""
        if not self.is_changed or grad is None:
            return
        through = self.through.pop(graph_task_id(), None)
        if not self._is_all(grad.detach(), through):
            raise GradientError(
                f"`{self.address}` is a view or an unchanged input of its module, it was changed "
                "in place after the module returned it, and the tensor it shares memory with is "
                "used elsewhere: its gradient cannot be observed without changing the model's. "
                "Ask for the gradient of the next module's input, or let the module return a new "
                "tensor."
            )

    def _is_all(self, total: Tensor, through: Tensor | None) -> bool:
        if through is not None and through.dtype != total.dtype:
            return False  # a view as another type
        whole = torch.empty_strided(*self.root, dtype=total.dtype, device=total.device)
        part = whole.copy_(total).as_strided(*self.place)
        wanted = torch.zeros_like(part) if through is None else through.detach()
        is_same = (part == wanted) | (part.isnan() & wanted.isnan())
        part.zero_()
        return bool(is_same.all()) and not bool(whole.any())


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


class InputTaps:
    """The tapped arguments of one call: originals, aliases, and the version they had."""

    __slots__ = ("aliases", "bound", "originals", "path", "versions")

    def __init__(
        self,
        originals: list[Tensor],
        aliases: tuple[Tensor, ...],
        bound: dict[str, Any] | None = None,
        path: str = "",
    ) -> None:
        self.originals = originals
        self.aliases = aliases
        self.bound = bound
        """All arguments by name, where there are several."""
        self.path = path
        self.versions = [tensor._version for tensor in originals]

    def rebase(self) -> None:
        """Give originals that were changed in place through their alias the right history."""
        for original, alias, version in zip(
            self.originals, self.aliases, self.versions, strict=True
        ):
            if original._version != version:
                if not original.is_leaf:
                    self._refuse_overlap(original)
                rebase(original, alias)

    def _refuse_overlap(self, changed: Tensor) -> None:
        """Raise where another argument saw the change, whose alias knows nothing of it."""
        for leaf, tensor in _trees.leaves(self.bound):
            if tensor is not changed and _overlap(tensor, changed):
                raise GradientError(
                    f"`{self.path}:input{format_leaf(leaf)}` shares memory with another argument, "
                    "and one of them was changed in place inside the module: their gradients "
                    "cannot be told apart. Pass a clone() of one of them."
                )


def rebase(original: Tensor, alias: Tensor) -> None:
    """Give a tensor that was changed in place through its alias the alias's history."""
    if original.is_leaf:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    with preserve_version(original):
        _Rebase.apply(original, alias)  # type: ignore[no-untyped-call]


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have an element in common."""
    if one.layout != torch.strided or other.layout != torch.strided:
        return False
    storage = one.untyped_storage()
    if storage.data_ptr() != other.untyped_storage().data_ptr() or not one.numel():
        return False
    if one.element_size() != other.element_size():
        return True
    # Slow and exact: columns of one matrix lie between each other without overlapping.
    marks = torch.zeros(storage.nbytes() // one.element_size(), dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def tap_inputs(
    bound: dict[str, Any], ears: Sequence[Ear]
) -> tuple[dict[int, Tensor], InputTaps | None]:
    """Tap the wanted tensors among the named arguments; give the swaps and the taps made."""
    tensors, paths = _gather(bound, ears, "input")
    if not tensors:
        return {}, None
    relays = _make_relays("input", paths, ears)
    aliases = _tap_through(relays, tensors)
    swaps = {id(tensor): alias for tensor, alias in zip(tensors, aliases, strict=True)}
    return swaps, InputTaps(tensors, aliases, bound, ears[0][1].station.path)


def wire_outputs(
    output: Any, ears: Sequence[Ear], received: dict[int, int], path_of_module: str
) -> Any:
    """Have the gradients of the wanted output tensors delivered; give the output that flows on.

    `received` maps the ids of the module's input tensors to the version they came in with.
    """
    tensors, paths = _gather(output, ears, "output")
    if not tensors:
        return output
    together = len(tensors) > 1 and any(listener.is_collective for listener, _, _ in ears)
    swaps: dict[int, Tensor] = {}
    tapped: list[Tensor] = []
    tapped_paths: list[list[Path]] = []
    for tensor, places in zip(tensors, paths, strict=True):
        if together or _needs_tap(tensor, received):
            tapped.append(tensor)
            tapped_paths.append(places)
        else:
            add_tensor_hook(tensor, Relay("output", [places], ears))
    if tapped:
        relays = _make_relays("output", tapped_paths, ears)
        if not is_functorch_active():
            for index, (tensor, places) in enumerate(zip(tapped, tapped_paths, strict=True)):
                address = f"{path_of_module}:output{format_leaf(places[0])}.grad"
                relays[index % len(relays)].audits.append(_Audit(tensor, address))
        aliases = _tap_through(relays, tapped)
        swaps = {id(tensor): alias for tensor, alias in zip(tapped, aliases, strict=True)}
    return _trees.replace_tensors(output, swaps) if swaps else output


def _needs_tap(tensor: Tensor, received: dict[int, int]) -> bool:
    if tensor.is_leaf:
        return True
    if tensor._is_view() and creation_meta(tensor) != CreationMeta.MULTI_OUTPUT_NODE:
        return True
    # One of several views made at once (chunk, split, unbind) cannot be changed in place: torch
    # raises. On an alias it would not.
    # An input handed back: its own hook would see the caller's other uses of it too. One that the
    # module changed in place is a new value under the old object.
    return received.get(id(tensor)) == tensor._version
