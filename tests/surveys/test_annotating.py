"""`hl.source`: the addresses beside the source are those that work, and the ones that ran."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import transformers
from small_models import Lazy, is_clean
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl
from hookline.surveys.pages import SourceListing

Margin = dict[str, list[tuple[str, str]]]


class Attention(nn.Module):
    """Two heads, with a branch and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, -1)
        q = q.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        k = k.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        v = v.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width)
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        probs = F.softmax(scores, -1)
        y = (
            probs
            @ v
        )  # fmt: skip
        for _ in range(2):
            y = y * 0.5
            y += 1
        y = y.transpose(1, 2).reshape(batch, length, width)
        return self.out(y)


class Blocks(nn.Module):
    """Attention twice, and a module that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.idle = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def double(value: Tensor, by: int = 2) -> Tensor:
    scaled = value * by
    return scaled


class Calling(nn.Module):
    """A forward that calls a function, a method, a function inside it, and one it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = double

    def turn(self, value: Tensor) -> Tensor:
        turned = value.flip(-1)
        return turned

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        def inner(z: Tensor) -> Tensor:
            w = z.exp()
            return w

        a = double(x)
        b = self.turn(a)
        function = self.chosen
        c = function(b)
        self.last = inner(c) + inner(a)
        return self.last


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 4, 8)


def margin(listing: SourceListing, page: int = 0) -> Margin:
    """Give the labels of each line that has some, by the code of the line."""
    lines = listing.pages[page].lines
    return {line.code.strip(): [tuple(one) for one in line.labels] for line in lines if line.labels}


def names(listing: SourceListing, page: int = 0) -> dict[str, list[str]]:
    return {code: [text for text, _ in labels] for code, labels in margin(listing, page).items()}


def test_without_example_source_tells_names_and_certain_numbers(blocks: Blocks) -> None:
    found = names(hl.source(blocks, "layers.0"))
    assert found == {
        "def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:": ["@x", "@mask"],
        "batch, length, width = x.shape": ["@batch", "@length", "@width"],
        "q, k, v = self.qkv(x).split(width, -1)": ["@q[0]", "@k[0]", "@v[0]", "/split"],
        "q = q.view(batch, length, self.heads, width // self.heads).transpose(1, 2)": [
            "@q[1]",
            "/view[0]",
            "/transpose[0]",
        ],
        "k = k.view(batch, length, self.heads, width // self.heads).transpose(1, 2)": [
            "@k[1]",
            "/view[1]",
            "/transpose[1]",
        ],
        "v = v.view(batch, length, self.heads, width // self.heads).transpose(1, 2)": [
            "@v[1]",
            "/view[2]",
            "/transpose[2]",
        ],
        "scores = q @ k.transpose(-2, -1) / math.sqrt(width)": [
            "@scores[0]",
            "/transpose[3]",
            "/matmul[0]",
            "/div",
        ],
        "scores = scores.masked_fill(mask, -1e9)": ["@scores", "/masked_fill"],
        "probs = F.softmax(scores, -1)": ["@probs", "/softmax"],
        "y = (": ["@y[0]"],
        "probs": ["/matmul[1]"],
        "for _ in range(2):": ["@_"],
        "y = y * 0.5": ["@y", "/mul"],
        "y += 1": ["@y", "/add_"],
        "y = y.transpose(1, 2).reshape(batch, length, width)": ["@y", "/transpose[4]", "/reshape"],
        "return self.out(y)": ["@return"],
    }


