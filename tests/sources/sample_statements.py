"""One small function for each statement and expression that binds a name.

Not a test file, so that pytest leaves the asserts in it alone.
"""

from __future__ import annotations

import contextlib

from sample_cases import Box, case


@case(3, values=[6], edited=107)
def plain(x):
    y = x * 2
    return y + 1


@case(3, values=[6], edited=106)
def annotated(x):
    y: int = x * 2
    return y


@case(3, values=[], edited=3, name="y")
def annotated_without_value(x):
    y: int  # noqa: F842
    return x


@case(3, values=[6], edited=112)
def chained(x):
    a = y = x * 2
    return a + y


@case(3, values=[6], edited=112, name="a")
def chained_first(x):
    a = y = x * 2
    return a + y


@case(3, values=[3, 4], edited=205)
def augmented(x):
    y = x
    y += 1
    return y + 1


@case(3, values=[4], edited=[3, 104])
def tuple_target(x):
    a, y = x, x + 1
    return [a, y]


@case(3, values=[2], edited=107, name="b")
def nested_tuple_target(x):
    (a, [b, c]), d = (1, (2, x)), 1
    return a + b + c + d


@case(3, values=[[2, 3]], edited=[1, [2, 3], 4], name="rest")
def star_target(x):
    first, *rest, last = 1, 2, x, 4
    return [first, rest, last]


@case(3, values=[3, 1], edited=[101, 103], name="a")
def swapped(x):
    a = x
    a, b = 1, a
    return [a, b]


@case(3, values=[0, 1, 2], edited=[100, 101, 102], kind="loop")
def loop(x):
    kept = []
    for y in range(x):
        kept.append(y)  # noqa: PERF402 (the loop is the case)
    return kept


@case({"a": 1, "b": 2}, values=[1, 2], edited=["a101", "b102"], kind="loop")
def loop_over_pairs(pairs):
    kept = []
    for key, y in pairs.items():
        kept.append(f"{key}{y}")
    return kept


@case([(1, 2, 3)], values=[[2, 3]], edited=[1, 2, 3], name="rest", kind="loop")
def loop_with_star(rows):
    for first, *rest in rows:
        kept = [first, *rest]
    return kept


@case(Box(), values=[0, 1], edited=101, name="box.value", kind="attribute")
def loop_over_attribute(box):
    for box.value in range(2):
        pass
    return box.value


@case(2, values=[0, 1], edited=[100, 101, "else"])
def loop_with_else(x):
    kept = []
    for i in range(x):
        y = i
        kept.append(y)
    else:
        kept.append("else")
    return kept


@case(2, values=[1, 0, 5], edited=105)
def while_with_else(x):
    while x:
        y = x - 1
        x = y if y < 100 else 0
    else:
        y = 5
    return y


@case(2, values=[2, 1, 0], edited=[102], kind="walrus")
def walrus_in_while(x):
    kept = []
    while y := x:
        kept.append(y)
        x = x - 1 if y < 100 else 0
        if y > 100:
            break
    return kept


@case(2, values=[3], edited=103, kind="walrus")
def walrus_in_condition(x):
    if (y := x + 1) > 2:
        return y
    return None


@case(2, values=[3], edited=206, kind="walrus")
def walrus_as_argument(x):
    return max((y := x + 1), 0) + y


@case(2, values=[3], edited="103 103", kind="walrus")
def walrus_in_f_string(x):
    return f"{(y := x + 1)} {y}"


@case([1, 2], values=[2, 3], edited=[102, 103, 103], kind="walrus")
def walrus_in_comprehension(xs):
    return [*[(y := x + 1) for x in xs], y]


@case(2, values=[3], edited=206, name="lambda.w", kind="walrus")
def walrus_in_lambda(x):
    double = lambda a: (w := a + 1) + w  # noqa: E731
    return double(x)


@case([1, 2], values=[1, 2], edited=[101, 102], kind="comprehension")
def list_comprehension(xs):
    return [y for y in xs]  # noqa: C416


