"""`hl.check`: a model judged by one batch, before it is trained.

Forward and backward run as in a training, and leave no trace: weights, gradients, buffers and
random states are afterwards as they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline import _trees
from hookline._errors import UnsupportedModel
from hookline.rules import Rule, checkup_rules, make_rules, say_verdict
from hookline.scripts.checkups import Checkup
from hookline.surveys.preserving import preserved
from hookline.watchers import watch

Loss = Callable[..., Any]


def check(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    steps: int = 1,
    rules: list[Rule] | None = None,
) -> Checkup:
    """Judge a model by running it forward and backward on one batch; it stays as it is.

        print(hl.check(model, batch, loss=lambda output: F.cross_entropy(output, target)))

    `batch` is what the model is called with: a value, a tuple of arguments, or a dict of keyword
    arguments. `loss` gets the output, or the output and the batch where it takes two arguments.
    Without it the loss is the output's own `loss`, the output where that is one number, or else the
    mean square of the output; the result says which. With `steps` the same batch runs more often,
    with other dropout. The result has `ok`, `findings` and `verdict`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"hl.check takes a model, not {type(model).__qualname__}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}: give how often the batch is run, from 1")
    args, kwargs = read_batch(batch)
    chosen = _choose_rules() if rules is None else rules
    names = [rule.name for rule in chosen]
    notes: list[str] = []
    used = ""
    with _untouched(model) as trained, torch.enable_grad():
        watched = watch(
            model, rules=chosen, keep=max(steps, 1), sketch_every=0, counts_every=1, units_every=1
        )
        with watched:
            standing = _Standing(trained) if trained else None
            for _ in range(steps):
                output = model(*args, **kwargs)
                value, used = _find_loss(output, batch, loss)
                if value.requires_grad:
                    value.sum().backward()
                    if standing is not None:
                        standing.step()
                else:
                    notes.append(f"{used} does not depend on anything trainable: forward only")
                for one in trained:
                    one.grad = None
                watched.step()
        findings = tuple(watched.findings)
        notes += watched.notes
        sites = len(watched.history.sites())
    others = [rule.name for rule in make_rules() if rule.name not in names]
    return Checkup(
        verdict=say_verdict(findings, steps=steps, sites=sites),
        findings=findings,
        loss=used,
        steps=steps,
        sites=sites,
        judged=tuple(names),
        not_judged=tuple(others),
        notes=tuple(dict.fromkeys(notes)),
    )


def _choose_rules() -> list[Rule]:
    """Make the rules for a single step, and those that a user has registered."""
    chosen = checkup_rules()
    own = [one for one in make_rules() if not type(one).__module__.startswith("hookline.rules.")]
    names = {one.name for one in own}
    return [one for one in chosen if one.name not in names] + own


def read_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tell what a model is called with from a batch."""
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return batch, {}
    return (batch,), {}


class _Standing(Optimizer):
    """An optimizer that changes nothing: a watch measures parameters when one steps."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Do nothing."""


def _find_loss(output: Any, batch: Any, loss: Loss | None) -> tuple[Tensor, str]:
    """Give what to run backward from, and what that is in words."""
    if loss is not None:
        name = getattr(loss, "__name__", type(loss).__name__)
        value = loss(output, batch) if _takes_two(loss) else loss(output)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the loss `{name}` gave {type(value).__qualname__}, not a tensor: let it return "
                "what you would call backward on"
            )
        return value, "the given loss" if name == "<lambda>" else f"the loss `{name}`"
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own, "the output's own `loss`"
    if isinstance(output, Tensor) and output.numel() == 1 and output.is_floating_point():
        return output, "the output, which is one number"
    floats = [leaf for _, leaf in _trees.leaves(output) if leaf.is_floating_point()]
    if not floats:
        raise TypeError(
            f"the output ({type(output).__qualname__}) has no floating tensor to run backward "
            "from: give a loss, hl.check(model, batch, loss=lambda output: ...)"
        )
    total = torch.stack([_mean_square(leaf) for leaf in floats]).sum()
    return total, "the mean square of the output (no loss was given)"


def _mean_square(value: Tensor) -> Tensor:
    """Give the mean square, of a large value in proportion: it must not be what overflows."""
    if not value.numel():
        return value.float().sum()
    return (value.float() / value.detach().float().abs().amax().clamp(min=1)).square().mean()


def _takes_two(loss: Loss) -> bool:
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # written in C
        return False
    places = [
        one
        for one in signature.parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
    ]
    return len(places) > 1


@contextmanager
def _untouched(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Leave parameters, gradients, buffers and random states as they were."""
    parameters = list({id(one): one for one in model.parameters()}.values())
    if any(nn.parameter.is_lazy(one) for one in parameters):
        raise UnsupportedModel(
            "the model has parameters that are not initialized yet, and a check would do it. "
            "Run it once first: model(batch)."
        )
    gradients = [(one, one.grad) for one in parameters]
    # Whoever steps inside the backward changes weights; nothing else here does.
    copies = (
        [(one, one.detach().clone()) for one in parameters]
        if any(getattr(one, "_post_accumulate_grad_hooks", None) for one in parameters)
        else []
    )
    try:
        for one in parameters:
            one.grad = None
        with preserved(list(model.modules())):
            yield [one for one in parameters if one.requires_grad]
    finally:
        for one, gradient in gradients:
            one.grad = gradient
        with torch.no_grad():
            for one, copy in copies:
                one.copy_(copy)
