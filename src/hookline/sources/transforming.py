"""The change of a definition's syntax tree: taps at the wanted assignments and calls."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

from hookline.sources.bindings import (
    argument_nodes,
    bound_names,
    called_name,
    captured_names,
    first_argument,
    handed_nodes,
    has_docstring,
    iterated_names,
)
from hookline.sources.readings import Definition
from hookline.sources.taps import HELD, SCOPE, TAPS

_IN_PLACE = {
    ast.Add: "iadd",
    ast.Sub: "isub",
    ast.Mult: "imul",
    ast.MatMult: "imatmul",
    ast.Div: "itruediv",
    ast.FloorDiv: "ifloordiv",
    ast.Mod: "imod",
    ast.Pow: "ipow",
    ast.LShift: "ilshift",
    ast.RShift: "irshift",
    ast.BitAnd: "iand",
    ast.BitOr: "ior",
    ast.BitXor: "ixor",
}
"""What the module `operator` calls each augmented assignment."""

_DETOUR = "handle_torch_function"
"""What torch's own functions hand themselves to where a mode is active, which calls them again."""

Place = ast.expr | ast.stmt | ast.arg | ast.pattern
"""A node with a line, which what is put there takes over."""


class Wanted(NamedTuple):
    """What is wanted of a function, and of the functions it calls."""

    points: frozenset[str]
    """Names of points."""
    callees: frozenset[str]
    """Dotted names of callees of which something is wanted."""
    unplaced: frozenset[str]
    """Names of variables in functions that are called by no name the source shows."""

    @classmethod
    def sort(cls, wanted: frozenset[str], *, points: set[str], callees: set[str]) -> Wanted:
        """Tell the names of a function's own points from those of functions it calls."""
        called, unplaced = set(), set()
        for name in wanted:
            starts = [name[:at] for at, letter in enumerate(name) if letter == "."]
            found = callees.intersection(starts)
            called |= found
            if starts and not found and name not in points:
                unplaced.add(name)
        return cls(wanted & points, frozenset(called), frozenset(unplaced))