@case(
    [1, 2], values=[1, 1, 2, 2], edited=["1:101", "1:101", "2:102", "2:102"], kind="comprehension"
)
def comprehension_of_two_loops(xs):
    return sorted(f"{x}:{y}" for x in xs for y in [x, x])


@case([(1, (2, 3))], values=[2], edited={1: 105}, kind="comprehension")
def dict_comprehension(rows):
    return {a: y + c for a, (y, c) in rows}


@case([1, 2, 3], values=[1, 2, 3], edited={101, 102, 103}, kind="comprehension")
def set_comprehension(xs):
    return {y for y in xs if y}


@case([[1, 2], [3]], values=[[1, 2], [3]], edited={1, 2, 3}, name="row", kind="comprehension")
def set_comprehension_of_two_loops(rows):
    return {y for row in rows for y in row}


@case([[1, 2], [3]], values=[1, 2, 3], edited=[[101, 102], [103]], kind="comprehension")
def comprehension_in_a_comprehension(rows):
    return [[y for y in row] for row in rows]  # noqa: C416


@case([1, 2], values=[1, 2], edited=203, kind="comprehension")
def generator_expression(xs):
    return sum(y for y in xs)


@case(4, values=[8], edited=109, kind="with")
def with_as(x):
    with contextlib.nullcontext(x * 2) as y:
        return y + 1


@case(4, values=[8], edited=109, kind="with")
def with_several(x):
    with contextlib.nullcontext(x * 2) as y, contextlib.nullcontext(y + 1) as z:
        return z


@case(4, values=[9], edited=109, name="z", kind="with")
def with_several_last(x):
    with contextlib.nullcontext(x * 2) as y, contextlib.nullcontext(y + 1) as z:
        return z


@case(4, values=[8], edited=[108, 9], kind="with")
def with_tuple(x):
    with contextlib.nullcontext((x * 2, 9)) as (y, z):
        return [y, z]


@case(1, values=[2, 5], edited=106)
def try_except_finally(x):
    try:
        y = x * 2
        raise ValueError
    except ValueError:
        y = 5
    finally:
        z = y + 1
    return z


@case(1, values=[1, 2], edited=[102])
def try_except_star(x):
    y = x
    try:
        raise ExceptionGroup("several", [ValueError(), TypeError()])
    except* (ValueError, TypeError) as group:
        y = len(group.exceptions)
    return [y]


@case(1, values=[3], edited=103)
def try_else(x):
    try:
        x += 1
    except ValueError:
        y = 0
    else:
        y = x + 1
    return y


@case(1, values=[2], edited=[102, 3], name="z")
def finally_after_return(x):
    kept = []

    def leave():
        try:
            return kept
        finally:
            kept.append(3)

    z = x + 1
    kept.append(z)
    return leave()


@case((1, 2), values=[2], edited=[1, 102], kind="match")
def match_sequence(point):
    match point:
        case (x, y):
            return [x, y]


@case((1, 2, 3), values=[[2, 3]], edited=[2, 3], name="rest", kind="match")
def match_star(point):
    match point:
        case (_, *rest):
            return rest


@case({"a": 1, "b": 2}, values=[1], edited=[101, {"b": 2}], kind="match")
def match_mapping(mapping):
    match mapping:
        case {"a": y, **rest}:
            return [y, rest]


@case((1, 2), values=[2, 2], edited="seen by the guard", kind="match")
def match_with_guard(point):
    match point:
        case (_, y) if y > 100:
            return "seen by the guard"
        case (_, y) if y:
            return y


@case(Box(7), values=[7], edited=107, kind="match")
def match_class(box):
    match box:
        case Box(value=y) as whole if whole.value > 3:
            return y


@case(7, values=[7], edited=107, kind="match")
def match_alternatives(value):
    match value:
        case (y, 1) | [1, y, 2]:
            return -y
        case 1 | 7 as y:
            return y


@case(3, values=[4], edited=104, kind="walrus")
def with_assert(x):
    assert (y := x + 1), "never"  # noqa: RUF018
    return y
