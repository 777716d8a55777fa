"""Decorators: the function inside is found, tapped, and put back without decorating again."""

from __future__ import annotations

import contextlib
import functools

import pytest
from recording_taps import RecordingTaps, add_hundred

from hookline.sources import NoSource, read, unwrap

decorated = []


def negate(function):
    decorated.append(function.__name__)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return -function(*args, **kwargs)

    return wrapper


def double_silently(function):
    def doubling(self, x):
        return 2 * function(self, x)

    return doubling


def pass_on(function):
    def passing(*args, **kwargs):
        return function(*args, **kwargs)

    return passing


def scale_by(factor):
    def decorator(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return factor * function(*args, **kwargs)

        wrapper.factor = factor
        return wrapper

    return decorator


def as_default(function):
    @functools.wraps(function)
    def wrapper(*args, _function=function):
        return _function(*args)

    return wrapper


def straight_to_the_innermost(function):
    wrapper = pass_on(function)
    wrapper.__wrapped__ = function.__wrapped__
    return wrapper


class InAnObject:
    def __init__(self, function):
        self.function = function
        functools.update_wrapper(self, function)

    def __get__(self, owner, kind=None):
        return functools.partial(self.function, owner)


def in_a_list(function):
    functions = [function]

    @functools.wraps(function)
    def wrapper(*args):
        return functions[0](*args)

    return wrapper


class Model:
    @negate
    def wrapped(self, x):
        y = x + 1
        return y

    @double_silently
    def same_arguments(self, x):
        y = x + 1
        return y

    @pass_on
    def any_arguments(self, x):
        y = x + 1
        return y

    @negate
    @pass_on
    @scale_by(3)
    def three_deep(self, x):
        y = x + 1
        return y

    @contextlib.contextmanager
    def managed(self, x):
        y = x + 1
        yield y

    @as_default
    def default(self, x):
        y = x + 1
        return y

    @straight_to_the_innermost
    @negate
    def skipping(self, x):
        y = x + 1
        return y

    @InAnObject
    def in_an_object(self, x):
        y = x + 1
        return y

    @in_a_list
    def in_a_list(self, x):
        y = x + 1
        return y

    @functools.lru_cache  # noqa: B019
    def cached(self, x):
        y = x + 1
        return y

    @functools.wraps(any_arguments)
    def borrowing_the_docstring(self, x):
        z = x + 1
        return z


@pytest.mark.parametrize(
    ("name", "plain", "edited"),
    [
        ("wrapped", -5, -105),
        ("same_arguments", 10, 210),
        ("any_arguments", 5, 105),
        ("three_deep", -15, -315),
        ("default", 5, 105),
        ("skipping", -5, -105),
    ],
)
def test_function_inside_is_tapped_and_its_decorators_work(name, plain, edited):
    function, model = vars(Model)[name], Model()
    before = list(decorated)
    taps = RecordingTaps(function, {"y"}, add_hundred)

    assert (taps(model, 4), function(model, 4)) == (edited, plain)
    assert (taps.values("y"), taps.owners) == ([5], [model])
    assert decorated == before
    assert read(function).names.keys() == {"x", "y", "return"}


def test_context_manager_inside_is_tapped():
    taps = RecordingTaps(Model.managed, {"y"}, add_hundred)
    with taps(Model(), 4) as value:
        assert value == 105


def test_copied_wrapper_tells_of_the_copy():
    taps = RecordingTaps(Model.three_deep, {"y"})
    chain = unwrap(taps.function)

    assert len(chain) == len(unwrap(Model.three_deep)) == 4
    assert taps.function.__wrapped__ is chain[1]
    assert chain[2].factor == 3
    assert all(one is not other for one, other in zip(chain, unwrap(Model.three_deep), strict=True))


@pytest.mark.parametrize(
    ("name", "decorator"),
    [
        ("in_an_object", "InAnObject"),
        ("in_a_list", "in_a_list"),
        ("cached", "_lru_cache_wrapper"),
    ],
)
def test_decorator_that_hides_the_function_is_refused(name, decorator):
    reason = f"the decorator `{decorator}` does not hold the function where it can be exchanged"
    for attempt in (read, lambda function: RecordingTaps(function, {"y"})):
        with pytest.raises(NoSource) as caught:
            attempt(vars(Model)[name])
        assert str(caught.value) == reason


def test_wraps_outside_a_decorator_only_borrows():
    assert unwrap(Model.borrowing_the_docstring) == [Model.borrowing_the_docstring]
    assert "z" in read(Model.borrowing_the_docstring).names


def test_closure_that_uses_a_function_is_no_decorator():
    def make(activation):
        def forward(self, x):
            y = activation(x)
            return y

        return forward

    forward = make(lambda x: -x)
    assert unwrap(forward) == [forward]


def test_closure_over_its_neighbour_is_no_decorator():
    def make():
        def one(x):
            return x

        def other(x):
            return one(x)

        return other

    other = make()
    assert unwrap(other) == [other]


def test_replaced_method_of_one_object_is_found():
    model = Model()
    old = model.wrapped

    def patch():
        kept = old

        def patched(*args, **kwargs):
            return kept(*args, **kwargs) * 2

        return patched

    patched = patch()
    taps = RecordingTaps(patched, {"y"}, add_hundred)

    assert (patched(4), taps(4)) == (-10, -210)
    assert taps.owners == [model]


def test_partial_that_holds_the_function_as_an_argument_is_copied():
    def call(function, *args):
        return function(*args)

    def inner(x):
        y = x
        return y

    partial = functools.partial(call, inner)
    partial.__wrapped__ = inner  # type: ignore[attr-defined]
    taps = RecordingTaps(partial, {"y"}, add_hundred)

    assert (partial(1), taps(1)) == (1, 101)


def test_functions_that_wrap_each_other_end():
    def one(x):
        return x

    one.__wrapped__ = one  # type: ignore[attr-defined]
    assert unwrap(one) == [one]
