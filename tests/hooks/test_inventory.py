"""What `inventory` lists, against hooks registered through torch itself."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim.swa_utils import AveragedModel

from hookline._errors import UnsupportedModel
from hookline.hooks.functions import hook
from hookline.hooks.inventory import inventory
from hookline.hooks.origins import find_origin


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 4)
        self.fc2 = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).relu())


def probe(*_: Any) -> None:
    raise AssertionError("an inventory calls no hook")


def look(*_: Any) -> None:
    """Observe nothing."""


@pytest.fixture
def net() -> Net:
    return Net()


def location(function: Any) -> str:
    path = Path(inspect.getsourcefile(function) or "")
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{inspect.getsourcelines(function)[1]}"


def rows_of(model: nn.Module | None) -> list[tuple[object, ...]]:
    return list(inventory(model).rows)


def test_model_without_hooks_says_so(net: Net) -> None:
    table = inventory(net)
    assert len(table) == 0
    assert str(table) == "hooks on `Net`\nno hooks"


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        ("register_forward_pre_hook", "forward pre"),
        ("register_forward_hook", "forward"),
        ("register_full_backward_pre_hook", "full backward pre"),
        ("register_full_backward_hook", "full backward"),
        ("register_backward_hook", "legacy backward"),
        ("register_state_dict_pre_hook", "state_dict pre"),
        ("register_state_dict_post_hook", "state_dict"),
        ("register_load_state_dict_pre_hook", "load_state_dict pre"),
        ("_register_load_state_dict_pre_hook", "load_state_dict pre"),
        ("register_load_state_dict_post_hook", "load_state_dict post"),
    ],
)
def test_module_hooks_show_kind_and_line(net: Net, register: str, kind: str) -> None:
    getattr(net.fc1, register)(probe)
    assert rows_of(net) == [("fc1", kind, "probe", location(probe), "you")]


def test_parameter_hooks_show_once_for_a_tied_parameter(net: Net) -> None:
    net.fc2.weight = net.fc1.weight
    net.fc1.weight.register_hook(probe)
    net.fc1.weight.register_post_accumulate_grad_hook(probe)
    assert [row[:3] for row in rows_of(net)] == [
        ("fc1.weight", "tensor", "probe"),
        ("fc1.weight", "post accumulate grad", "probe"),
    ]


@pytest.fixture
def global_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch forget which kind of global backward hook it saw first."""
    monkeypatch.setattr(torch_module, "_global_is_full_backward_hook", None)


@pytest.mark.usefixtures("global_backward")
def test_global_hooks_show_with_and_without_a_model(net: Net) -> None:
    registers = {
        "forward pre": torch_module.register_module_forward_pre_hook,
        "forward": torch_module.register_module_forward_hook,
        "full backward pre": torch_module.register_module_full_backward_pre_hook,
        "full backward": torch_module.register_module_full_backward_hook,
        "module registration": torch_module.register_module_module_registration_hook,
        "parameter registration": torch_module.register_module_parameter_registration_hook,
        "buffer registration": torch_module.register_module_buffer_registration_hook,
    }
    with ExitStack() as stack:
        for register in registers.values():
            stack.enter_context(register(probe))
        expected = [("*", kind, "probe", location(probe), "you") for kind in registers]
        assert rows_of(None) == expected
        assert rows_of(net) == expected
    assert rows_of(None) == []


@pytest.mark.usefixtures("global_backward")
def test_global_legacy_backward_hook_is_named_so() -> None:
    with torch_module.register_module_backward_hook(probe):
        assert [row[1] for row in rows_of(None)] == ["legacy backward"]


def test_every_hook_dictionary_of_torch_is_covered(net: Net) -> None:
    """A torch release that adds a kind of hook fails here."""
    from hookline.hooks import inventory as listed

    own = {name for name in vars(net) if name.endswith("_hooks")}
    assert own == set(listed._MODULE_HOOKS)
    everywhere = {
        name
        for name in vars(torch_module)
        if name.startswith("_global_") and name.endswith("_hooks")
    }
    assert everywhere == set(listed._GLOBAL_HOOKS)


