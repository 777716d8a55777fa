"""`trace_step`: one step of a model, run here and now, as a trace."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.jit import ScriptModule
from torch.optim import Optimizer

from hookline import _trees
from hookline._compiler import has_compiled_part
from hookline._errors import UnsupportedModel
from hookline.addresses import ModuleTree
from hookline.addresses.variables import has_forward
from hookline.diffs.traces import TraceFacts
from hookline.hooks.arguments import bind
from hookline.hooks.refusals import generator_kind
from hookline.hooks.sessions import Session
from hookline.hooks.visits import Call, Visit
from hookline.recordings.course import WHY_LOST, Course, Post, Sink
from hookline.recordings.facts import read_facts
from hookline.recordings.listening import Change, TraceListener
from hookline.recordings.live import MOST_BYTES, LiveSink, LiveTrace
from hookline.recordings.staging import copy_call, staged
from hookline.recordings.states import States
from hookline.recordings.unusual import refuse_meta
from hookline.replays.randomness import RandomStates

Perturb = Callable[[Tensor, Generator], Tensor]
"""What gives a tensor that is a little off, by random numbers of its own."""

Loss = Callable[[Any], Tensor]
"""What makes one number of a model's output."""


def listen_everywhere(
    session: Session,
    course: Course,
    *,
    kind: type[TraceListener] = TraceListener,
    prefix: str = "",
    taps: bool = False,
    wanted: Container[int] | None = None,
    **options: Any,
) -> dict[str, str]:
    """Have a course told of every module that can be called; give those left out, and why.

    `wanted` are the ids of the modules whose values are taken; None: of all.
    """
    assert session.tree is not None
    left_out: dict[str, str] = {}
    for entry in session.tree.entries:
        module, path = entry.module, entry.names[0]
        if not has_forward(module):
            continue
        if isinstance(module, ScriptModule):
            left_out[path] = "it is TorchScript, which runs no hooks"
        elif generator_kind(module) is not None:
            left_out[path] = "its forward returns before its body runs"
        else:
            try:
                station = session.station(entry.names, module)
            except UnsupportedModel as error:
                left_out[path] = str(error)
                continue
            post = Post(prefix + path if path else prefix.rstrip("."), module)
            post.is_wanted = wanted is None or id(module) in wanted
            for port in ("input", "output"):
                has_tap = taps and port == "input"
                session.listen(kind(session, station, port, post, course, taps=has_tap, **options))
    return left_out


class Tracer:
    """Trace what a model does while it is open: `with tracer: run`, then `tracer.finish()`.

    With `taps`, each module's part of a gradient is told apart, which regroups sums: gradients may
    differ in the last bit from those of a model that nobody traces. With `is_eager` compiled models
    run without their graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        gradients: bool = True,
        keep_tensors: bool = True,
        taps: bool = True,
        change: Change | None = None,
        sink: Sink | None = None,
        most_bytes: int = MOST_BYTES,
        title: str = "",
        is_eager: bool = False,
    ) -> None:
        self.model = model
        self.sink = LiveSink(keep_tensors=keep_tensors, most_bytes=most_bytes)
        self.course = Course(self.sink if sink is None else sink)
        self.notes: list[str] = []
        self._gradients = gradients
        self._facts: TraceFacts = read_facts(model, title)
        self._states = States(ModuleTree(model), self.course)
        self._has_states = False
        self._session: Session | None = None
        try:
            self._session = Session(model, "a trace", is_eager=is_eager)
        except UnsupportedModel as error:
            self.notes.append(f"only the ends of the model are traced: {error}")
            return
        left_out = listen_everywhere(
            self._session, self.course, gradients=gradients, taps=taps and gradients, change=change
        )
        for path, why in left_out.items():
            self.notes.append(f"`{path}` is not traced inside: {why}")

    def __enter__(self) -> Tracer:
        self._states.begin()
        if self._session is not None:
            self._session.is_reusable = True
            self._session.open()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._session is not None:
            self._session.close()
        if self._has_states:
            self._states.end()

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the model; where it cannot be listened at, take what goes in and comes out."""
        if self._session is not None:
            return self.model(*args, **kwargs)
        course, post = self.course, Post("", self.model)
        passage = course.enter(post, Visit(None, Call(0, 0, False), 0))  # type: ignore[arg-type]
        for leaf, tensor in _trees.leaves(_name_arguments(self.model, args, kwargs)):
            course.value(passage, "input", leaf, tensor)
        output = self.model(*args, **kwargs)
        for leaf, tensor in _trees.leaves(output):
            number, _ = course.value(passage, "output", leaf, tensor)
            if self._gradients and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda grad, site=number: course.gradient(site, grad))
        return output

    def note_gradients(self, *, is_stepped: bool = False) -> None:
        """Take the buffers, the parameters and their gradients; `is_stepped` if they change now."""
        self._has_states = True
        self._states.take(is_stepped=is_stepped)

    def note_updates(self) -> None:
        """Take what an optimizer has changed since."""
        self._states.take_updates()

    def finish(self) -> LiveTrace:
        """Give what was traced."""
        if self._session is not None:
            self._session.dispose()
            self._session = None
        self.notes += [f"`{address}`: {WHY_LOST}" for address in self.course.find_lost()]
        for address, why in self.course.unmeasured.items():
            self.notes.append(f"`{address}` is not measured: {why}")
        return self.sink.finish(self._facts, self.notes)


