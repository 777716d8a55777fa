"""From samples to a batch, from a batch to the arguments of a call, and a batch cut in two.

Knows no sources and no models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookline import _trees

_PADS = {"attention_mask": 0, "labels": -100, "token_type_ids": 0, "position_ids": 0}
"""What fills the fields of tokenizers that hold no tokens, whatever `pad` is."""


class Padded(NamedTuple):
    """Rows of tokens that were filled up to one length, and which of them are tokens."""

    rows: Tensor
    attention_mask: Tensor


def collate(samples: Sequence[Any], *, pad: int | float = 0) -> Any:
    """Make a batch of samples: tensors, arrays and numbers stacked, dicts and tuples by element.

    Rows of whole numbers of different lengths, such as tokens, are filled up at their end with
    `pad`, and a mask comes with them; a dict with rows of `input_ids` gets one in any case. Beside
    a mask other rows are filled up too. A list of numbers is a row. Texts, and whatever else is no
    number, stay a list.
    """
    if not samples:
        raise ValueError("a batch needs at least one sample")
    items = list(samples)
    if _are_tokens(items):
        rows = _collate(items, pad, "", is_masked=True)
        return Padded(rows, _mask_padding(rows, items))
    return _collate(items, pad, "")


def _are_tokens(items: list[Any]) -> bool:
    """Tell whether items are rows of whole numbers, of different lengths."""
    tensors = [_to_tensor(item) for item in items]
    found = [one for one in tensors if one is not None and one.ndim == 1 and _is_whole(one)]
    return len(found) == len(items) and len({len(one) for one in found}) > 1


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _collate(items: list[Any], pad: int | float, key: str, *, is_masked: bool = False) -> Any:
    """Make one value of those under a key."""
    tensors = [_to_tensor(item) for item in items]
    found = [tensor for tensor in tensors if tensor is not None]
    if len(found) == len(items):
        return _join(found, _PADS.get(key.rpartition(".")[2], pad), key, is_masked=is_masked)
    first = items[0]
    if isinstance(first, Mapping) and all(isinstance(item, Mapping) for item in items):
        return _collate_fields(items, pad, key)
    if isinstance(first, (tuple, list)) and all(type(item) is type(first) for item in items):
        lengths = sorted({len(item) for item in items})
        if len(lengths) > 1:
            raise ValueError(
                f"{_name(key)} is a {type(first).__name__} of {lengths[0]} in one sample and of "
                f"{lengths[-1]} in another; {_REMEDY}"
            )
        columns = zip(*items, strict=True)
        joined = [_collate(list(one), pad, f"{key}.{at}") for at, one in enumerate(columns)]
        return _trees.rebuild(first, joined)
    if found or any(isinstance(item, (Mapping, tuple, list)) for item in items):
        kinds = sorted({type(item).__name__ for item in items})
        raise ValueError(f"{_name(key)} is a {' and a '.join(kinds)} in one batch; {_REMEDY}")
    return items


_REMEDY = "give a function of your own as collate=, or batch_size=1"


def _collate_fields(items: list[Mapping[Any, Any]], pad: int | float, key: str) -> dict[Any, Any]:
    """Make a dict of the fields of dicts, with a mask where there are tokens."""
    first = items[0]
    for item in items:
        if item.keys() != first.keys():
            differing = ", ".join(sorted(map(str, item.keys() ^ first.keys())))
            raise ValueError(f"{_name(key)} does not always have the keys {differing}; {_REMEDY}")
    fields = {name: [item[name] for item in items] for name in first}
    tokens: Any = None
    if "attention_mask" not in fields:
        # In any case, not only where rows are filled up: what is kept of a text must not depend on
        # who else is in its batch.
        others = (name for name, own in fields.items() if _are_tokens(own))
        tokens = "input_ids" if "input_ids" in fields else next(others, None)
    is_masked = tokens is not None or "attention_mask" in fields
    batch = {
        name: _collate(own, pad, f"{key}.{name}", is_masked=is_masked)
        for name, own in fields.items()
    }
    rows = batch.get(tokens)
    if isinstance(rows, Tensor) and rows.ndim == 2:
        batch["attention_mask"] = _mask_padding(rows, fields[tokens])
    return batch


def _mask_padding(rows: Tensor, items: list[Any]) -> Tensor:
    """Give 1 where a token was and 0 where a row was filled up."""
    ends = torch.tensor([len(item) for item in items], device=rows.device)[:, None]
    return (torch.arange(rows.shape[1], device=rows.device) < ends).to(torch.int64)


def _to_tensor(item: Any) -> Tensor | None:
    """Give what holds numbers as a tensor: an array, a number, a list of numbers."""
    if isinstance(item, Tensor):
        return item
    if isinstance(item, np.ndarray):
        if item.dtype.kind not in "biufc":
            return None
        native = item.astype(item.dtype.newbyteorder("="), copy=False)
        # torch warns of memory that cannot be written, and takes no negative strides.
        if not native.flags.writeable or any(stride < 0 for stride in native.strides):
            native = native.copy()
        return torch.from_numpy(native)
    if _is_number(item):
        return torch.tensor(item)
    if type(item) is list and all(map(_is_number, item)):
        return torch.tensor(item, dtype=None if item else torch.int64)
    return None


def _is_number(item: Any) -> bool:
    """Tell whether an item is a single number."""
    return isinstance(item, (int, float, complex, np.number, np.bool_))


def _join(tensors: list[Tensor], pad: int | float, key: str, *, is_masked: bool) -> Tensor:
    """Stack tensors, after filling up rows of different lengths."""
    first = tensors[0]
    other = next((tensor for tensor in tensors if tensor.shape != first.shape), None)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    if other is None:
        return torch.stack([tensor.to(dtype) for tensor in tensors])
    if any(tensor.ndim != 1 for tensor in tensors):
        raise ValueError(
            f"{_name(key)} has shape {tuple(first.shape)} in one sample and {tuple(other.shape)} "
            f"in another, and only rows of one dimension are filled up; {_REMEDY}"
        )
    if not is_masked:
        lengths = sorted(len(tensor) for tensor in tensors)
        raise ValueError(
            f"{_name(key)} has {lengths[0]} numbers in one sample and {lengths[-1]} in another; "
            "rows are filled up only where a mask tells tokens from what is filled in, as in "
            f"a dict with `attention_mask`; {_REMEDY}"
        )
    longest = max(len(tensor) for tensor in tensors)
    joined = first.new_full((len(tensors), longest), pad, dtype=dtype)
    for row, tensor in zip(joined, tensors, strict=True):
        row[: len(tensor)] = tensor
    return joined


def _name(key: str) -> str:
    """Name a value in a message."""
    return f"`{key.lstrip('.')}`" if key else "the sample"


def size_of(batch: Any) -> int:
    """Give how many samples a batch holds: the first dimension of the first tensor in it."""
    found = _find_size(batch)
    if found is None:
        raise ValueError(
            f"how many samples a batch holds cannot be told from this `{type(batch).__name__}`: it "
            "holds no tensor with a dimension and no list"
        )
    return found


def _find_size(batch: Any) -> int | None:
    """Give the size by the first tensor, or else by the first list of things that are none."""
    for _, tensor in _trees.leaves(batch):
        if tensor.ndim:
            return len(tensor)
    return _find_length(batch)


def _find_length(batch: Any) -> int | None:
    """Give the length of the first array, or of the innermost first list."""
    if isinstance(batch, np.ndarray):
        return len(batch) if batch.ndim else None
    items = _trees.children(batch)
    if not items:
        return None
    for _, item in items:
        found = _find_length(item)
        if found is not None:
            return found
    return len(items) if isinstance(batch, (list, tuple)) else None


def split(batch: Any, count: int, at: int) -> list[Any]:
    """Cut a batch of `count` samples in two before sample `at`; what is of no sample is in both."""
    if not 0 < at < count:
        raise ValueError(f"a batch of {count} cannot be cut at {at}: both parts need a sample")
    return [_cut(batch, count, slice(0, at)), _cut(batch, count, slice(at, count))]


def _cut(batch: Any, count: int, part: slice) -> Any:
    """Give one part of a batch."""
    if _is_of_samples(batch, count):
        return batch[part]
    items = _trees.children(batch)
    if not items:
        return batch
    if _is_a_thing_a_sample(batch, count):
        return batch[part]
    return _trees.rebuild(batch, [_cut(item, count, part) for _, item in items])


def _is_of_samples(item: Any, count: int) -> bool:
    """Tell whether a tensor or an array has a row a sample."""
    return isinstance(item, (Tensor, np.ndarray)) and item.ndim > 0 and len(item) == count


def _is_a_thing_a_sample(batch: Any, count: int) -> bool:
    """Tell whether a list or tuple holds a thing a sample, and not things that do so themselves."""
    if not isinstance(batch, (list, tuple)) or len(batch) != count:
        return False
    insides = [_is_of_samples(item, count) or _holds_samples(item, count) for item in batch]
    # A tuple is most often arguments; one that is not cut may be a number that all samples share.
    return not (any(insides) if isinstance(batch, tuple) else all(insides))


def _holds_samples(tree: Any, count: int) -> bool:
    """Tell whether something in a container has an entry a sample."""
    if isinstance(tree, (list, tuple)) and len(tree) == count:
        return True
    items = _trees.children(tree) or ()
    return any(_is_of_samples(item, count) or _holds_samples(item, count) for _, item in items)


def move(batch: Any, device: torch.device | str) -> Any:
    """Bring every tensor of a batch to a device; the host waits for none that goes to one."""
    # A copy to the host that is not waited for may be read before it is there.
    is_late = torch.device(device).type != "cpu"
    return _trees.map_tensors(
        batch, lambda _, tensor: tensor.to(device=device, non_blocking=is_late)
    )


def call_with(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the arguments that a batch stands for: by name, by position, or a single one."""
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), dict(batch)
    if isinstance(batch, Padded):
        return (batch.rows,), {"attention_mask": batch.attention_mask}
    # A list of texts is a batch of them, which a model takes as one argument.
    is_texts = isinstance(batch, list) and bool(batch) and all(isinstance(x, str) for x in batch)
    if isinstance(batch, (tuple, list)) and not is_texts:
        return tuple(batch), {}
    return (batch,), {}
