"""A dump of tensors that is written one by one, so that they need not all be in memory.

The file is in the format of safetensors, whose head says where each tensor lies: it is known last
and stands first. So the tensors go into a file of their own until the dump is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.runs.documents import to_json
from hookline.runs.dumps import FORMAT, find_free
from hookline.runs.schema import TENSORS

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
"""The element types that can be written, and what the format calls them."""

_ALIGNMENT = 8


class DumpFile:
    """Write tensors to a new file under `tensors/`, one after the other."""

    def __init__(self, folder: Path, name: str, *, rank: int) -> None:
        place = folder / TENSORS
        place.mkdir(parents=True, exist_ok=True)
        self.path = find_free(place, name, rank)
        """Where it will be once it is complete."""
        self._entries: dict[str, Any] = {}
        self._end = 0
        self._part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        self._file = self._part.open("wb")

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: str, tensor: Tensor) -> bool:
        """Write a tensor as it is now; false where the format has no such elements."""
        import torch

        kind = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if kind is None:
            return False
        plain = tensor.detach().to_dense().cpu().contiguous()
        size = plain.numel() * plain.element_size()
        if size:
            self._file.write(plain.flatten().view(torch.uint8).numpy().data)
        self._entries[key] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [self._end, self._end + size],
        }
        self._end += size
        return True

    def finish(self, facts: Mapping[str, Any]) -> Path:
        """Put the head before the tensors, and the file in its place."""
        self._file.close()
        head = json.dumps({"__metadata__": {FORMAT: to_json(facts)}, **self._entries}).encode()
        head += b" " * (-len(head) % _ALIGNMENT)
        temporary = self._part.with_suffix(".tmp")
        try:
            with temporary.open("wb") as whole, self._part.open("rb") as part:
                whole.write(len(head).to_bytes(8, "little") + head)
                shutil.copyfileobj(part, whole)
            temporary.replace(self.path)
        finally:
            for path in (temporary, self._part):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        return self.path

    def discard(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(OSError):
            self._file.close()
            self._part.unlink(missing_ok=True)
