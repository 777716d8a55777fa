"""A port of GPT-2 in plain PyTorch against that of transformers: other names, other layouts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import hookline as hl

WIDTH, HEADS, DEPTH, VOCABULARY = 32, 4, 3, 48


class SelfAttention(nn.Module):
    """Attention with three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.query(x), self.key(x), self.value(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.project(x))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -torch.inf)
        return self.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def load(self, theirs: nn.Module) -> None:
        """Take the weights of the other's attention, whose layouts are transposed."""
        weights, biases = theirs.c_attn.weight.chunk(3, 1), theirs.c_attn.bias.chunk(3)
        mine = (self.query, self.key, self.value)
        for layer, weight, bias in zip(mine, weights, biases, strict=True):
            layer.weight.copy_(weight.T)
            layer.bias.copy_(bias)
        self.output.weight.copy_(theirs.c_proj.weight.T)
        self.output.bias.copy_(theirs.c_proj.bias)


class FusedSelfAttention(SelfAttention):
    """Attention with one projection."""

    def __init__(self) -> None:
        super().__init__()
        del self.query, self.key, self.value
        self.in_projection = nn.Linear(WIDTH, 3 * WIDTH)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.in_projection(x).chunk(3, -1)

    def load(self, theirs: nn.Module) -> None:
        self.in_projection.weight.copy_(theirs.c_attn.weight.T)
        self.in_projection.bias.copy_(theirs.c_attn.bias)
        self.output.weight.copy_(theirs.c_proj.weight.T)
        self.output.bias.copy_(theirs.c_proj.bias)


class TransformerBlock(nn.Module):
    """Attention and a perceptron, which is not a module of its own here."""

    def __init__(self, attention: type[SelfAttention]) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), attention()
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.feed_up, self.feed_down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.activation = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_down(self.activation(self.feed_up(self.feed_norm(x))))

    def load(self, theirs: nn.Module) -> None:
        self.attention_norm.load_state_dict(theirs.ln_1.state_dict())
        self.feed_norm.load_state_dict(theirs.ln_2.state_dict())
        self.attention.load(theirs.attn)
        for mine, other in ((self.feed_up, theirs.mlp.c_fc), (self.feed_down, theirs.mlp.c_proj)):
            mine.weight.copy_(other.weight.T)
            mine.bias.copy_(other.bias)


class PortedGPT2(nn.Module):
    """GPT-2 as one writes it from the paper."""

    def __init__(self, attention: type[SelfAttention] = SelfAttention) -> None:
        super().__init__()
        self.token_table = nn.Embedding(VOCABULARY, WIDTH)
        self.place_table = nn.Embedding(24, WIDTH)
        self.stack = nn.ModuleList(TransformerBlock(attention) for _ in range(DEPTH))
        self.last_norm = nn.LayerNorm(WIDTH)
        self.unembed = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.unembed.weight = self.token_table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_table(ids) + self.place_table(torch.arange(ids.shape[1]))
        for block in self.stack:
            x = block(x)
        return self.unembed(self.last_norm(x))

    @torch.no_grad()
    def load(self, theirs: nn.Module) -> PortedGPT2:
        inner = theirs.transformer
        self.token_table.load_state_dict(inner.wte.state_dict())
        self.place_table.load_state_dict(inner.wpe.state_dict())
        self.last_norm.load_state_dict(inner.ln_f.state_dict())
        for mine, other in zip(self.stack, inner.h, strict=True):
            mine.load(other)
        return self


