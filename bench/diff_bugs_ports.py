"""Bugs in models of transformers, as a port of them or a changed config brings them."""

from __future__ import annotations

import torch
from diff_cases import bug, override, replace_module
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import ImageClassifierOutput


@bug("hf_llama", "model.rotary_emb")
def llama_base(model):
    """Rotary embeddings with a base of 500000"""
    model.model.rotary_emb.inv_freq = 5e5 ** -(torch.arange(0, 8, 2) / 8)
    return model


@bug("hf_llama", "model.layers.1.input_layernorm")
def llama_epsilon(model):
    """An epsilon of 1e-5 where 1e-6 is right"""
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-5
    return model


@bug("hf_llama", "model.layers.2.self_attn")
def llama_scale(model):
    """Scores that are not scaled"""
    model.model.layers[2].self_attn.scaling = 1.0
    return model


@bug("hf_llama", "model.layers.1.mlp")
def llama_gate(model):
    """The gate and what it lets through exchanged"""
    override(
        model.model.layers[1].mlp,
        forward=lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)),
    )
    return model


@bug("hf_llama", "model.layers.0.self_attn.k_proj")
def llama_head_order(model):
    """Keys of two heads exchanged when they were loaded"""
    projection = model.model.layers[0].self_attn.k_proj
    projection.weight = nn.Parameter(projection.weight.detach().roll(8, 0))
    return model


@bug("hf_gpt2", "transformer.h.2.mlp.act")
def gpt2_activation(model):
    """GELU by erf where tanh is right"""
    return replace_module(model, "transformer.h.2.mlp.act", ACT2FN["gelu"])


@bug("hf_gpt2", "transformer.h.1.attn")
def gpt2_scale_by_layer(model):
    """Scores divided by the number of the layer as well"""
    attn = model.transformer.h[1].attn
    attn.scaling = attn.scaling / 2
    return model


@bug("hf_gpt2", "transformer.h.0.attn.c_attn")
def gpt2_bias_lost(model):
    """The bias of queries, keys and values at zero"""
    nn.init.zeros_(model.transformer.h[0].attn.c_attn.bias)
    return model


@bug("hf_gpt2", "transformer.h.1")
def gpt2_residual(model):
    """The residual taken after the norm"""

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, *args, **kwargs):
        x = self.ln_1(hidden_states)
        x = x + self.attn(x, attention_mask=attention_mask)[0]
        return x + self.mlp(self.ln_2(x))

    override(model.transformer.h[1], forward=forward)
    return model


@bug("hf_mixtral", "model.layers.1.mlp.gate")
def mixtral_one_expert(model):
    """One expert where two are right"""
    model.model.layers[1].mlp.gate.top_k = 1
    return model


@bug("hf_mixtral", "model.layers.2.mlp.experts.act_fn")
def mixtral_activation(model):
    """GELU where SiLU is right"""
    return replace_module(model, "model.layers.2.mlp.experts.act_fn", nn.GELU())


@bug("hf_mixtral", "model.layers.0.mlp.experts")
def mixtral_experts_exchanged(model):
    """Two experts exchanged when they were loaded"""
    experts = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        setattr(experts, name, nn.Parameter(weight.detach()[[1, 0, 2, 3]]))
    return model


@bug("hf_qwen2", "model.layers.0.self_attn.k_proj")
def qwen2_bias_lost(model):
    """Keys without their bias, which the output of attention hardly shows"""
    model.model.layers[0].self_attn.k_proj.bias = None
    return model


@bug("hf_qwen2", "model")
def qwen2_scaled_states(model):
    """What the last norm gives made larger by a hundredth"""
    base = type(model.model).forward

    def forward(self, *args, **kwargs):
        out = base(self, *args, **kwargs)
        out.last_hidden_state = 1.01 * out.last_hidden_state
        return out

    override(model.model, forward=forward)
    return model


@bug("hf_bert", "bert.encoder.layer.1.intermediate.intermediate_act_fn")
def bert_activation(model):
    """GELU by tanh where erf is right"""
    return replace_module(
        model, "bert.encoder.layer.1.intermediate.intermediate_act_fn", ACT2FN["gelu_new"]
    )


@bug("hf_bert", "bert.encoder.layer.1.attention.self")
def bert_mask(model):
    """One layer that ignores the mask"""
    attention = model.bert.encoder.layer[1].attention.self
    base = type(attention).forward

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return base(self, hidden_states, None, **kwargs)

    override(attention, forward=forward)
    return model


@bug("hf_bert", "bert.encoder.layer.2.output.LayerNorm")
def bert_epsilon(model):
    """An epsilon of 1e-5 where 1e-12 is right"""
    model.bert.encoder.layer[2].output.LayerNorm.eps = 1e-5
    return model


@bug("hf_t5", "encoder.block.0.layer.0.SelfAttention")
def t5_distance(model):
    """Distances that count up to 20 where 128 is right"""
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_max_distance = 20
    return model


@bug("hf_t5", "decoder.block.1.layer.1.EncDecAttention")
def t5_scale(model):
    """Scores scaled, as T5 does not"""
    model.decoder.block[1].layer[1].EncDecAttention.scaling = 8**-0.5
    return model


@bug("hf_t5", "encoder.block.1.layer.1")
def t5_residual(model):
    """A perceptron without its residual"""
    layer = model.encoder.block[1].layer[1]
    base = type(layer).forward
    override(layer, forward=lambda self, x: base(self, x) - x)
    return model


@bug("hf_vit", "vit.embeddings")
def vit_places(model):
    """Places off by one"""
    places = model.vit.embeddings.position_embeddings
    model.vit.embeddings.position_embeddings = nn.Parameter(places.detach().roll(1, 1))
    return model


@bug("hf_vit", "")
def vit_pooling(model):
    """The last patch classified, not the token that is there for it"""

    def forward(self, pixel_values, labels):
        logits = self.classifier(self.vit(pixel_values).last_hidden_state[:, -1])
        loss = nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)

    return override(model, forward=forward)


@bug("hf_whisper", "model.encoder.conv2")
def whisper_kernel(model):
    """A kernel loaded the other way around"""
    conv = model.model.encoder.conv2
    conv.weight = nn.Parameter(conv.weight.detach().flip(-1))
    return model


@bug("hf_whisper", "model.decoder.layers.0.encoder_attn")
def whisper_scale(model):
    """Attention to the encoder with another scale"""
    model.model.decoder.layers[0].encoder_attn.scaling = 0.5
    return model


@bug("hf_whisper", "model.decoder.layers.1.activation_fn")
def whisper_activation(model):
    """GELU by tanh where erf is right"""
    return replace_module(model, "model.decoder.layers.1.activation_fn", ACT2FN["gelu_new"])
