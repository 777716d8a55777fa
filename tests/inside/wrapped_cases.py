"""Where a `forward` comes from: decorators, parents, closures, the instance; with twins."""

from __future__ import annotations

import functools
from typing import Any

import torch
from twins import Base, case, note


def add_nothing(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs) + 0

    return wrapper


def without_wraps(function):
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return wrapper


def multiply(factor):
    """Take an argument, as decorators of model libraries do."""

    def decorate(function):
        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            kwargs.setdefault("flag", factor)
            result = function(self, *args, **kwargs)
            return result * factor

        return wrapper

    return decorate


def can_return_tuple(function):
    """Give a tuple where one is asked for, as transformers' decorator of that name does."""

    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return_dict = kwargs.pop("return_dict", True)
        output = function(self, *args, **kwargs)
        return output if return_dict else tuple(output.values())

    return wrapper


@case("y")
class Decorated(Base):
    @add_nothing
    def forward(self, x):
        y = self.lin(x)
        return y

    @add_nothing
    def twin(self, x):
        return note("y", self.lin(x))


@case("y", "flag")
class DecoratedWithAnArgument(Base):
    @multiply(3.0)
    def forward(self, x, flag=1.0):
        y = self.lin(x) + flag
        return y

    @multiply(3.0)
    def twin(self, x, flag=1.0):
        flag = note("flag", flag)
        return note("y", self.lin(x) + flag)


@case("y")
class DecoratedWithoutWraps(Base):
    @without_wraps
    def forward(self, x):
        y = self.lin(x)
        return y

    @without_wraps
    def twin(self, x):
        return note("y", self.lin(x))


@case("y")
class DecoratedNoGrad(Base):
    @torch.no_grad()
    def forward(self, x):
        y = self.lin(x) * 2
        return y

    @torch.no_grad()
    def twin(self, x):
        return note("y", self.lin(x) * 2)


@case("y")
class DecoratedTwice(Base):
    @torch.autocast("cpu", enabled=False)
    @add_nothing
    def forward(self, x):
        y = self.lin(x)
        return y

    @torch.autocast("cpu", enabled=False)
    @add_nothing
    def twin(self, x):
        return note("y", self.lin(x))


@case("y")
class DecoratedAutocast(Base):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x):
        y = self.lin(x)
        return y.float()

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def twin(self, x):
        return note("y", self.lin(x)).float()


@case("hidden", "outputs")
class DecoratedLikeTransformers(Base):
    @can_return_tuple
    @without_wraps
    def forward(self, x, **kwargs: Any):
        hidden = self.lin(x)
        outputs = {"last": hidden.tanh()}
        return outputs

    @can_return_tuple
    def twin(self, x):
        hidden = note("hidden", self.lin(x))
        return note("outputs", {"last": hidden.tanh()})


class Parent(Base):
    def forward(self, x):
        h = self.lin(x)
        return h

    def twin(self, x):
        h = note("h", self.lin(x))
        return note("return", h)


@case("h", "return")
class Inherited(Parent):
    pass


@case("h", "y", "forward.h", "forward.return")
class Super(Parent):
    def forward(self, x):
        h = super().forward(x)
        y = h * 2
        return y

    def twin(self, x):
        h = note("forward.return", note("forward.h", self.lin(x)))
        h = note("h", h)
        return note("y", h * 2)


@case("h", "y")
class OldSuper(Parent):
    def forward(self, x):
        h = super(OldSuper, self).forward(x)  # noqa: UP008
        y = h * 2
        return y

    def twin(self, x):
        h = note("h", self.lin(x))
        return note("y", h * 2)


@case("inner.h")
class SuperInANestedFunction(Parent):
    def forward(self, x):
        def inner(a):
            h = super(SuperInANestedFunction, self).forward(a) + __class__.offset
            return h

        return inner(x)

    offset = 1.0

    def twin(self, x):
        return note("inner.h", self.lin(x) + 1.0)


class Doubling:
    def forward(self, x):
        doubled = super().forward(x) * 2
        return doubled


class Shifting:
    def forward(self, x):
        shifted = super().forward(x) + 1
        return shifted


@case("doubled")
class Mixins(Doubling, Shifting, Parent):
    def twin(self, x):
        return note("doubled", (self.lin(x) + 1) * 2)


@case("y", "forward.h")
class ParentByName(Parent):
    def forward(self, x):
        y = Parent.forward(self, x) * 2
        return y

    def twin(self, x):
        h = note("forward.h", self.lin(x))
        return note("y", h * 2)


def make_class(scale):
    class Closure(Base):
        def forward(self, x):
            y = self.lin(x) * scale
            return y

        def twin(self, x):
            return note("y", self.lin(x) * scale)

    return Closure


case("y")(make_class(5.0))


def _from_outside(self, x):
    y = self.lin(x) * 7
    return y


@case("y")
class AssignedFromOutside(Base):
    def twin(self, x):
        return note("y", self.lin(x) * 7)


AssignedFromOutside.forward = _from_outside


@case("y")
class AliasOfAMethod(Base):
    def compute(self, x):
        y = self.lin(x) * 7
        return y

    forward = compute

    def twin(self, x):
        return note("y", self.lin(x) * 7)


@case("x", "y")
class StaticForward(Base):
    @staticmethod
    def forward(x):
        y = x.exp()
        return y

    def twin(self, x):
        return note("y", note("x", x).exp())


@case("y")
class ClassForward(Base):
    @classmethod
    def forward(cls, x):
        y = x.exp() * len(cls.__name__)
        return y

    def twin(self, x):
        return note("y", x.exp() * 12)


@case("y", "x")
class RecursiveForward(Base):
    def forward(self, x, n=2):
        y = self.lin(x) * (n + 1)
        if n:
            y = y + self.forward(x * 2, n - 1)
        return y

    def twin(self, x, n=2):
        x = note("x", x)
        y = note("y", self.lin(x) * (n + 1))
        if n:
            y = note("y", y + self.twin(x * 2, n - 1))
        return y