def test_example_adds_shapes_numbers_and_what_did_not_run(blocks: Blocks, x: Tensor) -> None:
    found = margin(hl.source(blocks, "layers.0", example=x))
    assert found["def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:"] == [
        ("@x", "2x4x8"),
        ("@mask", "None"),
    ]
    assert found["q, k, v = self.qkv(x).split(width, -1)"] == [
        ("@q[0]", "2x4x8"),
        ("@k[0]", "2x4x8"),
        ("@v[0]", "2x4x8"),
        ("/split", "(2x4x8, 2x4x8, 2x4x8)"),
    ]
    assert found["scores = q @ k.transpose(-2, -1) / math.sqrt(width)"] == [
        ("@scores", "2x2x4x4"),
        ("/transpose[3]", "2x2x4x4"),
        ("/matmul[0]", "2x2x4x4"),
        ("/div", "2x2x4x4"),
    ]
    assert found["scores = scores.masked_fill(mask, -1e9)"] == [("@scores", "(not run)")]
    assert found["y = ("] == [("@y[0]", "2x2x4x4")]
    assert found["probs"] == [("/matmul[1]", "2x2x4x4")]
    assert found["y = y * 0.5"] == [("@y[1],[3]", "2x2x4x4  x2"), ("/mul[0]..[1]", "2x2x4x4  x2")]
    assert found["y += 1"] == [("@y[2],[4]", "2x2x4x4  x2"), ("/add_[0]..[1]", "2x2x4x4  x2")]
    assert found["return self.out(y)"] == [("@return", "2x4x8")]


@pytest.mark.parametrize("where", ["layers.1", ""])
def test_every_address_can_be_captured(blocks: Blocks, x: Tensor, where: str) -> None:
    """What is printed is what works: each address gives exactly one value."""
    addresses = hl.source(blocks, where, example=x).addresses
    assert len(addresses) == len(set(addresses)) > 5
    with hl.capture(blocks, *addresses) as got:
        blocks(x)
    for address in addresses:
        got[address]


def test_forecast_is_what_runs_where_it_gives_a_number(blocks: Blocks, x: Tensor) -> None:
    ran = set(hl.source(blocks, "layers.0", example=x).addresses)
    expected = hl.source(blocks, "layers.0").addresses
    numbered = {one for one in expected if one.endswith("]") and "@scores" not in one}
    assert numbered
    assert numbered <= ran


def test_text_has_a_margin_numbers_and_code(x: Tensor) -> None:
    first = Calling.turn.__code__.co_firstlineno
    text = str(hl.source(Calling(), "@turn", example=x))
    assert text == (
        f"the root, `turn` in its forward: `Calling.turn`, {_file()} line {first}\n"
        "A label `.x` stands for `@turn.x`.\n"
        '    hl.capture(model, "@turn.turned")\n'
        "\n"
        f".value   2x4x8  {first} | def turn(self, value: Tensor) -> Tensor:\n"
        f".turned  2x4x8  {first + 1} |     turned = value.flip(-1)\n"
        f"/flip    2x4x8  {' ' * len(str(first))} |\n"
        f".return  2x4x8  {first + 2} |     return turned"
    )


def _file() -> str:
    from hookline.surveys.naming import show_file

    return show_file(__file__)


def test_file_is_named_without_the_folders_of_the_machine(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    headings = [page.heading[0] for page in hl.source(blocks, ["", "idle"]).pages]
    assert headings[0].startswith("the root: `Blocks.forward`, ")
    assert headings[1].startswith("`idle`: `Tanh.forward`, torch/nn/modules/activation.py line ")
    assert str(tmp_path) not in "".join(headings)
    assert not any(" /" in heading for heading in headings)


def test_modules_of_one_class_are_shown_once_with_all_their_paths(blocks: Blocks) -> None:
    listing = hl.source(blocks, "layers.*")
    assert [page.paths for page in listing.pages] == [("layers.0", "layers.1")]
    assert listing.pages[0].heading[0].startswith("`layers.0`, `layers.1`: `Attention.forward`")
    assert {"layers.0@probs", "layers.1@probs"} <= set(listing.addresses)


def test_with_example_each_module_has_its_own_page(blocks: Blocks, x: Tensor) -> None:
    listing = hl.source(blocks, [Attention, "idle"], example=x)
    assert [page.paths for page in listing.pages] == [("layers.0",), ("layers.1",), ("idle",)]
    assert listing.pages[2].heading[1] == (
        "It did not run with this example; this is what the source alone tells."
    )


def test_visits_are_shown_together(x: Tensor) -> None:
    act = nn.Tanh()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = act

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.act(x)[:1])

    listing = hl.source(Twice(), "act", example=x)
    assert listing.pages[0].heading[1] == "It ran 2 times; this is all of them together."
    assert margin(listing)["return torch.tanh(input)"] == [
        ("@return", "2x4x8, 1x4x8"),
        ("/tanh", "2x4x8, 1x4x8"),
    ]


