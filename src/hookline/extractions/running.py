"""Send batches through a model, and give what is kept of each sample."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline._errors import HooklineWarning, OutOfMemory, StoreError
from hookline._ranks import is_fully_sharded, reset_sharding
from hookline.captures.capture import capture
from hookline.captures.shortage import is_out_of_memory
from hookline.captures.transfers import Transfer, Transfers, can_travel
from hookline.extractions.calling import refuse_arguments
from hookline.extractions.collating import Padded, call_with, move, size_of, split
from hookline.extractions.samples import SampleError
from hookline.extractions.selecting import Ragged, find_mask, select_rows
from hookline.extractions.sites import SiteChoice
from hookline.extractions.teams import Team, is_spread
from hookline.extractions.wanted import Ids

_ROOM = "CUBLAS_WORKSPACE_CONFIG"


class Made(NamedTuple):
    """What is kept of some samples, on its way to the host."""

    ids: Ids
    values: dict[str, Tensor | list[Tensor]]
    travels: list[Transfer]

    @property
    def nbytes(self) -> int:
        """How many bytes the rows have."""
        return sum(map(bytes_of, self.values.values()))

    def arrive(self) -> dict[str, Tensor | list[Tensor]]:
        """Wait until all of it is there."""
        for one in self.travels:
            one.wait()
        return self.values


class Failed(NamedTuple):
    """A sample that the model could not take."""

    id: int
    error: Exception


class ModelFailed(SampleError):
    """Say which sample a model raises at, and what."""

    def __str__(self) -> str:
        reason = f"{type(self.cause).__name__}: {self.cause}"
        return f"sample {self.id} cannot go through the model: {reason}"


class Runner:
    """Run a model on batches, up to the last site that is asked for."""

    def __init__(
        self,
        model: nn.Module,
        choice: SiteChoice,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        is_alone: bool = False,
        team: Team | None = None,
    ) -> None:
        self._model = model
        self._choice = choice
        self._device = choose_device(device) or _find_device(model)
        self._dtype = dtype
        self._is_alone = is_alone
        self._team = team
        self._is_sharded = is_fully_sharded(model)
        # Which visit a forward that stops sees last depends on what else it waits for.
        self._capture = capture(model, *choice.where, visits=0, stop=True, full=is_spread(model))
        self._takes_mask = _takes(model, "attention_mask")
        self._transfers = Transfers()
        self.tokenless: set[str] = set()
        """Values that have no tokens, though one may have as many rows by chance."""
        self.most: int | None = None
        """The most samples that fit in memory together, once that is known."""

    def run(self, ids: Ids, batch: Any) -> Iterator[Made | Failed]:
        """Run a batch; in parts where all of it does not fit, or where a sample fails."""
        count = len(ids)
        if not count:
            return
        part = 1 if self._is_alone else self.most
        if part is not None and count > part:
            yield from self._run_parts(ids, batch, part)
            return
        made, error = self._try(ids, batch)
        if made is not None:
            yield made
            return
        assert error is not None
        if isinstance(error, (StoreError, HooklineWarning)):
            raise error  # it says what was asked for wrongly, whatever the sample
        is_full = is_out_of_memory(error) or isinstance(error, OutOfMemory)
        if isinstance(error, torch.AcceleratorError) and not is_full:
            raise error  # the device takes no further work, whatever the sample
        if count == 1:
            yield Failed(int(ids[0]), error)
            return
        del error  # it holds what the forward had
        if is_full:
            self.most = count // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        yield from self._run_parts(ids, batch, count // 2)

    def _try(self, ids: Ids, batch: Any) -> tuple[Made | None, Exception | None]:
        """Run a batch once; give what came of it, or what kept it from that, on any rank."""
        made: Made | None = None
        error: Exception | None = None
        try:
            made = self._forward(ids, batch)
        except Exception as found:
            error = found
        is_lost = isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
        if self._team is not None and not is_lost:
            error = self._team.agree(error)
        try:
            return (made, None) if error is None else (None, error)
        finally:
            del error

    def _run_parts(self, ids: Ids, batch: Any, size: int) -> Iterator[Made | Failed]:
        while len(ids) > size:
            part, batch = split(batch, len(ids), size)
            yield from self.run(ids[:size], part)
            ids = ids[size:]
        yield from self.run(ids, batch)

    def _forward(self, ids: Ids, batch: Any) -> Made:
        if size_of(batch) != len(ids):
            raise StoreError(f"a batch of {size_of(batch)} came for {len(ids)} samples")
        mask = find_mask(batch)
        if self._is_alone:
            batch = _set_apart(batch, mask)
            mask = find_mask(batch)
        args, kwargs = call_with(move(batch, self._device))
        if not self._takes_mask:
            kwargs.pop("attention_mask", None)
        try:
            with torch.no_grad(), self._capture as got:
                self._model(*args, **kwargs)
        except (TypeError, RuntimeError) as error:
            refuse_arguments(self._model, args, kwargs, error)
            raise
        finally:
            if self._is_sharded:
                reset_sharding(self._model)
        values: dict[str, Tensor | list[Tensor]] = {}
        travels: list[Transfer] = []
        with torch.no_grad():
            for address, value in got.tensors().items():
                reduce = self._choice.reduce_of(address)
                if mask is not None and value.shape[:2] != mask.shape:
                    self.tokenless.add(address)
                own = None if reduce is None and address in self.tokenless else mask
                if reduce is None and own is not None and isinstance(batch, Padded):
                    _refuse_lengths(address, value)
                rows = select_rows(value, own, reduce, count=len(ids), name=address)
                if isinstance(rows, Ragged):
                    values[address] = list(self._send(rows.rows, travels).split(rows.lengths))
                else:
                    values[address] = self._send(rows, travels)
        if not values:
            raise StoreError(f"no value came by at {', '.join(self._choice.where)}")
        return Made(ids, values, travels)

    def _send(self, rows: Tensor, travels: list[Transfer]) -> Tensor:
        """Send rows to the host, beside what the model does next."""
        rows = rows.detach()
        if can_travel(rows):
            host, travel = self._transfers.bring(rows, self._dtype)
            travels += [travel] if travel is not None else []
            return host
        if self._dtype is not None and rows.dtype != self._dtype:
            return rows.to(self._dtype).cpu()
        # What the model gave may be a view of something large, or be written to again.
        return rows.cpu() if rows.device.type != "cpu" else rows.clone()


def _refuse_lengths(name: str, value: Tensor) -> None:
    """Refuse to keep a value whose size is another one in the next batch."""
    if value.dim() > 2:
        raise StoreError(
            f"`{name}` is {list(value.shape)}, filled up to the longest sample of a batch, and "
            'nothing says what is kept of it: give reduce="tokens" for a row for each token, or '
            "one of the others. Of samples that are dicts with `input_ids`, tokens are kept unasked"
        )


def _set_apart(batch: Any, mask: Tensor | None) -> Any:
    """Give one sample's batch as if there were no other: without padding, in memory of its own.

    Where a tensor begins in memory can change how its numbers are added up.
    """
    if mask is not None and not bool(mask.all()):
        keep = mask[0].bool()
        batch = _trees.map_tensors(
            batch,
            lambda _, one: one[:, keep] if one.dim() >= 2 and one.shape[:2] == mask.shape else one,
        )
    return _trees.map_tensors(
        batch, lambda _, one: one.clone(memory_format=torch.contiguous_format)
    )


def _takes(model: nn.Module, name: str) -> bool:
    """Tell whether a model can be given an argument of this name."""
    try:
        known = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return True
    return name in known or any(one.kind is one.VAR_KEYWORD for one in known.values())


def choose_device(device: torch.device | str | None) -> torch.device | None:
    """Find the device that is meant: of ranks on one machine, each has its own GPU."""
    if device is None:
        return None
    found = torch.device(device)
    local = os.environ.get("LOCAL_RANK", "")
    if found.type != "cpu" and found.index is None and local.isdigit():
        return torch.device(found.type, int(local))
    return found


def _find_device(model: nn.Module) -> torch.device:
    for one in (*model.parameters(), *model.buffers()):
        return one.device
    return torch.device("cpu")


@contextlib.contextmanager
def evaluating(model: nn.Module, *, is_deterministic: bool) -> Iterator[None]:
    """Have a model evaluate, and put every module back as it was found."""
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with _deterministic() if is_deterministic else contextlib.nullcontext():
            yield
    finally:
        for module, was in training.items():
            module.training = was


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Have torch compute the same bits each time, and put its settings back as they were found."""
    threads, algorithms = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    tries, room = torch.backends.cudnn.benchmark, os.environ.get(_ROOM)
    try:
        # torch refuses to multiply on a GPU without it, and looks for it each time.
        os.environ.setdefault(_ROOM, ":4096:8")
        # Sums are divided among threads, and rounded where they are divided.
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        # The fastest of several ways is another one on another day.
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(algorithms, warn_only=only_warn)
        torch.backends.cudnn.benchmark = tries
        if room is None:
            os.environ.pop(_ROOM, None)


def bytes_of(rows: Tensor | list[Tensor]) -> int:
    """Give how many bytes rows have."""
    return rows.nbytes if isinstance(rows, Tensor) else sum(one.nbytes for one in rows)
