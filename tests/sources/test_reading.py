"""Which points and calls a function has, which of them are certain, and what is called."""

# ruff: noqa: F841, SIM108 (the functions are there to be read)
from __future__ import annotations

import concurrent.futures
import functools
import math
from collections import Counter

import pytest
from recording_taps import RecordingTaps

from hookline.sources import Callee, Point, read


def helper(a):
    w = a * 3
    return w


class Tools:
    @staticmethod
    def static(a):
        return a

    @classmethod
    def of_class(cls, a):
        return a

    def method(self, a):
        return a

    @property
    def shown(self):
        raise AssertionError("nothing is run")


def certain(function):
    """List the names of the points that run exactly once, in order."""
    return [point.name for point in read(function).points if point.is_certain]


def callees(function):
    return {callee.expression: callee.function for callee in read(function).callees}


def test_points_come_in_source_order_with_their_lines():
    def function(x, *rest, flag=1, **more):
        a = x
        for b in rest:
            c = b
        return a, c

    first = function.__code__.co_firstlineno
    assert read(function).points == (
        Point("x", first, "argument", True),
        Point("rest", first, "argument", True),
        Point("flag", first, "argument", True),
        Point("more", first, "argument", True),
        Point("a", first + 1, "assignment", True),
        Point("b", first + 2, "loop", False),
        Point("c", first + 3, "assignment", False),
        Point("return", first + 4, "return", True),
    )


def test_reading_holds_the_definition_and_its_lines():
    @functools.wraps(helper)
    def function(x):
        return max(
            x,
            x,
        )  # the end

    reading = read(function)
    assert reading.file == __file__
    assert reading.lines[0].strip() == "@functools.wraps(helper)"
    assert reading.lines[-1].strip() == ")  # the end"
    assert reading.first_line == function.__code__.co_firstlineno
    assert reading.last_line == reading.first_line + len(reading.lines) - 1
    assert (reading.node.name, reading.node.lineno) == ("function", reading.first_line + 1)


def test_first_argument_of_a_method_is_no_point():
    assert list(read(Tools.method).names) == ["a", "return"]
    assert list(read(Tools.of_class).names) == ["a", "return"]
    assert list(read(Tools.static).names) == ["a", "return"]


def test_points_are_grouped_by_name():
    def function(x):
        y = x
        y += 1
        return y

    assert [len(points) for points in read(function).names.values()] == [1, 2, 1]


def test_what_binds_no_value_is_no_point():
    def function(x):
        import json

        def inner():
            pass

        class Local:
            z = 1

        try:
            x[0] = json.dumps(x)
            x.a.b = 1
        except ValueError as error:
            del error

    assert set(read(function).names) == {"x"}


def test_variables_of_some_comprehensions_are_no_points():
    async def function(rows):
        first = [a for a, *b in rows]
        second = [c async for c in rows]
        return first + second

    assert set(read(function).names) == {"rows", "first", "second", "return"}


def test_unreachable_code_has_no_points():
    def function(x):
        while True:
            if x:
                break
                a = 1
            continue
            b = 1
        if 0:
            c = 1
        return x
        d = 1

    assert set(read(function).names) == {"x", "return"}


def test_points_in_branches_and_loops_are_not_certain():
    def function(x):
        a = x
        if x:
            b = x
        else:
            b = 1
        while x:
            c = 1
        for d in x:
            e = d
        f = [g for g in x if (h := g)]
        i = (x and (j := x)) or (k := x)
        n = (p := 1) if x else (q := 2)
        r = 1 < (s := x) < (t := x)
        match x:
            case u:
                v = u
        return lambda: (w := x)

    assert certain(function) == ["x", "a", "f", "i", "n", "s", "r", "return"]


def test_points_of_try_are_certain_in_finally_only():
    def function(x):
        try:
            a = x
        except ValueError:
            b = x
        else:
            c = x
        finally:
            d = x
        e = x
        return e

    assert certain(function) == ["x", "d", "e", "return"]


