"""Which operations a forward calls, as far as its source tells: a forecast, not a record.

Python's operators mean torch only where an operand is a tensor, and the source does not say what is
one. So what is plainly none (shapes, numbers, a module's settings) is left out, the rest is taken
for tensors, and a number is given only where nothing before it is in doubt.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from hookline.addresses.inside import canonical_operation
from hookline.sources import NoSource, Reading, unwrap
from hookline.sources.definitions import find
from hookline.sources.reading import Reader
from hookline.sources.readings import Definition
from hookline.surveys.inferring import Knowledge

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.MatMult: "matmul",
    ast.Pow: "pow",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
    ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or",
    ast.BitXor: "bitwise_xor",
}
_UNARY: dict[type[ast.unaryop], str] = {ast.USub: "neg", ast.Invert: "bitwise_not"}
_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}


class Operation(NamedTuple):
    """One place in a function's source that calls an operation."""

    name: str
    line: int
    number: int | None
    """Which call of that name it is in a visit; None where it is the only one, or in doubt."""


def predict(function: Callable[..., Any], reading: Reading, module: nn.Module) -> list[Operation]:
    """List the operations of a module's forward, or of a function it calls, in source order."""
    inner = unwrap(function)[-1]
    if not isinstance(inner, FunctionType):
        raise NoSource("it is no Python function")
    source = find(inner)
    owner = module if source.is_method else None
    knowledge = Knowledge(inner, source.local_names, owner)
    predictor = _Predictor(source.nested_functions, knowledge)
    predictor.read(reading.node, skips_first=source.is_method)
    often = Counter(found.name for found in predictor.found)
    counts: Counter[str] = Counter()
    in_doubt: set[str] = set()
    operations = []
    for name, line, is_certain, is_after_unknown in predictor.found:
        if not is_certain or is_after_unknown:
            in_doubt.add(name)
        number = None if often[name] == 1 or name in in_doubt else counts[name]
        counts[name] += 1
        operations.append(Operation(name, line, number))
    return operations


class _Found(NamedTuple):
    name: str
    line: int
    is_certain: bool
    is_after_unknown: bool


class _Predictor(Reader):
    """Collect operations in the order in which they run."""

    def __init__(self, nested_functions: frozenset[str], knowledge: Knowledge) -> None:
        super().__init__(nested_functions)
        self.known = knowledge
        self.found: list[_Found] = []
        self.has_unknown_call = False

    def note(self, name: str, node: ast.expr | ast.stmt, *, is_sure: bool) -> None:
        is_certain = is_sure and not self.doubts and not self.may_have_left
        found = _Found(canonical_operation(name), node.lineno, is_certain, self.has_unknown_call)
        self.found.append(found)

    def read(self, node: Definition, *, skips_first: bool = False) -> None:
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                self.known.annotate(argument)
        super().read(node, skips_first=skips_first)

    def visit_Assign(self, node: ast.Assign) -> None:
        super().visit_Assign(node)
        for target in node.targets:
            self.known.learn(target, node.value)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.known.learn_loop(node.target, node.iter)
        super().visit_For(node)

    visit_AsyncFor = visit_For  # noqa: N815 (the name that ast looks for)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        name = _BINARY.get(type(node.op))
        if name is not None and not self.known.is_plain(node):
            self.note(name, node, is_sure=self.known.is_tensor(node))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        name = _BINARY.get(type(node.op))
        sides = (node.target, node.value)
        if name is not None and not all(map(self.known.is_plain, sides)):
            in_place = "" if name == "matmul" else "_"
            self.note(name + in_place, node, is_sure=self.known.is_tensor(node.target))
        self.bind(node.target, "assignment")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        name = _UNARY.get(type(node.op))
        if name is not None and not self.known.is_plain(node.operand):
            self.note(name, node, is_sure=self.known.is_tensor(node.operand))

    def visit_Compare(self, node: ast.Compare) -> None:
        super().visit_Compare(node)
        sides = [node.left, *node.comparators]
        for at, operator in enumerate(node.ops):
            name = _COMPARED.get(type(operator))
            pair = sides[at : at + 2]
            if name is not None and not all(map(self.known.is_plain, pair)):
                is_sure = at == 0 and any(map(self.known.is_tensor, pair))
                self.note(name, node, is_sure=is_sure)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        if self.known.is_plain(node.value) or isinstance(node.ctx, ast.Del):
            return
        name = "setitem" if isinstance(node.ctx, ast.Store) else "getitem"
        self.note(name, node, is_sure=self.known.is_tensor(node.value))

    def visit_Call(self, node: ast.Call) -> None:
        super().visit_Call(node)
        name = self.known.operation(node)
        if name is not None:
            self.note(name, node, is_sure=self.known.is_surely_called(node))
        elif not self.known.is_quiet(node):
            self.has_unknown_call = True
