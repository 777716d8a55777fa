"""What `hookline extract` is told, from text to what `hl.extract` takes."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from hookline.cli.failing import Failure, Misused, running_code

_TEXT, _COUNT, _FLAG = "a text", "a whole number from 1 on", "true or false"
_KINDS: dict[str, str] = {
    **dict.fromkeys(("model", "data", "out", "column", "prepare", "tokenizer"), _TEXT),
    **dict.fromkeys(("device", "dtype", "address"), _TEXT),
    **dict.fromkeys(("length", "batch_size", "limit"), _COUNT),
    **dict.fromkeys(("deterministic", "overwrite"), _FLAG),
    "sites": "a text, a list of texts, or a table of what is kept of each",
    "reduce": "a text or a whole number",
    "on_error": "stop or skip",
    "engine": "local or ray",
    "actors": "a whole number from 1 on, or the fewest and the most, as in '4:64'",
    "gpus": "a number",
}
"""The names that a file of options may have, and what each of them is."""

_SAID = re.compile(
    r"""(?<![\w(.,&?-])(?<!,\ )
    (overwrite|deterministic|dry_run|batch_size|column|reduce|dtype|limit|on_error|device|prepare)
    =("[^"]*"|'[^']*'|[\w+-]+(?:\.\w+)*)?""",
    re.VERBOSE,
)
"""An option as messages name it, for Python."""


def name_options(text: str) -> str:
    """Name options in a message as a command line does: `--batch-size 1` for `batch_size=1`."""

    def name(found: re.Match[str]) -> str:
        option = f"--{found[1].replace('_', '-')}"
        value = (found[2] or "").strip("'\"")
        return option if value in ("", "True") else f"{option} {value}"

    return _SAID.sub(name, text)


def read_config(path: Path) -> dict[str, Any]:
    """Read a file of options."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Failure(f"`{path}` cannot be read: {error.strerror}") from None
    try:
        found = _parse(path, text)
    except ImportError as error:
        raise Failure(str(error)) from None
    except ValueError as error:
        raise Misused(f"`{path}` cannot be understood: {error}") from None
    if not isinstance(found, dict):
        raise Misused(f"`{path}` has no names and values", "`hookline extract --help` shows some")
    options = {str(key).replace("-", "_"): value for key, value in found.items()}
    if "site" in options:
        options["sites"] = options.pop("site")
    unknown = sorted(options.keys() - _KINDS.keys())
    if unknown:
        near = difflib.get_close_matches(unknown[0], _KINDS, 1)
        known = f"did you mean `{near[0]}`? " if near else ""
        raise Misused(
            f"`{path}` has an unknown `{unknown[0]}`", f"{known}known are {', '.join(_KINDS)}"
        )
    for name, value in options.items():
        if not _is_right(name, value):
            raise Misused(f"`{name}` in `{path}` is {_KINDS[name]}, not {value!r}")
    return options


def _is_right(name: str, value: Any) -> bool:
    """Tell whether a value is what an option of this name takes."""
    kind = _KINDS[name]
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if kind == _TEXT:
        return isinstance(value, str) and bool(value)
    if kind == _COUNT:
        return is_whole and value >= 1
    if kind == _FLAG:
        return isinstance(value, bool)
    if name == "sites":
        texts = value if isinstance(value, (list, Mapping)) else [value]
        return bool(texts) and all(isinstance(one, str) and one for one in texts)
    if name == "reduce":
        return isinstance(value, str) or is_whole
    if name == "actors":
        return _read_actors(value) is not None
    if name == "gpus":
        return (is_whole or isinstance(value, float)) and value >= 0
    return value in kind.split(" or ")


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        import json

        return json.loads(text)
    if path.suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError("its name ends neither in .toml, .json nor .yaml")
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError('YAML needs a package: pip install "hookline[yaml]"') from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def read_sites(options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Read which sites are kept, and how."""
    reduce = _read_reduce(options.get("reduce"))
    sites = options["sites"]
    if isinstance(sites, str):
        return [sites], reduce
    if isinstance(sites, Mapping):
        return {str(site): _read_reduce(how) for site, how in sites.items()}, reduce
    return [str(one) for one in sites], reduce


def _read_reduce(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    if text.lstrip("-").isdigit():
        return int(text)
    if ":" in text:
        from hookline.cli.loading import load

        return load(text)
    return text if text else None


def read_data(text: Any) -> Any:
    """Find the data: a path, or an object that a file or a module has."""
    place, colon, name = str(text).rpartition(":")
    if colon and place and name.split(".")[0].isidentifier() and not Path(text).exists():
        from hookline.cli.loading import load_example

        return load_example(text)
    return text


def read_prepare(options: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Find what makes the model's input of a sample."""
    if options.get("tokenizer") and options.get("prepare"):
        raise Misused("--tokenizer and --prepare both say what the model takes", "give one of them")
    if options.get("prepare"):
        from hookline.cli.loading import load

        found: Callable[[Any], Any] = load(options["prepare"])
        return found
    if not options.get("tokenizer"):
        return None
    from hookline.extractions.tokenizing import Tokenize

    with running_code("loading the tokenizer"):
        return Tokenize(options["tokenizer"], length=options.get("length"))


def read_engine(options: Mapping[str, Any]) -> Any:
    """Find who does it."""
    if options.get("engine", "local") != "ray":
        for name in ("address", "actors", "gpus"):
            if options.get(name):
                raise Misused(f"--{name} belongs to Ray", "say `--engine ray` too")
        return "local"
    from hookline import RayCluster

    gpus = float(options.get("gpus") or 0)
    actors = _read_actors(options.get("actors") or 1)
    if actors is None:
        raise Misused(f"--actors is {_KINDS['actors']}, not {options['actors']!r}")
    return RayCluster(options.get("address"), actors=actors, gpus=gpus)


def _read_actors(given: Any) -> int | tuple[int, int] | None:
    """Read how many actors there are: a number, or the fewest and the most; None if it is none."""
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", str(given))
    if found is None or isinstance(given, bool):
        return None
    fewest, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= fewest <= most:
        return None
    return (fewest, most) if found[2] else fewest


class LoadModel:
    """Make a model in another process: by its name, from the folder this one was started in."""

    def __init__(self, text: str) -> None:
        place, _, name = text.rpartition(":")
        # A file is found from anywhere by its whole path.
        self._text = f"{Path(place).resolve()}:{name}" if place.endswith(".py") else text
        self._folder = str(Path.cwd())

    def __call__(self) -> Any:
        """Make it."""
        from hookline.cli.loading import load_model

        if self._folder not in sys.path:
            sys.path.insert(0, self._folder)
        with click.Context(click.Command("extract")):
            return load_model(self._text)


def read_dtype(name: Any) -> Any:
    """Find a dtype by its name."""
    if not name:
        return None
    import torch

    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise Misused(f"there is no dtype `{name}`", "such as float32, float16, bfloat16")
    return found