@pytest.fixture(scope="module")
def original():
    """A small GPT-2 of transformers with weights that are not trivial."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=DEPTH, n_head=HEADS, n_embd=WIDTH, vocab_size=VOCABULARY, n_positions=24,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.2, use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def tokens() -> Tensor:
    return torch.randint(1, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(1))


def losses():
    """The loss of each side: transformers gives an object, the port gives the logits."""
    targets = torch.randint(1, VOCABULARY, (33,), generator=torch.Generator().manual_seed(2))

    def of_port(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets)

    return (lambda output: of_port(output.logits)), of_port


def diff_live(original, port) -> hl.Difference:
    return hl.diff(original, port, (tokens(),), loss=losses())


@pytest.mark.parametrize("attention", [SelfAttention, FusedSelfAttention])
def test_port_agrees_forward_and_backward(original, attention):
    found = diff_live(original, PortedGPT2(attention).load(original))
    assert found.same, str(found)


@pytest.mark.parametrize("attention", [SelfAttention, FusedSelfAttention])
def test_port_is_aligned_without_a_map(original, attention):
    """The pairs are the right ones, and nothing of weight stays alone."""
    found = diff_live(original, PortedGPT2(attention).load(original))
    for number in range(DEPTH):
        theirs, mine = f"transformer.h.{number}", f"stack.{number}"
        assert found.names[theirs] == mine
        assert found.names[f"{theirs}.attn"] == f"{mine}.attention"
        assert found.names[f"{theirs}.mlp.c_fc"] == f"{mine}.feed_up"
        assert found.names[f"{theirs}.mlp.c_proj"] == f"{mine}.feed_down"
        assert found.names[f"{theirs}.mlp.act"] == f"{mine}.activation"
        assert found.find(f"{theirs}.attn.c_attn:output").r < 1e-5
    assert found.names["transformer.ln_f"] == "last_norm"
    gradients = [pair for pair in found.pairs if pair.kind == "parameter gradient"]
    weights = {pair.site.split(":")[0] for pair in gradients if pair.r is not None}
    assert {name for name, _ in original.named_parameters()} <= {
        name.removesuffix(".grad") for name in weights
    }


@pytest.mark.parametrize("attention", [SelfAttention, FusedSelfAttention])
def test_planted_activation_is_found(original, attention):
    port = PortedGPT2(attention).load(original)
    port.stack[1].activation.approximate = "none"
    found = diff_live(original, port)
    assert (found.first, found.first_b) == ("transformer.h.1.mlp.act", "stack.1.activation")
    assert found.direction == "forward"


class Unscaled(SelfAttention):
    """Attention that forgot to divide by the root."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.project(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        return self.output(mixed.transpose(1, 2).flatten(2))


def test_planted_scale_is_found(original):
    port = PortedGPT2().load(original)
    port.stack[2].attention.__class__ = Unscaled
    found = diff_live(original, port)
    assert (found.first, found.first_b) == ("transformer.h.2.attn", "stack.2.attention")


def test_planted_residual_is_found(original):
    port = PortedGPT2().load(original)

    class WithoutResidual(TransformerBlock):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.attention_norm(x))
            return self.feed_down(self.activation(self.feed_up(self.feed_norm(x))))

    port.stack[0].__class__ = WithoutResidual
    found = diff_live(original, port)
    assert (found.first, found.first_b) == ("transformer.h.0", "stack.0")


def test_weight_loaded_without_transposing_is_found(original):
    port = PortedGPT2().load(original)
    with torch.no_grad():
        weight = port.stack[1].attention.output.weight
        weight.copy_(weight.T.clone())
    found = diff_live(original, port)
    assert found.first == "transformer.h.1.attn.c_proj"


@pytest.fixture(scope="module")
def recorded(original, tmp_path_factory):
    path = tmp_path_factory.mktemp("port") / "original"
    hl.record(original, path, (tokens(),), loss=losses()[0])
    return path


@pytest.mark.parametrize("attention", [SelfAttention, FusedSelfAttention])
@pytest.mark.parametrize("calibrate", [None, False])
def test_recordings_agree(original, recorded, attention, calibrate, tmp_path):
    port = PortedGPT2(attention).load(original)
    hl.record(port, tmp_path / "port", (tokens(),), loss=losses()[1], calibrate=False)
    found = hl.diff(recorded, tmp_path / "port", calibrate=calibrate)
    assert found.same, str(found)


@pytest.mark.parametrize("calibrate", [None, False])
def test_planted_activation_is_found_in_recordings(original, recorded, calibrate, tmp_path):
    port = PortedGPT2().load(original)
    port.stack[1].activation.approximate = "none"
    hl.record(port, tmp_path / "port", (tokens(),), loss=losses()[1], calibrate=False)
    found = hl.diff(recorded, tmp_path / "port", calibrate=calibrate)
    assert (found.first, found.first_b) == ("transformer.h.1.mlp.act", "stack.1.activation")
