"""Models wrapped for distributed training: names without wrappers, local values, reduced weights.

Two processes are started once for all tests; what they compute comes back and is checked here.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ranks import WORLD, run_on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline as hl

pytestmark = pytest.mark.slow


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))


def _input(rank: int) -> Tensor:
    return torch.full((3, 2), float(rank + 1))


def _hooks(model: nn.Module) -> list[tuple[int, int]]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def _reference() -> dict[str, Any]:
    """Give what each rank computes alone, and the mean of the gradients."""
    found: dict[str, Any] = {"out": [], "hidden": [], "hidden grad": [], "weight grad": []}
    for rank in range(WORLD):
        model = _model()
        hidden = model[0](_input(rank))
        hidden.retain_grad()
        out = model[1:](hidden)
        out.square().sum().backward()
        assert hidden.grad is not None
        found["out"].append(out.detach())
        found["hidden"].append(hidden.detach())
        found["hidden grad"].append(hidden.grad)
        found["weight grad"].append(model[0].weight.grad)
    found["mean grad"] = sum(found["weight grad"]) / WORLD
    return found


def _work_ddp(rank: int) -> dict[str, Any]:
    x = _input(rank)
    plain = DistributedDataParallel(_model())
    plain(x).square().sum().backward()

    model = DistributedDataParallel(_model())
    before = _hooks(model)
    asked = ("0", "0.weight:grad", "0.weight:local_grad", "")
    with hl.capture(model, *asked, grads=True) as got:
        out = model(x)
        out.square().sum().backward()
    found: dict[str, Any] = {
        "names": [one.path for one in got],
        "sites": [row["address"] for row in hl.sites(model)],
        "calls": len(got.calls),
        "out": got[""].output,
        "hidden": got["0"].output,
        "hidden grad": got["0:output.grad"],
        "local grad": got["0.weight:local_grad"],
        "reduced grad": got["0.weight:grad"],
        "final grad": model.module[0].weight.grad,
        "plain grad": plain.module[0].weight.grad,
        "is clean": _hooks(model) == before,
    }

    model.zero_grad()
    edits = {"0:output.grad": hl.scale(0)} if rank == 0 else {"0:output.grad": hl.scale(1)}
    with hl.edit(model, edits):
        model(x).square().sum().backward()
    found["edited grad"] = model.module[0].weight.grad

    # The one comm hook a model can have is left to the user.
    seen: list[tuple[int, ...]] = []

    def communicate(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
        seen.append(tuple(bucket.buffer().shape))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, communicate)
    model.zero_grad()
    with hl.capture(model, "0.weight:local_grad") as got:
        model(x).square().sum().backward()
    found["comm hook calls"] = len(seen)
    found["unreduced grad"] = model.module[0].weight.grad
    found["local grad again"] = got["0.weight:local_grad"]
    return found


def _work(rank: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, work in (("ddp", _work_ddp), ("fsdp2", _work_fsdp2), ("fsdp1", _work_fsdp1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found[name] = work(rank)
        found[name]["warned"] = [
            str(one.message) for one in caught if isinstance(one.message, hl.HooklineWarning)
        ]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Give what each rank found, for each kind of wrapper."""
    return run_on_ranks(_work, tmp_path_factory.mktemp("ranks"))


def test_ddp_wrapper_does_not_show_in_names(ranks: Any) -> None:
    for found in (one["ddp"] for one in ranks):
        assert found["names"] == ["0", ""]
        assert not any("module" in site for site in found["sites"])
        assert found["calls"] == 1


def test_ddp_values_and_gradients_are_this_ranks_own(ranks: Any) -> None:
    expected = _reference()
    for rank, found in enumerate(one["ddp"] for one in ranks):
        assert torch.equal(found["out"], expected["out"][rank])
        assert torch.equal(found["hidden"], expected["hidden"][rank])
        torch.testing.assert_close(found["hidden grad"], expected["hidden grad"][rank])


def test_ddp_local_and_reduced_gradients_of_parameters_have_names_of_their_own(ranks: Any) -> None:
    expected = _reference()
    for rank, found in enumerate(one["ddp"] for one in ranks):
        torch.testing.assert_close(found["local grad"], expected["weight grad"][rank])
        torch.testing.assert_close(found["final grad"], expected["mean grad"])
        assert torch.equal(found["reduced grad"], found["final grad"])


def test_ddp_training_is_bit_identical_while_captured(ranks: Any) -> None:
    for found in (one["ddp"] for one in ranks):
        assert torch.equal(found["final grad"], found["plain grad"])
        assert found["is clean"]
        assert found["warned"] == []


