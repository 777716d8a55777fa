"""A few samples in short, so that other data of the same type and length can be told apart.

Reading them changes nothing: the random numbers that follow are those that would have.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.extractions.samples import Broken

_POSITIONS = 5
_SECONDS = 2.0
"""After so many seconds no further sample is read."""

_MOST = 1 << 20
"""Of so many bytes at most a tensor's digest is made, from all over it."""

_DEEP = 20

Probe = dict[str, str]
"""By position, as JSON has it, the digest of a sample."""


def probe_samples(read: Callable[[int], Any], size: int) -> Probe | None:
    """Give digests of some samples: the first, the last and some between.

    Samples that cannot be read are left out. None where one is another each time it is read, as
    with augmentation at random: the rest of them would be too.
    """
    found: Probe = {}
    end = time.monotonic() + _SECONDS
    with _same_randomness():
        for position in choose_positions(size):
            first, second = (_digest(read(position)) for _ in range(2))
            if first is not None and second is not None:
                if first != second:
                    return None
                found[str(position)] = first
            if time.monotonic() > end:
                break
    return found


def choose_positions(size: int) -> list[int]:
    """Choose the positions of a few samples, those first that tell most."""
    if not size:
        return []
    spread = [(size - 1) * step // (_POSITIONS - 1) for step in range(_POSITIONS)]
    return list(dict.fromkeys([spread[0], spread[-1], *spread]))


def differ(there: Any, now: Any) -> list[str]:
    """Give the positions at which two probes hold other samples, of those that both hold."""
    if not isinstance(there, Mapping) or not isinstance(now, Mapping):
        return []
    return [one for one in now if one in there and there[one] != now[one]]


@contextlib.contextmanager
def _same_randomness() -> Iterator[None]:
    plain, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(array)


def _digest(sample: Any) -> str | None:
    if isinstance(sample, Broken):
        return None
    summed = hashlib.sha256()
    try:
        for piece in _pieces(sample, 0):
            summed.update(len(piece).to_bytes(8, "little") + piece)
    except Exception:  # a sample is anything at all
        return None
    return summed.hexdigest()[:16]


def _pieces(item: Any, depth: int) -> Iterator[bytes]:
    """Give what a sample consists of as bytes, the same in every process."""
    kind = type(item)
    yield f"{kind.__module__}.{kind.__qualname__}".encode()
    if item is None or isinstance(item, (bool, int, float, complex)):
        yield repr(item).encode()
    elif isinstance(item, str):
        yield item.encode(errors="surrogatepass")
    elif isinstance(item, (bytes, bytearray)):
        yield bytes(item)
    elif isinstance(item, Tensor):
        yield f"{item.dtype} {tuple(item.shape)}".encode()
        yield _some_bytes(item.detach().reshape(-1))
    elif isinstance(item, (np.ndarray, np.generic)):
        yield f"{item.dtype} {item.shape}".encode()
        if item.dtype.hasobject:
            yield from _pieces(item.tolist(), depth + 1)
        else:
            yield _pick(np.asarray(item).reshape(-1)).tobytes()
    elif depth < _DEEP and isinstance(item, Mapping):
        for key, value in item.items():
            yield from _pieces(key, depth + 1)
            yield from _pieces(value, depth + 1)
    elif depth < _DEEP and isinstance(item, (list, tuple)):
        for one in item:
            yield from _pieces(one, depth + 1)
    elif callable(getattr(item, "tobytes", None)) and hasattr(item, "size"):
        yield f"{getattr(item, 'mode', '')} {item.size}".encode()  # an image of Pillow
        yield item.tobytes()


def _some_bytes(flat: Tensor) -> bytes:
    picked = _pick(flat).cpu().resolve_conj().resolve_neg().contiguous()
    return picked.view(torch.uint8).numpy().tobytes() if picked.numel() else b""


def _pick(flat: Any) -> Any:
    """Give all of something flat, or of much of it every so-manieth element."""
    most = max(_MOST // flat.dtype.itemsize, 1)
    return flat[:: -(-len(flat) // most)] if len(flat) > most else flat
