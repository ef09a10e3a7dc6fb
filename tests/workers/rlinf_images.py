"""RLinf's training step on rows with images: RLinf's functions, cut out of files that import all of Megatron-LM."""

from __future__ import annotations

import ast
import importlib.util
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support import stepping
from tests.workers.rlinf_worker import source_of
from tests.workers.verl_engine import CpuForCuda

MANAGER = "rlinf/hybrid_engines/megatron/megatron_model_manager.py"
WORKER = "rlinf/workers/sft/megatron_vlm_sft_worker.py"
PACKING = "rlinf/hybrid_engines/megatron/utils.py"
NO_IMAGE = {"image_grid_thw": torch.zeros(0, 3, dtype=torch.int64), "pixel_values": torch.zeros(0)}


def methods(file: str, of: str, *names: str) -> dict[str, ast.stmt]:
    """Methods of a class in a file of RLinf, by name."""
    tree = ast.parse(source_of(file))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == of)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in names}


def worker_class() -> type:
    """A class with the methods that RLinf's worker runs in a step."""
    from megatron.core import tensor_parallel
    from megatron.core.utils import unwrap_model

    names: dict[str, Any] = {"torch": torch, "Any": Any, "Optional": Optional, "tensor_parallel": tensor_parallel}
    exec(compile(source_of(PACKING), PACKING, "exec"), names)
    names |= {"unwrap_model": unwrap_model, "average_losses_across_data_parallel_group": lambda losses: losses[0]}
    parts = {
        **methods(MANAGER, "MegatronModelManager", "custom_forward"),
        **methods(WORKER, "MegatronVlmSftWorker", "prepare_batch_for_megatron", "get_forward_step_func"),
    }
    body = ast.Module([ast.ClassDef("Worker", [], [], [*parts.values()], [])], [])
    exec(compile(ast.fix_missing_locations(body), WORKER, "exec"), names)
    made: type = names["Worker"]
    return made


def micro_batches(batch: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Microbatches as RLinf's loader makes them."""
    for start in range(0, len(batch["prompt"]), size):
        rows = slice(start, start + size)
        images = [each or NO_IMAGE for each in batch["images"][rows]]
        yield {
            **{name: batch[name][rows] for name in ("prompt", "attention_mask", "label_mask")},
            "image_grid_thw": torch.cat([each["image_grid_thw"] for each in images]),
            "pixel_values": [each["pixel_values"] for each in images],
        }


def step(
    folder: str, sizes: dict[str, Any], batch: dict[str, Any], size: int, model: str | None = None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Runs in each worker: losses of microbatches on the last stage, and gradients of the tower.

    With a ``model``, the text alone is trained, and all gradients are returned.
    """
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mcore_bridge.trainers.megatron_bridge import AutoBridge

    dims = mb.ParallelDims(**sizes)
    with stepping.mesh(dims):
        provider: Any = AutoBridge.from_hf_pretrained(folder, trust_remote_code=True).to_megatron_provider(
            load_weights=True
        )
        provider.vision, provider.model = ("text_only", model) if model else ("train", "gpt")
        provider.mrope_section = getattr(provider, "mrope_section", [16, 24, 24])
        provider.position_embedding_type = getattr(provider, "position_embedding_type", "mrope")
        provider.freeze_language_model = provider.freeze_vision_model = provider.freeze_vision_projection = False
        for name, value in dims.to_config_fields().items():
            setattr(provider, name, value)
        provider.params_dtype, provider.bf16, provider.variable_seq_lengths = torch.float32, False, True
        provider.finalize()
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        wrapped = provider.provide_distributed_model(ddp_config=settings)
        worker: Any = worker_class()()
        worker.pack_seqs = dims.pp == 1
        worker.transformer_config = types.SimpleNamespace(sequence_parallel=dims.sp)
        worker.cfg = types.SimpleNamespace(
            algorithm=types.SimpleNamespace(sampling_params=types.SimpleNamespace(temperature=1.0))
        )
        chunk = wrapped[0].module
        chunk.config.finalize_model_grads_func = finalize_model_grads
        rows = list(micro_batches(batch, size))
        with CpuForCuda():
            Tensor.cuda, kept = (lambda self: self), Tensor.cuda  # type: ignore[method-assign]
            try:
                losses = get_forward_backward_func()(
                    forward_step_func=worker.get_forward_step_func(),
                    data_iterator=iter(rows),
                    model=wrapped,
                    num_microbatches=len(rows),
                    seq_length=batch["prompt"].shape[1],
                    micro_batch_size=size,
                    forward_only=False,
                )
            finally:
                Tensor.cuda = kept  # type: ignore[method-assign]
        tower = dict(chunk.vision.named_parameters()) if hasattr(chunk, "vision") else {}
        learns = held_tensors([chunk]) if model else tower
        return [each["lm_loss"] for each in losses], {name: p.main_grad.clone() for name, p in learns.items()}


def is_installed() -> bool:
    """Whether RLinf is available, installed or as its unpacked wheel."""
    return importlib.util.find_spec("rlinf") is not None and Path(source_path()).is_file()


def source_path() -> str:
    """The file of RLinf's worker."""
    (package,) = importlib.util.find_spec("rlinf").submodule_search_locations  # type: ignore[union-attr, misc]
    return str(Path(package).parent / WORKER)
