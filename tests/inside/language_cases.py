"""Ways to assign a variable inside a `forward`: targets, loops, comprehensions; with twins."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import Base, case, note


@case("x", "y", "return")
class Plain(Base):
    def forward(self, x):
        y = self.lin(x)
        return y.tanh()

    def twin(self, x):
        x = note("x", x)
        y = note("y", self.lin(x))
        return note("return", y.tanh())


@case("return")
class ReturnOnly(Base):
    def forward(self, x):
        return self.lin(x) * 2

    def twin(self, x):
        return note("return", self.lin(x) * 2)


@case("return")
class SeveralReturns(Base):
    def forward(self, x):
        if x.dim() == 3:
            return x
        h = self.lin(x)
        if h.dim() == 2:
            return h.sin()
        return h

    def twin(self, x):
        return note("return", self.lin(x).sin())


@case("a", "b", "rest")
class NestedTargets(Base):
    def forward(self, x):
        h = self.lin(x)
        (a, b), *rest = (h + 1, h * 2), h * 3, h * 4
        return a * b + rest[0] + rest[1]

    def twin(self, x):
        h = self.lin(x)
        first, second, third, fourth = h + 1, h * 2, h * 3, h * 4
        a, b = note("a", first), note("b", second)
        rest = note("rest", [third, fourth])
        return a * b + rest[0] + rest[1]


@case("q", "k", "v", "scores", "probs")
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(4)
        probs = F.softmax(scores, dim=-1)
        return probs @ v

    def twin(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = note("q", parts[0]), note("k", parts[1]), note("v", parts[2])
        scores = note("scores", q @ k.transpose(-2, -1) / math.sqrt(4))
        probs = note("probs", F.softmax(scores, dim=-1))
        return probs @ v


@case("first", "last", "middle")
class StarInTheMiddle(Base):
    def forward(self, x):
        [first, *middle, last] = self.lin(x).unbind(-1)
        return first * last + middle[0]

    def twin(self, x):
        parts = self.lin(x).unbind(-1)
        first = note("first", parts[0])
        middle = note("middle", list(parts[1:-1]))
        last = note("last", parts[-1])
        return first * last + middle[0]


@case("a", "y")
class Chained(Base):
    def forward(self, x):
        a = y = self.lin(x)
        y = y * a
        return y

    def twin(self, x):
        a = self.lin(x)
        y = a
        a, y = note("a", a), note("y", y)
        return note("y", y * a)


@case("a", "b")
class Swapped(Base):
    def forward(self, x):
        a, b = self.lin(x), x.exp()
        a, b = b, a
        return a - b * 3

    def twin(self, x):
        a, b = note("a", self.lin(x)), note("b", x.exp())
        a, b = note("a", b), note("b", a)
        return a - b * 3


@case("y")
class Augmented(Base):
    def forward(self, x):
        y = self.lin(x)
        y = y * 1
        y += 1
        y *= 2
        return y

    def twin(self, x):
        y = note("y", self.lin(x))
        y = note("y", y * 1)
        y += 1
        y = note("y", y)
        y *= 2
        return note("y", y)


@case("total", "count")
class AugmentedNumber(Base):
    def forward(self, x):
        total = 0
        count = 1
        for part in self.lin(x).unbind(0):
            total = total + part * count
            count += 1
        return total

    def twin(self, x):
        total = note("total", 0)
        count = note("count", 1)
        for part in self.lin(x).unbind(0):
            total = note("total", total + part * count)
            count = note("count", count + 1)
        return total


@case("y", "scale")
class Annotated(Base):
    def forward(self, x):
        y: Tensor = self.lin(x)
        z: Tensor
        scale: float = 0.5
        z = y * scale
        return z

    def twin(self, x):
        y = note("y", self.lin(x))
        scale = note("scale", 0.5)
        return y * scale


@case("h", "step")
class Loop(Base):
    def forward(self, x):
        h = x * 1
        for step in range(3):
            h = self.lin(h) + step
        return h

    def twin(self, x):
        h = note("h", x * 1)
        for step in range(3):
            step = note("step", step)
            h = note("h", self.lin(h) + step)
        return h


@case("number", "row", "inner")
class LoopTargets(Base):
    def forward(self, x):
        out = []
        for number, (row, *inner) in enumerate(self.lin(x).unbind(0)):
            out.append(row * number + inner[0])
        else:
            inner = out[-1] * 2
        return torch.stack(out) + inner

    def twin(self, x):
        out = []
        for number, parts in enumerate(self.lin(x).unbind(0)):
            row, *inner = parts
            number = note("number", number)
            row, inner = note("row", row), note("inner", inner)
            out.append(row * number + inner[0])
        inner = note("inner", out[-1] * 2)
        return torch.stack(out) + inner


@case("h", "n")
class While(Base):
    def forward(self, x):
        h = x
        n = 0
        while (n := n + 1) < 4:
            if n == 2:
                continue
            h = self.lin(h).tanh()
        else:
            h = h * 2
        return h

    def twin(self, x):
        h = note("h", x)
        n = note("n", 0)
        while (n := note("n", n + 1)) < 4:
            if n == 2:
                continue
            h = note("h", self.lin(h).tanh())
        return note("h", h * 2)


@case("h")
class BreakInALoop(Base):
    def forward(self, x):
        h = self.lin(x)
        for part in h.unbind(0):
            h = h + part
            if h.numel():
                break
        return h

    def twin(self, x):
        h = note("h", self.lin(x))
        return note("h", h + h.unbind(0)[0])


@case("parts", "p", "z")
class Comprehension(Base):
    def forward(self, x):
        parts = [self.lin(p) for p in x.split(1)]
        z = torch.cat(parts)
        return z

    def twin(self, x):
        found = []
        for p in x.split(1):
            p = note("p", p)
            found.append(self.lin(p))
        parts = note("parts", found)
        return note("z", torch.cat(parts))


@case("row", "number", "value")
class NestedComprehensions(Base):
    def forward(self, x):
        rows = {number: row for number, row in enumerate(self.lin(x).unbind(0)) if number}
        values = [value * 2 for row in rows.values() for value in row.unbind(0)]
        return torch.stack(values)

    def twin(self, x):
        rows = {}
        for number, row in enumerate(self.lin(x).unbind(0)):
            number, row = note("number", number), note("row", row)
            if number:
                rows[number] = row
        values = []
        for row in rows.values():
            row = note("row", row)
            for value in row.unbind(0):
                value = note("value", value)
                values.append(value * 2)
        return torch.stack(values)


@case("part", "total")
class GeneratorExpression(Base):
    def forward(self, x):
        total = sum(part * 2 for part in self.lin(x).unbind(0))
        return total

    def twin(self, x):
        total = 0
        for part in self.lin(x).unbind(0):
            part = note("part", part)
            total = total + part * 2
        return note("total", total)


@case("y")
class Walrus(Base):
    def forward(self, x):
        if (y := self.lin(x)).sum() > -1e9:
            return y + 1
        return y

    def twin(self, x):
        y = note("y", self.lin(x))
        return y + 1


@case("last")
class WalrusInAComprehension(Base):
    def forward(self, x):
        parts = [(last := self.lin(p)) * 2 for p in x.split(1)]
        return torch.cat(parts) * last

    def twin(self, x):
        parts = []
        for p in x.split(1):
            last = note("last", self.lin(p))
            parts.append(last * 2)
        return torch.cat(parts) * last


@case("y", "text")
class WalrusInAnArgument(Base):
    def forward(self, x):
        text = f"{(y := self.lin(x)).dim()}"
        return torch.add(y, z := y * 2, alpha=int(text)) + z

    def twin(self, x):
        y = note("y", self.lin(x))
        text = note("text", "2")
        z = y * 2
        return torch.add(y, z, alpha=int(text)) + z