def test_ddp_gradient_edit_on_one_rank_goes_into_the_mean(ranks: Any) -> None:
    expected = _reference()["weight grad"][1] / WORLD
    for found in (one["ddp"] for one in ranks):
        torch.testing.assert_close(found["edited grad"], expected)


def test_ddp_comm_hook_is_left_to_the_user(ranks: Any) -> None:
    expected = _reference()
    for rank, found in enumerate(one["ddp"] for one in ranks):
        assert found["comm hook calls"] == 1
        torch.testing.assert_close(found["unreduced grad"], expected["weight grad"][rank])
        torch.testing.assert_close(found["local grad again"], expected["weight grad"][rank])


def _work_fsdp2(rank: int) -> dict[str, Any]:
    x = _input(rank)
    model = _model()
    mesh = init_device_mesh("cpu", (WORLD,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    before = _hooks(model)
    kinds: list[str] = []

    def look(value: Tensor, at: hl.At) -> None:
        kinds.append(type(value).__name__)

    with (
        hl.capture(model, nn.Linear, "", "0.weight:grad", grads=True) as got,
        hl.hook(model, "0", look),
    ):
        model(x).square().sum().backward()
    found: dict[str, Any] = {
        "names": [one.path for one in got],
        "out": got[""].output,
        "hidden": got["0"].output,
        "hidden grad": got["0:output.grad"],
        "kinds": kinds,
        "weight grad": got["0.weight:grad"].full_tensor(),
        "final grad": model[0].weight.grad.full_tensor(),
        "is clean": _hooks(model) == before,
    }
    with hl.edit(model, {"0": hl.zero()}):
        found["edited"] = model(x).detach()
    return found


def test_fsdp2_values_and_gradients_are_those_of_the_whole_model(ranks: Any) -> None:
    expected = _reference()
    for rank, found in enumerate(one["fsdp2"] for one in ranks):
        assert found["names"] == ["0", "2", ""]  # by class, though FSDP2 made it another one
        assert found["kinds"] == ["Tensor"]
        assert torch.equal(found["out"], expected["out"][rank])
        assert torch.equal(found["hidden"], expected["hidden"][rank])
        torch.testing.assert_close(found["hidden grad"], expected["hidden grad"][rank])


def test_fsdp2_parameter_gradient_is_the_reduced_shard(ranks: Any) -> None:
    """Torch's tensor hooks on sharded parameters never fire; the accumulated gradient does."""
    expected = _reference()["mean grad"]
    for found in (one["fsdp2"] for one in ranks):
        torch.testing.assert_close(found["weight grad"], expected)
        torch.testing.assert_close(found["final grad"], expected)


def test_fsdp2_edit_applies_and_nothing_is_left(ranks: Any) -> None:
    for found in (one["fsdp2"] for one in ranks):
        assert torch.equal(found["edited"], torch.zeros(3, 2))
        assert found["is clean"]
        assert found["warned"] == []


def _work_fsdp1(rank: int) -> dict[str, Any]:
    x = _input(rank)
    model = FullyShardedDataParallel(_model(), device_id=torch.device("cpu"), use_orig_params=True)
    before = _hooks(model)
    with hl.capture(model, "0", "", grads=True) as got:
        model(x).square().sum().backward()
    found: dict[str, Any] = {
        "names": [one.path for one in got],
        "sites": [row["address"] for row in hl.sites(model)],
        "out": got[""].output,
        "hidden grad": got["0:output.grad"],
        "is clean": _hooks(model) == before,
    }
    with hl.capture(model, "0.weight:grad") as got:
        model(x).square().sum().backward()
    found["has weight grad"] = "0.weight:grad" in got
    found["problems"] = [(one.address, one.status) for one in got.report().problems]
    return found


def test_fsdp1_wrapper_does_not_show_and_values_are_right(ranks: Any) -> None:
    expected = _reference()
    for rank, found in enumerate(one["fsdp1"] for one in ranks):
        assert found["names"] == ["0", ""]
        assert not any("_fsdp_wrapped_module" in site for site in found["sites"])
        assert torch.equal(found["out"], expected["out"][rank])
        torch.testing.assert_close(found["hidden grad"], expected["hidden grad"][rank])
        assert found["is clean"]


def test_fsdp1_parameter_gradient_that_never_comes_is_reported(ranks: Any) -> None:
    """Its flat parameter takes the gradient; hooks on the original ones never fire."""
    for found in (one["fsdp1"] for one in ranks):
        assert not found["has weight grad"]
        assert found["problems"] == [("0.weight:grad", "no gradient")]
        assert len(found["warned"]) == 1
        assert "0.weight:grad: no gradient" in found["warned"][0]
