"""Whose code a callable is, and where, against what `inspect` says."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookline.hooks.origins import find_origin


def probe(*_: Any) -> None:
    raise AssertionError("finding an origin calls nothing")


class Probe(nn.Module):
    def forward(self, *_: Any) -> None:
        raise AssertionError


class Recorder:
    def __call__(self, *_: Any) -> None:
        raise AssertionError

    def method(self, *_: Any) -> None:
        raise AssertionError


def location(function: Any) -> str:
    path = Path(inspect.getsourcefile(function) or "")
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{inspect.getsourcelines(function)[1]}"


@pytest.mark.parametrize(
    ("wrapped", "name", "code"),
    [
        (functools.partial(functools.partial(probe, 1), 2), "probe", probe),
        (Recorder().method, "Recorder.method", Recorder.method),
        (Recorder(), "Recorder", Recorder.__call__),
        (torch.no_grad()(probe), "probe", probe),
        (Probe(), "Probe", Probe.forward),
    ],
    ids=["partial", "method", "object", "no_grad", "module"],
)
def test_functions_are_looked_into(wrapped: Any, name: str, code: Any) -> None:
    assert find_origin(wrapped) == (name, location(code), "you")


@pytest.mark.parametrize(
    ("function", "name", "owner"),
    [(print, "print", "python"), (dict, "dict", "python"), (nn.Linear, "Linear", "torch")],
)
def test_builtin_code_and_classes_have_no_line(function: Any, name: str, owner: str) -> None:
    assert find_origin(function) == (name, "", owner)


def test_standard_library_is_pythons() -> None:
    line = inspect.getsourcelines(inspect.getsource)[1]
    assert find_origin(inspect.getsource) == ("getsource", f"inspect.py:{line}", "python")
