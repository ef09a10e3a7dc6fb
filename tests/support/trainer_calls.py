"""The calls that trainers make, in their order and with their arguments, as recorded from verl's engine.

Both interfaces have one form here, so that each test runs for both.
"""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.trainers import mbridge, megatron_bridge

OVERRIDES: dict[str, Any] = {
    "recompute_granularity": None,
    "recompute_modules": ["core_attn"],
    "recompute_method": None,
    "recompute_num_layers": None,
    "mtp_num_layers": None,
}
"""The default overrides of verl, without the attention backend."""
DDP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "grad_reduce_in_fp32": True}
_SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@dataclass
class Role:
    """A model of a trainer (actor, reference, critic): the bridge, its chunks, and the state between exports."""

    bridge: Any
    models: list[Any]
    value: bool
    tasks: Any = None

    def load(self, folder: str | Path, *, resume: bool = False) -> None:
        if isinstance(self.bridge, mbridge.Bridge):
            return self.bridge.load_weights(self.models, str(folder))
        if resume:
            return self.bridge.load_hf_weights(self.models, str(folder))
        allowed = ["output_layer.weight"] if self.value else []
        return self.bridge.load_hf_weights(self.models, str(folder), allowed_mismatched_params=allowed)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        if isinstance(self.bridge, mbridge.Bridge):
            return self.bridge.export_weights(self.models)
        if self.tasks is None:  # verl keeps it
            self.tasks = self.bridge.get_conversion_tasks(self.models)
        return self.bridge.export_hf_weights(self.models, conversion_tasks=self.tasks)

    def save(self, folder: str | Path) -> None:
        if isinstance(self.bridge, mbridge.Bridge):
            options = {"memory_efficient": True, "distributed_filesystem": True}
            return self.bridge.save_weights(self.models, str(folder), **options)
        return self.bridge.save_hf_weights(self.models, str(folder), strict=True)

    @property
    def config(self) -> Any:
        return stepping_config(self.models)


def stepping_config(models: list[Any]) -> Any:
    from megatron.core.utils import get_attr_wrapped_model

    return get_attr_wrapped_model(models[0], "config", allow_none=False)


@contextlib.contextmanager
def attention_switches() -> Iterator[None]:
    """megatron-core sets environment variables by the attention backend, and then refuses another backend."""
    before = {name: os.environ.pop(name, None) for name in _SWITCHES}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def build_role(
    face: str,
    folder: str | Path,
    dims: ParallelDims,
    *,
    value: bool = False,
    ddp: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    **further: Any,
) -> Role:
    """The calls of verl that build a model, before it loads weights. Process groups exist; ``further``: overrides."""
    return (_of_mbridge if face == "mbridge" else _of_megatron_bridge)(str(folder), dims, value, ddp, dtype, further)


def _of_mbridge(
    folder: str, dims: ParallelDims, value: bool, ddp: bool, dtype: torch.dtype, further: dict[str, Any]
) -> Role:
    from transformers import AutoConfig

    hf = AutoConfig.from_pretrained(folder, attn_implementation="eager")
    if value:
        hf.tie_word_embeddings = False
    if hasattr(hf, "num_nextn_predict_layers"):
        hf.num_nextn_predict_layers = 0
    hf.pad_token_id = 3
    bridge = mbridge.AutoBridge.from_config(hf, dtype=dtype)
    assert bridge
    bridge.set_extra_args(**OVERRIDES, attention_backend="flash", **further)
    config = bridge.config
    config.fp16, config.bf16 = False, dtype is torch.bfloat16
    if hasattr(config, "share_embeddings_and_output_weights"):
        config.share_embeddings_and_output_weights = False
    hf.rope_theta = 1234.5  # verl sets it, with the value of rope_parameters
    callbacks: list[Any] = [mbridge.make_value_model] if value else []
    models = bridge.get_model(
        post_model_creation_callbacks=[*callbacks, mbridge.freeze_moe_router],
        wrap_with_ddp=ddp,
        fp16=config.fp16,
        bf16=config.bf16,
        ddp_config=DDP if ddp else None,
    )
    assert stepping_config(models) is config
    return Role(bridge, models, value)


