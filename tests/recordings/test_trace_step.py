"""`trace_step`: which sites a step has, what they hold, and that it leaves no trace."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Twice
from torch import Tensor, nn
from traced_models import Small, assert_same, find, of_kind, snapshot, square, tokens

from hookline.diffs.measuring import relative_error
from hookline.recordings import LiveTrace, trace_step
from hookline.stats.rows import MEAN


@pytest.fixture
def model() -> Small:
    return Small()


def trace_of(model: nn.Module, **given: Any) -> LiveTrace:
    return trace_step(model, (tokens(),), loss=square, **given)


def test_values_come_in_the_order_of_execution_with_their_callers(model: Small) -> None:
    trace = trace_of(model)
    own = [
        (site.address, site.caller)
        for site in trace.sites
        if site.kind == "value" and site.module.startswith("blocks.1") and site.same_as is None
    ]
    assert own == [
        ("blocks.1.ln1:output", "blocks.1"),
        ("blocks.1.mix:output", "blocks.1"),
        ("blocks.1.ln2:input.input", "blocks.1"),
        ("blocks.1.ln2:output", "blocks.1"),
        ("blocks.1.mlp.0:output", "blocks.1.mlp"),
        ("blocks.1.mlp.1:output", "blocks.1.mlp"),
        ("blocks.1.mlp.2:output", "blocks.1.mlp"),
        ("blocks.1:output", ""),
    ]
    assert find(trace, ":input.tokens").caller is None
    assert [site.id for site in trace.sites] == list(range(len(trace.sites)))


def test_one_tensor_at_many_borders_is_measured_once(model: Small) -> None:
    trace = trace_of(model)
    first = find(trace, "embed:output").id
    assert find(trace, "blocks.0:input.x").same_as == first
    assert find(trace, "blocks.0.ln1:input.input").same_as == first
    assert find(trace, ":output").same_as == find(trace, "head:output").id
    same = find(trace, "blocks.0:input.x").id
    rows = trace.measurements(0).rows
    assert rows[same].tolist() == rows[first].tolist()
    assert trace.tensor(same).equal(trace.tensor(first))


def test_a_value_changed_in_place_is_another(model: Small) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y.add_(1)
            return self.b(y)

    trace = trace_step(Changing(), (torch.randn(2, 3),), loss=square)
    assert find(trace, "b:input.input").same_as is None
    assert find(trace, "b:output").same_as == find(trace, "b:input.input").id


def test_memory_that_was_freed_and_used_again_is_not_mistaken(model: Small) -> None:
    """Without grad nothing holds the values, so the allocator gives the same memory again."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) + 1
            return x

    with torch.no_grad():
        trace = trace_step(Chain(), (torch.randn(2, 4),), keep_tensors=False)
    outputs = [site for site in trace.sites if site.port == "output" and site.module]
    assert all(site.same_as is None for site in outputs)
    assert {site.requires_grad for site in trace.sites if site.kind == "value"} == {None}


def test_a_detached_branch_shows_as_no_gradient_wanted(model: Small) -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).detach())

    trace = trace_step(Detached(), (torch.randn(2, 3),), loss=square)
    site = find(trace, "b:input.input")
    assert site.same_as == find(trace, "a:output").id
    assert (site.requires_grad, find(trace, "a:output").requires_grad) == (False, True)
    assert of_kind(trace, "gradient") == ["b:output.grad"]
    assert of_kind(trace, "parameter gradient") == ["b.weight:grad", "b.bias:grad"]


def test_visits_are_counted_within_the_step() -> None:
    trace = trace_step(Twice(), (torch.randn(2, 3),), loss=square)
    sites = [site for site in trace.sites if site.address == "fc:output"]
    assert [site.visit for site in sites] == [0, 1]
    grads = [site for site in trace.sites if site.address == "fc:output.grad"]
    assert [site.visit for site in grads] == [1, 0]
    assert [site.of for site in grads] == [sites[1].id, sites[0].id]


