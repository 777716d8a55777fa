"""Copies of a model that has hooks attached are clean and work."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": _pickled,
    "torch.save": _saved,
}


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def _attach_everything(model: nn.Module, seen: list[str]) -> list[hl.Handle]:
    return [
        hl.hook(model, "**", lambda value, at: seen.append(at.address)),
        hl.hook(model, "**:output.grad", lambda value, at: seen.append(at.address)),
        hl.hook(model, "0.weight:grad", lambda value, at: seen.append(at.address)),
        hl.edit(model, {"1": hl.scale(100)}),
    ]


@pytest.mark.parametrize("how", COPIES)
def test_copy_of_an_attached_model_is_free_of_its_hooks(how: str) -> None:
    model = _model()
    x = torch.randn(4, 2)
    plain = model(x)
    seen: list[str] = []
    handles = _attach_everything(model, seen)
    twin = COPIES[how](model)

    out = twin(x)
    out.sum().backward()
    assert torch.equal(out, plain)
    assert seen == []
    assert twin[0].weight.grad is not None

    assert not torch.equal(model(x), plain)  # the original is still attached
    assert seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("how", COPIES)
def test_copy_can_be_attached_to_like_any_model(how: str) -> None:
    model = _model()
    x = torch.randn(4, 2)
    seen: list[str] = []
    handles = _attach_everything(model, seen)
    twin = COPIES[how](model)
    with hl.capture(twin, "*", grads=True) as got:
        out = twin(x)
        out.sum().backward()
    assert seen == []
    assert torch.equal(got["2"].output, out)
    assert torch.equal(got["2:output.grad"], torch.ones(4, 1))
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("how", COPIES)
def test_copy_of_a_model_with_a_skip_runs_the_module(how: str) -> None:
    model = _model()
    x = torch.randn(4, 2)
    plain = model(x)
    with hl.edit(model, {"1": hl.skip(torch.zeros(4, 3))}):
        twin = COPIES[how](model)
        assert not torch.equal(model(x), plain)
    assert torch.equal(twin(x), plain)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
    assert torch.equal(twin(x), twin[2].bias.expand(4, 1))  # its own weights, not the original's
    assert torch.equal(model(x), plain)


def test_copy_inside_a_forward_works() -> None:
    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)
            self.copies: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            if not self.copies:
                self.copies.append(copy.deepcopy(self.body))
            return self.body(x) + self.copies[0](x)

    model = Copying()
    x = torch.ones(1, 2)
    with hl.capture(model, "body") as got:
        out = model(x)
    assert len(got) == 1
    assert torch.equal(out, 2 * got["body"].output)


def test_pickle_loads_where_hookline_is_not_installed(tmp_path: Path) -> None:
    model = _model()
    x = torch.ones(1, 2)
    expected = model(x).item()
    with hl.edit(model, {"0": hl.zero(), "1": hl.skip(torch.zeros(1, 3))}):
        model(x)
        torch.save(model, tmp_path / "model.pt")
    script = (
        "import sys; sys.modules['hookline'] = None\n"
        "import torch\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "print(repr(model(torch.ones(1, 2)).item()))\n"
        "assert not [name for name in sys.modules if name.startswith('hookline.')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert float(done.stdout) == expected


def test_state_dict_is_the_same_while_attached() -> None:
    model = _model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    same = hl.skip(lambda at: at.inputs["input"])
    with (
        hl.edit(model, {"0": hl.scale(2), "1": same}),
        hl.capture(model, "**", params=True, grads=True),
    ):
        model(torch.ones(1, 2)).sum().backward()
        during = model.state_dict()
        assert list(during) == list(before)
        assert list(during._metadata) == list(model.state_dict()._metadata)
        for name, value in before.items():
            assert torch.equal(during[name], value)
        model.load_state_dict(before)


def test_state_dict_hooks_are_not_used() -> None:
    """Torch's state_dict hooks break on bound methods and on removal in a loop."""
    model = _model()
    with hl.capture(model, "**", params=True, grads="all"):
        for module in model.modules():
            assert not module._state_dict_hooks
            assert not module._state_dict_pre_hooks
            assert not module._load_state_dict_pre_hooks
            assert not module._load_state_dict_post_hooks
        model(torch.ones(1, 2)).sum().backward()


def test_parameter_value_edit_is_not_saved_as_the_parameter() -> None:
    model = _model()
    weight = model[0].weight
    before = weight.detach().clone()
    with hl.edit(model, {"0.weight": hl.zero()}):
        out = model(torch.ones(1, 2))
    assert model[0].weight is weight
    assert torch.equal(weight, before)
    assert not torch.equal(out, model(torch.ones(1, 2)))


def test_loading_weights_while_attached_is_seen_in_the_next_call() -> None:
    model, other = _model(), _model()
    x = torch.ones(1, 2)
    with hl.capture(model, "0.weight", "0.weight:grad") as got:
        model(x).sum().backward()
        model.load_state_dict(other.state_dict(), assign=True)
        for parameter in model.parameters():
            parameter.requires_grad_()
        model(x).sum().backward()
    assert torch.equal(got.calls[1]["0.weight"], other[0].weight)
    assert torch.equal(got.calls[1]["0.weight:grad"], model[0].weight.grad)
    assert not torch.equal(got.calls[0]["0.weight"], got.calls[1]["0.weight"])


def test_parameter_written_past_registration_is_followed() -> None:
    """A write into `_parameters` and `.data` passes torch's registration hooks by."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    x = torch.ones(1, 1)
    with hl.capture(model, "0.weight", "0.weight:grad") as got:
        model[0]._parameters["weight"] = nn.Parameter(torch.full((1, 1), 2.0))
        model(x * 3).sum().backward()
        model[0].weight.data = torch.full((1, 1), 5.0)
        model(x * 7).sum().backward()
    assert [call["0.weight"].item() for call in got.calls] == [2.0, 5.0]
    assert [call["0.weight:grad"].item() for call in got.calls] == [3.0, 10.0]
