"""Shared by the benchmarks: models of known sizes, checkpoints of random values, a mesh, a clock and a report."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

if TYPE_CHECKING:  # another library may be imported as mcore_bridge: only the mesh needs ours
    import mcore_bridge as mb

COMMON = {
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


LAUNCHER = ("TORCHELASTIC_", "MASTER_", "ROLE_", "GROUP_", "LOCAL_", "RANK", "WORLD_SIZE")
"""How the variables begin by which torchrun names the ranks of a job."""


def outside_of_the_job(**more: str) -> dict[str, str]:
    """The environment for a process that is no rank of this job, such as an engine, with ``more`` variables.

    Otherwise the process would look for its own ranks in the store of torchrun, and wait for ever.
    """
    return {**{name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}, **more}


def _dense(*sizes: int, head_dim: int = 128, vocab_size: int = 151_936, **more: Any) -> dict[str, Any]:
    own = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": head_dim, "vocab_size": vocab_size}
    return {**COMMON, **dict(zip(SIZES, sizes, strict=True)), **own, **more}


def _sparse(*sizes: int, num_experts: int, moe_intermediate_size: int, **more: Any) -> dict[str, Any]:
    own = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 8}
    layers = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    experts = {"num_experts": num_experts, "moe_intermediate_size": moe_intermediate_size}
    return _dense(*sizes, **{**own, **layers, **experts, **more})


def _hybrid(*sizes: int, num_experts: int, linear_num_key_heads: int, inner: int, **more: Any) -> dict[str, Any]:
    """Qwen3-Next: three layers of linear attention, then one of attention with a gate, experts in all of them."""
    own = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "partial_rotary_factor": 0.25}
    heads = {"linear_num_key_heads": linear_num_key_heads, "linear_num_value_heads": 2 * linear_num_key_heads}
    heads |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
    experts = {"num_experts": num_experts, "moe_intermediate_size": inner, "shared_expert_intermediate_size": inner}
    return _sparse(*sizes, **{**own, **heads, **experts, "full_attention_interval": 4, **more})


def _latent(*sizes: int, n_routed_experts: int, moe_intermediate_size: int) -> dict[str, Any]:
    """A small DeepSeek-V3 in the sizes of Moonlight-16B-A3B, with experts in every layer."""
    heads = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    heads |= {"kv_lora_rank": 512, "q_lora_rank": None}
    routing = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "norm_topk_prob": True}
    routing |= {"routed_scaling_factor": 2.446, "n_shared_experts": 2, "first_k_dense_replace": 0}
    experts = {"n_routed_experts": n_routed_experts, "moe_intermediate_size": moe_intermediate_size}
    own = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163_840}
    return {**COMMON, **dict(zip(SIZES, sizes, strict=True)), **own, **heads, **routing, **experts}


def _mamba(*sizes: int, pattern: str, inner: int, state: int, mamba_num_heads: int, **more: Any) -> dict[str, Any]:
    """Nemotron 3: each layer is a Mamba-2 mixer (M), experts (E) or attention (*)."""
    own = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "head_dim": 128}
    mixers = {"mamba_num_heads": mamba_num_heads, "mamba_head_dim": 64, "ssm_state_size": state, "n_groups": 8}
    mixers |= {"hybrid_override_pattern": pattern, "time_step_min": 0.0}
    experts = {"moe_intermediate_size": inner, "moe_shared_expert_intermediate_size": 2 * inner, "n_shared_experts": 1}
    routing = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    fields = {**COMMON, **dict(zip(SIZES, sizes, strict=True)), **own, **mixers, **experts, **routing, **more}
    return {name: value for name, value in fields.items() if name not in ("rope_theta", "rms_norm_eps")}


MODELS: dict[str, dict[str, Any]] = {
    "tiny": _dense(512, 1536, 8, 8, 4, head_dim=64, vocab_size=32_000),
    "tiny-moe": _sparse(512, 1536, 4, 8, 4, num_experts=32, moe_intermediate_size=384, vocab_size=32_000),
    "qwen3-0.6b": _dense(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-8b": _dense(4096, 12288, 36, 32, 8),
    "qwen3-30b-a3b": _sparse(2048, 6144, 48, 32, 4, num_experts=128, moe_intermediate_size=768),
    "tiny-next": _hybrid(512, 1536, 4, 8, 2, num_experts=16, linear_num_key_heads=4, inner=384, vocab_size=32_000),
    "qwen3-next": _hybrid(2048, 5120, 48, 16, 2, num_experts=512, linear_num_key_heads=16, inner=512, head_dim=256),
    "moonlight": _latent(2048, 11264, 27, 16, 16, n_routed_experts=64, moe_intermediate_size=1408),
    "nemotron-3-nano": _mamba(
        *(2688, 1856, 52, 32, 2),
        pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        inner=1856,
        state=128,
        mamba_num_heads=64,
        n_routed_experts=128,
        num_experts_per_tok=6,
        vocab_size=131_072,
    ),
}
MESH = ("tp", "pp", "vp", "cp", "ep", "etp", "sp")
SHARD_BYTES = 1 << 30
PERIOD = 15_485_863  # elements of the random values that repeat; a prime, so that no two rows of a matrix are equal


def config_of(name: str, layers: int | None = None, **changed: int) -> PretrainedConfig:
    """The HF config of a known model, or of a ``model_type`` in the sizes that transformers gives it.

    Args:
        layers: the number of layers, if it is another one.
        changed: further fields with other values.
    """
    fields = {**MODELS.get(name, {"model_type": name}), **changed}
    if layers:
        fields["num_hidden_layers"] = layers
    if "hybrid_override_pattern" in fields:
        fields["hybrid_override_pattern"] = fields["hybrid_override_pattern"][: fields["num_hidden_layers"]]
    return AutoConfig.for_model(**fields)


def parsed(case: str) -> tuple[str, int | None, dict[str, int]]:
    """The model, its number of layers if reduced, and the sizes of the mesh: "qwen3-8b layers=12 tp=2"."""
    name, *sizes = case.split()
    options = {key: int(value) for key, value in (size.split("=") for size in sizes)}
    layers = options.pop("layers", None)
    return name, layers, {key: options.pop(key, 0 if key == "sp" else 1) for key in MESH}


def changed_fields(case: str) -> dict[str, int]:
    """The fields of the config that a case changes: "deepseek_v4 layers=4 n_routed_experts=16"."""
    options = (option.split("=") for option in case.split()[1:])
    return {key: int(value) for key, value in options if key not in (*MESH, "layers")}


def shapes_of(config: PretrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a Qwen3 or Qwen3-Next checkpoint, as they are published."""
    width, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    is_hybrid = config.model_type == "qwen3_next"
    yield "model.embed_tokens.weight", (config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (width,)
        if is_hybrid and config.layer_types[layer] == "linear_attention":
            yield from _linear_attention(f"{prefix}.linear_attn", config)
        else:
            yield f"{prefix}.self_attn.q_proj.weight", ((1 + is_hybrid) * queries, width)  # queries and gates
            yield f"{prefix}.self_attn.k_proj.weight", (keys, width)
            yield f"{prefix}.self_attn.v_proj.weight", (keys, width)
            yield f"{prefix}.self_attn.o_proj.weight", (width, queries)
            yield f"{prefix}.self_attn.q_norm.weight", (head,)
            yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield f"{prefix}.post_attention_layernorm.weight", (width,)
        experts = getattr(config, "num_experts", None)
        if experts:
            yield f"{prefix}.mlp.gate.weight", (experts, width)
        inner = config.moe_intermediate_size if experts else config.intermediate_size
        mlps = [f"{prefix}.mlp.experts.{expert}" for expert in range(experts)] if experts else [f"{prefix}.mlp"]
        if is_hybrid:
            mlps += [f"{prefix}.mlp.shared_expert"]
            yield f"{prefix}.mlp.shared_expert_gate.weight", (1, width)
        for mlp in mlps:
            yield f"{mlp}.gate_proj.weight", (inner, width)
            yield f"{mlp}.up_proj.weight", (inner, width)
            yield f"{mlp}.down_proj.weight", (width, inner)
    yield "model.norm.weight", (width,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, width)


def _linear_attention(prefix: str, config: PretrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    yield f"{prefix}.in_proj_qkvz.weight", (2 * keys + 2 * values, config.hidden_size)
    yield f"{prefix}.in_proj_ba.weight", (2 * config.linear_num_value_heads, config.hidden_size)
    yield f"{prefix}.conv1d.weight", (2 * keys + values, 1, config.linear_conv_kernel_dim)
    yield f"{prefix}.A_log", (config.linear_num_value_heads,)
    yield f"{prefix}.dt_bias", (config.linear_num_value_heads,)
    yield f"{prefix}.norm.weight", (config.linear_value_head_dim,)
    yield f"{prefix}.out_proj.weight", (config.hidden_size, values)


def checkpoint_of(config: PretrainedConfig, folder: str | os.PathLike[str]) -> Path:
    """A folder with a bf16 checkpoint of ``config``, of random values around zero (norms: one). An existing one is
    kept.

    All ranks call it and share the writing. The index is written last, so a checkpoint with an index is complete.
    """
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    weight_map = {}
    for name, shape in shapes_of(config):
        if 2 * sum(map(math.prod, shards[-1].values())) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
        weight_map[name] = f"model-{len(shards):05}.safetensors"
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    if index.is_file() and index.read_text() == text:
        return folder
    dist.barrier()  # all ranks have checked that it is missing
    folder.mkdir(parents=True, exist_ok=True)
    values = 0.02 * torch.randn(PERIOD, generator=torch.Generator().manual_seed(0))
    block = values.where(values != 0, 0.01).to(torch.bfloat16)
    for number in range(dist.get_rank(), len(shards), dist.get_world_size()):
        tensors = {name: _filled(name, shape, block) for name, shape in shards[number].items()}
        save_file(tensors, folder / f"model-{number + 1:05}.safetensors", metadata={"format": "pt"})
    dist.barrier()
    if dist.get_rank() == 0:
        config.save_pretrained(folder)
        index.write_text(text)
    dist.barrier()
    return folder


def _filled(name: str, shape: tuple[int, ...], block: Tensor) -> Tensor:
    """Values of ``block``, from a place on that depends on the name. Norms are a little above one."""
    start = sum(name.encode()) * 7919 % PERIOD
    numel = math.prod(shape)
    tensor = block.roll(-start).repeat(-(-numel // PERIOD))[:numel].view(shape).clone()
    return 1 + tensor if "norm" in name else tensor


def format_of(text: str) -> dict[str, Any] | None:
    """The format of weights that an option names: "none", or a ``quantization_config`` as JSON."""
    if text == "none":
        return None
    note: dict[str, Any] = json.loads(text)
    return note


def case_arguments(description: str | None, case: str) -> ArgumentParser:
    """The arguments of benchmarks of several cases."""
    parser = ArgumentParser(description=description)
    parser.add_argument("cases", nargs="+", help=case)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeats", type=int, default=10)
    _device_argument(parser)
    return parser


def mesh_arguments(parser: ArgumentParser) -> None:
    """The sizes of the mesh, and the device."""
    for name in ("tp", "pp", "vp", "cp", "ep", "etp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--sp", action="store_true")
    _device_argument(parser)


def _device_argument(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")


def model_arguments(parser: ArgumentParser) -> None:
    """The model, the folder of its checkpoint, which may not exist yet, and the number of measurements."""
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints, which are made once and kept")
    parser.add_argument("--repeats", type=int, default=3)


def prepared(description: str | None) -> tuple[Namespace, mb.ParallelDims, Path]:
    """The arguments of a benchmark of files, its mesh, and a checkpoint of its model."""
    parser = ArgumentParser(description=description)
    mesh_arguments(parser)
    model_arguments(parser)
    arguments = parser.parse_args()
    dims = set_up(arguments)
    config = config_of(arguments.model, arguments.layers)
    folder = checkpoint_of(config, arguments.folder / f"{arguments.model}-{config.num_hidden_layers}")
    return arguments, dims, folder


def set_up(arguments: Namespace) -> mb.ParallelDims:
    """Join the processes of torchrun and make the mesh."""
    import mcore_bridge as mb

    sizes = {name: getattr(arguments, name) for name in MESH}
    dims = mb.ParallelDims(**sizes)
    dims.initialize(device=arguments.device)
    return dims


def timed(function: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of ``repeats`` calls, from when all ranks are ready until all have finished on their devices."""
    seconds = []
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter()
        function()
        _synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def timed_afresh(write: Callable[[], object], target: Path) -> list[float]:
    """Seconds of a ``write`` that makes ``target``. Before it, all files are flushed; after it, the target is
    removed.
    """
    os.sync()
    seconds = timed(write, 1)
    if dist.get_rank() == 0:
        shutil.rmtree(target)
    dist.barrier()
    return seconds


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


class MemoryPeak:
    """Measures the bytes that are allocated on the GPU in addition to the current ones."""

    def __init__(self) -> None:
        self._start = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()

    def peak(self) -> int:
        """The maximum so far, over all ranks."""
        return most(torch.cuda.max_memory_allocated() - self._start if torch.cuda.is_available() else 0)


def most(value: int) -> int:
    """The largest of all ranks."""
    answer = torch.tensor(value, device="cuda" if "nccl" in dist.get_backend() else "cpu")
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return int(answer)


def from_the_first(function: Callable[[], object], repeats: int) -> tuple[float, list[float], int]:
    """Seconds of the first call, of ``repeats`` warm ones, and bytes of GPU memory that it takes at most.

    The first counts only where nothing has made and kept a plan before, as ``mb.manifest`` does.
    """
    memory = MemoryPeak()
    (first,) = timed(function, 1)
    timed(function, 2)
    peak = memory.peak()
    return first, timed(function, repeats), peak


def summary(seconds: list[float], num_bytes: int) -> dict[str, float]:
    """Least and median seconds of a measurement, and GB/s at the median."""
    median = statistics.median(seconds)
    return {"min_s": round(min(seconds), 4), "median_s": round(median, 4), "gb_s": round(num_bytes / median / 1e9, 3)}


def report(**fields: Any) -> None:
    """Rank 0 prints a readable line, and a line of JSON with the versions of the measured packages."""
    if dist.get_rank() == 0:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPUs"
        packages = ("torch", "megatron-core", "transformers", "safetensors")
        versions = {name: importlib.metadata.version(name) for name in packages}
        machine = {"device": device, "ranks": dist.get_world_size(), "python": platform.python_version(), **versions}
        print(", ".join(f"{name} {value}" for name, value in fields.items()))
        print(json.dumps({**fields, **machine}), flush=True)
