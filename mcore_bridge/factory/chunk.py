"""Builds a chunk: the ``GPTModel`` of one stage. Modules that megatron-core cannot build are replaced afterwards.

It also sets attributes of parameters that megatron-core's optimizer reads and that megatron-core 0.16 does not set.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mcore_bridge.batches.rows import take_padded_rows
from mcore_bridge.errors import ConfigError, MeshError
from mcore_bridge.factory.hybrid_model import build_hybrid
from mcore_bridge.factory.modules.output_layers import (
    bias_output_layer,
    hide_padding,
    initialise_head,
    order_gradient,
    replace_output_layer,
)
from mcore_bridge.factory.mtp_specs import initialise_mtp
from mcore_bridge.factory.vision.tower import build_tower
from mcore_bridge.weights.model_tensors import note_built
from mcore_bridge.weights.transfer.copier import compiling

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from mcore_bridge.config.mesh.pipeline import Stage
    from mcore_bridge.factory.blueprint import Blueprint


@contextlib.contextmanager
def building(blueprint: Blueprint, *, seed: int, initialise: bool) -> Iterator[None]:
    """In the block, new parameters are on the blueprint's device. With ``initialise`` they get values from ``seed``."""
    from accelerate import init_empty_weights
    from megatron.core import parallel_state, tensor_parallel

    device = blueprint.device
    on_cpu = device.type != "cuda"
    blueprint.config.use_cpu_initialization = on_cpu  # allocates on the default device, which may be meta
    blueprint.config.perform_initialization = initialise and device.type != "meta"
    with contextlib.ExitStack() as stack:
        if device.type == "meta":
            stack.enter_context(init_empty_weights(include_buffers=True))
        elif not on_cpu:
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(compiling(device))  # compiles the copy kernel at the same time, for the first export
        if blueprint.config.perform_initialization:
            stack.enter_context(torch.random.fork_rng(devices=[] if on_cpu else [torch.cuda.current_device()]))
            seed += 100 * parallel_state.get_pipeline_model_parallel_rank()  # like megatron.training
            torch.manual_seed(seed)
            if not on_cpu and not tensor_parallel.get_cuda_rng_tracker().is_initialized():
                tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield


