"""An EAGLE3 head in plain torch, under its published names, and checkpoints of heads with random values.

The formula is the one of SpecForge (training) and of vLLM's ``llama_eagle3`` (its layer). transformers has no such
class. ``mistake`` plants one of the errors that a test must find.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, log_softmax, rms_norm, scaled_dot_product_attention, silu, softmax
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

MISTAKES = ("halves", "layers", "hidden", "residual", "targets", "tokens", "counted")
DRAFT_VOCAB = 37
_COMMON = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT_VOCAB,
    "intermediate_size": 72,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def fields_of(policy: Any, **changes: Any) -> dict[str, Any]:
    """The config.json of a head for a policy. Without changes its sizes are the ones that it shares with the policy."""
    sizes = {"vocab_size": policy.vocab_size, "hidden_size": policy.hidden_size, "num_attention_heads": 8}
    return {**_COMMON, **sizes, "head_dim": 10, **changes}


def random_head(fields: dict[str, Any], policy: Any, *, own_embedding: bool, seed: int = 3) -> dict[str, Tensor]:
    """The tensors of a head. Its tokens are a random choice of the policy's, in rising order."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, size = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    heads, groups = fields["num_attention_heads"] * size, fields["num_key_value_heads"] * size
    shapes = {
        "fc.weight": (hidden, 3 * policy.hidden_size),
        **{f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")},
        "midlayer.post_attention_layernorm.weight": (hidden,),
        **{f"midlayer.self_attn.{name}_proj.weight": (rows, 2 * hidden) for name, rows in _rows(heads, groups)},
        "midlayer.self_attn.o_proj.weight": (hidden, heads),
        **{f"midlayer.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")},
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (fields["draft_vocab_size"], hidden),
    }
    if fields.get("attention_bias"):
        shapes |= {f"midlayer.self_attn.{name}_proj.bias": (rows,) for name, rows in _rows(heads, groups)}
        shapes["midlayer.self_attn.o_proj.bias"] = (hidden,)
    if fields.get("fc_norm"):
        shapes |= {f"fc_norm.{number}.weight": (policy.hidden_size,) for number in range(3)}
    if own_embedding:
        shapes["embed_tokens.weight"] = (policy.vocab_size, hidden)
    state = {
        name: torch.randn(shape, generator=generator) * 0.2 + ("norm" in name) for name, shape in sorted(shapes.items())
    }
    ids = torch.randperm(policy.vocab_size, generator=generator)[: fields["draft_vocab_size"]].sort().values
    chosen = torch.zeros(policy.vocab_size, dtype=torch.bool)
    chosen[ids] = True
    return {**state, "d2t": ids - torch.arange(len(ids)), "t2d": chosen}


def _rows(heads: int, groups: int) -> list[tuple[str, int]]:
    return [("q", heads), ("k", groups), ("v", groups)]


def write(folder: Path, fields: dict[str, Any], state: dict[str, Tensor]) -> str:
    """Write the folder of a head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(state, folder / "model.safetensors")
    return str(folder)


def losses(
    fields: dict[str, Any],
    state: dict[str, Tensor],
    model: Any,
    ids: Tensor,
    layers: tuple[int, ...],
    mistake: str = "",
) -> tuple[Tensor, Tensor]:
    """The loss of each place, fp32 ``[tokens - 1]``, and the logits ``[tokens, draft_vocab_size]``, of one sequence.

    Args:
        model: transformers' model of the policy.
        ids: ``[tokens]``.
        layers: the layers of the policy whose inputs are read.
    """
    with torch.no_grad():
        policy = model(ids[None], output_hidden_states=True)
    if mistake == "layers":
        layers = tuple(layer + 1 for layer in layers)
    hidden = torch.cat([policy.hidden_states[layer][0] for layer in layers], -1)
    table = state.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())
    following = ids if mistake == "tokens" else torch.cat((ids[1:], ids[:1] * 0))
    logits = _head(fields, state, hidden, embedding(following, table), mistake)
    own = state["t2d"].nonzero()[:, 0]
    targets = policy.logits[0] if mistake == "targets" else policy.logits[0].roll(-1, 0)
    is_counted = state["t2d"][targets.argmax(-1)] | (mistake == "counted")
    each = -(softmax(targets[:, own], -1) * log_softmax(logits, -1)).sum(-1) * is_counted
    return each[:-1], logits


def _head(fields: dict[str, Any], state: dict[str, Tensor], hidden: Tensor, embedded: Tensor, mistake: str) -> Tensor:
    def apply(name: str, value: Tensor) -> Tensor:
        if "norm" in name:
            return rms_norm(value, value.shape[-1:], state[f"{name}.weight"], fields["rms_norm_eps"])
        return linear(value, state[f"{name}.weight"], state.get(f"{name}.bias"))

    if fields.get("fc_norm"):
        hidden = torch.cat([apply(f"fc_norm.{number}", part) for number, part in enumerate(hidden.chunk(3, -1))], -1)
    fused = apply("fc", hidden)
    if mistake == "hidden":
        fused = fused.roll(1, 0)
    normed = apply("midlayer.hidden_norm", fused)
    residual = normed if fields.get("norm_before_residual", False) != (mistake == "residual") else fused
    halves = (apply("midlayer.input_layernorm", embedded), normed)
    joined = torch.cat(halves[::-1] if mistake == "halves" else halves, -1)
    attended = _attention(fields, [apply(f"midlayer.self_attn.{name}_proj", joined) for name in "qkv"])
    between = residual + apply("midlayer.self_attn.o_proj", attended)
    inner = apply("midlayer.post_attention_layernorm", between)
    gate, up = (apply(f"midlayer.mlp.{name}_proj", inner) for name in ("gate", "up"))
    return apply("lm_head", apply("norm", between + apply("midlayer.mlp.down_proj", silu(gate) * up)))


def _attention(fields: dict[str, Any], projected: list[Tensor]) -> Tensor:
    rope = LlamaRotaryEmbedding(LlamaConfig(**{name: value for name, value in fields.items() if name != "model_type"}))
    places = torch.arange(len(projected[0]))[None]
    query, key, value = (part.view(1, len(part), -1, fields["head_dim"]).transpose(1, 2) for part in projected)
    query, key = apply_rotary_pos_emb(query, key, *rope(query, places))
    attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1).flatten(1)


class VllmHead(nn.Module):
    """The parameters of vLLM 0.33's head, and its loader: fused projections, ``layers.0``, ``d2t``, and no ``t2d``."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.sizes = {name.replace("midlayer.", "layers.0."): tensor.shape for name, tensor in state.items()}
        self.places: dict[str, tuple[str, int]] = {}
        shapes: dict[str, list[int]] = {}
        for name, shape in self.sizes.items():
            if name == "t2d":
                continue
            fused = name
            for new, old in (("qkv", "[qkv]"), ("gate_up", "(gate|up)")):
                fused = re.sub(rf"\b{old}_proj", f"{new}_proj", fused)
            own = fused.replace(".", "/").replace("d2t", "draft_id_to_target_id")
            rows = shapes.get(own, [0, *shape[1:]])
            self.places[name], shapes[own] = (own, rows[0]), [rows[0] + shape[0], *shape[1:]]
        for own, shape in shapes.items():
            dtype = torch.int64 if own.startswith("draft_id") else torch.float32
            setattr(self, own, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Take tensors under either name of the layer."""
        for name, tensor in pairs:
            name = name.replace("midlayer.", "layers.0.")
            if name != "t2d":
                own, first = self.places[name]
                getattr(self, own).data[first : first + len(tensor)].copy_(tensor)
