"""`torch.compile` skips hooks added later, in silence; hookline is heard in its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch import nn

import hookline as hl

# The compiler's own remarks about what it cannot trace, which a user sees as warnings.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))


def _wrapped(model: nn.Sequential) -> nn.Module:
    return torch.compile(model, backend="eager")


def _in_place(model: nn.Sequential) -> nn.Module:
    model.compile(backend="eager")
    return model


def _part_wrapped(model: nn.Sequential) -> nn.Module:
    model[1] = torch.compile(model[1], backend="eager")
    return model


def _part_in_place(model: nn.Sequential) -> nn.Module:
    model[1].compile(backend="eager")
    return model


COMPILED: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "torch.compile(model)": _wrapped,
    "model.compile()": _in_place,
    "a compiled part": _part_wrapped,
    "a part compiled in place": _part_in_place,
}
PYTHON: dict[str, Callable[..., Any]] = {
    "hook": lambda model, **how: hl.hook(model, "1.0", lambda value, at: None, **how),
    "gradient": lambda model, **how: hl.hook(model, "1.0:output.grad", print, **how),
    "function": lambda model, **how: hl.edit(model, {"1.0": lambda value, at: value}, **how),
    "register": lambda model, **how: hl.register_backward_hook(model, "1.0", print, **how),
}


def _is_clean(model: nn.Module) -> bool:
    return not any(
        one._forward_hooks or one._forward_pre_hooks or "forward" in one.__dict__
        for one in model.modules()
        if type(one).__name__ != "OptimizedModule"
    )


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_modules_are_captured_and_edited(kind: str, has_run: bool) -> None:
    model = COMPILED[kind](_model())
    x = torch.randn(3, 2)
    if has_run:
        model(x)
    with hl.capture(model, "0", "1.0", "1.1", grads=True) as got:
        out = model(x)
        out.sum().backward()
    assert sorted(one.path for one in got) == ["0", "1.0", "1.1"]  # no `_orig_mod` in any name
    assert torch.equal(got["1.1"].output, out)
    assert torch.equal(got["1.0"].output.tanh(), out)
    torch.testing.assert_close(got["1.0:output.grad"], 1 - out.detach() ** 2)
    with hl.edit(model, {"1.0": hl.zero()}):
        assert torch.equal(model(x), torch.zeros(3, 2))
    assert _is_clean(model)
    assert torch.equal(model(x), out)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("attach", PYTHON)
@pytest.mark.parametrize("kind", COMPILED)
def test_functions_of_python_are_refused_inside_graphs(
    kind: str, attach: str, has_run: bool
) -> None:
    model = COMPILED[kind](_model())
    if has_run:
        model(torch.ones(1, 2))
    with pytest.raises(hl.UnsupportedModel, match=r'compiled="eager"'):
        PYTHON[attach](model)
    assert _is_clean(model)


@pytest.mark.parametrize("kind", COMPILED)
def test_functions_of_python_run_where_models_are_run_eagerly(kind: str) -> None:
    model = COMPILED[kind](_model())
    x = torch.randn(3, 2)
    expected = model(x)
    seen: list[str] = []
    with hl.hook(model, "1.0", lambda value, at: seen.append(at.address), compiled="eager"):
        assert torch.equal(model(x), expected)
        with hl.capture(model, "1.1", compiled="eager") as got:
            model(x)
        model(x)
    assert seen == ["1.0:output"] * 3
    assert torch.equal(got["1.1"].output, expected)
    model(x)
    assert len(seen) == 3
    with pytest.raises(ValueError, match=r"compiled='both' means nothing"):
        hl.capture(model, "1.0", compiled="both")  # type: ignore[arg-type]


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_modules_work_while_forced_eager(kind: str, has_run: bool) -> None:
    plain = _model()
    model = COMPILED[kind](plain)
    x = torch.randn(3, 2)
    expected = model(x).detach() if has_run else None
    with torch.compiler.set_stance("force_eager"):
        with hl.capture(model, "0", "1.0", "1.1", grads=True) as got:
            out = model(x)
            out.sum().backward()
        with hl.edit(model, {"1.0": hl.zero()}):
            assert torch.equal(model(x), torch.zeros(3, 2))
    assert [one.path for one in got] == ["0", "1.0", "1.1"]  # no `_orig_mod` in any name
    assert torch.equal(got["1.1"].output, out)
    torch.testing.assert_close(got["1.0:output.grad"], 1 - out.detach() ** 2)
    assert expected is None or torch.equal(out, expected)
    assert _is_clean(model)
    assert torch.equal(model(x), out)  # compiled again


@pytest.mark.parametrize("kind", COMPILED)
def test_model_compiled_while_attached_raises_or_works(kind: str) -> None:
    model = _model()
    x = torch.randn(3, 2)
    plain = model(x)
    with hl.edit(model, {"1.0": hl.zero()}), hl.capture(model, "1.0") as got:
        model(x)
        compiled = COMPILED[kind](model)
        try:
            out = compiled(x)
        except Exception as error:
            _check_refusal(error)
        else:
            assert torch.equal(out, torch.zeros(3, 2))
            assert len(got.calls) == 2
    torch._dynamo.reset()
    assert torch.equal(compiled(x), plain)


def _check_refusal(error: BaseException) -> None:
    """Require that an error, or one behind it, says what to do."""
    assert "eager" in _whole_text(error)


def _whole_text(error: BaseException) -> str:
    text = str(error)
    for more in (error.__cause__, error.__context__):
        if more is not None:
            text += _whole_text(more)
    return text


def test_model_compiled_and_run_before_can_be_hooked_once_it_is_not() -> None:
    model = _model()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(3, 2)
    compiled(x)
    with hl.capture(model, "1.0") as got:  # the original is not compiled
        out = model(x)
    assert torch.equal(got["1.0"].output.tanh(), out)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_function_hears_of_hooks_that_come_later(backend: str) -> None:
    """Torch guards on no empty hook dictionary; it does guard on the module's own forward."""
    model = _model()
    x = torch.randn(3, 2)
    compiled = torch.compile(lambda x: model(x) * 2, backend=backend, fullgraph=True)
    expected = compiled(x)
    with hl.capture(model, "1.0", grads=True) as got:
        compiled(x).sum().backward()
    assert torch.equal(got["1.0"].output.tanh() * 2, expected)
    assert got["1.0"].output.grad is not None
    with hl.edit(model, {"1.0": hl.zero()}):
        assert torch.equal(compiled(x), torch.zeros(3, 2))
    assert torch.equal(compiled(x), expected)


