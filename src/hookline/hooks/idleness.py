"""Why nothing came of a variable or an operation while its module ran, for reports."""

from __future__ import annotations

import difflib

from hookline._compiler import has_compiled_code
from hookline.addresses import parse_port
from hookline.addresses.pattern import escape
from hookline.addresses.variables import forward_of
from hookline.hooks.junctions import Junction
from hookline.hooks.reasons import Reason
from hookline.hooks.visits import Listener
from hookline.sources import NoSource, read

_MOST_NAMES = 12


def why_idle(listener: Listener, most_seen: int) -> Reason:
    """Say why a listener inside a forward that ran heard of nothing.

    `most_seen` is the highest number that its name had, -1 where it never came up.
    """
    inside = parse_port(listener.port)
    if most_seen >= 0:
        verb = "assigned" if inside.mark == "@" else "called"
        times = "once" if most_seen == 0 else f"{most_seen + 1} times"
        last = listener.address.replace(f"[{inside.number}]", f"[{most_seen}]", 1)
        return Reason(
            f"it was {verb} only {times} in a visit, so there is no number {inside.number}",
            f"count from 0; the last is `{last}`",
        )
    if inside.mark == "@":
        return _why_not_assigned(listener, inside.name)
    junction = Junction.find(listener.station.module)
    noted = junction.ran if junction is not None else ()
    ran = sorted(one for one in noted if not one.startswith("_"))
    near = difflib.get_close_matches(inside.name, ran, 1)
    shown = [f"`/{name}`" for name in [*near, *(one for one in ran if one not in near)]]
    more = ", ..." if len(shown) > _MOST_NAMES else ""
    these = f"; these did: {', '.join(shown[:_MOST_NAMES])}{more}" if shown else ""
    path = escape(listener.station.path)
    session, station = listener.session, listener.station
    if session.is_in_graph(station) or session.begins_graph(station):
        return Reason(
            f"no operation of that name was traced in the module's own forward{these}",
            "the compiler does some by itself, as where a tensor is unpacked; all are heard where "
            'the model is run eagerly: compiled="eager"',
        )
    unseen = ', as far as it is not compiled: ask for compiled="eager" to see all of it'
    return Reason(
        "no operation of that name was called by the module's own forward"
        f"{unseen if has_compiled_code() else ''}{these}",
        f"see print(hl.source(model, '{path}', example=x)); what a module inside it calls is "
        "that module's",
    )


def _why_not_assigned(listener: Listener, name: str) -> Reason:
    lines: list[int] = []
    try:
        points = read(forward_of(listener.station.module)).names.get(name, [])
        lines = sorted({point.line for point in points})
    except NoSource:
        pass
    if not lines:
        return Reason(
            "the function it is in was not called, or not the branch in it",
            "run an input that takes the branch, or leave this address out",
        )
    which = f"line {lines[0]}" if len(lines) == 1 else f"lines {', '.join(map(str, lines))}"
    return Reason(
        f"forward ran, but not {which}: a branch that was not taken, or a wrapper called another "
        "function in its place",
        "run an input that takes the branch, or leave this address out",
    )
