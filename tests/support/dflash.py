"""A DFlash head in plain torch, under its published names, as SpecForge trains it, and heads with random values.

``mistake`` plants one of the errors that a test must find.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, log_softmax, rms_norm, silu, softmax
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

MISTAKES = ("layers", "anchor", "causal", "context", "norm", "positions", "weights", "mask")


def fields_of(policy: Any, **changes: Any) -> dict[str, Any]:
    """The config.json of a head for a policy."""
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 4,
        "dflash_config": {"mask_token_id": policy.vocab_size - 1, "target_layer_ids": [0, 2, 5]},
        "head_dim": 10,
        "hidden_act": "silu",
        "hidden_size": policy.hidden_size,
        "intermediate_size": 72,
        "layer_types": ["full_attention"] * 2,
        "max_position_embeddings": 64,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": policy.num_hidden_layers,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": policy.vocab_size,
        **changes,
    }


def random_head(fields: dict[str, Any], seed: int = 3) -> dict[str, Tensor]:
    """The tensors of a head."""
    width, inner, dim = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    heads, groups = (fields[name] * dim for name in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        **{f"{name}_layernorm": (width,) for name in ("input", "post_attention")},
        **{f"self_attn.{name}_norm": (dim,) for name in "qk"},
        **{f"self_attn.{name}_proj": (rows, width) for name, rows in zip("qkv", (heads, groups, groups), strict=True)},
        "self_attn.o_proj": (width, heads),
        **{f"mlp.{name}_proj": (inner, width) for name in ("gate", "up")},
        "mlp.down_proj": (width, inner),
    }
    shapes = {"fc": (width, len(fields["dflash_config"]["target_layer_ids"]) * width)}
    shapes |= {"hidden_norm": (width,), "norm": (width,)}
    for number in range(fields["num_hidden_layers"]):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)
        for name, shape in sorted(shapes.items())
    }


def losses(fields: dict[str, Any], state: dict[str, Tensor], model: Any, ids: Tensor, mistake: str = "") -> Tensor:
    """fp32 ``[tokens - 1]``: at each token the loss of the block that begins there, one block after the other.

    Args:
        model: transformers' model of the policy.
        ids: ``[tokens]``.
    """
    with torch.no_grad():
        policy = model(ids[None], output_hidden_states=True)
    shift = 0 if mistake == "layers" else 1
    layers = fields["dflash_config"]["target_layer_ids"]
    read = torch.cat([policy.hidden_states[layer + shift][0] for layer in layers], -1)
    found = []
    for anchor in range(len(ids) - 1):
        block = torch.full((fields["block_size"],), fields["dflash_config"]["mask_token_id"])
        if mistake == "mask":
            block[:] = ids[anchor]
        block[0] = ids[anchor]
        known = read[: anchor + (mistake == "anchor")]
        logits = _logits(fields, state, model, known, block, anchor, mistake)
        wanted = ids[anchor + 1 : anchor + len(block)]
        each = -log_softmax(logits[1 : len(wanted) + 1], -1).gather(-1, wanted[:, None])[:, 0]
        fading = 1.0 if mistake == "weights" else 7.0
        found.append((each * torch.exp(-torch.arange(len(wanted)) / fading)).sum())
    return torch.stack(found)


def _logits(
    fields: dict[str, Any],
    state: dict[str, Tensor],
    model: Any,
    read: Tensor,
    block: Tensor,
    anchor: int,
    mistake: str,
) -> Tensor:
    def apply(name: str, value: Tensor) -> Tensor:
        weight = state[f"{name}.weight"]
        return (
            rms_norm(value, value.shape[-1:], weight, fields["rms_norm_eps"])
            if "norm" in name
            else linear(value, weight)
        )

    dim, size = fields["head_dim"], len(block)
    rope = LlamaRotaryEmbedding(LlamaConfig(**{name: value for name, value in fields.items() if name != "model_type"}))
    first = 0 if mistake == "positions" else anchor
    places = torch.cat((torch.arange(len(read)), torch.arange(size) + first))
    context = apply("fc", read) if mistake == "norm" else apply("hidden_norm", apply("fc", read))
    states = embedding(block, model.get_input_embeddings().weight.detach())
    for number in range(fields["num_hidden_layers"]):
        name = f"layers.{number}"
        inner = apply(f"{name}.input_layernorm", states)
        seen = apply(f"{name}.input_layernorm", context) if mistake == "context" else context
        both = torch.cat((seen, inner))
        query, key, value = (
            apply(f"{name}.self_attn.{each}_proj", given).view(len(given), -1, dim).transpose(0, 1)
            for each, given in zip("qkv", (inner, both, both), strict=True)
        )
        query, key = (apply(f"{name}.self_attn.{each}_norm", given) for each, given in (("q", query), ("k", key)))
        repeats = query.size(0) // key.size(0)
        cos, sin = rope(query, places[None])
        query, _ = apply_rotary_pos_emb(query, query, cos[:, -size:], sin[:, -size:])
        _, key = apply_rotary_pos_emb(key, key, cos, sin)
        key, value = key[0].repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
        scores = query[0] @ key.transpose(1, 2) / dim**0.5
        if mistake == "causal":
            scores = scores + torch.full((size, len(places)), -torch.inf).triu(len(read) + 1)
        attended = (softmax(scores, -1) @ value).transpose(0, 1).flatten(1)
        states = states + apply(f"{name}.self_attn.o_proj", attended)
        inner = apply(f"{name}.post_attention_layernorm", states)
        gate, up = (apply(f"{name}.mlp.{each}_proj", inner) for each in ("gate", "up"))
        states = states + apply(f"{name}.mlp.down_proj", silu(gate) * up)
    return linear(apply("norm", states), model.get_output_embeddings().weight.detach())
