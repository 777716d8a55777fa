"""Which files a path, a folder or a pattern means, and of which kind they are."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hookline.extractions.samples import digest

KINDS = {
    "parquet": (".parquet", ".pq"),
    "images": (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"),
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"),
    "text": (".txt", ".text", ".txt.gz", ".text.gz"),
    "npy": (".npy",),
    "safetensors": (".safetensors",),
}
"""How the files of each kind end."""

CHOICES = (
    "*.parquet, *.jsonl, *.jsonl.gz or *.txt (a file, a folder or a pattern such as "
    "`data/*.jsonl`), a folder of images, an .npy file or a .safetensors file"
)
"""The files that can be given, in words."""

_BESIDE_OTHERS = ("jsonl", "text")
"""Kinds that lie in a folder to describe its other files, as often as to be the data."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files of one kind, in the order of their samples."""

    kind: str
    """The kind of all of them, a key of `KINDS`."""
    root: Path
    """The folder that all of them are under."""
    paths: tuple[str, ...]
    """Each file from `root` on, with `/` between folders, sorted."""

    def fingerprint(self, column: str | None = None) -> str:
        """Give the kind, and a text that stands for the names and sizes."""
        facts = [(path, (self.root / path).stat().st_size) for path in self.paths]
        picked = f", column {column}" if column is not None else ""
        return f"{len(facts)} {self.kind} files {digest(facts)}{picked}"

    def full_paths(self) -> list[Path]:
        """Give the path of each file."""
        return [self.root / path for path in self.paths]


def find_files(given: str) -> Files:
    """Find the files that a path, a folder or a pattern means."""
    given = given.removeprefix("file://")
    if "://" in given:
        raise ValueError(
            f"`{given}` is not on a disk of this machine, and data are read from there (a store "
            "may lie anywhere). Give a Ray Dataset, as in `ray.data.read_parquet(...)`, a Hugging "
            'Face data set, as in `load_dataset("parquet", data_files=...)`, or copy the files'
        )
    path = Path(given).expanduser()
    if path.is_file():
        kind = _kind_of(path.name)
        # Text is often kept without an ending: a file of names, of prompts.
        if kind is None and not path.suffix:
            kind = "text"
        if kind is None:
            raise ValueError(f"`{given}` is no file that samples are read from; give {CHOICES}")
        return Files(kind, path.parent, (path.name,))
    if path.is_dir():
        return _choose(given, path, _walk(path))
    root, pattern = _split_pattern(path)
    if not pattern:
        raise FileNotFoundError(f"`{given}` does not exist{_suggest(path)}; give {CHOICES}")
    found = (one.relative_to(root).as_posix() for one in root.glob(pattern) if one.is_file())
    return _choose(given, root, found)


def _kind_of(name: str) -> str | None:
    """Give the kind that a file's name says."""
    name = name.lower()
    return next((kind for kind, endings in KINDS.items() if name.endswith(endings)), None)


def _choose(given: str, root: Path, paths: Iterable[str]) -> Files:
    """Take the files of the one kind there is."""
    by_kind: dict[str, list[str]] = {}
    for path in paths:
        kind = _kind_of(path)
        if kind is not None:
            by_kind.setdefault(kind, []).append(path)
    kinds = [kind for kind in by_kind if kind not in _BESIDE_OTHERS]
    kinds = kinds or [kind for kind in _BESIDE_OTHERS if kind in by_kind]
    if not kinds:
        raise FileNotFoundError(
            f"`{given}` holds no file that samples are read from; give {CHOICES}"
        )
    if len(kinds) > 1:
        raise ValueError(
            f"`{given}` holds files of several kinds ({', '.join(sorted(kinds))}); say which "
            f"with a pattern, such as `{(root / f'**/*{KINDS[kinds[0]][0]}').as_posix()}`"
        )
    return Files(kinds[0], root, tuple(sorted(by_kind[kinds[0]])))


def _walk(root: Path) -> Iterable[str]:
    """Yield every file under a folder, from the folder on; hidden ones are left out."""
    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link back to where it lies
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        start = Path(folder).relative_to(root)
        yield from ((start / name).as_posix() for name in names if not name.startswith("."))


def _split_pattern(path: Path) -> tuple[Path, str]:
    """Part a path before its first name with `*`, `?` or `[`."""
    for at, part in enumerate(path.parts):
        if any(letter in part for letter in "*?["):
            return Path(*path.parts[:at]), "/".join(path.parts[at:])
    return path, ""


def _suggest(path: Path) -> str:
    """Name the files nearby that are spelled alike."""
    try:
        names = sorted(one.name for one in path.parent.iterdir())
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, 3)
    return f" (there is {' and '.join(f'`{name}`' for name in near)})" if near else ""
