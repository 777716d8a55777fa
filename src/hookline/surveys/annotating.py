"""`hl.source`: the source of a module's forward with the address of each value beside it.

With an example it runs one forward, as `hl.sites` does, and shows what really ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

from hookline._errors import AddressError, NoSuchSite
from hookline.addresses import ModuleEntry, ModuleTree, Selector, parse, resolve
from hookline.addresses.bytecodes import list_operations
from hookline.addresses.pattern import escape
from hookline.addresses.variables import forward_of, has_forward
from hookline.hooks.refusals import generator_kind
from hookline.sources import NoSource, Reading, read, unwrap
from hookline.surveys.calling import Helper, find_function, late_names, list_helpers
from hookline.surveys.labels import Labels, expected_labels, label_operations, traced_labels
from hookline.surveys.naming import describe_function, is_of_torch, qualified_name
from hookline.surveys.pages import Line, Page, SourceListing, clean
from hookline.surveys.tracing import Trace, trace_example


class _Shown(NamedTuple):
    """A function to show: a module's forward, or one that it calls."""

    entry: ModuleEntry
    helper: str | None
    """The name by which forward calls it; None for the forward itself."""


def source(model: nn.Module, where: Selector = "", *, example: Any = None) -> SourceListing:
    """Show the source of a module's forward, with the address of each value beside it.

    `where` is a path, or a pattern or class that names several modules; those that share a forward
    are shown once. `"attn@helper"` shows a function that the forward of `attn` calls. With an
    `example`, which is what the model takes (one value, a tuple of arguments, or a dict of keyword
    arguments), the model runs once: each value has its shape and its number, and each module is
    shown by itself. Without one, operations are a forecast from the source.

        print(hl.source(model, "layers.0.attn", example=x))
    """
    tree = ModuleTree(model)
    shown = list(dict.fromkeys(_select(tree, where)))
    if example is None:
        return SourceListing([_expected_page(group) for group in _group(shown)])
    traces = [_make_trace(one) for one in shown]
    running = [trace for trace in traces if generator_kind(trace.entry.module) is None]
    trace_example(model, tree, running, example)
    # While operations are listened to, a function of torch is one of them, and runs unseen.
    unseen = [
        trace
        for one, trace in zip(shown, traces, strict=True)
        if one.helper is not None and any(map(is_of_torch, trace.called(one.helper)))
    ]
    for trace in unseen:
        trace.leave_out_operations()
    if unseen:
        trace_example(model, tree, unseen, example)
    return SourceListing(
        [_traced_page(one, trace) for one, trace in zip(shown, traces, strict=True)]
    )


def _select(tree: ModuleTree, where: Any) -> Iterable[_Shown]:
    if isinstance(where, (list, tuple, set, frozenset)):
        for one in where:
            yield from _select(tree, one)
        return
    helper = None
    selector = where
    if isinstance(where, str):
        address = parse(where)
        if address.inside is not None:
            if address.inside.mark == "/":
                raise AddressError(
                    f"`{where}`: an operation has no source to show. The forward that calls it: "
                    f'`hl.source(model, "{address.path}")`.'
                )
            helper = address.inside.name.removesuffix(".*").removesuffix(".**")
            selector = address.path
    modules = {id(site.module): site for site in resolve(tree, selector)}
    found = [site for site in modules.values() if has_forward(site.module)]
    if any(site.port == "parameter" for site in found):
        raise NoSuchSite(f"`{where}` names a parameter; a module has source")
    if not found:
        site = next(iter(modules.values()))
        path = escape(site.path)
        raise NoSuchSite(
            f"{f'`{path}`' if path else 'the root'} (`{type(site.module).__name__}`) is a "
            f"container and has no forward. Name what is in it: `{path}{'.' if path else ''}*`."
        )
    for site in found:
        entry = tree.entry_of(site.module)
        assert entry is not None
        yield _Shown(entry, helper)


def _group(shown: list[_Shown]) -> list[list[_Shown]]:
    """Put those together that have the same source."""
    groups: dict[Any, list[_Shown]] = {}
    for one in shown:
        function = unwrap(forward_of(one.entry.module))[-1]
        key = getattr(function, "__code__", function), type(one.entry.module), one.helper
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _make_trace(one: _Shown) -> Trace:
    module = one.entry.module
    try:
        reading = read(forward_of(module))
        if one.helper is not None:  # raises where there is no such call
            find_function(module, reading, one.helper, _path(one))
            return Trace(one.entry, [f"{one.helper}.**"])
    except NoSource:
        return Trace(one.entry, [])
    return Trace(one.entry, [*reading.names, *(f"{name}.**" for name in late_names(reading))])


def _expected_page(group: list[_Shown]) -> Page:
    first = group[0]
    module = first.entry.module
    function: Callable[..., Any] = forward_of(module)
    try:
        reading = read(function)
        if first.helper is not None:
            found = find_function(module, reading, first.helper, _path(first))
            if found is None:
                return _unknown_page(first, reading)
            function = found
            reading = read(function)
    except NoSource as error:
        labels = label_operations(list_operations(function) if first.helper is None else [])
        return _bare_page(group, function, labels, f"{error}")
    labels = expected_labels(function, reading, module, first.helper)
    notes = ["Operations are a forecast from the source; give `example=` to see those that run."]
    return _page(group, function, reading, labels, notes)


