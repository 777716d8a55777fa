"""What one side lacks, what the user allows, what was not recorded, what is no counterpart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from made_traces import MemoryTrace, TraceMaker
from torch import Tensor

from hookline._errors import NotComparable
from hookline.diffs.comparing import compare
from hookline.diffs.difference import Difference
from hookline.diffs.traces import ModuleFacts, TraceFacts

X = torch.randn(40, generator=torch.Generator().manual_seed(0))


def make_net(
    given: Mapping[str, Tensor], results: Mapping[str, Tensor], *, type: str = "Give"
) -> MemoryTrace:
    """Make a model with one module that is given and gives what is told."""
    maker = TraceMaker()
    maker.value("", "input", X, caller=None, type="Net")
    for name, tensor in given.items():
        maker.value("give", "input", tensor, leaf=(name,), type=type)
    for name, tensor in results.items():
        maker.value("give", "output", tensor, leaf=(name,), type=type)
    maker.value("", "output", X, caller=None, type="Net")
    return maker.build()


def make_chain(errors: Sequence[float], *, wrong: bool) -> MemoryTrace:
    """Make modules m0, m1, ... in a row whose outputs are off by relative errors."""
    maker = TraceMaker()
    noise = torch.randn(40, generator=torch.Generator().manual_seed(1))
    noise *= X.norm() / noise.norm()
    given = maker.value("", "input", X, caller=None)
    for number, error in enumerate(errors):
        maker.value(f"m{number}", "input", X, same_as=given)
        given = maker.value(f"m{number}", "output", X + (error if wrong else 0) * noise)
    return maker.build()


def compare_chain(errors: Sequence[float], **options: Mapping[str, float]) -> Difference:
    return compare(make_chain(errors, wrong=False), make_chain(errors, wrong=True), **options)


def make_model(results: Mapping[str, Tensor]) -> MemoryTrace:
    """Make a model that itself gives what is told."""
    maker = TraceMaker()
    given = maker.value("", "input", X, caller=None, type="Net")
    maker.value("only", "input", X, same_as=given)
    maker.value("only", "output", X)
    for name, tensor in results.items():
        maker.value("", "output", tensor, leaf=(name,), caller=None, type="Net")
    return maker.build()


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("others", [{"a": X}, {}])
def test_output_that_one_model_lacks(others: Mapping[str, Tensor], is_turned: bool) -> None:
    traces = [make_model({**others, "b": 2 * X}), make_model(others)]
    found = compare(*reversed(traces) if is_turned else traces)
    assert (found.first, found.direction, found.site) == ("", "forward", ":output.b")
    assert found.introduced == float("inf")
    assert f"no such output {'here' if is_turned else 'there'}" in str(found)
    assert found.find(":output.b").verdict == "introduces"


def test_output_that_a_module_inside_lacks_is_none() -> None:
    """Attention weights that nobody uses are there with one backend and not with another."""
    found = compare(make_net({"x": X}, {"a": X, "b": 2 * X}), make_net({"x": X}, {"a": X}))
    assert found.same
    assert list(found.alone_a) == ["give:output.b"]


def test_output_that_another_class_lacks_is_none() -> None:
    """A port may return more than is used."""
    a, b = make_net({"x": X}, {"a": X, "b": 2 * X}), make_net({"x": X}, {"a": X}, type="Port")
    assert compare(a, b).same


def test_input_that_one_side_lacks_is_a_note() -> None:
    a, b = make_net({"x": X}, {"a": X}), make_net({"x": X, "mask": X > 0}, {"a": X})
    found = compare(a, b)
    assert found.same
    assert "`give:input.mask` is given there alone" in found.notes


@pytest.mark.parametrize(("shape", "is_same"), [((0, 4), False), ((0, 3, 1), True)])
def test_nothing_of_another_shape(shape: tuple[int, ...], is_same: bool) -> None:
    a = make_net({"x": X}, {"a": torch.zeros(0, 3)})
    found = compare(a, make_net({"x": X}, {"a": torch.zeros(shape)}))
    assert found.same is is_same
    if not is_same:
        assert "it introduces another shape" in str(found)


def test_what_has_no_number_is_told_as_it_is() -> None:
    zeros, nan = torch.zeros(40), X.clone()
    nan[3] = float("nan")
    for here, there, words in (
        (zeros, X, "it introduces numbers there where there are only zeros here."),
        (X, nan, "it introduces NaN or infinities that the other side lacks."),
    ):
        found = compare(make_net({"x": X}, {"a": here}), make_net({"x": X}, {"a": there}))
        assert words in str(found)


def test_what_comes_of_an_allowed_difference_is_allowed() -> None:
    errors = [0.0, 1e-3, 2e-3, 1e-2]
    assert compare_chain(errors).first == "m1"
    found = compare_chain(errors, allow={"m1": 5e-3})
    assert found.same
    assert {pair.verdict for pair in found.pairs} == {"agrees", "noise"}
    assert compare_chain(errors, allow={"m1": 1e-4}).first == "m1"


def test_new_difference_after_an_allowed_one() -> None:
    found = compare_chain([0.0, 1e-3, 2e-3, 1e-1], allow={"m1": 5e-3})
    assert (found.first, found.site) == ("m3", "m3:output")


def test_allowed_difference_is_never_blamed() -> None:
    """What follows is ten times as large, and the allowed one a thousand times its input."""
    found = compare_chain([0.0, 1e-3, 9e-3], allow={"m1": 5e-3, "m2": 5e-3})
    assert found.first == "m2"


def test_tolerance_of_all_allows_nothing_downstream() -> None:
    assert not compare_chain([0.0, 1e-3, 2e-3], tolerance=1.5e-3).same


def test_what_was_not_recorded_is_no_cause() -> None:
    """A watch knows the classes of modules and nothing of their settings."""
    traces = []
    for scale, is_known in ((1.0, True), (1.1, False)):
        maker = TraceMaker()
        maker.value("", "input", X, caller=None)
        maker.value("fc", "output", scale * X)
        own = ModuleFacts("Linear", training=is_known, config={"a": "1"}, is_known=is_known)
        known = {"": ModuleFacts("Net", is_known=is_known), "fc": own}
        facts = TraceFacts(modules=known, autocast="bfloat16" * is_known, is_known=is_known)
        traces.append(maker.build(facts=facts))
    found = compare(*traces)
    assert (found.first, found.causes) == ("fc", ())


def test_nothing_is_said_to_agree_that_was_not_compared() -> None:
    traces = []
    for count, scale in ((8, 1.0), (4, 1.1)):
        maker = TraceMaker()
        x = torch.ones(count, 4)
        value = maker.value("fc", "output", x, caller="")
        weight = maker.parameter("fc", "weight", torch.ones(4))
        maker.gradient(value, x)
        maker.parameter_gradient(weight, scale * torch.ones(4))
        trace = maker.build()
        if scale != 1:
            del trace.values[0][value]
        traces.append(trace)
    found = compare(*traces)
    assert str(found).startswith("Runs differ at fc (Linear), and no values before it were comp")
    assert (found.alone_a, found.alone_b) == ((), ())


def test_names_that_agree_by_chance() -> None:
    def make(sizes: Sequence[int], types: Sequence[str]) -> MemoryTrace:
        maker = TraceMaker()
        maker.value("", "input", X, caller=None, type="Sequential")
        for number, (size, kind) in enumerate(zip(sizes, types, strict=True)):
            maker.value(f"{number}", "output", torch.randn(size), type=kind)
            maker.parameter(f"{number}", "weight", torch.randn(size), type=kind)
        return maker.build()

    one = make([5, 6, 7], ["Linear", "GELU", "Linear"])
    with pytest.raises(NotComparable, match="are of different models: only 1 of 7 values and"):
        compare(one, make([8, 9, 10], ["Conv1d", "Flatten", "Linear"]))
    # The same modules in other sizes are a difference to be told.
    assert not compare(one, make([8, 9, 10], ["Linear", "GELU", "Linear"])).same