def test_torch_owns_its_lazy_hooks() -> None:
    rows = rows_of(nn.Sequential(nn.LazyLinear(3)))
    assert {row[4] for row in rows} == {"torch"}
    lazy = nn.modules.lazy.LazyModuleMixin._infer_parameters
    line = inspect.getsourcelines(lazy)[1]
    expected = ("0", "forward pre", "LazyModuleMixin._infer_parameters")
    assert (*expected, f"torch/nn/modules/lazy.py:{line}", "torch") in rows


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a package that lies in a `site-packages`."""
    folder = tmp_path / "site-packages" / "speedup"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "import functools\n"
        "def attach(module):\n"
        "    old = module.forward\n"
        "    @functools.wraps(old)\n"
        "    def new_forward(*args):\n"
        "        return old(*args)\n"
        "    module.forward = new_forward\n"
    )
    monkeypatch.syspath_prepend(folder.parent)
    import speedup  # type: ignore[import-not-found]

    yield speedup
    import sys

    del sys.modules["speedup"]


def test_forward_on_the_instance_names_the_library(net: Net, installed: Any) -> None:
    """functools.wraps makes it look like the model's own forward; the code says whose it is."""
    installed.attach(net.fc1)
    table = inventory(net)
    assert table.rows == (
        (
            "fc1",
            "instance forward",
            "attach.<locals>.new_forward",
            "speedup/__init__.py:4",
            "speedup",
        ),
    )
    assert table.notes[-1] == "1 module has a forward set on the instance, no hook."


def test_notes_count_what_is_neither_torchs_nor_hooklines(net: Net) -> None:
    net.fc1.register_forward_hook(probe)
    net.fc2.register_forward_hook(len)
    with hook(net, "fc1", look):
        assert inventory(net).notes == (
            "4 hooks: 2 hookline, 1 you, 1 python.",
            "2 hooks are neither torch's nor hookline's: "
            "remove them through the handle that registering returned.",
        )


def test_hookline_shows_what_it_does(net: Net) -> None:
    with hook(net, "fc1", look), hook(net, ["fc1:input.grad"], look):
        rows = rows_of(net)
    both = "hl.hook('fc1'); hl.hook(['fc1:input.grad'])"
    assert rows == [
        ("(root)", "hookline", both, "", "hookline"),
        ("fc1", "hookline", both, find_origin(look).location, "hookline"),
    ]
    assert rows_of(net) == []


def test_hookline_shows_at_parameters(net: Net) -> None:
    with hook(net, "fc1.weight:grad", look):
        purpose, line = "hl.hook('fc1.weight:grad')", find_origin(look).location
        assert ("fc1.weight", "hookline", purpose, line, "hookline") in rows_of(net)


def test_hookline_on_every_module_shows_by_what_was_asked(net: Net) -> None:
    with hook(None, nn.Linear, look):
        rows = rows_of(net)
    assert len(rows) == 1
    assert rows[0][:2] == ("*", "hookline")
    assert rows[0][2].startswith("hl.hook(None, ")


def test_copy_and_pickle_show_as_leftovers(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where something was compiled, what makes graphs notice a module keeps its copies clean too.
    monkeypatch.setattr("hookline.hooks.junctions.has_compiled_code", lambda: False)
    memo: dict[int, Any] = {}  # kept, which keeps the copy from being cleaned
    with hook(net, "fc1", look):
        copied, loaded = copy.deepcopy(net, memo), pickle.loads(pickle.dumps(net))
        assert rows_of(copy.deepcopy(net)) == []
    for model in (copied, loaded):
        assert [(row[0], row[1], row[4]) for row in rows_of(model)] == [
            ("(root)", "hookline leftover", "hookline"),
            ("fc1", "hookline leftover", "hookline"),
        ]
    copied(torch.ones(1, 3))
    assert rows_of(copied) == []
    assert rows_of(net) == []


def test_wrapper_modules_show_with_their_class(net: Net) -> None:
    model = AveragedModel(net)
    model.register_forward_hook(probe)
    model.module.fc1.register_forward_hook(probe)
    assert [row[0] for row in rows_of(model)] == ["(root) [AveragedModel]", "fc1"]


def test_shared_module_shows_once(net: Net) -> None:
    net.register_forward_hook(probe)
    assert [row[0] for row in rows_of(nn.Sequential(net, net))] == ["0"]


def test_scripted_model_is_listed() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    plain.register_load_state_dict_post_hook(probe)
    scripted = torch.jit.script(plain)
    scripted[0].weight.register_hook(probe)
    assert [row[:2] for row in rows_of(scripted)] == [("0.weight", "tensor")]


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel):
        inventory(torch.ones(1))  # type: ignore[arg-type]
