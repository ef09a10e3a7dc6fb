"""DFlash and DSpark heads in plain torch, under published names, as SpecForge trains them, with random values.

``mistake`` plants one of the errors that a test must find.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, log_softmax, logsigmoid, rms_norm, silu, softmax
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

MISTAKES = ("layers", "anchor", "causal", "context", "norm", "positions", "weights", "mask")
OF_DSPARK = ("first", "markov", "before", "fading", "parts", "policy", "halved", "confidence", "reads", "attached")
COPIES = ("embed_tokens.weight", "lm_head.weight")
"""Tensors of the policy that DeepSpec writes into the folder of a DSpark head."""


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


def dspark_fields(policy: Any, **changes: Any) -> dict[str, Any]:
    """The config.json of a DSpark head, as DeepSpec writes it."""
    fields = fields_of(policy, **fields_of(policy)["dflash_config"], architectures=["Qwen3DSparkModel"])
    del fields["dflash_config"], fields["auto_map"]
    heads = {"markov_rank": 6, "markov_head_type": "vanilla", "num_anchors": 512}
    confidence = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return {**fields, **heads, **confidence, **changes}


def of_specforge(fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of this DSpark head, as SpecForge writes it: many fields are in another one."""
    names = {*fields} - {*fields_of(SimpleNamespace(**fields)), "num_anchors"}
    outside = {name: value for name, value in fields.items() if name not in names}
    return {**outside, "dflash_config": {name: fields[name] for name in sorted(names)}}


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
    shapes = {"fc": (width, len(_inner(fields)["target_layer_ids"]) * width)}
    shapes |= {"hidden_norm": (width,), "norm": (width,)}
    if rank := fields.get("markov_rank", 0):
        shapes |= {f"markov_head.markov_w{number}": (fields["vocab_size"], rank) for number in (1, 2)}
    if fields.get("enable_confidence_head"):
        inputs = width + rank * fields["confidence_head_with_markov"]
        shapes |= {"confidence_head.proj": (1, inputs), "confidence_head.proj.bias": (1,)}
    for number in range(fields["num_hidden_layers"]):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(seed)
    return {
        name if name.endswith("bias") else f"{name}.weight": torch.randn(shape, generator=generator) * 0.2
        + ("norm" in name)
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
    layers = _inner(fields)["target_layer_ids"]
    read = torch.cat([policy.hidden_states[layer + shift][0] for layer in layers], -1)
    is_dspark, found = "markov_rank" in fields, []
    first = 0 if is_dspark and mistake != "first" else 1
    fading = 1.0 if mistake == "weights" else 4.0 if is_dspark and mistake != "fading" else 7.0
    for anchor in range(len(ids) - 1):
        block = torch.full((fields["block_size"],), _inner(fields)["mask_token_id"])
        if mistake == "mask":
            block[:] = ids[anchor]
        block[0] = ids[anchor]
        known = read[: anchor + (mistake == "anchor")]
        states = _states(fields, state, model, known, block, anchor, mistake)
        wanted = ids[anchor + 1 :][: len(block) - first]
        states = states[first : first + len(wanted)]
        logits = linear(states, model.get_output_embeddings().weight.detach())
        if is_dspark:
            before = ids[anchor + (mistake == "before") :][: len(wanted)]
            behind = policy.logits[0, anchor + (mistake == "policy") :][: len(wanted)]
            each = _of_dspark(state, states, logits, before, wanted, behind, mistake)
        else:
            each = -log_softmax(logits, -1).gather(-1, wanted[:, None])[:, 0]
        found.append((each * torch.exp(-torch.arange(len(wanted)) / fading)).sum())
    return torch.stack(found)


def _inner(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, **fields.get("dflash_config", {})}


def _of_dspark(
    state: dict[str, Tensor],
    states: Tensor,
    logits: Tensor,
    before: Tensor,
    wanted: Tensor,
    behind: Tensor,
    mistake: str,
) -> Tensor:
    """fp32 ``[tokens]``, without weights. ``behind`` has the logits of the policy."""
    table = state["markov_head.markov_w1.weight"][before]
    if mistake != "markov":
        logits = logits + linear(table, state["markov_head.markov_w2.weight"])
    unlikely = -log_softmax(logits, -1).gather(-1, wanted[:, None])[:, 0]
    distance = (softmax(logits, -1) - softmax(behind, -1)).abs().sum(-1)
    if mistake == "halved":
        distance = distance / 2
    share = 0.5 if mistake == "parts" else 0.1
    both = share * unlikely + (1 - share) * distance
    if "confidence_head.proj.weight" not in state or mistake == "confidence":
        return both
    weight, bias = (state[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
    if weight.size(1) > states.size(1):
        states = torch.cat((states, table.roll(1, 0) if mistake == "reads" else table), -1)
    predicted = linear(states, weight, bias)[:, 0]
    accepted = 1 - (distance if mistake == "attached" else distance.detach()) / 2
    return both - accepted * logsigmoid(predicted) - (1 - accepted) * logsigmoid(-predicted)


def _states(
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
    return apply("norm", states)
