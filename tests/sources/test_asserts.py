"""pytest compiles the asserts of a test file, such as this one, to other code than Python does."""

from __future__ import annotations

import pytest
from recording_taps import RecordingTaps

from hookline.sources import NoSource, read


def checked(x):
    assert x > 0, "needs more"
    y = x * 2
    assert isinstance(y, int) and y in {2, 4, 6}  # noqa: PT018
    return y


def checked_inside(x):
    def inner(a):
        assert a == x
        z = a + 1
        return z

    return [inner(each) for each in [x, x]]


def checked_with_walrus(x):
    assert (y := x + 1) > 1  # noqa: RUF018
    return y


class Checked:
    size = 2

    def forward(self, x):
        assert x < self.size * 10
        y = x * self.size
        return y


@pytest.mark.parametrize(
    ("function", "name", "values"),
    [(checked, "y", [6]), (checked_inside, "inner.z", [4, 4])],
)
def test_function_with_asserts_is_tapped(function, name, values):
    taps = RecordingTaps(function, {name})

    assert taps(3) == function(3)
    assert taps.values(name) == values


def test_walrus_in_an_assert_is_tapped():
    """Some versions of pytest write it into the rewritten assert more than once."""
    taps = RecordingTaps(checked_with_walrus, {"y"})

    assert taps(3) == 4
    assert set(taps.values("y")) == {4}


def test_method_with_asserts_is_tapped():
    taps = RecordingTaps(Checked.forward, {"y"})

    assert taps(Checked(), 3) == 6
    assert taps.values("y") == [6]


def test_asserts_still_explain_themselves():
    with pytest.raises(AssertionError, match="needs more\nassert -1 > 0"):
        RecordingTaps(checked, {"y"})(-1)


def test_names_of_pytest_are_no_points():
    assert set(read(checked).names) == {"x", "y", "return"}
    assert [callee.name for callee in read(checked).callees] == ["isinstance"]


def test_rewriter_that_does_not_work_is_named():
    class Rewriter:
        @staticmethod
        def rewrite_asserts(*args):
            raise TypeError("one argument too many")

    def other(x):
        assert x
        return x

    space = {**globals(), "@pytest_ar": Rewriter}
    moved = type(other)(other.__code__.replace(), space)
    with pytest.raises(NoSource, match="pytest rewrote its asserts") as caught:
        read(moved)
    assert "one argument too many" in str(caught.value)
