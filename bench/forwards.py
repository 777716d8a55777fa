"""What a forward pass costs with captures and with edits.

Before anything is timed, every variant of a group is checked to give the same values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import peers
import torch
from models import make_gpt
from tables import Table, tabulate
from timing import Variant, measure
from torch import Tensor, nn

import hookline as hl

Values = dict[str, Tensor]
HAND, HAND_KEPT = "hand hooks, each call", "hand hooks, persistent"


@contextlib.contextmanager
def hooks_on(blocks: dict[str, nn.Module], make: Callable[[str], Any]) -> Iterator[None]:
    """Keep a forward hook on each block: what people write by hand."""
    handles = [block.register_forward_hook(make(name)) for name, block in blocks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_equal(results: dict[str, Values]) -> None:
    """Raise unless every variant gave the same tensors."""
    first, *others = results.items()
    for name, values in others:
        if values.keys() != first[1].keys():
            raise AssertionError(f"`{name}` and `{first[0]}` captured different sites")
        for path, value in values.items():
            if not torch.equal(value, first[1][path]):
                raise AssertionError(f"`{name}` and `{first[0]}` differ at `{path}`")


def read(got: hl.Captured, blocks: dict[str, nn.Module]) -> Values:
    """Read the outputs of the blocks from a capture."""
    return {name: got[name].output for name in blocks}


def measure_capture(rounds: int, with_peers: bool) -> Table:
    """Capture 12 block outputs in a forward pass without grad."""
    model, tokens = make_gpt()
    blocks = {f"h.{index}": block for index, block in enumerate(model.h)}
    seen: Values = {}
    opened: list[hl.Captured] = []
    prepared = hl.capture(model, "h.*")

    def store(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            seen[name] = output.detach()

        return hook

    def by_hand() -> Values:
        with hooks_on(blocks, store):
            model(tokens)
        return seen

    def by_baukit() -> Values:
        with peers.TraceDict(model, list(blocks)) as traces:
            model(tokens)
        return traces

    def by_hookline() -> hl.Captured:
        with hl.capture(model, "h.*") as got:
            model(tokens)
        return got

    def by_prepared() -> hl.Captured:
        with prepared as got:
            model(tokens)
        return got

    @contextlib.contextmanager
    def keep_open() -> Iterator[None]:
        with hl.capture(model, "h.*") as got:
            opened.append(got)
            yield
            model(tokens)  # the block ends with something captured
        opened.clear()

    def in_open() -> None:
        model(tokens)
        opened[0].clear()

    with torch.no_grad():
        check_equal(
            {
                HAND: dict(by_hand()),
                "baukit": dict(by_baukit()),
                "hookline": read(by_hookline(), blocks),
                "prepared": read(by_prepared(), blocks),
            }
        )
        variants = [
            Variant("plain", lambda: model(tokens)),
            Variant(HAND, by_hand),
            Variant(HAND_KEPT, lambda: model(tokens), lambda: hooks_on(blocks, store)),
            Variant("baukit's TraceDict (own code)", by_baukit),
            Variant("hookline, each call", by_hookline, against=HAND, target=1.15),
            Variant("hookline, each call, 12 read", lambda: read(by_hookline(), blocks)),
            Variant("hookline, prepared", by_prepared, against=HAND_KEPT, target=1.05),
            Variant("hookline, kept open", in_open, keep_open, against=HAND_KEPT),
        ]
        skipped = ["Peers are measured with --peers."]
        if with_peers:
            more, skipped = peers.capture_variants(model, tokens)
            variants += more
        table = tabulate("capture: 12 block outputs, forward", measure(variants, rounds=rounds))
    table.notes += skipped
    return table


def measure_edit(rounds: int) -> Table:
    """Add a vector to 12 block outputs in a forward pass without grad."""
    model, tokens = make_gpt()
    blocks = {f"h.{index}": block for index, block in enumerate(model.h)}
    vector = torch.randn(model.head.in_features)

    def add(name: str) -> Callable[..., Tensor]:
        return lambda module, args, output: output + vector

    def run(around: Any) -> Tensor:
        with around:
            return model(tokens)  # type: ignore[no-any-return]

    def by_hand() -> Tensor:
        return run(hooks_on(blocks, add))

    def by_baukit() -> Tensor:
        return run(peers.TraceDict(model, list(blocks), lambda output: output + vector))

    def edit() -> Any:
        return hl.edit(model, {"h.*": hl.add(vector)})

    with torch.no_grad():
        results = {"hand": by_hand(), "baukit": by_baukit(), "hookline": run(edit())}
        check_equal({name: {"logits": value} for name, value in results.items()})
        variants = [
            Variant("plain", lambda: model(tokens)),
            Variant(HAND, by_hand),
            Variant(HAND_KEPT, lambda: model(tokens), lambda: hooks_on(blocks, add)),
            Variant("baukit's TraceDict (own code)", by_baukit),
            Variant("hookline, each call", lambda: run(edit()), against=HAND),
            Variant("hookline, kept open", lambda: model(tokens), edit, against=HAND_KEPT),
        ]
        return tabulate(
            "edit: add a vector to 12 block outputs, forward", measure(variants, rounds=rounds)
        )
