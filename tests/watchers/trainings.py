"""Train a model twice, watched and not, and compare everything to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from small_models import is_clean
from torch import Tensor, nn
from torch.optim import Optimizer

import hookline as hl

STEPS = 4


class Outcome(NamedTuple):
    """What a training leaves behind."""

    losses: list[Tensor]
    gradients: list[Tensor | None]
    weights: list[Tensor]
    moments: list[Any]
    random: Tensor


Loop = Callable[[nn.Module, Optimizer], list[Tensor]]
"""Train a model and give the losses."""


def finish(losses: list[Tensor], model: nn.Module, optimizer: Optimizer) -> Outcome:
    """Gather what is compared."""
    return Outcome(
        [loss.detach().clone() for loss in losses],
        [None if one.grad is None else one.grad.clone() for one in model.parameters()],
        [one.detach().clone() for one in model.state_dict().values()],
        [value for state in optimizer.state.values() for value in state.values()],
        torch.get_rng_state(),
    )


def assert_same(plain: Outcome, watched: Outcome) -> None:
    """Compare two trainings bit for bit; NaN equals NaN."""
    for name, left, right in zip(Outcome._fields, plain, watched, strict=True):
        lefts = left if isinstance(left, list) else [left]
        rights = right if isinstance(right, list) else [right]
        assert len(lefts) == len(rights), name
        for number, (one, other) in enumerate(zip(lefts, rights, strict=True)):
            assert same_bits(one, other), f"{name} {number} differ: {one} and {other}"


def same_bits(left: Any, right: Any) -> bool:
    """Tell whether two values are equal to the last bit."""
    if not isinstance(left, Tensor):
        return bool(left == right)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.is_sparse:
        left, right = left.to_dense(), right.to_dense()
    lefts, rights = (one.detach().flatten().contiguous().view(torch.uint8) for one in (left, right))
    return torch.equal(lefts, rights)


def compare(
    make_model: Callable[[], nn.Module],
    loop: Loop,
    make_optimizer: Callable[[Iterator[nn.Parameter]], Optimizer] | None = None,
    **options: Any,
) -> hl.Watch:
    """Train plainly and watched, compare, and give the watch, which is closed by then."""
    options = {"sketch_every": 2, "counts_every": 2, "moments_every": 2, **options}
    outcomes = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = make_model()
        make = make_optimizer or (lambda params: torch.optim.AdamW(params, lr=0.01))
        optimizer = make(model.parameters())
        torch.manual_seed(1)
        if is_watched:
            with hl.watch(model, **options) as watched:
                outcomes.append(finish(loop(model, optimizer), model, optimizer))
            assert is_clean(model)
        else:
            outcomes.append(finish(loop(model, optimizer), model, optimizer))
    assert_same(*outcomes)
    return watched


def batches(*shape: int, count: int = STEPS) -> list[Tensor]:
    """Make the same inputs each time, whatever was drawn before."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def plain_loop(*shape: int, loss_of: Callable[[Any], Tensor] | None = None) -> Loop:
    """Make a loop of one call and one step for each batch."""

    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for batch in batches(*shape):
            optimizer.zero_grad()
            output = model(batch)
            loss = output.square().mean() if loss_of is None else loss_of(output)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    return train


def addresses(watched: hl.Watch) -> list[str]:
    """List the sites that a watch has met."""
    return [str(row["site"]) for row in watched.table()]
