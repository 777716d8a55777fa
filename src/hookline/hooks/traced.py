"""What the compiler traces in the place of hookline's hooks: the same values, by operators.

Dynamo follows every line here and guards what it reads, so this is plain code over a few
attributes: no session, no visit, no frame. What a value means is found out when the graph runs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from hookline._errors import UnsupportedModel
from hookline._tracing import count_executions, find_region, is_in_checkpoint, is_value_product
from hookline.hooks.hearing import (
    AGAIN,
    BACK,
    BEGIN,
    BESIDE,
    END,
    FAULT,
    GRADIENT,
    MISSING,
    REASON,
    SHAPE,
    write_about,
    write_mode,
)
from hookline.hooks.nested import TENSOR, Silent, Walk, tensors, way_to
from hookline.hooks.operators import (
    Way,
    announce,
    hand_both,
    hand_gradient,
    hand_one,
    make_ready,
    pass_both,
    pass_one,
)

EAGERLY = 'Ask for the model to be run eagerly: compiled="eager"'
"""What to do about what a graph cannot do."""


class TracedEar:
    """What is asked at one port, as far as the compiler has to know."""

    is_editing = False
    is_parting = False

    def __init__(
        self,
        key: Tensor,
        *,
        leaf: tuple[str | int, ...] = (),
        values: bool = True,
        gradients: bool = False,
        is_passing: bool = False,
    ) -> None:
        self.key = key
        """The key of the ear that hears it."""
        self.leaf = leaf
        """The only part of the value that is asked for; none for all of it."""
        self.values = values
        """Whether it is told of values."""
        self.gradients = gradients
        """Whether it is told of gradients."""
        self.is_passing = is_passing
        """Whether it looks at values in passing, and needs no execution to put them in."""

    def split(self) -> tuple[TracedEar, TracedEar]:
        """Give one who is told of values only, and one of gradients."""
        return (
            TracedEar(self.key, leaf=self.leaf, is_passing=self.is_passing),
            TracedEar(
                self.key,
                leaf=self.leaf,
                values=False,
                gradients=True,
                is_passing=self.is_passing,
            ),
        )

    def flow(self, port: str, value: Any, way: Way = "own", received: Any = ()) -> Any:
        """Tell of a value; give what flows on."""
        # What is exported is the model, without who looks at it. (To dynamo it is all the same.)
        if not torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting():
            return value
        if self.is_passing and not port.endswith("input"):
            received = ()  # what is handed back has all of its gradient heard: no sum is regrouped
        if isinstance(value, Tensor) and not self.leaf:  # nearly always
            return self.tell(value, port, way_to(value, way, received))
        walk = Walk(self, way, list(received))
        new, text, found = walk.go(value, self.leaf, port)
        if self.leaf and self.gradients:
            new = walk.hear_everywhere(new)
        if self.is_passing:
            return new
        if walk.unwritten:
            announce(self.key, write_about(FAULT, port, walk.unwritten))
        if not self.values:
            return new
        if not text:
            _, whole = Walk(Silent(), way, []).tell(value, port)
            announce(self.key, write_about(MISSING, port, whole))
        elif text != TENSOR:
            announce(self.key, write_about(SHAPE, found, text))
        return new

    def tell(self, value: Tensor, place: str, way: Way) -> Tensor:
        """Tell of one tensor; give what flows on in its place."""
        has_grad = torch.is_grad_enabled()
        with_grad = self.gradients and value.requires_grad and has_grad
        if with_grad and way == "own" and is_value_product():
            way = "made"
        if self.is_passing:
            place = write_mode(place)
            if with_grad:
                return pass_both(value, self.key, place, self.values, way)
            return pass_one(value, self.key, place) if self.values else value
        if with_grad and self.values:
            return hand_both(value, self.key, write_mode(place), way)
        if with_grad:
            return hand_gradient(value, self.key, write_mode(GRADIENT + place), way)
        if self.gradients:
            why = "no-grad tensor" if has_grad else "grad mode off"
            announce(self.key, write_about(REASON, place, why))
        return hand_one(value, self.key, write_mode(place)) if self.values else value


class _Parting:
    """Give on an alias of what others use too, so that several can be told of its gradient."""

    is_editing = False
    is_parting = True
    is_passing = False
    values = False
    gradients = True

    def flow(self, port: str, value: Any, way: Way = "own", received: Any = ()) -> Any:
        return Walk(self, way, list(received)).go(value, (), port)[0]

    def tell(self, value: Tensor, place: str, way: Way) -> Tensor:
        return value.view_as(value) if way == "part" and torch.is_grad_enabled() else value


def in_turn(ears: list[Any]) -> tuple[Any, ...]:
    """Order those who ask at one port: where there are edits all values come before gradients."""
    if not any(one.is_editing for one in ears):
        return tuple(ears)
    values: list[Any] = []
    gradients: list[Any] = []
    for one in ears:
        if one.values and one.gradients:
            first, second = one.split()
            values.append(first)
            gradients.append(second)
        else:
            (values if one.values else gradients).append(one)
    is_shared = len(gradients) > 1 and any(one.is_editing for one in gradients)
    return (*values, *([_Parting()] if is_shared else []), *gradients)


class Traced:
    """What is asked of one module, for the compiler."""

    __slots__ = (  # what has no `__dict__` needs fewer guards
        "argument_names",
        "asked",
        "beginning",
        "ending",
        "hears_gradients",
        "inputs",
        "inside",
        "is_quiet",
        "is_ready",
        "may_miss",
        "outputs",
        "rest_name",
        "shown",
        "way",
        "way_in",
    )

    def __init__(
        self,
        *,
        beginning: tuple[TracedEar, ...],
        ending: tuple[TracedEar, ...],
        inputs: tuple[Any, ...],
        outputs: tuple[Any, ...],
        inside: Any,
        argument_names: tuple[str, ...],
        rest_name: str,
        way: Way = "own",
        way_in: Way = "part",
    ) -> None:
        self.beginning = beginning
        """Those who count executions of the module."""
        self.ending = ending
        """Those who are told when the root returns."""
        self.inputs = inputs
        self.outputs = outputs
        self.hears_gradients = any(one.gradients for one in outputs)
        self.is_ready = "torch._dynamo" in sys.modules
        """Whether the compiler was there already."""
        self.inside = inside
        """What is asked inside its forward; None for nothing."""
        self.argument_names = argument_names
        """What the arguments are called that are passed by position."""
        self.rest_name = rest_name
        """What those are called that come after them."""
        self.way: Way = way
        """How gradients of what it makes are heard of."""
        if way_in == "spent" and any(one.is_editing and one.gradients for one in inputs):
            raise UnsupportedModel(
                "an edit of the gradient of what a module takes that it writes over (inplace=True) "
                "cannot be made inside a graph that torch.compile made. Edit the gradient of what "
                'gives it, or ask for the model to be run eagerly: compiled="eager"'
            )
        self.way_in: Way = way_in
        """How gradients of what comes in are heard of."""
        self.may_miss = inside is None and all(one.is_passing for one in (*inputs, *outputs))
        """Whether all that is asked is only looked at, so that a value may be missed."""
        self.is_quiet = self.is_ready and inside is None and not (beginning or inputs)
        """Whether nothing is asked before it returns."""
        self.shown, self.asked = self._shorten()
        """The key of the only one who asks, in passing, for its output, and what for; or None."""

    def _shorten(self) -> tuple[Tensor | None, str]:
        only = self.outputs[0] if len(self.outputs) == 1 else None
        is_short = self.is_ready and self.inside is None and not self.ending
        if not is_short or not isinstance(only, TracedEar) or not only.is_passing or only.leaf:
            return None, ""
        letters = {"v": only.values, "g": only.gradients, "m": self.way == "made"}
        return only.key, "".join(one for one, is_so in letters.items() if is_so)

    def is_out_of_reach(self) -> bool:
        """Tell whether values are passed over here; raise where they must not be missed."""
        region = find_region()
        if region and not self.may_miss:
            raise UnsupportedModel(
                f"a value inside {region} cannot be reached in a graph that torch.compile made. "
                f'{EAGERLY}, or by torch.compiler.set_stance("force_eager")'
            )
        return bool(region)

    def get_ready(self) -> None:
        """Have the compiler know what it may take as it is, if it came after the hooks."""
        if not self.is_ready:
            make_ready()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what a pre hook does."""
        if self.is_quiet or self.is_out_of_reach():
            return None
        self.get_ready()
        self.begin()
        if not self.inputs:
            if self.inside is not None:
                self.inside.take_in(args, kwargs)
            return None
        bound = self._bind(args, kwargs)
        way = self.way_in
        for ear in self.inputs:
            bound = ear.flow("input", bound, way)
            if ear.is_parting and way == "part":
                way = "own"
        args, kwargs = self._unbind(bound, args, kwargs)
        if self.inside is not None:
            self.inside.take_in(args, kwargs)
        return args, kwargs

    def begin(self) -> None:
        """Say that an execution begins."""
        if not self.beginning:
            return
        what = AGAIN if count_executions() > 1 else BEGIN
        if what == AGAIN and is_in_checkpoint():
            raise UnsupportedModel(
                "a module that calls itself inside a checkpointed region cannot be followed in a "
                f"graph that torch.compile made: nothing tells there which call ends. {EAGERLY}"
            )
        for ear in self.beginning:
            announce(ear.key, write_mode(what))

    def begin_beside(self) -> None:
        """Say that an execution begins of which a hook beside the graph may know."""
        self.get_ready()
        for ear in self.beginning:
            announce(ear.key, write_mode(BESIDE))

    def look_inside(self) -> Any:
        """Give what is asked inside the forward."""
        self.is_out_of_reach()
        self.get_ready()
        return self.inside

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = self.argument_names
        bound = dict(zip(names, args, strict=False))
        if len(args) > len(names):
            bound[self.rest_name] = tuple(args[len(names) :])
        bound.update(kwargs)
        return bound

    def _unbind(
        self, bound: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = self.argument_names
        new_args = [bound[name] for name in names[: len(args)]]
        if len(args) > len(names):
            new_args.extend(bound[self.rest_name])
        return tuple(new_args), {name: bound[name] for name in kwargs}

    def leave(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Do what a post hook does; give the output that flows on."""
        if self.is_out_of_reach():
            return output
        self.get_ready()
        if self.inside is not None:
            self.inside.leave()
        received = tensors([*args, *kwargs.values()]) if self.hears_gradients else ()
        for ear in self.outputs:
            output = ear.flow("output", output, self.way, received)
        for ear in self.ending:
            announce(ear.key, END)
        if self.beginning and count_executions() > 1:
            for ear in self.beginning:
                announce(ear.key, BACK)
        return output


class Refused:
    """Stand for what cannot be asked of a graph: say so when one is traced."""

    shown = None
    asked = ""

    def __init__(self, why: str) -> None:
        self.why = why

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Say it."""
        raise UnsupportedModel(self.why)

    def leave(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Say it."""
        raise UnsupportedModel(self.why)

    def look_inside(self) -> Any:
        """Say it."""
        raise UnsupportedModel(self.why)
