"""How a `forward` is written down: its signature, its text, a notebook cell; with twins."""

from __future__ import annotations

import linecache
from typing import Any

import torch
from torch import Tensor, nn
from twins import Base, case, note


@case("y")
class OwnCall(Base):
    """One whose `__call__` does more than torch's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def forward(self, x):
        y = self.lin(x)
        return y

    def twin(self, x):
        return note("y", self.lin(x))


@case("y")
class WithAProperty(Base):
    @property
    def scale(self) -> float:
        return 2.5

    def forward(self, x):
        y = self.lin(x) * self.scale
        return y

    def twin(self, x):
        return note("y", self.lin(x) * self.scale)


@case("x", "y")
class TypedForward(Base):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.lin(x)
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return y

    def twin(self, x):
        return note("y", self.lin(note("x", x)))


@case("y")
class OtherSelf(Base):
    def forward(this, x):  # noqa: N805
        y = this.lin(x)
        return y

    def twin(self, x):
        return note("y", self.lin(x))


@case("y", "args", "kwargs")
class AnyArguments(Base):
    def forward(self, *args, **kwargs):
        y = self.lin(args[0]) + len(kwargs)
        return y

    def twin(self, x):
        args, kwargs = note("args", (x,)), note("kwargs", {})
        return note("y", self.lin(args[0]) + len(kwargs))


def define(name: str, text: str) -> type[nn.Module]:
    """Define a class as a notebook cell does: the source is in linecache only."""
    file = f"<cell {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    found: dict[str, Any] = {"Base": Base, "note": note, "torch": torch}
    exec(compile(text, file, "exec"), found)
    kind: type[nn.Module] = found[name]
    return kind


case("y")(
    define(
        "Cell",
        """class Cell(Base):
    def forward(self, x):
        y = self.lin(x) * 2
        return y

    def twin(self, x):
        return note("y", self.lin(x) * 2)
""",
    )
)

case("y")(
    define(
        "Tabs",
        """class Tabs(Base):
\tdef forward(self, x):
\t\ty = self.lin(x); y = (y *
  2)
\t\treturn y

\tdef twin(self, x):
\t\ty = note("y", self.lin(x))
\t\treturn note("y", y * 2)
""",
    )
)
