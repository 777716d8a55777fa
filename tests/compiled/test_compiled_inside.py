"""Variables and operations inside the graphs that torch.compile makes: as in an eager run."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hookline as hl

pytestmark = [
    # The compiler makes one of each autograd.Function that it traces.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # It asks this of the inputs of a graph, and some have a history.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def _forget_graphs() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def lift(a: Tensor, b: Tensor) -> Tensor:
    """Be a function of which variables are asked."""
    w = a * b
    w = w + 1
    return w.tanh()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4)

    def halve(self, t: Tensor) -> Tensor:
        half = t / 2
        return half

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = self.halve(q @ k.transpose(-1, -2))
        scores = torch.softmax(scores, -1)
        y = scores @ v
        for _ in range(2):
            y = y + lift(y, x)
        return self.out(y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Attention()])

    def forward(self, x: Tensor) -> Tensor:
        same = x
        for block in self.blocks:
            h = block(x)
            x = x + h
        return x * same


class Twin(torch.autograd.Function):
    """Call operations that are no operations of the module's."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.softmax(x, -1) * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.softmax(x, -1)


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x + 1, -1)


class Calls(nn.Module):
    """Call softmax itself five times, and have others call it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.unseen = [Inner()]  # no module of the tree
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.softmax(self.linear(x) + 1, -1)
        y = self.inner(y)
        y = y.softmax(-1)
        y = self.unseen[0](y)
        y = F.softmax(2 * y, dim=-1)
        y = self.inner.forward(y)
        y = _smooth(y)
        y = Twin.apply(y)
        top, _ = torch.softmax(y, -1).max(-1)
        return y / top[..., None] + x


def _smooth(x: Tensor) -> Tensor:
    return torch.softmax(x * 3, -1)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls()

    def forward(self, x: Tensor) -> Tensor:
        return self.calls(x) * 2


def look(
    model: Callable[[Tensor], Tensor], owner: nn.Module, names: list[str], x: Tensor, **options: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """Capture a call of a model, and what it gives."""
    given = x.clone().requires_grad_()
    with hl.capture(owner, names, **options) as cap:
        output = model(given)
        if options.get("grads"):
            output.square().sum().backward()
    return cap.tensors(), output.detach()


def check(
    make: Callable[[], nn.Module],
    names: list[str],
    *,
    backend: str = "aot_eager",
    is_compiled_before: bool = False,
    exactly: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Compare captures of a compiled model with those of its copy; it is compiled once."""
    model = make()
    twin = copy.deepcopy(model)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x = torch.randn(2, 3, 4)
    if is_compiled_before:
        compiled(x.clone().requires_grad_())
    first = counter.frame_count
    wanted, expected = look(twin, twin, names, x, **options)
    for _ in range(2):
        found, output = look(compiled, model, names, x, **options)
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name], value, **({"rtol": 0, "atol": 0} if exactly else {}), msg=name
            )
        if exactly:
            assert torch.equal(output, expected)
    assert counter.frame_count == first + 1
    compiled(x.clone().requires_grad_())
    assert counter.frame_count == first + (1 if is_compiled_before else 2)
    return wanted


@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_variables_are_those_of_an_eager_run(is_compiled_before: bool) -> None:
    names = ["blocks.*@scores", "blocks.0@q", "blocks.1@y[1]"]
    found = check(Model, names, is_compiled_before=is_compiled_before)
    assert len(found) == 6


def test_variables_of_the_root_are_of_its_visit() -> None:
    assert list(check(Model, ["@h", "@same"])) == ["@same", "@h[0]", "@h[1]"]


def test_gradients_of_variables_are_those_of_an_eager_run() -> None:
    found = check(Model, ["blocks.*@scores", "@same", "@h"], grads=True, is_compiled_before=True)
    # `same` is the argument: of its gradient the part is heard that comes by this name.
    assert {"@same:grad", "blocks.1@scores[1]:grad"} <= set(found)


def test_variables_and_gradients_are_heard_on_inductor() -> None:
    names = ["blocks.*@scores", "blocks.0/softmax"]
    assert len(check(Model, names, backend="inductor", grads=True, exactly=False)) == 10


def test_values_counted_from_the_end_are_those_of_an_eager_run() -> None:
    found = check(Model, ["blocks.0@y[-1]", "blocks.1@y[-3]", "@h[-2]"])
    assert list(found) == ["blocks.0@y[2]", "blocks.1@y", "@h"]


