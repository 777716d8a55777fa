"""When a value flows: root calls, visits of a module within one, and the `at` a hook receives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hookline._errors import UnsupportedModel
from hookline._trees import Path
from hookline.addresses import Inside, format_parameter, format_place, is_inside, parse_port
from hookline.addresses.pattern import escape
from hookline.hooks.arguments import bind, paths

if TYPE_CHECKING:
    from hookline.hooks.ears import VisitEar
    from hookline.hooks.hearing import Ear, Place
    from hookline.hooks.junctions import Junction
    from hookline.hooks.sessions import Session


class _Sentinel:
    """Stand for what no value can: nothing to change, or no gradient."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"hl.{self.name}"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return self.name


KEEP: Final = _Sentinel("KEEP")
"""What an edit returns to leave a value as it is."""

MISSING: Final = _Sentinel("MISSING")
"""What a hook receives where autograd delivered no gradient."""


class Call:
    """One call of the root module in one thread (or what ran outside of any)."""

    __slots__ = (
        "__weakref__",
        "counts",
        "depth",
        "epoch",
        "grad_at_start",
        "in_region",
        "index",
        "is_implicit",
        "may_be_traced",
        "short_ways",
        "thread",
    )

    def __init__(
        self, index: int, thread: int, is_implicit: bool, epoch: object | None = None
    ) -> None:
        self.epoch = epoch
        """The opening of the session that this call belongs to."""
        self.index = index
        self.thread = thread
        self.is_implicit = is_implicit
        self.depth = 0
        """How many executions of the root are under way."""
        self.counts: dict[Station, int] = {}
        self.short_ways: list[tuple[Junction, int]] = []
        """Executions under way at modules where one listener asks for the output alone."""
        self.may_be_traced = "torch._dynamo" in sys.modules
        """Whether a part of it may be compiled, and looked at by the compiler."""
        self.grad_at_start = torch.is_grad_enabled()
        self.in_region = False
        """Whether the call began without grad inside a reentrant checkpoint."""


class Station:
    """One module as one session sees it: all its names, and how often it ran."""

    __slots__ = ("__weakref__", "_argument", "is_root", "junction", "module", "names", "runs")

    def __init__(self, names: tuple[str, ...], module: nn.Module, is_root: bool) -> None:
        self.names = names
        self.module = module
        self.is_root = is_root
        self.runs = 0
        self._argument: Path | None = None
        self.junction: Junction | None = None
        """The junction that serves only this station, ready to be put on the module."""

    @property
    def path(self) -> str:
        return self.names[0]

    def argument_path(self, args: tuple[Any, ...]) -> Path:
        """Give where the only argument of a call stands among the named ones."""
        if self._argument is None:
            self._argument = paths(self.module, args, {})[0]
        return self._argument


class Visit:
    """One execution of a module within a call. Gradient closures carry it to the backward pass."""

    # Made for every execution of every module that is listened at, so only what differs is set.
    is_recompute = False
    """Whether checkpointing runs the forward again."""

    original: Visit | None = None
    """The visit that a recompute repeats."""

    wired: set[str] | tuple[()] = ()
    """The ports whose tensors carry gradient hooks of this visit."""

    made_graph: int | None = None
    """The id of a backward pass with `create_graph=True` that came through here."""

    regions: tuple[Any, ...] = ()
    """What the session knows of the checkpointed regions around this visit."""

    undo: Sequence[Callable[[], None]] = ()
    """What puts parameters back when a recompute ends."""

    record: Any = None
    """What a listener keeps of this visit; a capture keeps a weak reference here."""

    def __init__(self, station: Station, call: Call, index: int | None) -> None:
        self.station = station
        self.call = call
        self.index = index
        """Which execution this is within the call; None when a recompute cannot be traced back."""


