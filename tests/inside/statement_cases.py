"""Statements and names that people write inside a `forward`, each case with its twin."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from twins import Base, case, note


@case("y", "a", "b")
class WithItems(Base):
    def forward(self, x):
        with (
            contextlib.nullcontext(self.lin(x)) as y,
            contextlib.nullcontext((y * 2, y * 3)) as (a, b),
        ):
            return a + b

    def twin(self, x):
        y = note("y", self.lin(x))
        first, second = y * 2, y * 3
        return note("a", first) + note("b", second)


@case("y")
class WithNoGrad(Base):
    def forward(self, x):
        with torch.no_grad():
            y = self.lin(x)
        y = y * x
        return y

    def twin(self, x):
        with torch.no_grad():
            y = note("y", self.lin(x))
        return note("y", y * x)


@case("y", "z", "message")
class TryAndFinally(Base):
    def forward(self, x):
        message = ""
        try:
            y = self.lin(x)
            raise ValueError("on purpose")
        except ValueError as error:
            y = self.lin(x) * 3
            message = str(error)
        finally:
            z = y + 1
        return z + len(message)

    def twin(self, x):
        note("message", "")
        note("y", self.lin(x))
        y = note("y", self.lin(x) * 3)
        message = note("message", "on purpose")
        return note("z", y + 1) + len(message)


@case("y")
class TryAndElse(Base):
    def forward(self, x):
        try:
            y = self.lin(x)
        except ValueError:
            y = x
        else:
            y = y * 2
        return y

    def twin(self, x):
        y = note("y", self.lin(x))
        return note("y", y * 2)


@case("y", "width", "size")
class Match(Base):
    def forward(self, x):
        match {"size": tuple(x.shape), "kind": "rows"}:
            case {"size": (_, width) as size}:
                y = self.lin(x) * width
            case _:
                y = x
        return y + size[0]

    def twin(self, x):
        width = note("width", 4)
        size = note("size", (3, 4))
        return note("y", self.lin(x) * width) + size[0]


@case("head", "rest")
class MatchForms(Base):
    def forward(self, x):
        match [self.lin(x), 2, 3]:
            case [head, *tail] if len(tail) == 3:
                return head
            case [head, int(), 3] as rest:
                return head * rest[1]

    def twin(self, x):
        h = self.lin(x)
        note("head", h)  # bound by the first case, whose guard then says no
        return note("head", h) * note("rest", [h, 2, 3])[1]


@case("self.cache", "y")
class Attribute(Base):
    def forward(self, x):
        self.cache = self.lin(x)
        y = torch.zeros_like(x)
        y[0] = self.cache[0]
        return y

    def twin(self, x):
        self.cache = note("self.cache", self.lin(x))
        y = note("y", torch.zeros_like(x))
        y[0] = self.cache[0]
        return y


@case("self.total", "y")
class AttributeForms(Base):
    def forward(self, x):
        y = self.total = self.lin(x)
        self.total = self.total * 1
        self.total += y
        (self.total, other) = self.total * 2, y
        return self.total + other

    def twin(self, x):
        y = self.lin(x)
        y, self.total = note("y", y), note("self.total", y)
        self.total = note("self.total", self.total * 1)
        self.total += y
        self.total = note("self.total", self.total)
        other = y
        self.total = note("self.total", self.total * 2)
        return self.total + other


@case("y", "n", "args", "scale", "more")
class Arguments(Base):
    def forward(self, x, /, n=3, *args, scale=2.0, **more):
        "Give y."
        y = self.lin(x) * scale + n + len(args) + len(more)
        return y

    def twin(self, x):
        n, args = note("n", 3), note("args", ())
        scale, more = note("scale", 2.0), note("more", {})
        return note("y", self.lin(x) * scale + n + len(args) + len(more))


@case("x")
class ArgumentAssignedAgain(Base):
    def forward(self, x):
        x = self.lin(x)
        x = x.tanh() + x
        return x

    def twin(self, x):
        x = note("x", x)
        x = note("x", self.lin(x))
        return note("x", x.tanh() + x)


@case("y")
class OddText(Base):
    def forward(self, x: Tensor, n: int = 3) -> Tensor:
        """Begin here,
        and go on at column zero.
        """
        y: Tensor = self.lin(x) * n
        text = """also
at column zero"""  # fmt: skip
        assert len(text) > 3, text
        return y

    def twin(self, x):
        return note("y", self.lin(x) * 3)


@case("y")
class OneLine(Base):
    # fmt: off
    def forward(self, x): y = self.lin(x); y = y + 1; return y  # noqa: E702
    # fmt: on

    def twin(self, x):
        y = note("y", self.lin(x))
        return note("y", y + 1)


@case("α", "größe")  # noqa: RUF001 (as people write it)
class NamesBeyondAscii(Base):
    def forward(self, x):
        α = self.lin(x)
        größe = α * 2
        return größe + α

    def twin(self, x):
        alpha = note("α", self.lin(x))  # noqa: RUF001 (as people write it)
        return note("größe", alpha * 2) + alpha


@case("__t", "y")
class Mangled(Base):
    def __init__(self) -> None:
        super().__init__()
        self.__scale = 3.0

    def forward(self, x):
        __t = self.lin(x) * self.__scale
        y = __t + 1
        return y

    def twin(self, x):
        t = note("__t", self.lin(x) * self.__scale)
        return note("y", t + 1)


@case("y", "z")
class Deleted(Base):
    def forward(self, x):
        y = self.lin(x)
        z = y * 2
        del y
        y = z + 1
        return y

    def twin(self, x):
        y = note("y", self.lin(x))
        z = note("z", y * 2)
        return note("y", z + 1)


@case("y")
class InPlace(Base):
    def forward(self, x):
        y = self.lin(x)
        y.mul_(2)
        y = y + 0
        return y

    def twin(self, x):
        y = note("y", self.lin(x))
        y.mul_(2)
        return note("y", y + 0)


@case("y", "names")
class LocalNames(Base):
    def forward(self, x):
        y = self.lin(x)
        names = sorted(locals())
        return y * len(names)

    def twin(self, x):
        y = note("y", self.lin(x))
        names = note("names", ["self", "x", "y"])
        return y * len(names)


@case("found", "y")
class Containers(Base):
    def forward(self, x):
        found: dict[str, Any] = {"a": self.lin(x)}
        y = found["a"] * 2
        found["a"] = y
        return {"y": y, "b": (found["a"], [x * 2])}

    def twin(self, x):
        found = note("found", {"a": self.lin(x)})
        y = note("y", found["a"] * 2)
        return {"y": y, "b": (y, [x * 2])}


@case("y")
class ConditionalExpressions(Base):
    def forward(self, x):
        y = self.lin(x) if x.dim() == 2 else x
        y = y if x.dim() == 3 else y * 2
        return y

    def twin(self, x):
        return note("y", note("y", self.lin(x)) * 2)
