"""Selectors against models: which sites, in which order, by which names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hookline._errors import AddressError, NoSuchSite
from hookline.addresses import ModuleTree, Selector, parse, port, resolve


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(2, 2)
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.layers = nn.ModuleList([Block() for _ in range(12)])
        self.head = nn.Linear(2, 3, bias=False)


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def tree(model: Net) -> ModuleTree:
    return ModuleTree(model)


def addresses(tree: ModuleTree, selector: Selector, **options: str) -> list[str]:
    return [site.address for site in resolve(tree, selector, **options)]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("", [":output"]),
        (":input", [":input"]),
        (":output.grad", [":output.grad"]),
        ("head", ["head:output"]),
        ("head:input.x.grad", ["head:input.x.grad"]),
        ('head:output[0]["a b"]', ['head:output[0]["a b"]']),
        ("layers.[9-11].attn", [f"layers.{i}.attn:output" for i in (9, 10, 11)]),
        ("layers.[1,3].mlp:input", ["layers.1.mlp:input", "layers.3.mlp:input"]),
        (r"re:layers\.1\d\.attn:input", ["layers.10.attn:input", "layers.11.attn:input"]),
        ("*", ["embed:output", "layers:output", "head:output"]),
        ("head.weight", ["head.weight"]),
        ("head.weight:grad", ["head.weight:grad"]),
        ("head.weight:local_grad", ["head.weight:local_grad"]),
        ("head.*", ["head.weight"]),
        (
            "layers.[0-1].attn.*:grad",
            [f"layers.{i}.attn.{n}:grad" for i in (0, 1) for n in ("weight", "bias")],
        ),
        ("*.weight", ["embed.weight", "head.weight"]),
    ],
)
def test_address_names_sites(tree: ModuleTree, selector: str, expected: list[str]) -> None:
    assert addresses(tree, selector) == expected


def test_site_address_names_the_site_again(tree: ModuleTree) -> None:
    for selector in ("**", "**:input.x.grad", "**:grad", "**.weight"):
        for site in resolve(tree, selector):
            assert resolve(tree, site.address) == [site]


def test_deep_wildcard_names_every_module_with_the_root(model: Net, tree: ModuleTree) -> None:
    assert [site.path for site in resolve(tree, "**")] == [
        name for name, _ in model.named_modules()
    ]


def test_deep_wildcard_with_grad_names_every_parameter(model: Net, tree: ModuleTree) -> None:
    sites = resolve(tree, "**:grad")
    assert [site.path for site in sites] == [name for name, _ in model.named_parameters()]
    assert all(site.is_grad and site.port == "parameter" for site in sites)


def test_parameter_site_has_its_owner_and_local_name(model: Net, tree: ModuleTree) -> None:
    (site,) = resolve(tree, "layers.3.attn.bias")
    assert (site.module, site.parameter) == (model.layers[3].attn, "bias")
    assert (site.port, site.leaf, site.is_grad) == ("parameter", (), False)


def test_class_names_instances_and_subclass_instances(model: Net, tree: ModuleTree) -> None:
    model.head.__class__ = type("FSDPLinear", (nn.Linear,), {})
    paths = [site.path for site in resolve(tree, nn.Linear)]
    assert paths == [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    assert addresses(tree, Net) == [":output"]


def test_predicate_sees_path_and_module(tree: ModuleTree) -> None:
    found = addresses(
        tree, lambda path, module: path.startswith("layers.1") and type(module) is Block
    )
    assert found == ["layers.1:output", "layers.10:output", "layers.11:output"]


def test_predicate_error_gains_a_note(tree: ModuleTree) -> None:
    def is_wide(path: str, module: nn.Module) -> bool:
        return module.out_features > 2  # type: ignore[operator]

    with pytest.raises(AttributeError) as caught:
        resolve(tree, is_wide)
    assert caught.value.__notes__ == ["in a predicate, called with (path, module) for ``"]


def test_module_names_itself(model: Net, tree: ModuleTree) -> None:
    (site,) = resolve(tree, model.layers[2])
    assert site.address == "layers.2:output"
    assert site.is_exact
    assert addresses(tree, model) == [":output"]


def test_container_module_is_one_site_and_no_list(model: Net, tree: ModuleTree) -> None:
    assert addresses(tree, model.layers[0].mlp) == ["layers.0.mlp:output"]


def test_list_is_in_model_order_without_duplicates(model: Net, tree: ModuleTree) -> None:
    selector: Selector = [
        "head",
        ("layers.2.attn.bias", "layers.2.attn.weight"),
        "head:input",
        model.layers[2],
        {"layers.[2-3]"},
        "layers.2.attn",
        nn.Embedding,
    ]
    assert addresses(tree, selector) == [
        "embed:output",
        "layers.2:output",
        "layers.2.attn:output",
        "layers.2.attn.weight",
        "layers.2.attn.bias",
        "layers.3:output",
        "head:input",
        "head:output",
    ]


def test_site_named_both_ways_is_exact(tree: ModuleTree) -> None:
    for selector in (["layers.*", "layers.2"], ["layers.2", "layers.*"]):
        exact = [site.path for site in resolve(tree, selector) if site.is_exact]
        assert exact == ["layers.2"]


@pytest.mark.parametrize("selector", ["head*", "re:head", nn.Embedding, lambda path, module: True])
def test_pattern_is_not_exact(tree: ModuleTree, selector: Selector) -> None:
    assert not any(site.is_exact for site in resolve(tree, selector))


def test_every_item_of_a_list_must_match(tree: ModuleTree) -> None:
    with pytest.raises(NoSuchSite, match="`heads` matches no site"):
        resolve(tree, ["embed", "heads"])
    with pytest.raises(NoSuchSite, match="an empty list of selectors names no site"):
        resolve(tree, [])


def test_default_port_is_for_selectors_without_one(model: Net, tree: ModuleTree) -> None:
    selector: Selector = [
        "embed",
        "layers.0:output",
        nn.ReLU,
        model.head,
        port(model.head, "output"),
    ]
    found = addresses(tree, selector, default_port="input.grad")
    assert found[:2] == ["embed:input.grad", "layers.0:output"]
    assert found[2] == "layers.0.mlp.1:input.grad"
    assert found[-2:] == ["head:input.grad", "head:output"]
    assert addresses(tree, "head.weight", default_port="input") == ["head.weight"]
    assert addresses(tree, "head.weight", default_port="output.grad") == ["head.weight:grad"]


def test_port_chooses_for_classes_modules_predicates_lists(model: Net, tree: ModuleTree) -> None:
    assert addresses(tree, port(nn.Embedding, "input.grad")) == ["embed:input.grad"]
    assert addresses(tree, port(model.head, "output[0]")) == ["head:output[0]"]
    assert addresses(tree, port(lambda path, module: path == "head", "input")) == ["head:input"]
    assert addresses(tree, port(["head", nn.Embedding], "input")) == ["embed:input", "head:input"]


def test_port_chosen_twice_raises(tree: ModuleTree) -> None:
    with pytest.raises(AddressError, match="this address has a port of its own"):
        resolve(tree, port("head:input", "output"))
    with pytest.raises(AddressError, match="has a port of its own; choose it once"):
        resolve(tree, port(port(nn.Linear, "input"), "output"))


def test_port_that_is_none_raises_when_made() -> None:
    with pytest.raises(AddressError, match="unknown port `outputs`"):
        port(nn.Linear, "outputs")
    with pytest.raises(AddressError, match=r"write `output\.grad` or `input\.grad`"):
        port(nn.Linear, "grad")


def test_parameter_with_a_port_raises(tree: ModuleTree) -> None:
    message = "names a parameter, which has no ports; write `{0}` or `{0}:grad`"
    for path in ("head.weight", "*.weight"):
        with pytest.raises(AddressError) as caught:
            resolve(tree, f"{path}:output")
        assert caught.value.position == len(path)
        assert str(caught.value).startswith(f"`{path}` " + message.format(path) + "\n")
    with pytest.raises(AddressError) as caught:
        resolve(tree, port("head.weight", "output"))
    assert str(caught.value) == "`head.weight` " + message.format("head.weight")


@pytest.mark.parametrize("value", [3, None, torch.ones(2), [b"a"]])
def test_what_is_no_selector_raises(tree: ModuleTree, value: Any) -> None:
    with pytest.raises(AddressError, match="is no selector; give an address, a class, a module"):
        resolve(tree, value)


def test_shared_module_resolves_by_each_name_to_one_site() -> None:
    model = Net()
    model.alias = model.layers[1]
    tree = ModuleTree(model)
    (first,), (second,) = resolve(tree, "layers.1.attn"), resolve(tree, "alias.attn")
    assert first == second
    assert hash(first) == hash(second)
    assert second.names == ("layers.1.attn", "alias.attn")
    assert addresses(tree, ["alias.*", "layers.1.*"]) == [
        "layers.1.attn:output",
        "layers.1.mlp:output",
    ]
    assert addresses(tree, "**.attn").count("layers.1.attn:output") == 1


def test_shared_modules_matched_by_a_later_name_keep_model_order() -> None:
    model = Net()
    model.x_last = model.embed
    model.x_first = nn.ReLU()
    assert addresses(ModuleTree(model), "x_*") == ["embed:output", "x_first:output"]


def test_tied_parameter_resolves_by_each_name_to_one_site() -> None:
    model = Net()
    model.head.weight = model.embed.weight
    tree = ModuleTree(model)
    (site,) = resolve(tree, "head.weight:grad")
    assert site.names == ("embed.weight", "head.weight")
    assert (site.module, site.parameter) == (model.embed, "weight")
    assert resolve(tree, "*.weight:grad") == [site]
    assert resolve(tree, "*.weight:local_grad") != [site]


def test_parametrization_is_named_by_exact_path_only() -> None:
    model = Net()
    parametrizations.weight_norm(model.head)
    tree = ModuleTree(model)
    inside = "head.parametrizations.weight.0"
    assert addresses(tree, inside) == [f"{inside}:output"]
    for selector in ("**", lambda path, module: True, "re:.*", nn.Module):
        assert not any("parametrizations" in site.path for site in resolve(tree, selector))
    assert "head.parametrizations.weight.original0:grad" in addresses(tree, "**:grad")


def test_wrapped_model_resolves_to_the_same_sites(model: Net, tree: ModuleTree) -> None:
    wrapped = ModuleTree(nn.DataParallel(model))
    assert resolve(wrapped, "**") == resolve(tree, "**")
    assert resolve(wrapped, nn.DataParallel(model)) == resolve(tree, "")


def test_name_with_special_characters_is_escaped() -> None:
    model = nn.ModuleDict({"a:b*": nn.Linear(1, 1), "re": nn.ReLU(), "x@y/z": nn.ReLU()})
    tree = ModuleTree(model)
    assert addresses(tree, "**") == [
        ":output",
        r"a\:b\*:output",
        r"\re:output",
        r"x\@y\/z:output",
    ]
    for site in resolve(tree, "**"):
        assert resolve(tree, site.address) == [site]
    assert addresses(tree, r"a\:b\*.weight:grad") == [r"a\:b\*.weight:grad"]


def test_model_that_is_a_single_layer_resolves() -> None:
    tree = ModuleTree(nn.Linear(2, 2))
    assert addresses(tree, ["", "weight", "bias:grad"]) == [":output", "weight", "bias:grad"]
    assert parse("weight").path == resolve(tree, "weight")[0].path
