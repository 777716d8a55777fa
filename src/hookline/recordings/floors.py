"""How far rounding alone moves each site: a model against itself with every value a little off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from hookline._compiler import has_compiled_part
from hookline.diffs.measuring import relative_error
from hookline.diffs.tolerances import TABLE, read_precision
from hookline.recordings.course import MakeSite
from hookline.recordings.live import LiveTrace, key_of
from hookline.recordings.tracing import Loss, trace_step
from hookline.replays.randomness import RandomStates

if TYPE_CHECKING:
    import numpy.typing as npt

RUNS = 2
"""How many perturbed runs there are; the largest deviation counts."""

PERTURBATION = 4.0
"""How many units of round-off each value is moved by."""

COARSE_PERTURBATION = 1.0
"""The same for values of 16 bits and fewer."""

DOUBTFUL = 10.0
"""Whether a model repeats itself is looked at where a floor is this many times the usual limit."""


def perturb(tensor: Tensor, generator: Generator) -> Tensor:
    """Move each element up or down by some units of round-off; the gradient is moved alike."""
    info = torch.finfo(tensor.dtype)
    is_coarse = info.bits <= 16
    size = (COARSE_PERTURBATION if is_coarse else PERTURBATION) * info.eps / 2
    signs = torch.randint(0, 2, tensor.shape, generator=generator, device=tensor.device)
    wide = torch.float32 if is_coarse else tensor.dtype
    factors = 1 + size * (2 * signs - 1).to(wide)
    return (tensor.to(wide) * factors).to(tensor.dtype)


def calibrate_floors(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    seed: int | None = 0,
    rng: RandomStates | None = None,
    taps: bool = True,
    trace: LiveTrace | None = None,
    runs: int = RUNS,
) -> npt.NDArray[np.float64]:
    """Measure for each site of a model's trace how far rounding alone moves it, relative.

    `trace` is that of the same step as it is, with tensors; without one it is made first. A site
    that no perturbed run has is NaN, and so is one that a run without any perturbation gives
    otherwise: that is no rounding. The trace is told of those.
    """
    options: dict[str, Any] = {
        "loss": loss,
        "optimizer": optimizer,
        "seed": seed,
        "rng": rng,
        "taps": taps,
    }
    if trace is None:
        trace = trace_step(model, args, kwargs, **options)
    if not has_compiled_part(model):
        return _measure(
            trace, lambda **more: trace_step(model, args, kwargs, **options, **more), runs
        )
    # Values inside of graphs cannot be moved. What rounding does is found without graphs, so that
    # what the compiler does is not taken for that.
    options["is_eager"] = True
    plain = trace_step(model, args, kwargs, **options)
    floors = _measure(
        plain, lambda **more: trace_step(model, args, kwargs, **options, **more), runs
    )
    known = plain.index()
    places = [known.get(key_of(site)) for site in trace.sites]
    lost = [site.id for site in trace.sites if places[site.id] in plain.unrepeated]
    trace.set_unrepeated(lost)
    return np.array([np.nan if place is None else floors[place] for place in places])


def _measure(
    trace: LiveTrace, run_again: Callable[..., LiveTrace], runs: int
) -> npt.NDArray[np.float64]:
    """Run the step of a trace again with values a little off, and see how far each site moves."""
    floors = np.full(len(trace.sites), np.nan)
    index = trace.index()
    for run in range(runs):
        run_again(perturb=perturb, perturb_seed=run + 1, sink=_Comparing(trace, index, floors))
    usual = np.array([TABLE[read_precision(site.dtype)] for site in trace.sites])
    flows = np.array([site.kind in ("value", "gradient") for site in trace.sites], bool)
    with np.errstate(invalid="ignore"):
        is_doubtful = bool((flows & (floors > DOUBTFUL * usual)).any())
    if is_doubtful:
        again = np.full(len(trace.sites), np.nan)
        run_again(sink=_Comparing(trace, index, again))
        with np.errstate(invalid="ignore"):
            lost = flows & (again > usual)
            if lost.any():
                # What comes after holds rounding and what was not repeated, nobody knows how much.
                floors[again > floors / DOUBTFUL] = np.nan
        trace.set_unrepeated(np.flatnonzero(lost).tolist())
    for site in trace.sites:
        if site.same_as is not None:
            floors[site.id] = floors[site.same_as]
    return floors


class _Comparing:
    """Compare each value with that of the trace as it comes, and keep the largest deviation."""

    def __init__(
        self, trace: LiveTrace, index: Mapping[Any, int], floors: npt.NDArray[np.float64]
    ) -> None:
        self._trace = trace
        self._index = index
        self._floors = floors
        self._numbers: list[int | None] = []

    def number(self, make: MakeSite, tensor: Tensor) -> int:
        number = len(self._numbers)
        site = make(number, tensor)
        self._numbers.append(self._index.get(key_of(site)))
        return number

    def measure(self, site: int, tensor: Tensor) -> None:
        number = self._numbers[site]
        kept = None if number is None else self._trace.tensor(number)
        if number is not None and kept is not None and kept.shape == tensor.shape:
            found = relative_error(kept, tensor.detach().cpu())
            self._floors[number] = np.fmax(self._floors[number], found)

    def share(self, site: int, first: int, tensor: Tensor) -> None:
        """Do nothing: the first was compared."""
