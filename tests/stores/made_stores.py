"""Small stores with known rows, and heads that are changed by hand."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.stores import Store, StoreWriter, open_store

WIDTH = 5


def make_row(id: int) -> Tensor:
    """Make the row of a sample, so that each differs from all others."""
    return torch.arange(WIDTH, dtype=torch.float32) + id * 100


def make_rows(ids: Sequence[int]) -> Tensor:
    """Make the rows of samples."""
    return torch.stack([make_row(one) for one in ids]) if len(ids) else torch.empty(0, WIDTH)


def make_ragged(id: int) -> Tensor:
    """Make the rows of a sample of a ragged column: none of every fourth."""
    return torch.arange(id % 4 * 2, dtype=torch.int64).view(-1, 2) + id * 10


def fill(folder: Path, ids: Sequence[int], *, batch: int = 4, **options: Any) -> None:
    """Write samples, a few at a time."""
    with StoreWriter(folder, **options) as writer:
        for at in range(0, len(ids), batch):
            part = list(ids[at : at + batch])
            ragged = [make_ragged(one) for one in part]
            writer.add(part, {"rows": make_rows(part), "ragged": ragged})


def make_store(folder: Path, count: int = 20, **options: Any) -> Store:
    """Make a store of several shards, each of several groups."""
    fill(folder, range(count), **{"group_bytes": 150, "shard_bytes": 600} | options)
    return open_store(folder)


def list_files(folder: Path) -> list[Path]:
    """List the shards of a store."""
    return sorted((folder / "shards").glob("*.safetensors"))


def split_head(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Divide the bytes of a shard into its head and the rest."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def change_head(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Change what a shard says of itself: of its tensors, and of its groups."""
    head, rest = split_head(path.read_bytes())
    told = json.loads(head["__metadata__"]["hookline.store"])
    change(head, told)
    head["__metadata__"]["hookline.store"] = json.dumps(told)
    text = json.dumps(head).encode()
    text = text.ljust(-(-len(text) // 64) * 64 + 56)
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)


def flip_bit(path: Path, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
