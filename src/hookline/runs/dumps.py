"""Tensors kept beside a run, one safetensors file a dump."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline._errors import NotRecorded
from hookline.runs.documents import to_json
from hookline.runs.schema import TENSORS

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "hookline.dump"
_MOST_LETTERS = 100


@dataclass(frozen=True, slots=True)
class Dump:
    """One dump of tensors; the tensors are read when they are asked for."""

    name: str
    """What it was called when it was written."""

    rank: int
    """The rank that wrote it."""

    path: Path
    """Its file."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was said about it."""

    def keys(self) -> list[str]:
        """List the tensors."""
        with self._open() as file:
            return list(file.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __getitem__(self, key: str) -> Tensor:
        with self._open() as file:
            if key not in file.keys():  # noqa: SIM118 (a file of safetensors has no `in`)
                raise NotRecorded(
                    f"the dump `{self.name}` holds no tensor {key!r}; it holds "
                    f"{', '.join(map(repr, file.keys())) or 'none'}"
                )
            tensor: Tensor = file.get_tensor(key)
            return tensor

    def load(self) -> dict[str, Tensor]:
        """Read all of them."""
        with self._open() as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (as above)

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        from safetensors import safe_open

        if not self.path.is_file():
            raise NotRecorded(f"the dump `{self.name}` is listed, but `{self.path}` is gone")
        with safe_open(str(self.path), framework="pt") as file:
            yield file


def save_tensors(
    folder: Path,
    name: str,
    *,
    rank: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> Path:
    """Write tensors to a new file under `tensors/`, whole or not at all; return its path."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # The format wants dense contiguous tensors that share no memory.
    plain = {
        key: tensor.detach().to_dense().contiguous().clone() for key, tensor in tensors.items()
    }
    place = folder / TENSORS
    place.mkdir(exist_ok=True)
    path = find_free(place, name, rank)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(plain, str(temporary), metadata={FORMAT: to_json(facts)})
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):
            raise OSError(str(error)) from error  # its only errors in writing are the system's
        raise
    return path


def find_free(place: Path, name: str, rank: int) -> Path:
    """Choose a file for a dump; a name may hold anything, a file name may not."""
    safe = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip("._")[:_MOST_LETTERS] or "dump"
    number, path = 1, place / f"{safe}.rank-{rank:05d}.safetensors"
    while path.exists():
        number += 1
        path = place / f"{safe}.{number}.rank-{rank:05d}.safetensors"
    return path
