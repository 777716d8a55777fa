"""`hl.capture`: what each option keeps, and that keeping changes nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from small_models import Mixer, Net, Twice, Wrapped, is_clean, same
from torch import Tensor, nn

import hookline as hl


def run(model: nn.Module, *where: Any, x: Tensor | None = None, **options: Any) -> hl.Captured:
    """Capture one call, and its backward where gradients are asked for."""
    with hl.capture(model, *where, **options) as got:
        y = model(torch.randn(2, 3) if x is None else x)
        if options.get("grads"):
            y.pow(2).sum().backward()
    return got


def test_outputs_are_kept_by_default_of_every_module() -> None:
    net, x = Net(), torch.randn(2, 3)
    got = run(net, x=x)
    assert list(got.tensors()) == ["fc1:output", "act:output", "fc2:output", ":output"]
    assert same(got["act"].output, net.act(net.fc1(x)))
    assert not got["act"].output.requires_grad


def test_inputs_are_kept_by_name() -> None:
    model, x, y = Wrapped(Mixer()), torch.ones(1), torch.zeros(1)
    with hl.capture(model, "inner", inputs=True, outputs=False) as got:
        model(x, y=y, scale=2.0)
    assert list(got["inner"].inputs) == ["x", "y", "scale"]
    assert got["inner"].inputs["scale"] == 2.0
    assert same(got["inner:input.y"], y)
    with pytest.raises(hl.NotCaptured, match="`inner:output` was not captured"):
        got["inner"].output


def test_named_port_needs_no_option() -> None:
    got = run(Net(), "fc1:input.input", "fc2")
    assert list(got.tensors()) == ["fc1:input.input", "fc2:output"]


def test_grads_are_those_of_autograd() -> None:
    net, x = Net(), torch.randn(2, 3)
    got = run(net, "act", "fc1", x=x, grads=True)
    h = net.fc1(x).detach().requires_grad_()
    a = net.act(h)
    right = torch.autograd.grad(net.fc2(a).pow(2).sum(), [h, a])
    assert same(got["fc1"].output.grad, right[0])
    assert same(got["act:output.grad"], right[1])


def test_grads_true_leaves_inputs_alone_and_all_takes_them() -> None:
    net, x = Net(), torch.randn(2, 3, requires_grad=True)
    got = run(net, "fc2", x=x, inputs=True, grads=True)
    with pytest.raises(hl.NotCaptured, match=r"`fc2:input\.input\.grad` has no gradient"):
        got["fc2:input.input.grad"]
    got = run(net, "fc2", x=x, inputs=True, grads="all")
    right = run(net, "act", x=x, grads=True)["act"].output.grad
    assert same(got["fc2:input.input.grad"], right)
    assert same(got["fc2"].inputs["input"].grad, right)


def test_gradient_of_an_input_named_outright_is_kept() -> None:
    got = run(Net(), "fc2:input", grads=True)
    assert list(got.tensors()) == ["fc2:input.input", "fc2:input.input.grad"]
    got = run(Net(), "fc2:input.input.grad", grads=True)
    assert list(got.tensors()) == ["fc2:input.input.grad"]


def test_params_are_kept_as_the_call_begins_with_their_gradients() -> None:
    net, x = Net(), torch.randn(2, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    before = net.fc1.weight.detach().clone()
    with hl.capture(net, "fc1", params=True, grads=True) as got:
        net(x).sum().backward()
        optimizer.step()
    assert same(got["fc1.weight"], before)
    assert same(got["fc1"].params["weight"], before)
    assert same(got["fc1.weight:grad"], net.fc1.weight.grad)
    assert same(got["fc1.weight"].grad, net.fc1.weight.grad)
    assert list(got["fc1"].params) == ["weight", "bias"]


def test_visits_and_calls_limit_what_is_kept() -> None:
    model, x = Twice(), torch.randn(1, 3)
    with hl.capture(model, "fc", visits=1, calls=[0, 2]) as got:
        for _ in range(3):
            model(x)
    assert [(one.call, one.visit) for one in got] == [(0, 1), (2, 1)]
    assert [call.number for call in got.calls] == [0, 2]


def test_last_keeps_the_last_visit_of_the_last_call() -> None:
    model, x = Twice(), torch.randn(1, 3)
    with hl.capture(model, "fc", last=True) as got:
        model(x)
        y = model(x + 1)
    assert len(got) == 1
    assert (got["fc"].call, got["fc"].visit) == (1, 1)
    assert same(got["fc"].output, y.detach())


def test_keep_graph_keeps_the_tensor_that_flowed() -> None:
    net, x = Net(), torch.randn(2, 3)
    with hl.capture(net, "fc1", keep_graph=True) as got:
        y = net(x)
    assert torch.autograd.grad(y.sum(), got["fc1"].output)[0].shape == (2, 4)


def test_clone_copies_and_auto_shares_memory() -> None:
    net, outputs = Net(), []
    net.fc1.register_forward_hook(lambda module, args, out: outputs.append(out))
    for clone in (True, False, "auto"):
        got = run(net, "fc1", clone=clone)
        shares = got["fc1"].output.data_ptr() == outputs.pop().data_ptr()
        assert shares is (clone is not True)


def test_value_overwritten_later_is_copied_or_told() -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).add_(1)

    model, x = Overwriting(), torch.randn(1, 3)
    got = run(model, "fc", x=x)
    with pytest.raises(hl.Overwritten) as caught:
        got["fc"].output
    assert str(caught.value) == (
        "`fc:output` (call 0, visit 0) was changed in place after it flowed, so the value is lost. "
        "Capture it again: hookline copies it there from now on (or pass clone=True)."
    )
    assert same(run(model, "fc", x=x)["fc"].output, model.fc(x).detach())
    inplace = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    assert same(run(inplace, "0", x=x)["0"].output, inplace[0](x).detach())


def test_device_and_dtype_change_what_is_kept_only() -> None:
    net, x = Net(), torch.randn(2, 3)
    got = run(net, "fc1", x=x, dtype=torch.bfloat16, grads=True)
    assert got["fc1"].output.dtype == torch.bfloat16
    assert same(got["fc1"].output, net.fc1(x).bfloat16())
    assert got["fc1"].output.grad.dtype == torch.bfloat16
    assert run(net, "fc1", device="meta")["fc1"].output.is_meta


@pytest.mark.parametrize(
    "select", [(slice(None), -1), lambda t: t[:, -1]], ids=["index", "function"]
)
def test_select_holds_the_slice_alone(select: Any) -> None:
    net, x = Net(), torch.randn(2, 3)
    got = run(net, "fc1", x=x, select=select, grads=True)
    assert same(got["fc1"].output, net.fc1(x)[:, -1].detach())
    assert got["fc1"].output.untyped_storage().nbytes() == 2 * 4
    assert got["fc1"].output.grad.shape == (2,)
    assert got["fc1"].output.grad.untyped_storage().nbytes() == 2 * 4
    assert got.nbytes == 16


@pytest.mark.parametrize(
    ("reduce", "function"),
    [
        ("mean", lambda t: t.mean()),
        ("std", lambda t: t.std(correction=0)),
        ("norm", torch.linalg.vector_norm),
        ("absmax", lambda t: t.abs().max()),
        ("min", lambda t: t.min()),
        ("max", lambda t: t.max()),
        ("sum", lambda t: t.sum()),
        (lambda t: t.mean(0), lambda t: t.mean(0)),
    ],
)
def test_reduce_keeps_the_reduction(reduce: Any, function: Any) -> None:
    net, x = Net(), torch.randn(2, 3)
    assert same(run(net, "fc1", x=x, reduce=reduce)["fc1"].output, function(net.fc1(x)).detach())


def test_select_comes_before_reduce() -> None:
    net, x = Net(), torch.randn(2, 3)
    got = run(net, "fc1", x=x, select=0, reduce="sum")
    assert same(got["fc1"].output, net.fc1(x)[0].sum().detach())


def test_error_in_select_names_the_site() -> None:
    with pytest.raises(IndexError) as caught:
        run(Net(), "fc1", select=(0, 0, 0))
    assert caught.value.__notes__[0] == "in select/reduce of a capture at `fc1:output`"
    with pytest.raises(TypeError, match="select/reduce at `fc1:output` gave float, not a tensor"):
        run(Net(), "fc1", reduce=lambda t: t.sum().item())


@pytest.mark.parametrize("last", [True, False])
def test_budget_counts_what_is_held(last: bool) -> None:
    net, x = Net(), torch.randn(2, 3)
    with hl.capture(net, "fc1", max_bytes=32, last=last) as got:
        for _ in range(3):
            net(x)
            if not last:
                got.clear()


def test_value_past_the_budget_raises_before_it_is_held() -> None:
    net = Net()
    with pytest.raises(hl.OutOfBudget) as caught:
        run(net, "fc*", max_bytes=40)
    assert str(caught.value) == (
        "capturing `fc2:output` (16 bytes) would pass max_bytes=40 (32 held). Name fewer sites, "
        "keep less of each with select= or reduce=, use last=True, or call got.clear() between "
        "calls."
    )
    assert is_clean(net)


def test_stop_ends_the_forward_and_the_block() -> None:
    net, ran = Net(), []
    net.fc2.register_forward_hook(lambda *_: ran.append("fc2"))
    with hl.capture(net, "fc1", "act", stop=True) as got:
        net(torch.ones(1, 3))
        ran.append("after")
    assert ran == []
    assert sorted(got.tensors()) == ["act:output", "fc1:output"]
    net(torch.ones(1, 3))
    assert ran == ["fc2"]
    with pytest.raises(ValueError, match="stop=True ends the forward early"):
        hl.capture(net, "fc1", stop=True, grads=True)


def test_stop_waits_for_the_visits_asked_for() -> None:
    model = Twice()
    with hl.capture(model, "fc", stop=True, visits=1) as got:
        model(torch.ones(1, 3))
    assert [one.visit for one in got] == [1]


def test_before_edits_sees_the_value_as_it_was() -> None:
    net, x = Net(), torch.randn(1, 3)
    with (
        hl.edit(net, {"fc1": hl.zero()}),
        hl.capture(net, "fc1", before_edits=True) as before,
        hl.capture(net, "fc1") as after,
    ):
        net(x)
    assert same(before["fc1"].output, net.fc1(x).detach())
    assert not after["fc1"].output.any()


def test_this_thread_leaves_others_out_and_says_so() -> None:
    net, x = Net(), torch.ones(1, 3)
    capture = hl.capture(net, "fc1", this_thread=True)
    got = capture.__enter__()
    net(x)
    thread = threading.Thread(target=net, args=(x,))
    thread.start()
    thread.join()
    with pytest.warns(hl.HooklineWarning, match="2 executions in other threads were left out"):
        capture.__exit__(None, None, None)
    assert len(got) == 1


def test_decorator_captures_each_call_of_a_function() -> None:
    net = Net()

    @hl.capture(net, "fc1")
    def predict(x: Tensor) -> Tensor:
        """Say what it does."""
        return net(x)

    x = torch.randn(1, 3)
    predict(x * 2)
    assert same(predict(x), net(x))
    assert same(predict.captured["fc1"].output, net.fc1(x).detach())
    assert predict.__doc__ == "Say what it does."
    assert is_clean(net)
