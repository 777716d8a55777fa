"""Modules that run in several threads: replicas of data parallelism, servers, loaders."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


def _run_threads(*functions: Callable[[], object]) -> None:
    """Run functions in threads of their own, all at once; raise what they raise."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def _replicate(model: nn.Sequential) -> nn.Sequential:
    """Make a replica as `nn.DataParallel` does: shallow, with weights that are no parameters."""
    replica = model._replicate_for_data_parallel()
    for name, child in model._modules.items():
        assert child is not None
        twin = child._replicate_for_data_parallel()
        for key, parameter in child._parameters.items():
            setattr(twin, key, None if parameter is None else parameter * 1)
        replica._modules[name] = twin
    return replica


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh())


def test_replicas_in_threads_are_recorded_under_the_model() -> None:
    model = _model()
    inputs = [torch.randn(3, 2) for _ in range(4)]
    expected = [model(x) for x in inputs]
    replicas = []
    with hl.capture(model, "*") as got:
        replicas = [_replicate(model) for _ in inputs]
        _run_threads(*(lambda r=r, x=x: r(x) for r, x in zip(replicas, inputs, strict=True)))
    assert len(got.calls) == 4
    for call in got.calls:
        assert [(one.path, one.visit) for one in call] == [("0", 0), ("1", 0)]
        assert torch.equal(call["0"].output.tanh(), call["1"].output)
    outputs = [call["1"].output for call in got.calls]
    for value in expected:
        assert sum(torch.equal(value, out) for out in outputs) == 1
    del replicas


def test_replicas_give_gradients_of_the_call_they_belong_to() -> None:
    model = _model()
    inputs = [torch.full((1, 2), float(i)) for i in range(3)]
    with hl.capture(model, "0", grads=True) as got:
        replicas = [_replicate(model) for _ in inputs]
        outputs: dict[int, Tensor] = {}
        _run_threads(
            *(
                lambda i=i, r=r, x=x: outputs.update({i: r(x)})
                for i, (r, x) in enumerate(zip(replicas, inputs, strict=True))
            )
        )
        sum((i + 1) * out.sum() for i, out in outputs.items()).backward()
    for index, x in enumerate(inputs):
        hidden = model[0](x)
        call = next(call for call in got.calls if torch.equal(call["0"].output, hidden))
        expected = (index + 1) * (1 - hidden.tanh() ** 2)
        torch.testing.assert_close(call["0:output.grad"], expected)


def test_edit_applies_to_replicas() -> None:
    model = _model()
    outputs: list[Tensor] = []
    with hl.edit(model, {"0": hl.zero()}):
        replicas = [_replicate(model) for _ in range(2)]
        _run_threads(*(lambda r=r: outputs.append(r(torch.ones(1, 2))) for r in replicas))
    assert [out.tolist() for out in outputs] == [[[0.0, 0.0]]] * 2


def test_two_threads_that_share_a_model_do_not_mix_their_calls() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    barrier = threading.Barrier(2)

    def wait(*_: object) -> None:
        barrier.wait(timeout=30)

    model[1].register_forward_hook(wait)
    inputs = [torch.zeros(1, 2), torch.ones(1, 2)]
    with hl.capture(model, "*", grads=True) as got:
        _run_threads(*(lambda x=x: model(x).sum().backward() for x in inputs))
    assert len(got.calls) == 2
    for call in got.calls:
        assert [(one.path, one.visit) for one in call] == [("0", 0), ("1", 0), ("2", 0)]
        assert torch.equal(call["0"].output.tanh(), call["1"].output)
        assert torch.equal(model[2](call["1"].output), call["2"].output)
        expected = model[2].weight.sum(0, keepdim=True)
        torch.testing.assert_close(call["1:output.grad"], expected)
    assert not torch.equal(got.calls[0]["0"].output, got.calls[1]["0"].output)


def test_two_threads_each_with_this_thread_see_only_their_own() -> None:
    model = _model()
    inside = threading.Barrier(2)
    results: dict[int, hl.Captured] = {}

    def work(number: int) -> None:
        x = torch.full((1, 2), float(number))
        with hl.capture(model, "0", this_thread=True) as got:
            inside.wait(timeout=30)  # both are attached now
            model(x)
            model(x)
            inside.wait(timeout=30)
        results[number] = got

    with pytest.warns(hl.HooklineWarning, match=r"executions in other threads were left out"):
        _run_threads(lambda: work(1), lambda: work(2))
    for number, got in results.items():
        assert len(got.calls) == 2
        for call in got.calls:
            assert torch.equal(call["0"].output, model[0](torch.full((1, 2), float(number))))
    assert not model[0]._forward_hooks


def test_threads_that_attach_at_the_same_moment_are_both_heard() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            model, both = _model(), threading.Barrier(2)
            results: list[hl.Captured] = []

            def work(both: threading.Barrier = both, model: nn.Module = model) -> None:
                both.wait(timeout=30)
                with hl.capture(model, "0", last=True) as got:
                    both.wait(timeout=30)
                    model(torch.ones(1, 2))
                    both.wait(timeout=30)
                results.append(got)  # noqa: B023

            _run_threads(work, work)
            assert [len(got) for got in results] == [1, 1]
            assert not model[0]._forward_hooks
    finally:
        sys.setswitchinterval(interval)


def test_edit_of_this_thread_leaves_other_threads_alone() -> None:
    model = _model()
    plain = model(torch.ones(1, 2))
    outputs: list[Tensor] = []
    with hl.edit(model, {"0": hl.zero()}, this_thread=True):
        _run_threads(lambda: outputs.append(model(torch.ones(1, 2))))
        here = model(torch.ones(1, 2))
    assert torch.equal(outputs[0], plain)
    assert torch.equal(here, torch.zeros(1, 2))


def test_gradients_of_a_forward_in_another_thread_reach_its_call() -> None:
    """Backward may run on any thread: nothing a hook needs may be thread-local."""
    model = _model()
    outputs: list[Tensor] = []
    with hl.capture(model, "0", grads=True) as got:
        _run_threads(lambda: outputs.append(model(torch.ones(1, 2))))
        model(torch.zeros(1, 2))
        _run_threads(lambda: outputs[0].sum().backward())
    expected = 1 - model[0](torch.ones(1, 2)).tanh() ** 2
    torch.testing.assert_close(got.calls[0]["0:output.grad"], expected)
    with pytest.raises(hl.NotCaptured):
        got.calls[1]["0:output.grad"]


def test_context_variables_of_the_caller_are_visible_in_hooks_on_cpu() -> None:
    """hookline itself uses none; a user's hook sees what torch gives its thread."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    model = _model()
    seen: list[str] = []
    with hl.hook(model, ["0", "0:output.grad"], lambda value, at: seen.append(variable.get())):
        model(torch.ones(1, 2)).sum().backward()
    assert seen == ["set", "set"]


def test_interrupted_call_in_one_thread_does_not_disturb_another() -> None:
    model = _model()
    handle = hl.hook(model, "0", _raise_in_named_thread, edit=True)
    with hl.capture(model, "*") as got:

        def interrupted() -> None:
            with pytest.raises(KeyboardInterrupt):
                model(torch.ones(1, 2))

        _run_threads(interrupted)
        handle.remove()
        out = model(torch.ones(1, 2))
    assert torch.equal(got.calls[-1]["1"].output, out)
    assert [(one.path, one.visit) for one in got.calls[-1]] == [("0", 0), ("1", 0)]


def _raise_in_named_thread(value: Tensor, at: hl.At) -> Tensor:
    raise KeyboardInterrupt
