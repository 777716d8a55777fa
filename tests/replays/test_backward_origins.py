"""Which backward operation made the first non-finite gradient, and of which forward line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from failing_models import Applied, line_of, origin_of, run_once
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.replays import find_origin, keep_call

CASES: list[tuple[str, Callable[[Tensor], Tensor], str, str, str]] = [
    ("sqrt", lambda h: torch.sqrt(h * 0), "SqrtBackward0", "/sqrt", "sqrt at 0 has an infinite"),
    (
        "length",
        lambda h: (h * 0).pow(2).sum(-1).sqrt(),
        "SqrtBackward0",
        "/sqrt",
        "sqrt at 0 has an infinite slope (2 elements)",
    ),
    ("pow", lambda h: (h * 0) ** 0.5, "PowBackward0", "/pow", "pow at 0 with exponent 0.5"),
    ("acos", lambda h: torch.acos(h * 0 + 1), "AcosBackward0", "/acos", "acos at 1 or -1"),
    (
        "reciprocal",
        lambda h: 1e-20 / (h * 0 + 1e-25),
        "ReciprocalBackward0",
        "/div",
        "division by 1e-25: its slope passes the largest number",
    ),
    (
        "division",
        lambda h: torch.ones_like(h) / (h * 0 + 1e-30),
        "DivBackward0",
        "/div:input[1].grad",
        "division by 1e-30: its slope passes the largest number",
    ),
    (
        "where",
        lambda h: torch.where(h < 1e9, h, torch.sqrt(h * 0)),
        "SqrtBackward0",
        "/sqrt",
        "0 * inf is NaN",
    ),
]


@pytest.mark.parametrize(
    ("function", "node", "site", "why"), [one[1:] for one in CASES], ids=[one[0] for one in CASES]
)
def test_node_is_named_with_its_forward_operation(
    function: Callable[[Tensor], Tensor], node: str, site: str, why: str
) -> None:
    model = Applied(function)
    x = torch.randn(2, 4)
    origin = origin_of(model, x, backward=True)
    assert origin is not None
    assert (origin.operation, origin.is_backward, origin.cause) == (node, True, "operation")
    assert origin.site.startswith(site)
    assert why in origin.why
    assert origin.source.startswith("tests/replays/test_backward_origins.py:")
    assert origin.inputs[0]["name"] == "gradient"
    if origin.site.endswith(".grad"):
        with hl.capture(model, origin.site) as captured:
            output = model(x)
            output.backward(torch.ones_like(output))
        assert not torch.isfinite(captured[origin.site]).all()


def test_most_sites_are_those_of_the_gradient() -> None:
    sites = [origin_of(Applied(one[1]), torch.randn(2, 4), backward=True) for one in CASES]
    assert sum(one is not None and one.site.endswith(".grad") for one in sites) >= len(CASES) - 1


def test_forward_is_named_first() -> None:
    origin = origin_of(Applied(lambda h: h / (h - h)), torch.randn(2, 4), backward=True)
    assert origin is not None
    assert (origin.site, origin.is_backward) == ("/div", False)


def test_finite_backward_is_no_origin() -> None:
    assert origin_of(Applied(torch.tanh), torch.randn(2, 4), backward=True) is None


def test_slopes_that_torch_defines_are_no_origin() -> None:
    model = Applied(lambda h: (h * 0).norm(dim=-1) + torch.atan2(h * 0, h * 0).sum(-1))
    assert origin_of(model, torch.randn(2, 4), backward=True) is None


class Doubled(torch.autograd.Function):
    """Right forward, infinite backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad / 0


def test_autograd_function_is_named_by_its_backward() -> None:
    model = Applied(lambda h: Doubled.apply(h).tanh())  # marked
    origin = origin_of(model, torch.randn(2, 4), backward=True)
    assert origin is not None
    assert origin.operation == "DoubledBackward"
    assert origin.source.endswith(f":{line_of('tanh())  # ' + 'marked', __file__)}")


class Root(nn.Module):
    """A square root of what a layer gives, which may be 0."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Applied(lambda h: (h * 0).sqrt())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.reentrant is None:
            return self.inner(h)
        return checkpoint(self.inner, h, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_checkpointed_block_is_named(reentrant: bool | None) -> None:
    model = Root(reentrant=reentrant)
    call, _ = run_once(model, torch.randn(2, 4), backward=True)
    before = [one.grad.clone() for one in model.parameters()]
    origin = find_origin([call], backward=True)
    assert origin is not None
    assert origin.operation == "SqrtBackward0"
    assert origin.site == "inner/sqrt:input[0].grad"
    for parameter, grad in zip(model.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.isnan(), grad.isnan())
        assert torch.equal(parameter.grad.nan_to_num(), grad.nan_to_num())


def test_change_in_place_is_tied_to_its_operation() -> None:
    def function(h: Tensor) -> Tensor:
        h = h * 0
        h[:, 1:].sqrt_()
        return h

    origin = origin_of(Applied(function), torch.randn(2, 4), backward=True)
    assert origin is not None
    assert (origin.site, origin.operation) == ("/sqrt_", "CopySlices")
    assert origin.why.startswith("the backward of sqrt_ gave an infinite gradient")


def test_loss_of_the_model_itself_starts_with_one() -> None:
    class Lossy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.fc(x)
            return {"loss": (h * 0).abs().sum().sqrt(), "logits": h}

    model = Lossy()
    call = keep_call(model, (torch.randn(2, 4),), {})
    origin = find_origin([call], backward=True)
    assert origin is not None
    assert origin.site == "/sqrt:input[0].grad"


def test_gradient_that_comes_in_bad_is_not_the_models() -> None:
    model = Applied(torch.tanh)
    call, output = run_once(model, torch.randn(2, 4))
    call.note_gradients({(): torch.full_like(output, float("nan"))})
    assert find_origin([call], backward=True) is None


def test_unknown_gradient_is_said() -> None:
    call, _ = run_once(Applied(torch.tanh), torch.randn(2, 4))
    origin = find_origin([call], backward=True)
    assert origin is not None
    assert origin.cause == "not reproduced"
    assert origin.why == "no gradient of its outputs is known"


def test_latest_call_is_asked_first() -> None:
    """Gradients come to the last call first; the first call has only passed them on."""
    first, second = Applied(torch.tanh), Applied(lambda h: (h * 0).sqrt())
    x = torch.randn(2, 4)
    one = keep_call(first, (x,), {}, prefix="first.")
    middle = first(x)
    two = keep_call(second, (middle,), {}, prefix="second.")
    output = second(middle)
    middle.retain_grad()
    output.sum().backward()
    assert middle.grad is not None
    assert middle.grad.isnan().any()
    one.note_gradients({(): middle.grad})
    two.note_gradients({(): torch.ones_like(output)})
    origin = find_origin([one, two], backward=True)
    assert origin is not None
    assert origin.site == "second/sqrt:input[0].grad"
