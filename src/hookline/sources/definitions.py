"""The definition of a running function, proved to be what runs."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from hookline.sources.compiling import compile_like, is_same, nested_codes
from hookline.sources.locating import CHANGED, file_lines, locate, parse
from hookline.sources.readings import Definition, NoSource

_HAS_FAST_LOCALS = 1
"""The flag of a function's code that a class body's has not."""


class Source:
    """A function's definition, and what was worked out from it."""

    def __init__(self, function: FunctionType) -> None:
        code = function.__code__
        lines = file_lines(function)
        self.file = code.co_filename
        self.first_line = code.co_firstlineno
        self._text, self.node = locate(lines, code)
        self.last_line: int = self.node.end_lineno or self.node.lineno
        self.lines = tuple(lines[self.first_line - 1 : self.last_line])
        self._assert_rewriter = self._check(function)
        parts = code.co_qualname.split(".")
        self.is_method = len(parts) > 1 and parts[-2] != "<locals>" and not _is_static(self.node)
        self.local_names = frozenset(_local_names(code))
        self.nested_functions = frozenset(_nested_functions(code))
        self.analysis: Any = None
        """What `reading` found; kept here so that it lives as long as the code."""
        self.rewritten: dict[
            tuple[frozenset[str], bool, bool], tuple[CodeType, tuple[str, ...]]
        ] = {}
        """The code and the table of each rewriting, by wanted names, whether it is a method and
        whether it tells its end."""

    def parse(self, code: CodeType) -> Definition:
        """Parse the definition again, as the running code has it, for a copy that may change."""
        node = parse(self._text, code)
        if self._assert_rewriter is None:
            return node
        return _rewrite_asserts(self._assert_rewriter, node, self._text)

    def _check(self, function: FunctionType) -> ModuleType | None:
        """Raise unless this compiles to what runs; give pytest's rewriter where it had a part.

        pytest compiles the asserts of test files to other code than Python does.
        """
        code = function.__code__
        if is_same(compile_like(self.node, code), code):
            return None
        rewriter = function.__globals__.get("@pytest_ar")
        if rewriter is None or not any(
            isinstance(node, ast.Assert) for node in ast.walk(self.node)
        ):
            raise NoSource(CHANGED)
        try:
            node = _rewrite_asserts(rewriter, parse(self._text, code), self._text)
        except Exception as error:  # another pytest, whose rewriter takes or needs something else
            raise NoSource(f"pytest rewrote its asserts, and not again ({error})") from error
        if not is_same(compile_like(node, code), code):
            raise NoSource(f"pytest rewrote its asserts, and {CHANGED}")
        return rewriter  # type: ignore[no-any-return]


_sources: dict[int, tuple[weakref.ref[CodeType], Source]] = {}


def find(function: object) -> Source:
    """Find the definition of a function, once for each code object; raise NoSource."""
    if not isinstance(function, FunctionType):
        raise NoSource(f"it is no Python function ({type(function).__name__})")
    code = function.__code__
    key = id(code)  # not the code: those of two files can be equal
    known = _sources.get(key)
    if known is None:
        if code.co_name == "<lambda>":
            raise NoSource("it is a lambda")
        known = (weakref.ref(code, lambda _: _sources.pop(key, None)), Source(function))
        _sources[key] = known
    return known[1]


def _rewrite_asserts(rewriter: ModuleType, node: Definition, text: str) -> Definition:
    module = ast.Module([node], [])
    rewriter.rewrite_asserts(module, text.encode())
    return node


def _is_static(node: Definition) -> bool:
    return any(
        isinstance(decorator, ast.Name) and decorator.id == "staticmethod"
        for decorator in node.decorator_list
    )


def _local_names(code: CodeType) -> Iterator[str]:
    """List every name that is a variable of the function or of a function inside it."""
    yield from code.co_varnames
    yield from code.co_cellvars
    for inner in nested_codes(code):
        yield from _local_names(inner)


def _nested_functions(code: CodeType) -> Iterator[str]:
    for inner in nested_codes(code):
        if inner.co_flags & _HAS_FAST_LOCALS:
            if inner.co_name.isidentifier():
                yield inner.co_name
            yield from _nested_functions(inner)
