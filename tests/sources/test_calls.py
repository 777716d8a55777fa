"""Taps at calls: functions of which variables are wanted, recursion, and `locals()`."""

from __future__ import annotations

import math

import pytest
from recording_taps import RecordingTaps, add_hundred


def helper(a):
    w = a * 3
    return w


def outer_helper(a):
    return helper(a) + 1


def recursive(a, n):
    w = a * 2
    return w if n == 0 else recursive(w, n - 1)


def even(n):
    kept = n
    return True if n == 0 else odd(kept - 1)


def odd(n):
    return False if n == 0 else even(n - 1)


def choose(name):
    return {"helper": helper}[name]


class Base:
    def forward(self, x):
        h = x + 1
        return h


class Model(Base):
    def forward(self, x):
        y = super().forward(x)
        return y

    def _attend(self, x):
        scores = x * 2
        return scores

    def attend(self, x):
        y = self._attend(x) + self._attend(x)
        return y


def call_helper(x):
    y = helper(x)
    return y


def call_twice(x):
    return helper(x) + helper(a=x)


def call_two_deep(x):
    return outer_helper(x)


def call_through_variable(x):
    attention = helper
    if x > 100:
        attention = choose("helper")
    return attention(x)


def call_argument(x, function):
    return function(x)


def call_inside(x):
    def inner(a):
        return helper(a)

    return inner(x)


def call_recursive(x):
    return recursive(x, 2)


@pytest.mark.parametrize(
    ("function", "arguments", "name", "seen"),
    [
        (call_helper, (2,), "helper.w", [("helper.w", 6)]),
        (call_helper, (2,), "helper.return", [("helper.return", 6)]),
        (call_helper, (2,), "helper.a", [("helper.a", 2)]),
        (call_twice, (2,), "helper.w", [("helper.w", 6), ("helper.w", 6)]),
        (call_two_deep, (2,), "outer_helper.helper.w", [("outer_helper.helper.w", 6)]),
        (call_through_variable, (2,), "attention.w", [("attention.w", 6)]),
        (call_through_variable, (2,), "helper.w", [("attention.w", 6)]),
        (call_argument, (2, helper), "helper.w", [("function.w", 6)]),
        (call_inside, (2,), "inner.helper.w", [("inner.helper.w", 6)]),
        (call_recursive, (1,), "recursive.w", [("recursive.w", each) for each in (2, 4, 8)]),
        (Model.forward, (Model(), 2), "forward.h", [("forward.h", 3)]),
        (Model.attend, (Model(), 2), "_attend.scores", [("_attend.scores", 4)] * 2),
    ],
)
def test_variable_of_a_called_function_is_tapped(function, arguments, name, seen):
    taps = RecordingTaps(function, {name})

    assert taps(*arguments) == function(*arguments)
    assert taps.seen == seen
    assert taps.table == ()
    assert RecordingTaps(function, {name}, add_hundred)(*arguments) != function(*arguments)


def test_calls_of_other_functions_are_left_alone():
    taps = RecordingTaps(call_helper, {"y"})
    names = taps.function.__code__.co_names

    assert "call" not in names
    assert "again" not in names


def test_call_through_a_variable_is_left_alone_where_the_name_is_called():
    def function(x):
        chosen = math.floor
        return chosen(helper(x))

    taps = RecordingTaps(function, {"helper.w"})
    called = []
    taps.call = lambda scope, name, callee: called.append(name) or callee
    assert taps(2) == 6
    assert called == ["helper"]


def test_function_calls_its_copy_again():
    taps = RecordingTaps(recursive, {"w"})

    assert taps(1, 2) == 8
    assert taps.values("w") == [2, 4, 8]
    assert taps.opened == ["enter"] * 3


def test_function_called_by_another_is_the_original_again():
    taps = RecordingTaps(even, {"kept"})

    assert taps(4) is True
    assert taps.values("kept") == [4]


def test_method_called_on_self_is_not_tapped_again():
    """The object decides which method that is; what holds the taps decides what it means."""

    class Recursive:
        def forward(self, x, n=1):
            y = x * 2
            return self.forward(y, n - 1) if n else y

    taps = RecordingTaps(Recursive.forward, {"y"})
    assert (taps(Recursive(), 1), taps.values("y")) == (4, [2])


def test_locals_do_not_show_the_taps():
    def function(x):
        y = x
        first = sorted(locals()), sorted(vars()), dir()

        def inner():
            return sorted(locals()), y

        return first, inner()

    taps = RecordingTaps(function, {"y", "inner.return"})
    assert taps(1) == function(1)


def test_vars_of_something_is_left_alone():
    def function(x):
        y = x
        return vars(y), dir(y)

    taps = RecordingTaps(function, {"y"})
    assert "clean" not in taps.function.__code__.co_names
    assert taps(math) == function(math)


def test_own_function_named_locals_is_left_alone():
    def function(x):
        def locals():
            return 5

        y = locals()
        return y

    assert RecordingTaps(function, {"y"})(1) == 5
