"""Which operation made the first non-finite value in a forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import failing_models
import pytest
import torch
import torch.nn.functional as F
from failing_models import Applied, Attention, Blocks, Drawn, line_of, origin_of, run_once
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.replays import Origin, find_origin, keep_call

INF = float("inf")

CASES: list[tuple[str, Callable[[Tensor], Tensor], str, str, str]] = [
    ("log", lambda h: torch.log(h * 0), "log", "log of 0 (8 elements)", "inf"),
    ("log_negative", lambda h: (-h.abs() - 1).log(), "log", "log of a negative number", "nan"),
    ("div", lambda h: h / (h - h), "div", "division by zero (8 elements of `h - h`", "inf"),
    ("div_in_place", lambda h: h.clone().div_(0), "div_", "division by zero", "inf"),
    ("exp", lambda h: torch.exp(h * 0 + 104.2), "exp", "exp of 104.2 overflows float32", "inf"),
    ("sqrt", lambda h: torch.sqrt(h * 0 - 1), "sqrt", "sqrt of a negative number", "nan"),
    ("rsqrt", lambda h: torch.rsqrt(h * 0), "rsqrt", "rsqrt of 0 (8 elements)", "inf"),
    ("half", lambda h: (h * 0 + 7.1e4).half(), "half", "float16 overflow: 7.1e+04 > 65504", "inf"),
    ("to", lambda h: (h * 0 + 7.1e4).to(torch.float16), "to", "float16 overflow", "inf"),
    ("zero_times_inf", lambda h: h.masked_fill(h < INF, INF) * 0, "mul", "0 * inf", "nan"),
    (
        "inf_minus_inf",
        lambda h: torch.full_like(h, INF) - h.masked_fill(h < INF, INF),
        "sub",
        "inf - inf",
        "nan",
    ),
    ("acos", lambda h: torch.acos(h * 0 + 1.5), "acos", "acos of a number beyond 1", "nan"),
    ("pow", lambda h: (h * 0 - 2) ** 0.5, "pow", "pow of a negative number", "nan"),
    ("mean", lambda h: h[:0].mean(), "mean", "mean of no elements", "nan"),
    ("square", lambda h: (h * 0 + 1e30).square(), "square", "square of 1e+30 overflows", "inf"),
    ("literal_nan", lambda h: h * float("nan"), "mul", "mul was given the number NaN", "nan"),
    ("literal_inf", lambda h: h.abs() * INF, "mul", "", "inf"),
    (
        "matmul",
        lambda h: (h * 0 + 1e25) @ (h * 0 + 1e25).T,
        "matmul",
        "float32 overflow: matmul passes 3.40282e+38",
        "inf",
    ),
    (
        "ignored",
        lambda h: F.cross_entropy(h, torch.full((2,), -100)),
        "cross_entropy",
        "where every target is -100",
        "nan",
    ),
]


@pytest.mark.parametrize(
    ("function", "name", "why", "kind"), [one[1:] for one in CASES], ids=[one[0] for one in CASES]
)
def test_operation_is_named_with_its_reason(
    function: Callable[[Tensor], Tensor], name: str, why: str, kind: str
) -> None:
    model = Applied(function)
    x = torch.randn(2, 4)
    origin = origin_of(model, x)
    assert origin is not None
    assert origin.operation == name
    assert why in origin.why
    assert (origin.kind, origin.cause, origin.is_backward) == (kind, "operation", False)
    assert origin.source.startswith("tests/replays/test_forward_origins.py:")
    with hl.capture(model, origin.site) as captured:
        model(x)
    assert not torch.isfinite(captured[origin.site]).all()


@pytest.mark.filterwarnings("ignore:std")
def test_spread_of_a_single_element_is_explained() -> None:
    origin = origin_of(Applied(lambda h: h[0, :1].std()), torch.randn(2, 4))
    assert origin is not None
    assert origin.why == "std of a single element: its divisor n - 1 is 0"


def attention_masks(*, all_masked_in: int | None = None) -> list[Tensor]:
    masks = [torch.triu(torch.ones(2, 3, 3, dtype=torch.bool), 1) for _ in range(3)]
    if all_masked_in is not None:
        masks[all_masked_in][1, 2] = True
    return masks


def test_masked_row_names_softmax_of_its_block() -> None:
    model = Blocks()
    x, masks = torch.randn(2, 3, 4), attention_masks(all_masked_in=1)
    origin = origin_of(model, x, masks)
    assert origin is not None
    assert origin.site == "blocks.1.attn/softmax"
    assert origin.why == "softmax of a row that is all -inf (1 row)"
    file = failing_models.__file__
    assert origin.source == f"{_shown(file)}:{line_of('return F.softmax(scores', file)}"
    assert origin.line == "return F.softmax(scores, dim=-1) @ x"
    assert origin.inputs[0]["name"] == "input"
    assert origin.inputs[0]["inf"] == 9
    assert origin.inputs[0]["nan"] == 0
    assert origin.output["nan"] == 3
    with hl.capture(model, origin.site) as captured:
        model(x, masks)
    assert captured[origin.site].isnan().sum() == 3


def _shown(file: str) -> str:
    return Path(file).relative_to(Path.cwd()).as_posix()


def test_masks_alone_are_no_origin() -> None:
    assert origin_of(Blocks(), torch.randn(2, 3, 4), attention_masks()) is None


def test_prefix_stands_before_the_path() -> None:
    model = Blocks()
    masks = attention_masks(all_masked_in=2)
    origin = origin_of(model, torch.randn(2, 3, 4), masks, prefix="actor.")
    assert origin is not None
    assert origin.site == "actor.blocks.2.attn/softmax"


def test_keyword_argument_with_nan_is_an_input() -> None:
    x = torch.randn(2, 4)
    x[1, 2] = float("nan")
    origin = origin_of(Applied(torch.tanh), x=x, prefix="net.")
    assert origin is not None
    assert (origin.cause, origin.site) == ("input", "net:input.x")
    assert origin.why == "NaN was in the input already"


def test_nested_argument_is_named_by_its_leaf() -> None:
    class Nested(nn.Module):
        def forward(self, batch: dict[str, list[Tensor]]) -> Tensor:
            return batch["images"][1] * 2

    bad = torch.full((2,), INF)
    origin = origin_of(Nested(), {"images": [torch.ones(2), bad]})
    assert origin is not None
    assert (origin.cause, origin.site) == ("input", ":input.batch.images[1]")


def test_parameter_with_nan_is_named() -> None:
    model = Applied(torch.tanh)
    with torch.no_grad():
        model.fc.weight[0, 0] = float("nan")
    origin = origin_of(model, torch.randn(2, 4))
    assert origin is not None
    assert (origin.cause, origin.site) == ("parameter", "fc.weight")


def test_buffer_with_nan_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[1].running_mean[2] = float("nan")
    origin = origin_of(model, torch.randn(2, 4))
    assert origin is not None
    assert (origin.cause, origin.site) == ("parameter", "1.running_mean")


def test_buffer_of_masks_is_no_origin() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((3, 3), -INF).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.mask).softmax(-1)

    assert origin_of(Masked(), torch.randn(3, 3)) is None


def test_mask_of_zeros_times_inf_names_the_product() -> None:
    """A common mistake: a mask made by multiplying with -inf instead of filling."""

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.triu(torch.ones(3, 3), 1) * -INF
            return (x + mask).softmax(-1)

    origin = origin_of(Product(), torch.randn(3, 3))
    assert origin is not None
    assert (origin.site, origin.why) == ("/mul", "0 * inf")


def test_minus_infinity_that_becomes_nan_names_who_made_it() -> None:
    """`log` gives -inf, and only the product with 0 makes a NaN of it."""
    model = Applied(lambda h: torch.log(h * 0) * 0)
    origin = origin_of(model, torch.randn(2, 4))
    assert origin is not None
    assert origin.site == "/log"


def test_value_that_is_thrown_away_is_not_blamed() -> None:
    def function(h: Tensor) -> Tensor:
        safe = torch.where(h.abs() < 0, torch.log(h - h), h)
        return torch.sqrt(safe * 0 - 1)

    origin = origin_of(Applied(function), torch.randn(2, 4))
    assert origin is not None
    assert origin.site == "/sqrt"


def test_value_that_is_thrown_away_alone_is_no_origin() -> None:
    model = Applied(lambda h: torch.where(h == 0, h / 0, h))
    assert origin_of(model, torch.randn(2, 4)) is None


def test_dropout_draws_the_same_again() -> None:
    """The divisor is what dropout left: the replay must draw what the call drew."""
    model = Drawn()
    outcomes = set()
    for _ in range(12):
        call, output = run_once(model, torch.randn(2, 4))
        torch.rand(3)  # the state moves on before the replay
        origin = find_origin([call], backward=False)
        is_bad = not bool(torch.isfinite(output).all())
        assert (origin is not None) == is_bad
        if origin is not None:
            assert origin.site == "/div"
            assert "of `kept` is 0" in origin.why
        outcomes.add(is_bad)
    assert outcomes == {True, False}


def test_second_execution_of_a_module_is_told() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.root = Applied(torch.sqrt)

        def forward(self, x: Tensor) -> Tensor:
            return self.root(self.root(x) * 0 - 5)

    model = Twice()
    with torch.no_grad():
        model.root.fc.weight.copy_(torch.eye(4))
        model.root.fc.bias.zero_()
    origin = origin_of(model, torch.ones(2, 4))
    assert origin is not None
    assert (origin.site, origin.visit) == ("root/sqrt", 1)


def test_operation_is_numbered_where_there_are_several() -> None:
    model = Applied(lambda h: (h.abs().sqrt() - 9).sqrt())
    x = torch.randn(2, 4)
    origin = origin_of(model, x)
    assert origin is not None
    assert origin.site == "/sqrt[1]"
    with hl.capture(model, origin.site) as captured:
        model(x)
    assert captured[origin.site].isnan().any()


def test_forward_called_by_itself_is_named() -> None:
    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Applied(lambda h: (h * 0 - 1).sqrt())

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.forward(x)

    model = Past()
    x = torch.randn(2, 4)
    origin = origin_of(model, x)
    assert origin is not None
    assert origin.site == "inner/sqrt"


def test_torch_module_is_named_with_the_line_that_calls_it() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.Softmax(dim=-1)

        def forward(self, x: Tensor) -> Tensor:
            return self.softmax(x.masked_fill(x < INF, -INF))  # marked

    model = Head()
    x = torch.randn(2, 3)
    origin = origin_of(model, x)
    assert origin is not None
    assert origin.site == "softmax/softmax"
    assert origin.source.endswith(f":{line_of('-INF))  # ' + 'marked', __file__)}")
    with hl.capture(model, origin.site) as captured:
        model(x)
    assert captured[origin.site].isnan().all()


def test_batch_norm_in_training_is_followed() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), Applied(lambda h: h / 0))
    mean = model[0].running_mean.clone()
    call, _ = run_once(model, torch.randn(8, 4))
    after = model[0].running_mean.clone()
    assert not torch.equal(after, mean)
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert origin.site == "1/div"
    assert torch.equal(model[0].running_mean, after)


def test_multihead_attention_tells_what_is_inside() -> None:
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 3, 4)
    padding = torch.zeros(2, 3, dtype=torch.bool)
    padding[1] = True
    origin = origin_of(model, x, x, x, key_padding_mask=padding, need_weights=True)
    assert origin is not None
    assert origin.operation == "multi_head_attention_forward"
    assert origin.site == "/multi_head_attention_forward"
    assert "softmax of a row that is all -inf" in " ".join([origin.why, *origin.evidence])


def test_attention_of_a_row_without_keys_is_explained() -> None:
    class Fused(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            return scores - scores.mean()

    mask = torch.zeros(3, 3)
    mask[2] = -INF
    x = torch.randn(1, 1, 3, 4)
    origin = origin_of(Fused(), x, mask)
    output = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    if torch.isfinite(output).all():  # torch gives zeros for such a row since 2.5
        assert origin is None
    else:
        assert origin is not None
        assert origin.site == "/scaled_dot_product_attention"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_block_is_followed(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.block = Applied(lambda h: h / (h - h))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.first(x), use_reentrant=reentrant)

    origin = origin_of(Checkpointed(), torch.randn(2, 4))
    assert origin is not None
    assert origin.site == "block/div"


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 300.0), (torch.bfloat16, 2e19)])
def test_autocast_is_as_it_was(dtype: torch.dtype, scale: float) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(scale / 8)
    x = torch.full((2, 64), 8.0)
    with torch.autocast("cpu", dtype=dtype):
        call = keep_call(model, (x,), {})
        output = model(x)
    assert not torch.isfinite(output).all()
    origin = find_origin([call], backward=False)
    assert origin is not None
    name = str(dtype).removeprefix("torch.")
    assert origin.site == "1/linear"
    assert origin.output["dtype"] == name
    assert f"{name} overflow" in origin.why
    assert not torch.is_autocast_enabled("cpu")
    if dtype is torch.float16:
        assert find_origin([keep_call(model, (x,), {})], backward=False) is None


def test_autograd_function_is_named_by_its_class() -> None:
    class Reciprocal(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 1 / (x - x)

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad

    origin = origin_of(Applied(Reciprocal.apply), torch.randn(2, 4), prefix="net.")
    assert origin is not None
    assert (origin.site, origin.operation) == ("net", "Reciprocal")
    assert "division by zero" in origin.why


def test_unfilled_memory_is_blamed_on_empty() -> None:
    class Unfilled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            buffer = torch.empty(4)
            buffer.data.fill_(float("nan"))  # what such memory may hold
            buffer[0] = 1.0
            return x * buffer

    origin = origin_of(Unfilled(), torch.randn(2, 4))
    assert origin is not None
    assert origin.site == "/empty"
    assert origin.why == "memory of torch.empty is used before it is filled"


def test_filled_memory_is_no_origin() -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.empty(4).uniform_() + torch.empty_like(x).copy_(x)

    assert origin_of(Filled(), torch.randn(2, 4)) is None


def test_first_of_several_calls_is_told() -> None:
    model = Attention()
    x = torch.randn(2, 3, 4)
    fine = torch.zeros(2, 3, 3, dtype=torch.bool)
    calls = [keep_call(model, (x,), {"mask": mask}) for mask in (fine, ~fine, fine)]
    origin = find_origin(calls, backward=False)
    assert origin is not None
    assert origin.site == "/softmax"
    assert find_origin(calls[:1], backward=False) is None
    assert find_origin([], backward=False) is None


def test_transformers_model_is_followed_into_its_library() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, attn_implementation="eager"
    )
    model = transformers.GPT2LMHeadModel(config).train()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias.fill_(1e20)
        model.transformer.h[1].mlp.c_proj.weight.fill_(1e20)
    tokens = torch.randint(0, 32, (2, 8))
    call = keep_call(model, (), {"input_ids": tokens, "labels": tokens})
    model(input_ids=tokens, labels=tokens)
    origin = find_origin([call], backward=False)
    assert origin is not None
    assert origin.site == "transformer.h.1.mlp.c_proj/addmm"
    assert "transformers" in origin.source
    with hl.capture(model, origin.site) as captured:
        model(input_ids=tokens, labels=tokens)
    assert not torch.isfinite(captured[origin.site]).all()


def test_origin_can_be_written_and_read() -> None:
    origin = origin_of(Applied(lambda h: h / 0), torch.randn(2, 4))
    assert origin is not None
    facts = origin.to_dict()
    assert facts["evidence"] == []
    assert Origin.from_dict({**facts, "unknown": 1}) == origin
    assert str(origin) == f"/div ({origin.source}): division by zero (the divisor is 0)"


class Averaging(nn.Module):
    """Divides a matrix by its sums before it is multiplied with what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, matrix: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.fc((matrix / matrix.sum(1, keepdim=True)) @ x)
        return out


def test_first_of_two_that_meet_in_one_operation_is_blamed() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Averaging(), Averaging()

        def forward(self, matrix: Tensor, x: Tensor) -> Tensor:
            out: Tensor = self.second(matrix, self.first(matrix, x))
            return out

    matrix = torch.eye(4)
    matrix[2] = 0
    origin = origin_of(Graph(), matrix, torch.randn(4, 4))
    assert origin is not None
    assert origin.site == "first/div"
