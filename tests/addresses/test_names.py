"""Canonical names: wrappers, sharing, cycles, parametrizations, lazy modules."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from hookline._errors import UnsupportedModel
from hookline.addresses import ModuleTree, unwrap


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 2)
        self.blocks = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.missing = None


def names_of(tree: ModuleTree) -> list[str]:
    return [entry.names[0] for entry in tree.entries]


def test_names_are_those_of_named_modules_in_their_order() -> None:
    model = nn.Sequential(Net(), nn.ModuleDict({"a:b": Net(), "relu": nn.ReLU()}))
    tree = ModuleTree(model)
    assert names_of(tree) == [name for name, _ in model.named_modules()]
    assert [entry.module for entry in tree.entries] == list(model.modules())
    expected = [name for name, _ in model.named_parameters()]
    assert [entry.names[0] for entry in tree.parameters] == expected
    assert tree.root is model
    assert tree.wrappers == []


def test_shared_module_has_all_its_names() -> None:
    model = Net()
    model.blocks.append(model.fc1)
    block = nn.Sequential(model.fc1)
    model.first = block
    model.second = block
    tree = ModuleTree(model)
    entry = tree.entry_of(model.fc1)
    assert entry is not None
    assert entry.names == ("fc1", "blocks.2", "first.0", "second.0")
    assert tree.find("second.0") == entry
    assert names_of(tree) == [name for name, _ in model.named_modules()]


def test_tied_parameter_has_all_names_and_places() -> None:
    model = Net()
    model.blocks[0].weight = model.fc1.weight
    model.alias = model.fc1
    entry = ModuleTree(model).find_parameter("blocks.0.weight")
    assert entry is not None
    assert entry.names == ("fc1.weight", "blocks.0.weight", "alias.weight")
    assert entry.places == ((model.fc1, "weight"), (model.blocks[0], "weight"))
    assert entry.parameter is model.fc1.weight
    assert len(ModuleTree(model).parameters) == 3


def wrap_all(model: nn.Module) -> list[nn.Module]:
    return [
        torch.compile(model, backend="eager"),
        nn.DataParallel(model),
        checkpoint_wrapper(model),
        nn.DataParallel(checkpoint_wrapper(torch.compile(model, backend="eager"))),
    ]


def test_wrapped_root_has_the_names_of_the_model() -> None:
    model = Net()
    for wrapper in wrap_all(model):
        tree = ModuleTree(wrapper)
        assert tree.root is model
        assert unwrap(wrapper) is model
        assert names_of(tree) == [name for name, _ in model.named_modules()]
        expected = [name for name, _ in model.named_parameters()]
        assert [entry.names[0] for entry in tree.parameters] == expected
        assert tree.wrappers[0] is wrapper
        assert tree.entry_of(wrapper) == tree.find("")
        assert tree.find("module") is None


def test_wrapped_child_gives_its_name_to_the_innermost() -> None:
    for wrapper in wrap_all(nn.Linear(2, 2)):
        model = nn.Sequential(nn.ReLU(), wrapper)
        tree = ModuleTree(model)
        assert names_of(tree) == ["", "0", "1"]
        entry = tree.find("1")
        assert entry is not None
        assert type(entry.module) is nn.Linear
        assert tree.entry_of(wrapper) == entry


def test_averaged_model_shows_its_copy() -> None:
    averaged = AveragedModel(Net())
    tree = ModuleTree(averaged)
    assert tree.root is averaged.module
    assert names_of(tree) == ["", "fc1", "blocks", "blocks.0", "blocks.1"]


def test_every_nested_wrapper_is_listed_once() -> None:
    inner = checkpoint_wrapper(nn.Linear(2, 2))
    outer = nn.DataParallel(nn.Sequential(inner, inner))
    tree = ModuleTree(outer)
    assert tree.wrappers == [outer, inner]
    assert [entry.names for entry in tree.entries] == [("",), ("0", "1")]


@pytest.mark.parametrize("attribute", ["module", "_orig_mod", "_fsdp_wrapped_module"])
def test_own_attribute_named_like_a_wrappers_stays(attribute: str) -> None:
    class DataParallel(nn.Module):
        """Named as torch's, but not torch's."""

    model = DataParallel()
    model.add_module(attribute, nn.Linear(2, 2))
    tree = ModuleTree(model)
    assert names_of(tree) == ["", attribute]
    assert tree.wrappers == []
    assert unwrap(model) is model


def test_subclass_of_a_wrapper_is_a_wrapper() -> None:
    class MyParallel(nn.DataParallel):
        pass

    model = Net()
    assert unwrap(MyParallel(model)) is model


def test_distributed_wrappers_are_known_by_class_name() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for kind, attribute in [
        (DistributedDataParallel, "module"),
        (FullyShardedDataParallel, "_fsdp_wrapped_module"),
    ]:
        # Made without a process group: only class and registration matter here.
        wrapper = kind.__new__(kind)
        nn.Module.__init__(wrapper)
        model = Net()
        wrapper._modules[attribute] = model
        assert unwrap(wrapper) is model


def test_parametrizations_are_hidden_from_patterns_only() -> None:
    model = Net()
    parametrizations.weight_norm(model.fc1)
    tree = ModuleTree(model)
    entry = tree.find("fc1.parametrizations.weight.0")
    assert entry is not None
    assert entry.pattern_names == ()
    visible = [entry.names[0] for entry in tree.entries if entry.pattern_names]
    assert visible == ["", "fc1", "blocks", "blocks.0", "blocks.1"]
    assert tree.find_parameter("fc1.parametrizations.weight.original0") is not None


def test_module_shared_with_a_parametrization_is_seen_by_its_other_name() -> None:
    model = Net()
    model.scale = nn.Identity()
    torch.nn.utils.parametrize.register_parametrization(model.fc1, "weight", model.scale)
    entry = ModuleTree(model).entry_of(model.scale)
    assert entry is not None
    assert entry.pattern_names == ("scale",)
    assert entry.names == ("fc1.parametrizations.weight.0", "scale")


def test_own_attribute_named_parametrizations_stays_visible() -> None:
    model = Net()
    model.parametrizations = nn.ModuleDict({"weight": nn.ReLU()})
    entry = ModuleTree(model).find("parametrizations.weight")
    assert entry is not None
    assert entry.pattern_names == ("parametrizations.weight",)


def test_lazy_parameters_are_there_before_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    tree = ModuleTree(model)
    assert [entry.names[0] for entry in tree.parameters] == ["0.weight", "0.bias"]


def test_missing_parameter_is_left_out() -> None:
    tree = ModuleTree(nn.Linear(2, 2, bias=False))
    assert [entry.names[0] for entry in tree.parameters] == ["weight"]


def test_cycle_ends_where_it_meets_itself() -> None:
    one, other = nn.Module(), nn.Module()
    one._modules["b"] = other
    other._modules["a"] = one
    root = nn.Module()
    root.one = one
    root._modules["self"] = root
    tree = ModuleTree(root)
    assert [entry.names for entry in tree.entries] == [("",), ("one",), ("one.b",)]


def test_modules_that_all_hold_each_other_end() -> None:
    modules = [nn.Module() for _ in range(8)]
    for module in modules:
        module._modules = {str(index): child for index, child in enumerate(modules)}
    assert len(ModuleTree(modules[0]).entries) == 8


def test_activation_shared_by_many_layers_keeps_every_name() -> None:
    relu = nn.ReLU()
    model = nn.ModuleList([nn.Sequential(relu) for _ in range(2000)])
    entry = ModuleTree(model).entry_of(relu)
    assert entry is not None
    assert len(entry.names) == 2000


def test_module_of_a_copy_is_not_in_the_tree() -> None:
    model = Net()
    assert ModuleTree(model).entry_of(copy.deepcopy(model).fc1) is None


def test_model_that_is_no_module_raises() -> None:
    with pytest.raises(UnsupportedModel, match=r"a model is an `nn\.Module`, not `int`"):
        ModuleTree(3)  # type: ignore[arg-type]


def test_tree_leaves_no_reference_cycle() -> None:
    gc.disable()
    try:
        model = Net()
        alive = weakref.ref(model)
        tree = ModuleTree(model)
        assert tree.entries
        assert tree.parameters
        del tree, model
        assert alive() is None
    finally:
        gc.enable()


def test_import_loads_no_compiler_and_no_distributed_wrappers() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import hookline.addresses;"
        "print([name for name in set(sys.modules) - before if name.startswith('torch.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
