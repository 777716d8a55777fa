"""Names that are not there or cannot be reached: what the message says, and what does work."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import is_clean
from torch import Tensor, nn
from twins import make_input

import hookline as hl


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        scores = self.lin(x)
        if flag:
            extra = scores * 2
            scores = extra
        for _ in range(2):
            scores = torch.sin(scores)
        return scores


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_wrong_name_lists_the_names_there_are() -> None:
    with pytest.raises(hl.NoSuchSite) as caught:
        hl.capture(Model(), "blocks.0@score")
    text = str(caught.value)
    assert "`blocks.0@score`: `Block.forward` has no `@score`. Nearest: `@scores`." in text
    for name in ("x", "flag", "scores", "extra", "return"):
        assert f"`@{name}`" in text


@pytest.mark.parametrize("attach", ["capture", "hook", "edit", "sites"])
def test_wrong_name_raises_wherever_it_is_given(attach: str) -> None:
    model = Model()
    calls: dict[str, Any] = {
        "capture": lambda: hl.capture(model, "blocks.*@nothing"),
        "hook": lambda: hl.hook(model, "blocks.*@nothing", lambda value, at: None),
        "edit": lambda: hl.edit(model, {"blocks.*@nothing": hl.zero()}),
        "sites": lambda: hl.sites(model, "blocks.*@nothing"),
    }
    with pytest.raises(hl.NoSuchSite, match="@nothing"):
        calls[attach]()
    assert is_clean(model)


def test_name_of_a_child_module_is_pointed_to() -> None:
    with pytest.raises(hl.NoSuchSite, match=r"`lin` is a module: write `blocks\.0\.lin@input`"):
        hl.capture(Model(), "blocks.0@lin.input")


def test_container_has_no_names() -> None:
    with pytest.raises(hl.NoSuchSite, match=re.escape("`blocks.*@scores`")):
        hl.capture(Model(), "blocks@scores")


def test_unknown_name_in_a_helper_is_told_when_it_is_called() -> None:
    def helper(a: Tensor) -> Tensor:
        w = a * 2
        return w

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            function = helper if x.dim() else None
            return function(x)

    model = Late()
    handle = hl.hook(model, "@function.nothing", lambda value, at: None)
    with pytest.raises(hl.NoSuchSite, match="it has only `a`, `w`, `return`"):
        model(make_input())
    handle.remove()
    assert is_clean(model)


def test_branch_that_is_not_taken_is_reported_with_its_line() -> None:
    model, x = Model(), make_input()
    line = Block.forward.__code__.co_firstlineno + 3
    with (
        pytest.warns(hl.HooklineWarning, match=rf"never assigned: .*not line {line}: a branch"),
        hl.capture(model, "blocks.0@extra") as got,
    ):
        model(x)
    with pytest.raises(hl.NotCaptured):
        got["blocks.0@extra"]
    with (
        pytest.warns(hl.HooklineWarning, match=rf"blocks.0@extra: zero.*not line {line}"),
        hl.edit(model, {"blocks.0@extra": hl.zero()}),
    ):
        model(x)
    assert is_clean(model)


def test_number_beyond_what_ran_is_reported_with_the_last() -> None:
    model, x = Model(), make_input()
    match = r"only 3 times in a visit, so there is no number 3; .*`blocks.0@scores\[2\]`"
    with pytest.warns(hl.HooklineWarning, match=match), hl.capture(model, "blocks.0@scores[3]"):
        model(x)
    with (
        pytest.warns(hl.HooklineWarning, match="only 3 times in a visit"),
        hl.edit(model, {"blocks.0@scores[3]": hl.zero()}),
    ):
        model(x)
    with (
        pytest.warns(hl.HooklineWarning, match=r"blocks.0@scores\[-4\]"),
        hl.capture(model, "blocks.0@scores[-4]"),
    ):
        model(x)


@pytest.mark.parametrize("where", ["@scores[-1]", "/sin[-1]"])
def test_edit_of_the_last_of_several_is_refused(where: str) -> None:
    """Which one is the last is known only when the next does not come."""
    model = Model()
    with pytest.raises(hl.NoSuchSite, match="known only when forward ends"):
        hl.edit(model, {f"blocks.0{where}": hl.scale(2)})
    assert is_clean(model)


def test_edit_of_the_last_is_made_where_the_source_shows_one() -> None:
    model, x = Model(), make_input()
    with hl.edit(model, {"blocks.0@x[-1]": hl.scale(2)}):
        out = model(x)
    assert torch.equal(out, model(x * 2))


def test_several_assignments_have_to_be_told_apart() -> None:
    model, x = Model(), make_input()
    with hl.capture(model, "blocks.0@scores") as got:
        model(x)
    with pytest.raises(hl.AmbiguousRead, match=r"assigned 3 times.*got\['blocks.0@scores\[0\]'\]"):
        got["blocks.0@scores"]
    with pytest.raises(hl.NotCaptured, match="there is no number 7"):
        got["blocks.0@scores[7]"]
    with pytest.raises(hl.NotCaptured, match="@flag"):
        got["blocks.0@flag"]
    with pytest.raises(hl.NotCaptured):
        got.values("blocks.0@flag")
    with pytest.raises(hl.NotCaptured):
        got.values("blocks.0@scores[7]")
    assert torch.equal(got.values("blocks.0@scores[-1]")[0], got["blocks.0@scores[2]"])


TEXT = """
import torch
from torch import nn

