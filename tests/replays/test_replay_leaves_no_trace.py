"""A replay leaves the model, its gradients, the random states and everything else as they were."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from failing_models import Applied, Blocks, Counting, origin_of, run_once
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import hookline as hl
from hookline.replays import find_origin, keep_call


class Everything(nn.Module):
    """State of every kind that a forward may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.spectral = spectral_norm(nn.Linear(4, 4))
        self.weighed = weight_norm(nn.Linear(4, 4))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.fc.weight
        self.calls = 0
        self.latest: Tensor | None = None
        self.running = torch.zeros(4)
        self.history: list[Any] = []
        self.table: dict[str, Any] = {"list": [], "tensor": torch.zeros(2)}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.drop(self.norm(self.fc(x)))
        self.running += h.detach().mean(0)
        self.history.append(h.detach())
        self.table["list"].append(self.calls)
        self.table["tensor"] += 1
        self.latest = h
        h = self.weighed(self.spectral(self.tied(h))) + self.lstm(h[:, None])[0][:, 0]
        noise = random.random() + float(np.random.rand()) + torch.rand(1)
        if self.calls == 3:
            h = h / (h - h)
        return (h * noise).sum()


def freeze(value: Any) -> Any:
    """Copy what a module holds, to compare it bit for bit later."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: freeze(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [freeze(one) for one in value]
    return value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one is other or one == other)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Take everything that a replay could change, by value."""
    state: dict[str, Any] = {
        "grads": [freeze(one.grad) for one in model.parameters()],
        "values": [freeze(one) for one in model.parameters()],
        "versions": [one._version for one in model.parameters()],
        "random": [torch.get_rng_state(), random.getstate(), freeze(np.random.get_state()[2:])],
        "numpy": np.random.get_state()[1].tolist(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad mode": torch.is_grad_enabled(),
    }
    for name, module in model.named_modules():
        own = vars(module)
        state[name] = {key: freeze(value) for key, value in own.items() if key[0] != "_"}
        state[f"{name} keys"] = list(own)
        state[f"{name} buffers"] = freeze(own["_buffers"])
        state[f"{name} hooks"] = [list(own["_forward_hooks"]), list(own["_forward_pre_hooks"])]
    return state


def identities(model: nn.Module) -> list[int]:
    held = [vars(module) for module in model.modules()]
    return [
        id(value)
        for own in held
        for value in [*own.values(), *own["_parameters"].values(), *own["_buffers"].values()]
    ] + [id(one.grad) for one in model.parameters()]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    call = keep_call(model, (torch.randn(3, 4),), {})
    loss = model(*call.args)
    optimizer.zero_grad()
    loss.backward()
    call.note_gradients({(): torch.ones(())})
    return call


@pytest.mark.parametrize("backward", [False, True])
def test_everything_is_as_it_was(backward: bool) -> None:
    model = Everything()
    optimizer = torch.optim.Adam(model.parameters())
    calls = []
    for number in range(4):
        calls = [step(model, optimizer)]
        before, objects = state_of(model), identities(model)
        origin = find_origin(calls, backward=backward)
        assert same(state_of(model), before)
        assert identities(model) == objects
        if number == 2:
            assert origin is not None
            assert origin.site == "/div"
        else:
            assert origin is None
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.nan_to_num_()
        optimizer.step()


def test_training_goes_on_bit_for_bit() -> None:
    model = Everything()
    model.calls = 100  # nothing fails
    twin = copy.deepcopy(model)
    results = []
    for each, is_replayed in ((model, True), (twin, False)):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        optimizer = torch.optim.AdamW(each.parameters())
        for _ in range(4):
            call = step(each, optimizer)
            if is_replayed:
                assert find_origin([call], backward=True) is None
                assert find_origin([call], backward=False) is None
            optimizer.step()
        results.append({**state_of(each), "versions": None})
    # The order of attributes and the keys of hooks are those of a copy, not of the replay.
    kept = [key for key in results[0] if not key.endswith((" keys", " hooks"))]
    assert [key for key in kept if not same(results[0][key], results[1][key])] == []


def test_counter_is_as_it_was_at_the_call() -> None:
    model = Counting()
    x = torch.randn(2, 4)
    calls = [run_once(model, x)[0] for _ in range(5)]
    assert [find_origin([call], backward=False) is not None for call in calls] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert (model.calls, len(model.history), float(model.seen)) == (5, 5, 5.0)


def test_training_flags_are_as_they_were_at_the_call() -> None:
    model = nn.Sequential(nn.Dropout(1.0), Applied(lambda h: h / h.abs().sum()))
    with torch.no_grad():
        model[1].fc.bias.zero_()
    call, output = run_once(model, torch.randn(2, 4))
    assert output.isnan().all()
    model.eval()
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert origin.site == "1/div"
    assert not any(module.training for module in model.modules())


def test_users_hooks_run_and_hooklines_hear_nothing() -> None:
    model = Blocks()
    seen: list[str] = []
    model.head.register_forward_hook(lambda *_: seen.append("user"))
    heard: list[Any] = []
    handle = hl.hook(model, "blocks.*.attn:output", lambda value, at: heard.append(at.path))
    x = torch.randn(2, 3, 4)
    masks = [torch.zeros(2, 3, 3, dtype=torch.bool) for _ in range(3)]
    masks[1][:] = True
    with hl.capture(model, "blocks.0.attn@scores", "head") as captured:
        call, _ = run_once(model, x, masks)
        assert len(seen) == 1
        origin = find_origin([call], backward=False)
        assert origin is not None
        assert origin.site == "blocks.1.attn/softmax"
        assert len(seen) == 2
        assert len(captured.calls) == 1
        assert heard == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
        model(x, masks)  # what listens goes on listening
        assert len(captured.calls) == 2
        assert len(heard) == 6
    handle.remove()
    assert len(seen) == 3


def test_edits_are_part_of_what_ran() -> None:
    model = Applied(lambda h: h / 2)
    x = torch.randn(2, 4)
    with hl.edit(model, {"fc": hl.scale(float("nan"))}):
        call, output = run_once(model, x)
        assert output.isnan().all()
        origin = find_origin([call], backward=False)
    assert origin is not None
    assert find_origin([call], backward=False) is None


def test_input_is_not_written_to() -> None:
    class Careless(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return x / 0

    x = torch.zeros(2, 4)
    call = keep_call(Careless(), (x,), {})
    version = x._version
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert origin.site == "/div"
    assert (x._version, float(x.sum())) == (version, 0.0)
    assert origin.evidence == ()


def test_changed_input_is_said() -> None:
    model = Applied(lambda h: h / 0)
    x = torch.randn(2, 4)
    call, _ = run_once(model, x)
    x.zero_()
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert origin.evidence == ("the argument `x` was changed in place since the call",)


def test_changed_input_that_shows_nothing_is_not_reproduced() -> None:
    model = Applied(torch.tanh)
    x = torch.full((2, 4), float("nan"))
    call, _ = run_once(model, x)
    x.zero_()
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert origin.cause == "not reproduced"
    assert origin.why == "the argument `x` was changed in place since the call"


def test_changed_parameters_are_said() -> None:
    model = Applied(torch.tanh)
    call, _ = run_once(model, torch.randn(2, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert (origin.cause, origin.why) == (
        "not reproduced",
        "parameters were changed since the call",
    )


def test_writing_to_parameters_is_refused() -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.fc.weight.data.mul_(0.5)
            return self.fc(x) / 0

    model = Clipped()
    call, _ = run_once(model, torch.randn(2, 4))
    before = model.fc.weight.detach().clone()
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert origin.cause == "not reproduced"
    assert origin.why == "its forward writes to its own parameters (`mul_`)"
    assert torch.equal(model.fc.weight, before)


def test_error_of_the_users_code_is_said_and_not_raised() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.batches = iter([1])

        def forward(self, x: Tensor) -> Tensor:
            next(self.batches)
            return self.fc(x)

    model = Once()
    call, _ = run_once(model, torch.randn(2, 4))
    before = identities(model)
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert origin.cause == "not reproduced"
    assert origin.why.startswith("the call could not be run again: StopIteration")
    assert identities(model) == before


def test_random_mode_of_user_is_left() -> None:
    model = Counting()
    with torch.no_grad():
        call, _ = run_once(model, torch.randn(2, 4))
    assert find_origin([call], backward=False) is None
    assert torch.is_grad_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert find_origin([call], backward=False) is None
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_forward_that_takes_gradients_itself_is_run_again() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.fc(x).tanh().sum(), x, create_graph=True)
            return (slope * 0 - 1).sqrt()

    origin = origin_of(Penalty(), torch.randn(2, 4))
    assert origin is not None
    assert origin.site == "/sqrt"


def test_talking_to_other_ranks_is_refused() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Reducing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            torch.distributed.all_reduce(h.detach())
            return h / 0

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        origin = origin_of(Reducing(), torch.randn(2, 4))
    finally:
        torch.distributed.destroy_process_group()
    assert origin is not None
    assert origin.cause == "not reproduced"
    assert origin.why == "it talks to other ranks, which do not run the call again"
