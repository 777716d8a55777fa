"""Modules that change while they run, compute their weights, or return odd containers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import hookline as hl


class Double(nn.Module):
    """Parametrize a weight by twice its original."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def _is_clean(model: nn.Module) -> bool:
    return not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_lazy_module_is_captured_from_its_first_call_on() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh())
    x = torch.randn(4, 2)
    with hl.capture(model, "0", inputs=True, grads=True) as got:
        out = model(x)
        out.sum().backward()
        model(x)
    assert type(model[0]) is nn.Linear
    assert torch.equal(got.calls[0]["0"].output, model[0](x))
    assert torch.equal(got.calls[0]["0:input.input"], x)
    torch.testing.assert_close(got.calls[0]["0:output.grad"], 1 - out.detach() ** 2)
    assert _is_clean(model)


def test_lazy_parameter_is_followed_once_it_exists() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with hl.capture(model, "0.weight:grad", "0.weight") as got:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(got.calls[0]["0.weight:grad"], torch.ones(3, 2))
    assert torch.equal(got.calls[1]["0.weight:grad"], torch.full((3, 2), 2.0))
    assert torch.equal(got.calls[1]["0.weight"], model[0].weight)


def test_lazy_module_is_edited_in_its_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with hl.edit(model, {"0": hl.zero()}):
        assert torch.equal(model(torch.ones(1, 2)), torch.zeros(1, 3))


def test_lazy_parameter_is_edited_in_its_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with hl.edit(model, {"0.weight": hl.zero()}):
        out = model(torch.ones(1, 2))
    assert torch.equal(out, model[0].bias[None])
    assert isinstance(model[0].weight, nn.Parameter)
    assert not torch.equal(model[0].weight, torch.zeros(3, 2))


def test_lazy_module_by_class_matches_before_and_after_it_changes() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with hl.capture(model, nn.Linear) as got:
        model(torch.ones(1, 2))
    assert "0" in got


def test_scripted_modules_are_refused_by_name() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    for model in (scripted, nn.Sequential(nn.Tanh(), scripted)):
        with pytest.raises(hl.UnsupportedModel, match="TorchScript module: Python hooks"):
            hl.capture(model).__enter__()
        with pytest.raises(hl.UnsupportedModel, match=r"before torch\.jit\.script"):
            hl.edit(model, {"**": hl.zero()})
        with pytest.raises(hl.UnsupportedModel, match="TorchScript"):
            hl.hook(model, "**", lambda value, at: None)


def test_parametrizations_are_not_met_by_patterns() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    parametrize.register_parametrization(model[0], "weight", Double())
    with hl.capture(model, "**", grads=True) as got:
        out = model(torch.ones(1, 2))
        out.sum().backward()
    assert [one.path for one in got] == ["0", ""]
    assert torch.equal(got["0"].output, out)


def test_parametrization_asked_for_by_name_has_a_visit_for_each_read() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    parametrize.register_parametrization(model[0], "weight", Double())
    original = model[0].parametrizations.weight.original
    with hl.capture(model, "0.parametrizations.weight.0") as got:
        model(torch.ones(1, 2))
        model[0].weight
    assert torch.equal(got.calls[0]["0.parametrizations.weight.0"].output, original * 2)
    assert len(got) == 2  # the forward's read and the one outside of it


