"""Torch's own hook calls over patterns: the same signatures, without their traps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hookline._errors import AddressError, EditError
from hookline.addresses import Selector, Site, resolve
from hookline.hooks import everywhere, observing
from hookline.hooks.backward import BackwardListener
from hookline.hooks.eagerly import Compiled, check_compiled
from hookline.hooks.functions import check_function
from hookline.hooks.refusals import leave_out_lazy
from hookline.hooks.sessions import Handle, Session
from hookline.hooks.uncompiled import outside_of_graphs
from hookline.hooks.visits import Listener, Station, Visit, describe


class _ForwardListener(Listener):
    """Call a forward (pre) hook of torch's signature; what it returns replaces the value."""

    __slots__ = ("function", "with_kwargs")

    def __init__(
        self,
        session: Session,
        station: Station,
        port: str,
        function: Callable[..., Any],
        with_kwargs: bool,
    ) -> None:
        super().__init__(session, station, port, values=True, gradients=False, stage=1)
        self.function = function
        self.with_kwargs = with_kwargs

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = (args, kwargs) if self.with_kwargs else ((*args, *kwargs.values()),)
        result = observing.run(self.session, visit, self.address, self.function, module, *given)
        if result is None:
            return args, kwargs
        self.session.note_edit(visit)
        where = describe(visit, self.address)
        if self.with_kwargs:
            if not (
                isinstance(result, tuple)
                and len(result) == 2
                and isinstance(result[0], (tuple, list))
                and isinstance(result[1], dict)
            ):
                raise EditError(
                    f"the pre hook at {where} has with_kwargs=True and returned "
                    f"{_show(result)}. Return (args, kwargs): a tuple and a dict; or None."
                )
            return tuple(result[0]), result[1]
        if isinstance(result, list):
            raise EditError(
                f"the pre hook at {where} returned a list, which may mean one argument or several. "
                "Return a tuple of arguments, or a single value that is no list."
            )
        new = result if isinstance(result, tuple) else (result,)
        if not kwargs:
            return new, kwargs
        if len(new) != len(args) + len(kwargs):
            raise EditError(
                f"the pre hook at {where} returned {len(new)} values for {len(args)} positional "
                f"and {len(kwargs)} keyword arguments. Return one for each, in that order."
            )
        return new[: len(args)], dict(zip(kwargs, new[len(args) :], strict=True))

    def on_output(
        self,
        visit: Visit,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        given = (args, kwargs) if self.with_kwargs else ((*args, *kwargs.values()),)
        result = observing.run(
            self.session, visit, self.address, self.function, module, *given, output
        )
        if result is None or result is output:
            return output
        self.session.note_edit(visit)
        return result


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return f"a {type(value).__name__}"


def _attach(
    name: str,
    model: nn.Module | None,
    where: Selector,
    make: Callable[[Session, Station], list[Listener]],
    prepend: bool,
    compiled: Compiled,
) -> Handle:
    def refuse_port(site: Site) -> None:
        if site.port != "output" or site.leaf or site.is_grad:
            raise AddressError(
                f"hl.{name} names modules, so `{where}` has no port; "
                "for one port or gradient there is hl.hook"
            )

    if model is None:
        for _, site in everywhere.read_selector(where):
            refuse_port(site)
        return everywhere.attach(
            f"hl.{name}(None, {where!r})", where, lambda session, station, _: make(session, station)
        )
    session = Session(model, f"hl.{name}({where!r})", is_eager=check_compiled(compiled))
    assert session.tree is not None
    for site in leave_out_lazy(resolve(session.tree, where)):
        refuse_port(site)
        for listener in make(session, session.station(site.names, site.module)):
            session.listen(listener, prepend=prepend)
    session.open()
    return Handle(session)


@outside_of_graphs
def register_forward_pre_hook(
    model: nn.Module | None,
    where: Selector,
    hook: Callable[..., Any],
    *,
    prepend: bool = False,
    with_kwargs: bool = False,
    compiled: Compiled = "graph",
) -> Handle:
    """Call `hook(module, args)` before each named module runs; a return replaces the arguments.

    Arguments passed by keyword are in `args` too, after the positional ones; with
    `with_kwargs=True` the hook is `hook(module, args, kwargs)` and returns `(args, kwargs)`.
    `model=None` means every module of every model. `compiled="eager"` runs a compiled model without
    its graphs while the hook is there.
    """
    check_function(hook, "hl.register_forward_pre_hook")
    return _attach(
        "register_forward_pre_hook",
        model,
        where,
        lambda session, station: [_ForwardListener(session, station, "input", hook, with_kwargs)],
        prepend,
        compiled,
    )


@outside_of_graphs
def register_forward_hook(
    model: nn.Module | None,
    where: Selector,
    hook: Callable[..., Any],
    *,
    prepend: bool = False,
    with_kwargs: bool = False,
    compiled: Compiled = "graph",
) -> Handle:
    """Call `hook(module, args, output)` after each named module; a return replaces the output.

    With `with_kwargs=True` the hook is `hook(module, args, kwargs, output)`.
    `model=None` means every module of every model. `compiled="eager"` runs a compiled model without
    its graphs while the hook is there.
    """
    check_function(hook, "hl.register_forward_hook")
    return _attach(
        "register_forward_hook",
        model,
        where,
        lambda session, station: [_ForwardListener(session, station, "output", hook, with_kwargs)],
        prepend,
        compiled,
    )


@outside_of_graphs
def register_backward_pre_hook(
    model: nn.Module | None,
    where: Selector,
    hook: Callable[..., Any],
    *,
    prepend: bool = False,
    compiled: Compiled = "graph",
) -> Handle:
    """Call `hook(module, grad_output)` when the gradients of a module's outputs are there.

    A return (a tuple, or a tensor where there is one output) replaces them.
    `model=None` means every module of every model. `compiled="eager"` runs a compiled model without
    its graphs while the hook is there.
    """
    check_function(hook, "hl.register_backward_pre_hook")
    return _attach(
        "register_backward_pre_hook",
        model,
        where,
        lambda session, station: [BackwardListener(session, station, "output", hook, is_pre=True)],
        prepend,
        compiled,
    )


@outside_of_graphs
def register_backward_hook(
    model: nn.Module | None,
    where: Selector,
    hook: Callable[..., Any],
    *,
    prepend: bool = False,
    compiled: Compiled = "graph",
) -> Handle:
    """Call `hook(module, grad_input, grad_output)` when a module's gradients are there.

    `grad_input` has an entry for each argument of the call, positional ones first, also for
    modules of many operations; `grad_output` one for each item returned. A return (a tuple, or a
    tensor where there is one input) replaces `grad_input`. A module none of whose inputs requires
    a gradient is called at the end of backward, with None for each input.
    `model=None` means every module of every model. `compiled="eager"` runs a compiled model without
    its graphs while the hook is there.
    """
    check_function(hook, "hl.register_backward_hook")

    def make(session: Session, station: Station) -> list[Listener]:
        return [
            BackwardListener(session, station, port, hook, is_pre=False)
            for port in ("input", "output")
        ]

    return _attach("register_backward_hook", model, where, make, prepend, compiled)
