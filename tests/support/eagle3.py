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
from torch.nn.functional import embedding, linear, log_softmax, rms_norm, silu, softmax
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

MISTAKES = ("halves", "layers", "hidden", "residual", "targets", "tokens", "counted")
STEP_MISTAKES = ("again", "positions", "keys", "normed", "still", "weights")
"""Of later steps."""
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
    steps: int = 1,
) -> tuple[Tensor, Tensor]:
    """The loss of each place, fp32 ``[tokens - 1]``, and the logits ``[tokens, draft_vocab_size]``, of one sequence.

    Args:
        model: transformers' model of the policy.
        ids: ``[tokens]``.
        layers: the layers of the policy whose inputs are read.
        steps: how many steps are unrolled, as in SpecForge. The logits are from the last one.
    """
    with torch.no_grad():
        policy = model(ids[None], output_hidden_states=True)
    if mistake == "layers":
        layers = tuple(layer + 1 for layer in layers)
    hidden = torch.cat([policy.hidden_states[layer][0] for layer in layers], -1)
    table = state.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())
    own, size = state["t2d"].nonzero()[:, 0], len(ids)
    following = torch.cat((ids if mistake == "tokens" else ids[1:], ids.new_zeros(steps + 1)))
    targets = policy.logits[0] if mistake == "targets" else policy.logits[0].roll(-1, 0)
    is_counted = state["t2d"][targets.argmax(-1)] | (mistake == "counted")
    each = torch.zeros(size)
    cache: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        shift = 0 if mistake == "still" else step
        embedded = embedding(following[shift : shift + size], table)
        logits, made = _head(fields, state, hidden, embedded, cache, mistake)
        hidden = hidden if mistake == "again" else made
        wanted = log_softmax(logits, -1)[: size - 1 - step]
        drafted = softmax(targets[step : size - 1, own], -1)
        loss = -(drafted * wanted).sum(-1) * is_counted[step : size - 1]
        each = each + torch.cat((loss, loss.new_zeros(step + 1))) * (1.0 if mistake == "weights" else 0.8**step)
    return each[:-1], logits


def _head(
    fields: dict[str, Any],
    state: dict[str, Tensor],
    hidden: Tensor,
    embedded: Tensor,
    cache: list[tuple[Tensor, Tensor]],
    mistake: str,
) -> tuple[Tensor, Tensor]:
    """Logits, and what the next step reads. Keys and values of the steps so far are in ``cache``."""

    def apply(name: str, value: Tensor) -> Tensor:
        if "norm" in name:
            return rms_norm(value, value.shape[-1:], state[f"{name}.weight"], fields["rms_norm_eps"])
        return linear(value, state[f"{name}.weight"], state.get(f"{name}.bias"))

    is_first = hidden.size(-1) == state["fc.weight"].size(1)
    if is_first and fields.get("fc_norm"):
        hidden = torch.cat([apply(f"fc_norm.{number}", part) for number, part in enumerate(hidden.chunk(3, -1))], -1)
    fused = apply("fc", hidden) if is_first else hidden
    if mistake == "hidden":
        fused = fused.roll(1, 0)
    normed = apply("midlayer.hidden_norm", fused)
    residual = normed if fields.get("norm_before_residual", False) != (mistake == "residual") else fused
    halves = (apply("midlayer.input_layernorm", embedded), normed)
    joined = torch.cat(halves[::-1] if mistake == "halves" else halves, -1)
    attended = _attention(fields, [apply(f"midlayer.self_attn.{name}_proj", joined) for name in "qkv"], cache, mistake)
    between = residual + apply("midlayer.self_attn.o_proj", attended)
    inner = apply("midlayer.post_attention_layernorm", between)
    gate, up = (apply(f"midlayer.mlp.{name}_proj", inner) for name in ("gate", "up"))
    made = between + apply("midlayer.mlp.down_proj", silu(gate) * up)
    normed = apply("norm", made)
    return apply("lm_head", normed), normed if mistake == "normed" else made


def _attention(
    fields: dict[str, Any], projected: list[Tensor], cache: list[tuple[Tensor, Tensor]], mistake: str
) -> Tensor:
    """Scores with the keys of the first step up to a place, and with the keys of further steps at the place itself."""
    rope = LlamaRotaryEmbedding(LlamaConfig(**{name: value for name, value in fields.items() if name != "model_type"}))
    size, dim = len(projected[0]), fields["head_dim"]
    places = torch.arange(size)[None] + (0 if mistake == "positions" else len(cache))
    query, key, value = (part.view(1, size, -1, dim).transpose(1, 2) for part in projected)
    query, key = (part[0] for part in apply_rotary_pos_emb(query, key, *rope(query, places)))
    repeats = query.size(0) // key.size(0)
    cache.append((key.repeat_interleave(repeats, 0), value[0].repeat_interleave(repeats, 0)))
    (key, value), *later = cache
    if mistake == "keys":
        later = later[-1:]
    causal = torch.full((size, size), -torch.inf).triu(1)
    scores = [query @ key.transpose(1, 2) + causal, *((query * each).sum(-1, keepdim=True) for each, _ in later)]
    weights = softmax(torch.cat(scores, -1) / dim**0.5, -1)
    attended = weights[..., :size] @ value
    for number, (_, each) in enumerate(later):
        attended = attended + weights[..., size + number, None] * each
    return attended.transpose(0, 1).flatten(1)


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
