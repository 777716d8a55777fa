"""One small function for each kind of scope, argument and layout that a name can be bound in."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from sample_cases import Box, case

GLOBAL = 5


@case(3, values=[3], edited=103, name="x", kind="argument")
def argument(x):
    return x


@case(3, values=[3], edited=[103, (4,), 5, {"k": 6}], name="x", kind="argument")
def arguments_of_all_kinds(x, /, *rest, flag=5, **more):
    return [x, rest or (4,), flag, more or {"k": 6}]


@case(3, 4, values=[(4,)], edited=[3, (4,)], name="rest", kind="argument")
def rest_of_arguments(x, *rest):
    return [x, rest]


@case(3, values=[5], edited=[3, 105], name="flag", kind="argument")
def keyword_only_default(x, *, flag=5):
    """Docstring first."""
    return [x, flag]


@case(3, values=[4], edited=104, name="return", kind="return")
def returned(x):
    return x + 1


@case(3, values=[(3, 4)], edited=(3, 4), name="return", kind="return")
def returned_with_star(x):
    rest = [x + 1]
    return x, *rest


@case(Box(), values=[6], edited=106, name="box.value", kind="attribute")
def attribute(box):
    box.value = 6
    return box.value


@case(Box(), values=[6], edited=[6, 106], name="box.value", kind="attribute")
def attribute_in_chain(box):
    a = box.value = 6
    return [a, box.value]


@case(Box(), values=[6], edited=[5, 106], name="box.value", kind="attribute")
def attribute_in_tuple(box):
    a, box.value = 5, 6
    return [a, box.value]


@case(Box(), values=[0, 1], edited=201, name="box.value", kind="attribute")
def attribute_augmented(box):
    box.value = 0
    box.value += 1
    return box.value


@case(3, values=[9, 12], edited=221, name="inner.z")
def nested_function(x):
    k = 3

    def inner(a):
        z = a * k
        return z

    return inner(x) + inner(x + 1)


@case(3, values=[3, 4], edited=621, name="inner.a", kind="argument")
def nested_argument(x):
    def inner(a):
        return a * 3

    return inner(x) + inner(x + 1)


@case(3, values=[4], edited=104, name="outer.inner.z")
def nested_two_deep(x):
    def outer(a):
        def inner(b):
            z = b + 1
            return z

        return inner(a)

    return outer(x)


@case(3, values=[6, 12], edited=312, name="bump.y")
def nonlocal_name(x):
    y = x

    def bump():
        nonlocal y
        y = y * 2

    bump()
    bump()
    return y


@case(3, values=[3], edited=[103, 103], name="GLOBAL")
def global_name(x):
    global GLOBAL
    GLOBAL = x
    return [GLOBAL, globals()["GLOBAL"]]


@case(2, values=[0, 1], edited=[100, 101], name="i", kind="loop")
def closures_over_loop_variable(x):
    made = []
    for i in range(x):
        made.append(lambda i=i: i)  # noqa: PERF401
    return [each() for each in made]


@case(2, values=[0, 1], edited=[100, 101], run=list)
def generator_function(x):
    for i in range(x):
        y = i
        yield y


@case(2, values=[0, 1], edited=201, name="numbers.y")
def generator_inside(x):
    def numbers():
        for i in range(x):
            y = i
            yield y

    return sum(numbers())


def send_seven(generator: Any) -> list[Any]:
    """Run a generator and send it a number."""
    return [next(generator), generator.send(7)]


@case(2, values=[7], edited=[2, 107], run=send_seven)
def generator_with_send(x):
    y = yield x
    yield y


def numbers(x: int) -> Any:
    """Give a number, and return another."""
    yield x
    return x + 1


@case(2, values=[3], edited=[2, 103], run=list)
def generator_yield_from(x):
    y = yield from numbers(x)
    yield y


async def soon(x: int) -> int:
    """Give a number, later."""
    await asyncio.sleep(0)
    return x


@case(2, values=[2], edited=103, run=asyncio.run)
async def async_function(x):
    y = await soon(x)
    return y + 1


@case(2, values=[2], edited=102, name="inner.y")
def async_inside(x):
    async def inner():
        y = await soon(x)
        return y

    return asyncio.run(inner())


@case(2, values=[0, 1], edited=201, kind="loop", run=asyncio.run)
async def async_for(x):
    async def count():
        for i in range(x):
            yield i

    total = 0
    async for y in count():
        total += y
    return total


@case(2, values=[2], edited=102, kind="with", run=asyncio.run)
async def async_with(x):
    async with contextlib.nullcontext(x) as y:
        return y


@case(2, values=[3], edited=[103, "Inner", 2])
def class_inside(x):
    class Inner:
        y = 2

        def method(self):
            y = self.y
            return y

    y = x + 1
    return [y, Inner.__qualname__.rpartition(".")[2], Inner().method()]


@case(2, values=[4], edited=104)
def conditional_expression(x):
    y = x * 2 if x > 1 else 0
    return y


@case(2, values=[4, 1], edited=101)
def deleted_between(x):
    y = x * 2
    del y
    y = 1
    return y


# fmt: off
@case(2, values=[4, 105], edited=305)
def one_line(x): y = x * 2; y = y + 101; return y  # noqa: E702


@case(2, values=[5], edited=105)
def continued_lines(x):
    y = x + \
        (
  1 +
2
        )
    return y
# fmt: on


@case(2, values=[4], edited=104)
def text_at_column_zero(x):
    """Docstring

    that leaves its indentation.
    """
    y = x * 2
    text = """
def not_a_function(x):
    y = 5
"""
    return y if text else 0


@case(2, values=[4], edited=104, name="größe")
def name_outside_ascii(x):
    größe = x * 2
    return größe


@case(2, values=[3], edited=103)
def with_type_comment(x):
    y = x + 1  # type: int
    return y


@case(2, [], values=[3], edited=[103])
def mutable_default(x, kept=[]):  # noqa: B006
    y = x + 1
    kept[:] = [y]
    return kept


@case(3, values=[3, 2, 1, 0], edited=103, name="n", kind="argument")
def counts_down(n):
    return n + counts_down(n - 1) if 0 < n < 100 else n