class NoText(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.sin(self.lin(x))
        return y * 2
"""


def make_without_source() -> nn.Module:
    found: dict[str, Any] = {"__name__": "made_by_exec"}
    exec(compile(TEXT, "<made by exec>", "exec"), found)
    model: nn.Module = found["NoText"]()
    return model


def test_without_source_variables_are_refused_and_operations_named() -> None:
    model, x = make_without_source(), make_input()
    with pytest.raises(hl.NoSuchSite, match=r"no source.*`/sin") as caught:
        hl.capture(model, "@y")
    assert "is what is assigned to `y`" in str(caught.value)
    with hl.capture(model, "/sin", "/mul") as got:
        out = model(x)
    assert torch.equal(got["/sin"], model.lin(x).sin())
    assert torch.equal(got["/mul"], out)
    with hl.edit(model, {"/sin": hl.scale(2)}):
        assert torch.equal(model(x), model.lin(x).sin() * 2 * 2)
    assert is_clean(model)


def test_without_source_a_child_is_named_as_a_module() -> None:
    text = TEXT.replace("torch.sin(self.lin(x))", "self.lin(x)")
    found: dict[str, Any] = {"__name__": "made_by_exec"}
    exec(compile(text, "<made by exec>", "exec"), found)
    with pytest.raises(hl.NoSuchSite, match="`lin` is what is assigned to `y`"):
        hl.capture(found["NoText"](), "@y")


def test_pattern_passes_over_modules_without_source() -> None:
    model = nn.Sequential(make_without_source(), Block())
    with hl.capture(model, "*@return") as got:
        model(make_input())
    assert list(got.tensors()) == ["1@return"]


def test_file_edited_since_import_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "edited_model.py"
    file.write_text(TEXT)
    spec = importlib.util.spec_from_file_location("edited_model", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, x = module.NoText(), make_input()
    with hl.capture(model, "@y") as got:
        model(x)
    assert torch.equal(got["@y"], model.lin(x).sin())
    other = module.NoText
    file.write_text(TEXT.replace("return y * 2", "return y * 3"))
    linecache.checkcache(str(file))
    spec.loader.exec_module(module)
    file.write_text(TEXT.replace("torch.sin", "torch.cos"))
    linecache.checkcache(str(file))
    with pytest.raises(hl.NoSuchSite, match="changed since it was imported"):
        hl.capture(module.NoText(), "@y")
    assert torch.equal(other.forward(model, x), model.lin(x).sin() * 2)


class Exchanging:
    """A decorator that is a class and holds the function out of reach."""

    def __init__(self, function: Any) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __get__(self, this: Any, owner: Any) -> Any:
        return self if this is None else functools.partial(self.function, this)


def test_decorator_class_is_refused_and_operations_work() -> None:
    class Decorated(Block):
        @Exchanging
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(self.lin(x))
            return y

    model, x = Decorated(), make_input()
    plain = model(x)
    with pytest.raises(hl.NoSuchSite, match="Exchanging"):
        hl.capture(model, "@y")
    with hl.capture(model, "/sin") as got:
        assert torch.equal(model(x), plain)
    assert torch.equal(got["/sin"], plain)
    assert is_clean(model)


def test_lambda_and_builtin_forwards_are_refused() -> None:
    class Lambda(Block):
        forward = lambda self, x: self.lin(x)  # noqa: E731

    class Builtin(nn.Module):
        forward = torch.sin

    with pytest.raises(hl.NoSuchSite):
        hl.capture(Lambda(), "@y")
    with pytest.raises(hl.NoSuchSite):
        hl.capture(Builtin(), "@y")


class WithAnAssert(Block):
    """Pytest rewrites the assert in this file: the running code is not the source's."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2, "rows"
        y = self.lin(x)
        return y * 2


def test_forward_that_pytest_rewrote_is_read_all_the_same() -> None:
    model, x = WithAnAssert(), make_input()
    with hl.edit(model, {"@y": hl.scale(2)}), hl.capture(model, "@y") as got:
        out = model(x)
    assert torch.equal(got["@y"], model.lin(x) * 2)
    assert torch.equal(out, model.lin(x) * 2 * 2)
    assert is_clean(model)
