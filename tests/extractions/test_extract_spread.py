"""Extractions of models that ranks hold together: the same rows as those of the whole model."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extracted_models import numbered
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

import hookline as hl
from hookline import _ranks
from hookline.extractions import teams
from hookline.extractions.placing import place_model
from hookline.extractions.samples import SampleError
from hookline.extractions.work import Work

COUNT = 45
KINDS = ["fsdp2", "tensor parallel"]
SITES = ["blocks.0", "blocks.1.up", "blocks.1"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(x)))
        return out


class Net(nn.Module):
    """Blocks and a head; notes the sizes of batches, and raises at some samples."""

    def __init__(self, *, bad: tuple[int, ...] = (), most: int = 99) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.bad, self.most = bad, most
        self.sizes: list[int] = []
        self.heads = 0

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        numbers = x[:, 0].round().int().tolist()
        for block in self.blocks:
            x = block(x)
        if set(self.bad).intersection(numbers):
            raise ValueError("no such word")
        self.heads += 1
        out: Tensor = self.head(x)
        return out


def spread(kind: str, model: Net) -> Net:
    """Spread a model over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        plan: Any = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def describe(model: nn.Module) -> list[str]:
    """Say of what kind the parameters are."""
    return sorted({type(one).__name__ for one in model.parameters()})


def extract_all(kind: str, folder: str, rank: int) -> dict[str, Any]:
    """Extract in many ways; give what this rank saw."""
    out, samples = Path(folder), numbered(COUNT)
    told: dict[str, Any] = {}
    model = spread(kind, Net())
    kinds = describe(model)
    plan = hl.extract(model, samples, SITES, out / "plain", dry_run=True)
    assert not (out / "plain").exists()
    told["plan"] = plan.estimate and (plan.estimate.samples, plan.estimate.columns)
    first = hl.extract(model, samples, SITES, out / "plain", limit=20)
    second = hl.extract(model, samples, SITES, out / "plain")
    told["advance"] = [(one.advance.samples, one.advance.before) for one in (first, second)]
    told["sizes"], told["heads"] = model.sizes, model.heads
    told["same kinds"] = describe(model) == kinds

    bad = spread(kind, Net(bad=(3, 30)))
    with pytest.raises(SampleError, match="sample 3 cannot go through the model: ValueError"):
        hl.extract(bad, samples, "head", out / "bad")
    skipped = hl.extract(bad, samples, "head", out / "bad", on_error="skip")
    told["failed"] = skipped.failed
    with pytest.raises(hl.StoreError, match="holds another extraction"):
        hl.extract(model, samples, "blocks.0", out / "bad")
    again = hl.extract(model, samples, "blocks.0", out / "bad", overwrite=True)
    told["again"] = (again.advance.samples, again.advance.before)

    place_model(model, "meta")
    assert {one.device.type for one in model.parameters()} == {"cpu"}
    cramped = spread(kind, Net(most=3))
    hl.extract(cramped, samples, "blocks.2", out / "cramped")
    told["cramped"] = max(cramped.sizes[3:])
    # Data that only the first rank can read.
    data = samples if not rank else None
    hl.extract(model, data, "blocks.2", out / "once", deterministic=True, batch_size=5)
    return told


