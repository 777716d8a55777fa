"""Which names a piece of syntax binds, and which name a call goes by."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hookline.sources.readings import Definition

Bound = tuple[str, ast.Name | ast.Attribute]
"""A name as written, `y` or `self.cache`, and the node that binds it."""


def bound_names(target: ast.expr) -> Iterator[Bound]:
    """List the names and the attributes of names that an assignment target binds, in order."""
    if isinstance(target, ast.Name):
        if not target.id.startswith("@"):  # pytest's own variables in rewritten asserts
            yield target.id, target
    elif isinstance(target, ast.Attribute):
        if isinstance(target.value, ast.Name):
            yield f"{target.value.id}.{target.attr}", target
    elif isinstance(target, ast.Starred):
        yield from bound_names(target.value)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from bound_names(element)


def captured_names(pattern: ast.AST) -> Iterator[str]:
    """List the names a `case` pattern captures, in source order; alternatives repeat theirs."""
    for child in ast.iter_child_nodes(pattern):
        yield from captured_names(child)
    if isinstance(pattern, (ast.MatchAs, ast.MatchStar)) and pattern.name:
        yield pattern.name
    elif isinstance(pattern, ast.MatchMapping) and pattern.rest:
        yield pattern.rest


def iterated_names(generator: ast.comprehension) -> list[Bound]:
    """List the names a comprehension's loop binds, where its values can be tapped at all."""
    target = generator.target
    if generator.is_async or any(isinstance(node, ast.Starred) for node in ast.walk(target)):
        return []
    return [(name, node) for name, node in bound_names(target) if isinstance(node, ast.Name)]


def argument_nodes(arguments: ast.arguments) -> list[ast.arg]:
    """List the arguments of a definition in the order in which they are written."""
    positional = [*arguments.posonlyargs, *arguments.args]
    rest = [arguments.vararg] if arguments.vararg else []
    keywords = [arguments.kwarg] if arguments.kwarg else []
    return [*positional, *rest, *arguments.kwonlyargs, *keywords]


def first_argument(node: Definition) -> ast.arg | None:
    """Give the first positional argument, a method's `self`; None where there is only `*args`."""
    positional = [*node.args.posonlyargs, *node.args.args]
    return positional[0] if positional else None


def default_nodes(arguments: ast.arguments) -> list[ast.expr]:
    """List the default values, which belong to the scope around the function."""
    return [*arguments.defaults, *(default for default in arguments.kw_defaults if default)]


def called_name(function: ast.expr) -> str | None:
    """Give the last name of a called expression; None where it ends in no name."""
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else None


def handed_nodes(call: ast.Call, nested_functions: frozenset[str]) -> list[ast.expr]:
    """List the arguments of a call that may be functions handed over by name: `self.part`, `f`."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [
        one
        for one in given
        if isinstance(one, ast.Attribute)
        or (isinstance(one, ast.Name) and one.id not in nested_functions)
    ]


def has_docstring(body: list[ast.stmt]) -> bool:
    """Tell whether a function's body starts with a docstring."""
    first = body[0]
    return (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