def test_points_after_an_early_end_are_not_certain():
    def returns(x):
        a = x
        if x:
            return a
        b = x
        return b

    def raises(x):
        a = x
        for y in x:
            if not y:
                raise ValueError
        b = x
        return b

    def returns_in_try(x):
        try:
            return x
        except ValueError:
            pass
        finally:
            a = 1
        b = 1
        return a + b

    def only_inside(x):
        def inner():
            if x:
                return 1
            return 2

        a = inner()
        return a

    def breaks(x):
        for y in x:
            if y:
                break
        a = x
        return a

    assert certain(returns) == ["x", "a"]
    assert certain(raises) == ["x", "a"]
    assert certain(returns_in_try) == ["x", "a"]
    assert certain(only_inside) == ["x", "a", "return"]
    assert certain(breaks) == ["x", "a", "return"]


def test_points_in_with_are_certain():
    def function(x):
        with x as a, x as b:
            c = a
        return b, c

    assert certain(function) == ["x", "a", "b", "c", "return"]


def test_certain_points_are_seen_once_per_execution():
    def function(x):
        if x > 2:
            return 0
        y = x
        return y

    names = set(read(function).names)
    for argument in (1, 5):
        taps = RecordingTaps(function, names)
        taps(argument)
        seen = Counter(name for name, _ in taps.seen)
        assert all(seen[name] == 1 for name in certain(function))


def test_callees_are_found_without_running_anything():
    def function(self, x):
        helper(x)
        math.sqrt(x)
        concurrent.futures.wait(x)
        Tools.static(x)
        Tools.of_class(x)
        Tools.method(x)
        Tools.shown(x)
        self.own(x)
        x.shape()
        super().forward(x)
        len(x)
        unknown(x)  # noqa: F821
        x[0](x)
        x[0].last(x)

    found = callees(function)
    assert found["helper"] is helper
    assert found["math.sqrt"] is math.sqrt
    assert found["concurrent.futures.wait"] is concurrent.futures.wait
    assert found["Tools.static"] is Tools.static
    assert found["Tools.of_class"] == Tools.of_class
    assert found["Tools.method"] is Tools.method
    assert found["len"] is len
    unknown_ones = {"Tools.shown", "self.own", "x.shape", "super().forward", "unknown", "x[0].last"}
    assert {expression for expression, called in found.items() if called is None} == unknown_ones


def test_callees_are_named_by_the_last_name_and_the_function_they_stand_in():
    def function(x):
        def inner(a):
            return math.floor(helper(a))

        return inner(x)

    first = function.__code__.co_firstlineno
    assert read(function).callees == (
        Callee("inner.floor", first + 2, "math.floor", math.floor),
        Callee("inner.helper", first + 2, "helper", helper),
    )


def test_callee_in_a_variable_is_known_at_run_time_only():
    def function(x):
        chosen = helper
        return chosen(x)

    assert callees(function) == {"chosen": None}


def test_callee_in_a_closure_is_that_of_each_function():
    def make(called):
        def function(x):
            y = called(x)
            return y

        return function

    assert callees(make(helper)) == {"called": helper}
    assert callees(make(len)) == {"called": len}


def test_callee_in_an_empty_cell_is_unknown():
    def function(x):
        return later(x)

    assert callees(function) == {"later": None}
    later = helper
    assert callees(function) == {"later": later}


def test_module_attributes_are_not_made_up(monkeypatch):
    def make_up(name):
        raise AssertionError("nothing is run")

    monkeypatch.setattr(math, "__getattr__", make_up, raising=False)

    def function(x):
        return math.not_there(x)

    assert callees(function) == {"math.not_there": None}


def test_reading_is_not_to_be_changed():
    with pytest.raises(AttributeError):
        read(helper).points = ()  # type: ignore[misc]
