"""Times loads of quantized folders and of a bf16 folder, with their host memory, in one run.

python benchmarks/quantized_load.py --folder FOLDER                   # as large as below, on one GPU; 90 GB of disk
python benchmarks/quantized_load.py --folder FOLDER --size tiny --device cpu

It writes folders of random codes: DeepSeek-V3 in FP8 with most of its layers cut out, gpt-oss-20b in MXFP4, and layers
of Qwen3-30B-A3B in FP8 and in bf16. The folders are kept for the next run. Each is then loaded into a bf16 model
several times. Speeds are in GB of the files per second and in GB of bf16 parameters per second. Memory is the growth of
the process during the first load; files that are only mapped do not count. ``ratio`` is the speed in bytes of files,
divided by the speed for the first folder.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from common import COMMON, MODELS, report, set_up, summary, timed
from safetensors.torch import save_file
from torch import Tensor

import mcore_bridge as mb

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "attention_bias": True,
}
QWEN3: dict[str, Any] = {**COMMON, **MODELS["qwen3-30b-a3b"]}
SMALL = {
    "deepseek_v3": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 192,
        "kv_lora_rank": 128,
        "n_routed_experts": 16,
        "vocab_size": 4096,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
    },
    "gpt_oss": {
        "hidden_size": 576,
        "intermediate_size": 576,
        "num_local_experts": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
        "num_hidden_layers": 2,
    },
    "qwen3_moe": {
        "hidden_size": 512,
        "moe_intermediate_size": 256,
        "num_experts": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
        "num_hidden_layers": 2,
    },
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3-30b-a3b bf16": ({**QWEN3, "num_hidden_layers": 24}, ""),
    "qwen3-30b-a3b fp8": ({**QWEN3, "num_hidden_layers": 24}, "fp8"),
    "deepseek-v3 fp8": ({**DEEPSEEK, "num_hidden_layers": 2}, "fp8"),
    "gpt-oss-20b mxfp4": (GPT_OSS, "mxfp4"),
}
"""The HF fields of each folder, and its quantization."""
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "router", "bias", "sinks")
FILE_BYTES = 2 << 30
PERIOD = 15_485_863  # random bytes that repeat; a prime, so that no two rows of a matrix are equal


def written(name: str, fields: dict[str, Any], kind: str, folder: Path) -> Path:
    """A folder of random codes; kept if it is there."""
    target = folder / f"{name.replace(' ', '-')}-{fields['hidden_size']}-{fields['num_hidden_layers']}"
    index = target / "model.safetensors.index.json"
    if index.is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    quantization = {"fp8": {"quantization_config": FP8}, "mxfp4": {"quantization_config": {"quant_method": "mxfp4"}}}
    (target / "config.json").write_text(json.dumps({**fields, **quantization.get(kind, {})}))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(_files(_tensors(target, kind))):
        save_file(tensors, target / f"model-{number:05}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"model-{number:05}.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def _files(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        held[name] = tensor
        if sum(part.nbytes for part in held.values()) >= FILE_BYTES:
            yield held
            held = {}
    if held:
        yield held


def _tensors(target: Path, kind: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder, by the names that an export of its model has."""
    noise = torch.randint(0, 120, (PERIOD,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    dims = mb.ParallelDims()
    models = mb.build_model(target, dims=dims, device="meta", load_weights=False)
    for spec in mb.manifest(models):
        plain = any(part in spec.name for part in PLAIN) or len(spec.shape) < 2
        if plain or not kind or (kind == "mxfp4" and ".experts." not in spec.name):
            yield spec.name, _bytes(spec.shape, 2, noise).view(torch.bfloat16)
        elif kind == "mxfp4":
            experts, columns, rows = spec.shape
            yield f"{spec.name}_blocks", _bytes((experts, rows, columns // 32, 16), 1, noise)
            yield f"{spec.name}_scales", _bytes((experts, rows, columns // 32), 1, noise)
        else:
            grid = [-(-size // 128) for size in spec.shape]
            yield spec.name, _bytes(spec.shape, 1, noise).view(torch.float8_e4m3fn)
            yield f"{spec.name}_scale_inv", torch.rand(grid) * 0.01


def _bytes(shape: tuple[int, ...], itemsize: int, noise: Tensor) -> Tensor:
    numel = torch.Size(shape).numel() * itemsize
    values = noise[:numel].clone() if numel <= PERIOD else noise.repeat(-(-numel // PERIOD))[:numel]
    return values.view(*shape[:-1], shape[-1] * itemsize)


class HostMemory:
    """Measures the growth of this process's own memory. Mapped files do not count."""

    def __init__(self) -> None:
        gc.collect()
        self._start = self._most = _held()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> HostMemory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._most = max(self._most, _held())
            time.sleep(0.005)

    @property
    def peak(self) -> int:
        """Bytes."""
        return self._most - self._start


def _held() -> int:
    """Bytes of anonymous and of pinned memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines) if "kB" in value}
    return 1024 * (sizes["RssAnon"] + sizes["RssShmem"])


def main() -> None:
    """Write missing folders, and then load all folders in turn, so that other load of the machine affects all of
    them.
    """
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints, which are made once and kept")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="of the folders")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    for name in ("tp", "pp", "vp", "cp", "ep", "etp"):
        setattr(arguments, name, 1)
    arguments.sp = False
    dims = set_up(arguments)
    baseline = 0.0
    for name in arguments.only:
        fields, kind = CASES[name]
        fields = {**fields, **(SMALL[fields["model_type"]] if arguments.size == "tiny" else {})}
        folder = written(name, fields, kind, arguments.folder)
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        models = mb.build_model(folder, dims=dims, device=arguments.device, load_weights=False)
        held = sum(tensor.nbytes for model in models for tensor in model.parameters())
        load = partial(mb.load_hf_weights, models, folder)
        with HostMemory() as memory:
            timed(load, 1)  # this also warms the page cache
        loads = timed(load, arguments.repeats)
        loaded = summary(loads, num_bytes)
        speed = num_bytes / loaded["median_s"]
        baseline = baseline or speed
        sizes = {"gb": num_bytes / 1e9, "gb_of_bf16": held / 1e9, "gb_of_bf16_per_s": held / 1e9 / loaded["median_s"]}
        peak = {"peak_host_mb": round(memory.peak / 1e6)}
        ratio = round(speed / baseline, 3)
        report(benchmark="quantized_load", model=name, mesh=str(dims), **sizes, load=loaded, **peak, ratio=ratio)
        del models, load
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
