"""What a sketch is for: it sees where numbers stand, and how far apart two tensors are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hookline.stats import Extras


@pytest.fixture(params=[(4096,), (32, 77), (8, 64, 48), (200_000,)], ids=str)
def base(request: pytest.FixtureRequest) -> Tensor:
    """Give activations of several sizes."""
    return torch.randn(request.param) * 2 + 0.3


def sketch(implementation, *tensors: Tensor) -> np.ndarray:
    """Give the sketches of tensors."""
    log = implementation.open()
    for tensor in tensors:
        log.add(tensor.to(implementation.device), Extras.SKETCH)
    return log.take().wait().sketches.astype(np.float64)


def test_same_numbers_in_another_order_have_another_sketch(implementation) -> None:
    x = torch.randn(64, 96)
    swapped = x.clone()
    swapped[[3, 40]] = swapped[[40, 3]]
    plain, rows, turned = sketch(implementation, x, swapped, x.t())
    norm = x.norm().item()
    apart = (x - swapped).norm().item() / norm
    assert 0.5 < np.linalg.norm(plain - rows) / norm / apart < 2
    assert np.linalg.norm(plain - turned) / norm > 0.5


def test_a_view_has_the_sketch_of_its_copy(implementation) -> None:
    x = torch.randn(40, 50)
    for view in (x.t(), x[:, 3:29], x[::2], x[:1].expand(7, 50), x.unfold(0, 5, 2)):
        got, expected = sketch(implementation, view, view.contiguous())
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * view.norm().item())


def test_sketches_are_linear(implementation, base: Tensor) -> None:
    other = torch.randn_like(base)
    first, second, both = sketch(implementation, base, other, 2 * base - other)
    np.testing.assert_allclose(
        2 * first - second, both, rtol=0, atol=1e-6 * (base.norm() + other.norm()).item()
    )


def perturb(x: Tensor, kind: str) -> Tensor:
    """Give a small change of one kind."""
    if kind == "noise":
        return torch.randn_like(x) * 1e-3
    if kind == "bias":
        return torch.full_like(x, 1e-3)
    if kind == "rank one":
        return (torch.randn(x.shape[:-1]).unsqueeze(-1) * torch.randn(x.shape[-1])) * 1e-3
    if kind == "scale":
        return x * 1e-3
    change = torch.zeros_like(x)
    change.view(-1)[: x.numel() // 3] = 1e-3
    return change


@pytest.mark.parametrize("kind", ["noise", "bias", "rank one", "scale", "a part"])
def test_distance_of_sketches_estimates_the_relative_error(
    implementation, base: Tensor, kind: str
) -> None:
    change = perturb(base, kind)
    first, second = sketch(implementation, base, base + change)
    estimate = np.linalg.norm(first - second) / base.norm().item()
    true = ((base + change) - base).norm().item() / base.norm().item()
    assert 0.5 < estimate / true < 2


def test_infinite_and_missing_numbers_count_as_zero(implementation) -> None:
    x = torch.randn(300)
    x[[5, 100, 250]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    got, expected = sketch(implementation, x, torch.nan_to_num(x, 0.0, 0.0, 0.0))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
