"""What a function may do to its values and to itself, as far as its source tells."""

from __future__ import annotations

import ast
import functools

from hookline.sources.bindings import first_argument
from hookline.sources.readings import Definition, Reading


def changes_in_place(reading: Reading) -> bool:
    """Tell whether a function may write to values it has: `y += 1`, `y[0] = z`, `y.mul_(2)`."""
    return _changes(reading.node)


def ways_back(reading: Reading) -> frozenset[str] | None:
    """Name the attributes of `self` that a method calls, and may be entered again by.

    None where it passes `self` on, or names itself: then there are others.
    """
    return _ways_back(reading.node)


@functools.lru_cache(maxsize=1024)
def _ways_back(node: Definition) -> frozenset[str] | None:
    first = first_argument(node)
    this = "self" if first is None else first.arg
    called = set()
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(attr=name) if name == node.name:
                return None
            case ast.Call(func=function, args=args, keywords=keywords):
                given = [*args, *(keyword.value for keyword in keywords)]
                if any(isinstance(one, ast.Name) and one.id == this for one in given):
                    return None
                match function:
                    case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == this:
                        called.add(name)
            case ast.Assign(value=ast.Name(id=name)) if name == this:
                return None
    return frozenset(called)


@functools.lru_cache(maxsize=1024)
def _changes(node: Definition) -> bool:
    return any(_is_change(inner) for inner in ast.walk(node))


def _is_change(node: ast.AST) -> bool:
    match node:
        case ast.AugAssign():
            return True
        case ast.Assign(targets=targets):
            return any(isinstance(inner, ast.Subscript) for one in targets for inner in _flat(one))
        case ast.Call(func=ast.Attribute(attr=name), keywords=keywords):
            is_method = name.endswith("_") and not name.endswith("__")
            return is_method or any(keyword.arg == "out" for keyword in keywords)
        case ast.Call(keywords=keywords):
            return any(keyword.arg in ("out", "inplace") for keyword in keywords)
    return False


def _flat(target: ast.expr) -> list[ast.expr]:
    """List the single targets of an assignment."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [inner for one in target.elts for inner in _flat(one)]
    return [target.value if isinstance(target, ast.Starred) else target]
