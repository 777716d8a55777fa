"""Whatever a capture can name at a module's border, inside a compiled graph as in an eager run."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from blocks import count
from small_models import Twice
from torch import Tensor, nn

import hookline as hl
from hookline._trees import Opaque

# The compiler looks at the .grad of what goes into a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A value of a model, whose fields cannot be set."""

    u: Any
    v: Any


class Inner(nn.Module):
    """Take arguments in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor, *rest: Tensor, scale: Any = None, extra: Any = None) -> Tensor:
        h: Tensor = self.fc(x) * scale + extra["a"] * extra["b"][0]
        for one in rest:
            h = h + one
        return h


class Nested(nn.Module):
    """Give values in every container there is, one tensor in two of them."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        twice = x + 1
        return {
            "a": twice,
            "b": (x * 2, [x * 3]),
            "plain": (None, True, "it's", 7),
            "pair": Pair(x.sin(), x.cos()),
            "fixed": Fixed(x.exp(), 3),
            "again": twice,
            "ordered": OrderedDict(k=x.tanh()),
        }


class Model(nn.Module):
    """Modules that nest, write over their input, hand it back, and run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.nested = Inner(), Nested()
        self.over, self.same, self.fc = nn.ReLU(inplace=True), nn.Identity(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        extra = {"a": x * 0.5, "b": (x * 0.25,)}
        n = self.nested(self.inner(x, x * 0.1, x * 0.2, scale=x.abs() + 1, extra=extra))
        h = n["a"] + n["b"][0] + n["b"][1][0] + n["pair"].a * n["pair"].b + n["fixed"].u
        h = self.over(h + n["again"] * n["ordered"]["k"])
        h = self.same(h) + h
        out: Tensor = self.fc(self.fc(h).tanh())
        return out


class Rectified(nn.Module):
    """A linear layer over many dimensions, which gives a view, written over by the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.over = nn.Linear(3, 3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.over(self.fc(x)) * x
        return out


class Chunks(nn.Module):
    """Views that are made together, one of them used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()

    def forward(self, x: Tensor) -> Tensor:
        first, _, last = self.parts(x)
        return first * last


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.fc(x).chunk(3, -1)


Run = Callable[[Callable[[Tensor], Tensor], Tensor], Any]


def backward(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    model(x).square().sum().backward()


def backward_twice(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_calls(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    (model(x) * model(x * 2)).sum().backward()


def autocast(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().sum()
    loss.backward()


def without_grad(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def inference(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.inference_mode():
        model(x)


def read(got: hl.Captured) -> dict[Any, Any]:
    """List every value, and every gradient of each backward, that a capture holds."""
    found: dict[Any, Any] = {}
    for call in got.calls:
        for record in call.records.values():
            where = (record.path, call.number, record.visit)
            found.update({(*where, *key): kept.tensor for key, kept in record.kept.items()})
            for key, passes in record.grads.items():
                for number, kept in enumerate(passes.values()):
                    found[*where, *key, "grad", number] = kept.tensor
    return found


def compare(
    model: nn.Module, *where: str, run: Run = backward, x: Tensor | None = None, **options: Any
) -> tuple[hl.Captured, hl.Captured]:
    """Capture an eager copy and a compiled model, twice; require the same, and one compilation."""
    x = torch.randn(4, 3) if x is None else x
    twin = copy.deepcopy(model)
    counter = count("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)  # the reports are compared
        with hl.capture(twin, *where, **options) as eager:
            run(twin, x.clone().requires_grad_())
        capture = hl.capture(compiled, *where, **options)
        for _ in range(2):
            with capture as got:
                run(compiled, x.clone().requires_grad_())
    assert counter.frame_count == 1
    expected, found = read(eager), read(got)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert str(got.report()) == str(eager.report())
    return eager, got


@pytest.mark.parametrize(
    "run",
    [backward, backward_twice, two_calls, autocast, without_grad],
    ids=lambda one: one.__name__,
)
def test_everything_at_every_border_is_as_in_an_eager_run(run: Run) -> None:
    _, got = compare(Model(), "**", inputs=True, grads="all", run=run)
    assert len(read(got)) > 20


def test_values_of_inference_mode_are_kept() -> None:
    compare(Model(), "**", inputs=True, run=inference)


def test_nested_values_have_the_structure_that_the_module_gave() -> None:
    _, got = compare(Model(), "nested", "inner", inputs=True, grads=True)
    value = got["nested"].output
    assert list(value) == ["a", "b", "plain", "pair", "fixed", "again", "ordered"]
    assert value["again"] is value["a"]
    assert type(value["b"]) is tuple
    assert type(value["b"][1]) is list
    assert type(value["pair"]) is Pair
    assert type(value["ordered"]) is OrderedDict
    assert type(value["fixed"]) is Fixed
    # A number may be a size, which is not the same in every call of one graph.
    assert value["plain"] == (None, True, "it's", Opaque("int"))
    assert list(got["inner"].inputs) == ["x", "rest", "scale", "extra"]
    assert len(got["inner"].inputs["rest"]) == 2
    assert torch.equal(got["nested:output.again.grad"], got["nested:output.a.grad"])


def test_parts_are_as_in_an_eager_run() -> None:
    parts = [
        "nested:output.b[1][0]",
        "nested:output.pair[1]",
        "nested:output[0]",
        "nested:output.fixed.u",
        "nested:output.b[-1]",
        "inner:input.rest[1]",
        "inner:input.extra.b",
        "inner:input.scale",
    ]
    eager, got = compare(Model(), *parts, grads=True)
    for part in parts:
        if "[-1]" not in part and not part.endswith("extra.b"):
            assert torch.equal(got[part], eager[part])
            assert torch.equal(got[f"{part}.grad"], eager[f"{part}.grad"])


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)], ids=["rows", "a view"])
def test_modules_that_write_over_their_input_are_heard(shape: tuple[int, ...]) -> None:
    compare(Rectified(), "**", inputs=True, grads="all", x=torch.randn(shape))


def test_views_made_together_need_not_all_have_a_gradient() -> None:
    _, got = compare(Chunks(), "parts", grads=True)
    assert got["parts:output.grad"][1] is None


@pytest.mark.parametrize(
    "options",
    [
        {"visits": 1},
        {"calls": 1},
        {"last": True},
        {"select": (slice(None), -1), "reduce": "mean", "dtype": torch.float64},
        {"select": lambda value: value[:2]},
        {"max_bytes": 10_000},
        {"clone": True},
        {"this_thread": True},
    ],
    ids=" and ".join,
)
def test_options_mean_what_they_mean_in_an_eager_run(options: dict[str, Any]) -> None:
    _, got = compare(Twice(), "fc", run=two_calls, grads=True, **options)
    assert len(got)


def test_a_budget_is_kept_inside_graphs() -> None:
    compiled = torch.compile(Model(), backend="aot_eager", fullgraph=True)
    with (
        pytest.raises(hl.OutOfBudget, match=r"max_bytes=50"),
        hl.capture(compiled, "fc", max_bytes=50),
    ):
        compiled(torch.randn(4, 3))
    assert compiled(torch.randn(4, 3)).shape == (4, 3)


def test_parameters_and_their_gradients_are_kept() -> None:
    model = Twice()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.capture(compiled, "fc.weight", "fc.weight:grad", "fc") as got:
        backward(compiled, torch.randn(4, 3))
    assert torch.equal(got["fc.weight"], model.fc.weight)
    assert torch.equal(got["fc.weight:grad"], model.fc.weight.grad)


@pytest.mark.parametrize("where", ["over", "nested"])
def test_forward_can_be_stopped_inside_a_graph(where: str) -> None:
    """The rest of the model does not run: what it would give is not there."""
    model = Model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    after: list[Tensor] = []
    with hl.capture(compiled, where, stop=True) as got:
        after.append(compiled(torch.randn(4, 3)))
    assert not after
    assert len(got) == 1
    if where == "nested":
        assert list(got["nested"].output)[-1] == "ordered"
    assert compiled(torch.randn(4, 3)).shape == (4, 3)


def test_a_graph_of_values_is_refused() -> None:
    compiled = torch.compile(Twice(), backend="aot_eager")
    with pytest.raises(hl.UnsupportedModel) as error, hl.capture(compiled, "fc", keep_graph=True):
        pass
    assert str(error.value) == (
        "hl.capture: keep_graph=True at `fc:output`: a value inside a graph that torch.compile "
        "made has no autograd history of its own. "
        'Ask for the model to be run eagerly: compiled="eager"'
    )
    with hl.capture(compiled, "fc", keep_graph=True, compiled="eager") as got:
        compiled(torch.randn(4, 3))
    assert got["fc", 1].output.grad_fn is not None


def test_a_part_that_is_not_there_is_told_with_what_is() -> None:
    compiled = torch.compile(Model(), backend="aot_eager", fullgraph=True)
    with (
        pytest.raises(hl.NoSuchSite, match=r"no `\.z` in it\. Tensors there: \.a, \.b\[0\]"),
        hl.capture(compiled, "nested:output.z"),
    ):
        compiled(torch.randn(4, 3))


def test_what_has_not_run_is_told() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x) if x.dim() == 2 else self.unused(x)
            return out

    _, got = compare(Branch(), "used", "unused", grads=True)
    assert [one.address for one in got.report().problems] == [
        "unused:output",
    ]


def test_models_that_return_their_own_list_go_on_with_it() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.cache: list[Tensor] = []

        def forward(self, x: Tensor) -> list[Tensor]:
            self.cache.append(self.fc(x))
            return self.cache

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grow = Growing()

        def forward(self, x: Tensor) -> Tensor:
            cache = self.grow(x)
            cache.append(x)
            out = cache[0] * len(self.grow.cache)
            self.grow.cache.clear()
            return out

    compare(Owner(), "grow", grads=True)
