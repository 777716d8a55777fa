"""Many architectures of `transformers`, each as small as its config allows, weights random."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tiny_models import Example, causal, labelled, numbers, tokens

_DECODER: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GROUPED: dict[str, Any] = {**_DECODER, "num_key_value_heads": 1}
_VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}


def make_llama(kind: str = "eager") -> Any:
    config = transformers.LlamaConfig(**_GROUPED, attn_implementation=kind)
    return transformers.LlamaForCausalLM(config)


def make_mistral(kind: str = "eager") -> Any:
    config = transformers.MistralConfig(**_GROUPED, sliding_window=4, attn_implementation=kind)
    return transformers.MistralForCausalLM(config)


def make_qwen2(kind: str = "eager") -> Any:
    config = transformers.Qwen2Config(**_GROUPED, attn_implementation=kind)
    return transformers.Qwen2ForCausalLM(config)


def make_gemma(kind: str = "eager") -> Any:
    config = transformers.GemmaConfig(**_GROUPED, head_dim=8, attn_implementation=kind)
    return transformers.GemmaForCausalLM(config)


def make_phi(kind: str = "eager") -> Any:
    config = transformers.PhiConfig(**_DECODER, attn_implementation=kind)
    return transformers.PhiForCausalLM(config)


def make_mixtral(kind: str = "eager", experts: str = "eager") -> Any:
    config = transformers.MixtralConfig(
        **_GROUPED, num_local_experts=3, num_experts_per_tok=2, attn_implementation=kind,
        experts_implementation=experts,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def make_falcon(kind: str = "eager") -> Any:
    config = transformers.FalconConfig(**_DECODER, attn_implementation=kind)
    return transformers.FalconForCausalLM(config)


def make_opt(kind: str = "eager") -> Any:
    config = transformers.OPTConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, ffn_dim=24, vocab_size=40,
        word_embed_proj_dim=16, max_position_embeddings=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, attn_implementation=kind,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def make_gpt2(kind: str = "eager") -> Any:
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, attn_implementation=kind,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def make_mamba() -> Any:
    config = transformers.MambaConfig(
        num_hidden_layers=2, hidden_size=16, state_size=4, vocab_size=40, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.MambaForCausalLM(config)


def make_bert(kind: str = "eager") -> Any:
    config = transformers.BertConfig(**_DECODER, attn_implementation=kind)
    return transformers.BertForMaskedLM(config)


def make_roberta(kind: str = "eager") -> Any:
    config = transformers.RobertaConfig(**_DECODER, attn_implementation=kind)
    return transformers.RobertaForMaskedLM(config)


def make_distilbert(kind: str = "eager") -> Any:
    config = transformers.DistilBertConfig(
        n_layers=2, n_heads=2, dim=16, hidden_dim=24, vocab_size=40, max_position_embeddings=32,
        attn_implementation=kind,
    )  # fmt: skip
    return transformers.DistilBertForMaskedLM(config)


def make_deberta() -> Any:
    config = transformers.DebertaV2Config(
        **_DECODER, relative_attention=True, pos_att_type=["p2c", "c2p"], conv_kernel_size=3,
        conv_act="gelu", type_vocab_size=0,
    )  # fmt: skip
    with warnings.catch_warnings():
        # Its file, imported here, has functions of torch.jit.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return transformers.DebertaV2ForMaskedLM(config)


def make_t5() -> Any:
    config = transformers.T5Config(
        num_layers=2, num_heads=2, d_model=16, d_kv=8, d_ff=24, vocab_size=40, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def make_bart(kind: str = "eager") -> Any:
    config = transformers.BartConfig(
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, d_model=16, vocab_size=40, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, max_position_embeddings=32,
        attn_implementation=kind,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def make_whisper(kind: str = "eager") -> Any:
    config = transformers.WhisperConfig(
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, d_model=16, num_mel_bins=4, vocab_size=40,
        max_source_positions=6, max_target_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None, attn_implementation=kind,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def make_vit(kind: str = "eager") -> Any:
    config = transformers.ViTConfig(
        **_VISION, num_labels=3, hidden_dropout_prob=0.1, attn_implementation=kind
    )
    return transformers.ViTForImageClassification(config)


def make_clip(kind: str = "eager") -> Any:
    text = {**_DECODER, "projection_dim": 8, "eos_token_id": 2}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**_VISION, "projection_dim": 8}, projection_dim=8,
        attn_implementation=kind,
    )  # fmt: skip
    return transformers.CLIPModel(config)


def make_convnext() -> Any:
    config = transformers.ConvNextConfig(
        num_channels=3, patch_size=2, num_stages=2, hidden_sizes=[8, 12], depths=[1, 1],
        num_labels=3,
    )  # fmt: skip
    return transformers.ConvNextForImageClassification(config)


def make_wav2vec2(kind: str = "eager") -> Any:
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        conv_dim=(8, 8), conv_kernel=(4, 3), conv_stride=(3, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, vocab_size=12,
        mask_time_prob=0.0, pad_token_id=0, attn_implementation=kind,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def masked(model: Any) -> Example:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    return labelled(model, input_ids=tokens(2, 7), attention_mask=mask, labels=tokens(2, 7))


def translating(model: Any) -> Example:
    return labelled(model, input_ids=tokens(2, 7), labels=tokens(2, 5), use_cache=False)


def seeing(model: Any) -> Example:
    return labelled(model, pixel_values=numbers(2, 3, 8, 8), labels=torch.tensor([0, 2]))


def listening(model: Any) -> Example:
    features = numbers(2, 4, 12)
    return labelled(model, input_features=features, labels=tokens(2, 5), use_cache=False)


def pairing(model: Any) -> Example:
    pixels = numbers(2, 3, 8, 8)
    return labelled(model, input_ids=tokens(2, 7), pixel_values=pixels, return_loss=True)


def transcribing(model: Any) -> Example:
    return labelled(model, input_values=numbers(2, 60), labels=tokens(2, 3) % 11 + 1)


TRANSFORMERS: dict[str, Callable[[], Example]] = {
    "llama eager": lambda: causal(make_llama("eager")),
    "llama sdpa": lambda: causal(make_llama("sdpa")),
    "mistral": lambda: causal(make_mistral()),
    "qwen2": lambda: causal(make_qwen2("sdpa")),
    "gemma": lambda: causal(make_gemma()),
    "phi": lambda: causal(make_phi()),
    "mixtral": lambda: causal(make_mixtral()),
    "falcon": lambda: causal(make_falcon()),
    "opt": lambda: causal(make_opt()),
    "gpt2": lambda: causal(make_gpt2()),
    "mamba": lambda: causal(make_mamba()),
    "bert": lambda: masked(make_bert()),
    "roberta": lambda: masked(make_roberta("sdpa")),
    "distilbert": lambda: masked(make_distilbert()),
    "deberta": lambda: masked(make_deberta()),
    "t5": lambda: translating(make_t5()),
    "bart": lambda: translating(make_bart()),
    "whisper": lambda: listening(make_whisper()),
    "vit": lambda: seeing(make_vit()),
    "clip": lambda: pairing(make_clip()),
    "convnext": lambda: seeing(make_convnext()),
    "wav2vec2": lambda: transcribing(make_wav2vec2()),
}
