"""Helpers that a `forward` reaches in roundabout ways: partials, decorators, variables; twins."""

from __future__ import annotations

import functools

import torch
from function_cases import halve_again, scale_three
from twins import Base, case, note

triple = functools.partial(torch.mul, other=3)


def power(a, *, n, plus=0.0):
    w = a**n + plus
    return w


square = functools.partial(power, n=2)


@case("square.w", "y")
class PartialHelper(Base):
    def forward(self, x):
        y = triple(self.lin(x))
        return square(y, plus=1.0)

    def twin(self, x):
        y = note("y", self.lin(x) * 3)
        return note("square.w", y**2 + 1.0)


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) * 1

    return wrapper


@logged
def decorated_scale(a):
    w = a * 4
    return w


@case("decorated_scale.w", "y")
class DecoratedHelper(Base):
    def forward(self, x):
        y = decorated_scale(self.lin(x))
        return y

    def twin(self, x):
        return note("y", note("decorated_scale.w", self.lin(x) * 4) * 1)


def pick(name):
    return {"three": scale_three, "half": halve_again}[name]


@case("function.w", "scale_three.w", "y")
class HelperChosenAtRunTime(Base):
    def forward(self, x):
        function = pick("three" if x.dim() == 2 else "half")
        y = function(self.lin(x))
        return y

    def twin(self, x):
        w = self.lin(x) * 3
        w = note("scale_three.w", note("function.w", w))
        return note("y", w)


@case("function.w", "y")
class HelperAsAnArgument(Base):
    def forward(self, x, function=scale_three):
        y = function(self.lin(x))
        return y

    def twin(self, x):
        return note("y", note("function.w", self.lin(x) * 3))


def slices(a):
    for row in a.unbind(0):
        piece = row * 2
        yield piece


@case("slices.piece", "parts")
class GeneratorHelper(Base):
    def forward(self, x):
        parts = list(slices(self.lin(x)))
        return torch.stack(parts)

    def twin(self, x):
        parts = [note("slices.piece", row * 2) for row in self.lin(x).unbind(0)]
        return torch.stack(note("parts", parts))


@case("part.piece")
class HelperInAComprehension(Base):
    def forward(self, x):
        def part(row):
            piece = row * 2
            return piece

        return torch.stack([part(row) for row in self.lin(x).unbind(0)])

    def twin(self, x):
        return torch.stack([note("part.piece", row * 2) for row in self.lin(x).unbind(0)])


@case("scale_three.w")
class HelperWithALikeNamedVariable(Base):
    def forward(self, x):
        w = scale_three(self.lin(x))
        return w + 1

    def twin(self, x):
        return note("scale_three.w", self.lin(x) * 3) + 1


@case("inner.scale_three.w")
class HelperCalledByANestedFunction(Base):
    def forward(self, x):
        def inner(a):
            return scale_three(a) + 1

        return inner(self.lin(x))

    def twin(self, x):
        return note("inner.scale_three.w", self.lin(x) * 3) + 1
