"""The models of the bench of comparisons as they should be, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from diff_cases import Side, example
from diff_models import GPT, VOCABULARY, Encoder, MixtureModel
from diff_networks import CellTagger, Mixer, ResNet, Tagger, Translator, UNet
from torch import Tensor, nn


def shake(model: nn.Module) -> nn.Module:
    """Move what begins at zero or one, so that leaving it out makes a difference."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or "cls_token" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def tokens(*shape: int, most: int = VOCABULARY) -> Tensor:
    """Draw tokens, none of which is 0."""
    return torch.randint(1, most, shape)


def cross_entropy_to(targets: Tensor) -> Callable[[Tensor], Tensor]:
    """Make a loss of logits whose classes come last."""

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    return loss


def read_loss(output: Any) -> Tensor:
    """Give the loss that the model made itself."""
    return output.loss


def _gpt(**options: Any) -> Side:
    model = shake(GPT(**options))
    return Side(model, (tokens(4, 12),), cross_entropy_to(tokens(4, 12)))


@example
def gpt() -> Side:
    """A GPT of four blocks, norms first."""
    return _gpt()


@example
def gpt_in_eval() -> Side:
    """The same with dropout, in eval."""
    side = _gpt(drop=0.1)
    side.model.eval()
    return side


@example
def gpt_with_dropout() -> Side:
    """The same with dropout, in training."""
    return _gpt(drop=0.1)


@example
def gpt_with_adamw() -> Side:
    """The same with an update."""
    side = _gpt(depth=2)
    return Side(side.model, side.inputs, side.loss, partial(torch.optim.AdamW, lr=1e-2))


@example
def gpt_with_sgd() -> Side:
    """The same with an update by SGD."""
    side = _gpt(depth=2)
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return Side(side.model, side.inputs, side.loss, make)


@example
def deep_gpt() -> Side:
    """The same with 24 blocks."""
    return _gpt(depth=24)


@example
def encoder() -> Side:
    """An encoder as BERT, norms last, dropout, some places empty."""
    ids = tokens(4, 10)
    ids[1, 7:] = 0
    ids[3, 4:] = 0
    segments = torch.randint(0, 2, (4, 10))
    return Side(shake(Encoder()), (ids, segments), cross_entropy_to(torch.tensor([0, 3, 1, 4])))


@example
def resnet() -> Side:
    """Convolutions with batch norms, in training."""
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 3, 1, 4])
    return Side(shake(ResNet()), (images,), cross_entropy_to(labels))


@example
def resnet_in_eval() -> Side:
    """The same in eval, with statistics of its own."""
    side = resnet()
    for module in side.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    side.model.eval()
    return side


@example
def cells() -> Side:
    """An LSTM cell that is called for each token."""
    return Side(shake(CellTagger()), (tokens(4, 7),), cross_entropy_to(tokens(4, 7, most=6)))


@example
def lstm() -> Side:
    """Torch's LSTM in both directions."""
    return Side(shake(Tagger(nn.LSTM)), (tokens(4, 9),), cross_entropy_to(tokens(4, 9, most=6)))


@example
def gru() -> Side:
    """Torch's GRU in both directions."""
    return Side(shake(Tagger(nn.GRU)), (tokens(4, 9),), cross_entropy_to(tokens(4, 9, most=6)))


@example
def mixer() -> Side:
    """A mixer of patches and channels."""
    images, labels = torch.randn(4, 3, 12, 12), torch.tensor([0, 3, 1, 4])
    return Side(shake(Mixer()), (images,), cross_entropy_to(labels))


@example
def unet() -> Side:
    """A UNet that is told a time."""
    noise = torch.randn(2, 3, 16, 16)
    inputs = (torch.randn(2, 3, 16, 16), torch.tensor([3.0, 40.0]))
    return Side(shake(UNet()), inputs, lambda out: F.mse_loss(out, noise))


@example
def mixture() -> Side:
    """Experts, turned attention, RMS norms."""
    return Side(shake(MixtureModel()), (tokens(4, 10),), cross_entropy_to(tokens(4, 10)))


@example
def translator() -> Side:
    """An encoder with a decoder."""
    inputs = (tokens(3, 9), tokens(3, 7))
    return Side(shake(Translator()), inputs, cross_entropy_to(tokens(3, 7)))


_DECODER: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
_GROUPED: dict[str, Any] = {**_DECODER, "num_key_value_heads": 2}


def _causal(model: nn.Module) -> Side:
    ids = tokens(3, 9)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return Side(shake(model), inputs, read_loss)


@example
def hf_llama() -> Side:
    """Llama of transformers."""
    config = transformers.LlamaConfig(**_GROUPED, attn_implementation="eager")
    return _causal(transformers.LlamaForCausalLM(config))


@example
def hf_gpt2() -> Side:
    """GPT-2 of transformers."""
    config = transformers.GPT2Config(
        n_layer=3, n_head=4, n_embd=32, vocab_size=VOCABULARY, n_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, initializer_range=0.2, attn_implementation="eager",
    )  # fmt: skip
    return _causal(transformers.GPT2LMHeadModel(config).eval())


@example
def hf_mixtral() -> Side:
    """Mixtral of transformers."""
    config = transformers.MixtralConfig(
        **_GROUPED, num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager",
        experts_implementation="eager",
    )  # fmt: skip
    return _causal(transformers.MixtralForCausalLM(config))


@example
def hf_qwen2() -> Side:
    """Qwen2 of transformers."""
    config = transformers.Qwen2Config(**_GROUPED, attn_implementation="sdpa")
    return _causal(transformers.Qwen2ForCausalLM(config))


@example
def hf_bert() -> Side:
    """BERT of transformers, with masks."""
    config = transformers.BertConfig(**_DECODER, attn_implementation="eager")
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 6:] = 0
    inputs = {"input_ids": tokens(3, 9), "attention_mask": mask, "labels": tokens(3, 9)}
    return Side(shake(transformers.BertForMaskedLM(config).eval()), inputs, read_loss)


@example
def hf_t5() -> Side:
    """T5 of transformers."""
    config = transformers.T5Config(
        num_layers=2, num_heads=4, d_model=32, d_kv=8, d_ff=48, vocab_size=VOCABULARY,
        pad_token_id=0, decoder_start_token_id=0, eos_token_id=None, dropout_rate=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    inputs = {"input_ids": tokens(3, 14), "labels": tokens(3, 6), "use_cache": False}
    return Side(shake(transformers.T5ForConditionalGeneration(config)), inputs, read_loss)


@example
def hf_vit() -> Side:
    """ViT of transformers."""
    config = transformers.ViTConfig(
        num_hidden_layers=3, num_attention_heads=4, hidden_size=32, intermediate_size=48,
        image_size=12, patch_size=4, num_labels=5, initializer_range=0.2,
        attn_implementation="eager",
    )  # fmt: skip
    inputs = {"pixel_values": torch.randn(3, 3, 12, 12), "labels": torch.tensor([0, 2, 4])}
    return Side(shake(transformers.ViTForImageClassification(config)), inputs, read_loss)


@example
def hf_whisper() -> Side:
    """Whisper of transformers."""
    config = transformers.WhisperConfig(
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, d_model=32, num_mel_bins=4,
        vocab_size=VOCABULARY, max_source_positions=6, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None, init_std=0.2, dropout=0.0, attn_implementation="eager",
    )  # fmt: skip
    inputs = {
        "input_features": torch.randn(3, 4, 12),
        "labels": tokens(3, 6),
        "use_cache": False,
    }
    model = transformers.WhisperForConditionalGeneration(config)
    return Side(shake(model), inputs, read_loss)
