"""SGLang's model classes, loader and weight updater, on CPU, in workers of the pool.

Only SGLang's compiled kernels are replaced: ``sgl_kernel`` needs a CUDA driver, or a build for CPUs, before it can be
imported. Here it is a module whose functions raise: models compute with them, and loading calls none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

PAGE = Path(__file__).parent.parent.parent / "docs" / "trainers" / "sglang.md"
LOOKED_UP = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Operators that modules of SGLang look up when they are imported."""


class NoKernels(ModuleType):
    """A placeholder for ``sgl_kernel``: every function of it raises when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"expected that no kernel is called, but sgl_kernel.{name} was")

        return absent


def prepare() -> None:
    """Make imports of SGLang in this process use CPUs."""
    if isinstance(sys.modules.get("sgl_kernel"), NoKernels):
        return
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", SGLANG_NCCL_SO_PATH="none")
    sys.modules["sgl_kernel"] = NoKernels("sgl_kernel")
    for name in LOOKED_UP:
        torch.library.define(f"sgl_kernel::{name}", "() -> ()")


def architectures() -> set[str]:
    """Names of SGLang's model classes."""
    prepare()
    from sglang.srt.models.registry import ModelRegistry

    return set(ModelRegistry.get_supported_archs())


class Warned(logging.Handler):
    """The warnings of SGLang: for an unknown name it only logs a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings of SGLang within the block."""
    handler, logger = Warned(), logging.getLogger("sglang")
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)


@dataclass(frozen=True)
class Server:
    """The objects with which a scheduler of SGLang loads models."""

    config: Any
    loader: Any

    def read(self, folder: str) -> nn.Module:
        """A new model that has read this folder."""
        from sglang.srt.configs.device_config import DeviceConfig

        self.config.model_path = folder
        return self.loader.load_model(model_config=self.config, device_config=DeviceConfig("cpu"))

    def updater(self, model: nn.Module) -> Any:
        """SGLang's own, of a model that is served."""
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        return WeightUpdater(
            tp_rank=dist.get_rank(),
            device="cpu",
            gpu_id=dist.get_rank(),
            model_config=self.config,
            custom_weight_loaders={},
            get_model=lambda: model,
            update_model_fields=_unused,
            recapture_cuda_graph=_unused,
            get_model_runner=_unused,
        )


def _unused(*args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError("an update from tensors asks for none of the model runner")


@contextlib.contextmanager
def server(folder: str, *, ep: bool = False, multimodal: bool | None = None) -> Iterator[Server]:
    """One rank of SGLang in the worker's process group, set up as a scheduler is, and nothing of it afterwards.

    Args:
        ep: whether the ranks have whole experts, and not slices of all.
        multimodal: whether towers are built; by default SGLang decides by the family.
    """
    prepare()
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.distributed import bootstrap, parallel_state
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * size)  # by default each rank has a NUMA node
    arguments = ServerArgs(
        model_path=folder,
        device="cpu",
        dtype="bfloat16",
        tp_size=size,
        ep_size=size if ep else 1,
        enable_multimodal=multimodal,
        skip_tokenizer_init=True,
        attention_backend="triton",
        mamba_radix_cache_strategy="no_buffer",
        disable_overlap_schedule=True,
    )
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):  # asked by sparse attention
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    config = ModelConfig.from_server_args(arguments)
    try:
        bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=0)  # the pool's group exists
        initialize_moe_config()
        bootstrap.init_layer_runtime(model_config=config)
        load = LoadConfig()
        yield Server(adjust_config_with_unaligned_cpu_tp(config, load, size), DefaultModelLoader(load))
    finally:
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = None  # SGLang's own function would end the pool's group too


def bucket_of(slot: Tensor, columns: dict[str, list[Any]]) -> Any:
    """The bucket that users pass by docs/trainers/sglang.md, as ``load_format="flattened_bucket"``."""
    (block,) = re.findall(r"```python\n(from sglang.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"torch": torch}
    exec(block, names)
    return names["bucket_of"](slot, columns)


def unused(updater: Any, model: nn.Module, groups: Sequence[Sequence[tuple[str, Tensor]]]) -> set[str]:
    """Names that the engine takes and leaves out: when their tensors are NaN, no parameter is."""
    found = set()
    for group in groups:
        for chosen, _ in group:
            spoilt = [
                (name, torch.full_like(tensor, torch.nan) if name == chosen else tensor) for name, tensor in group
            ]
            updater.update_weights_from_tensor(spoilt)
            if not any(parameter.isnan().any() for parameter in model.parameters()):
                found.add(chosen)
        updater.update_weights_from_tensor(group)
    return found