class Transformer(ast.NodeTransformer):
    """Put the taps into one definition, which it changes."""

    def __init__(
        self,
        wanted: Wanted,
        *,
        local_names: frozenset[str],
        nested_functions: frozenset[str],
        is_method: bool,
        has_end: bool = False,
    ) -> None:
        self.has_end = has_end
        self.wanted = wanted
        self.local_names = local_names
        self.nested_functions = nested_functions
        self.is_method = is_method
        self.may_meet_itself = any(wanted) and not is_method
        self.prefix = ""
        self.own_name = ""
        self.table: dict[str, int] = {}

    def transform(self, node: Definition) -> Definition:
        """Change the outermost definition: open a scope, then tap what is wanted."""
        self.own_name = node.name
        first = first_argument(node) if self.is_method else None
        self._function(node, [_opening(node, first)], first)
        if self.has_end:
            _close(node)
        return node

    def _function(
        self, node: Definition, opening: list[ast.stmt], first: ast.arg | None = None
    ) -> None:
        arguments = [each for each in argument_nodes(node.args) if each is not first]
        taps = [tap for each in arguments for tap in self._again([each.arg], each)]
        at = 1 if has_docstring(node.body) else 0
        # Arguments are tapped once: not before the function calls itself through a mode of torch.
        start = max((n + 1 for n, one in enumerate(node.body) if _is_detour(one)), default=at)
        before, after = self._block(node.body[at:start]), self._block(node.body[start:])
        node.body = [*node.body[:at], *opening, *before, *taps, *after]

    def _block(self, statements: Iterable[ast.stmt]) -> list[ast.stmt]:
        changed: list[ast.stmt] = []
        for statement in statements:
            new = self.visit(statement)
            changed.extend(new if isinstance(new, list) else [new])
        return changed

    def _wants(self, name: str) -> bool:
        return self.prefix + name in self.wanted.points

    def _number(self, name: str) -> int:
        return self.table.setdefault(self.prefix + name, len(self.table))

    def _tap(self, name: str, value: ast.expr) -> ast.expr:
        number = _constant(self._number(name), value)
        return _call(_name(SCOPE, value), [number, value], value)

    def _tap_if_wanted(self, name: str, value: ast.expr) -> ast.expr:
        return self._tap(name, value) if self._wants(name) else value

    def _again(self, names: Iterable[str], at: Place) -> list[ast.stmt]:
        """Bind names once more, to what the tap makes of their values."""
        return [
            ast.copy_location(
                ast.Assign(
                    [_variable(name, at, ast.Store())], self._tap(name, _variable(name, at))
                ),
                at,
            )
            for name in names
            if self._wants(name)
        ]

    def _again_in(self, target: ast.expr) -> list[ast.stmt]:
        return [
            statement
            for name, node in bound_names(target)
            for statement in self._again([name], node)
        ]

    def _hold(self, target: ast.expr) -> tuple[ast.expr, list[ast.stmt]]:
        """Give a target and the statements after it that tap what it binds.

        What cannot be read back - an attribute, which may be a property, and a name that is bound
        twice - is bound to a name of its own first.
        """
        wanted = [(name, node) for name, node in bound_names(target) if self._wants(name)]
        names = [name for name, _ in wanted]
        is_plain = len(set(names)) == len(names)
        if is_plain and all(isinstance(node, ast.Name) for _, node in wanted):
            return target, self._again_in(target)
        held = {id(node): f"{HELD}{at}" for at, (_, node) in enumerate(wanted)}
        statements: list[ast.stmt] = [
            ast.copy_location(
                ast.Assign([node], self._tap(name, _name(held[id(node)], node))), node
            )
            for name, node in wanted
        ]
        gone = [_name(name, target, ast.Del()) for name in held.values()]
        statements.append(ast.copy_location(ast.Delete(list[ast.expr](gone)), target))
        return _exchange(target, held), statements

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        only = node.targets[0]
        if len(node.targets) == 1 and isinstance(only, (ast.Name, ast.Attribute)):
            for name, _ in bound_names(only):
                node.value = self._tap_if_wanted(name, node.value)
            return node
        after: list[ast.stmt] = []
        for at, target in enumerate(node.targets):
            node.targets[at], again = self._hold(target)
            after += again
        return [node, *after]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is not None:
            node.target, node.value = self.visit(node.target), self.visit(node.value)
            for name, _ in bound_names(node.target):
                node.value = self._tap_if_wanted(name, node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        for name, target in bound_names(node.target):
            if isinstance(target, ast.Attribute) and self._wants(name):
                # Not read back: a property may do more than give what it was given.
                operator = _constant(_IN_PLACE[type(node.op)], node)
                arguments = [operator, _variable(name, target), node.value]
                value = _call(_taps("augment", node), arguments, node)
                return ast.copy_location(ast.Assign([target], self._tap(name, value)), node)
        return [node, *self._again_in(node.target)]

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        self.generic_visit(node)
        for name, _ in bound_names(node.target):
            node.value = self._tap_if_wanted(name, node.value)
        return node

    def visit_Return(self, node: ast.Return) -> Any:
        is_detour = _is_detour(node)
        self.generic_visit(node)
        if node.value is not None and not is_detour:
            node.value = self._tap_if_wanted("return", node.value)
        return node

    def visit_For(self, node: ast.For | ast.AsyncFor) -> Any:
        self.generic_visit(node)
        node.target, again = self._hold(node.target)
        node.body[:0] = again
        return node

    visit_AsyncFor = visit_For  # noqa: N815 (the name that ast looks for)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> Any:
        self.generic_visit(node)
        body, items = node.body, list[ast.withitem]()
        # `with A as a, B(a):` is `with A as a: with B(a):`, and B is to get the a that was bound.
        for item in reversed(node.items):
            again: list[ast.stmt] = []
            if item.optional_vars:
                item.optional_vars, again = self._hold(item.optional_vars)
            if again:
                if items:
                    body = [_with(node, items, body)]
                body, items = [*again, *body], []
            items.insert(0, item)
        return _with(node, items, body)

    visit_AsyncWith = visit_With  # noqa: N815 (the name that ast looks for)

    def visit_match_case(self, node: ast.match_case) -> Any:
        self.generic_visit(node)
        names = dict.fromkeys(captured_names(node.pattern))
        if node.guard is None:
            node.body[:0] = self._again(names, node.pattern)
            return node
        # A guard sees what the pattern bound, so the taps come before it, in the guard itself.
        at = node.guard
        tapped: list[ast.expr] = [
            ast.NamedExpr(ast.Name(name, ast.Store()), self._tap(name, _variable(name, at)))
            for name in names
            if self._wants(name)
        ]
        if tapped:
            done = ast.Tuple([*tapped, _constant(True, at)], ast.Load())
            always = ast.Subscript(done, _constant(-1, at), ast.Load())
            both = ast.BoolOp(ast.And(), [always, node.guard])
            node.guard = ast.fix_missing_locations(ast.copy_location(both, at))
        return node

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        self.generic_visit(node)
        if any(self._wants(name) for name, _ in iterated_names(node)):
            arguments = [_name(SCOPE, node.iter), self._shape(node.target), node.iter]
            node.iter = _call(_taps("iterate", node.iter), arguments, node.iter)
        return node

    def _shape(self, target: ast.expr) -> ast.expr:
        if isinstance(target, (ast.Tuple, ast.List)):
            elements = [self._shape(element) for element in target.elts]
            return ast.copy_location(ast.Tuple(elements, ast.Load()), target)
        if isinstance(target, ast.Name) and self._wants(target.id):
            return _constant(self._number(target.id), target)
        return _constant(None, target)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if called_name(node.func) == _DETOUR:
            node.args = [self._itself(one) if self._is_itself(one) else one for one in node.args]
        self._hand(node)
        function = node.func
        name = called_name(function)
        if name is None:
            return node
        is_plain = isinstance(function, ast.Name)
        if is_plain and name in self.nested_functions:
            return node
        is_local = is_plain and name in self.local_names
        if is_plain and not is_local and name in ("locals", "vars", "dir"):
            has_arguments = node.args or node.keywords
            return node if has_arguments else _call(_taps("clean", node), [node], node)
        dotted = self.prefix + name
        is_unplaced = is_local and any(
            wanted.startswith(self.prefix) for wanted in self.wanted.unplaced
        )
        if dotted in self.wanted.callees or is_unplaced:
            arguments = [_name(SCOPE, function), _constant(dotted, function), function]
            node.func = _call(_taps("call", function), arguments, function)
        elif self._is_itself(function):
            node.func = self._itself(function)
        return node

    def _hand(self, node: ast.Call) -> None:
        """Let a function of which something is wanted be handed over as a copy."""
        for one in handed_nodes(node, self.nested_functions):
            dotted = f"{self.prefix}{called_name(one)}"
            if dotted not in self.wanted.callees:
                continue
            copied = _call(
                _taps("hand", one), [_name(SCOPE, one), _constant(dotted, one), one], one
            )
            node.args = [copied if given is one else given for given in node.args]
            for keyword in node.keywords:
                if keyword.value is one:
                    keyword.value = copied

    def _is_itself(self, node: ast.expr) -> bool:
        is_own_name = isinstance(node, ast.Name) and node.id == self.own_name
        return is_own_name and self.may_meet_itself and self.own_name not in self.local_names

    def _itself(self, node: ast.expr) -> ast.expr:
        return _call(_taps("again", node), [node], node)

    def visit_FunctionDef(self, node: Definition) -> Any:
        node.decorator_list = [self.visit(each) for each in node.decorator_list]
        self._defaults(node.args)
        outer, self.prefix = self.prefix, f"{self.prefix}{node.name}."
        self._function(node, [])
        self.prefix = outer
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 (the name that ast looks for)

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        self._defaults(node.args)
        outer, self.prefix = self.prefix, f"{self.prefix}lambda."
        node.body = self.visit(node.body)
        self.prefix = outer
        return node

    def _defaults(self, arguments: ast.arguments) -> None:
        arguments.defaults = [self.visit(each) for each in arguments.defaults]
        arguments.kw_defaults = [each and self.visit(each) for each in arguments.kw_defaults]

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        node.decorator_list = [self.visit(each) for each in node.decorator_list]
        node.bases = [self.visit(each) for each in node.bases]
        node.keywords = [self.visit(each) for each in node.keywords]
        return node


def _exchange(target: ast.expr, names: dict[int, str]) -> ast.expr:
    """Give a target like this one with other names in some places."""
    if id(target) in names:
        return _name(names[id(target)], target, ast.Store())
    new = copy.copy(target)
    if isinstance(new, ast.Starred):
        new.value = _exchange(new.value, names)
    elif isinstance(new, (ast.Tuple, ast.List)):
        new.elts = [_exchange(element, names) for element in new.elts]
    return new


def _is_detour(statement: ast.stmt) -> bool:
    """Tell whether a statement is, or is an `if` around, `return handle_torch_function(...)`."""
    if isinstance(statement, ast.If):
        return _is_detour(statement.body[0])
    value = statement.value if isinstance(statement, ast.Return) else None
    return isinstance(value, ast.Call) and called_name(value.func) == _DETOUR


def _opening(node: Definition, first: ast.arg | None) -> ast.stmt:
    """Write the first statement of a rewritten function."""
    at = node
    if first is None:
        opened = _call(_taps("enter", at), [], at)
        return ast.copy_location(ast.Assign([_name(SCOPE, at, ast.Store())], opened), at)
    opened = _call(_taps("begin", at), [_name(first.arg, at)], at)
    names: list[ast.expr] = [_name(first.arg, at, ast.Store()), _name(SCOPE, at, ast.Store())]
    target = ast.copy_location(ast.Tuple(names, ast.Store()), at)
    return ast.copy_location(ast.Assign([target], opened), at)


def _close(node: Definition) -> None:
    """Let a rewritten function say that it ends, however it ends."""
    start = 1 + next(at for at, one in enumerate(node.body) if _is_opening(one))
    ended = ast.Expr(_call(_taps("end", node), [_name(SCOPE, node)], node))
    body = node.body[start:] or [ast.Pass()]
    guarded = ast.Try(body=body, handlers=[], orelse=[], finalbody=[ended])
    node.body[start:] = [ast.copy_location(guarded, body[0] if body else node)]
    ast.fix_missing_locations(node)


def _is_opening(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name == TAPS
    return False


def _name(name: str, at: Place, context: ast.expr_context | None = None) -> ast.Name:
    return ast.copy_location(ast.Name(name, context or ast.Load()), at)


def _variable(name: str, at: Place, context: ast.expr_context | None = None) -> ast.expr:
    """Write `y` or `self.cache`."""
    owner, _, attribute = name.rpartition(".")
    if not owner:
        return _name(name, at, context)
    whole = ast.Attribute(_name(owner, at), attribute, context or ast.Load())
    return ast.copy_location(whole, at)


def _constant(value: str | int | None, at: Place) -> ast.expr:
    return ast.copy_location(ast.Constant(value), at)


def _taps(method: str, at: Place) -> ast.expr:
    return ast.copy_location(ast.Attribute(_name(TAPS, at), method, ast.Load()), at)


def _call(function: ast.expr, arguments: list[ast.expr], at: Place) -> ast.expr:
    return ast.copy_location(ast.Call(function, arguments, []), at)


def _with(
    node: ast.With | ast.AsyncWith, items: list[ast.withitem], body: list[ast.stmt]
) -> ast.With | ast.AsyncWith:
    new = copy.copy(node)
    new.items, new.body = items, body
    return new