def test_gradients_are_those_of_autograd(model: Small) -> None:
    """Torch itself is the oracle: retain_grad on the values, and the parts that add up."""
    trace = trace_of(model)
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        kept[names[module]] = output

    names = {one: name for name, one in model.named_modules()}
    handles = [one.register_forward_hook(keep) for one in names if one is not model]
    torch.manual_seed(0)
    square(model(tokens())).backward()
    for handle in handles:
        handle.remove()
    checked = 0
    for name, value in kept.items():
        for site in trace.sites:
            if site.address == f"{name}:output.grad":
                assert site.shape == tuple(value.shape)
                assert relative_error(value.grad, trace.tensor(site.id)) < 1e-6
                checked += 1
    assert checked >= 14
    total = trace.tensor(find(trace, "blocks.0:output.grad").id)
    part = trace.tensor(find(trace, "blocks.1:input.x.grad").id)
    assert relative_error(total, part) == 0  # its only consumer


def test_parts_of_a_gradient_are_told_apart(model: Small) -> None:
    """The residual stream goes to ln2 and past it: ln2's part is not all."""
    trace = trace_of(model)
    part = find(trace, "blocks.0.ln2:input.input.grad", is_part=True)
    whole = find(trace, "blocks.0.ln2:input.input.grad", is_part=False)
    assert part.of == whole.of == find(trace, "blocks.0.ln2:input.input").id
    assert part.id < whole.id
    past = trace.tensor(find(trace, "blocks.0:output.grad").id)
    assert relative_error(trace.tensor(whole.id), trace.tensor(part.id) + past) < 1e-6


def test_without_taps_only_totals_are_heard(model: Small) -> None:
    trace = trace_of(model, taps=False)
    assert not any(site.is_part for site in trace.sites)
    assert find(trace, "blocks.0.ln2:input.input.grad").requires_grad is None


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_checkpointing_has_the_sites_of_the_plain_model(way: str) -> None:
    torch.manual_seed(0)
    plain = Small()
    other = copy.deepcopy(plain)
    other.way = way
    one, two = trace_of(plain, taps=False), trace_of(other, taps=False)
    assert of_kind(one, "value") == of_kind(two, "value")
    assert sorted(of_kind(one, "gradient")) == sorted(of_kind(two, "gradient"))
    for site in one.sites:
        if site.kind == "gradient":
            same = find(two, site.address)
            assert relative_error(one.tensor(site.id), two.tensor(same.id)) < 1e-6


def test_parameters_buffers_and_updates_are_there(model: Small) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    before = model.norm.running_mean.clone()
    trace = trace_of(model, optimizer=make)
    assert "head.weight" not in of_kind(trace, "parameter")
    assert trace.facts.ties == (("embed.weight", "head.weight"),)
    grad = trace.tensor(find(trace, "embed.weight:grad").id)
    update = find(trace, "embed.weight:update")
    assert update.of == find(trace, "embed.weight").id
    assert torch.allclose(trace.tensor(update.id), -0.5 * grad, rtol=1e-4, atol=1e-8)
    old = find(trace, "norm.running_mean", visit=0)
    new = find(trace, "norm.running_mean", visit=1)
    assert new.more == {"after": True}
    assert trace.tensor(old.id).equal(before)
    assert not trace.tensor(new.id).equal(before)


def test_the_model_is_afterwards_what_it_was() -> None:
    model = Small(dropout=0.5)
    square(model(tokens())).backward()
    model.blocks[0].eval()
    before = snapshot(model)
    for optimizer in (None, torch.optim.AdamW):
        trace_of(model, optimizer=optimizer)
        assert_same(before, snapshot(model))
    with pytest.raises(ZeroDivisionError):
        trace_step(model, (tokens(),), loss=lambda out: 1 / 0)
    with pytest.raises(IndexError):
        trace_step(model, (tokens() + 100,))
    assert_same(before, snapshot(model))


def test_an_argument_changed_in_place_is_a_copy() -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(0)

    x = torch.ones(3)
    trace = trace_step(Changing(), (x,))
    assert x.tolist() == [1, 1, 1]
    assert trace.measurements(0).rows[0, MEAN] == 1
    assert find(trace, ":output").same_as is None


def test_two_traces_of_one_seed_are_the_same_and_of_another_not() -> None:
    model = Small(dropout=0.5)
    one, two, three = (trace_of(model, seed=seed) for seed in (1, 1, 2))
    assert one.loss == two.loss != three.loss
    rows = [trace.measurements(0).rows for trace in (one, two)]
    assert np.array_equal(*rows, equal_nan=True)
    assert [site.address for site in one.sites] == [site.address for site in two.sites]


