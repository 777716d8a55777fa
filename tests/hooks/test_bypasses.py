"""How source reaches a child without calling it: the ways of writing it, one function each."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from hookline.hooks.bypasses import Bypass, find_bypass


class Net(nn.Module):
    """Layers in every kind of container; the functions below serve as its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.by_name = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})


def with_forward(forward: Any) -> Any:
    """Make a `Net` whose class has this function as its forward."""
    return type("Made", (Net,), {"forward": forward})()


def loop(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer.forward(x)
    return x


def loop_with_index(self: Any, x: Tensor) -> Tensor:
    for _, (layer, _) in enumerate(zip(self.layers, self.by_name.values(), strict=True)):
        x = layer.forward(x)
    return x


def index(self: Any, x: Tensor) -> Tensor:
    return self.layers[-1](self.layers[0].forward(x))


def index_known_only_at_run_time(self: Any, x: Tensor) -> Tensor:
    which = int(x.sum())
    return self.layers[which].forward(x)


def sliced(self: Any, x: Tensor) -> Tensor:
    first = self.layers[:1]
    for layer in first:
        x = layer.forward(x)
    for layer in self.layers[1:]:
        x = layer(x)
    return x


def alias(self: Any, x: Tensor) -> Tensor:
    chosen = self.layers[0] if x.sum() == 0 else self.other
    return chosen.forward(x)


def by_getattr(self: Any, x: Tensor) -> Tensor:
    return getattr(self, "layers")[0].forward(x)  # noqa: B009 - the constant name is the test


def comprehension(self: Any, x: Tensor) -> Tensor:
    return sum(layer.forward(x) for layer in reversed(self.layers))


def in_checkpoint(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.layers[0].forward, x, use_reentrant=False)


def literal(self: Any, x: Tensor) -> Tensor:
    for layer in (self.layers[0], self.other):
        x = layer.forward(x)
    return x


@pytest.mark.parametrize(
    "forward",
    [
        loop,
        loop_with_index,
        index,
        index_known_only_at_run_time,
        sliced,
        alias,
        by_getattr,
        comprehension,
        in_checkpoint,
        literal,
    ],
)
def test_direct_forward_of_a_child_in_a_list_is_found(forward: Any) -> None:
    net = with_forward(forward)
    calls: list[int] = []
    net.layers[0].register_forward_hook(lambda *_: calls.append(1))
    net(torch.zeros(1, 2))
    found = find_bypass([net], net.layers[0])
    assert calls == [], "the source under test must not call the child"
    assert found is not None
    assert (found.where, found.kind, found.is_called) == ("Made.forward", "forward", False)
    assert found.text.endswith(".forward")


def test_child_that_the_source_only_calls_has_no_bypass() -> None:
    net = with_forward(sliced)
    assert find_bypass([net], net.layers[1]) is None


def test_loop_over_another_container_is_not_taken_for_this_one() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for layer in self.by_name.values():
            x = layer.forward(x)
        return x

    net = with_forward(forward)
    assert find_bypass([net], net.layers[0]) is None
    assert find_bypass([net], net.by_name["a"]) == Bypass(
        "Made.forward", "forward", "layer.forward", False
    )


def test_both_sides_of_a_branch_are_taken() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        chosen = self.fc
        if x.sum() > 0:
            x, chosen = x + 1, self.other
        return chosen.forward(x)

    net = with_forward(forward)
    assert find_bypass([net], net.fc) is not None
    assert find_bypass([net], net.other) is not None


def test_name_bound_at_the_end_of_a_loop_is_known_at_its_start() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        chosen = self.fc
        for _ in range(2):
            x = chosen.forward(x)
            chosen = self.other
        return x

    net = with_forward(forward)
    assert find_bypass([net], net.fc) is not None
    assert find_bypass([net], net.other) is not None


def test_child_of_a_module_dict_is_found() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for name, layer in self.by_name.items():
            x = layer(x) if name == "b" else x
        return self.by_name["a"].forward(x)

    net = with_forward(forward)
    assert find_bypass([net], net.by_name["a"]) == Bypass(
        "Made.forward", "forward", "self.by_name['a'].forward", True
    )
    assert find_bypass([net], net.by_name["b"]) is None


def test_methods_that_forward_uses_are_read() -> None:
    class Above(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.run(x)

        def run(self, x: Tensor) -> Tensor:
            return self.layers[0].forward(x)

        def unused(self, x: Tensor) -> Tensor:
            return self.other.forward(x)

    class Below(Above):
        def run(self, x: Tensor) -> Tensor:
            return super().run(self.fc.forward(x))

    net = Below()
    assert find_bypass([net], net.fc) == Bypass("Below.run", "forward", "self.fc.forward", False)
    assert find_bypass([net], net.layers[0]) == Bypass(
        "Above.run", "forward", "self.layers[0].forward", False
    )
    assert find_bypass([net], net.other) is None


def test_forward_that_another_library_wrapped_on_the_instance_is_read() -> None:
    net = with_forward(lambda self, x: x)
    inner = with_forward(index).forward
    net.forward = functools.update_wrapper(functools.partial(inner), inner)
    assert find_bypass([net], net.layers[0]) is not None


def test_forward_without_source_is_skipped() -> None:
    scope: dict[str, Any] = {}
    exec("def forward(self, x):\n    return self.fc.forward(x)", scope)
    net = with_forward(scope["forward"])
    assert find_bypass([net], net.fc) is None


def test_handing_the_child_to_a_function_counts_as_a_call() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = checkpoint(self.fc, x, use_reentrant=False)
        return F.linear(h, self.fc.weight) if isinstance(self.other, nn.Linear) else h

    net = with_forward(forward)
    found = find_bypass([net], net.fc)
    assert found == Bypass("Made.forward", "parameter", "self.fc.weight", True)
    assert find_bypass([net], net.other) is None


def test_use_of_a_parametrized_weight_is_found() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x @ self.fc.weight

    net = with_forward(forward)
    parametrize.register_parametrization(net.fc, "weight", nn.Identity())
    found = find_bypass([net], net.fc)
    assert found is not None
    assert found.text == "self.fc.weight"


def test_asking_a_weight_for_its_dtype_is_no_use() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x.to(self.fc.weight.dtype).view(self.fc.weight.shape)

    net = with_forward(forward)
    assert find_bypass([net], net.fc) is None