def test_calls_that_can_be_entered_are_listed(x: Tensor) -> None:
    model = Calling()
    below = hl.source(model).pages[0].footing
    assert [line.split("  line")[0] for line in below[1:4]] == [
        "  @double.*    double(...)   ",
        "  @turn.*      self.turn(...)",
        "  @function.*  function(...) ",
    ]
    assert below[3].endswith("which function it is shows when it is called")
    assert hl.source(model, example=x).pages[0].footing[3].endswith("called double here")


def test_inner_functions_and_attributes_are_labelled(x: Tensor) -> None:
    model = Calling()
    found = margin(hl.source(model, example=x))
    assert found["w = z.exp()"] == [
        ("@inner.w[0]..[1]", "2x4x8  x2"),
        ("/exp[0]..[1]", "2x4x8  x2"),
    ]
    assert found["self.last = inner(c) + inner(a)"] == [("@self.last", "2x4x8"), ("/add", "2x4x8")]
    assert found["c = function(b)"] == [("@c", "2x4x8"), ("/mul[1]", "2x4x8")]
    assert "@torch.no_grad()" in str(hl.source(model))
    assert not hasattr(model, "last"), "the example's run is to leave nothing"


def test_function_known_only_when_called_is_shown_with_an_example(x: Tensor) -> None:
    model = Calling()
    assert "is known when it is called" in str(hl.source(model, "@function"))
    listing = hl.source(model, "@function", example=x)
    assert margin(listing) == {
        "def double(value: Tensor, by: int = 2) -> Tensor:": [(".value", "2x4x8"), (".by", "int")],
        "scaled = value * by": [(".scaled", "2x4x8"), ("/mul[1]", "2x4x8")],
        "return scaled": [(".return", "2x4x8")],
    }
    assert "@function.scaled" in listing.addresses


def test_inside_of_a_function_of_torch_is_shown(x: Tensor) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    listing = hl.source(model, "@multi_head_attention_forward", example=(x, x, x))
    found = margin(listing)
    assert found["attn_output_weights = softmax(attn_output_weights, dim=-1)"] == [
        (".attn_output_weights[1]", "4x4x4")
    ]
    assert found["attn_output_weights = dropout(attn_output_weights, p=dropout_p)"] == [
        (".attn_output_weights", "(not run)")
    ]
    with hl.capture(model, *listing.addresses) as got:
        model(x, x, x)
    for address in listing.addresses:
        got[address]


def test_hugging_face_attention_is_shown_into_its_function() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, hidden_size=16,
        intermediate_size=24, vocab_size=40, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    example = {"input_ids": torch.arange(14).reshape(2, 7), "use_cache": False}
    path = "model.layers.0.self_attn"
    outer = hl.source(model, path, example=example)
    assert margin(outer)["attn_output, attn_weights = attention_interface("][:2] == [
        ("@attn_output[0]", "2x7x2x8"),
        ("@attn_weights", "2x2x7x7"),
    ]
    assert any("called eager_attention_forward here" in line for line in outer.pages[0].footing)
    inner = hl.source(model, f"{path}@attention_interface", example=example)
    addresses = [f"{path}@attention_interface.attn_weights[2]", f"{path}/softmax"]
    assert set(addresses) <= set(inner.addresses)
    with hl.capture(model, *addresses) as got:
        model(**example)
    assert torch.equal(got[addresses[0]], got[addresses[1]])


def make_without_source() -> nn.Module:
    space: dict[str, Any] = {"nn": nn, "F": F}
    exec(
        "class Made(nn.Module):\n"
        "    def forward(self, x):\n"
        "        y = F.relu(x) + 1\n"
        "        return y.sum(-1)\n",
        space,
    )
    made: nn.Module = space["Made"]()
    return made


