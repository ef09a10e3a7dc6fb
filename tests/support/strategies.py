"""Hypothesis strategies: tiny dense HF configs, and meshes that megatron-core can build for them."""

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from mcore_bridge import ParallelDims
from mcore_bridge.config.hf import special_float

SIZES = st.sampled_from([1, 2, 4])
SIZES_OF_STAGES = [
    (1, 1),
    (2, 1),
    (1, 2),
    (2, 2),
    (4, 1),
    (4, 2),
    (8, 1),
    (1, 4),
    (2, 4),
    (8, 2),
    (3, 1),
    (6, 2),
    (5, 3),
]
"""tp and pp."""


def tiny(model_type: str, **fields: Any) -> Any:
    """An HF config of a dense family with small, pairwise distinct dims; ``fields`` override."""
    from transformers import AutoConfig

    defaults = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "head_dim": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    return AutoConfig.for_model(model_type, **{**defaults, **fields})


@st.composite
def problems(draw: Any) -> tuple[Any, ParallelDims]:
    """An HF config and a mesh for it: every axis, uneven pipelines, tied or not, odd vocabularies, biases, heads."""
    tp, pp = draw(st.sampled_from(SIZES_OF_STAGES))
    vp = draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1
    num_layers, split = draw(pipelines(pp, vp))
    groups = draw(st.sampled_from([size for size in (1, 2, 3, 4, 8) if size % tp == 0 or tp % size == 0]))
    heads = max(tp, groups) * draw(st.sampled_from([1, 2]))
    model_type = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]))
    fields = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": heads * 6,
        "intermediate_size": tp * draw(st.integers(1, 40)),
        "num_hidden_layers": num_layers,
        "vocab_size": draw(st.sampled_from([64, 97, 101, 130])),
        "tie_word_embeddings": draw(st.booleans()),
        "head_dim": 6,
    }
    if model_type != "qwen2":  # head_dim derived (6), explicit and other than derived (8), or None
        fields["head_dim"] = draw(st.sampled_from([6, 8] if model_type == "qwen3" else [6, 8, None]))
    if model_type in ("llama", "qwen3"):
        fields["attention_bias"] = draw(st.booleans())
    if model_type == "llama":
        fields["mlp_bias"] = draw(st.booleans()) and fields["attention_bias"]
    rows = (heads + 2 * groups) * (fields["head_dim"] or 6)
    assume(rows % tp == 0)  # megatron-core cuts linear_qkv by rows; refusals of other sizes are tested elsewhere
    dims = ParallelDims(tp=tp, pp=pp, vp=vp, cp=draw(SIZES), sp=tp > 1 and draw(st.booleans()), **split)
    return tiny(model_type, **fields), dims


@st.composite
def sparse_problems(draw: Any) -> tuple[Any, ParallelDims]:
    """A config of a family with experts, and a mesh: any mix of its axes, with dense layers or none."""
    tp, pp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]))
    vp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    ep, etp = draw(st.sampled_from([(2, 1), (4, 1), (2, 2), (1, 2)]))
    num_layers, split = draw(pipelines(pp, vp))
    hf = tiny(
        "qwen3_moe",
        num_hidden_layers=num_layers,
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        vocab_size=draw(st.sampled_from([64, 97])),
        tie_word_embeddings=draw(st.booleans()),
        num_experts=draw(st.sampled_from([4, 8, 12])),
        num_experts_per_tok=draw(st.sampled_from([2, 3])),
        moe_intermediate_size=draw(st.sampled_from([6, 16, 22])),
        mlp_only_layers=draw(st.sampled_from([[], [0]])),
    )
    return hf, ParallelDims(tp=tp, pp=pp, vp=vp, ep=ep, etp=etp, sp=tp > 1, **split)


@st.composite
def pipelines(draw: Any, pp: int, vp: int) -> tuple[int, dict[str, Any]]:
    """A number of layers, and how the pipeline splits them."""
    kind = draw(st.sampled_from(["even", "first", "last", "explicit", "balanced"])) if pp > 1 else "even"
    if kind == "even":
        return pp * vp * draw(st.integers(1, 2)), {}
    if kind in ("first", "last"):
        name = f"num_layers_in_{kind}_pipeline_stage"
        return vp * (1 + 2 * (pp - 1)), {name: vp}
    if kind == "balanced":
        return draw(st.integers(pp * vp, pp * vp + 5)), {"layout": "balanced"}
    counts = draw(st.lists(st.integers(0, 2), min_size=pp * vp, max_size=pp * vp).filter(any))
    stages = ["t" * count for count in counts]
    return sum(counts), {"layout": "E" + "|".join(stages) + "L"}


HASHES = (".layer_multipliers", ".ngram_heads_vocab_sizes", ".ngram_heads_offsets")
"""The ends of names of integers that a config decides."""
_SMALL = ("kimi_linear", "bailing_hybrid", "olmo_hybrid", "glm5_next_text")


