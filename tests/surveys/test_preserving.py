"""The forward that `sites` observes leaves nothing behind: torch's own state is the oracle."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import Tensor, nn

from hookline.hooks.inventory import inventory
from hookline.surveys.listing import sites


class Net(nn.Module):
    """Batch norm and dropout, whose forward writes buffers and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout()

    def forward(self, x: Tensor, *, fail: bool = False) -> Tensor:
        y = self.drop(self.norm(self.fc1(x)))
        if fail:
            raise RuntimeError("failed")
        return y


@pytest.fixture
def net() -> Net:
    return Net()


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().numpy().tobytes()


class Untouched:
    """Remember all of a model and of the random states, and check that it is still so."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = [(t, t.detach().clone(), t._version) for t in self._held()]
        self.attributes = [dict(vars(module)) for module in model.modules()]
        self.hooks = inventory(model).rows
        self.torch = torch.get_rng_state()
        self.python = random.getstate()
        self.numpy = numpy.random.get_state()[1].copy()

    def _held(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def check(self) -> None:
        for now, (tensor, copy, version) in zip(self._held(), self.tensors, strict=True):
            assert now is tensor
            assert bits(now) == bits(copy)
            assert now._version == version
        for own, module in zip(self.attributes, self.model.modules(), strict=True):
            assert own.keys() == vars(module).keys()
            assert all(value is vars(module)[name] for name, value in own.items())
        assert inventory(self.model).rows == self.hooks
        assert torch.equal(self.torch, torch.get_rng_state())
        assert self.python == random.getstate()
        assert numpy.array_equal(self.numpy, numpy.random.get_state()[1])


def test_observed_forward_leaves_no_trace(net: Net) -> None:
    before = Untouched(net)
    sites(net, example=torch.randn(5, 3, generator=torch.Generator().manual_seed(1)))
    before.check()


def test_forward_that_raises_leaves_no_trace_and_a_note(net: Net) -> None:
    before = Untouched(net)
    with pytest.raises(RuntimeError, match="failed") as caught:
        sites(net, example={"x": torch.ones(2, 3), "fail": True})
    assert caught.value.__notes__ == [
        "in the forward that hl.sites ran with `example`; nothing is left of it"
    ]
    before.check()


def test_hooks_that_were_there_stay(net: Net) -> None:
    seen = []
    handle = net.fc1.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    before = Untouched(net)
    sites(net, example=torch.ones(2, 3))
    before.check()
    assert seen == [False]
    handle.remove()


class Stateful(nn.Module):
    """Change buffers in every way a forward can."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.tensor([float("nan"), -0.0]))
        self.register_buffer("exchanged", torch.zeros(2))
        self.register_buffer("grown", torch.zeros(1))
        self.register_buffer("filled", None)
        self.register_buffer("resized", torch.ones(2))
        self.register_buffer("expanded", torch.ones(1, 1).expand(3, 4))
        self.length = 1

    def forward(self, x: Tensor) -> Tensor:
        self.written.zero_()
        self.exchanged = self.exchanged + 1
        self.grown, self.length = torch.zeros(9), 9
        self.filled = torch.ones(1)
        self.resized.data = torch.zeros(5)
        self.last = x
        self.register_buffer("added", torch.ones(1))
        random.random()
        numpy.random.rand()
        return x + torch.rand(1)


def test_buffers_and_attributes_are_put_back_however_they_changed() -> None:
    model = Stateful()
    before = Untouched(model)
    sites(model, example=torch.ones(1))
    before.check()
    assert model.filled is None
    assert model.length == 1
    assert set(model._buffers) == {
        "written",
        "exchanged",
        "grown",
        "filled",
        "resized",
        "expanded",
    }


def test_backward_of_an_earlier_forward_still_runs(net: Net) -> None:
    x = torch.randn(5, 3)
    net.drop.p = 0.0
    net.eval()  # in eval, the graph holds the running statistics
    loss = net(x).sum()
    net.train()
    sites(net, example=x)
    loss.backward()
    assert net.fc1.weight.grad is not None


def test_autocast_does_not_keep_casts_made_without_grad() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        sites(model, example=torch.ones(1, 3))
        model(torch.ones(1, 3)).sum().backward()
    assert model[0].weight.grad is not None


def test_example_in_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.BatchNorm1d(3))
        sites(model, example=torch.ones(2, 3))
        assert int(model[0].num_batches_tracked) == 0


@pytest.mark.gpu
def test_cuda_random_state_is_put_back() -> None:
    model = nn.Sequential(nn.Dropout()).cuda()
    torch.rand(1, device="cuda")
    before = torch.cuda.get_rng_state_all()
    table = sites(model, "0", example=torch.ones(9, device="cuda"))
    assert all(map(torch.equal, before, torch.cuda.get_rng_state_all()))
    assert [row["device"] for row in table] == ["cuda:0"]