def test_without_source_operations_are_listed(x: Tensor) -> None:
    model = make_without_source()
    expected = hl.source(model)
    assert expected.addresses == ["/relu", "/add", "/sum"]
    assert "Its source cannot be shown: there is no source" in str(expected)
    ran = hl.source(model, example=x)
    assert str(ran).splitlines()[-3:] == ["  /relu  2x4x8", "  /add  2x4x8", "  /sum  2x4"]
    with hl.capture(model, *ran.addresses) as got:
        model(x)
    assert torch.equal(got["/sum"], model(x))


def test_recurrent_layer_is_shown() -> None:
    found = margin(hl.source(nn.LSTM(4, 6), example=torch.ones(5, 2, 4)))
    assert found["hx = (h_zeros, c_zeros)"]
    assert found["output = result[0]"] == [("@output", "5x2x6")]
    assert ("@batch_sizes", "(not run)") in found[
        "input, batch_sizes, sorted_indices, unsorted_indices = input"
    ]


def test_generator_is_shown_from_its_source_alone() -> None:
    listing = hl.source(nn.Sequential(Lazy()), "0", example=torch.ones(3))
    assert listing.pages[0].heading[1] == (
        "Its forward is a generator, which returns before its body runs."
    )
    assert names(listing)["yield x * 2"] == ["/mul"]


def test_forecast_doubts_what_calls_may_do(x: Tensor) -> None:
    """`double` calls `mul` itself, so which `mul` comes after it is not certain."""

    class After(nn.Module):
        def forward(self, x: Tensor, times: int = 3) -> Tensor:
            a = x * 2
            b = double(a)
            rows = x.shape[0] * times
            parts = x.chunk(2)
            return b * rows + parts[0][:1]

    found = names(hl.source(After()))
    assert found["a = x * 2"] == ["@a", "/mul[0]"]
    assert found["rows = x.shape[0] * times"] == ["@rows"]
    assert found["parts = x.chunk(2)"] == ["@parts", "/chunk"]
    assert found["return b * rows + parts[0][:1]"] == ["@return", "/mul", "/getitem", "/add"]
    ran = names(hl.source(After(), example=x))
    assert ran["return b * rows + parts[0][:1]"] == ["@return", "/mul[2]", "/getitem", "/add"]


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("@nothing", hl.NoSuchSite, "this forward calls no `nothing`. It calls: `exp`, `double`"),
        ("@a", hl.NoSuchSite, "`a` is a variable of this forward"),
        ("/mul", hl.AddressError, "an operation has no source to show"),
        ("nowhere", hl.NoSuchSite, "`nowhere` matches no site"),
    ],
)
def test_what_has_no_source_raises(where: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        hl.source(Calling(), where)
    assert message in str(caught.value).replace("`inner.exp`", "`exp`")


def test_container_and_parameter_have_no_source(blocks: Blocks) -> None:
    with pytest.raises(hl.NoSuchSite, match=r"container and has no forward.*`layers\.\*`"):
        hl.source(blocks, "layers")
    with pytest.raises(hl.NoSuchSite, match="names a parameter"):
        hl.source(blocks, "layers.0.out.weight")


def test_example_leaves_no_trace_and_keeps_no_tensor(blocks: Blocks, x: Tensor) -> None:
    alive: list[weakref.ref[Tensor]] = []
    handle = blocks.layers[0].register_forward_hook(
        lambda *args: alive.append(weakref.ref(args[2]))
    )
    state = torch.get_rng_state()
    listing = hl.source(blocks, "**", example=x)
    handle.remove()
    gc.collect()
    assert [ref() for ref in alive] == [None]
    assert torch.equal(torch.get_rng_state(), state)
    assert is_clean(blocks)
    assert listing.addresses


def test_html_is_escaped_and_rich_says_the_same(blocks: Blocks) -> None:
    from rich.console import Console

    class Compared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x < 1

    listing = hl.source(Compared())
    assert "return x &lt; 1" in listing._repr_html_()
    assert "&lt;" not in str(listing)
    console = Console(width=300, no_color=True)
    with console.capture() as printed:
        console.print(hl.source(blocks, "layers.0"))
    lines = [line.rstrip() for line in printed.get().splitlines()]
    assert lines == str(hl.source(blocks, "layers.0")).splitlines()