def random_state(hf: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a checkpoint, named and shaped as transformers writes them: random, every value non-zero.

    Norms are spread around transformers' initial values, and biases are as large as the values to which they are added,
    so that any exchange shows. Biases that select experts stay in fp32, as in published checkpoints.
    """
    from tests.support.text_halves import hashes, random_experts
    from tests.support.twins import TWINS  # it imports this module

    if twin := TWINS.get(hf.model_type):
        return twin.named(random_state(twin.config(hf), dtype=dtype, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    state = {name: _random(name, shape, generator) for name, shape in _shapes(hf.to_json_string())}
    state |= {name: random_experts(hf, generator) for name in state if name.endswith("tid2eid")}
    state |= {name: hashes(hf, name) for name in state if name.endswith(HASHES)}
    if hf.model_type.startswith(("qwen3_next", "qwen3_5", "qwen4_exp")):
        state = {name: _of_delta_net(name, tensor) for name, tensor in state.items()}
    if hf.model_type.startswith("gemma4"):
        state = {name: _of_gemma4(name, tensor) for name, tensor in state.items()}
    if hf.model_type in _SMALL:  # outputs, as in _of_delta_net
        outputs = {"self_attn.o_proj": 0.3, "attention.o_proj": 0.3, "attention.dense": 0.3, "linear_attn.o_proj": 0.1}
        scales = {name: min([by for part, by in outputs.items() if part in name], default=1) for name in state}
        state = {name: scales[name] * tensor for name, tensor in state.items()}
    return {name: tensor if _stays_fp32(name) else tensor.to(dtype) for name, tensor in state.items()}


def save(state: dict[str, Tensor], hf: Any, folder: str | Path) -> None:
    """``state`` as a checkpoint of ``hf`` in one file."""
    from safetensors.torch import save_file

    save_file(state, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    hf.save_pretrained(folder)


def on_disk(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """``state`` under the names in files. In transformers 5, experts have other names in memory."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4
        return state
    from tests.support.text_halves import published_names

    return published_names(model.config, dict(revert_weight_conversion(model, state)))


@functools.lru_cache(maxsize=512)
def _shapes(config: str) -> list[tuple[str, list[int]]]:
    """The names and shapes of a checkpoint of transformers. They are kept in a file for other processes of the session,
    since many ranks ask for each model.
    """
    if "MCORE_BRIDGE_CACHE" not in os.environ:  # a program of its own
        return [(name, [*shape]) for name, shape in _shapes_in_transformers(config)]
    path = Path(os.environ["MCORE_BRIDGE_CACHE"]) / f"shapes-{hashlib.sha256(config.encode()).hexdigest()}.json"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(_shapes_in_transformers(config)))
        unfinished.replace(path)
    shapes: list[tuple[str, list[int]]] = json.loads(path.read_text())
    return shapes


def _shapes_in_transformers(config: str) -> list[tuple[str, torch.Size]]:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.text_halves import published_shape

    hf = AutoConfig.for_model(**json.loads(config, object_hook=special_float))
    elsewhere = "cpu" if hf.model_type == "apertus" else "meta"  # transformers 4 reads numbers of its activation
    with init_empty_weights(), torch.device(elsewhere):  # transformers 4 puts new tensors into mixers of Granite
        empty = AutoModelForCausalLM.from_config(hf)
    state = on_disk(empty, empty.state_dict())
    skipped = {"lm_head.weight"} if hf.tie_word_embeddings else set()
    return [(name, published_shape(hf, name, tensor.shape)) for name, tensor in state.items() if name not in skipped]


def _stays_fp32(name: str) -> bool:
    return name.endswith(("e_score_correction_bias", "expert_bias", ".ffn.gate.bias", "tid2eid", *HASHES))


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    values = torch.where(values.abs() < 1e-3, torch.ones(()), values)
    if "norm" in name:
        return 1 + 0.1 * values.clamp(-4, 4)
    return values * (0.3 if name.endswith("bias") or "embed" in name or len(shape) < 2 else shape[-1] ** -0.5)


def _of_delta_net(name: str, tensor: Tensor) -> Tensor:
    """Random values for linear attention. Some norms add 1 to their weight. Outputs are small: the norm of linear
    attention divides by values that may be nearly zero, which makes rounding errors large, also in transformers.
    """
    if name.endswith("linear_attn.out_proj.weight"):
        return 0.3 * tensor
    return tensor - 1 if "norm" in name and "linear_attn" not in name else tensor


def _of_gemma4(name: str, tensor: Tensor) -> Tensor:
    """Random values for attention whose scores are not divided. Norms of queries make them small, as published norms
    do: sharp attention makes rounding errors large, also in transformers. The scale of a layer is near 1.
    """
    if name.endswith(("layer_scalar", "per_expert_scale")):
        return 1 + tensor
    if name.endswith("router.scale"):  # it is divided by the root of the hidden size
        return 10 * (1 + tensor)
    return 0.2 * tensor if name.endswith("q_norm.weight") else tensor