class At:
    """Where and when a hook's value is: the second argument of every hook function."""

    __slots__ = (
        "_arguments",
        "call",
        "is_grad",
        "is_local",
        "leaf",
        "module",
        "names",
        "port",
        "recompute",
        "visit",
    )

    def __init__(
        self,
        visit: Visit,
        module: nn.Module,
        port: str,
        leaf: Path = (),
        is_grad: bool = False,
        arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        is_local: bool = False,
    ) -> None:
        self.names = visit.station.names
        """Every path of the module; a shared module has several."""
        self.module = module
        """The module that ran."""
        self.port = port
        """`input`, `output`, `parameter`, or a name inside forward such as `@scores[1]`."""
        self.leaf = leaf
        """The place inside a nested value, as a tuple of names and indexes."""
        self.is_grad = is_grad
        """Whether the value is a gradient."""
        self.is_local = is_local
        """Whether it is what this rank alone computed of a parameter's gradient."""
        self.visit = visit.index
        """Which execution of the module this is within the call, from 0."""
        self.call = visit.call.index
        """Which call of the root module this is since the hook was attached, from 0."""
        self.recompute = visit.is_recompute
        """Whether activation checkpointing is running the forward a second time."""
        self._arguments = arguments

    @property
    def path(self) -> str:
        """Give the module's first name."""
        return self.names[0]

    @property
    def address(self) -> str:
        """Give the full address of the value."""
        path = self.names[0]
        if self.port == "parameter":
            return format_parameter(path, is_grad=self.is_grad, is_local=self.is_local)
        return format_place(escape(path), self.port, self.leaf, is_grad=self.is_grad)

    @property
    def name(self) -> str | None:
        """Give the name of the variable or operation; None at the module's border."""
        return parse_port(self.port).name if is_inside(self.port) else None

    @property
    def index(self) -> int | None:
        """Give which assignment or call of that name it is within the visit, from 0."""
        return parse_port(self.port).number if is_inside(self.port) else None

    @property
    def inputs(self) -> dict[str, Any] | None:
        """Give the module's arguments by name when the value is an output; else None.

        They are there only while the hook runs: hookline does not keep them.
        """
        if self._arguments is None:
            return None
        return bind(self.module, *self._arguments)

    def forget(self) -> None:
        """Let go of the arguments; called when the hook has returned."""
        self._arguments = None

    def __repr__(self) -> str:
        again = ", recompute" if self.recompute else ""
        return f"<At {self.address}, call {self.call}, visit {self.visit}{again}>"


def describe(visit: Visit, address: str) -> str:
    """Name a place and time for an error's note."""
    which = "unknown visit" if visit.index is None else f"visit {visit.index}"
    again = " (recompute)" if visit.is_recompute else ""
    return f"`{address}`, call {visit.call.index}, {which}{again}"


GradientHook = Callable[["Tensor | None"], None]
"""What is put on a tensor to hear its gradient; None comes where autograd made none."""

LightEar = Callable[[Tensor], GradientHook | None]
"""What hears an output, and gives what is to hear its gradient."""

LogEntry = tuple[Any, int, int, Any, int, int | None, str]
"""Place, call, visit, a value and its version, None or the backward it is a gradient of; port."""


