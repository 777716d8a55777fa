"""What is captured is what flowed: every value and gradient of random models against torch's own.

Values are compared with copies made by plain forward hooks. A gradient is compared with that of a
zero added at the same place in a run of its own, which is torch's word for "the gradient here".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from comparing_runs import is_close, same_bits
from hypothesis import given, settings
from random_models import Spec, models
from torch import Tensor, nn
from twin_runs import Place, Run, flatten, rebuild, run, run_plain, run_probed

import hookline as hl

Seen = dict[Place, list[Tensor | None]]


def probe(spec: Spec, port: str, plain: Run) -> Seen | None:
    """Give the gradients at a port of every visit; None where adding zeros changes the model.

    It does where an alias is changed in place: the sum is no alias. An argument that is changed in
    place is left out for the same reason: the caller's other uses of it count from then on.
    """
    probed = run_probed(spec, port)
    if probed.error is not None or not all(map(same_bits, probed.output, plain.output)):
        return None
    if not all(is_close(probed.grads[name], grad) for name, grad in plain.grads.items()):
        return None
    return {
        place: [None if one is None else one.grad for one in probes]
        for place, probes in probed.probes.items()
        if place not in plain.changed_inputs
    }


def read(got: hl.Captured, name: str, visit: int) -> Any:
    try:
        return got[name, visit]
    except (hl.Overwritten, hl.NotCaptured) as error:
        return error


def compare_values(got: hl.Captured, plain: Run, seen: Counter[str]) -> None:
    assert {(one.path, one.visit) for one in got} == {place[:2] for place in plain.values}
    for (name, visit, port), expected in plain.values.items():
        value = read(got, f"{name}:{port}", visit)
        if isinstance(value, hl.Overwritten):
            seen["overwritten"] += 1
            continue
        found = flatten(value)
        assert len(found) == len(expected), (name, visit, port)
        assert all(map(same_bits, found, expected)), (name, visit, port)
        seen["values"] += 1


def compare_gradients(got: hl.Captured, expected: Seen, seen: Counter[str]) -> None:
    for (name, visit, port), grads in expected.items():
        found = read(got, f"{name}:{port}.grad", visit)
        assert not isinstance(found, hl.Overwritten)
        if isinstance(found, hl.NotCaptured):
            assert not any(grad is not None and grad.any() for grad in grads), (name, visit, port)
            seen["no gradient"] += 1
            continue
        leaves = flatten(found)
        assert len(leaves) == len(grads), (name, visit, port)
        for leaf, grad in zip(leaves, grads, strict=True):
            assert is_close(leaf, grad), (name, visit, port)
        seen["gradients"] += 1


def test_capture_keeps_what_flowed_or_says_it_is_lost() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(models())
    def every_model(spec: Spec) -> None:
        plain = run_plain(spec)
        if plain.error is None:
            watched = run(spec, lambda model: hl.capture(model, "**", inputs=True))
            compare_values(watched.got, plain, seen)

    every_model()
    assert seen["values"] > 10 * seen["overwritten"] > 0, seen


def test_capture_with_copies_keeps_every_value() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(models())
    def every_model(spec: Spec) -> None:
        plain = run_plain(spec)
        if plain.error is None:
            watched = run(spec, lambda model: hl.capture(model, "**", inputs=True, clone=True))
            compare_values(watched.got, plain, seen)

    every_model()
    assert seen["values"] > 500, seen
    assert not seen["overwritten"]


def test_captured_gradients_are_those_of_a_zero_added_there() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(models())
    def every_model(spec: Spec) -> None:
        plain = run_plain(spec)
        if plain.error is not None:
            return
        at_output, at_input = probe(spec, "output", plain), probe(spec, "input", plain)
        for grads in (True, "all"):
            watched = run(spec, lambda model: hl.capture(model, "**", inputs=True, grads=grads))  # noqa: B023
            if watched.error is not None:
                continue
            compare_values(watched.got, plain, seen)
            if at_output is not None:
                compare_gradients(watched.got, at_output, seen)
            if at_input is not None and grads == "all":
                compare_gradients(watched.got, at_input, seen)

    every_model()
    assert seen["gradients"] > 1000, seen


def test_captured_parameters_have_the_gradients_of_the_model() -> None:
    @settings(max_examples=30)
    @given(models())
    def every_model(spec: Spec) -> None:
        plain = run_plain(spec)
        if plain.error is not None:
            return
        watched = run(spec, lambda model: hl.capture(model, "**", params=True, grads=True))
        if watched.error is not None:
            return
        assert watched.model is not None
        for name, parameter in watched.model.named_parameters():
            assert same_bits(watched.got[name], parameter)
            if parameter.grad is None:
                assert f"{name}:grad" not in watched.got
            else:
                assert same_bits(watched.got[f"{name}:grad"], watched.grads[name])

    every_model()


def test_hooks_receive_what_flowed() -> None:
    """The same for `hl.hook`: its values are there only while it runs, so they are copied."""
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(models())
    def every_model(spec: Spec) -> None:
        plain = run_plain(spec)
        if plain.error is not None:
            return
        values: dict[Place, Any] = {}
        grads: dict[Place, dict[tuple[Any, ...], Tensor]] = {}

        def keep(value: Any, at: hl.At) -> None:
            place = (at.path, at.visit, at.port)
            if at.is_grad:
                places = grads.setdefault(place, {})
                assert at.leaf not in places
                if value is not hl.MISSING:
                    places[at.leaf] = value.clone()
            elif not at.recompute:
                values[place] = rebuild(value, Tensor.clone)

        @contextmanager
        def watch(model: nn.Module) -> Iterator[None]:
            with ExitStack() as stack:
                for where in ("**", "**:input", "**:output.grad"):
                    stack.enter_context(hl.hook(model, where, keep))
                yield

        watched = run(spec, watch)
        if watched.error is not None:
            return
        assert values.keys() == plain.values.keys()
        for place, expected in plain.values.items():
            assert all(map(same_bits, flatten(values[place]), expected)), place
        for place, probed in (probe(spec, "output", plain) or {}).items():
            found = grads.get(place, {})
            distinct = {id(one) for one in probed if one is not None and one.any()}
            assert len(found) >= len(distinct), place
            for leaf, grad in found.items():
                assert is_close(grad, probed[position(values[place], leaf)]), (place, leaf)
            seen["gradients"] += len(found)

    every_model()
    assert seen["gradients"] > 500, seen


def position(tree: Any, leaf: tuple[Any, ...]) -> int:
    """Give the number of a leaf among all leaves of a value."""
    tensor = tree
    for key in leaf:
        is_item = not isinstance(key, str) or isinstance(tensor, dict)
        tensor = tensor[key] if is_item else getattr(tensor, key)
    return next(i for i, one in enumerate(flatten(tree)) if one is tensor)