def _traced_page(one: _Shown, trace: Trace) -> Page:
    module = one.entry.module
    if not trace.visits:
        page = _expected_page([one])
        kind = generator_kind(module)
        why = (
            "It did not run with this example; this is what the source alone tells."
            if kind is None
            else f"Its forward is a {kind}, which returns before its body runs."
        )
        return _with_note(page, why)
    function: Callable[..., Any] | None = forward_of(module)
    assert function is not None
    try:
        reading = read(function)
        if one.helper is not None:
            function = find_function(module, reading, one.helper, _path(one))
            called = trace.called(one.helper)
            if function is None and called:
                function = called[0]
            if function is None:
                return _unknown_page(one, reading)
            reading = read(function)
    except NoSource as error:
        assert function is not None
        return _bare_page([one], function, traced_labels(trace, None, None), f"{error}")
    labels = traced_labels(trace, reading, one.helper)
    notes = []
    if len(trace.visits) > 1:
        notes.append(f"It ran {len(trace.visits)} times; this is all of them together.")
    return _page([one], function, reading, labels, notes, trace.functions)


def _path(one: _Shown) -> str:
    return escape(one.entry.names[0])


def _page(
    group: list[_Shown],
    function: Callable[..., Any],
    reading: Reading,
    labels: Labels,
    notes: list[str],
    late: dict[str, list[Callable[..., Any]]] | None = None,
) -> Page:
    first = group[0]
    code = reading.lines[0]
    indent = code[: len(code) - len(code.lstrip())]
    lines = [
        Line(number, clean(code.removeprefix(indent)), labels.at(number))
        for number, code in enumerate(reading.lines, reading.first_line)
    ]
    place = describe_function(function, reading)
    helpers = list_helpers(first.entry.module, reading, first.helper, late)
    return Page(
        tuple(_path(one) for one in group),
        (*_heading(group, place), *notes, *_usage(first, labels)),
        tuple(lines),
        tuple(_footing(first, helpers)),
        tuple(labels.addresses([_path(one) for one in group])),
    )


def _heading(group: list[_Shown], place: str) -> list[str]:
    first = group[0]
    paths = [f"`{_path(one)}`" if _path(one) else "the root" for one in group]
    shown = ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
    inside = "" if first.helper is None else f", `{first.helper}` in its forward"
    return [f"{shown}{inside}: {place}"]


def _usage(one: _Shown, labels: Labels) -> list[str]:
    name = labels.favourite()
    if name is None:
        return []
    lines = [f'    hl.capture(model, "{_path(one)}{name}")']
    if one.helper is not None:
        lines.insert(0, f"A label `.x` stands for `{_path(one)}@{one.helper}.x`.")
    return lines


def _footing(one: _Shown, helpers: list[Helper]) -> list[str]:
    """Tell of the functions whose variables can be named too."""
    own = [helper for helper in helpers if not helper.is_of_torch]
    of_torch = [helper for helper in helpers if helper.is_of_torch]
    lines = []
    if own:
        lines.append("Functions it calls, whose variables can be named too:")
        width = max(len(helper.name) for helper in own)
        calls = max(len(helper.call) for helper in own)
        lines += [
            f"  @{helper.name}.*{' ' * (width - len(helper.name))}  {helper.call.ljust(calls)}"
            f"  line {helper.line}  {helper.note}".rstrip()
            for helper in own
        ]
    if of_torch:
        names = ", ".join(dict.fromkeys(f"@{helper.name}.*" for helper in of_torch))
        lines.append(f"Functions of torch: {names}")
    if lines:
        example = max(own or of_torch, key=lambda helper: helper.size)
        lines.append(f'See one: print(hl.source(model, "{_path(one)}@{example.name}"))')
    return lines


def _bare_page(
    group: list[_Shown], function: Callable[..., Any], labels: Labels, reason: str
) -> Page:
    """Show what can be known of a function without source: operations."""
    name = qualified_name(function, group[0].entry.module)
    notes = [f"Its source cannot be shown: {reason}.", "Variables need it; operations do not:"]
    listed = [
        f"  {label.text}{'  ' if label.look else ''}{label.look}" for label in labels.unplaced()
    ]
    return Page(
        tuple(_path(one) for one in group),
        (*_heading(group, f"`{name}`"), *notes, *(listed or ["  (none found)"])),
        (),
        (),
        tuple(labels.addresses([_path(one) for one in group])),
    )


def _unknown_page(one: _Shown, reading: Reading) -> Page:
    """Say that which function is called shows only when it is called."""
    return Page(
        (_path(one),),
        (
            f"`{_path(one)}@{one.helper}`: which function this is is known when it is called. "
            f'See it with `hl.source(model, "{_path(one)}@{one.helper}", example=x)`.',
        ),
        (),
        (),
        (),
    )


def _with_note(page: Page, note: str) -> Page:
    heading = (page.heading[0], note, *page.heading[1:])
    return Page(page.paths, heading, page.lines, page.footing, page.addresses)