def test_gradient_of_a_parametrized_weight_is_that_of_its_original() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    parametrize.register_parametrization(model[0], "weight", Double())
    with hl.capture(model, "0.parametrizations.weight.original:grad") as got:
        model(torch.ones(1, 2)).sum().backward()
    original = model[0].parametrizations.weight.original
    grad = got["0.parametrizations.weight.original:grad"]
    assert torch.equal(grad, original.grad)
    assert torch.equal(grad, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_observing_a_normed_layer_changes_nothing(norm: object) -> None:
    """Spectral norm has state that each read in training moves on: one read more would show."""

    def run(watch: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(norm(nn.Linear(3, 2)), nn.Tanh())  # type: ignore[operator]
        x = torch.randn(4, 3, requires_grad=True)
        if watch:
            with hl.capture(model, "**", inputs=True, grads="all", params=True) as got:
                for _ in range(2):
                    model(x).sum().backward()
            assert torch.equal(got.calls[1]["0"].output.tanh(), got.calls[1][""].output)
            assert hl.inventory(model) is not None
        else:
            for _ in range(2):
                model(x).sum().backward()
        grads = {f"{name}.grad": one.grad for name, one in model.named_parameters()}
        return {**model.state_dict(), **grads, "x": x.grad}

    plain, watched = run(False), run(True)
    assert plain.keys() == watched.keys()
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated.*:FutureWarning")
def test_old_weight_norm_keeps_its_own_pre_hook() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))
    before = dict(model[0]._forward_pre_hooks)
    x = torch.randn(1, 2)
    plain = model(x)
    with hl.capture(model, "0", grads=True) as got:
        model(x).sum().backward()
    assert torch.equal(got["0"].output, plain)
    assert dict(model[0]._forward_pre_hooks) == before
    assert model[0].weight_g.grad is not None


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layer_with_packed_sequence_is_captured_leaf_by_leaf(kind: type) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(2, 3, batch_first=True))
    x = torch.randn(2, 4, 2, requires_grad=True)
    packed = pack_padded_sequence(x, [4, 2], batch_first=True)

    expected, state = model[0](packed)
    loss = pad_packed_sequence(expected)[0].square().sum()
    grad_out, grad_x = torch.autograd.grad(loss, [expected.data, x], retain_graph=True)

    with hl.capture(model, "0", "0:input", grads=True) as got:
        out, _ = model[0](packed)
        pad_packed_sequence(out)[0].square().sum().backward()
    assert isinstance(got["0"].output[0], PackedSequence)
    assert torch.equal(got["0:output[0].data"], expected.data)
    assert torch.equal(got["0:output[0].data.grad"], grad_out)
    assert torch.equal(got["0:input.input.data"], packed.data)
    assert torch.equal(x.grad, grad_x)
    hidden = state[0] if kind is nn.LSTM else state
    leaf = "0:output[1][0]" if kind is nn.LSTM else "0:output[1]"
    assert torch.equal(got[leaf], hidden)


def test_edit_of_the_data_in_a_packed_sequence_reaches_the_output() -> None:
    model = nn.Sequential(nn.GRU(2, 3, batch_first=True))
    packed = pack_padded_sequence(torch.randn(2, 4, 2), [4, 2], batch_first=True)
    with hl.edit(model, {"0:output[0].data": hl.zero()}):
        out, _ = model[0](packed)
    assert isinstance(out, PackedSequence)
    assert torch.equal(out.data, torch.zeros_like(out.data))
    assert torch.equal(out.batch_sizes, packed.batch_sizes)


def test_recurrent_layer_with_a_state_as_a_nested_argument_has_its_gradient() -> None:
    model = nn.Sequential(nn.LSTM(2, 3))
    x = torch.randn(4, 1, 2)
    state = (torch.randn(1, 1, 3, requires_grad=True), torch.randn(1, 1, 3, requires_grad=True))
    with hl.capture(model, "0:input", grads=True) as got:
        model[0](x, state)[0].sum().backward()
    for index in range(2):
        assert torch.equal(got[f"0:input.hx[{index}]"], state[index])
        assert torch.equal(got[f"0:input.hx[{index}].grad"], state[index].grad)


def test_batch_norm_and_dropout_run_as_without_hooks() -> None:
    """Watching, even with a hook that draws numbers, moves no statistic and no random state."""

    def run(watch: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 2))
        x = torch.randn(8, 2)
        if watch:
            drawing = hl.hook(model, "**", lambda value, at: torch.rand(3))
            with drawing, hl.capture(model, grads=True, inputs=True):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
        return [*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.rand(1)]

    for before, after in zip(run(False), run(True), strict=True):
        assert torch.equal(before, after)