def _of_megatron_bridge(
    folder: str, dims: ParallelDims, value: bool, ddp: bool, dtype: torch.dtype, further: dict[str, Any]
) -> Role:
    from megatron.core.transformer.enums import AttnBackend

    bridge = megatron_bridge.AutoBridge.from_hf_pretrained(folder, trust_remote_code=False)
    assert bridge
    provider = bridge.to_megatron_provider(load_weights=False)
    overrides = {
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
        "expert_model_parallel_size": dims.ep,
        "expert_tensor_parallel_size": dims.etp,
        "virtual_pipeline_model_parallel_size": dims.vp if dims.vp > 1 else None,
        "context_parallel_size": dims.cp,
        "sequence_parallel": dims.sp,
        "overlap_p2p_comm": dims.vp > 1,
        "batch_p2p_comm": False,
        "variable_seq_lengths": True,
        "attention_backend": AttnBackend.flash,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        **OVERRIDES,
        **further,
    }
    if value and hasattr(provider, "share_embeddings_and_output_weights"):
        overrides["share_embeddings_and_output_weights"] = False
    provider.apply_overrides_and_finalize(dtype=dtype, overrides=overrides)
    hook = megatron_bridge.make_value_model(provider.hidden_size, provider.sequence_parallel)
    for each in [*([hook] if value else []), megatron_bridge.freeze_moe_router]:
        provider.register_pre_wrap_hook(each)
    ddp_config = megatron_bridge.create_ddp_config(
        wrap_with_ddp=ddp, use_distributed_optimizer=True, use_megatron_fsdp=False, overrides=DDP
    )
    models = provider.provide_distributed_model(
        wrap_with_ddp=ddp, ddp_config=ddp_config, fp16=provider.fp16, bf16=provider.bf16, use_megatron_fsdp=False
    )
    assert stepping_config(models) is provider
    return Role(bridge, models, value)


def rlinf_config(hf: Any, dims: ParallelDims, **customized: Any) -> Any:
    """The config of RLinf 0.3.0 from an HF config and its example with ``mbridge: True``, in fp32."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.utils import init_method_normal, scaled_init_method_normal

    num_experts, experts = getattr(hf, "num_experts", None), getattr(hf, "moe_intermediate_size", None)
    if hf.model_type == "mixtral":  # RLinf does not look for these names
        num_experts, experts = hf.num_local_experts, hf.intermediate_size
    config = TransformerConfig(
        **{name: value for name, value in dims.to_config_fields().items() if "layout" not in name},
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        ffn_hidden_size=experts or hf.intermediate_size,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2" or getattr(hf, "attention_bias", False),
        qk_layernorm=hf.model_type in ("qwen3", "qwen3_moe"),
        layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        num_moe_experts=num_experts,
        moe_ffn_hidden_size=experts,
        moe_router_topk=getattr(hf, "num_experts_per_tok", 2),
        moe_router_load_balancing_type="aux_loss",
        moe_token_dispatcher_type="alltoall",
        init_method=init_method_normal(0.02),
        output_layer_init_method=scaled_init_method_normal(0.02, num_layers=hf.num_hidden_layers),
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        variable_seq_lengths=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    for name, value in customized.items():
        setattr(config, name, value)
    return config


def become_rlinfs(provider: Any, config: Any) -> None:
    """Set the attributes that RLinf sets on a provider: every field of RLinf's config, and then others."""
    kept = provider.position_embedding_type
    for each in dataclasses.fields(type(provider)):
        if hasattr(config, each.name):
            setattr(provider, each.name, getattr(config, each.name))
    provider.mrope_section, provider.position_embedding_type = [16, 24, 24], kept
    provider.freeze_language_model = provider.freeze_vision_model = provider.freeze_vision_projection = False


def violations(stream: Iterator[tuple[str, Tensor]], truth: dict[str, Tensor] | None) -> tuple[list[str], list[Any]]:
    """Properties of a stream of weights that break a consumer of verl, and the stream's order, shapes and dtypes."""
    found, order, kept = [], [], {}
    offset = 0
    for name, tensor in stream:
        if name in kept:
            found.append(f"{name} came twice")
        if not tensor.is_contiguous():
            found.append(f"{name} is not contiguous")
        if tensor.requires_grad or tensor.grad_fn is not None:
            found.append(f"{name} is attached")
        if offset % tensor.element_size():
            found.append(f"{name} would start at byte {offset} of a bucket, between its elements")
        offset += tensor.nbytes
        order.append((name, tuple(tensor.shape), str(tensor.dtype)))
        kept[name] = tensor
    for name, tensor in kept.items() if truth is not None else ():  # at the end, to find overwritten tensors
        if name not in truth:
            found.append(f"{name} is not in the checkpoint")
        elif tensor.dtype != truth[name].dtype or not torch.equal(tensor, truth[name]):
            found.append(f"{name} has other bits than the checkpoint")
    found += [f"{name} is missing" for name in (truth or {}) if name not in kept]
    places = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in kept.items())
    overlapping = [b[2] for a, b in itertools.pairwise(places) if b[0] < a[1]]
    return found + [f"{name} shares memory with another" for name in overlapping], order
