"""Compile a definition as it was compiled in its file, without the file and without running it.

What surrounds a function decides part of its code: the class it stands in (private names, `super`),
the functions around it (free variables), the names its module imports (how their attributes are
loaded). All of that can be told from the running code, so the rest of the file is not parsed.
"""

from __future__ import annotations
import __future__

import ast
import copy
import dis
import itertools
import sys
import threading
import warnings
from collections.abc import Iterator
from types import CodeType
from typing import Any

from hookline.sources.readings import Definition, NoSource

_FACTORY = "__hl_factory__"

_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag

_LOAD_ATTRIBUTE = dis.opmap["LOAD_ATTR"]
# Python 3.12 made both one instruction, and the lowest bit says that a method is meant.
_LOAD_METHOD = dis.opmap.get("LOAD_METHOD") if sys.version_info < (3, 12) else None
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_LOAD_NAME = dis.opmap["LOAD_NAME"]
_LOAD_SUPER = dis.opmap.get("LOAD_SUPER_ATTR")  # from Python 3.12 on
_EXTENDED = dis.EXTENDED_ARG

_quiet = threading.Lock()


def quiet_compile(source: Any, code: CodeType, flags: int = 0) -> Any:
    """Compile under a function's `__future__` flags; warnings were given when it was imported."""
    with _quiet, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(
            source,
            code.co_filename,
            "exec",
            flags=flags | (code.co_flags & _FUTURES),
            dont_inherit=True,
        )


def compile_like(node: Definition, code: CodeType, *, extra: tuple[str, ...] = ()) -> CodeType:
    """Compile a definition where `code` was compiled, with `extra` free variables within reach."""
    tree = _surroundings(code, extra)
    inner: Any = tree.body[-1]
    while not isinstance(inner.body[-1], ast.Pass):
        inner = inner.body[-1]
    inner.body[-1] = _bare(node)
    names = imported_names(code)
    if names:
        tree.body.insert(0, _import(names))
    compiled = _find(quiet_compile(tree, code), code.co_qualname)
    if compiled is None:
        raise NoSource(f"its definition was not found under the name `{code.co_qualname}`")
    # The factory makes a function of a module or its class a nested one, which it was not.
    return compiled.replace(co_flags=code.co_flags)


def _surroundings(code: CodeType, extra: tuple[str, ...]) -> ast.Module:
    """Build the nest of functions and classes around a definition, a `pass` in its place."""
    parts = code.co_qualname.split(".")
    if not all(part.isidentifier() or part == "<locals>" for part in parts):
        raise NoSource(f"its definition was not found under the name `{code.co_qualname}`")
    lines = ["super"] if _is_super_mentioned(code) else []
    lines += [f"def {_FACTORY}({', '.join((*code.co_freevars, *extra))}):"]
    if parts[0] not in code.co_freevars:
        # Otherwise the outermost name becomes a variable of the factory, and free where it is used;
        # a global one also leaves the factory out of the qualified names.
        lines.append(f" global {parts[0]}")
    depth = 1
    for part, following in itertools.pairwise(parts):
        if part != "<locals>":
            is_function = following == "<locals>"
            lines.append(" " * depth + (f"def {part}():" if is_function else f"class {part}:"))
            depth += 1
    lines.append(" " * depth + "pass")
    return ast.parse("\n".join(lines))


def _bare(node: Definition) -> Definition:
    """Copy a definition without what is evaluated around it: decorators, defaults, annotations."""
    bare, arguments = copy.copy(node), copy.copy(node.args)
    # The code starts at the line of the first decorator, and all other lines count from there.
    bare.decorator_list = [
        ast.copy_location(ast.Constant(None), decorator) for decorator in node.decorator_list[:1]
    ]
    bare.returns = None
    if hasattr(node, "type_params"):
        bare.type_params = []  # type: ignore[union-attr]
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for field in ("posonlyargs", "args", "kwonlyargs"):
        setattr(arguments, field, [_bare_argument(each) for each in getattr(arguments, field)])
    arguments.vararg = arguments.vararg and _bare_argument(arguments.vararg)
    arguments.kwarg = arguments.kwarg and _bare_argument(arguments.kwarg)
    bare.args = arguments
    return bare


def _bare_argument(argument: ast.arg) -> ast.arg:
    return ast.copy_location(ast.arg(argument.arg, None), argument)


