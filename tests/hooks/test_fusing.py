"""When hooks switch off the fused kernel of a transformer layer; torch itself is the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hookline.addresses import ModuleTree
from hookline.hooks.reasons import fast_path_note


def make_layer(**options: Any) -> nn.TransformerEncoderLayer:
    options = {"batch_first": True, "dim_feedforward": 8, **options}
    return nn.TransformerEncoderLayer(4, options.pop("heads", 2), **options).eval()


def notes_of(layer: nn.Module) -> list[str]:
    return fast_path_note(ModuleTree(layer), [layer])


def count_children_that_run(layer: nn.TransformerEncoderLayer) -> int:
    """Run a layer under the conditions that allow fusing; count calls of linear1 and norm1.

    The calls are counted by wrapping `forward`, which torch does not notice.
    """
    count = 0

    def counting(x: Tensor, forward: Any) -> Tensor:
        nonlocal count
        count += 1
        return forward(x)

    for child in (layer.linear1, layer.norm1):
        child.forward = lambda x, forward=child.forward: counting(x, forward)
    with torch.no_grad():
        layer(torch.zeros(2, 3, 4))
    return count


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_first": True},
        {"activation": "gelu"},
        {"activation": nn.ReLU()},
        {"activation": F.silu},
        {"batch_first": False},
        {"bias": False},
        {"heads": 1},
    ],
    ids=[
        "default",
        "norm first",
        "gelu",
        "module",
        "function",
        "time first",
        "no bias",
        "one head",
    ],
)
def test_fast_path_note_agrees_with_torch(options: dict[str, Any]) -> None:
    is_fused = count_children_that_run(make_layer(**options)) == 0
    assert bool(notes_of(make_layer(**options))) is is_fused


def test_fast_path_note_names_each_layer_with_a_hook_inside() -> None:
    encoder = nn.TransformerEncoder(make_layer(), 3).eval()
    tree = ModuleTree(encoder)
    hooked = [encoder, encoder.layers[0], encoder.layers[2].self_attn.out_proj]
    assert fast_path_note(tree, hooked) == [
        f"hooks switch off the fused kernel of `layers.{index}` "
        "(nn.TransformerEncoderLayer in eval mode without grad): "
        "the numbers may differ in the last bits from a run without hooks"
        for index in (0, 2)
    ]
    assert fast_path_note(tree, [encoder]) == []


def test_fast_path_note_is_silent_where_nothing_changes() -> None:
    training = make_layer().train()
    assert notes_of(training) == []
    uneven = make_layer()
    uneven.norm2.eps = 1e-3
    assert notes_of(uneven) == []
    hooked = make_layer()
    hooked.linear1.register_forward_hook(lambda *_: None)
    assert notes_of(hooked) == []
    swapped = make_layer()
    swapped.norm1 = nn.Identity()
    assert notes_of(swapped) == []
    on_meta = make_layer().to("meta")
    assert notes_of(on_meta) == []


def test_fast_path_note_is_silent_where_the_fast_path_is_off() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert notes_of(make_layer()) == []
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_fast_path_note_computes_no_parametrized_weight() -> None:
    class Refuses(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            raise AssertionError("the weight was read")

    layer = make_layer()
    parametrize.register_parametrization(layer.linear1, "weight", Refuses(), unsafe=True)
    assert len(notes_of(layer)) == 1
