"""What a user gives to `hl.diff`, checked before anything runs, and what their functions give.

A mistake is told in a sentence: what was given, what is meant, and how it is written.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.runs import Run


def check_sides(a: Any, b: Any) -> None:
    """Refuse what is neither a model nor a run."""
    for letter, one in (("a", a), ("b", b)):
        if isinstance(one, (nn.Module, Run, str, os.PathLike)):
            continue
        if isinstance(one, (list, tuple, dict)):
            raise TypeError(
                f"`{letter}` is a {type(one).__name__}; hl.diff compares one model or run with one "
                "other. Compare several pair by pair: `[hl.diff(a, b, (x,)) for a, b in pairs]`"
            )
        raise TypeError(
            "hl.diff compares models and runs: an `nn.Module`, a folder or a `Run`; "
            f"`{letter}` is {_describe(one)}"
        )


def check_limits(tolerance: Any, allow: Any) -> None:
    """Refuse what no relative error can be compared with."""
    if tolerance is not None and not _is_limit(tolerance):
        raise _complain(
            f"`tolerance` is a relative error, 0 or more, such as 1e-3; not {tolerance!r}",
            tolerance,
        )
    if allow is None:
        return
    example = "such as `{'blocks.*.attn': 1e-3}`"
    if not isinstance(allow, Mapping):
        raise TypeError(f"`allow` maps patterns to relative errors, {example}; not {allow!r}")
    for pattern, limit in allow.items():
        if not isinstance(pattern, str):
            raise TypeError(f"`allow` has patterns of sites for keys, {example}; not {pattern!r}")
        if not _is_limit(limit):
            raise _complain(
                f"`allow` gives `{pattern}` {limit!r}, which is no relative error: 0 or more, "
                f"{example}",
                limit,
            )


def check_names(names: Any) -> None:
    """Refuse names that are no mapping of words."""
    if names is None:
        return
    example = "such as `{'layers': 'blocks'}`"
    if not isinstance(names, Mapping):
        raise TypeError(f"`names` maps paths of A to paths of B, {example}; not {names!r}")
    for one, other in names.items():
        if not isinstance(one, str) or not isinstance(other, str):
            raise TypeError(
                f"`names` maps paths of A to paths of B, {example}; not {one!r} to {other!r}"
            )


def check_numbers(step: Any, seed: Any, *, has_run: bool) -> None:
    """Refuse a step or a seed that is no whole number, and the step of what has none."""
    if step is not None and not _is_whole(step):
        raise TypeError(f"`step` is the number of a step of the runs, such as 0; not {step!r}")
    if step is not None and not has_run:
        raise ValueError("`step` is for runs: two models make one step, which has no number")
    if not _is_whole(seed):
        raise TypeError(f"`seed` is a whole number, such as 0; not {seed!r}")


def check_calibrate(calibrate: Any) -> None:
    """Refuse what cannot say how far rounding moves a value."""
    if calibrate is None or isinstance(calibrate, (bool, nn.Module, Run, str, os.PathLike)):
        return
    raise TypeError(
        "`calibrate` is True, False, or another model or run of A that should count as the same; "
        f"not {calibrate!r}"
    )


class CheckedLoss:
    """Serve as a loss: call the user's, and refuse what there is no way back from."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self.has_gradient = False
        """Whether a loss that it gave had a gradient."""

    def __call__(self, output: Any) -> Tensor:
        value = self._loss(output)
        rule = "it takes the model's output and gives a tensor of one number: `out.mean()`"
        if not isinstance(value, Tensor):
            hint = "; is there a `return`?" if value is None else ""
            raise TypeError(f"`loss` gave {_describe(value)}; {rule}{hint}")
        if value.numel() != 1:
            raise ValueError(f"`loss` gave a tensor of shape {tuple(value.shape)}; {rule}")
        if value.is_complex():
            raise ValueError(f"`loss` gave a complex number ({value.dtype}); {rule}")
        self.has_gradient |= value.requires_grad
        return value


class CheckedOptimizer:
    """Serve as what makes an optimizer: call the user's, and refuse what cannot make a step."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = self._make(parameters)
        if not isinstance(made, Optimizer):
            raise TypeError(
                f"`optimizer` gave {_describe(made)}; it takes parameters and gives a torch "
                "optimizer: `lambda p: torch.optim.SGD(p, lr=0.1)`"
            )
        closure = inspect.signature(made.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"`{type(made).__name__}` calls the model itself, several times in a step; "
                "an update is compared of an optimizer whose `step()` needs no closure"
            )
        return made


def check_gradients(losses: Iterable[CheckedLoss | None]) -> None:
    """Refuse losses that give no gradient in any model: nothing of the backward was compared."""
    called = [one for one in losses if one is not None]
    if called and not any(one.has_gradient for one in called):
        raise ValueError(
            "`loss` gave a tensor that needs no gradient, so there is no backward to compare: it "
            "is detached, whole numbers, or all parameters are frozen. Leave `loss` out to compare "
            "the forward alone"
        )


def _complain(text: str, given: Any) -> Exception:
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    return ValueError(text) if is_number else TypeError(text)


def _is_limit(given: Any) -> bool:
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    return is_number and math.isfinite(given) and given >= 0


def _is_whole(given: Any) -> bool:
    return hasattr(given, "__index__") and not isinstance(given, (bool, Tensor))


def _describe(given: Any) -> str:
    """Say what something is, briefly: a number or word itself, else its class."""
    if given is None or isinstance(given, (bool, int, float, str)):
        return repr(given)
    kind = type(given).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} `{kind}`"
