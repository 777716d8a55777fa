"""What is kept of a call, and what that costs."""

from __future__ import annotations

import gc
import subprocess
import sys
import timeit
import weakref

import numpy as np
import pytest
import torch
from failing_models import Applied, Blocks
from torch import Tensor, nn

from hookline.replays import find_origin, keep_call
from hookline.replays.randomness import put_states, take_states


class Block(nn.Module):
    """As many modules as a block of a GPT has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)})
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_keeping_a_call_is_cheap() -> None:
    """In a loop of nothing else: some 30 us on an idle core; the limit leaves room for others."""
    model = nn.Sequential(nn.Embedding(9, 8), *[Block() for _ in range(12)], nn.Linear(8, 9))
    assert len(list(model.modules())) > 120
    x, y = torch.randint(0, 9, (2, 4)), torch.randn(2, 4)
    keep_call(model, (x,), {"targets": y})
    repeats = timeit.repeat(lambda: keep_call(model, (x,), {"targets": y}), number=50, repeat=9)
    assert min(repeats) / 50 < 150e-6


def test_kept_call_copies_no_tensor() -> None:
    model = Applied(torch.tanh)
    x, mask = torch.randn(2, 4), torch.randn(2, 4)
    call = keep_call(model, (x,), {"batch": {"mask": [mask]}})
    assert call.args[0] is x
    assert call.kwargs["batch"]["mask"][0] is mask


def test_container_that_is_changed_later_is_kept_as_it_was() -> None:
    class Popping(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch.pop("x") / 0

    batch = {"x": torch.randn(2)}
    model = Popping()
    call = keep_call(model, (batch,), {})
    model(batch)
    assert batch == {}
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert origin.site == "/div"


def test_model_is_let_go() -> None:
    model = Blocks()
    gone = weakref.ref(model)
    call = keep_call(model, (torch.randn(2),), {})
    del model, call
    gc.collect()
    assert gone() is None


def test_exchanged_module_is_found_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Applied(torch.tanh))
    x = torch.randn(2, 4)
    keep_call(model, (x,), {})
    model[1] = Applied(lambda h: h / 0)
    origin = find_origin([keep_call(model, (x,), {})], backward=False)
    assert origin is not None
    assert origin.site == "1/div"


def test_random_states_come_back() -> None:
    import random

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(1)), random.random(), float(np.random.rand())

    states = take_states()
    first = draw()
    assert draw() != first
    put_states(states)
    assert draw() == first
    states = take_states(in_full=True)
    again = draw()
    put_states(states)
    assert draw() == again


def test_numpy_state_is_read_again_when_it_changed() -> None:
    np.random.seed(0)
    first = take_states().numpy
    assert take_states().numpy is first
    np.random.rand()
    second = take_states().numpy
    assert second is not first
    assert second[2] != first[2]


def test_wrapper_is_looked_through() -> None:
    inner = Applied(lambda h: h / 0)
    wrapped = torch.optim.swa_utils.AveragedModel(inner)
    call = keep_call(wrapped, (torch.randn(2, 4),), {})
    assert call.module is wrapped.module
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert origin.site == "/div"


@pytest.mark.gpu
def test_replay_on_a_gpu_draws_the_same_and_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), Applied(lambda h: h)).cuda()
    model[2].fc = nn.Linear(64, 1).cuda()
    model[2].function = lambda h: h / (h - h)
    call = keep_call(model, (torch.randn(2, 4, device="cuda"),), {})
    model(*call.args)
    state = torch.cuda.get_rng_state()
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert origin.site == "2/div"
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_replay_does_not_load_the_compiler() -> None:
    script = """
import sys
import torch
from hookline.replays import find_origin, keep_call
model = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4), torch.nn.ReLU())
tokens = torch.arange(3)
torch.nn.init.constant_(model[1].bias, float("nan"))
call = keep_call(model, (tokens,), {})
model(tokens)
assert find_origin([call], backward=False).site == "1.bias"
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=120)
