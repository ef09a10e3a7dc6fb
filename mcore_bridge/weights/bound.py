"""Binds the tensors of one rank to their HF names. Loads and exports begin here. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from operator import attrgetter
from typing import TYPE_CHECKING

from torch import Tensor

from mcore_bridge.config.layer_kinds import held_mtp_layers, layer_config
from mcore_bridge.errors import ConfigError, MappingError
from mcore_bridge.rules.adapters import Adapters, is_adapter
from mcore_bridge.rules.dtypes import Dtypes, problem_of, unmatched
from mcore_bridge.rules.mapping import Binding, ExpertFormat, ModelAxes, WeightMapping, axes_of
from mcore_bridge.rules.names import TOWER, expert_of, kind_of, layer_of, mtp_layer_of
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.trace import Shape, Trace, trace
from mcore_bridge.rules.variants import check_head
from mcore_bridge.weights.model_chunks import (
    Models,
    chunks_of,
    is_hybrid,
    learn_layers,
    numbering_of,
    whole_config,
    whole_layers,
)
from mcore_bridge.weights.model_tensors import held_tensors, require_as_built, shapes_of
from mcore_bridge.weights.plan.inventory import Inventory
from mcore_bridge.weights.provenance import HF, Provenance, provenance_of
from mcore_bridge.weights.sent.merging import merges_of, of_values
from mcore_bridge.weights.transfer.endpoints import Merge

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True)
class BoundModel:
    """This rank's tensors by canonical name, and the rules and sizes that give them HF names and shapes."""

    chunks: tuple[GPTModel, ...]
    tensors: Mapping[str, Tensor]
    mapping: WeightMapping
    axes: ModelAxes
    ranks: Mapping[str, int]
    """The rank on each of the axes ``pp``, ``tp`` and ``etp``."""
    merged: bool | None = None
    """Whether adapters are merged into what is exported; None without adapters."""
    merges: Mapping[str, Merge] = field(default_factory=dict)
    """The functions from tensors to what is sent, by canonical name: of quantized tensors, and to merge adapters."""
    is_part: bool = False
    """Whether an export takes only these tensors, and other tensors of the models stay."""

    def exported(self, mcore: str) -> Tensor:
        """The tensor that an export sends for a tensor of this rank: the tensor itself, or a new one."""
        tensor = self.tensors[mcore].detach()
        return self.merges[mcore](tensor) if mcore in self.merges else tensor

    def trace(self, binding: Binding) -> Trace:
        """The trace of the layout of ``binding``, for the tensor that this rank holds under its name.

        Raises:
            MappingError: when the layout does not fit the tensor's shape, or the number of HF names.
        """
        shape = tuple(self.tensors[binding.mcore].shape)
        try:
            traced = trace(binding.layout, shape, axes_of(binding, self.axes))
        except MappingError as error:
            raise MappingError(f"{binding.mcore} does not fit its rule for {list(binding.hf)}: {error}") from None
        if len(traced.part_shapes) != len(binding.hf):
            raise MappingError(
                f"{binding.mcore}: the layout has {len(traced.part_shapes)} parts, and the rule names "
                f"{list(binding.hf)}; make them equally many"
            )
        return traced

    def fingerprint(self) -> tuple[object, ...]:
        """Everything on this rank that a plan depends on. A kept plan is valid while this is equal."""
        held = [*self.shapes.values()], [*map(attrgetter("dtype"), self.tensors.values())]
        return (tuple(self.tensors), held, self.mapping, self.axes, self.ranks, self.merged)

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """The shapes of the tensors. They are read once, since torch makes an object for each."""
        return shapes_of(self.tensors)

    def problem_of(self, dtypes: Dtypes) -> str:
        """Why ``dtypes`` are wrong for this model: their type, or a pattern that matches no tensor; or ""."""
        config = whole_config(self.chunks[0])
        names = self.mapping.names(config.num_layers, config.num_moe_experts or 0)
        if wrong := [] if problem_of(dtypes) else unmatched(dtypes, names):
            return f"dtype= must have patterns of HF names, found {len(wrong)} that match none: {wrong[:8]}; correct it"
        return problem_of(dtypes)

    def inventory(self) -> Inventory:
        """The inventory of this rank, which other ranks need to plan an export."""
        held = tuple(TensorSpec.of(name, tensor) for name, tensor in self.tensors.items())
        return Inventory(self.ranks, held, self.is_part)

    def is_elsewhere(self, mcore: str) -> bool:
        """Whether another rank has the tensor ``mcore`` (a canonical name), which this rank does not hold.

        If this rank cannot decide, the result is True, also for names that no rank has.
        """
        layer, mtp_layer = layer_of(mcore), mtp_layer_of(mcore)
        if layer in self._layers or mtp_layer in self._mtp_layers:
            expert = expert_of(mcore)
            return expert is not None and expert < self.axes["experts"] and kind_of(mcore) in self._kinds
        if mtp_layer is not None:
            return mtp_layer < self.axes["mtp"]
        if layer is not None:
            return layer < whole_config(self.chunks[0]).num_layers
        if mcore.startswith(("embedding.", TOWER)):
            return not any(chunk.pre_process for chunk in self.chunks)
        if mcore.startswith("decoder."):  # the final norm, which gives MTP layers of a later stage their input
            return not any(map(_has_final_norm, self.chunks))
        return not any(chunk.post_process for chunk in self.chunks)

    @cached_property
    def _layers(self) -> frozenset[int]:
        return whole_layers(self.chunks)

    @cached_property
    def _mtp_layers(self) -> frozenset[int]:
        return frozenset(layer for chunk in self.chunks for layer in numbering_of(chunk).mtp)

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset(map(kind_of, self.tensors))


