"""Ranks that hold one model together, and so run the same batches in the same order.

Of a model whose parameters are spread over ranks (`fully_shard`, tensor parallel) a forward needs
all of them. The first rank reads the samples, sends each batch to the others and writes the store;
the others run what comes until they are told that it is over.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from hookline._errors import (
    HooklineError,
    HooklineWarning,
    OutOfMemory,
    StoreError,
    UnsupportedModel,
)
from hookline._ranks import is_fully_sharded
from hookline.captures.shortage import is_out_of_memory
from hookline.extractions.collating import move
from hookline.extractions.feeding import Batch

_T = TypeVar("_T")

_PATIENCE = 300.0
"""Seconds that a rank at which a forward failed waits for the others: these may wait for it."""

_SILENCE = timedelta(hours=2)
"""A batch may take so long to be read."""

_FINE, _FAILED, _FULL, _WRONG = range(4)
"""What came of a forward; where ranks differ, the last of these counts."""


class Apart(HooklineError, RuntimeError):
    """Say that one rank failed at a batch where the others did not come to an end."""


@dataclass(frozen=True, slots=True)
class _Over:
    """What the first rank says last."""

    result: Any = None
    error: Exception | None = None


def is_spread(model: nn.Module) -> bool:
    """Tell whether ranks hold a model together: every forward needs all of them."""
    older = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if any(isinstance(one, older) for one in model.modules()):
        raise UnsupportedModel(
            "ranks that hold a model together by `FullyShardedDataParallel` cannot extract from "
            "it: shard it by `fully_shard(model)` in its place"
        )
    spread = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if spread is None:
        return False
    # Between two forwards of `fully_shard` some parameters may be whole.
    return is_fully_sharded(model) or any(isinstance(one, spread) for one in model.parameters())


class Team:
    """All ranks, and what they say to each other beside what the model does."""

    def __init__(self) -> None:
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        # Of their own, so that what is said never meets what a forward sends.
        self._group: Any = distributed.new_group(backend="gloo", timeout=_SILENCE)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        distributed.destroy_process_group(self._group)

    def send(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Give batches, each after the other ranks have it too."""
        for batch in batches:
            # Of a device, the others would have it on that of the first rank.
            batch = batch._replace(content=move(batch.content, "cpu"))
            self._say(batch)
            yield batch

    def lead(self, work: Callable[[], _T]) -> _T:
        """Do the work of the first rank, and tell the others what came of it."""
        try:
            result = work()
        except (Apart, torch.AcceleratorError):
            raise  # the others do not listen: they are in a forward that does not end
        except Exception as error:
            self._say(_Over(error=_seal(error)))
            raise
        self._say(_Over(result))
        return result

    def follow(self, run: Callable[[Batch], None]) -> Any:
        """Do the work of another rank: run what comes. Give what the first rank gives."""
        while True:
            told = self._hear()
            if isinstance(told, _Over):
                if told.error is not None:
                    raise told.error
                return told.result
            try:
                run(told)
            except (Apart, torch.AcceleratorError):
                raise
            except Exception:  # the first rank has met it too, and says what follows
                continue

    def agree(self, error: Exception | None) -> Exception | None:
        """Give what kept a batch from going through, if anything did on any rank."""
        mine = torch.tensor([_rate(error)])
        found = [torch.empty_like(mine) for _ in range(self.world)]
        # Of its own and not of the wait: a process does not end while it is under way.
        options: Any = vars(distributed.distributed_c10d)["AllgatherOptions"]()
        options.timeout = _SILENCE if error is None else timedelta(seconds=_PATIENCE)
        try:
            self._group.allgather([found], [mine], options).wait()
        except RuntimeError:
            if error is None:
                raise
            smaller = "; a smaller batch_size= may help" if _rate(error) == _FULL else ""
            raise Apart(
                f"a batch failed on rank {self.rank} of {self.world} and did not end on all "
                f"others, which hold the model with it: {type(error).__name__}: {error}{smaller}"
            ) from error
        rates = [int(one) for one in found]
        worst = max(rates)
        if worst == _FINE:
            return None
        told: list[Any] = [None] * self.world
        distributed.all_gather_object(told, f"{type(error).__name__}: {error}", group=self._group)
        if _rate(error) == worst:
            return error
        kinds = {_FAILED: RuntimeError, _FULL: OutOfMemory, _WRONG: StoreError}
        rank = rates.index(worst)
        return kinds[worst](f"on rank {rank} of {self.world}: {told[rank]}")

    def _say(self, what: Any) -> None:
        distributed.broadcast_object_list([what], src=0, group=self._group)

    def _hear(self) -> Any:
        heard: list[Any] = [None]
        distributed.broadcast_object_list(heard, src=0, group=self._group)
        return heard[0]


def _rate(error: Exception | None) -> int:
    if error is None:
        return _FINE
    if isinstance(error, (StoreError, HooklineWarning)):
        return _WRONG
    is_full = is_out_of_memory(error) or isinstance(error, OutOfMemory)
    return _FULL if is_full else _FAILED


def _seal(error: Exception) -> Exception:
    """Give an error that another process can raise."""
    try:
        found = pickle.loads(pickle.dumps(error))
        return error if isinstance(found, Exception) else HooklineError(str(error))
    except Exception:
        return HooklineError(f"{type(error).__name__}: {error}")
