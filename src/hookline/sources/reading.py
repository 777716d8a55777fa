"""`read`: every assignment and every call of a function, in source order."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple

from hookline.sources.bindings import (
    argument_nodes,
    bound_names,
    called_name,
    captured_names,
    default_nodes,
    first_argument,
    handed_nodes,
    iterated_names,
)
from hookline.sources.definitions import Source, find
from hookline.sources.readings import Callee, Definition, Point, Reading
from hookline.sources.resolving import resolve
from hookline.sources.unwrapping import check_exchangeable, unwrap

_LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)
"""The statements after which the rest of their block does not run."""


class Call(NamedTuple):
    """A call by name or attribute, before anybody looked up what is called."""

    name: str
    line: int
    function: ast.expr


class Analysis(NamedTuple):
    """What the source alone tells, the same for every function of one code object."""

    points: tuple[Point, ...]
    names: dict[str, list[Point]]
    calls: tuple[Call, ...]
    called: tuple[str, ...]
    handed: tuple[Call, ...]


def read(function: Callable[..., Any]) -> Reading:
    """Read the assignments and calls of the innermost function; raise NoSource."""
    chain = unwrap(function)
    check_exchangeable(chain)
    inner = chain[-1]
    source = find(inner)
    assert isinstance(inner, FunctionType)
    analysis = analyse(source)

    def find_callees(calls: tuple[Call, ...]) -> tuple[Callee, ...]:
        return tuple(
            Callee(
                call.name,
                call.line,
                expression(call.function),
                resolve(call.function, inner, source.local_names),
            )
            for call in calls
        )

    return Reading(
        points=analysis.points,
        names=analysis.names,
        called=analysis.called,
        find_callees=lambda: find_callees(analysis.calls),
        find_handed=lambda: find_callees(analysis.handed),
        file=source.file,
        first_line=source.first_line,
        last_line=source.last_line,
        lines=source.lines,
        node=source.node,
    )


def analyse(source: Source) -> Analysis:
    """Walk a definition once for each code object."""
    if source.analysis is None:
        reader = Reader(source.nested_functions)
        reader.read(source.node, skips_first=source.is_method)
        names: dict[str, list[Point]] = {}
        for point in reader.points:
            names.setdefault(point.name, []).append(point)
        called = tuple(call.name for call in reader.calls)
        handed = tuple(reader.handed)
        source.analysis = Analysis(tuple(reader.points), names, tuple(reader.calls), called, handed)
    known: Analysis = source.analysis
    return known


def expression(node: ast.expr) -> str:
    """Write an expression as source; the plain dotted ones, which most are, at no cost."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{expression(node.value)}.{node.attr}"
    if isinstance(node, ast.Call) and not node.args and not node.keywords:
        return f"{expression(node.func)}()"
    return ast.unparse(node)


