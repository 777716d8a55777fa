"""Functions that a `forward` defines or calls, and the variables in them; with twins."""

from __future__ import annotations

from collections.abc import Callable

import imported_functions
from imported_functions import Tools, far_scale, far_scale_twin
from torch import Tensor
from twins import Base, case, note


@case("y", "inner.z", "inner.a", "inner.return", "k")
class Nested(Base):
    def forward(self, x):
        k = 3

        def inner(a):
            z = self.lin(a) * k
            return z

        y = inner(x) + inner(x * 2)
        return y

    def twin(self, x):
        k = note("k", 3)

        def inner(a):
            a = note("inner.a", a)
            z = note("inner.z", self.lin(a) * k)
            return note("inner.return", z)

        return note("y", inner(x) + inner(x * 2))


@case("outer.inner.z", "outer.y", "bonus")
class NestedTwoDeep(Base):
    def forward(self, x):
        def outer(a):
            bonus_inside = a * 0.5

            def inner(b):
                z = self.lin(b) + bonus
                return z * bonus_inside

            y = inner(a)
            return y

        bonus = 2
        return outer(x)

    def twin(self, x):
        bonus = note("bonus", 2)
        z = note("outer.inner.z", self.lin(x) + bonus)
        return note("outer.y", z * (x * 0.5))


@case("y", "bump.y")
class Nonlocal(Base):
    def forward(self, x):
        y = self.lin(x)

        def bump():
            nonlocal y
            y = y * 2

        bump()
        bump()
        return y

    def twin(self, x):
        y = note("y", self.lin(x))
        y = note("bump.y", y * 2)
        return note("bump.y", y * 2)


@case("g.y", "s")
class NestedGenerator(Base):
    def forward(self, x):
        def g():
            for i in range(2):
                y = self.lin(x) * (i + 1)
                yield y

        s = sum(g())
        return s

    def twin(self, x):
        s = 0
        for i in range(2):
            s = s + note("g.y", self.lin(x) * (i + 1))
        return note("s", s)


@case("total.got", "out")
class GeneratorWithSend(Base):
    def forward(self, x):
        def total():
            held = 0
            while True:
                got = yield held
                held = held + got

        adding = total()
        next(adding)
        adding.send(self.lin(x))
        out = adding.send(x * 2)
        return out

    def twin(self, x):
        held = 0 + note("total.got", self.lin(x))
        held = held + note("total.got", x * 2)
        return note("out", held)


@case("y", "lambda.w")
class Lambda(Base):
    def forward(self, x):
        twice = lambda a: (w := a * 2) + w  # noqa: E731
        y = twice(self.lin(x))
        return y

    def twin(self, x):
        w = note("lambda.w", self.lin(x) * 2)
        return note("y", w + w)


@case("y", "make.y")
class ClassInside(Base):
    def forward(self, x):
        class Scaler:
            y = 2.0

            def apply(self, a):
                y = a * self.y
                return y

        def make(a):
            y = Scaler().apply(a)
            return y

        y = make(self.lin(x))
        return y

    def twin(self, x):
        y = note("make.y", self.lin(x) * 2.0)
        return note("y", y)


@case("h", "f.y")
class LateClosures(Base):
    def forward(self, x):
        h = self.lin(x)
        changes: list[Callable[[Tensor], Tensor]] = []
        for factor in (1.0, 2.0):

            def f(a, factor=factor):
                y = a * factor
                return y

            changes.append(f)
        for change in changes:
            h = change(h)
        return h

    def twin(self, x):
        h = note("h", self.lin(x))
        for factor in (1.0, 2.0):
            h = note("h", note("f.y", h * factor))
        return h


def scale_three(a):
    w = a * 3
    return w


def scale_three_twin(a):
    return note("scale_three.return", note("scale_three.w", a * 3))


@case("y", "scale_three.w", "scale_three.return")
class Helper(Base):
    def forward(self, x):
        y = scale_three(self.lin(x))
        return y

    def twin(self, x):
        return note("y", scale_three_twin(self.lin(x)))


@case("scale_three.w")
class HelperCalledTwice(Base):
    def forward(self, x):
        return scale_three(self.lin(x)) + scale_three(x)

    def twin(self, x):
        return scale_three_twin(self.lin(x)) + scale_three_twin(x)


@case("y", "far_scale.w")
class ImportedHelper(Base):
    def forward(self, x):
        y = far_scale(self.lin(x))
        return y

    def twin(self, x):
        return note("y", far_scale_twin(self.lin(x)))


@case("far_scale.w", "far_scale.return")
class HelperOfAnImportedModule(Base):
    def forward(self, x):
        return imported_functions.far_scale(self.lin(x))

    def twin(self, x):
        return far_scale_twin(self.lin(x))


def scale_and_shift(a):
    scaled = far_scale(a)
    shifted = scaled + 1
    return shifted


@case("scale_and_shift.shifted", "scale_and_shift.far_scale.w")
class HelperOfAHelper(Base):
    def forward(self, x):
        return scale_and_shift(self.lin(x))

    def twin(self, x):
        scaled = far_scale_twin(self.lin(x), "scale_and_shift.far_scale")
        return note("scale_and_shift.shifted", scaled + 1)


def halve_again(a, n):
    w = a * 0.5
    return w if n == 0 else halve_again(w, n - 1) + 1


def halve_again_twin(a, n):
    a, n = note("halve_again.a", a), note("halve_again.n", n)
    w = note("halve_again.w", a * 0.5)
    return w if n == 0 else halve_again_twin(w, n - 1) + 1


@case("y", "halve_again.w", "halve_again.a")
class RecursiveHelper(Base):
    def forward(self, x):
        y = halve_again(self.lin(x), 2)
        return y

    def twin(self, x):
        return note("y", halve_again_twin(self.lin(x), 2))


@case("_mix.w", "_mix.a", "y")
class MethodHelper(Base):
    def _mix(self, a, b=2.0):
        w = self.lin(a) * b
        return w

    def forward(self, x):
        y = self._mix(x) + self._mix(x * 2, b=3.0)
        return y

    def twin(self, x):
        a = note("_mix.a", x)
        first = note("_mix.w", self.lin(a) * 2.0)
        a = note("_mix.a", x * 2)
        return note("y", first + note("_mix.w", self.lin(a) * 3.0))


@case("_outer.y", "_outer._inner.z")
class MethodOfAMethod(Base):
    def _inner(self, a):
        z = a * 2
        return z

    def _outer(self, a):
        y = self._inner(self.lin(a)) + 1
        return y

    def forward(self, x):
        return self._outer(x)

    def twin(self, x):
        z = note("_outer._inner.z", self.lin(x) * 2)
        return note("_outer.y", z + 1)


@case("_shift.moved", "_stretch.longer", "shift.moved", "stretch.longer")
class StaticAndClassMethods(Base):
    factor = 1.5

    @staticmethod
    def _shift(a):
        moved = a + 1
        return moved

    @classmethod
    def _stretch(cls, a):
        longer = a * cls.factor
        return longer

    def forward(self, x):
        h = self._stretch(self._shift(self.lin(x)))
        return Tools.stretch(Tools.shift(h, by=2.0))

    def twin(self, x):
        moved = note("_shift.moved", self.lin(x) + 1)
        h = note("_stretch.longer", moved * 1.5)
        return note("stretch.longer", note("shift.moved", h + 2.0) * 2.0)
