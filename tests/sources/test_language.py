"""Every way to bind a name: what the taps see, what an edit does, and that nothing else changes."""

from __future__ import annotations

import copy

import pytest
import sample_scopes  # noqa: F401 (adds to CASES)
import sample_statements  # noqa: F401
from recording_taps import RecordingTaps, add_hundred
from sample_cases import CASES, Case

from hookline.sources import read

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.function.__name__)


def run(function: object, case: Case) -> object:
    return case.run(function(*copy.deepcopy(case.arguments)))


@each_case
def test_tapped_values_are_those_bound_in_order(case):
    taps = RecordingTaps(case.function, {case.name})
    expected = run(case.function, case)

    assert run(taps, case) == expected
    assert taps.seen == [(case.name, value) for value in case.values]


@each_case
def test_edited_value_is_what_the_rest_works_with(case):
    code = case.function.__code__
    before = run(case.function, case)

    assert run(RecordingTaps(case.function, {case.name}, add_hundred), case) == case.edited
    assert case.function.__code__ is code
    assert run(case.function, case) == before


@each_case
def test_all_points_together_change_nothing(case):
    names = frozenset(read(case.function).names)
    taps = RecordingTaps(case.function, names)

    assert run(taps, case) == run(case.function, case)
    assert frozenset(taps.table) == names
    assert taps.values(case.name) == case.values


@each_case
def test_point_is_read_with_its_line_and_kind(case):
    reading = read(case.function)
    points = reading.names.get(case.name, [])

    assert bool(points) == bool(case.values)
    assert {point.kind for point in points} == ({case.kind} if points else set())
    for point in points:
        line = reading.lines[point.line - reading.first_line]
        assert case.name.rpartition(".")[2] in line
