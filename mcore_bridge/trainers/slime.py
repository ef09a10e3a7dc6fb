"""slime's ``load_hf_weights`` and ``convert_to_hf`` with our rules: from an HF folder to parameters, and back one by
one. And a function that builds slime's models from the HF config.

Some HF tensors leave only when all their parameters have come. SGLang fuses ``q_a_proj`` and ``kv_a_proj_with_mqa``
within one load call, and ignores both without an error if it gets them in two calls. And some families have one tensor
for all experts of a layer.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError, ExportError
from mcore_bridge.factory.gpt_inputs import to_transformer_config
from mcore_bridge.factory.supports import supports
from mcore_bridge.factory.vision.tower import tower_specs
from mcore_bridge.rules.mapping import ModelAxes, WeightMapping, axes_of, unstacked
from mcore_bridge.rules.names import TOWER, Numbering
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.trainers.megatron_bridge import AutoBridge
from mcore_bridge.trainers.one_parameter import binding_of
from mcore_bridge.weights.bound import axes_of_config, provenance_on
from mcore_bridge.weights.files.hf_folder import shard_names
from mcore_bridge.weights.load import load_as
from mcore_bridge.weights.model_chunks import chunks_of
from mcore_bridge.weights.provenance import provenance_of
from mcore_bridge.weights.sent.encoding import encoded_tensors, joined_with
from mcore_bridge.weights.source.weight_format import is_linear, weight_format

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

Named = tuple[str, Tensor]

logger = logging.getLogger(__name__)

_PREFIX = re.compile(r"^(?:module\.)+(?:language_model\.)?")
"""Prefixes of wrappers, and of the ``GPTModel`` inside slime's own models of images."""
_LATENT = re.compile(r"(?P<attention>.+)\.(?:q_a_proj|kv_a_proj_with_mqa)\.weight")
_ROUTING = "slime.backends.megatron_utils.update_weight.expert_routing"
_HELD: dict[str, dict[str, _Group]] = {}
"""The tensors that are kept until others come, by HF folder and the first name of their group."""
_LOCK = threading.Lock()
"""slime's converter of files calls from several threads."""
RUNTIME = {
    **{
        name: name
        for name in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
            *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
            *("sequence_parallel", "cp_comm_type", "tp_comm_overlap", "overlap_p2p_comm"),
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
            "pipeline_model_parallel_layout",
            *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
            *("distribute_saved_activations", "attention_backend", "deterministic_mode", "variable_seq_lengths"),
            *("calculate_per_token_loss", "gradient_accumulation_fusion", "moe_token_dispatcher_type"),
            *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "mtp_num_layers", "mtp_loss_scaling_factor"),
        )
    },
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
"""Arguments of Megatron-LM that count in ``model_provider``, each with the field of the config that it sets."""


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
    """Build one chunk from the HF config in ``hf_checkpoint``, for slime's ``--custom-model-provider-path``.

    Of Megatron-LM's arguments only ``RUNTIME`` and the dtype count. The HF config decides everything else.

    Args:
        pre_process, post_process: whether the caller expects the embedding, and the output layer, in this stage.
        vp_stage: the virtual stage; None means the current one of ``parallel_state``.

    Raises:
        ConfigError: the family is not supported, or an argument contradicts the HF config.
        MeshError: the arguments split the pipeline in another way than megatron-core's groups.
    """
    from megatron.training.global_vars import get_args

    args = get_args()
    bridge = AutoBridge.from_hf_pretrained(args.hf_checkpoint, dtype=args.params_dtype)
    provider = bridge.to_megatron_provider(load_weights=False)
    for name, field_name in RUNTIME.items():
        if hasattr(args, name):
            setattr(provider, field_name, getattr(args, name))
    provider.batch_p2p_comm = not provider.overlap_p2p_comm  # as Megatron-LM
    chunk = provider.provide(pre_process, post_process, vp_stage)
    del chunk.bridge_built  # slime gives a critic another output layer
    return chunk


def supports_hf_weight_loading(path: str | os.PathLike[str]) -> bool:
    """Whether ``load_hf_weights`` has the weight rules of the model in an HF folder. If not, it logs the reason.

    Example:
        >>> supports_hf_weight_loading("path/of/gemma-3-1b-it")
        True
    """
    support = supports(path)
    if not support:
        logger.warning("%s cannot be loaded into megatron-core: %s", path, support.reason)
    return bool(support)