class Centred(nn.Module):
    """A layer and buffers, which DDP sends from the first rank to the others in each forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        return out


def extract_wrapped(rank: int, out: Path) -> int:
    """Extract by a DDP model; the first rank has nearly all of the batches."""
    model = nn.parallel.DistributedDataParallel(Centred())
    samples = numbered(33)
    # Blocks of one sample: of those that are left, all but one are the first rank's.
    if not rank:
        with hl.StoreWriter(out, name="before") as writer:
            writer.add(range(3, 33, 2), {"norm:output": torch.zeros(15, 3)})
    torch.distributed.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "check", lambda *_: None)
        return hl.extract(model, samples, "norm", out, batch_size=1).advance.samples


def test_ranks_of_ddp_with_buffers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_on_ranks(partial(extract_wrapped, out=out), tmp_path) == [17, 1]
    store = hl.open_store(out)
    assert list(store.columns) == ["norm:output"]
    expected = Centred().eval()(numbered(33)).detach()
    torch.testing.assert_close(store["norm"].of(range(0, 33, 2)), expected[::2])


def test_what_is_inside_of_wrappers_runs(tmp_path: Path) -> None:
    model, samples = nn.DataParallel(Net()), numbered(5)
    hl.extract(torch.compile(model), samples, "head", tmp_path / "out")
    assert torch.is_tensor(hl.open_store(tmp_path / "out")["head"][:])
    assert model.module.sizes == [5]
    features = hl.AddFeatures(model, "head")({"x": samples.numpy()})
    assert features["head:output"].shape == (5, 2)


def test_the_older_way_to_shard_is_refused() -> None:
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(hl.UnsupportedModel, match="`fully_shard"):
        teams.is_spread(nn.Sequential(wrapped))
    assert not teams.is_spread(nn.Sequential(nn.Linear(2, 2)))


def test_a_device_moves_the_model_unless_it_is_spread(tmp_path: Path) -> None:
    model = nn.DataParallel(Net())
    with pytest.raises(SampleError):  # nothing can be kept of such values
        hl.extract(model, numbered(5), "head", tmp_path / "out", device="meta")
    assert {one.device.type for one in model.parameters()} == {"meta"}
    mapped: Any = Net()
    mapped.blocks.hf_device_map = {"": 0}
    assert not next(place_model(mapped, "meta").parameters()).is_meta
    parted = Net()
    parted.head.to("meta")
    assert not next(place_model(parted, "meta").parameters()).is_meta
    assert next(place_model(Net(), None).parameters()).device.type == "cpu"


def agree_on_errors(rank: int) -> list[str]:
    """Agree on outcomes that differ."""
    found = []
    with teams.Team() as team:
        for error in (None, ValueError("a"), MemoryError("b"), hl.StoreError("c")):
            agreed = team.agree(error if rank else None)
            found.append(f"{type(agreed).__name__}: {agreed}")
    return found


def reset_by_hand() -> list[Any]:
    """Leave forwards before their end, in the manner of a torch that cannot reset by itself."""
    from torch.distributed.fsdp import FSDPModule

    if hasattr(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state
    model, found = spread("fsdp2", Net()), []
    for _ in range(3):
        with torch.no_grad(), hl.capture(model, "blocks.1", stop=True) as got:
            model(numbered(4))
        _ranks.reset_sharding(model)
        found.append(got["blocks.1"].output)
        assert describe(model) == ["DTensor"]
    return found


def do_everything(folder: str, rank: int) -> dict[str, Any]:
    """Be a rank, for all tests but one: a rank takes seconds to start."""
    found: dict[str, Any] = {kind: extract_all(kind, f"{folder}/{kind}", rank) for kind in KINDS}
    return found | {"agreed": agree_on_errors(rank), "reset": reset_by_hand()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Give the folder of what two ranks extracted, and what each of them saw."""
    folder = tmp_path_factory.mktemp("spread")
    return folder, run_on_ranks(partial(do_everything, str(folder)), folder)


@pytest.fixture(params=KINDS)
def spread_out(request: pytest.FixtureRequest, ranks: Any) -> tuple[Path, list[dict[str, Any]]]:
    """Give what was extracted of one kind of model, and what each rank saw."""
    folder, found = ranks
    return folder / request.param, [one[request.param] for one in found]


def ids_in(out: Path) -> list[int]:
    """Give the numbers of all samples in the shards, also of those that are there twice."""
    shards = hl.open_store(out).shards
    found = [shard.ids(group) for shard in shards for group in range(len(shard.groups))]
    return [int(one) for one in np.sort(np.concatenate(found))]


