"""How a module's forward reaches a child without calling it, read from its source.

A call of `self.child(x)` runs hooks; `self.child.forward(x)`, `self.child.encode(x)` and
`F.linear(x, self.child.weight)` do not. This file follows the names in the source of a parent's
`forward` to the modules they stand for. It never runs the model, and takes both sides of every
`if`: it says what the source can do, not what a run did.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from hookline.addresses import unwrap
from hookline.hooks.methods import Function, find_method, first_argument, read_methods

# `x.to(self.child.weight.dtype)` reads the weight, but not its values.
_ONLY_ASKS = frozenset({"device", "dim", "dtype", "is_cuda", "ndim", "numel", "shape", "size"})
_ONLY_LOOK = frozenset({"getattr", "hasattr", "id", "isinstance", "issubclass", "len", "type"})


class _Modules:
    """The modules an expression may stand for, or a tuple of such: what a loop hands out."""

    __slots__ = ("all", "parts")

    def __init__(self, *modules: nn.Module | None, parts: tuple[_Modules, ...] = ()) -> None:
        self.parts = parts
        found = [unwrap(module) for module in modules if isinstance(module, nn.Module)]
        found += [module for part in parts for module in part.all]
        self.all: list[nn.Module] = list({id(module): module for module in found}.values())

    def __or__(self, other: _Modules) -> _Modules:
        if all(module in self for module in other.all):
            return self
        if all(module in other for module in self.all):
            return other
        return _Modules(*self.all, *other.all)

    def __contains__(self, module: nn.Module) -> bool:
        return any(module is one for one in self.all)

    def children(self) -> _Modules:
        return _Modules(*(child for module in self.all for child in module._modules.values()))


_NOTHING = _Modules()


@dataclass(frozen=True, slots=True)
class Bypass:
    """How the source of a parent reaches one child without calling it."""

    where: str
    """The method that does it: `Net.forward`."""

    kind: str
    """`forward`, `method` or `parameter`: what of the child it uses."""

    text: str
    """How it is written: `self.child.forward`."""

    is_called: bool
    """Whether the source also calls the child, or hands it to a function that may."""


def find_bypass(parents: Iterable[nn.Module], child: nn.Module) -> Bypass | None:
    """Look for a bypass in the parents' forward and the methods it uses; `.forward` goes first."""
    found: dict[str, tuple[str, str]] = {}
    is_called = False
    for parent in parents:
        for where, function in read_methods(parent):
            reader = _Reader(parent, child, function)
            is_called = is_called or reader.is_called
            for kind, text in reader.found:
                found.setdefault(kind, (where, text))
    for kind in ("forward", "method", "parameter"):
        if kind in found:
            return Bypass(found[kind][0], kind, found[kind][1], is_called)
    return None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _parameter_names(module: nn.Module) -> set[str]:
    names = {name for name, value in module._parameters.items() if value is not None}
    parametrizations = module._modules.get("parametrizations")
    return names if parametrizations is None else names | set(parametrizations._modules)


class _Reader(ast.NodeVisitor):
    """Follow the names of one function to modules, and collect what it does with one of them."""

    def __init__(self, parent: nn.Module, child: nn.Module, function: Function) -> None:
        self.child = child
        self.parameters = _parameter_names(child)
        self.names = {first_argument(function): _Modules(parent)}
        self.is_called = False
        """Whether the child is called, or handed to something that may call it."""
        self.found: list[tuple[str, str]] = []
        """The kind and the text of each use of the child that does not call it."""
        self._read(function.body)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if _name(node.func) not in _ONLY_LOOK:
            handed = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
            if any(self.child in self._value(one) for one in handed):
                self.is_called = True

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (node.attr in _ONLY_ASKS and self._is_parameter(node.value)):
            self.generic_visit(node)
        if self._is_parameter(node):
            self.found.append(("parameter", ast.unparse(node)))
        elif self.child not in self._value(node.value):
            return
        elif node.attr == "__call__":
            self.is_called = True
        elif node.attr == "forward":
            self.found.append(("forward", ast.unparse(node)))
        elif find_method(type(self.child).__mro__, node.attr, 0) is not None:
            self.found.append(("method", ast.unparse(node)))

    def _is_parameter(self, node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr in self.parameters
            and isinstance(node.ctx, ast.Load)
            and self.child in self._value(node.value)
        )

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._set(target, self._value(node.value))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._set(node.target, self._value(node.value))

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before = dict(self.names)
        self._read(node.body)
        after, self.names = self.names, before
        self._read(node.orelse)
        for name, value in after.items():
            self.names[name] = self.names.get(name, _NOTHING) | value

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._set(node.target, self._items(node.iter))
        self._read([*node.body, *node.body, *node.orelse])  # again, for names bound further down

    def generic_visit(self, node: ast.AST) -> None:
        for one in getattr(node, "generators", ()):  # a comprehension: its loops come first
            self.visit(one.iter)
            self._set(one.target, self._items(one.iter))
        super().generic_visit(node)

    def _read(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    def _set(self, target: ast.expr, value: _Modules) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            same = len(value.parts) == len(target.elts)
            for index, one in enumerate(target.elts):
                self._set(one, value.parts[index] if same else value)

    def _value(self, node: ast.expr) -> _Modules:
        """Give the modules an expression may stand for."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, _NOTHING)
        if isinstance(node, ast.Attribute):
            return _Modules(*(one._modules.get(node.attr) for one in self._value(node.value).all))
        if isinstance(node, ast.Subscript):
            return self._item(self._value(node.value), node.slice)
        if isinstance(node, ast.IfExp):
            return self._value(node.body) | self._value(node.orelse)
        if isinstance(node, (ast.Tuple, ast.List)):
            return _Modules(parts=tuple(self._value(one) for one in node.elts))
        if isinstance(node, ast.Call) and _name(node.func) == "getattr":
            owner, name = [*node.args, None, None][:2]
            if owner is not None and isinstance(name, ast.Constant):
                return self._item(self._value(owner), name)
        return _NOTHING

    def _item(self, owner: _Modules, index: ast.expr) -> _Modules:
        modules = owner.parts or tuple(
            _Modules(child) for one in owner.all for child in one._modules.values()
        )
        try:
            if isinstance(index, ast.Slice):
                ends = [index.lower, index.upper, index.step]
                picked = [None if end is None else ast.literal_eval(end) for end in ends]
                return _Modules(parts=modules[slice(*picked)])
            key = ast.literal_eval(index)
            if isinstance(key, str):
                return _Modules(*(one._modules.get(key) for one in owner.all))
            return _Modules(*modules[operator.index(key)].all)
        except (ValueError, TypeError, IndexError):  # known only when the model runs: any of them
            anything = _Modules(parts=modules)
            return anything if isinstance(index, ast.Slice) else _Modules(*anything.all)

    def _items(self, node: ast.expr) -> _Modules:
        """Give what a loop over an expression hands out."""
        if not isinstance(node, ast.Call):
            value = self._value(node)
            return _Modules(*value.all) if value.parts else value.children()
        if isinstance(node.func, ast.Attribute):
            children = self._value(node.func.value).children()
            if node.func.attr in ("children", "values"):
                return children
            if node.func.attr in ("items", "named_children"):
                return _Modules(parts=(_NOTHING, children))
        name = _name(node.func)
        if name == "enumerate" and node.args:
            return _Modules(parts=(_NOTHING, self._items(node.args[0])))
        if name == "zip":
            return _Modules(parts=tuple(self._items(one) for one in node.args))
        if name in ("reversed", "list", "tuple", "iter") and node.args:
            return self._items(node.args[0])
        return _NOTHING
