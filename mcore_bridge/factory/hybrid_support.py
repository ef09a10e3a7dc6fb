"""Checks whether a model can be megatron-core's ``HybridModel`` in place of a ``GPTModel``.

In a ``HybridModel`` each half of an HF layer is a separate layer: attention or a mixer, or an MLP or experts. Each kind
has a letter, and all layers with one letter are built from one spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mcore_bridge.config.layer_kinds import SECOND, layer_config, letters_of, selects_keys, shares_selection
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import is_unrotated
from mcore_bridge.installed import Release

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    from mcore_bridge.architecture import Architecture

MODELS = ("gpt", "hybrid")
_ONLY_GPT = {"C": "short convolutions", "K": "Kimi delta attention"}
RELEASE = Release("0.19", "earlier releases have no HybridModel")


def check_model(model: str) -> None:
    """Raises ``ConfigError`` unless ``model`` is valid, and the installed megatron-core has the class."""
    if model not in MODELS:
        raise ConfigError(f"model must be one of {', '.join(MODELS)}, found {model!r}: pass one of them")
    if model == "hybrid":
        RELEASE.require('model="hybrid"')


def require_hybrid(architecture: Architecture, config: TransformerConfig, *, positions: object, vision: str) -> None:
    """Raises ``ConfigError`` with all the reasons for which a model cannot be a ``HybridModel``.

    Args:
        architecture: the architecture of the model.
        config: its config.
        positions: the ``position_embedding_type`` of a ``GPTModel``.
        vision: as for ``build_model``.
    """
    if reasons := list(_obstacles(architecture, config, positions, vision)):
        raise ConfigError(
            f'{architecture.model_type} cannot be built with model="hybrid": {"; ".join(reasons)}. Use model="gpt", '
            "which builds it."
        )


def _obstacles(architecture: Architecture, config: TransformerConfig, positions: object, vision: str) -> Iterator[str]:
    from mcore_bridge.factory.modules.streams import has_streams

    if hasattr(config, "draft"):
        yield "a draft head is a GPTModel of one layer"
    if architecture.model or architecture.layer_spec:
        yield "its architecture has a special model or layer spec, which is made for GPTModel"
    if getattr(config, "parallel_norms", None):
        yield "its MLP and attention read the same input, and in a HybridModel the MLP reads the output of attention"
    if not getattr(config, "norm_weight", True):
        yield "its norms have no weights, and the final norm of megatron-core's HybridModel has one"
    if has_streams(config):
        yield "its residual has several streams, and the final norm of megatron-core's HybridModel does not merge them"
    if selects_keys(vars(config)):
        yield "its attention has our indexers, which select keys, and nobody has tried these in a HybridModel"
    if getattr(config, "residual_convolutions", False):
        yield "convolutions behind an MLP read the packed sequences of attention, and a HybridModel sets both apart"
    if positions not in ("rope", "none"):
        yield f"HybridModel has no positions of the type {positions!r}"
    if vision != "text_only":
        yield "its models of images need the forward of GPTModel; vision='text_only' needs none"
    layout = config.pipeline_model_parallel_layout
    if config.mtp_num_layers and layout is not None and not _with_loss(layout):
        yield (
            "HybridModel computes MTP layers only in the stage of the loss, and the layout puts them into another stage"
        )
    if getattr(config, "mla_down_proj_fusion", False):
        yield "HybridModel exchanges modules for mla_down_proj_fusion; leave it out"
    letters = letters_of(config)
    if len({getattr(layer_config(config, number), "norm_placement", "") for number in range(config.num_layers)}) > 1:
        yield "its MLPs have norms before or after them, and HybridModel builds them all from one spec"
    for letter, name in _ONLY_GPT.items():
        if any(letter in kind for kind in letters):
            yield f"its layers have {name}, and HybridModel has no layer for them"
    if any(len(set(kind) - SECOND) > 1 for kind in letters):
        yield "its layers have a mixer beside attention, and in a HybridModel the second reads the output of the first"
    yield from _differences(config, letters)


def _with_loss(layout: PipelineParallelLayerLayout) -> bool:
    """Whether a layout puts all MTP layers into the stage of the loss."""
    from megatron.core.transformer.enums import LayerType

    stages = [stage for rank in layout.layout for stage in rank]
    return all(LayerType.loss in stage for stage in stages if LayerType.mtp in stage)


def _differences(config: TransformerConfig, letters: tuple[str, ...]) -> Iterator[str]:
    """Yield the differences between attention layers of one kind. Everything else is equal in all layers."""
    first: dict[str, dict[str, object]] = {}
    differing = set()
    for number, kind in enumerate(letters):
        for letter in set(kind) & set("*+D"):
            own = _own_of_layer(config, number)
            known = first.setdefault(letter, own)
            differing |= {name for name, value in own.items() if value != known[name]}
    if differing:
        yield (
            f"its attention layers differ in {', '.join(sorted(differing))}, and HybridModel builds them all from "
            "one spec"
        )


def _own_of_layer(config: TransformerConfig, number: int) -> dict[str, object]:
    """The settings of attention that may differ for layer ``number`` (from 0), by a description."""
    from megatron.core.transformer.utils import is_layer_window_attention

    chunks = getattr(config, "attention_chunks", None)
    freq = getattr(config, "dsa_indexer_topk_freq", None)
    own = layer_config(config, number)
    return {
        "sizes": (own.num_attention_heads, own.num_query_groups, own.kv_channels, own.ffn_hidden_size),
        "inputs": getattr(config, "layer_input_size", None) and number,
        "shared keys": getattr(own, "keys_of_layer", None),
        "windows": is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number + 1),
        "ropes": is_unrotated(config, number),
        "chunks": chunks[number] if chunks else 0,
        "indexers": freq is not None
        and shares_selection(number, freq=freq, offset=config.dsa_indexer_skip_topk_offset),
    }