def test_graphs_are_found_again() -> None:
    """One graph without hooks and one for each set of sites, however often they come and go."""
    model = _model()
    x = torch.randn(3, 2)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    compiled(x)
    for _ in range(3):
        with hl.capture(model, "1.0", grads=True):
            compiled(x).sum().backward()
            compiled(x).sum().backward()
        compiled(x)
    assert counter.frame_count == 2
    with hl.capture(model, "0"):
        compiled(x)
    compiled(x)
    assert counter.frame_count == 3


def test_compiled_function_over_an_attached_model_raises_or_works() -> None:
    model = _model()
    x = torch.randn(3, 2)
    compiled = torch.compile(lambda x: model(x) * 2, backend="eager")
    with hl.edit(model, {"1.0": hl.zero()}):
        try:
            out = compiled(x)
        except Exception as error:
            _check_refusal(error)
            model(x)
        else:
            assert torch.equal(out, torch.zeros(3, 2))
    assert torch.equal(compiled(x), model(x) * 2)  # nothing of the edit was compiled in


def test_compiled_function_is_watched_while_forced_eager() -> None:
    model = _model()
    x = torch.randn(3, 2)
    compiled = torch.compile(lambda x: model(x) * 2, backend="eager")
    compiled(x)
    with torch.compiler.set_stance("force_eager"), hl.capture(model, "1.0") as got:
        out = compiled(x)
    assert torch.equal(got["1.0"].output.tanh() * 2, out)


def test_global_hook_inside_a_compiled_region_raises_or_works() -> None:
    model = _model()
    x = torch.randn(3, 2)
    compiled = torch.compile(lambda x: model(x) * 2, backend="eager")
    seen: list[str] = []
    with hl.hook(None, nn.Tanh, lambda value, at: seen.append(at.path)):
        try:
            compiled(x)
        except Exception as error:
            _check_refusal(error)
        else:
            assert seen == ["Tanh"]


def test_hooks_leave_the_compiler_without_a_trace() -> None:
    """After hookline has gone a model compiles into one graph, as if it had never been there."""
    model = _model()
    x = torch.randn(3, 2)
    with hl.capture(model, grads=True):
        model(x).sum().backward()
    hl.hook(None, "**", lambda value, at: None).remove()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        compiled(x)
    assert counter.frame_count == 1
