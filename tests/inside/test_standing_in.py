"""What stands in for a forward: over another library's, in copies, pickles and transforms."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from small_models import is_clean
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from twins import assert_same, make_input, run

import hookline as hl


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        y = torch.sin(h) + x
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.other = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.block(x))


def make_model() -> Model:
    torch.manual_seed(5)
    return Model()


def by_hand(block: Block, x: Tensor, factor: float = 2.0) -> Tensor:
    return torch.sin(block.lin(x) * factor) + x


def put_partial(module: nn.Module) -> None:
    """Put a forward as accelerate does: a partial of a function, the old one beside it."""
    old = module.forward
    module._old_forward = old

    def new_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*args, **kwargs) * 3

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old)


def put_function(module: nn.Module) -> None:
    """Put a plain function that knows the module."""

    def forward(x: Tensor) -> Tensor:
        h = module.lin(x)
        y = (torch.sin(h) + x) * 3
        return y

    module.forward = forward


def put_method(module: nn.Module) -> None:
    """Put a bound method of the module."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.lin(x)
        y = (torch.sin(h) + x) * 3
        return y

    module.forward = MethodType(forward, module)


def put_method_of_another(module: nn.Module) -> None:
    """Put a bound method of another object."""

    class Runner:
        def __init__(self, block: nn.Module) -> None:
            self.block = block

        def compute(self, x: Tensor) -> Tensor:
            h = self.block.lin(x)
            y = (torch.sin(h) + x) * 3
            return y

    module.forward = Runner(module).compute


PUTS = [put_partial, put_function, put_method, put_method_of_another]


@pytest.mark.parametrize("where", ["@h", "/sin:input[0]"])
@pytest.mark.parametrize("put", PUTS)
def test_forward_of_another_library_is_kept_and_restored(put: Any, where: str) -> None:
    model, x = make_model(), make_input()
    put(model.block)
    own = dict(vars(model.block))
    plain = run(model, model)
    expected = model.other(by_hand(model.block, x) * 3)
    with hl.edit(model, {f"block{where}": hl.scale(2)}):
        assert torch.equal(model(x), expected)
        with hl.capture(model, f"block{where}", grads=True) as got:
            model(x).sum().backward()
    assert torch.equal(got[f"block{where}"], model.block.lin(x) * 2)
    assert got[f"block{where}"].grad is not None
    assert all(vars(model.block)[name] is value for name, value in own.items())
    assert vars(model.block).keys() == own.keys()
    assert_same(run(model, model), plain)


@pytest.mark.parametrize("where", ["@h", "/sin:input[0]"])
@pytest.mark.parametrize("put", PUTS)
def test_forward_put_while_attached_is_not_thrown_away(put: Any, where: str) -> None:
    """Another library may wrap the stand-in; its own stays where it put it."""
    model, x = make_model(), make_input()
    handle = hl.edit(model, {f"block{where}": hl.scale(2)})
    put(model.block)
    forward = vars(model.block)["forward"]
    handle.remove()
    assert vars(model.block)["forward"] is forward
    assert torch.equal(model.block(x), by_hand(model.block, x, 1.0) * 3)


@pytest.mark.parametrize("where", ["@h", "/sin:input[0]"])
def test_copy_made_while_attached_is_a_model_of_its_own(where: str) -> None:
    model, x = make_model(), make_input()
    plain = model(x)
    with hl.edit(model, {f"block{where}": hl.scale(2)}), hl.capture(model, f"block{where}") as got:
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), plain)
        assert len(got.calls) == 0
        changed = model(x)
    assert torch.equal(changed, model.other(by_hand(model.block, x)))
    assert len(got.calls) == 1
    assert torch.equal(twin(x), plain)
    with torch.no_grad():
        twin.block.lin.weight.zero_()
    assert not torch.equal(twin(x), plain)
    assert torch.equal(model(x), plain)
    assert is_clean(twin)
    assert is_clean(model)


@pytest.mark.parametrize("put", [put_partial, put_method])
def test_copy_of_a_module_with_a_forward_of_another_library_keeps_that(put: Any) -> None:
    model, x = make_model(), make_input()
    put(model.block)
    plain = model.block(x)
    with hl.edit(model, {"block@h": hl.scale(2)}):
        twin = copy.deepcopy(model)
        assert torch.equal(twin.block(x), plain)
        assert torch.equal(twin.block(x), plain)
        assert not torch.equal(model.block(x), plain)
    assert torch.equal(twin.block(x), plain)
    assert torch.equal(model.block(x), plain)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