def load_hf_weights(args: Any, model: Sequence[nn.Module], path: str | os.PathLike[str]) -> None:
    """Copy the weights of an HF folder into slime's chunks, with the signature of slime 0.3.1.

    Each rank reads its slices only. Weights may be encoded. A critic's head keeps its values if the folder lacks it.

    Args:
        args: without effect, since the chunks have their sizes.
        model: this rank's chunks, wrapped or not.
        path: an HF folder.

    Raises:
        ConfigError: the family is not supported.
        CheckpointError: the folder lacks a tensor of the model, or has one that does not fit.
        MappingError: the model has a parameter under a name that megatron-core does not use.
    """
    chunks = chunks_of(model)
    outputs = (getattr(chunk, "output_layer", None) for chunk in chunks)
    scores = [layer for layer in outputs if layer is not None and getattr(layer, "out_features", None) == 1]
    provenance = provenance_on(model, path, "value" if scores else "lm")
    load_as(model, provenance, path, dtype=chunks[0].config.params_dtype)


def needs_all_experts(args: Any) -> bool:
    """Whether HF files of the model have one tensor for all experts of a layer, as of gpt_oss.

    A rank must then convert all experts of a layer, so slime must not send experts point to point.

    Args:
        args: slime's arguments, of which ``hf_checkpoint`` is read.
    """
    return _known(str(args.hf_checkpoint), getattr(args, "mtp_num_layers", None) or 0, False).has_stacks


def convert_to_hf(
    args: Any,
    model_name: str,
    name: str,
    param: Tensor,
    quantization_config: Mapping[str, Any] | None = None,
    transform_ue8m0: bool = True,
) -> list[Named]:
    """HF names and tensors of one parameter, with the signature of slime 0.3.1.

    Some HF tensors leave only with the last parameter of their group. Groups are ``q_a_proj`` and
    ``kv_a_proj_with_mqa`` of a layer, and the experts of a layer if HF has one tensor for all of them. If a pass over
    the parameters lacks one of a group, the others do not leave, and the next pass raises.

    Args:
        args: slime's arguments. Only ``hf_checkpoint``, the HF folder of the model, and ``mtp_num_layers`` are read.
        model_name: without effect.
        name: the name of the parameter in a ``GPTModel``, with global numbers of layers and experts, and with wrappers.
            Parameters of slime's own models of images have their HF names.
        param: the whole parameter, gathered over tensor parallelism. A padded vocabulary is cut.
        quantization_config: of the engine's folder, as in its config.json. If ``hf_checkpoint`` has encoded weights,
            its format is used, and scales that still fit are kept. None: tensors are plain.
        transform_ue8m0: without effect. Scales are those of files; an engine that packs them does so itself.

    Returns:
        New, contiguous tensors; none for a head that is tied to the embedding, and none while a group waits.

    Raises:
        ConfigError: the format is not supported; or slime may send experts point to point, although the family needs
            all of them. Or the parameter belongs to an adapter or to a ``HybridModel``.
        ExportError: a parameter came again before the others of its group. All tensors that were kept for this folder
            are dropped, so that a new pass can start.
        MappingError: no rule has this name, or the shape does not fit.
    """
    folder = str(args.hf_checkpoint)
    name = _PREFIX.sub("", name)
    model = _known(folder, getattr(args, "mtp_num_layers", None) or 0, name.startswith(TOWER))
    if name.startswith("model.") and model.mapping.is_not_built(name):
        return [(name, param.detach().clone(memory_format=torch.contiguous_format))]
    binding = binding_of(name, model.mapping, model.numbering, "iter_hf_weights")
    if not binding.exported:
        return []
    parts = (~binding.layout)((param.detach()[None],), {**axes_of(binding, model.axes), "padded_vocab": param.shape[0]})
    names = (*binding.hf, *binding.copies)
    parts = (*parts, *(parts[0] for _ in binding.copies))
    pairs = [(hf, part.clone(memory_format=torch.contiguous_format)) for hf, part in zip(names, parts, strict=True)]
    members = model.members_with(names[0])
    if is_linear(binding.mcore):
        pairs = _encoded(pairs, len(members), folder, quantization_config)
    return _together(folder, members, names[0], pairs) if members else pairs


def _encoded(pairs: list[Named], stack: int, folder: str, note: Mapping[str, Any] | None) -> list[Named]:
    """The codes and scales of whole weights, in the format of the folder, or else by the description ``note``."""
    has_files = note is not None and shard_names(Path(folder))
    form = weight_format("as_published" if has_files else None, folder)
    if not form.is_encoded:
        form = weight_format(note, folder)
    whole = {unstacked(name): tensor for name, tensor in pairs}
    scheme = form.scheme_for(
        TensorSpec(name, tuple(tensor.shape) if number is None else (stack, *tensor.shape), tensor.dtype)
        for (name, number), tensor in whole.items()
    )
    given = dict(pairs)
    encoded: list[Named] = []
    for name, tensor in pairs:
        experts = 0 if unstacked(name)[1] is None else stack
        alike = given.keys() & joined_with(name, scheme)
        joined = {other: given[other].float().abs().amax() for other in alike}
        encoded += encoded_tensors(name, tensor, scheme, form, stack=experts, joined=joined)
    return encoded