def test_values_counted_from_both_ends_are_those_of_an_eager_run() -> None:
    assert len(check(Model, ["blocks.0@y[2]", "blocks.0@y[-1]", "blocks.0@y[-2]"])) == 2


def test_variables_of_functions_are_those_of_an_eager_run() -> None:
    found = check(Model, ["blocks.0@lift.w", "blocks.1@halve.half"], grads=True)
    assert {"blocks.0@lift.w[3]:grad", "blocks.1@halve.half:grad"} <= set(found)


def test_only_operations_of_the_module_itself_are_counted() -> None:
    names = ["calls/softmax", "calls.inner/softmax", "calls/mul", "/mul", "calls/max"]
    found = check(Holder, names, grads=True)
    own = [one for one in found if one.startswith("calls/softmax") and "grad" not in one]
    assert own == [f"calls/softmax[{index}]#0.0" for index in range(5)]


def test_inputs_of_operations_are_those_of_an_eager_run() -> None:
    names = ["calls/softmax[1]:input", "calls/add:input", "calls/softmax[-1]:input"]
    check(Holder, names)
    check(Holder, names[:2], grads=True)


def test_a_pattern_of_operations_meets_what_it_meets_in_an_eager_run() -> None:
    assert len(check(Holder, ["calls/*"], is_compiled_before=True)) > 10


def test_gradients_counted_from_the_end_are_refused_and_run_eagerly() -> None:
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 4)
    compiled(x)
    with pytest.raises(hl.UnsupportedModel, match="too late to hear of its gradient"):
        look(compiled, compiled, ["blocks.0@y[-1]"], x, grads=True)
    found, _ = look(compiled, compiled, ["blocks.0@y[-1]"], x, grads=True, compiled="eager")
    assert list(found) == ["blocks.0@y[2]", "blocks.0@y[2]:grad"]


class Recursive(nn.Module):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = x + 1
        return self(y, depth - 1) if depth else y


def test_a_module_that_calls_itself_is_refused() -> None:
    model = nn.Sequential(Recursive())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="calls itself inside a graph"), hl.capture(model, "0@y"):
        compiled(torch.randn(2))


def test_an_operation_the_compiler_does_not_show_is_refused() -> None:
    compiled = torch.compile(nn.Sequential(Inner()), backend="aot_eager")
    with pytest.raises(hl.UnsupportedModel, match="does not show"):
        hl.capture(compiled, "0/pad").__enter__()


class Unpacking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, second = x
        return first + second


def test_an_operation_that_only_the_compiler_does_is_reported() -> None:
    compiled = torch.compile(Unpacking(), backend="aot_eager")
    with (
        pytest.warns(hl.HooklineWarning, match=r"/unbind: never called: .*unpacked.*eager"),
        hl.capture(compiled, "/unbind"),
    ):
        compiled(torch.randn(2, 3))


class Around(nn.Module):
    """Add what compiled blocks give, and call a compiled function, in a forward that is eager."""

    def __init__(self, backend: Any, finish: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Attention()])
        for block in self.blocks if backend is not None else ():
            block.compile(backend=backend, fullgraph=True)
        self.finish = finish

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.finish(x).mul(2)


def relu_and_one(x: Tensor) -> Tensor:
    return x.relu() + 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_eager_forward_hears_itself_around_what_is_compiled(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    model = Around(counter, torch.compile(relu_and_one, backend=counter, fullgraph=True))
    twin = Around(None, relu_and_one)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 4)
    truth = model(x)
    with hl.capture(twin, "/add", grads=True) as expected:
        twin(x).sum().backward()
    graphs = []
    for _ in range(2):
        with hl.capture(model, ["/add", "/mul"], grads=True) as got:
            out = model(x)
            out.sum().backward()
        graphs.append(counter.frame_count)
        assert torch.equal(out, truth)
        assert len(got.values("/add")) == 2  # the third is the compiled function's
        assert torch.equal(got["/mul"], truth)
        for mine, theirs in zip(got.values("/add"), expected.values("/add")[:2], strict=True):
            torch.testing.assert_close(mine, theirs)
            torch.testing.assert_close(mine.grad, theirs.grad)
    model(x)
    assert graphs == [counter.frame_count] * 2


