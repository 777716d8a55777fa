"""Send batches through a model, and give what is kept of each sample."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hookline._errors import StoreError
from hookline.captures.capture import capture
from hookline.captures.shortage import is_out_of_memory
from hookline.captures.transfers import Transfer, Transfers, can_travel
from hookline.extractions.collating import call_with, move, size_of, split
from hookline.extractions.selecting import find_mask, select_rows
from hookline.extractions.sites import SiteChoice
from hookline.extractions.wanted import Ids


class Made(NamedTuple):
    """What is kept of some samples, on its way to the host."""

    ids: Ids
    values: dict[str, Tensor | list[Tensor]]
    travels: list[Transfer]

    def arrive(self) -> dict[str, Tensor | list[Tensor]]:
        """Wait until all of it is there."""
        for one in self.travels:
            one.wait()
        return self.values


class Failed(NamedTuple):
    """A sample that the model could not take."""

    id: int
    error: Exception


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
    ) -> None:
        self._model = model
        self._choice = choice
        self._device = _find_device(model) if device is None else torch.device(device)
        self._dtype = dtype
        self._is_alone = is_alone
        self._capture = capture(model, *choice.where, last=True, stop=True)
        self._transfers = Transfers()
        self.most: int | None = None
        """The most samples that fit in memory together, once that is known."""

    def run(self, ids: Ids, batch: Any) -> Iterator[Made | Failed]:
        """Run a batch; in parts where all of it does not fit, or where a sample fails."""
        count = len(ids)
        part = 1 if self._is_alone else self.most
        if part is not None and count > part:
            yield from self._run_parts(ids, batch, part)
            return
        try:
            made = self._forward(ids, batch)
        except StoreError:
            raise  # it says what was asked for wrongly, whatever the sample
        except Exception as error:
            is_full = is_out_of_memory(error)
            if count == 1:
                yield Failed(int(ids[0]), error)
                return
            del error
        else:
            yield made
            return
        # Outside of the handler: until it is left, the error holds what the forward had.
        if is_full:
            self.most = count // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        yield from self._run_parts(ids, batch, count // 2)

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
        if self._is_alone and mask is not None:
            batch, mask = _drop_padding(batch, mask), None
            mask = find_mask(batch)
        args, kwargs = call_with(move(batch, self._device))
        with torch.no_grad(), self._capture as got:
            self._model(*args, **kwargs)
        values: dict[str, Tensor | list[Tensor]] = {}
        travels: list[Transfer] = []
        with torch.no_grad():
            for address, value in got.tensors().items():
                reduce = self._choice.reduce_of(address)
                rows = select_rows(value, mask, reduce, count=len(ids), name=address)
                if isinstance(rows, Tensor):
                    values[address] = self._send(rows, travels)
                else:
                    values[address] = self._send_ragged(rows, travels)
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

    def _send_ragged(self, rows: list[Tensor], travels: list[Transfer]) -> list[Tensor]:
        lengths = [len(one) for one in rows]
        return list(self._send(torch.cat(rows), travels).split(lengths))


def _drop_padding(batch: Any, mask: Tensor) -> Any:
    """Give one sample's batch without what is padding, so that others cannot change its shape."""
    keep = mask[0].bool()
    if bool(keep.all()):
        return batch

    def cut(one: Any) -> Any:
        if isinstance(one, Tensor) and one.dim() >= 2 and one.shape[:2] == mask.shape:
            return one[:, keep]
        return one

    return {key: cut(one) for key, one in batch.items()}


def _find_device(model: nn.Module) -> torch.device:
    for one in (*model.parameters(), *model.buffers()):
        return one.device
    return torch.device("cpu")


@contextlib.contextmanager
def evaluating(model: nn.Module, *, is_deterministic: bool) -> Iterator[None]:
    """Have a model evaluate, and put every module back as it was found."""
    training = {module: module.training for module in model.modules()}
    threads, algorithms = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    model.eval()
    if is_deterministic:
        # Sums are divided among threads, and rounded where they are divided.
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was
        if is_deterministic:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(algorithms, warn_only=only_warn)


def as_ids(ids: Any) -> Ids:
    """Give sample numbers as an array."""
    return np.asarray(ids, np.int64).reshape(-1)