@dataclass(slots=True)
class _Group:
    """HF tensors that leave together, and the parameters of which have come."""

    came: set[str] = field(default_factory=set)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, pairs: Sequence[Named], count: int) -> None:
        """Keep tensors. Each of the ``count`` experts is written into the tensor of all."""
        for name, tensor in pairs:
            whole, number = unstacked(name)
            if number is None:
                self.tensors[name] = tensor
                continue
            if whole not in self.tensors:
                self.tensors[whole] = tensor.new_empty((count, *tensor.shape))
            self.tensors[whole][number].copy_(tensor)


def _together(folder: str, members: Sequence[str], own: str, pairs: Sequence[Named]) -> list[Named]:
    """All tensors of a group if ``own`` is the last of its ``members`` to come; else keep ``pairs``.

    Raises:
        ExportError: ``own`` has already come. Then all groups of the folder are dropped.
    """
    with _LOCK:
        held = _HELD.setdefault(folder, {})
        group = held.setdefault(members[0], _Group())
        if own in group.came:
            held.clear()
            missing = [name for name in members if name not in group.came]
            others = f" and {len(missing) - 1} others" if missing[1:] else ""
            raise ExportError(
                f"expected {missing[0]}{others}, found {own} a second time: engines need all of them in one call, and "
                "a pass over the parameters passes each once. An earlier pass ended before them, or left them out: "
                "pass all, and begin this pass again. All tensors that were kept are dropped"
            )
        group.came.add(own)
        group.add(pairs, len(members))
        if len(group.came) < len(members):
            return []
        del held[members[0]]
        return [*group.tensors.items()]


@dataclass(frozen=True, slots=True)
class _Model:
    """The names and sizes of the parameters of a model without parallelism."""

    mapping: WeightMapping
    axes: ModelAxes
    numbering: Numbering
    has_latent_queries: bool
    """Whether queries have latents. Otherwise only keys and values have latents, and nothing has to be kept."""
    has_stacks: bool
    """Whether HF has one tensor for all experts of a layer."""

    def members_with(self, hf: str) -> tuple[str, ...]:
        """The names that leave together with an HF name, itself included; empty if it leaves alone.

        Raises:
            ConfigError: all experts of a layer are needed, and slime may send them to different ranks.
        """
        whole, number = unstacked(hf)
        if number is not None:
            _require_all_experts()
            return _entries(whole, len(self.numbering.experts))
        latent = _LATENT.fullmatch(hf) if self.has_latent_queries else None
        if latent is None:
            return ()
        return tuple(f"{latent['attention']}.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa"))


@functools.lru_cache
def _entries(whole: str, count: int) -> tuple[str, ...]:
    return tuple(f"{whole}[{number}]" for number in range(count))


def _require_all_experts() -> None:
    """Raise unless slime's module that sends experts point to point asks ``needs_all_experts``, or is not in use."""
    routing = sys.modules.get(_ROUTING)
    if routing is not None and not hasattr(routing, needs_all_experts.__name__):
        raise ConfigError(
            "this family has one tensor for all experts of a layer, and slime may send a rank only some of them: let "
            f"_can_route_experts in {_ROUTING.replace('.', '/')}.py ask needs_all_experts(args), as "
            "docs/trainers/slime.md shows"
        )


@functools.cache
def _known(folder: str, mtp: int, vision: bool) -> _Model:
    """The model of an HF folder, read once."""
    provenance = provenance_of(folder)
    if vision and provenance.whole is not None:
        provenance = provenance.seeing("train", tower_specs(provenance.whole, torch.bfloat16))
    mapping = provenance.mapping(tied=bool(provenance.hf.tie_word_embeddings), mtp=mtp, expert_format="split")
    config = to_transformer_config(folder)
    axes = axes_of_config(config, vocab=provenance.hf.vocab_size, padded_vocab=provenance.hf.vocab_size)
    layers, experts = tuple(range(config.num_layers)), tuple(range(config.num_moe_experts or 0))
    latent_queries = bool(getattr(provenance.hf, "q_lora_rank", None))
    has_stacks = any(name.endswith("[*]") for rule in mapping.rules for name in rule.hf)
    return _Model(mapping, axes, Numbering(layers, experts, tuple(range(len(layers)))), latent_queries, has_stacks)
