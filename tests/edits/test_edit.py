"""`hl.edit`: where edits apply, in which order, how long, what they check, what they report."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from small_models import Branches, Mixer, Net, Twice, Wrapped, is_clean, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl


def test_several_edits_apply_to_the_model_itself() -> None:
    net, x = Net(), torch.randn(2, 3)
    right = net.fc2(net.act(net.fc1(x) * 2) + 1)
    with hl.edit(net, {"fc1": hl.scale(2), "act": lambda value, at: value + 1}):
        assert same(net(x), right)
    assert is_clean(net)


def test_edits_reach_inputs_by_name_and_nested_leaves() -> None:
    model, x, y = Wrapped(Mixer()), torch.randn(2), torch.randn(2)
    right = Mixer()(x * 2, y, scale=torch.zeros(2))
    with hl.edit(model, {"inner:input.x": hl.scale(2), "inner:input.scale": hl.zero()}):
        assert same(model(x, y=y, scale=torch.ones(2)), right)
    branches = Wrapped(Branches())
    with hl.edit(branches, {"inner:output.b[1][0]": hl.zero()}):
        out = branches(x)
    assert not out["b"][1][0].any()
    assert same(out["b"][0], x * 2)
    assert out["n"] == 7


def test_single_tensor_in_a_container_needs_no_leaf() -> None:
    class Boxed(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"only": x, "n": 1}

    model = Wrapped(Boxed())
    with hl.edit(model, {"inner": hl.add(1), "inner:input": hl.scale(2)}):
        assert model(torch.ones(1))["only"].item() == 3


def test_several_tensors_are_an_error_that_names_them() -> None:
    model = Wrapped(Branches())
    hl.edit(model, {"inner": hl.zero()})
    with pytest.raises(hl.EditError) as caught:
        model(torch.ones(1))
    assert str(caught.value) == (
        "zero() at `inner:output` needs one tensor, and there are 3: `inner:output.a`, "
        "`inner:output.b[0]`, `inner:output.b[1][0]`. Name one of them."
    )


def test_function_may_return_the_whole_structure_changed() -> None:
    model, x = Wrapped(Branches()), torch.ones(1)

    def change(value: Any, at: hl.At) -> Any:
        return {**value, "a": value["a"] * 10}

    with hl.edit(model, {"inner": change}):
        assert model(x)["a"].item() == 20


def test_pattern_and_class_edit_every_match() -> None:
    net, x = Net(), torch.randn(1, 3)
    with hl.edit(net, {nn.Linear: hl.zero()}):
        assert not net(x).any()
    with hl.edit(net, [("fc*", hl.zero()), (net.act, hl.zero())]) as handle:
        net(x)
    assert [row["site"] for row in handle.report()] == ["fc1:output", "fc2:output", "act:output"]


WRONG: dict[str, tuple[Any, str]] = {
    "shape": (
        lambda value, at: value[:1],
        "returned shape (1, 4) for (2, 4). "
        "Return a tensor of the same shape, e.g. new.expand_as(value).",
    ),
    "dtype": (
        lambda value, at: value.double(),
        "returned torch.float64 for torch.float32. Return new.to(value.dtype).",
    ),
    "device": (
        lambda value, at: value.to("meta"),
        "returned a tensor on meta for one on cpu. Return new.to(value.device).",
    ),
    "layout": (
        lambda value, at: value.detach().to_sparse(),
        "returned layout torch.sparse_coo for torch.strided.",
    ),
    "number": (lambda value, at: 3.0, "returned a float for a tensor of shape (2, 4)."),
    "tuple": (lambda value, at: (value,), "returned a tuple for a tensor of shape (2, 4)."),
}


@pytest.mark.parametrize("kind", WRONG)
def test_value_that_does_not_fit_is_told_with_the_site(kind: str) -> None:
    function, message = WRONG[kind]
    net = Net()
    hl.edit(net, {"fc1": function})
    with pytest.raises(hl.EditError) as caught:
        net(torch.ones(2, 3))
    assert str(caught.value) == f"the edit at `fc1:output`, call 0, visit 0 {message}"


def test_gradient_that_does_not_fit_is_told_with_the_site() -> None:
    net = Net()
    hl.edit(net, {"fc1:output.grad": lambda grad, at: grad.sum()})
    with pytest.raises(hl.EditError) as caught:
        net(torch.ones(2, 3)).sum().backward()
    assert str(caught.value) == (
        "the edit at `fc1:output.grad`, call 0, visit 0 returned shape () for (2, 4). "
        "Return a tensor of the same shape, e.g. new.expand_as(value)."
    )


@pytest.mark.parametrize(
    ("new", "got"),
    [
        ([1], "list with [0]"),
        ({"a": 1}, "dict with ['a']"),
        (torch.ones(1), "Tensor"),
        ("text", "str"),
    ],
)
def test_structure_that_does_not_fit_is_told(new: Any, got: str) -> None:
    model = Wrapped(Branches())
    hl.edit(model, {"inner": lambda value, at: new})
    with pytest.raises(hl.EditError) as caught:
        model(torch.ones(1))
    assert str(caught.value) == (
        f"the edit at `inner:output`, call 0, visit 0 returned {got} for a dict with "
        "['a', 'b', 'n', 'none']. Return the same structure, return hl.KEEP, or name one tensor "
        "in the address."
    )


def test_function_that_forgets_to_return_is_told() -> None:
    net = Net()
    hl.edit(net, {"fc1": lambda value, at: None})
    with pytest.raises(hl.EditError) as caught:
        net(torch.ones(2, 3))
    assert str(caught.value) == (
        "the edit at `fc1:output` returned None. Return the new value, or hl.KEEP to leave it as "
        "it is."
    )
    hl.hook(net, "fc1", lambda value, at: None, edit=True)
    with pytest.raises(hl.EditError, match=r"returned None for a tensor .* Return hl\.KEEP"):
        net(torch.ones(2, 3))


def test_edits_run_in_the_order_they_were_attached_and_prepend_goes_first() -> None:
    net, x = Net(), torch.randn(1, 3)
    h = net.fc1(x).detach()
    seen: list[Tensor] = []
    hl.edit(net, {"fc1": hl.add(1)})
    hl.edit(net, {"fc1": hl.scale(2)})
    hl.edit(net, {"fc1": hl.add(10)}, prepend=True)
    hl.hook(net, "fc1", lambda value, at: seen.append(value))
    net(x)
    assert same(seen[0], (h + 10 + 1) * 2)


def test_nested_edits_go_one_by_one() -> None:
    net, x = Net(), torch.randn(1, 3)
    plain, doubled = net(x), net.fc2(net.act(net.fc1(x) * 2))
    with hl.edit(net, {"fc1": hl.scale(2)}):
        with hl.edit(net, {"act": hl.zero()}):
            assert same(net(x), net.fc2(torch.zeros(1, 4)))
        assert same(net(x), doubled)
    assert same(net(x), plain)


def test_edits_stay_until_removed() -> None:
    net, x = Net(), torch.randn(1, 3)
    plain = net(x)
    handle = hl.edit(net, {"fc2": hl.zero()})
    assert not net(x).any()
    assert not net(x).any()
    handle.remove()
    handle.remove()
    assert same(net(x), plain)
    assert not handle.is_live


def test_visits_and_calls_limit_all_edits_and_where_one() -> None:
    model, x = Twice(), torch.randn(1, 3)
    edits = [("fc", hl.add(1)), ("fc", hl.add(10).where(visits=0))]
    with hl.edit(model, edits, visits=1), hl.capture(model, "fc") as got:
        model(x)
    first = model.fc(x).detach() + 10
    assert same(got["fc", 0].output, first)
    assert torch.allclose(got["fc", 1].output, model.fc(first.tanh()).detach() + 1)


def test_this_thread_leaves_other_threads_alone() -> None:
    net, x, results = Net(), torch.randn(1, 3), []
    plain = net(x)
    with hl.edit(net, {"fc2": hl.zero()}, this_thread=True):
        thread = threading.Thread(target=lambda: results.append(net(x)))
        thread.start()
        thread.join()
        assert not net(x).any()
    assert same(results[0], plain)


def test_edit_inside_a_checkpoint_is_repeated_after_removal() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(checkpoint(lambda h: self.act(self.fc1(h)), x, use_reentrant=False))

    net, x = Checkpointed(), torch.randn(2, 3)
    with hl.edit(net, {"fc1": hl.scale(3)}):
        loss = net(x).sum()
    loss.backward()
    right = net.fc2(net.act(net.fc1(x) * 3)).sum()
    assert same(net.fc1.weight.grad, torch.autograd.grad(right, net.fc1.weight)[0])
    assert is_clean(net)


def test_second_order_gradients_need_consent() -> None:
    model = Wrapped(nn.Tanh())
    x = torch.ones(1, requires_grad=True)

    def penalty() -> None:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.pow(2).sum().backward()

    with (
        hl.edit(model, {"inner:output.grad": hl.scale(2)}),
        pytest.raises(hl.EditError, match="reached again after a backward pass with create_graph"),
    ):
        penalty()
    with hl.edit(model, {"inner:output.grad": hl.scale(2)}, second_order=True):
        penalty()
    assert x.grad is not None


def test_report_counts_and_says_why_not() -> None:
    net, x = Net(), torch.ones(1, 3)
    edits = [
        ("fc1", hl.scale(2)),
        ("fc1", hl.scale(3).where(visits=5)),
        ("fc1:output.grad", hl.zero()),
        ("fc2.weight:grad", hl.zero()),
        ("act", lambda value, at: hl.KEEP),
    ]
    handle = hl.edit(net, edits)
    assert [row["why not"] for row in handle.report()] == ["the model was not called"] * 5
    net(x)
    net(x)
    rows = [(row["applied"], row["why not"]) for row in handle.report()]
    no_gradient = "no gradient reached it while the edit was attached"
    assert rows == [
        (2, ""),
        (0, "it ran, but its condition never held"),
        (0, no_gradient),
        (0, no_gradient),
        (0, "it ran, but its condition never held"),
    ]
    handle.remove()
    assert [(row["applied"], row["why not"]) for row in handle.report()] == rows


def test_edit_that_was_never_applied_warns() -> None:
    class Unused(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.fc1(x))

    net = Unused()
    handle = hl.edit(net, {"fc1": hl.scale(1), "act": hl.zero()})
    net(torch.ones(1, 3))
    with pytest.warns(hl.HooklineWarning) as caught:
        handle.__exit__(None, None, None)
    assert str(caught[0].message) == (
        "hookline: some edits were never applied:\n"
        "  act:output: zero(): the model ran without calling it: a branch not taken, or unused"
    )
    assert caught[0].filename == __file__


def test_error_in_the_block_is_not_buried_under_a_warning() -> None:
    net = Net()
    with pytest.raises(KeyError), hl.edit(net, {"fc1": hl.zero()}):
        raise KeyError
    assert is_clean(net)
