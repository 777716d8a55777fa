"""The operators that carry a value out of a compiled graph to Python, while the graph runs.

To the compiler they are opaque, kept in their order by an effect, and take nothing away from the
model: a graph with them needs no break, forward or backward. What they do when they run is decided
by whoever owns the key that they are called with, so a graph is compiled once and serves every
session that asks for the same.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hookline._compiler import is_recomputed, register_effectful, run_uncompiled, save_in_checkpoint
from hookline._errors import UnsupportedModel
from hookline._torch import (
    find_values,
    graph_task_id,
    is_capturing_cuda_graph,
    is_gapless,
    may_be_changed,
    preserve_version,
    shown_product,
    top_saved_tensor_hooks,
)
from hookline.hooks.backward_graphs import keep_in_compiled_autograd
from hookline.hooks.guarding import keep_guards
from hookline.hooks.hearing import (
    BREAK,
    GRADIENT,
    WITHOUT,
    Ear,
    Gradient,
    find_ear,
    read_place,
    show,
    show_all,
    write_mode,
)
from hookline.hooks.inductor import is_inductor, keep_decisions
from hookline.hooks.sparing import hear_of_compiling

_tickets: dict[int, Gradient] = {}
_ears: weakref.WeakValueDictionary[int, Ear] = weakref.WeakValueDictionary()
"""By tickets that may have been copied, who knows whom to tell."""
_MOST_TOLD = 1 << 16
"""How many of these one ear knows: nobody says when the last copy of a ticket is gone."""
_numbers = itertools.count(1)


def _refuse_recording(tensor: Tensor) -> None:
    """Raise where a CUDA graph is recorded: its replays would go on without Python."""
    if is_capturing_cuda_graph(tensor):
        raise UnsupportedModel(
            "values cannot be kept or edited where a CUDA graph is recorded, because a replay runs "
            'no Python. Compile without mode="reduce-overhead", or ask for compiled="eager".'
        )


@run_uncompiled
def _hand_over(value: Tensor, key: Tensor, place: str) -> Tensor:
    number = next(_numbers)
    ticket = torch.tensor(number)
    if value is not key or place.startswith((GRADIENT, WITHOUT + GRADIENT)):
        _refuse_recording(value)  # of an announcement, that replays cannot repeat it does no harm
    ear = find_ear(key)
    told = None if ear is None else ear.take(value, read_place(place))
    if ear is None or told is None:
        return ticket
    if top_saved_tensor_hooks(False) is None:
        _tickets[number] = told
        # The graph that was recorded holds the ticket: when that is gone nobody will ask.
        weakref.finalize(ticket, _tickets.pop, number, None).atexit = False
    else:  # it may hold a copy
        _keep_told(ear, number, told)
    return ticket


def _keep_told(ear: Ear, number: int, told: Gradient) -> None:
    known = ear.told
    if known is None:
        known = ear.told = OrderedDict()
    known[number] = told
    _ears[number] = ear
    if len(known) > _MOST_TOLD:
        known.popitem(last=False)


def _find_told(number: int) -> Gradient | None:
    told = _tickets.get(number)
    if told is not None:
        return told
    ear = _ears.get(number)
    return None if ear is None or ear.told is None else ear.told.get(number)


@run_uncompiled
def _hand_back(grad: Tensor, ticket: Tensor) -> None:
    _refuse_recording(grad)
    told = _find_told(int(ticket))
    if told is not None:
        told(grad)


@run_uncompiled
def _carry(value: Tensor, key: Tensor, place: str) -> Tensor:
    _refuse_recording(value)
    ear = find_ear(key)
    if ear is not None and graph_task_id() == -1:  # else it is the recompute of a region
        ear.take(value, read_place(place))
    return value.clone()


@run_uncompiled
def _note(key: Tensor, place: str, shape: Sequence[int]) -> None:
    _refuse_recording(key)
    ear = find_ear(key)
    if ear is not None:
        ear.note(read_place(place), shape)


def _stamp(value: Tensor, ticket: Tensor) -> Tensor:
    return value.clone()


def _make_library() -> Any:
    library = torch.library.Library("hookline", "DEF")
    # What they do, and what the compiler runs on tensors without content.
    operators: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
        "pass_by": ("(Tensor value, Tensor key, str place) -> ()", show, _nothing),
        "pass_all": ("(Tensor[] values, Tensor[] keys, str places) -> ()", show_all, _nothing),
        "hand_over": ("(Tensor value, Tensor key, str place) -> Tensor", _hand_over, _no_ticket),
        "hand_back": ("(Tensor grad, Tensor ticket) -> ()", _hand_back, _nothing),
        "hand_in": ("(Tensor value, Tensor key, str place) -> Tensor", _hand_over, _no_ticket),
        "note": ("(Tensor key, str place, SymInt[] shape) -> ()", _note, _nothing),
        "look": ("(Tensor value) -> Tensor", torch.clone, _copy),
        "stamp": ("(Tensor value, Tensor ticket) -> Tensor", _stamp, _copy),
        "carry": ("(Tensor value, Tensor key, str place) -> Tensor", _carry, _copy),
    }
    for name, (schema, run, fake) in operators.items():
        # All need Python but the one that stands for reading a value, as any operation might.
        tag = torch.Tag.pointwise if name == "look" else torch.Tag.cudagraph_unsafe
        library.define(name + schema, tags=(tag,))
        library.impl(name, run, "CompositeExplicitAutograd")
        if name in ("pass_by", "hand_over", "hand_back", "hand_in", "carry"):
            fake = _run_on_meta(run, fake)
        torch.library.register_fake(f"hookline::{name}", fake, lib=library)
    for name in ("pass_by", "pass_all", "hand_over", "hand_back", "note"):
        register_effectful(getattr(torch.ops.hookline, name).default)
    for name, rule in (("pass_by", _pass_fakes), ("look", _look_at_fake)):
        torch.library.register_torch_dispatch(
            f"hookline::{name}", FakeTensorMode, rule, lib=library
        )
    return library


def _nothing(*_: Any) -> None:
    """Give what an operator gives that is only called."""


def _no_ticket(*_: Any) -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _copy(value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(value)


# A model's values go through these several times while it is compiled. Torch keeps the answers of
# its own operators alone, and goes a long way to each of the others.


def _pass_fakes(mode: Any, called: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Answer for a value without content in the place of torch."""
    if type(args[0]) is FakeTensor and type(args[1]) is FakeTensor:
        return None
    return mode.__torch_dispatch__(called, types, args, kwargs or {})


