"""`rewrite`: a copy of a function in which chosen assignments go through taps.

The code is compiled in the place of the original's, and the function is made of it with the very
globals and cells of the original. Nothing of the user's is run to make it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

from hookline.sources.compiling import compile_like
from hookline.sources.definitions import Source, find
from hookline.sources.reading import analyse
from hookline.sources.taps import TAPS, Taps
from hookline.sources.transforming import Transformer, Wanted
from hookline.sources.unwrapping import copy_function, rewrap, unwrap


def rewrite(
    function: Callable[..., Any],
    wanted: frozenset[str],
    taps: Taps,
    *,
    is_method: bool | None = None,
    has_end: bool = False,
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Copy a function, its decorators around it, so that writes to the wanted names are tapped.

    Gives the copy and its table of names: the number in a tap is a place in that table. A wanted
    name `helper.w` is a variable of a function that this one calls; the calls are tapped then.
    What a `case` captures is tapped before its guard is asked. With `has_end` the copy tells the
    taps when it ends, also by an exception.
    """
    chain = unwrap(function)
    inner = chain[-1]
    source = find(inner)
    assert isinstance(inner, FunctionType)
    key = wanted, source.is_method if is_method is None else is_method, has_end
    known = source.rewritten.get(key)
    if known is None:
        known = source.rewritten[key] = _rewrite_code(source, inner.__code__, *key)
    code, table = known
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
    cells[TAPS] = CellType(taps)
    closure = tuple(cells[name] for name in code.co_freevars)
    return rewrap(chain, copy_function(inner, code, closure)), table


def _rewrite_code(
    source: Source, code: CodeType, wanted: frozenset[str], is_method: bool, has_end: bool
) -> tuple[CodeType, tuple[str, ...]]:
    analysis = analyse(source)
    sorted_names = Wanted.sort(
        wanted,
        points={point.name for point in analysis.points},
        callees={call.name for call in (*analysis.calls, *analysis.handed)},
    )
    transformer = Transformer(
        sorted_names,
        local_names=source.local_names,
        nested_functions=source.nested_functions,
        is_method=is_method,
        has_end=has_end,
    )
    node = transformer.transform(source.parse(code))
    return compile_like(node, code, extra=(TAPS,)), tuple(transformer.table)
