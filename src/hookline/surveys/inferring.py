"""What an expression in a forward is, as far as its source and the module tell.

A value may be plainly no tensor, surely a tensor, or neither can be told.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hookline.sources.resolving import resolve

_NAMESPACES = (torch, functional, torch.linalg, torch.fft, torch.special)
_NO_OPERATIONS = ("is_", "get_", "set_", "use_", "manual_seed", "compile", "no_grad", "autocast")
_PLAIN_ATTRIBUTES = frozenset(
    ["shape", "dtype", "device", "ndim", "layout", "training", "requires_grad", "is_cuda"]
)
_PLAIN_METHODS = frozenset(["size", "dim", "numel", "item", "tolist", "stride", "element_size"])
_OTHER_METHODS = frozenset(["values", "indices", "get_device", "data_ptr"])
"""Methods of tensors that other objects are more likely to mean, or that give no tensor."""
_TUPLES = frozenset(["split", "chunk", "unbind", "tensor_split", "meshgrid", "broadcast_tensors"])
"""Operations that give a tuple of tensors."""
_MAY_BE_TUPLES = frozenset(["max", "min", "sort", "topk", "median", "mode", "std_mean", "var_mean"])
_QUIET = (
    len, range, isinstance, issubclass, hasattr, enumerate, zip, int, float, str, bool, tuple,
    list, dict, set, print, getattr, type, id, callable, slice, iter, next, reversed, super,
)  # fmt: skip
"""Built-in functions that call no operation of a name that could be taken for another's."""
_NUMBERS = (len, int, float, bool)
_SEVERAL = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
"""Modules of torch that return more than a tensor."""


