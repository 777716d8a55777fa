"""`hl.AddFeatures`: activations as more columns of batches that somebody else reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookline.extractions.collating import collate as join
from hookline.extractions.placing import place_model, unwrap
from hookline.extractions.running import Failed, ModelFailed, Runner, evaluating
from hookline.extractions.selecting import Reduce
from hookline.extractions.sites import SiteChoice, Sites


class AddFeatures:
    """Add the values of named sites to batches of columns.

    For whatever maps batches: Ray Data holds one in each of its actors, Hugging Face data sets call
    it. What is read and what becomes of the result is theirs.

        ds.map_batches(hl.AddFeatures, fn_constructor_args=(make_model, "layers.20"),
                       fn_constructor_kwargs={"column": "image", "reduce": "last"},
                       concurrency=4, num_gpus=1).write_parquet("features")

    Args:
        model: the model, or a function that makes it; by `hl.extract` the others are explained.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        sites: Sites,
        *,
        reduce: Reduce = None,
        column: str | None = None,
        prepare: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        deterministic: bool = False,
    ) -> None:
        own = unwrap(model if isinstance(model, nn.Module) else model())
        self._model = place_model(own, device)
        choice = SiteChoice(self._model, sites, reduce)
        self._runner = Runner(
            self._model, choice, device=device, dtype=dtype, is_alone=deterministic
        )
        self._column, self._prepare, self._join = column, prepare, collate or join
        self._is_deterministic = deterministic

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Give the columns of a batch, and after them a column for each site."""
        samples = _read_samples(batch, self._column)
        if not samples:
            return dict(batch)
        if self._prepare is not None:
            samples = [self._prepare(one) for one in samples]
        parts: dict[str, list[Any]] = {}
        ids = np.arange(len(samples), dtype=np.int64)
        with evaluating(self._model, is_deterministic=self._is_deterministic):
            for made in self._runner.run(ids, self._join(samples)):
                if isinstance(made, Failed):
                    raise ModelFailed(made.id, made.error) from made.error
                for name, rows in made.arrive().items():
                    parts.setdefault(name, []).append(_to_numpy(rows))
        return {**batch, **{name: np.concatenate(found) for name, found in parts.items()}}


def _read_samples(batch: Mapping[str, Any], column: str | None) -> list[Any]:
    """Give the samples of a batch of columns."""
    if column is not None:
        if column not in batch:
            raise ValueError(f"a batch has no column `{column}`; it has {', '.join(batch)}")
        return list(batch[column])
    if len(batch) == 1:
        return list(next(iter(batch.values())))
    rows = zip(*batch.values(), strict=True)
    return [dict(zip(batch, row, strict=True)) for row in rows]


def _to_numpy(rows: Tensor | list[Tensor]) -> Any:
    """Give rows as an array; of ragged ones, an array of arrays."""
    if isinstance(rows, Tensor):
        return _convert(rows)
    found = np.empty(len(rows), object)
    for number, one in enumerate(rows):
        found[number] = _convert(one)
    return found


def _convert(rows: Tensor) -> Any:
    """Give a tensor as an array; floats that NumPy has not as float32."""
    is_unknown = rows.dtype == torch.bfloat16 or (
        rows.is_floating_point() and rows.dtype.itemsize == 1
    )
    return (rows.float() if is_unknown else rows).numpy()