def test_an_exception_inside_the_model_does_not_confuse_callers() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Sequential(Failing()), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ValueError):
                self.bad(x)
            return self.good(x)

    trace = trace_step(Trying(), (torch.randn(2, 3),), loss=square)
    assert find(trace, "bad.0:input.x").caller == "bad"
    assert find(trace, "good:output").caller == ""


def test_a_second_backward_is_another_arrival() -> None:
    def twice(output: Tensor) -> Tensor:
        square(output).backward(retain_graph=True)
        return square(output)

    trace = trace_step(nn.Linear(3, 3), (torch.randn(2, 3),), loss=twice)
    grads = [site for site in trace.sites if site.address == ":output.grad"]
    assert [site.more.get("arrival", 0) for site in grads] == [0, 1]
    assert trace.tensor(grads[0].id).equal(trace.tensor(grads[1].id))


def test_nested_arguments_and_outputs_have_their_leaves() -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor, *, extra: dict[str, Any]) -> dict[str, Any]:
            return {"sum": x + extra["y"][0], "same": x, "flag": True}

    x = torch.randn(2)
    trace = trace_step(Nested(), (x,), {"extra": {"y": [x, 3]}}, loss=lambda out: out["sum"].sum())
    assert of_kind(trace, "value") == [
        ":input.x",
        ":input.extra.y[0]",
        ":output.sum",
        ":output.same",
    ]
    assert find(trace, ":input.extra.y[0]").same_as == find(trace, ":input.x").id
    assert find(trace, ":output.same").same_as == find(trace, ":input.x").id


def test_of_a_model_that_runs_no_hooks_the_ends_are_traced() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    plain = trace_step(model, (torch.ones(2, 3),), loss=square)
    closed = torch.jit.script(model)
    trace = trace_step(closed, (torch.ones(2, 3),), loss=square)
    assert [site.port for site in trace.sites if site.kind == "value"] == ["input", "output"]
    assert of_kind(trace, "gradient") == [":output.grad"]
    assert of_kind(trace, "parameter gradient") == of_kind(plain, "parameter gradient")
    assert trace.loss == pytest.approx(plain.loss)
    assert "only the ends of the model are traced" in trace.notes[0]


def test_tensors_beyond_the_room_are_not_kept_and_that_is_said(model: Small) -> None:
    trace = trace_of(model, most_bytes=5000)
    assert 0 < trace.kept_bytes <= 5000
    assert trace.notes == ["not all tensors were kept: there was no room for the larger ones"]
    assert trace_of(model, keep_tensors=False).kept_bytes == 0


@pytest.mark.parametrize("loss", [lambda out: out, lambda out: 3.0], ids=["many", "no tensor"])
def test_a_loss_that_is_no_number_is_refused(loss: Any) -> None:
    with pytest.raises(ValueError, match="it takes the output and gives a tensor of one number"):
        trace_step(nn.Linear(3, 3), (torch.ones(2, 3),), loss=loss)


def test_a_loss_without_parameters_gives_no_gradients() -> None:
    trace = trace_step(nn.ReLU(), (torch.ones(2, 3),), loss=square)
    assert of_kind(trace, "gradient") == []
    assert trace.notes == ["there are no gradients: the loss does not depend on a parameter"]


def test_hooks_of_others_see_the_step_and_are_named(model: Small) -> None:
    seen: list[int] = []

    def watching(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(1)

    model.head.register_forward_hook(watching)
    model.embed.weight.register_hook(lambda grad: grad * 2)
    trace = trace_of(model)
    assert seen == [1]
    assert trace.facts.modules["head"].config["hooks"] == "watching, weight: <lambda>"


def test_a_view_that_is_changed_in_place_is_said_to_have_no_gradient() -> None:
    class Left(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2]

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.left = nn.Linear(4, 4), Left()

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return self.left(y).mul_(2)

    trace = trace_step(Changing(), (torch.randn(2, 4),), loss=square, taps=False)
    assert "left:output.grad" not in of_kind(trace, "gradient")
    assert ":output.grad" in of_kind(trace, "gradient")
    assert [note.partition(":")[0] for note in trace.notes] == ["`left"]
