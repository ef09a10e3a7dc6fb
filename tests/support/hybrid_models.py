"""A ``HybridModel`` as another trainer builds it: with megatron-core's own stack, which numbers halves of layers."""

import copy
from typing import Any
from unittest import mock

import torch
from transformers import PretrainedConfig

from mcore_bridge import ParallelDims
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint
from mcore_bridge.factory.build import own_stages
from mcore_bridge.factory.chunk import building
from mcore_bridge.factory.hybrid_model import pattern_of, stack_spec
from mcore_bridge.factory.modules.mixers.mamba_mixer import mamba_spec
from mcore_bridge.factory.modules.torch_modules import Norm

SAME = (
    *("vocab_size", "max_sequence_length", "share_embeddings_and_output_weights"),
    *("position_embedding_type", "rotary_base", "rotary_percent"),
)
"""The arguments that it shares with our model."""


def built_elsewhere(
    hf: PretrainedConfig,
    dims: ParallelDims,
    *,
    pattern: str | None = None,
    device: str = "cpu",
    overrides: dict[str, Any] | None = None,
) -> Any:
    """This rank's only chunk, with random values. Our norm replaces its final norm, which needs TransformerEngine.

    Args:
        pattern: its layers, which ``|`` cuts into stages. None: the layers of our model, cut between whole layers.
        overrides: as for ``build_model``.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.transformer import ModuleSpec

    asked: dict[str, Any] = {"dims": dims, "dtype": torch.float32, "device": device, "backend": "torch"}
    blueprint = make_blueprint(hf, BuildOptions(**asked, model="hybrid", overrides=overrides))
    pattern = pattern or pattern_of(blueprint)
    (stage,) = own_stages(blueprint)
    every = ParallelDims().stages(blueprint.config.num_layers)[0]
    submodules = copy.copy(stack_spec(blueprint, every).submodules)
    if (mtp := blueprint.mtp_block_spec(stage)) is not None:
        mtp.layer_specs[0].submodules.mtp_model_layer = None  # its layers are built like layers of the decoder
        submodules.mtp_block_spec = mtp
    for own in vars(submodules).values():
        if isinstance(own, ModuleSpec):
            own.module, own.params = own.module.__mro__[1], {}
    mixer = MambaLayerSubmodules(norm=Norm, mixer=mamba_spec("torch"), mamba_bda=get_bias_dropout_add)
    submodules.mamba_layer = ModuleSpec(MambaLayer, submodules=mixer)
    config = blueprint.config
    config.num_layers = len(pattern.partition("/")[0].replace("|", ""))  # Megatron sets it, too
    vars(config).pop("layer_kinds", None)
    with building(blueprint, seed=1, initialise=device != "meta"), mock.patch.object(hybrid_block, "TENorm", Norm):
        return HybridModel(
            config,
            ModuleSpec(hybrid_block.HybridStack, submodules=submodules),
            hybrid_layer_pattern=pattern,
            pre_process=stage.embedding,
            post_process=stage.loss,
            **{each: blueprint.gpt_arguments[each] for each in SAME if each in blueprint.gpt_arguments},
        )