def _import(names: set[str]) -> ast.stmt:
    statement = ast.parse("import builtins").body[0]
    assert isinstance(statement, ast.Import)
    (alias,) = statement.names
    statement.names = []
    for name in sorted(names):
        renamed = copy.copy(alias)
        renamed.asname = name  # set rather than parsed: pytest's names are no identifiers
        statement.names.append(renamed)
    return statement


def _find(code: CodeType, qualified_name: str) -> CodeType | None:
    for inner in nested_codes(code):
        if inner.co_qualname == qualified_name and inner.co_flags & 1:  # no class of that name
            return inner
        found = _find(inner, qualified_name)
        if found is not None:
            return found
    return None


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """List the code objects of the functions, classes and comprehensions directly inside."""
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def imported_names(code: CodeType) -> set[str]:
    """Tell which names the module must import for the compiler to give this code.

    The compiler loads `name.attribute(...)` as a plain attribute where the module imports `name`,
    and as a method elsewhere. The running code shows which it was.
    """
    plain: set[str] = set()
    methods: set[str] = set()
    _sort_attributes(code, plain, methods)
    return plain - methods


def _is_super_mentioned(code: CodeType) -> bool:
    """Tell whether the module must mention `super` outside functions to give this code.

    The compiler has an instruction for `super().name`, and does without it in such a module. Where
    the code has none of those, a mention either was there or makes no difference.
    """
    if _LOAD_SUPER is None:
        return False
    codes = [code]
    for each in codes:
        if _LOAD_SUPER in each.co_code[::2]:
            return False
        codes.extend(nested_codes(each))
    return any("super" in each.co_names for each in codes)


def _sort_attributes(code: CodeType, plain: set[str], methods: set[str]) -> None:
    instructions = code.co_code
    operations, arguments = instructions[::2], instructions[1::2]
    for load in (_LOAD_ATTRIBUTE, _LOAD_METHOD):
        if load is None:
            continue
        at = operations.find(load)
        while at >= 0:
            name = _loaded_before(code, operations, arguments, at)
            if name is not None:
                is_method = load == _LOAD_METHOD or (_LOAD_METHOD is None and arguments[at] & 1)
                (methods if is_method else plain).add(name)
            at = operations.find(load, at + 1)
    for inner in nested_codes(code):
        _sort_attributes(inner, plain, methods)


def _loaded_before(code: CodeType, operations: bytes, arguments: bytes, at: int) -> str | None:
    """Give the name that the instruction before this one loads."""
    at -= 1
    while at >= 0 and operations[at] in (0, _EXTENDED):  # 0 is the room for an inline cache
        at -= 1
    if at < 0:
        return None
    operation, argument, shift = operations[at], arguments[at], 8
    while at > 0 and operations[at - 1] == _EXTENDED:
        at -= 1
        argument |= arguments[at] << shift
        shift += 8
    if operation == _LOAD_GLOBAL:
        return code.co_names[argument >> 1]
    if operation == _LOAD_NAME:
        return code.co_names[argument]
    # A local variable that shares its name with an import is loaded like the import.
    kind = dis.opname[operation]
    if kind.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")):
        slot = argument & 15 if kind.count("_FAST") == 2 else argument
        return _variable(code, slot)
    return None


def _variable(code: CodeType, slot: int) -> str | None:
    own = [name for name in code.co_cellvars if name not in code.co_varnames]
    slots = (*code.co_varnames, *own, *code.co_freevars)
    return slots[slot] if slot < len(slots) else None


def is_same(one: CodeType, other: CodeType) -> bool:
    """Tell whether two code objects do the same, whatever their files and line numbers."""
    return all(
        getattr(one, name) == getattr(other, name)
        for name in (
            "co_code",
            "co_names",
            "co_varnames",
            "co_freevars",
            "co_cellvars",
            "co_argcount",
            "co_posonlyargcount",
            "co_kwonlyargcount",
            "co_flags",
            "co_qualname",
            "co_exceptiontable",
        )
    ) and _is_same_constant(one.co_consts, other.co_consts)


def _is_same_constant(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return is_same(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same_constant, one, other))
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return {(type(each), each) for each in one} == {(type(each), each) for each in other}
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)  # tells -0.0 from 0.0, and takes nan for nan
    return one == other