def _has_final_norm(chunk: GPTModel) -> bool:
    decoder = chunk.decoder  # the decoder of a HybridModel has another name for its norm, or no norm
    return getattr(decoder, "final_norm" if is_hybrid(chunk) else "final_layernorm", None) is not None


def adopt(models: Models, hf: HF, *, head: str = "lm") -> None:
    """Attach the HF config to models that ``build_model`` did not make, once, for all functions of this library.

    Nothing is communicated and no weight changes. The first function that communicates compares the ranks.

    Args:
        models: this rank's chunks, one per virtual pipeline stage, wrapped or not.
        hf: their HF config or folder, or a hub name in the local cache. From a folder, its names of tensors are also
            read.
        head: ``"lm"``, ``"value"``, ``"classification"``, ``"process_reward"`` or ``"none"``.

    Raises:
        ConfigError: ``hf`` is no config, no architecture is registered for it, or there is no such head.
        MappingError: ``models`` are no ``GPTModel``; or a ``HybridModel`` has other layers than ``hf`` describes.

    Example:
        >>> mb.adopt(models, "path/of/Qwen3-8B")          # built by your own trainer
        >>> state = mb.to_hf_state_dict(models)
    """
    check_head(head)
    chunks = chunks_of(models)
    provenance = _described(chunks, hf, head)
    for chunk in chunks:
        chunk.bridge = provenance


def _described(chunks: tuple[GPTModel, ...], hf: HF, head: str) -> Provenance:
    """The provenance from ``hf``, with the overrides and the tower of ``build_model``."""
    given, kept = provenance_of(hf, head=head), getattr(chunks[0], "bridge", None)
    learn_layers(chunks, given.hf)
    return given if kept is None else given.with_overridden(kept.overridden).seeing(kept.vision, kept.tower)


def provenance_on(models: Models, hf: HF | None = None, head: str = "lm") -> Provenance:
    """The provenance of models: from ``hf`` and ``head``, or the one that ``build_model`` or ``adopt`` attached.

    Overrides of ``build_model`` count in both cases. On a ``HybridModel`` that another trainer has built, this also
    stores which of its layers are halves of one layer.

    Raises:
        ConfigError: when there is no such head.
        MappingError: when there is neither provenance nor ``hf``; or such a ``HybridModel`` has other layers.
    """
    check_head(head)
    chunks = chunks_of(models)
    if hf is not None:
        return _described(chunks, hf, head)
    kept: Provenance | None = getattr(chunks[0], "bridge", None)
    if kept is None:
        raise MappingError(
            "these models were not made by build_model: call adopt(models, hf) with their HF config or folder first"
        )
    return kept


def bind(
    models: Models,
    provenance: Provenance | None = None,
    *,
    expert_format: ExpertFormat | None = None,
    merged: bool | None = None,
    adapters: Adapters | None = None,
) -> BoundModel:
    """Bind this rank's chunks (wrapped or not) to HF names.

    Args:
        models: the chunks of this rank, one per virtual pipeline stage.
        provenance: the model's HF config and folder; None: ``build_model`` has attached them.
        expert_format: how HF names the experts; None means the format of the checkpoint of the models.
        merged: for models with adapters: True binds merged weights, False the weights of the base.
        adapters: the adapters of the models, to bind only these.

    Raises:
        MappingError: when the provenance is unknown, a chunk is no ``GPTModel`` or has lost a tensor, or chunks with
            adapters are absent.
        ConfigError: when they have adapters, and neither ``merged`` nor ``adapters`` says which tensors are meant.
    """
    provenance = provenance or provenance_on(models)
    chunks = chunks_of(models)
    first = chunks[0]
    groups = first.pg_collection
    mapping = mapping_of(first, provenance, expert_format=expert_format)
    ranks = {"pp": groups.pp.rank(), "tp": groups.tp.rank(), "etp": groups.expt_tp.rank()}
    sizes = axes_of_config(whole_config(first), vocab=provenance.hf.vocab_size, padded_vocab=first.vocab_size)
    axes = sizes | {"mtp": mapping.num_mtp_layers}
    tensors = held_tensors(chunks)
    whole = BoundModel(chunks, tensors, mapping, axes, ranks, merges=of_values(tensors, {}))
    require_as_built(chunks, whole.shapes)
    if not hasattr(first, "bridge_adapters"):
        return whole
    if adapters is None and not isinstance(merged, bool):
        raise ConfigError(
            "these models have adapters, and the base could be mistaken for the trained model: expected merged=True "
            f"for the trained weights or merged=False for the base, found merged={merged!r}. Pass one of them; "
            "iter_hf_adapters yields the adapters alone"
        )
    tensors = {name: tensor for name, tensor in tensors.items() if is_adapter(name) == (adapters is not None)}
    if adapters is not None:
        mapping = adapters.mapping
        if absent := adapters.names - tensors.keys():
            raise MappingError(f"the chunks must have {len(absent)} more adapters, such as {min(absent)}: pass all")
    merges = dict(merges_of(chunks)) if merged and adapters is None else {}
    return BoundModel(chunks, tensors, mapping, axes, ranks, merged, of_values(tensors, merges))