def test_an_edit_of_what_a_compiled_function_does_is_reported_and_done_eagerly() -> None:
    model = Around(None, torch.compile(relu_and_one, backend="aot_eager"))
    twin = Around(None, relu_and_one)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 4)
    truth = model(x)
    edits = {"/relu": hl.add(torch.ones(4))}
    with pytest.warns(hl.HooklineWarning, match='ask for compiled="eager"'), hl.edit(model, edits):
        assert torch.equal(model(x), truth)
    with hl.edit(twin, edits):
        expected = twin(x)
    with hl.edit(model, edits, compiled="eager"):
        torch.testing.assert_close(model(x), expected)
    assert not torch.equal(expected, truth)


@pytest.mark.parametrize("site", ["/mul", "@z", "first"])
def test_an_eager_model_is_heard_while_another_thread_compiles(site: str) -> None:
    """Torch says of the whole process that it compiles, not of a thread."""
    is_running, is_compiling, may_end = (threading.Event() for _ in range(3))

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            is_running.set()
            assert is_compiling.wait(60)
            y = self.first(x)
            z = y.mul(2)
            return z

    def wait(graph: Any, _: Any) -> Any:
        is_compiling.set()
        assert may_end.wait(60)
        return graph

    def compile_another() -> None:
        assert is_running.wait(60)
        torch.compile(relu_and_one, backend=wait)(torch.ones(3))

    model, x = Slow(), torch.randn(2, 4)
    other = threading.Thread(target=compile_another)
    other.start()
    with hl.capture(model, site) as got:
        out = model(x)
        may_end.set()
    other.join()
    captured = got[site].output if site == "first" else got[site]
    torch.testing.assert_close(captured, out / 2 if site == "first" else out)


class Breaking(nn.Module):
    """Break the graph in the middle, with an operation before it, and one of that name after."""

    def __init__(self, *, inside_helper: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inside_helper = inside_helper

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).sin()
        if self.inside_helper:
            y = self.help(y)
        else:
            torch._dynamo.graph_break()
        return (y.sin() * 2).sum()

    def help(self, y: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return y.sin()


AFTER_BREAK = ["/sum", "/mul", "/sin", "/sin[1]"]


@pytest.mark.parametrize("site", AFTER_BREAK)
def test_operations_after_a_break_are_heard(site: str) -> None:
    model, x = Breaking(inside_helper=False), torch.randn(2, 4)
    compiled = torch.compile(model, backend="aot_eager")
    with hl.capture(model, site) as expected:
        right = model(x)
    with hl.capture(compiled, site) as got:
        assert torch.equal(compiled(x), right)
    assert str(got.table()) == str(expected.table())
    assert site in str(got.table())


@pytest.mark.filterwarnings("ignore::hookline.HooklineWarning")
@pytest.mark.parametrize("inside_helper", [False, True])
@pytest.mark.parametrize("site", AFTER_BREAK)
def test_asking_for_operations_changes_nothing_after_a_break(
    site: str, inside_helper: bool
) -> None:
    """Where an error is raised in a mode, the compiler goes on without the operation."""
    model, x = Breaking(inside_helper=inside_helper), torch.randn(2, 4)
    compiled = torch.compile(model, backend="aot_eager")
    with hl.watch(compiled, sites=[site]):
        assert torch.equal(compiled(x), model(x))
    with hl.capture(compiled, site):
        assert torch.equal(compiled(x), model(x))
    with hl.edit(compiled, {site: hl.scale(1.0)}):
        assert torch.equal(compiled(x), model(x))


class GivenUp(nn.Module):
    """Do what the compiler cannot do, where it can break no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        z = y * 2 + pow(y, 2) - (-y)
        return z.sum()


@pytest.mark.filterwarnings("ignore::hookline.HooklineWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_forward_that_the_compiler_gives_up_gives_what_it_gave(backend: str) -> None:
    """The mode was compiled by itself there, and called the function that it knew from before."""
    model, x = GivenUp(), torch.randn(2, 4)
    compiled = torch.compile(model, backend=backend)
    right = model(x)
    with hl.watch(compiled, sites=["/*", "@*"], parameters=None):
        assert torch.equal(compiled(x), right)
    with hl.capture(compiled, ["/sub", "@z"]) as got:
        assert torch.equal(compiled(x), right)
    assert torch.equal(got["@z"].sum(), right)
