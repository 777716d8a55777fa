"""What a forward and a backward pass cost with gradients kept, and with module backward hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from forwards import Values, check_equal, hooks_on, read
from models import make_chain, make_gpt
from tables import Table, judge, tabulate
from timing import Variant, measure
from torch import Tensor, nn

import hookline as hl


def measure_grads(rounds: int) -> Table:
    """Keep 12 block outputs and their gradients over a forward and a backward pass."""
    model, tokens = make_gpt()
    blocks = {f"h.{index}": block for index, block in enumerate(model.h)}
    seen: Values = {}
    grads: Values = {}

    def step() -> None:
        model(tokens).sum().backward()

    def hook_gradient(name: str) -> Callable[..., None]:
        def keep(grad: Tensor) -> None:
            grads[name] = grad

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            seen[name] = output.detach()
            output.register_hook(keep)

        return hook

    def retain(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            output.retain_grad()
            seen[name] = output

        return hook

    def by_hand() -> Values:
        with hooks_on(blocks, hook_gradient):
            step()
        return grads

    def by_retaining() -> Values:
        with hooks_on(blocks, retain):
            step()
        return seen

    def by_hookline() -> hl.Captured:
        with hl.capture(model, "h.*", grads=True) as got:
            step()
        return got

    retained: Any = {name: value.grad for name, value in by_retaining().items()}
    captured: Any = {name: value.grad for name, value in read(by_hookline(), blocks).items()}
    check_equal({"hand": dict(by_hand()), "retain_grad": retained, "hookline": captured})
    hand = "hand register_hook"
    variants = [
        Variant("plain", step),
        Variant(hand, by_hand),
        Variant("hand retain_grad", by_retaining),
        Variant("hookline, grads=True", by_hookline, against=hand, target=1.10),
    ]
    return tabulate(
        "grads: 12 block outputs and their gradients, forward and backward",
        measure(variants, rounds=rounds),
    )


def measure_module_backward(rounds: int) -> Table:
    """See grad_input and grad_output of every module of a chain, forward and backward."""
    model, x = make_chain()
    seen: dict[int, Any] = {}

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        seen[id(module)] = grad_input, grad_output

    @contextlib.contextmanager
    def torch_hooks() -> Iterator[None]:
        handles = [module.register_full_backward_hook(hook) for module in model.modules()]
        yield
        for handle in handles:
            handle.remove()

    def step() -> None:
        model(x).sum().backward()

    results = {}
    for name, around in (
        ("torch", torch_hooks()),
        ("hookline", hl.register_backward_hook(model, "**", hook)),
    ):
        seen.clear()
        with around:
            step()
        results[name] = {
            f"{key} {side}": grad for key, pair in seen.items() for side, (grad,) in enumerate(pair)
        }
    check_equal(results)
    torchs, ours = "torch register_full_backward_hook", "hl.register_backward_hook"
    measured = measure(
        [
            Variant("plain", step),
            Variant(torchs, step, torch_hooks),
            Variant(
                ours,
                step,
                lambda: hl.register_backward_hook(model, "**", hook),
                against=torchs,
                target=1 / 1.5,
            ),
        ],
        rounds=rounds,
    )
    table = tabulate("module_backward: every module of a chain of 24", measured)
    over, over_torch = (measured.overhead(name, "plain") for name in (ours, torchs))
    table.notes.append(
        f"Over plain: torch {over_torch:.0f} us, hookline {over:.0f} us, a ratio of "
        f"{over / over_torch:.2f} ({judge(over / over_torch, 1 / 1.5)})."
    )
    return table