def mapping_of(chunk: GPTModel, provenance: Provenance, *, expert_format: ExpertFormat | None = None) -> WeightMapping:
    """The weight mapping of the model of a chunk."""
    mtp = held_mtp_layers(vars(chunk.config))
    return provenance.mapping(tied=chunk.share_embeddings_and_output_weights, mtp=mtp, expert_format=expert_format)


def axes_of_config(config: TransformerConfig, *, vocab: int, padded_vocab: int) -> ModelAxes:
    """The sizes that layouts need, for a model.

    Args:
        vocab, padded_vocab: rows of the vocabulary, in HF and in mcore.
    """
    model = {
        "tp": config.tensor_model_parallel_size,
        "etp": config.expert_tensor_parallel_size,
        **_head_axes(config),
        "vocab": vocab,
        "padded_vocab": padded_vocab,
        "experts": config.num_moe_experts or 0,
        "gate_up": 2,
        "halves": 2,
        **_latent_axes(config),
        **_linear_axes(config),
        **_mamba_axes(config),
        **_kda_axes(config),
        **_draft_axes(config),
    }
    configs = {number: layer_config(config, number) for number in range(config.num_layers)}
    return ModelAxes(model, {number: _head_axes(own) for number, own in configs.items() if own is not config})


def _head_axes(config: TransformerConfig) -> dict[str, int]:
    """The sizes of attention, of a model or of a layer."""
    groups = config.num_query_groups
    heads = config.num_attention_heads // groups
    axes = {"groups": groups, "heads_per_group": heads}
    if (values := getattr(config, "value_channels", None)) is None:
        return axes
    unit = gcd(keys := config.kv_channels or 0, values)
    return axes | {"query_rows": heads * keys // unit, "key_rows": keys // unit, "value_rows": values // unit}


def _latent_axes(config: TransformerConfig) -> dict[str, int]:
    """The sizes of latent attention; empty if a model has none."""
    if not config.multi_latent_attention:
        return {}
    return {"plain": config.qk_head_dim, "rotated": config.qk_pos_emb_head_dim, "latent": config.kv_lora_rank}


def _linear_axes(config: TransformerConfig) -> dict[str, int]:
    """The sizes of linear attention; empty if a model has none."""
    if config.experimental_attention_variant != "gated_delta_net":
        return {}
    heads = config.linear_num_key_heads
    key, values_per_key = config.linear_key_head_dim, config.linear_num_value_heads // heads
    value = values_per_key * config.linear_value_head_dim
    joined = {"qkv": 2 * key + value, "qkvz": 2 * key + 2 * value, "ba": 2 * values_per_key}
    return {"key_heads": heads, "key": key, "value": value, "value_heads": values_per_key, **joined}


def _mamba_axes(config: TransformerConfig) -> dict[str, int]:
    """The sizes of a Mamba-2 mixer, in the smallest whole numbers of this ratio; empty if a model has none."""
    if not any("M" in kind for kind in getattr(config, "layer_kinds", ())):
        return {}
    heads = config.mamba_num_heads // config.mamba_num_groups
    sizes = {"mamba_inner": heads * config.mamba_head_dim, "mamba_state": config.mamba_state_dim, "mamba_heads": heads}
    unit = gcd(*sizes.values())  # several ranks may share a group
    return {name: size // unit for name, size in sizes.items()}


def _draft_axes(config: TransformerConfig) -> dict[str, int]:
    """The vocabulary of the policy of a draft head; empty for another model."""
    draft, tp = getattr(config, "draft", None), config.tensor_model_parallel_size
    if draft is None:
        return {}
    return {"target_vocab": draft.target_vocab_size, "padded_target_vocab": -(-draft.target_vocab_size // tp) * tp}


def _kda_axes(config: TransformerConfig) -> dict[str, int]:
    """The sizes of Kimi delta attention, in the smallest whole numbers of this ratio; empty if a model has none."""
    if not any("K" in kind for kind in getattr(config, "layer_kinds", ())):
        return {}
    heads, dim = config.linear_num_key_heads, config.linear_key_head_dim
    unit = heads if config.kda_full_rank else gcd(heads, dim)  # several ranks share the rows
    return {"kda_inner": heads * dim // unit, "kda_heads": heads // unit, "kda_dim": dim // unit}
