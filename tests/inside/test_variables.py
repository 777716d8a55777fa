"""Variables of a forward, read and changed by name, against twins written by hand."""

from __future__ import annotations

import warnings
from typing import Any

import function_cases as function_cases
import language_cases as language_cases
import pytest
import roundabout_cases as roundabout_cases
import statement_cases as statement_cases
import wrapped_cases as wrapped_cases
import written_cases as written_cases
from small_models import is_clean
from torch import Tensor
from twins import CASES, Notebook, assert_same, double, make, noting, run

import hookline as hl

NAMES = [(kind, name) for kind, case in CASES.items() for name in case.names]


def _run_twin(kind: str, **edit: Any) -> tuple[list[Tensor | None], Notebook]:
    module = make(CASES[kind].kind)
    with noting(**edit) as notebook:
        return run(module, module.twin), notebook


def _run_plain(kind: str) -> list[Tensor | None]:
    module = make(CASES[kind].kind)
    return run(module, module)


def _run_captured(
    kind: str, *addresses: str, **options: Any
) -> tuple[list[Tensor | None], hl.Captured]:
    module = make(CASES[kind].kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)  # the report is looked at instead
        with hl.capture(module, *addresses, clone=True, **options) as got:
            result = run(module, module)
    assert is_clean(module)
    return result, got


@pytest.mark.parametrize("kind", CASES)
def test_twin_computes_what_the_case_does(kind: str) -> None:
    twin, notebook = _run_twin(kind)
    assert_same(_run_plain(kind), twin)
    assert notebook.noted.keys() >= set(CASES[kind].names)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_captured_values_are_those_that_were_assigned(kind: str, name: str) -> None:
    _, notebook = _run_twin(kind)
    result, got = _run_captured(kind, f"@{name}")
    assert_same(got.values(f"@{name}"), [one.value for one in notebook.noted[name]])
    assert got.report().problems == []
    assert_same(result, _run_plain(kind))


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_each_assignment_has_its_number(kind: str, name: str) -> None:
    _, notebook = _run_twin(kind)
    for index, noted in enumerate(notebook.noted[name]):
        _, got = _run_captured(kind, f"@{name}[{index}]")
        assert_same(got[f"@{name}[{index}]"], noted.value)
        assert len(got.values(f"@{name}")) == 1
    _, got = _run_captured(kind, f"@{name}[-1]")
    assert_same(got[f"@{name}[-1]"], notebook.noted[name][-1].value)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_gradients_are_those_of_torch(kind: str, name: str) -> None:
    _, notebook = _run_twin(kind)
    result, got = _run_captured(kind, f"@{name}", grads=True)
    values = got.values(f"@{name}")
    for value, noted in zip(values, notebook.noted[name], strict=True):
        assert_same(value if not isinstance(value, Tensor) else value.detach(), noted.value)
        if isinstance(value, Tensor):
            assert_same(value.grad, noted.grad)
    assert_same(result, _run_plain(kind))


@pytest.mark.parametrize("kind", CASES)
def test_capturing_every_variable_changes_no_bit(kind: str) -> None:
    result, got = _run_captured(kind, "@**", grads=True)
    assert_same(result, _run_plain(kind))
    _, notebook = _run_twin(kind)
    own = {str(row["address"])[1:] for row in hl.sites(make(CASES[kind].kind), "@**")}
    for name in own.intersection(CASES[kind].names):
        assert_same(
            [one.detach() if isinstance(one, Tensor) else one for one in got.values(f"@{name}")],
            [one.value for one in notebook.noted[name]],
        )


def _action(value: Any) -> Any:
    if isinstance(value, Tensor):
        return hl.scale(2)
    return lambda value, at: double(value)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_edit_equals_a_change_by_hand(kind: str, name: str) -> None:
    changed, notebook = _run_twin(kind, edited=name)
    plain = _run_plain(kind)
    module = make(CASES[kind].kind)
    action = _action(notebook.noted[name][0].value)
    with hl.edit(module, {f"@{name}": action}) as edit:
        result = run(module, module)
    assert_same(result, changed)
    assert next(iter(edit.report()))["applied"] == len(notebook.noted[name])
    assert is_clean(module)
    again = run(module, module)
    assert_same(again, plain)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_edit_of_one_assignment_leaves_the_others(kind: str, name: str) -> None:
    _, notebook = _run_twin(kind)
    for index, noted in enumerate(notebook.noted[name]):
        changed, _ = _run_twin(kind, edited=name, index=index)
        module = make(CASES[kind].kind)
        with hl.edit(module, {f"@{name}[{index}]": _action(noted.value)}):
            assert_same(run(module, module), changed)


@pytest.mark.parametrize("kind", CASES)
def test_other_instances_and_the_class_are_untouched(kind: str) -> None:
    cls = CASES[kind].kind
    forward = cls.__dict__.get("forward")
    other = make(cls)
    before = run(other, other)
    module = make(cls)
    attributes = set(vars(module))
    calls: list[str] = []
    hook = hl.hook(module, "@**", lambda value, at: calls.append(at.address))
    assert cls.__dict__.get("forward") is forward
    assert_same(run(other, other), before)
    assert calls == []
    hook.remove()
    assert is_clean(module)
    assert set(vars(module)) == attributes
