"""The stages that megatron-core's own functions build for a split of a pipeline, on every rank and virtual stage."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mcore_bridge.config.mesh.pipeline import Stage

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


@contextlib.contextmanager
def _being(pp_rank: int, *, pp: int, vp: int) -> Iterator[None]:
    from megatron.core import parallel_state as state

    state.set_pipeline_model_parallel_rank(pp_rank)
    state.set_pipeline_model_parallel_world_size(pp)
    state.set_virtual_pipeline_model_parallel_world_size(vp if vp > 1 else None)
    try:
        yield
    finally:
        state.set_pipeline_model_parallel_rank(None)
        state.set_pipeline_model_parallel_world_size(None)
        state.set_virtual_pipeline_model_parallel_world_size(None)


def _config(split: dict[str, Any], num_layers: int) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=split["pp"],
        virtual_pipeline_model_parallel_size=split["vp"] if split["vp"] > 1 else None,
        pipeline_model_parallel_layout=split.get("layout"),
        **{name: split[name] for name in (FIRST, LAST, EMBEDDING, LOSS) if name in split},
    )


def megatron_stage(config: Any, pp_rank: int, vp_stage: int, *, pp: int, vp: int) -> Stage:
    from megatron.core import parallel_state as state
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    with _being(pp_rank, pp=pp, vp=vp):
        stage = vp_stage if vp > 1 else None
        num, offset = get_num_layers_to_build(config, stage), get_transformer_layer_offset(config, stage)
        embedding = state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        loss = state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    if config.pipeline_model_parallel_layout is not None:  # it also places the embedding and the loss
        held = config.pipeline_model_parallel_layout.layout[pp_rank][vp_stage]
        assert (embedding, loss) == (LayerType.embedding in held, LayerType.loss in held)
    return Stage(pp_rank, vp_stage, range(offset, offset + num), embedding, loss)


def megatron_stages(split: dict[str, Any], num_layers: int) -> tuple[Stage, ...] | None:
    """The stages of all ranks. None: megatron-core refuses or crashes, or would build another model."""
    pp, vp = split["pp"], split["vp"]
    try:
        config = _config(split, num_layers)
        stages = tuple(megatron_stage(config, p, v, pp=pp, vp=vp) for v in range(vp) for p in range(pp))
    except (AssertionError, ValueError, ZeroDivisionError):
        return None
    return stages if _obeys_the_law(stages, num_layers) else None


def _obeys_the_law(stages: tuple[Stage, ...], num_layers: int) -> bool:
    layers = [layer for stage in stages for layer in stage.layers]
    first, last = [s.embedding for s in stages], [s.loss for s in stages]
    return layers == list(range(num_layers)) and first.index(True) == 0 == last[::-1].index(True) == sum(first) - sum(
        last
    )