def build_chunk(blueprint: Blueprint, stage: Stage, *, seed: int) -> GPTModel:
    """Builds the chunk of a stage; call it inside ``building``. Nothing else constructs a ``GPTModel``.

    For tied embeddings, the constructor of mcore runs a collective between the first and the last stage. It is needed
    only for random initial values, and impossible without storage, so otherwise the group is hidden from it.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    without_tie = copy.copy(groups)
    without_tie.embd = None
    construct = build_hybrid if blueprint.options.model == "hybrid" else _build_gpt
    try:
        with _fitting_tables(blueprint.config):
            model = construct(blueprint, stage, groups if blueprint.config.perform_initialization else without_tie)
    except (ArithmeticError, AssertionError) as error:
        raise ConfigError(
            f"megatron-core must be able to build the layers of {stage}, found: {error}; choose other sizes or a "
            "smaller tp="
        ) from error
    if blueprint.device.type == "cuda":  # mcore makes routers and their biases on CPU
        model.to(blueprint.device)
    model.pg_collection.embd = model.embd_group = groups.embd
    # once for both halves of a layer
    built = [*dict.fromkeys(layer.layer_number - 1 for layer in model.decoder.layers)]
    if built != list(stage.layers):
        raise MeshError(
            f"megatron-core must build the layers {list(stage.layers)} for {stage}, found {built}: please report this "
            "with your ParallelDims"
        )
    _finish(model, blueprint, seed=seed)
    return model


@contextlib.contextmanager
def _fitting_tables(config: TransformerConfig) -> Iterator[None]:
    """Let megatron-core make its tables of yarn (which we replace) for a length that it can cut for CP ranks."""
    name, parts = "original_max_position_embeddings", 2 * config.context_parallel_size
    length = getattr(config, name, None)  # only configs of latent attention have it
    if length is not None:
        setattr(config, name, -(-length // parts) * parts)
    try:
        yield
    finally:
        if length is not None:
            setattr(config, name, length)


def _build_gpt(blueprint: Blueprint, stage: Stage, groups: ProcessGroupCollection) -> Any:
    from megatron.core.models.gpt import GPTModel

    from mcore_bridge.factory.modules.draft_heads import head_class

    model_class: Any = blueprint.architecture.model or head_class(blueprint.config) or GPTModel
    return model_class(
        config=blueprint.config,
        transformer_layer_spec=blueprint.block_spec(stage.layers),
        mtp_block_spec=blueprint.mtp_block_spec(stage),
        pre_process=stage.embedding,
        post_process=stage.loss,
        vp_stage=blueprint.vp_stage(stage),
        pg_collection=groups,
        **blueprint.gpt_arguments,
    )


def _finish(chunk: GPTModel, blueprint: Blueprint, *, seed: int) -> None:
    """Add modules that mcore cannot build (rope, dropout, scales, small heads), and set the provenance."""
    from mcore_bridge.factory.modules.layer_inputs import add_layer_inputs
    from mcore_bridge.factory.modules.layer_rope import both_ropes
    from mcore_bridge.factory.modules.multipliers import cap_logits, scale_embedding, scale_logits
    from mcore_bridge.factory.modules.ngram_inputs import give_ngrams
    from mcore_bridge.factory.modules.norms import norm_embedding
    from mcore_bridge.factory.modules.root_router import give_tokens
    from mcore_bridge.factory.modules.rotary import replace_rotary, take_lengths
    from mcore_bridge.factory.modules.selection import drop_selection
    from mcore_bridge.factory.modules.shared_keys import join_shared_keys
    from mcore_bridge.factory.modules.streams import begin_and_end_streams

    bias_output_layer(chunk)
    order_gradient(chunk)
    add_layer_inputs(chunk)
    join_shared_keys(chunk)
    drop_selection(chunk)
    give_tokens(chunk)
    give_ngrams(chunk)
    mark_cut(chunk)
    mark_experts(chunk)
    replace_rotary(chunk)
    both_ropes(chunk)
    norm_embedding(chunk)
    scale_embedding(chunk)
    begin_and_end_streams(chunk)
    scale_logits(chunk)
    cap_logits(chunk)
    if chunk.pre_process and (dropped := getattr(blueprint.config, "embedding_dropout", None)) is not None:
        chunk.embedding.embedding_dropout.p = dropped
    hide_padding(chunk, getattr(blueprint.config, "unpadded_vocab_size", None) or blueprint.config.hf_vocab_size)
    replace_output_layer(chunk, blueprint.hf, head=blueprint.provenance.head)
    initialise_head(chunk, seed)
    initialise_mtp(chunk, seed)
    if blueprint.provenance.tower:
        _add_images(chunk, blueprint, seed)
    elif blueprint.provenance.whole is not None:
        take_padded_rows(chunk)
    take_lengths(chunk)
    chunk.bridge = blueprint.provenance
    note_built(chunk)


def _add_images(chunk: GPTModel, blueprint: Blueprint, seed: int) -> None:
    """Give the first stage a tower. Later stages compute positions like transformers, without a tower."""
    from mcore_bridge.factory.vision.image_hook import see

    whole = blueprint.provenance.whole
    assert whole is not None
    if chunk.pre_process:
        chunk.vision = composite = _tower(blueprint, seed)
    else:
        composite = build_tower(whole, dtype=blueprint.dtype, device=torch.device("meta"))
    see(chunk, composite)


def _tower(blueprint: Blueprint, seed: int) -> nn.Module:
    """The tower of a composite, with equal values on all ranks that draw them from the same seed."""
    whole, initialise = blueprint.provenance.whole, blueprint.config.perform_initialization
    assert whole is not None
    with torch.random.fork_rng(devices=[blueprint.device] if blueprint.device.type == "cuda" else []):
        torch.manual_seed(seed)
        tower = build_tower(whole, dtype=blueprint.dtype, device=blueprint.device, initialise=initialise)
    return tower.requires_grad_(blueprint.provenance.vision == "train")


def mark_cut(chunk: GPTModel) -> None:
    """Mark the parameters that tensor parallelism cuts: otherwise the norm of gradients counts only the first rank.

    megatron-core 0.16.1 marks them only while it draws initial values, which a loaded model skips; 0.19.2 always does.
    All experts are marked: if etp is smaller than tp, tensor-parallel ranks hold different ones.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    for name, module in chunk.named_modules():
        # TransformerEngine also marks whole parameters. Overlapped shared experts look whole, but are cut.
        if getattr(module, "parallel_mode", "") is None and ".shared_experts." not in name:
            for parameter in module.parameters(recurse=False):
                parameter.tensor_model_parallel, parameter.partition_dim = False, -1
        elif isinstance(module, VocabParallelEmbedding | ColumnParallelLinear):
            _mark(module.weight, 0)
            if name == "output_layer":
                _mark(module.bias, 0)
        elif isinstance(module, RowParallelLinear):
            _mark(module.weight, 1)
    for name, parameter in chunk.named_parameters():
        if ".experts." in name or name.endswith(".softmax_offset"):
            _mark(parameter, 1 if ".linear_fc2.weight" in name else 0)


def _mark(parameter: nn.Parameter | None, dim: int) -> None:
    if parameter is not None and not getattr(parameter, "tensor_model_parallel", False):
        parameter.tensor_model_parallel, parameter.partition_dim = True, dim  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]


def mark_experts(chunk: GPTModel) -> None:
    """Mark whether gradients of experts are summed over the data-parallel ranks of experts, or over all of them.

    megatron-core 0.16.1 marks them only for ep > 1. But if etp is smaller than tp, tensor-parallel ranks run different
    tokens through one set of experts, and these gradients would not be summed. 0.19.2 also marks them in this case.
    """
    config = chunk.config
    apart = config.expert_model_parallel_size > 1
    apart = apart or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = not apart
