"""What a value may differ by: dtypes, floors, what the user allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from made_traces import MemoryTrace, TraceMaker

from hookline.diffs.aligning import align
from hookline.diffs.phases import make_pairs
from hookline.diffs.tolerances import Limits, find_unused, read_precision, set_limits
from hookline.diffs.traces import Trace, TraceFacts

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


def make_chain(
    *dtypes: torch.dtype, weight: torch.dtype | None = None, **facts: Any
) -> MemoryTrace:
    """Make a chain of modules m0, m1, ... whose values have these dtypes; the first is given."""
    maker = TraceMaker()
    maker.value("", "input", torch.ones(3, dtype=dtypes[0]), caller=None)
    for number, dtype in enumerate(dtypes[1:]):
        value = maker.value(f"m{number}", "output", torch.ones(3, dtype=dtype))
    maker.gradient(value, torch.ones(3, dtype=dtypes[-1]))
    if weight is not None:
        parameter = maker.parameter("m0", "weight", torch.ones(3, dtype=weight))
        maker.parameter_gradient(parameter, torch.ones(3, dtype=weight))
    return maker.build(facts=TraceFacts(**facts))


def limits_of(a: Trace, b: Trace | None = None, **options: Any) -> Limits:
    traces = (a, a if b is None else b)
    pairs = make_pairs(traces, align(*traces))
    return set_limits(traces, pairs, **options)


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        (F64, 1e-12),
        (F32, 2e-5),
        (F16, 2.5e-3),
        (BF16, 2e-2),
        (torch.float8_e4m3fn, 0.2),
        (torch.int64, 0),
        (torch.bool, 0),
    ],
)
def test_limit_of_a_dtype(dtype: torch.dtype, limit: float) -> None:
    maker = TraceMaker()
    maker.value("a", "output", torch.ones(3, dtype=F32))
    maker.sites[0] = type(maker.sites[0])(
        0, "value", "a:output", "a", "output", dtype=str(dtype), shape=(3,)
    )
    assert limits_of(maker.build()).limits.tolist() == [limit]


def test_precisions_are_read_by_name() -> None:
    names = ["bool", "float64", "complex64", "torch.float16", "bfloat16", "float8_e5m2"]
    assert [read_precision(name) for name in names] == [0, 1, 2, 3, 5, 6]


def test_coarser_side_counts_where_inputs_or_weights_say_so() -> None:
    by_input = limits_of(make_chain(F64, F64), make_chain(F32, F32))
    assert by_input.limits.tolist() == [2e-5] * 3
    by_weight = limits_of(
        make_chain(F32, F32, F32, weight=F32), make_chain(F32, BF16, BF16, weight=BF16)
    )
    assert by_weight.limits.tolist() == [2e-5, *[2e-2] * 5]


def test_what_went_through_a_coarse_value_stays_coarse() -> None:
    chain = make_chain(F32, BF16, F32)
    assert limits_of(chain).limits.tolist() == [2e-5, 2e-2, 2e-2, 2e-2]


def test_cast_on_one_side_alone_does_not_widen() -> None:
    found = limits_of(make_chain(F32, F32, F32), make_chain(F32, BF16, F32))
    assert found.limits.tolist() == [2e-5] * 4


@pytest.mark.parametrize("side", [0, 1])
def test_autocast_of_either_side_widens(side: int) -> None:
    chains = [make_chain(F32, F32), make_chain(F32, F32)]
    chains[side] = make_chain(F32, F32, autocast="bfloat16")
    assert limits_of(*chains).limits.tolist() == [2e-2] * 3


def test_tf32_widens_float32_alone() -> None:
    assert limits_of(make_chain(F32, F32, has_tf32=True)).limits.tolist() == [5e-3] * 3
    assert limits_of(make_chain(F64, F64, has_tf32=True)).limits.tolist() == [1e-12] * 3


def test_floor_is_taken_ten_times_and_may_be_below_the_table() -> None:
    floors = np.array([1e-9, 3e-7, np.nan])
    found = limits_of(make_chain(F32, F32), floors=floors)
    assert found.limits == pytest.approx([10 * 2**-24, 3e-6, 2e-5])
    assert limits_of(make_chain(F32, F32), floors=floors * 1e4).limits[1] == pytest.approx(3e-2)


def test_floor_of_a_finer_reference_is_scaled() -> None:
    """Measured in float64 it says nothing of float32, but how much rounding grows."""
    floors = np.full(3, 4 * 2.0**-53)
    found = limits_of(make_chain(F64, F64), make_chain(F32, F32), floors=floors)
    assert found.floors == pytest.approx(4 * 2.0**-24)


def test_floor_in_bfloat16_is_not_below_the_table() -> None:
    """Ten units of bfloat16 are more than the table has."""
    found = limits_of(make_chain(BF16, BF16), floors=np.zeros(3))
    assert found.limits == pytest.approx(2e-2)


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("m0", [False, True, False, False, True, True]),
        ("m*", [False, True, True, True, True, True]),
        ("m0:output", [False, True, False, False, False, False]),
        ("m1:output.grad", [False, False, False, True, False, False]),
        ("re:m[01]", [False, True, True, True, True, True]),
        ("m0.weight", [False, False, False, False, True, True]),
        ("m0.weight:grad", [False, False, False, False, False, True]),
        ("", [True, False, False, False, False, False]),
    ],
)
def test_allow_names_modules_and_addresses(pattern: str, chosen: list[bool]) -> None:
    chain = make_chain(F32, F32, F32, weight=F32)
    found = limits_of(chain, allow={pattern: 0.5})
    assert [limit == 0.5 for limit in found.limits] == chosen
    assert found.is_given.tolist() == chosen


def test_tolerance_is_for_all_but_whole_numbers() -> None:
    found = limits_of(make_chain(torch.int64, F32, F32), tolerance=1e-3)
    assert found.limits.tolist() == [0, 1e-3, 1e-3, 1e-3]
    wider = limits_of(make_chain(torch.int64, F32, F32), tolerance=1e-3, allow={"m0": 0.1})
    assert wider.limits.tolist() == [0, 0.1, 1e-3, 1e-3]


def test_pattern_that_names_nothing_is_found() -> None:
    chain = make_chain(F32, F32)
    pairs = make_pairs((chain, chain), align(chain, chain))
    assert find_unused({"m0": 1.0, "nothing.*": 1.0}, pairs) == ["nothing.*"]


def test_usual_is_the_floor_or_four_units() -> None:
    make: Callable[..., Limits] = limits_of
    found = make(make_chain(F32, F32), floors=np.array([1e-6, np.nan, np.nan]))
    assert found.usual == pytest.approx([1e-6, 4 * 2**-24, 4 * 2**-24])
