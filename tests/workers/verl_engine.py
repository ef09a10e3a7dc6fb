"""verl's Megatron engine in workers of the pool: the CPU as one of verl's platforms, and verl's calls."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mcore_bridge import ParallelDims
from tests.support import stepping

SWITCH = {"VERL_USE_EXTERNAL_MODULES": "mcore_bridge.trainers.verl"}
"""The setting of a user."""


def use_us_on_cpu() -> None:
    """Set what a user sets, and register a platform that is the CPU, as verl takes others than CUDA, NPU and ROCm."""
    os.environ.update(SWITCH)
    from verl.plugin.platform import PlatformBase, get_platform, set_platform

    names = {name for name in dir(PlatformBase) if getattr(getattr(PlatformBase, name), "__isabstractmethod__", False)}
    values = {"device_name": "cpu", "vendor_name": "none", "device_module": torch.cpu}
    answers = {"current_device": "cpu", "device_count": 0, "is_available": False, "is_ipc_supported": False}
    answers |= {"communication_backend_name": "gloo", "ray_noset_envvars": [], "ray_resource_name": "CPU"}
    body: dict[str, Any] = {name: (lambda self, *_, name=name: answers.get(name)) for name in names - values.keys()}
    body |= {name: property(lambda self, value=value: value) for name, value in values.items()}
    body["nvtx_range"] = lambda self, msg: contextlib.nullcontext()
    cpu: Any = torch.cpu
    cpu.empty_cache = lambda: None  # all names that verl uses of a device's module and torch.cpu lacks
    if get_platform().device_name != "cpu":
        set_platform(type("CpuPlatform", (PlatformBase,), body)())


@contextlib.contextmanager
def own_processes() -> Iterator[None]:
    """``stepping.let_megatron_save``, for as long as this lasts."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    module: Any = filesystem_async
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    daemon, results = config.get("daemon"), module._results_queue
    stepping.let_megatron_save()
    try:
        yield
    finally:
        config["daemon"], module._results_queue = daemon, results


class CpuForCuda(TorchFunctionMode):
    """Replaces CUDA for megatron-core's optimizers, which make tensors on "cuda" and check that parameters are on it.

    Trainers also copy parameters to pinned memory before they free the GPU's memory. This makes a copy here, too.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.pin_memory:
            return args[0].clone()
        found = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


def engine_of(
    folder: str,
    dims: ParallelDims,
    *,
    vanilla: bool,
    value: bool = False,
    replay: str = "disabled",
    attention: str = "flash",
    lora: dict[str, Any] | None = None,
    overrides: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """An initialised engine, made from its config as in a worker of verl.

    Args:
        folder: an HF checkpoint with a tokenizer.
        dims: the mesh.
        vanilla: use the interface of mbridge instead of Megatron-Bridge's.
        value: make a critic.
        replay: the mode of router replay.
        attention: the backend, by its name.
        lora: adapters.
        overrides: further overrides of the ``TransformerConfig``.
        fields: further fields of ``McoreEngineConfig``, such as offloading.
    """
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.config.checkpoint import McoreCheckpointConfig
    from verl.workers.config.engine import EngineRouterReplayConfig
    from verl.workers.engine import EngineRegistry

    kind = "value_model" if value else "language_model"
    engine = EngineRegistry.new(
        model_type=kind,
        backend="megatron",
        model_config=HFModelConfig(
            path=folder, model_type=kind, override_config={"attn_implementation": "eager"}, lora=lora or {}
        ),
        engine_config=McoreEngineConfig(
            vanilla_mbridge=vanilla,
            router_replay=EngineRouterReplayConfig(mode=replay),
            use_dynamic_bsz=False,
            override_mcore_model_config={"moe_config": {"freeze_moe_router": True}},
            override_transformer_config={
                "attention_backend": attention,
                "recompute_modules": ["core_attn"],
                **(overrides or {}),
            },
            **{name: size for name, size in dims.to_group_sizes().items() if size is not None},
            **fields,
        ),
        optimizer_config=McoreOptimizerConfig(lr=1e-2, total_training_steps=10, lr_warmup_steps=0, clip_grad=1.0),
        checkpoint_config=McoreCheckpointConfig(mbridge_config={"memory_efficient": True, "bogus": 1}),
    )
    engine.initialize()
    return engine


def exported(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights that a rollout would get."""
    stream, peft_config = engine.get_per_tensor_param()
    assert peft_config is None
    return stream


def kernels_on_cpu() -> None:
    """Replace verl's kernels of fused log-probs, which need CUDA, by verl's steps without kernels.

    The steps find labels like the kernels: the first label of a rank is counted in the rows of this rank.
    """
    from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits

    from mcore_bridge.trainers.module_patch import original

    def steps(
        hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, *others: object
    ) -> tuple[Tensor, Tensor]:
        logits = (hidden.view(-1, 1, hidden.size(-1)) @ weight.T).float() / temperature
        log_probs = vocab_parallel_log_probs_from_logits(logits.clone(), labels.view(-1, 1))  # which it overwrites
        return log_probs.view(-1), vocab_parallel_entropy(logits).view(-1)

    module: Any = original("verl.utils.kernel.linear_cross_entropy")
    module.linear_cross_entropy = steps