class Reader(ast.NodeVisitor):
    """Collect points and calls; doubt what may run more or less often than once."""

    def __init__(self, nested_functions: frozenset[str]) -> None:
        self.points: list[Point] = []
        self.calls: list[Call] = []
        self.handed: list[Call] = []
        self.nested_functions = nested_functions
        self.prefix = ""
        self.doubts = 0
        self.may_have_left = False

    def read(self, node: Definition, *, skips_first: bool = False) -> None:
        """Read the arguments and the body of the function at hand."""
        first = first_argument(node) if skips_first else None
        for argument in argument_nodes(node.args):
            if argument is not first:
                self.add(argument.arg, argument, "argument")
        self.block(node.body)

    def add(self, name: str, node: ast.expr | ast.stmt | ast.arg | ast.pattern, kind: str) -> None:
        is_certain = not self.doubts and not self.may_have_left
        self.points.append(Point(self.prefix + name, node.lineno, kind, is_certain))

    def bind(self, target: ast.expr, kind: str) -> None:
        self.visit(target)
        for name, node in bound_names(target):
            self.add(name, node, kind if isinstance(node, ast.Name) else "attribute")

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)
            if isinstance(statement, _LEAVING):
                break

    def doubtful(self, *parts: ast.AST | Iterable[ast.stmt] | None) -> None:
        self.doubts += 1
        for part in parts:
            if isinstance(part, ast.AST):
                self.visit(part)
            elif part is not None:
                self.block(part)
        self.doubts -= 1

    def inside(self, prefix: str, read: Callable[[], None]) -> None:
        """Read what belongs to a function inside this one; leaving that is not leaving this."""
        outer = self.prefix, self.may_have_left
        self.prefix += prefix
        self.doubts += 1
        read()
        self.doubts -= 1
        self.prefix, self.may_have_left = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.bind(target, "assignment")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.bind(node.target, "assignment")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self.bind(node.target, "assignment")

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.bind(node.target, "walrus")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.add("return", node, "return")
        self.may_have_left = True

    def visit_Raise(self, node: ast.Raise) -> None:
        self.generic_visit(node)
        self.may_have_left = True

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        test = node.test
        if not isinstance(test, ast.Constant) or test.value:
            self.doubtful(node.body)
        if not isinstance(test, ast.Constant) or not test.value:
            self.doubtful(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        if isinstance(node.test, ast.Constant) and not node.test.value:
            self.block(node.orelse)
        else:
            self.doubtful(node.test, node.body, node.orelse)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self.doubts += 1
        self.bind(node.target, "loop")
        self.block(node.body)
        self.block(node.orelse)
        self.doubts -= 1

    visit_AsyncFor = visit_For  # noqa: N815 (the name that ast looks for)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, "with")
        self.block(node.body)

    visit_AsyncWith = visit_With  # noqa: N815 (the name that ast looks for)

    def visit_Try(self, node: Any) -> None:
        has_left_before = self.may_have_left
        self.doubtful(node.body)
        for handler in node.handlers:
            self.doubtful(handler.type, handler.body)
        self.doubtful(node.orelse)
        has_left_inside, self.may_have_left = self.may_have_left, has_left_before
        self.block(node.finalbody)  # runs whichever way the rest was left
        self.may_have_left |= has_left_inside

    visit_TryStar = visit_Try  # noqa: N815 (the name that ast looks for)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self.doubts += 1
        for case in node.cases:
            self.visit(case.pattern)
            for name in dict.fromkeys(captured_names(case.pattern)):
                self.add(name, case.pattern, "match")
            if case.guard is not None:
                self.visit(case.guard)
            self.block(case.body)
        self.doubts -= 1

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self.doubtful(node.body, node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self.doubtful(*node.values[1:])

    def visit_Compare(self, node: ast.Compare) -> None:
        self.visit(node.left)
        self.visit(node.comparators[0])
        self.doubtful(*node.comparators[1:])  # `a < b < c` looks at c only if a < b

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)
        self.doubtful(node.msg)

    def visit_ListComp(self, node: Any) -> None:
        self.visit(node.generators[0].iter)
        self.doubts += 1
        for at, generator in enumerate(node.generators):
            if at:
                self.visit(generator.iter)
            for name, bound in iterated_names(generator):
                self.add(name, bound, "comprehension")
            for condition in generator.ifs:
                self.visit(condition)
        if isinstance(node, ast.DictComp):
            self.visit(node.key)
            self.visit(node.value)
        else:
            self.visit(node.elt)
        self.doubts -= 1

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # noqa: N815 (the name that ast looks for)

    def visit_Call(self, node: ast.Call) -> None:
        name = called_name(node.func)
        is_nested = isinstance(node.func, ast.Name) and name in self.nested_functions
        if name is not None and not is_nested:
            self.calls.append(Call(self.prefix + name, node.lineno, node.func))
        for argument in handed_nodes(node, self.nested_functions):
            handed = called_name(argument)
            self.handed.append(Call(f"{self.prefix}{handed}", node.lineno, argument))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: Definition) -> None:
        for part in (*node.decorator_list, *default_nodes(node.args)):
            self.visit(part)
        self.inside(f"{node.name}.", lambda: self.read(node))

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 (the name that ast looks for)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for part in default_nodes(node.args):
            self.visit(part)
        self.inside("lambda.", lambda: self.visit(node.body))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