def trace_step(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    seed: int | None = 0,
    rng: RandomStates | None = None,
    keep_tensors: bool = True,
    taps: bool = True,
    gradients: bool = True,
    parameters: bool = True,
    perturb: Perturb | None = None,
    perturb_seed: int = 0,
    sink: Sink | None = None,
    most_bytes: int = MOST_BYTES,
    title: str = "",
    is_eager: bool = False,
) -> LiveTrace:
    """Run one step of a model and give its trace; the model is afterwards what it was.

    The step is a call with copies of the arguments; with `loss`, a function of the output, also
    the backward pass from it; with `optimizer`, a function of the parameters, also a step of that.
    Random numbers follow from `rng`, or from `seed`; None leaves them as they are. `gradients`
    says whether those of values are traced, `parameters` whether parameters and buffers are.
    A compiled model runs without its graphs if `is_eager`, and where values are perturbed.
    """
    refuse_meta(model)
    change = None if perturb is None else _Perturbing(perturb, perturb_seed)
    is_grad = torch.is_grad_enabled() or loss is not None
    with (
        torch.set_grad_enabled(is_grad),
        staged(model, seed=seed, rng=rng, steps=optimizer is not None),
    ):
        tracer = Tracer(
            model,
            gradients=gradients and loss is not None,
            keep_tensors=keep_tensors,
            taps=taps,
            change=change,
            sink=sink,
            most_bytes=most_bytes,
            title=title,
            is_eager=(is_eager or perturb is not None) and has_compiled_part(model),
        )
        args, given = copy_call(args, kwargs or {})
        with tracer:
            output = tracer.call(args, given)
            value = None if loss is None else loss(output)
            if value is not None:
                _run_backward(value, tracer)
            if parameters:
                tracer.note_gradients(is_stepped=optimizer is not None)
            if optimizer is not None:
                optimizer(list(model.parameters())).step()
            if optimizer is not None and parameters:
                tracer.note_updates()
        trace = tracer.finish()
    if value is not None:
        trace.loss = float(value.detach())
    trace.output = _trees.map_tensors(output, lambda _, one: one.detach())
    return trace


def _name_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Name the arguments of a call of a model that runs no hooks."""
    root: Any = ModuleTree(model).root
    if not isinstance(root, ScriptModule):
        return bind(root, args, dict(kwargs))
    forward: Any = root.forward
    names = [one.name for one in forward.schema.arguments[1:]]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _run_backward(value: object, tracer: Tracer) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
        raise ValueError(f"loss gave {shape}: it takes the output and gives a tensor of one number")
    if value.requires_grad:
        value.backward()
    else:
        tracer.notes.append("there are no gradients: the loss does not depend on a parameter")


class _Perturbing:
    """Perturb tensors by random numbers that are nobody else's."""

    def __init__(self, perturb: Perturb, seed: int) -> None:
        self._perturb = perturb
        self._seed = seed
        self._generators: dict[torch.device, Generator] = {}

    def __call__(self, tensor: Tensor, number: int) -> Tensor:
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = self._generators[tensor.device] = Generator(tensor.device)
        # By the number and not in turn: what is recomputed must be moved as it was before.
        generator.manual_seed((self._seed << 32) + number)
        return self._perturb(tensor, generator)