class Knowledge:
    """What is known of the variables of a function, statement by statement.

    `module` is what `self` is in it; None where it is no method.
    """

    def __init__(
        self, function: FunctionType, local_names: frozenset[str], module: nn.Module | None
    ) -> None:
        self._function = function
        self._local_names = local_names
        self._module = module
        self._own = () if module is None else function.__code__.co_varnames[:1]
        self._plain: set[str] = set()
        self._tensors: set[str] = set()
        self._modules: set[str] = set()
        self._tuples: set[str] = set()

    def annotate(self, argument: ast.arg) -> None:
        """Take an argument to be what its annotation says."""
        if argument.annotation is None:
            return
        kind = ast.unparse(argument.annotation)
        if kind in ("Tensor", "torch.Tensor"):
            self._tensors.add(argument.arg)
        elif kind in ("int", "float", "bool", "str"):
            self._plain.add(argument.arg)

    def learn(self, target: ast.expr, value: ast.expr) -> None:
        """Remember of the variables of an assignment what their values are."""
        if isinstance(target, ast.Name):
            is_tuple = self._is_tuple(value)
            self._remember(target.id, self.is_plain(value), self.is_tensor(value))
            if is_tuple:
                self._tuples.add(target.id)
            return
        if not isinstance(target, (ast.Tuple, ast.List)):
            return
        if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
            for each, its_value in zip(target.elts, value.elts, strict=True):
                self.learn(each, its_value)
            return
        is_tuple = self._is_tuple(value)
        is_plain = self.is_plain(value) and not is_tuple
        for each in target.elts:
            if isinstance(each, ast.Name):
                self._remember(each.id, is_plain, is_tuple)

    def learn_loop(self, target: ast.expr, iterable: ast.expr) -> None:
        """Remember what a loop runs over: modules, or numbers."""
        if not isinstance(target, ast.Name):
            return
        is_range = isinstance(iterable, ast.Call) and self._callee(iterable) is range
        self._remember(target.id, is_range, False)
        if isinstance(self._value(iterable), nn.Module):
            self._modules.add(target.id)

    def _remember(self, name: str, is_plain: bool, is_tensor: bool) -> None:
        for names in (self._plain, self._tensors, self._modules, self._tuples):
            names.discard(name)
        if is_plain:
            self._plain.add(name)
        elif is_tensor:
            self._tensors.add(name)

    def operation(self, node: ast.Call) -> str | None:
        """Give the name of the operation that a call is; None where it is another call."""
        called = self._callee(node)
        if called is not None:
            return _torch_name(called)
        function = node.func
        if not isinstance(function, ast.Attribute) or self._is_own(function.value):
            return None
        name = function.attr
        if name in _PLAIN_METHODS | _OTHER_METHODS or name not in _tensor_methods():
            return None
        return None if self.is_plain(function.value) else name

    def is_surely_called(self, node: ast.Call) -> bool:
        """Tell whether a call that looks like an operation is one: torch's, or a tensor's."""
        function = node.func
        if self._callee(node) is not None or not isinstance(function, ast.Attribute):
            return True
        return self.is_tensor(function.value)

    def is_quiet(self, node: ast.Call) -> bool:
        """Tell whether a call runs no operation of this forward: a module, a size, a length."""
        called = self._callee(node)
        if called is not None:
            return _is_of(called, "math") or _is_of(called, "torch") or _is_one(called, _QUIET)
        function = node.func
        if isinstance(function, ast.Name):
            return function.id in self._modules
        if isinstance(self._value(function), nn.Module):
            return True
        if not isinstance(function, ast.Attribute) or self._is_own(function.value):
            return False
        return function.attr in _PLAIN_METHODS

    def _callee(self, node: ast.Call) -> Callable[..., Any] | None:
        return resolve(node.func, self._function, self._local_names)

    def _is_own(self, node: ast.expr) -> bool:
        """Tell whether an expression is `self`."""
        return isinstance(node, ast.Name) and node.id in self._own

    def _value(self, node: ast.expr) -> Any:
        """Give what `self.a.b` is on this module; None where that is not plain to see."""
        if self._is_own(node):
            return self._module
        if isinstance(node, ast.Subscript):
            owner = self._value(node.value)
            # Some module of it, and more need not be known.
            return owner if isinstance(owner, (nn.ModuleList, nn.ModuleDict)) else None
        if not isinstance(node, ast.Attribute):
            return None
        owner = self._value(node.value)
        if owner is None:
            return None
        places = [getattr(owner, "__dict__", {}), vars(type(owner))]
        if isinstance(owner, nn.Module):
            places = [owner._parameters, owner._buffers, owner._modules, *places]
        return next((place[node.attr] for place in places if node.attr in place), None)

    def is_plain(self, node: ast.expr) -> bool:
        """Tell whether a value is surely no tensor."""
        match node:
            case ast.Constant() | ast.JoinedStr() | ast.Lambda() | ast.Tuple() | ast.List():
                return True
            case ast.Dict() | ast.Set() | ast.ListComp() | ast.DictComp() | ast.Slice():
                return True
            case ast.Name(id=name):
                return name in self._plain
            case ast.Attribute(attr=name):
                value = self._value(node)
                is_known = value is not None and not isinstance(value, (Tensor, property))
                return name in _PLAIN_ATTRIBUTES or is_known
            case ast.Call():
                return self._is_plain_call(node)
            case ast.BinOp(left=left, right=right):
                return self.is_plain(left) and self.is_plain(right)
            case ast.UnaryOp(operand=operand):
                return isinstance(node.op, ast.Not) or self.is_plain(operand)
            case ast.Subscript(value=value):
                return self.is_plain(value) and not self._is_tuple(value)
            case ast.IfExp(body=body, orelse=other):
                return self.is_plain(body) and self.is_plain(other)
        return False

    def _is_tuple(self, node: ast.expr) -> bool:
        """Tell whether a value is a tuple of tensors."""
        if isinstance(node, ast.Name):
            return node.id in self._tuples
        return isinstance(node, ast.Call) and self.operation(node) in _TUPLES

    def _is_plain_call(self, node: ast.Call) -> bool:
        if self._is_tuple(node):
            return True
        if isinstance(node.func, ast.Attribute) and node.func.attr in _PLAIN_METHODS:
            return True
        called = self._callee(node)
        return called is not None and (_is_of(called, "math") or _is_one(called, _NUMBERS))

    def is_tensor(self, node: ast.expr) -> bool:
        """Tell whether a value is surely a tensor."""
        match node:
            case ast.Name(id=name):
                return name in self._tensors
            case ast.Attribute():
                return isinstance(self._value(node), Tensor)
            case ast.BinOp(left=left, right=right):
                is_matmul = isinstance(node.op, ast.MatMult)
                return is_matmul or self.is_tensor(left) or self.is_tensor(right)
            case ast.UnaryOp(operand=operand):
                return self.is_tensor(operand)
            case ast.Subscript(value=value):
                return self._is_tuple(value) or self.is_tensor(value)
            case ast.Call():
                operation = self.operation(node)
                if operation is not None:
                    is_one = operation not in _TUPLES | _MAY_BE_TUPLES
                    return is_one and self.is_surely_called(node)
                module = self._value(node.func)
                is_of_torch = type(module).__module__.startswith("torch.nn.modules.")
                return is_of_torch and not isinstance(module, _SEVERAL)
        return False


@functools.cache
def _tensor_methods() -> frozenset[str]:
    """List the methods of tensors, without properties and private ones."""
    return frozenset(
        name
        for name in dir(Tensor)
        if not name.startswith("_") and callable(getattr(Tensor, name, None))
    )


def _torch_name(function: Any) -> str | None:
    """Give the name of a function of torch that computes; None for any other."""
    name = getattr(function, "__name__", "")
    if not name or isinstance(function, type) or name.startswith(_NO_OPERATIONS):
        return None
    return name if any(vars(space).get(name) is function for space in _NAMESPACES) else None


def _is_of(function: Any, package: str) -> bool:
    """Tell whether a function's module is of a package; those of torch in C say none."""
    home = getattr(function, "__module__", None)
    if home is None:
        name = getattr(function, "__name__", "")
        return package == "torch" and any(vars(one).get(name) is function for one in _NAMESPACES)
    return str(home).split(".")[0] == package


def _is_one(function: Any, functions: tuple[Any, ...]) -> bool:
    return any(function is one for one in functions)
