"""Small copies of real architectures with random weights, and what to call them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


class Example(NamedTuple):
    """A model in training mode, and the arguments of one call; `loss_of` makes the loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_of: Callable[[Any], Tensor]


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 40, shape, generator=torch.Generator().manual_seed(5))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(6))


def labelled(model: Any, **kwargs: Any) -> Example:
    return Example(model.train(), (), kwargs, lambda output: output.loss)


def make_gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def make_llama() -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=16,
        intermediate_size=24, vocab_size=40, max_position_embeddings=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def make_t5() -> Any:
    config = transformers.T5Config(
        num_layers=2, num_heads=2, d_model=16, d_kv=8, d_ff=24, vocab_size=40, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def make_bert() -> Any:
    config = transformers.BertConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=24,
        vocab_size=40, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def make_vit() -> Any:
    config = transformers.ViTConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=24,
        image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def causal(model: Any) -> Example:
    ids = tokens(2, 7)
    return labelled(model, input_ids=ids, labels=ids, use_cache=False)


class Tagger(nn.Module):
    """Recurrent layers over sequences of different lengths."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.rnn = kind(4, 6, num_layers=2, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, packed: PackedSequence) -> Tensor:
        output, _ = self.rnn(packed)
        padded, _ = pad_packed_sequence(output)
        return self.head(padded)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mixed, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return self.norm(x + mixed)


def make_encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def squares(output: Any) -> Tensor:
    return output.square().sum()


def make_packed() -> PackedSequence:
    packed = pack_padded_sequence(numbers(5, 3, 4), torch.tensor([5, 3, 2]))
    return packed._replace(data=packed.data.requires_grad_())


EXAMPLES: dict[str, Callable[[], Example]] = {
    "gpt2": lambda: causal(make_gpt2()),
    "llama": lambda: causal(make_llama()),
    "bert": lambda: labelled(make_bert(), input_ids=tokens(2, 7), labels=tokens(2, 7)),
    "t5": lambda: labelled(make_t5(), input_ids=tokens(2, 7), labels=tokens(2, 5), use_cache=False),
    "vit": lambda: labelled(
        make_vit(), pixel_values=numbers(2, 3, 8, 8), labels=torch.tensor([0, 2])
    ),
    "transformer": lambda: Example(
        nn.Transformer(8, 2, 2, 2, dim_feedforward=16, batch_first=True),
        (numbers(2, 5, 8), numbers(2, 4, 8)),
        {},
        squares,
    ),
    "encoder": lambda: Example(make_encoder(), (numbers(2, 5, 8),), {}, squares),
    "lstm": lambda: Example(
        nn.LSTM(4, 6, 2, dropout=0.2),
        (numbers(5, 3, 4),),
        {},
        lambda out: squares(out[0]) + squares(out[1][1]),
    ),
    "packed lstm": lambda: Example(Tagger(nn.LSTM), (make_packed(),), {}, squares),
    "packed gru": lambda: Example(Tagger(nn.GRU), (make_packed(),), {}, squares),
    "attention": lambda: Example(Attention(), (numbers(2, 5, 8).requires_grad_(),), {}, squares),
}
