"""A capture on disk: it reads back the same, and a file that is none says what is wrong."""

from __future__ import annotations

import json
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from small_models import Net, Twice, Wrapped, same
from torch import Tensor, nn

import hookline as hl
from hookline import _trees

Pair = namedtuple("Pair", ["left", "right"])


class Give(nn.Module):
    """Return what it was made with."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value


def round_trip(got: hl.Captured, folder: Path) -> hl.Captured:
    got.save(folder / "run.safetensors")
    return hl.load(folder / "run.safetensors")


def give(value: Any, folder: Path) -> Any:
    """Store the output of a module and read it back."""
    model = Wrapped(Give(value))
    with hl.capture(model, "inner") as got:
        model(torch.ones(1))
    return round_trip(got, folder)["inner"].output


def test_values_gradients_and_parameters_come_back(tmp_path: Path) -> None:
    net = Net()
    with hl.capture(net, inputs=True, grads=True, params=True) as got:
        net(torch.randn(2, 3)).sum().backward()
    back = round_trip(got, tmp_path)
    assert list(back.tensors()) == list(got.tensors())
    assert all(same(back.tensors()[name], value) for name, value in got.tensors().items())
    assert same(back["fc1"].output.grad, got["fc1"].output.grad)
    assert same(back["fc1.weight"].grad, got["fc1.weight"].grad)
    assert back.fc1.inputs["input"].shape == (2, 3)
    assert str(back.table()) == str(got.table())


def test_visits_and_calls_come_back(tmp_path: Path) -> None:
    model = Twice()
    with hl.capture(model, "fc", calls=[1, 2]) as got:
        for _ in range(3):
            model(torch.randn(1, 3))
    back = round_trip(got, tmp_path)
    assert [(one.call, one.visit) for one in back] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [call.number for call in back.calls] == [1, 2]
    assert same(back.calls[1]["fc", 1].output, got.calls[1]["fc", 1].output)
    with pytest.raises(hl.AmbiguousRead):
        back["fc"]


def test_last_and_shared_names_come_back(tmp_path: Path) -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    with hl.capture(model, "0", last=True) as got:
        model(torch.ones(1, 2))
    back = round_trip(got, tmp_path)
    assert same(back["2"].output, got["0"].output)
    assert back["0"].names == ("0", "2")


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn],
)
def test_every_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.randn(3, 2).to(dtype)
    back = give(value, tmp_path)
    assert back.dtype == dtype
    assert torch.equal(back.float(), value.float())


def test_shapes_and_strides_of_every_kind_come_back(tmp_path: Path) -> None:
    base = torch.randn(4, 3)
    value = [base.T, base[:, 1], base.expand(2, 4, 3), torch.zeros(0, 2), torch.tensor(5.0), base]
    back = give(value, tmp_path)
    assert all(same(mine, right) for mine, right in zip(back, value, strict=True))


def test_nested_values_come_back_in_plain_containers(tmp_path: Path) -> None:
    a, b = torch.ones(1), torch.zeros(2)
    back = give({"a": (a, [b, None, True, 1, 2.5, "text"]), 3: Pair(a, b), "s": b.shape}, tmp_path)
    assert same(back["a"][0], a)
    assert back["a"][1][1:] == [None, True, 1, 2.5, "text"]
    assert list(back[3]) == ["left", "right"]
    assert same(back[3]["right"], b)
    assert back["s"] == (2,)


def test_objects_that_were_not_kept_come_back_as_that(tmp_path: Path) -> None:
    back = give([nn.ReLU(), torch.float32], tmp_path)
    assert repr(back[0]) == "<ReLU: not kept>"
    assert isinstance(back[1], _trees.Opaque)


def test_keys_that_look_like_paths_are_told_apart(tmp_path: Path) -> None:
    values = [torch.full((1,), float(n)) for n in range(4)]
    tree = {"a/b": values[0], "a": {"b": values[1]}, 0: values[2], "0": values[3]}
    back = give(tree, tmp_path)
    assert same(back["a/b"], values[0])
    assert same(back["a"]["b"], values[1])
    assert same(back[0], values[2])
    assert same(back["0"], values[3])


leaves = st.one_of(
    st.builds(lambda n: torch.arange(float(n)), st.integers(0, 3)),
    st.none(),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.text(),
)
keys = st.one_of(st.text(max_size=3), st.integers(-3, 3))
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=6,
)


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    mine, other = _trees.children(left), _trees.children(right)
    if mine is None or other is None:
        return mine is other and left == right and type(left) is type(right)
    return type(left) is type(right) and all(
        a == b and equal(x, y) for (a, x), (b, y) in zip(mine, other, strict=True)
    )


@given(nested)
def test_any_plain_tree_comes_back_the_same(tmp_path_factory: Any, tree: Any) -> None:
    assert equal(give(tree, tmp_path_factory.mktemp("tree")), tree)


def test_file_without_a_capture_is_told(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(1)}, path)
    with pytest.raises(hl.HooklineError) as caught:
        hl.load(path)
    assert str(caught.value) == f"`{path}` holds tensors, but no hookline capture."


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    net = Net()
    with hl.capture(net) as got:
        net(torch.ones(1, 3))
    got.save(tmp_path / "run.safetensors")
    return tmp_path / "run.safetensors"


@pytest.mark.parametrize("left", [0, 4, 100, -1])
def test_truncated_file_is_told(stored: Path, left: int) -> None:
    stored.write_bytes(stored.read_bytes()[:left])
    with pytest.raises(hl.HooklineError) as caught:
        hl.load(stored)
    assert str(caught.value).startswith(f"`{stored}` cannot be read as a hookline capture: ")


def test_text_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("this is no capture at all")
    with pytest.raises(hl.HooklineError, match="cannot be read as a hookline capture"):
        hl.load(path)


def test_file_that_is_not_there_is_the_usual_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hl.load(tmp_path / "nothing.safetensors")


def test_newer_version_is_told(stored: Path) -> None:
    with safe_open(str(stored), framework="pt") as file:
        header = json.loads(file.metadata()["hookline.capture"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  no mapping
    header["version"] = 99
    save_file(tensors, stored, metadata={"hookline.capture": json.dumps(header)})
    with pytest.raises(hl.HooklineError) as caught:
        hl.load(stored)
    assert str(caught.value) == (
        f"`{stored}` was written by a newer hookline (format 99, this one reads 1). "
        "Update hookline."
    )


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file from a stranger must not run code."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    net = Net()
    with hl.capture(net) as got:
        net(torch.ones(1, 3))
    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    assert len(round_trip(got, tmp_path)) == 4


def test_loaded_capture_has_no_report(stored: Path) -> None:
    with pytest.raises(hl.NotCaptured, match=r"there is no report: .* or this was loaded"):
        hl.load(stored).report()
    with pytest.raises(hl.NotCaptured, match=r"`fc9` was not asked for.* Nearest: `fc2`, `fc1`"):
        hl.load(stored)["fc9"]


def test_overwritten_value_is_not_stored(tmp_path: Path) -> None:
    net = Net()
    with hl.capture(net, "fc1", clone=False) as got:
        net(torch.ones(1, 3))
    got["fc1"].output.add_(1)
    with pytest.raises(hl.Overwritten):
        got.save(tmp_path / "run.safetensors")
    assert not (tmp_path / "run.safetensors").exists()