def _look_at_fake(mode: Any, called: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Answer as torch does for a copy."""
    return mode.__torch_dispatch__(torch.ops.aten.clone.default, types, args, kwargs or {})


def _run_on_meta(run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Tell of a value of a model on the meta device, which torch takes for one of the compiler's.

    What comes with it, a key or a ticket, has content then.
    """

    def call(value: Tensor, known: Tensor, *given: Any) -> Any:
        return (run if type(known) is Tensor and not known.is_meta else fake)(value, known, *given)

    return call


_library = _make_library()
# What inductor calls: see `hooks.inductor`.
setattr(torch.ops.hookline.pass_by, "run", show)  # noqa: B010
setattr(torch.ops.hookline.pass_all, "run", show_all)  # noqa: B010
_pass_by = torch.ops.hookline.pass_by.default
"""Show a value to the ear with a key, and go on."""
_hand = torch.ops.hookline.hand_over.default
"""Give a value to the ear with a key; gives a ticket for its gradient."""
_look = torch.ops.hookline.look.default
"""Give a value to be shown; where inductor makes the graph that is the value itself.

Its passes ask of those who read a value whether they could be part of a kernel.
"""
_hand_back_grad = torch.ops.hookline.hand_back.default
"""Give the gradient of a value to whoever the ticket is of."""

# An effect cannot be repeated, so a checkpointed region can have none. There a value is given away
# for a ticket, which is kept for backward and not made again. A copy that takes the ticket flows
# on, for what forward does not need would be put off until backward. Where nobody asks for a
# gradient the value is copied on its way; what a recompute copies is known by when it comes.
_hand_in = torch.ops.hookline.hand_in.default
_stamp_on = torch.ops.hookline.stamp.default
_carry_on = torch.ops.hookline.carry.default
_note_shape = torch.ops.hookline.note.default


Way = Literal["own", "made", "part", "spent"]
"""How a gradient is heard of: on the tensor itself, on what it is a view of, on an alias of it, or
on what it holds at this moment, where something is about to write over it."""

Change = Callable[[Tensor], Tensor | None]
"""What is called with a gradient; gives the one in its place, or None to leave it."""


def hook_gradient(value: Tensor, change: Change, way: Way) -> Tensor:
    """Have a function called with the gradient of a value when it comes; give what flows on.

    A hook and no node of ours: whatever is done to the tensor later, in place too, is what it would
    be without. A linear layer gives a view of what it made, until torch 2.14, and a matrix product
    in a graph does (`made`); a hook there hears also where the view is changed in place. What
    others use too is given on as an alias (`part`), but for what is about to be written over
    (`spent`): there a node parts what was done before from that.
    """
    if way == "part" or value.is_leaf:
        value = value.view_as(value)
    if way == "spent" and may_be_changed(value):
        _part_history(value, change)
        return value
    base = shown_product(value) if way == "made" else None
    if base is None:
        _register(value, change)
        return value
    shape = value.shape

    def reshape(grad: Tensor) -> Tensor | None:
        new = change(grad.view(shape))
        return None if new is None else new.view(grad.shape)

    _register(base, reshape)
    return value


def _register(tensor: Tensor, hook: Change) -> None:
    def hear(grad: Tensor | None) -> Tensor | None:
        # One of several tensors made at once has no gradient where only others have one.
        return None if grad is None else hook(grad)

    tensor.register_hook(hear)


class _Between(torch.autograd.Function):
    """Part what was done with a tensor so far from what is done with it from now on."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, change: Change) -> Tensor:
        ctx.change = change
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        new = ctx.change(grad)
        return grad if new is None else new, None


def _part_history(value: Tensor, change: Change) -> None:
    """Have a function called with the gradient of what a tensor holds now, however it is used."""
    base, shape = value._base, value.shape
    # Autograd copies the gradient of all that a view is of, to change the view's part of it. Where
    # the view is all of it there is no need to, and the graph has no operation more.
    is_whole = base is not None and base.numel() == value.numel()
    if base is None or not (is_whole and base.is_contiguous() and value.is_contiguous()):
        base = value

    def reshape(grad: Tensor) -> Tensor | None:
        new = change(grad.reshape(shape))
        return None if new is None else new.reshape(grad.shape)

    with preserve_version(base):  # nothing is written: what was saved of it is still right
        _Between.apply(base, change if base is value else reshape)  # type: ignore[no-untyped-call]
        # A view has its history made anew where its version is not the one that it was made at.
        assert value.grad_fn is not None


class _HandIn(torch.autograd.Function):
    """Copy a value on its way, and have its gradient given to who is told by the ticket."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, key: Tensor, place: str) -> Tensor:
        ctx.ticket = _hand_in(value, key, place)
        save_in_checkpoint(_hand_in)
        return cast(Tensor, _stamp_on(value, ctx.ticket))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _hand_back_grad(grad, ctx.ticket)
        return grad, None, None


def _hand_in_both(value: Tensor, key: Tensor, place: str) -> Tensor:
    handed: Tensor = _HandIn.apply(value, key, place)  # type: ignore[no-untyped-call]
    return handed


# What a traced hook calls. The compiler takes these as they are and runs them when it makes the
# graph out of operators, where it is known whether a region is checkpointed.


def pass_one(value: Tensor, key: Tensor, place: str) -> Tensor:
    """Show a value; give what flows on in its place."""
    if value.is_nested and not is_gapless(value):
        return value
    keep_decisions()
    if is_recomputed():
        carried: Tensor = _carry_on(value.detach(), key, place)
        return carried
    _pass_by(_show(value), key, place)
    return value


def _show(value: Tensor) -> Tensor:
    """Give what an operator is shown of a value, so that the compiler goes on as without it."""
    if value.is_nested:
        value = find_values(value)
    if not is_inductor():
        return value.detach()
    with torch.no_grad():  # one operation less to trace than a detached one, for every value
        shown: Tensor = _look(value)
    return shown


def pass_both(value: Tensor, key: Tensor, place: str, has_value: bool, way: Way = "own") -> Tensor:
    """Show a value and, when it comes, its gradient; give what flows on in its place."""
    if value.is_nested and not is_gapless(value):
        return value
    keep_decisions()
    if is_recomputed():
        return _hand_in_both(value, key, place)
    if has_value:
        _pass_by(_show(value), key, place)
    port, mark, leaf = place.partition(BREAK)
    of_grad = f"{port}.grad{mark}{leaf}"
    return hook_gradient(value, lambda grad: _pass_by(_show(grad), key, of_grad), way)


def show_output(value: Tensor, key: Tensor, asked: str) -> Tensor:
    """Show what a module gives, by the letters in `asked`; give what flows on in its place.

    The letters: its value (v), its gradient (g), that of what it is a view of (m). All is decided
    here, for what the compiler does not follow by itself it compiles sooner.
    """
    if torch.compiler.is_exporting():
        return value
    place = write_mode("output")
    if "g" in asked and value.requires_grad and torch.is_grad_enabled():
        return pass_both(value, key, place, "v" in asked, "made" if "m" in asked else "own")
    return pass_one(value, key, place) if "v" in asked else value


def hand_one(value: Tensor, key: Tensor, place: str) -> Tensor:
    """Give a value away; give what flows on in its place."""
    _refuse_nested(value)
    keep_decisions()
    if is_recomputed():
        if value.requires_grad and torch.is_grad_enabled():
            return _hand_in_both(value, key, place)
        carried: Tensor = _carry_on(value.detach(), key, place)
        return carried
    _hand(_show(value), key, place)
    return value


def hand_both(value: Tensor, key: Tensor, place: str, way: Way = "own") -> Tensor:
    """Give a value away and, when it comes, its gradient; give what flows on in its place."""
    _refuse_nested(value)
    keep_decisions()
    if is_recomputed():
        return _hand_in_both(value, key, place)
    ticket = _hand(_show(value), key, place)
    return hook_gradient(value, lambda grad: _hand_back_grad(_show(grad), ticket), way)


def hand_gradient(value: Tensor, key: Tensor, place: str, way: Way) -> Tensor:
    """Give the gradient of a value away when it comes; give what flows on in its place."""
    _refuse_nested(value)
    keep_decisions()
    if is_recomputed():
        return _hand_in_both(value, key, place)
    ticket = _hand(key, key, place)
    return hook_gradient(value, lambda grad: _hand_back_grad(_show(grad), ticket), way)


def _refuse_nested(value: Tensor) -> None:
    """Have the compiler break its graph where a nested tensor is kept, if it may."""
    if value.is_nested:
        raise NotImplementedError(
            "hookline: a nested tensor cannot be kept inside a graph that torch.compile made. Ask "
            'for the model to be run eagerly: compiled="eager"'
        )


def announce(key: Tensor, place: str) -> None:
    """Say that an execution begins or ends; in a checkpointed region its values have to tell."""
    if not is_recomputed() and not torch.compiler.is_exporting():
        keep_decisions()
        _hand(key, key, place)


def note_change(key: Tensor, place: str, shape: Sequence[int], operand: Tensor) -> Tensor:
    """Say that a value is about to be changed; give the operand to do it with.

    In a checkpointed region that is said by carrying the operand there.
    """
    keep_decisions()
    if not is_recomputed():
        _note_shape(key, place, shape)
        return operand
    if operand.requires_grad:  # carried it would lose its gradient
        return operand
    carried: Tensor = _carry_on(operand, key, place)
    return carried


_is_allowed = False


def ease_tracing() -> None:
    """Have the compiler take these as they are."""
    global _is_allowed
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    hear_of_compiling()
    keep_in_compiled_autograd()
    keep_guards()
    if not _is_allowed:
        _is_allowed = True
        showing = (pass_one, pass_both, show_output)
        for one in (*showing, hand_one, hand_both, hand_gradient, announce, note_change):
            dynamo.allow_in_graph(one)


def make_ready() -> bool:
    """Do so while a graph is traced: where hooks were there before the compiler was loaded."""
    ease_tracing()
    return True


make_ready._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called while it traces
