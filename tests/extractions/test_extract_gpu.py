"""Extraction on a GPU: the same bits, memory that runs out, batches that grow, a lost device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from extracted_models import Reader, texts
from torch import Tensor, nn

import hookline as hl

pytestmark = pytest.mark.gpu


def test_the_same_bits_in_any_size_of_batches(tmp_path: Path) -> None:
    model, data = Reader().cuda(), texts(100)
    found = []
    for size in (1, 7, 64):
        out = tmp_path / str(size)
        made = hl.extract(model, data, "block", out, deterministic=True, batch_size=size)
        found.append(made.open()["block"][:])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    plain = hl.extract(model, data, "block", tmp_path / "plain", batch_size=64).open()["block"][:]
    for one, exact in zip(plain, found[0], strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-2, atol=1e-2)


def test_a_device_moves_the_model(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 3), torch.randn(9, 4)
    expected = model(x).detach()
    result = hl.extract(model, x, "", tmp_path / "out", device="cuda")
    assert model.weight.is_cuda
    torch.testing.assert_close(result.open()[":output"][:], expected, rtol=1e-2, atol=1e-2)


class Large(nn.Module):
    """Needs 6 GB for each sample, for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4096, 8)
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        wide = x[:, :, None].expand(-1, -1, 400_000).contiguous()
        out: Tensor = self.out(wide[:, :, 0])
        return out


def test_a_batch_that_does_not_fit_is_divided(tmp_path: Path) -> None:
    model, x = Large().cuda(), torch.randn(60, 4096)
    result = hl.extract(model, x, "out", tmp_path / "out", batch_size=60)
    expected = model.out(x.cuda()).cpu().detach()
    torch.testing.assert_close(result.open()["out"][:], expected, rtol=1e-2, atol=1e-2)
    assert model.sizes[0] == 60
    assert model.sizes[-1] < 30
    assert not result.failed


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Conv2d(3, 3, 3, padding=1) for _ in range(8)])
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        out: Tensor = self.body(x)
        return out


def test_batches_grow_while_that_is_faster(tmp_path: Path) -> None:
    model, images = Image().cuda(), torch.randn(2000, 3, 32, 32)
    store = hl.extract(model, images, "body", tmp_path / "out", reduce="spatial").open()
    assert len(store) == 2000
    assert max(model.sizes) > model.sizes[0]
    expected = model.body(images[:8].cuda()).mean((2, 3)).cpu().detach()
    torch.testing.assert_close(store["body"][:8], expected, rtol=1e-3, atol=1e-3)


_LOST = """
import sys, torch, hookline as hl
model = torch.nn.Embedding(10, 4).cuda()
hl.extract(torch.nn.Sequential(model), torch.tensor([[1], [2], [99], [3]]), "0", sys.argv[1],
           on_error="skip")
"""


def test_a_device_that_is_lost_ends_it(tmp_path: Path) -> None:
    """Nothing works on it any more: the samples after the bad one are not to blame."""
    command = [sys.executable, "-c", _LOST, str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    assert "device-side assert" in ran.stderr
