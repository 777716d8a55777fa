"""The call that began a step, kept in a run so that it can be made again.

Tensors lie in the dump `inputs`, everything else is a tree of JSON beside them: lists, tuples,
dicts and plain values. What is neither is not kept, and then the call cannot be made again.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline._errors import NotRecorded
from hookline.recordings.unusual import find_obstacle, to_plain
from hookline.replays.randomness import RandomStates, take_states
from hookline.runs import Dump, Run, open_run
from hookline.stats.preparing import PLAIN

INPUTS = "inputs"
"""What the dumps of calls are called."""

_PLAIN = (bool, int, float, str, type(None))

StoredCall = tuple[tuple[Any, ...], dict[str, Any], RandomStates]
"""Arguments, named ones, and the random states before the call."""


def read_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn what a user gives as inputs into the arguments of a call."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    return tuple(inputs) if isinstance(inputs, list) else (inputs,), {}


def write_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], states: RandomStates
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Give the tensors of a call and its random states, and the rest for JSON."""
    tensors: dict[str, Tensor] = {}
    known: dict[int, str] = {}
    facts: dict[str, Any] = {
        "args": [_write(one, tensors, known) for one in args],
        "kwargs": {name: _write(one, tensors, known) for name, one in kwargs.items()},
        "random": _write_states(states, tensors),
    }
    return tensors, facts


def read_call(run: Run | str | os.PathLike[str], *, step: int | None = None) -> StoredCall | None:
    """Read the arguments and random states of a step of a recording, the first if none is named.

    None where the run does not hold them, or not all of them, or those of a part of the model that
    was called by itself.
    """
    if not isinstance(run, Run):
        run = open_run(Path(run))
    dumps = [one for one in run.tensors.values() if one.name == INPUTS]
    if step is not None:
        dumps = [one for one in dumps if one.facts.get("step") == step]
    if not dumps:
        return None
    first = min(dumps, key=lambda one: (one.facts.get("step", 0), one.rank))
    facts = first.facts
    if "part" in facts:
        return None
    try:
        args = tuple(_read(one, first) for one in facts["args"])
        kwargs = {name: _read(one, first) for name, one in facts["kwargs"].items()}
        return args, kwargs, _read_states(facts["random"], first)
    except (_NotKept, NotRecorded, KeyError):
        return None


class _NotKept(Exception):
    """Say that a part of a call was not kept."""


def _write(value: Any, tensors: dict[str, Tensor], known: dict[int, str]) -> Any:
    """Write a value of a call as JSON; a tensor by its key among the dumped ones."""
    if type(value) in PLAIN and find_obstacle(value) is None:
        key = known.get(id(value))
        if key is None:
            key = known[id(value)] = f"input.{len(known)}"
            tensors[key] = to_plain(value.detach())
        return {"tensor": key, "requires_grad": value.requires_grad, "device": str(value.device)}
    if isinstance(value, _PLAIN) and (value is None or type(value) in _PLAIN):
        is_odd = isinstance(value, float) and not math.isfinite(value)  # JSON has no such numbers
        return {"float": repr(value)} if is_odd else value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in (list, tuple, torch.Size):
        name = "list" if type(value) is list else "tuple"
        return {name: [_write(one, tensors, known) for one in value]}
    if isinstance(value, Mapping) and all(isinstance(one, str) for one in value):
        return {"dict": {name: _write(one, tensors, known) for name, one in value.items()}}
    return {"not_kept": type(value).__qualname__}


def _read(value: Any, dump: Dump) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, content), *others = value.items()
    if kind == "tensor":
        facts = dict(others)
        tensor = dump[content].to(_choose_device(facts.get("device", "cpu")))
        return tensor.requires_grad_() if facts.get("requires_grad") else tensor
    if kind == "float":
        return float(content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind in ("list", "tuple"):
        items = [_read(one, dump) for one in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {name: _read(one, dump) for name, one in content.items()}
    raise _NotKept(content)


def _choose_device(name: str) -> torch.device:
    """Give the device that a tensor was on, or the CPU where there is none of that kind."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device(device.type)


def _write_states(states: RandomStates, tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensors["random.cpu"] = states.cpu
    for index, state in states.cuda.items():
        tensors[f"random.cuda.{index}"] = state
    version, numbers, gauss = states.python
    tensors["random.python"] = torch.tensor(numbers, dtype=torch.int64)
    facts: dict[str, Any] = {
        "cuda": list(states.cuda),
        "python": {"version": version, "gauss": gauss},
    }
    if states.numpy is not None and states.numpy[0] == "MT19937":
        _, keys, place, has_gauss, cached = states.numpy
        tensors["random.numpy"] = torch.tensor(keys.astype("int64"))
        facts["numpy"] = {"place": place, "has_gauss": has_gauss, "cached": cached}
    return facts


def _read_states(facts: Mapping[str, Any], dump: Dump) -> RandomStates:
    python = facts["python"]
    numbers = tuple(dump["random.python"].tolist())
    numpy_state = None
    if "numpy" in facts and "numpy" in sys.modules:
        own = facts["numpy"]
        keys = dump["random.numpy"].numpy().astype("uint32")
        numpy_state = ("MT19937", keys, own["place"], own["has_gauss"], own["cached"])
    now = take_states()
    return RandomStates(
        dump["random.cpu"],
        {
            index: dump[f"random.cuda.{index}"]
            for index in facts["cuda"]
            if index < torch.cuda.device_count()
        },
        (python["version"], numbers, python["gauss"]) if numbers else random.getstate(),
        numpy_state if numpy_state is not None else now.numpy,
    )
