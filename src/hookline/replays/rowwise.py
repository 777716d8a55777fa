"""Why an operation gave what it gave, from rows of statistics alone: the tensors are gone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hookline.stats.rows import FINITE, MAX, MEAN, MIN, NAN, NEGINF, POSINF, Values


def facts_of(row: Values, shape: torch.Size, dtype: torch.dtype) -> dict[str, Any]:
    """Write a row as the statistics of a tensor."""
    has_finite = bool(row[FINITE])
    return {
        "name": "",
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "min": float(row[MIN]) if has_finite else None,
        "max": float(row[MAX]) if has_finite else None,
        "mean": float(row[MEAN]) if has_finite else None,
        "nan": int(row[NAN]),
        "inf": int(row[POSINF] + row[NEGINF]),
    }


def explain_row(name: str, inputs: Sequence[dict[str, Any]], output: dict[str, Any]) -> str:
    """Say why an operation gave a non-finite output, as far as extremes tell."""
    bare = name.removesuffix("_")
    kind = "NaN" if output["nan"] else "infinity"
    lows = [one.get("min") for one in inputs]
    low = lows[0] if lows else None
    if bare in ("log", "log2", "log10", "sqrt", "rsqrt") and low is not None:
        if low < 0:
            return f"{bare} of a negative number (the lowest is {low:.3g})"
        if low == 0:
            return f"{bare} of 0"
    if bare in ("exp", "expm1", "pow", "square", "cosh", "sinh") and inputs:
        high = inputs[0].get("max")
        if high is not None:
            return f"{bare} of {high:.4g} overflows {output['dtype']}"
    if bare == "div" and inputs:
        under = inputs[-1]
        if under.get("min") is not None and under["min"] <= 0 <= under["max"]:
            return "division by zero"
    if any(one.get("inf") for one in inputs):
        return f"{bare} of infinities gave {kind}"
    return f"{bare} gave {kind}, and was given none"


def explain_row_slope(name: str, output: dict[str, Any], exponent: float) -> str:
    """Say that an operation has an infinite slope where it is, from what it gave; else nothing."""
    low, high = output["min"], output["max"]
    if low is None:
        return ""
    if name.removesuffix("_") in ("sqrt", "std") and low == 0:
        return f"{name} at 0 has an infinite slope"
    if name == "pow" and low == 0 and 0 < exponent < 1:
        return f"pow at 0 with exponent {exponent:.3g} has an infinite slope"
    if name == "acos" and (low == 0 or math.isclose(high, math.pi, rel_tol=1e-7)):
        return "acos at 1 or -1 has an infinite slope"
    if name == "asin" and math.isclose(max(-low, high), math.pi / 2, rel_tol=1e-7):
        return "asin at 1 or -1 has an infinite slope"
    return ""
