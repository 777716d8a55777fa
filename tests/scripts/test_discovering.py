"""Which models a script trains, found from its calls; and that torch is as before afterwards."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookline.scripts import discovering
from hookline.scripts.discovering import Discovery, Found
from hookline.scripts.owners import Census, find_name, path_within, unwrap
from hookline.scripts.tapping import CallTap


class Heard:
    """What a discovery told, and the discovery itself on the tap."""

    def __init__(self) -> None:
        self.models: list[Found] = []
        self.parts: list[str] = []
        self.calls = 0
        self.returns = 0
        self.notes: list[str] = []
        self.discovery = Discovery(
            on_model=self.models.append,
            on_part=lambda module, args, kwargs, path: self.parts.append(path),
            on_call=self._call,
            on_return=self._return,
            note=self.notes.append,
        )
        self.tap = CallTap(self.discovery)

    def _call(self) -> None:
        self.calls += 1

    def _return(self, result: Any) -> None:
        self.returns += 1

    @property
    def names(self) -> list[str]:
        return [found.name for found in self.models]


@pytest.fixture
def heard(only_new_objects: None) -> Iterator[Heard]:
    """Listen to calls, where nothing is seen of the models of other tests."""
    own, own_compile = nn.Module.__call__, torch.compile
    found = Heard()
    found.tap.start()
    yield found
    found.tap.stop()
    assert nn.Module.__call__ is own
    assert torch.compile is own_compile


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for model in models for one in model.parameters()], lr=0.1)


X = torch.ones(2, 3)


def test_single_model_is_found_before_it_runs(heard: Heard) -> None:
    model = make()
    optimizer = sgd(model)
    at_forward: list[int] = []
    model[0].register_forward_pre_hook(lambda module, args: at_forward.append(len(heard.models)))
    for _ in range(3):
        model(X).sum().backward()
        optimizer.step()
    assert at_forward[0] == 1
    assert [(found.model, found.name) for found in heard.models] == [(model, "")]
    assert (heard.calls, heard.returns, heard.parts) == (3, 3, [])


def test_calls_without_grad_are_not_met(heard: Heard) -> None:
    model = make()
    with torch.no_grad():
        model(X)
    with torch.inference_mode():
        model(X)
    nn.MSELoss()(torch.ones(1, requires_grad=True), torch.ones(1))
    frozen = make().requires_grad_(False)
    frozen(X)
    assert heard.models == []
    model(X)
    assert heard.models[0].model is model


def test_copy_that_follows_is_no_model(heard: Heard) -> None:
    """The copy of an exponential mean, also where it is called with grad, as a teacher is."""
    model = make()
    optimizer = sgd(model)
    mean = copy.deepcopy(model)
    for _ in range(20):
        mean(X)
        model(X).sum().backward()
        optimizer.step()
    assert [found.model for found in heard.models] == [model]


def test_model_without_optimizer_is_met_and_one_that_gets_one_later(heard: Heard) -> None:
    early = make()
    late = make()
    optimizer = sgd(early)
    late(X)
    assert heard.models == []
    second = sgd(late)
    for _ in range(4):
        late(X)
    assert late in [found.model for found in heard.models]
    assert optimizer is not second


def test_several_models_are_called_by_their_variables(heard: Heard) -> None:
    generator, critic = make(), nn.Linear(1, 1)
    first, second = sgd(generator), sgd(critic)
    critic(generator(X))
    assert sorted(heard.names) == ["critic", "generator"]
    assert {found.name: found.model for found in heard.models}["critic"] is critic
    assert first is not second


def test_part_stands_for_the_whole(heard: Heard) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = make(), nn.Linear(1, 3)

    pair = Pair()
    optimizer = sgd(pair)
    for _ in range(2):
        pair.decoder(pair.encoder(X)).sum().backward()
        optimizer.step()
    assert [(found.model, found.name) for found in heard.models] == [(pair, "")]
    assert heard.parts == ["encoder", "decoder"] * 2


def test_models_made_in_a_loop_are_numbered_up_to_a_limit(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovering, "MOST_MODELS", 3)
    kept = []
    for _ in range(5):
        model = make()
        optimizer = sgd(model)
        model(X).sum().backward()
        optimizer.step()
        kept.append((model, optimizer))
    assert heard.names == ["", "model_2", "model_3"]
    assert heard.notes == ["3 models are watched; those made later are not"]


def test_wrappers_are_seen_through(heard: Heard) -> None:
    model = make()
    wrapped = nn.DataParallel(model)
    optimizer = sgd(wrapped)
    wrapped(X).sum().backward()
    assert [(found.model, found.name) for found in heard.models] == [(model, "")]
    assert heard.parts == []
    assert unwrap(wrapped) is model
    assert optimizer is not None


def test_compiled_model_is_given_as_such(heard: Heard) -> None:
    model = make()
    optimizer = sgd(model)
    compiled = torch.compile(model, backend="eager")
    assert heard.tap.has_compiled
    compiled(X).sum().backward()
    assert [(found.model, found.name) for found in heard.models] == [(compiled, "")]
    assert optimizer is not None


def test_compiled_part_is_a_part_of_the_whole(heard: Heard) -> None:
    whole = nn.ModuleDict({"body": make(), "head": nn.Linear(2, 2)})
    optimizer = sgd(whole)
    whole["body"] = torch.compile(whole["body"], backend="eager")
    whole["body"](X).sum().backward()
    assert [(found.model, found.name) for found in heard.models] == [(whole, "")]
    assert heard.parts == ["body"]
    assert optimizer is not None


def test_model_of_a_compiled_function_is_found_before_it_runs(heard: Heard) -> None:
    model = make()

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        return model(x).sum()

    with torch.no_grad():
        step(X)
    step(X)
    assert heard.models == []  # nobody trains it yet
    optimizer = sgd(model)
    step(X)
    assert [(found.model, found.name) for found in heard.models] == [(model, "")]
    assert step.__name__ == "step"
    assert optimizer is not None


def test_recomputation_in_a_backward_is_no_call(heard: Heard) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Checkpointed()
    model(X).sum().backward()
    assert (heard.calls, heard.parts) == (1, [])


def test_threads_count_their_own_calls(heard: Heard) -> None:
    model, other = make(), make()
    both = sgd(model, other)

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=other, args=(x,))
            thread.start()
            thread.join()
            return x

    outer = Outer()
    outer.own = nn.Linear(1, 1)
    outer(X)
    assert both is not None
    assert other in [found.model for found in heard.models]


def test_fork_is_silent(heard: Heard) -> None:
    model = make()
    process = os.fork()
    if process == 0:
        model(X)
        os._exit(len(heard.models))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    model(X)
    assert len(heard.models) == 1


def test_call_that_raises_leaves_the_tap_in_order(heard: Heard) -> None:
    model = make()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 7))
    model(X)
    assert (heard.calls, heard.returns) == (2, 1)


def test_tap_leaves_what_somebody_put_over_it() -> None:
    own = nn.Module.__call__
    heard = Heard()
    heard.tap.start()
    ours = nn.Module.__call__

    def theirs(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return ours(module, *args, **kwargs)

    nn.Module.__call__ = theirs
    try:
        heard.tap.stop()
        assert nn.Module.__call__ is theirs
        make()(X)
        assert heard.models == []
    finally:
        nn.Module.__call__ = own


def test_census_finds_the_biggest_owner_and_its_paths() -> None:
    inner = make()
    middle = nn.ModuleDict({"one": inner})
    outer = nn.ModuleList([nn.DataParallel(middle)])
    census = Census()
    assert census.topmost(inner[0]) is outer
    assert census.topmost(outer) is outer
    assert path_within(outer, inner) == "0.module.one"
    assert path_within(inner, outer) is None


def test_names_are_those_of_the_script() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.network = make()

        def fit(self, look: Callable[[nn.Module], str]) -> str:
            return look(self.network)

    some_model = make()
    assert find_name(some_model) == "some_model"
    assert Trainer().fit(find_name) == "network"
    assert find_name(nn.Linear(1, 1)) == "Linear"


def test_looking_at_names_holds_no_variable() -> None:
    """Reading the variables of a frame must not keep them alive after they are gone."""

    def step() -> None:
        batch = torch.ones(3)
        references.append(batch)
        find_name(nn.Linear(1, 1))
        references.clear()
        counts.append(len(gc.get_referrers(batch)))

    references: list[Tensor] = []
    counts: list[int] = []
    step()
    assert counts == [0]