class Listener:
    """What one session asks at one module: values and gradients of one port.

    `stage` orders listeners at one site: 0 sees the value before edits, 1 edits, 2 sees what flows
    on. Subclasses override what they need; each method gives back the value that flows on.
    """

    __slots__ = (
        "fired",
        "gradients",
        "hooks_views",
        "inside",
        "is_light",
        "leaf",
        "log",
        "most_seen",
        "place",
        "port",
        "sequence",
        "session",
        "stage",
        "station",
        "taps_arguments",
        "values",
    )

    is_collective = False
    """Whether it wants all gradients of a port together, in `on_gradients`."""
    may_be_light = False
    """Whether it can do with a tensor and its gradient, whatever the visit: see `on_light`."""
    is_careful = False
    """Whether it would rather hear of no gradient than have the model's differ in the last bit."""
    hears_begin = False
    """Whether it is told of executions in compiled graphs as they begin, in `on_begin`."""
    hears_missing = True
    """Whether it is told of tensors without a gradient when another of the port has one."""

    def __init__(
        self,
        session: Session,
        station: Station,
        port: str,
        leaf: Path = (),
        *,
        values: bool,
        gradients: bool,
        stage: int,
    ) -> None:
        self.session = session
        self.station = station
        self.port = port
        self.inside: Inside | None = parse_port(port) if is_inside(port) else None
        """The variable or operation it listens at; None at the module's border."""
        self.leaf = leaf
        self.values = values
        self.gradients = gradients
        self.stage = stage
        self.most_seen = -1
        """The highest number that a value inside forward had which was not the one asked for."""
        self.taps_arguments = True
        """Whether a variable that is an argument is tapped for it, which may regroup sums."""
        self.hooks_views = False
        """Whether a view that the module made gets a hook and no tap: cheaper, but a change of its
        memory in place afterwards ends it."""
        self.is_light = False
        """Whether it has seen that its value is a single tensor, so that the short way will do."""
        self.fired = 0
        """How often it had a value."""
        self.log: list[LogEntry] | None = None
        """Where a value may be noted at once, in place of a call of the listener."""
        self.place: Any = None
        """What stands for the module in the log."""
        self.sequence = 0

    @property
    def depends_on_place(self) -> bool:
        """Whether it does another thing for each assignment or call of an operation."""
        return False

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Receive the arguments of a call."""
        return args, kwargs

    def on_output(
        self,
        visit: Visit,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """Receive what the module returned."""
        return output

    def on_raise(self, visit: Visit) -> None:
        """Learn that the module raised, so that there is no output."""

    def on_value(self, visit: Visit, module: nn.Module, port: str, value: Any) -> Any:
        """Receive the value of a variable or operation, or the arguments of one by name."""
        return value

    def note(self, call: Call, index: int, output: Any) -> bool:
        """Take an output in haste; false where it has to come through `on_output`."""
        return False

    def on_gradient(self, visit: Visit, port: str, leaf: Path, grad: Any, task: int) -> Any:
        """Receive the gradient of one tensor of the port; None where autograd made none."""
        return grad

    def on_gradients(
        self, visit: Visit, port: str, grads: dict[Path, Any], task: int
    ) -> dict[Path, Any]:
        """Receive all gradients of a port together; only where `is_collective`."""
        return grads

    def on_only_gradient(self, visit: Visit, port: str, leaf: Path, grad: Any, task: int) -> Any:
        """Receive the gradient of a port that has one tensor and no other listener."""
        grad = self.on_gradient(visit, port, leaf, grad, task)
        if self.is_collective:
            grad = self.on_gradients(visit, port, {leaf: grad}, task)[leaf]
        return grad

    def on_light(self, output: Tensor, *, has_grad: bool) -> None:
        """Receive an output that is a single tensor; whether the call that made it has grad."""

    def on_light_gradient(self, grad: Tensor) -> None:
        """Receive its gradient."""

    def make_light_ear(self) -> LightEar:
        """Make what does the same for the outputs of calls with grad, whenever the session is open.

        It gives what is to hear the gradient of an output; None where there is none to be heard.
        """

        def hear(output: Tensor) -> GradientHook:
            self.on_light(output, has_grad=True)
            return self.make_gradient_hook()

        return hear

    def make_gradient_hook(self) -> GradientHook:
        """Make what hears gradients of an output that is a tensor, until the session closes."""
        session, epoch = self.session, self.session.epoch

        def hear_gradient(grad: Tensor | None) -> None:
            if grad is not None and session.epoch is epoch:
                self.on_light_gradient(grad)

        return hear_gradient

    def on_hooked_view(self, leaf: Path, witness: Tensor, version: int) -> None:
        """Learn that a view has a hook; the witness, which shares its version, tells of changes."""

    def on_leave(self, visit: Visit) -> None:
        """Learn that the forward it listens inside of is over."""

    def may_hear(self) -> None:
        """Learn that a value was met inside forward whose gradient it will be told of."""

    def no_gradient(self, visit: Visit, port: str, leaf: Path | None, reason: str) -> None:
        """Learn why a tensor of the port can have no gradient in this visit."""

    def no_leaf(self, visit: Visit, tree: Any) -> None:
        """Learn that this visit's value has no such leaf."""

    def make_ear(self, device: torch.device, visits: VisitEar | None) -> tuple[Ear | None, Any]:
        """Make who hears for it in a compiled graph, and what the compiler traces for that.

        Raises where it cannot be done in a graph.
        """
        raise UnsupportedModel(
            f"{self.session.purpose}: a function of Python's cannot run at `{self.address}` inside "
            'a graph that torch.compile made. Ask for the model to be run eagerly: compiled="eager"'
        )

    def on_begin(self, visit: Visit) -> None:
        """Learn that an execution begins in a compiled graph, whatever the arguments."""

    def on_delivery(self, visit: Visit, place: Place, value: Tensor) -> None:
        """Receive a tensor from a compiled graph, whose memory is used again at once."""

    def on_remark(self, visit: Visit, what: str, text: str, place: Place) -> None:
        """Learn something about a value in a compiled graph, such as what it is made of."""

    def on_delivered_gradient(self, visit: Visit, place: Place, grad: Tensor, task: int) -> None:
        """Receive a gradient from a compiled graph, whose memory is used again at once."""

    @property
    def address(self) -> str:
        return format_place(escape(self.station.path), self.port, self.leaf)