def test_the_rows_are_those_of_the_whole_model(spread_out: Any, tmp_path: Path) -> None:
    folder, seen = spread_out
    store = hl.open_store(folder / "plain")
    whole = hl.extract(Net(), numbered(COUNT), SITES, tmp_path / "whole", batch_size=8).open()
    assert ids_in(folder / "plain") == list(range(COUNT))
    for site in SITES:
        torch.testing.assert_close(store[site][:], whole[site][:])
    assert {one.file.rsplit("-", 1)[0] for one in store.shards} == {"part"}
    for told in seen:
        assert told["advance"] == [(20, 0), (25, 20)]
        assert told["plan"] == (COUNT, dict(zip(store.columns, [16, 32, 16], strict=True)))
        assert told["heads"] == 0  # every forward ends after the last site
        assert told["same kinds"]
    assert seen[0]["sizes"] == seen[1]["sizes"]


def test_the_whole_model_goes_on_where_ranks_stopped(spread_out: Any, tmp_path: Path) -> None:
    folder, _ = spread_out
    model, samples = Net(), numbered(COUNT)
    result = hl.extract(model, samples, SITES, folder / "plain")
    assert (result.advance.samples, result.advance.before) == (0, COUNT)
    alone = hl.extract(model, samples, "blocks.2", tmp_path / "one", deterministic=True).open()
    found = hl.open_store(folder / "once")["blocks.2"][:]
    torch.testing.assert_close(found, alone["blocks.2"][:])
    if folder.name.startswith("fsdp2"):  # gathered, the parameters are the same
        assert torch.equal(found, alone["blocks.2"][:])


def test_a_sample_that_fails_fails_on_all_ranks(spread_out: Any) -> None:
    folder, seen = spread_out
    for told in seen:
        assert told["failed"] == dict.fromkeys((3, 30), "ValueError: no such word")
        assert told["again"] == (COUNT, 0)
    assert list(hl.open_store(folder / "bad").columns) == ["blocks.0:output"]


def test_a_batch_that_does_not_fit_is_divided_on_all_ranks(spread_out: Any) -> None:
    folder, seen = spread_out
    assert ids_in(folder / "cramped") == list(range(COUNT))
    assert [told["cramped"] for told in seen] == [2, 2]


def fail_apart(folder: str, rank: int) -> None:
    """Run out of memory on one rank alone, in a forward that the other cannot end."""
    told = "nothing"
    teams._PATIENCE = 0.5
    model = spread("tensor parallel", Net(most=99 if not rank else 3))
    try:
        hl.extract(model, numbered(COUNT), "blocks.2", Path(folder) / "apart")
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    torch.save(told, Path(folder) / f"{rank}.pt")
    os._exit(0)  # torch may abort where a group ends in which something failed


def test_a_rank_that_fails_alone_does_not_wait_for_ever(tmp_path: Path) -> None:
    found = run_on_ranks(partial(fail_apart, str(tmp_path)), tmp_path)
    assert found[1].startswith("Apart: a batch failed on rank 1 of 2 and did not end on all others")
    assert "CUDA out of memory.; a smaller batch_size= may help" in found[1]
    assert found[0] != "nothing"


def test_ranks_agree_on_what_failed(ranks: Any) -> None:
    first, second = (one["agreed"] for one in ranks[1])
    assert second == ["NoneType: None", "ValueError: a", "MemoryError: b", "StoreError: c"]
    assert first == [
        "NoneType: None",
        "RuntimeError: on rank 1 of 2: ValueError: a",
        "OutOfMemory: on rank 1 of 2: MemoryError: b",
        "StoreError: on rank 1 of 2: StoreError: c",
    ]


def test_a_forward_that_was_left_is_forgotten_also_by_an_older_torch(ranks: Any) -> None:
    model = Net()
    with torch.no_grad(), hl.capture(model, "blocks.1") as got:
        model(numbered(4))
    for found in ranks[1]:
        for one in found["reset"]:
            torch.testing.assert_close(one, got["blocks.1"].output)