@pytest.mark.parametrize("where", ["@h", "/sin:input[0]"])
def test_pickle_made_while_attached_is_a_plain_model(where: str, how: str) -> None:
    model, x = make_model(), make_input()
    plain = model(x)
    with hl.edit(model, {f"block{where}": hl.scale(2)}):
        if how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        assert torch.equal(twin(x), plain)
        assert not torch.equal(model(x), plain)
    assert torch.equal(twin(x), plain)
    assert "forward" not in vars(twin.block)
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("where", ["@h", "/sin:input[0]"])
def test_replicas_run_with_their_own_parameters(where: str) -> None:
    """DataParallel copies the attributes of a module, the stand-in among them."""
    model, x = make_model().block, make_input()
    with hl.edit(model, {where: hl.scale(2)}), hl.capture(model, where) as got:
        replica = model._replicate_for_data_parallel()
        lin = model.lin._replicate_for_data_parallel()
        lin.weight, lin.bias = model.lin.weight * 0.5, model.lin.bias * 1
        replica.lin = lin
        out = replica(x)
    h = nn.functional.linear(x, model.lin.weight * 0.5, model.lin.bias)
    assert torch.equal(out, torch.sin(h * 2) + x)
    assert torch.equal(got[where], h * 2)
    assert is_clean(model)


@pytest.mark.parametrize("where", ["@h", "/sin:input[0]"])
def test_functional_call_uses_the_parameters_given(where: str) -> None:
    model, x = make_model(), make_input()
    parameters = {name: one.detach() * 0.5 for name, one in model.named_parameters()}
    with hl.edit(model, {f"block{where}": hl.scale(2)}), hl.capture(model, f"block{where}") as got:
        out = functional_call(model, parameters, (x,))
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(0.5)
    assert torch.equal(got[f"block{where}"], model.block.lin(x) * 2)
    assert torch.equal(out, model.other(by_hand(model.block, x)))


@pytest.mark.parametrize("where", ["@h", "/sin", "/sin:input[0]"])
def test_edit_under_grad_and_vmap_equals_a_change_by_hand(where: str) -> None:
    def expected(x: Tensor) -> Tensor:
        h = model.lin(x)
        h = torch.sin(h * 2) if where != "/sin" else torch.sin(h) * 2
        return (h + x).square().sum()

    model, x = make_model().block, make_input().detach()
    by_torch = vmap(grad(expected))(x)
    with hl.edit(model, {where: hl.scale(2)}):
        found = vmap(grad(lambda x: model(x).square().sum()))(x)
    assert torch.equal(found, by_torch)
    assert is_clean(model)


def test_forward_called_by_itself_is_an_execution_too() -> None:
    model, x = make_model(), make_input()
    with hl.edit(model, {"block@h": hl.scale(2)}), hl.capture(model, "block@h", "block/sin") as got:
        out = model.block.forward(x)
    assert torch.equal(out, by_hand(model.block, x))
    assert torch.equal(got["block@h"], model.block.lin(x) * 2)
    assert torch.equal(got["block/sin"], torch.sin(got["block@h"]))
    assert is_clean(model)


@pytest.mark.parametrize("where", ["block@h", "block/sin"])
def test_inventory_shows_the_stand_in_as_ours(where: str) -> None:
    model = make_model()
    assert len(hl.inventory(model)) == 0
    with hl.capture(model, where):
        shown = str(hl.inventory(model))
        model(make_input())
    assert "block" in shown
    assert "hookline" in shown
    assert len(hl.inventory(model)) == 0


@pytest.mark.parametrize("where", ["block@h", "block/sin"])
def test_state_and_attributes_are_as_before(where: str) -> None:
    model, x = make_model(), make_input()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with hl.capture(model, where):
        assert list(model.state_dict()) == list(state)
        model(x)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert_same({name: value.clone() for name, value in model.state_dict().items()}, state)


def test_wrapped_models_are_reached_by_their_own_names() -> None:
    model, x = make_model(), make_input()
    parallel = nn.DataParallel(model)
    with hl.capture(parallel, "block@h", "block/sin") as got:
        parallel(x)
    device = next(model.parameters()).device  # it takes a GPU if there is one
    assert torch.equal(got["block@h"], model.block.lin(x.to(device)))
    assert is_clean(parallel)


def test_scripted_submodules_are_refused_or_left_alone() -> None:
    model = nn.Sequential(torch.jit.script(Block()), Block())
    x = make_input()
    plain = model(x)
    with pytest.raises(hl.HooklineError):
        hl.capture(model, "0@h")
    with hl.capture(model, "1@h") as got:
        assert torch.equal(model(x), plain)
    assert got["1@h"].shape == (3, 4)
