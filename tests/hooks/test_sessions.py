"""What a session leaves behind: nothing, on the model or in memory; and how handles behave."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import Mixer, Net, Twice, is_clean, same
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import hookline as hl


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def nothing(*_: Any) -> None:
    return None


ATTACH: dict[str, Callable[[nn.Module], hl.Handle]] = {
    "hook": lambda net: hl.hook(net, ["**", "fc1:input.grad", "**.weight:grad"], nothing),
    "edit": lambda net: hl.edit(net, {"fc1": hl.scale(1), "fc2.weight": hl.scale(1)}),
    "skip": lambda net: hl.edit(net, {"act": hl.skip(lambda at: at.inputs["input"])}),
    "forward pre": lambda net: hl.register_forward_pre_hook(net, "**", nothing),
    "forward": lambda net: hl.register_forward_hook(net, "**", nothing),
    "backward pre": lambda net: hl.register_backward_pre_hook(net, "**", nothing),
    "backward": lambda net: hl.register_backward_hook(net, "**", nothing),
    "all modules": lambda net: hl.hook(None, "**", nothing),
}
every_way = pytest.mark.parametrize("way", ATTACH)


@every_way
def test_model_is_as_before_after_removal(way: str) -> None:
    net, x = Net(), torch.randn(2, 3)
    classes = [type(module) for module in net.modules()]
    dicts = [dict(vars(module)) for module in net.modules()]
    state, plain = copy.deepcopy(net.state_dict()), net(x)
    handle = ATTACH[way](net)
    net(x).sum().backward()
    handle.remove()
    assert is_clean(net)
    assert [type(module) for module in net.modules()] == classes
    assert [set(vars(module)) for module in net.modules()] == [set(one) for one in dicts]
    assert all(
        vars(module)[key] is value
        for module, before in zip(net.modules(), dicts, strict=True)
        for key, value in before.items()
        if key != "training"
    )
    assert all(same(net.state_dict()[key], value) for key, value in state.items())
    assert same(net(x), plain)
    assert not torch_module._has_any_global_hook()


@every_way
def test_handle_is_removed_once_or_many_times(way: str) -> None:
    net = Net()
    handle = ATTACH[way](net)
    assert handle.is_live
    assert repr(handle).endswith(", live>")
    handle.remove()
    handle.remove()
    assert not handle.is_live
    assert repr(handle).endswith(", removed>")
    assert is_clean(net)


def test_handle_is_a_context_manager_also_around_an_error() -> None:
    net = Net()
    with pytest.raises(KeyError), hl.hook(net, "fc1", nothing) as handle:
        raise KeyError
    assert not handle.is_live
    assert is_clean(net)


def test_handle_shows_what_it_is_for() -> None:
    handle = hl.hook(Net(), "fc1:output.grad", nothing)
    assert repr(handle) == "<hookline.Handle: hl.hook('fc1:output.grad'), live>"


def test_sessions_share_a_module_and_leave_one_by_one() -> None:
    net, x, seen = Net(), torch.ones(1, 3), []
    first = hl.hook(net, "fc1", lambda value, at: seen.append("first"))
    second = hl.hook(net, "fc1", lambda value, at: seen.append("second"))
    assert len(net.fc1._forward_hooks) == 1
    net(x)
    first.remove()
    net(x)
    second.remove()
    net(x)
    assert seen == ["first", "second", "second"]
    assert is_clean(net)


def test_handle_removed_inside_its_own_hook_is_fine() -> None:
    net, seen = Net(), []
    handle = hl.hook(net, "**", lambda value, at: seen.append(at.path) or handle.remove())
    net(torch.ones(1, 3))
    assert seen == ["fc1"]
    assert is_clean(net)


def test_hooks_of_others_stay_and_run() -> None:
    net, seen = Net(), []
    own = net.fc1.register_forward_hook(lambda *_: seen.append("own"))
    with hl.hook(net, "fc1", nothing):
        net(torch.ones(1, 3))
    net(torch.ones(1, 3))
    assert seen == ["own", "own"]
    assert list(net.fc1._forward_hooks) == [own.id]


def test_failed_attachment_leaves_nothing() -> None:
    net = Net()
    with pytest.raises(hl.NoSuchSite):
        hl.hook(net, ["fc1", "fc9"], nothing)
    with pytest.raises(TypeError, match=r"an edit is an action such as hl\.scale\(0\)"):
        hl.edit(net, {"fc1": hl.scale(1), "fc2": 5})
    assert is_clean(net)


def test_copy_and_pickle_of_a_hooked_model_have_no_hooks() -> None:
    net, x, seen = Net(), torch.ones(1, 3), []
    with hl.hook(net, "**", lambda value, at: seen.append(at.path)):
        copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
        for one in copies:
            assert same(one(x), net(x))
        assert len(seen) == 2 * 4


def test_copy_is_clean_at_once() -> None:
    net = Net()
    with hl.hook(net, "**", nothing):
        assert is_clean(copy.deepcopy(net))
        assert is_clean(copy.deepcopy({"model": [net]})["model"][0])
        net.lock = threading.Lock()  # cannot be copied
        with pytest.raises(TypeError, match="lock"):
            copy.deepcopy(net)


def test_module_swapped_after_attaching_is_reported() -> None:
    net = Net()
    capture = hl.capture(net, "act")
    capture.__enter__()
    net.act = nn.ReLU()
    net(torch.ones(1, 3))
    with pytest.warns(hl.HooklineWarning, match="it was replaced after attaching: a `ReLU` is"):
        capture.__exit__(None, None, None)


def test_calls_inside_calls_are_visits() -> None:
    class Recursive(nn.Module):
        def forward(self, x: Tensor, depth: int = 0) -> Tensor:
            return self(x, depth + 1) * 2 if depth < 2 else x

    model, seen = Recursive(), []
    with hl.hook(model, "", lambda value, at: seen.append((at.call, at.visit, value.item()))):
        model(torch.ones(()))
        model(torch.ones(()))
    assert seen[:3] == [(0, 2, 1.0), (0, 1, 2.0), (0, 0, 4.0)]
    assert [call for call, _, _ in seen[3:]] == [1, 1, 1]


def test_part_of_the_model_called_alone_is_a_call_of_its_own() -> None:
    net, seen = Net(), []
    with hl.hook(net, "fc1", lambda value, at: seen.append((at.call, at.visit))):
        net(torch.ones(1, 3))
        net.fc1(torch.ones(1, 3))
        net(torch.ones(1, 3))
    assert seen == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.usefixtures("no_gc")
def test_model_and_results_are_freed_without_gc_after_a_capture() -> None:
    net, x = Net(), torch.ones(1, 3)
    with hl.capture(net, "**", inputs=True, grads="all", params=True) as got:
        net(x).sum().backward()
    kept = weakref.ref(got["fc1"].output), weakref.ref(got), weakref.ref(net)
    del got
    assert kept[0]() is None
    assert kept[1]() is None
    del net
    assert kept[2]() is None


@pytest.mark.usefixtures("no_gc")
def test_results_are_freed_without_gc_while_the_graph_lives() -> None:
    net = Net()
    with hl.capture(net, "**", grads=True) as got:
        loss = net(torch.ones(1, 3)).sum()
        loss.backward(retain_graph=True)
    kept = weakref.ref(got["fc1"].output), weakref.ref(got)
    del got
    assert [one() for one in kept] == [None, None]
    loss.backward()


@pytest.mark.usefixtures("no_gc")
def test_results_dropped_inside_an_open_capture_are_freed() -> None:
    net = Net()
    capture = hl.capture(net, "fc1", grads=True)
    with capture as got:
        loss = net(torch.ones(1, 3)).sum()
        kept = weakref.ref(got["fc1"].output)
        got.clear()
        assert kept() is None
        loss.backward()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("way", [way for way in ATTACH if way != "all modules"])
def test_model_inputs_and_graph_are_freed_without_gc_after_removal(way: str) -> None:
    net, x = Net(), torch.randn(2, 3, requires_grad=True) * 1
    handle = ATTACH[way](net)
    y = net(x)
    handle.remove()
    alive = [weakref.ref(one) for one in (net, x, y, net.fc1.weight)]
    y.sum().backward()
    del net, x, y
    if way in ("edit", "skip"):
        del handle  # its report names the modules
    assert [one() for one in alive] == [None] * 4


@pytest.mark.usefixtures("no_gc")
def test_inputs_and_outputs_are_freed_without_gc_while_hooks_stay() -> None:
    model = nn.ModuleDict({"mix": Mixer(), "twice": Twice()})
    hl.hook(model, ["**", "mix:input.grad", "twice.fc:output.grad"], nothing)
    x = torch.randn(2, 3, requires_grad=True) * 1
    y = model["twice"](model["mix"](x, x))
    alive = [weakref.ref(x), weakref.ref(y)]
    y.sum().backward()
    del x, y
    assert [one() for one in alive] == [None, None]


def test_hook_attached_while_a_module_runs_takes_nothing_from_a_capture() -> None:
    handles = []

    class Attaching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            handles.append(hl.hook(model, "0", lambda value, at: None))
            return x * 2

    model = nn.Sequential(Attaching(), nn.Identity())
    with hl.capture(model, "0") as got:
        model(torch.ones(2))
    assert got["0"].output.tolist() == [2, 2]
    for handle in handles:
        handle.remove()


def test_none_returned_inside_an_except_block_is_captured() -> None:
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            return None

    class Handling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = Nothing()

        def forward(self, x: torch.Tensor) -> None:
            try:
                raise ZeroDivisionError
            except ZeroDivisionError:
                return self.nothing(x)

    model = Handling()
    with hl.capture(model, "nothing") as got:
        model(torch.ones(1))
    assert got["nothing"].output is None
