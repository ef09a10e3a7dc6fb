"""Adds images to a chunk: a forward pre-hook runs the vision tower, and sets token embeddings and positions.

``forward`` keeps its signature, so that trainers may inspect and replace it. The hook takes the inputs of images out of
the call. On the first stage it adds the embeddings of text and images (``decoder_input``), and on every stage the
positions of tokens. transformers' composite computes all of these (``text_stub.py``).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.batches.images import (
    BLOCKS,
    OF_SEQUENCES,
    POSITIONS,
    SHOWN,
    TYPES,
    OfSequences,
    feature_types,
    no_placeholder,
    num_positions,
    token_types,
)
from mcore_bridge.batches.rows import (
    OF_OTHER_PARTS,
    WholeRows,
    as_own_tokens,
    inputs_by_name,
    whole_rows,
    without_images,
)
from mcore_bridge.errors import BatchError
from mcore_bridge.factory.vision.check_features import fitting, misfit
from mcore_bridge.factory.vision.deepstack import at_tokens, carried, take_features
from mcore_bridge.factory.vision.gradient_order import OrderedGradients, gather_parameters, ordered_gradients
from mcore_bridge.factory.vision.image_masks import masks_of, sees_ahead, take_masks
from mcore_bridge.factory.vision.mrope import (
    WITH_NUMBER,
    MultimodalRotary,
    take_positions,
    take_positions_per_row,
    text_positions,
)
from mcore_bridge.factory.vision.text_stub import Embed, TextStub, features_by_set, run_composite

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_PIXELS = "pixel_"
"""The prefix of names of inputs that only the tower reads."""
_SOUND = ("input_features", "feature_", "audio_")
"""Prefixes of names of inputs that only a model of sound reads. Nobody has written the check that they fit a row."""
_TYPES = (TYPES, BLOCKS)
"""Arguments with the type of each token: text (0), of an image (1) or of a video (2)."""


def see(chunk: GPTModel, composite: nn.Module) -> None:
    """Make a chunk take images, in rows or packed, with any form of inputs that ``whole_rows`` supports.

    Args:
        chunk: a chunk of any stage. The chunk of the first stage has the composite as ``vision``.
        composite: transformers' base model, whose language model is ``TextStub``. After the first stage its tower is
            never run, and may be on the meta device.
    """
    stub = composite.language_model
    assert isinstance(stub, TextStub)
    readable = {name for name in _arguments(composite) if name.startswith(OF_OTHER_PARTS)}
    if stub.recompose is not None:
        take_positions(chunk, stub.num_positions, stub.recompose)
        readable.add(POSITIONS)
    if stub.num_positions == WITH_NUMBER:
        take_positions_per_row(composite)
    if getattr(composite.config.vision_config, "deepstack_visual_indexes", ()):  # type: ignore[union-attr]
        take_features(chunk)
    if sees_ahead(composite.config, _arguments(composite)):
        take_masks(chunk)
        composite.config.text_config._attn_implementation = "sdpa"  # type: ignore[union-attr]  # boolean masks
    chunk.image_inputs = frozenset(readable)
    chunk.register_forward_pre_hook(functools.partial(_insert_images, composite), with_kwargs=True)


def _insert_images(
    composite: nn.Module, chunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    inputs, images = without_images(inputs_by_name(chunk, args, kwargs))
    types = [types for name in _TYPES if (types := inputs.pop(name, None)) is not None]
    seen, shown = (inputs.pop(name, None) for name in (OF_SEQUENCES, SHOWN))
    ordered = OrderedGradients({}, None)
    if chunk.pre_process:
        gather_parameters(chunk.vision)
        ordered = ordered_gradients(chunk.vision)
    positions = inputs.get("position_ids")
    explicit = positions if positions is not None and positions.dim() == 3 else None
    if not images and explicit is None:
        return (), _without_features(chunk, as_own_tokens(chunk, inputs), ordered)
    try:
        return (), _with_features(composite, chunk, ordered, inputs, images, types, explicit, seen, shown)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any error of transformers: the other ranks of a pipeline may wait
        problem = misfit(error, None if seen is None else seen.rows)
        if seen is None:
            raise problem from problem.__cause__
        seen.errors.append(problem)  # the other ranks of its pipeline wait for this one
        inputs["input_ids"] = torch.zeros_like(inputs["input_ids"])
        return (), _without_features(chunk, as_own_tokens(chunk, inputs), ordered)


def _with_features(
    composite: nn.Module,
    chunk: Any,
    ordered: OrderedGradients,
    inputs: dict[str, Any],
    images: dict[str, Any],
    types: Sequence[Tensor],
    explicit: Tensor | None,
    seen: OfSequences | None,
    shown: Tensor | None,
) -> dict[str, Any]:
    """The inputs of a microbatch with images, or with given positions."""
    _require_readable(chunk, composite, images)
    group = getattr(inputs.get("packed_seq_params"), "cp_group", None) or chunk.pg_collection.cp
    counts_padding = shown is None or not _is_dynamic(chunk)
    rows = whole_rows(inputs if counts_padding else {**inputs, "attention_mask": shown}, group)
    if explicit is not None:
        positions = rows.whole(explicit[-num_positions(chunk) :].permute(1, 2, 0)).permute(2, 0, 1)
        images = {**images, "position_ids": positions}
    given = rows.whole(types[0]) if types else None
    call = _text_call(chunk, composite, ordered, rows, images, given, seen)
    if not sees_ahead(composite.config, _arguments(composite)):
        call["attention_mask"] = None  # it is causal
    decoded = _decoder_inputs(chunk, ordered, rows, call, inputs.get("packed_seq_params"))
    return {**as_own_tokens(chunk, inputs), **decoded}


def _without_features(chunk: Any, inputs: dict[str, Any], ordered: OrderedGradients) -> dict[str, Any]:
    """The inputs of a microbatch of text: its positions follow from their order, and the tower gets no gradient."""
    ids = inputs["input_ids"]
    if isinstance(getattr(chunk, "rotary_pos_emb", None), MultimodalRotary):
        inputs["position_ids"] = text_positions(chunk, inputs)
    if chunk.pre_process and inputs.get("decoder_input") is None and ordered.token is not None:
        hidden = chunk.embedding(input_ids=ids, position_ids=inputs.get("position_ids"))
        inputs["decoder_input"] = ordered.joined(hidden)
    return inputs


def _is_dynamic(chunk: Any) -> bool:
    """Whether the rope depends on the length (without padding)."""
    rope = getattr(chunk.config, "hf_rope", None)
    return rope is not None and rope.is_dynamic


def _require_readable(chunk: Any, composite: nn.Module, images: Iterable[str]) -> None:
    unknown = [name for name in images if name not in _arguments(composite)]
    if unknown:
        raise BatchError(
            f"inputs of images must be arguments of {type(composite).__name__}, found {', '.join(unknown)}: leave them "
            "out, or use the processor of this model"
        )
    if chunk.config.mtp_num_layers:
        raise BatchError(
            f"mtp_num_layers must be 0 or None for images, found {chunk.config.mtp_num_layers}: MTP layers embed "
            "tokens by themselves and would ignore images. Build without MTP layers"
        )


def _arguments(composite: nn.Module) -> frozenset[str]:
    """The names of the arguments of the composite's ``forward``, without inputs of sound."""
    return _arguments_of(type(composite).forward)


@functools.cache
def _arguments_of(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(name for name in inspect.signature(forward).parameters if not name.startswith(_SOUND))


def _text_call(
    chunk: Any,
    composite: nn.Module,
    ordered: OrderedGradients,
    rows: WholeRows,
    images: dict[str, Any],
    types: Tensor | None,
    seen: OfSequences | None,
) -> dict[str, Any]:
    """The arguments with which transformers would call its language model, for whole rows."""
    types = token_types(composite.config, rows.input_ids) if types is None else types
    counts, everything = None if seen is None else seen.counts, range(len(rows.input_ids))
    run = functools.partial(_run, composite, ordered, rows, types, counts, chunk.config.params_dtype)
    tokens = chunk.bridge_adapter_sets.by_row if hasattr(chunk, "bridge_adapter_sets") else None
    if chunk.pre_process and (tokens is None or seen is None):
        return run(_embedding(chunk), everything, images)
    without_tower = {name: value for name, value in images.items() if not name.startswith(_PIXELS)}
    call = run(None, everything, without_tower)
    if tokens is not None and seen is not None:

        def of_set(number: int, own: Sequence[int], images: dict[str, Any]) -> dict[str, Any]:
            with tokens.in_tower(number):
                return run(_embedding(chunk), own, images)

        call |= features_by_set(tokens.of_rows, seen, len(everything), of_set)
    return call


def _run(
    composite: nn.Module,
    ordered: OrderedGradients,
    rows: WholeRows,
    types: Tensor,
    counts: Sequence[tuple[int, int]] | None,
    params_dtype: torch.dtype,
    embed: Embed | None,
    own: Sequence[int],
    images: dict[str, Any],
) -> dict[str, Any]:
    """The arguments of a call of the language model for some whole rows, ``own``, whose images are given.

    Without ``embed``, only positions and masks have values.
    """
    embed = embed or functools.partial(_nothing, dtype=params_dtype)
    places = torch.tensor(own, device=rows.input_ids.device)
    ids, mask, own_types = (values[places] for values in (rows.input_ids, rows.mask, types))
    dtype = next((parameter.dtype for parameter in composite.parameters()), params_dtype)
    moved = {
        name: _moved(value, ids.device, dtype if name.startswith(_PIXELS) else None) for name, value in images.items()
    }
    moved |= {name: own_types for name in _TYPES if name in _arguments(composite)}
    sampled = (own_types == 0) & (token_types(composite.config, ids) > 0)
    standing = torch.zeros_like(types)
    standing[places] = feature_types(composite.config, ids, own_types).masked_fill(~mask, 0)
    with fitting(composite, standing, counts and [counts[row] if row in own else (0, 0) for row in range(len(counts))]):
        return run_composite(
            composite,
            lambda given: embed(torch.where(sampled, ids, given)),
            ordered.aliases,
            input_ids=ids.masked_fill(sampled, no_placeholder(composite.config)),
            attention_mask=mask.long(),
            use_cache=False,
            **moved,
        )


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device=device, dtype=dtype if value.is_floating_point() else None)


def _nothing(input_ids: Tensor, *, dtype: torch.dtype) -> Tensor:
    """A placeholder for embeddings after the first stage, since positions and masks do not depend on them."""
    return torch.zeros(*input_ids.shape, 1, dtype=dtype, device=input_ids.device)


def _embedding(chunk: Any) -> Embed:
    """The chunk's embedding, for whole rows ``[b, s]`` to ``[b, s, hidden]``, without the cut of sequence parallelism.

    It consists of shallow copies, which share parameters and hooks.
    """
    whole = copy.copy(chunk.embedding)
    whole._modules = dict(whole._modules)
    whole.word_embeddings = copy.copy(whole.word_embeddings)
    whole.scatter_to_sequence_parallel = whole.reduce_scatter_embeddings = False
    whole.word_embeddings.reduce_scatter_embeddings = False
    return lambda input_ids: whole(input_ids=input_ids, position_ids=None).transpose(0, 1)


def _decoder_inputs(
    chunk: Any, ordered: OrderedGradients, rows: WholeRows, call: dict[str, Any], packed: Any
) -> dict[str, Any]:
    """The arguments of ``GPTModel.forward`` that come from the call of a language model."""
    inputs: dict[str, Any] = {}
    if isinstance(masks := call["attention_mask"], Mapping):
        inputs["extra_block_kwargs"] = {"attention_bias": masks_of(rows, masks, packed)}
    if isinstance(getattr(chunk, "rotary_pos_emb", None), MultimodalRotary):
        inputs["position_ids"] = _positions(rows, call.get("position_ids"))
    if chunk.pre_process:
        hidden = _hidden(chunk, rows.own(call["inputs_embeds"]))
        if (features := call.get("deepstack_visual_embeds")) is not None:
            where = call["visual_pos_masks"]
            spread = [
                _hidden(chunk, rows.own(at_tokens(feature, where, call["inputs_embeds"]))) for feature in features
            ]
            hidden, extra = carried(hidden, spread)
            inputs["extra_block_kwargs"] = {"attention_bias": extra}
        inputs["decoder_input"] = ordered.joined(hidden)
    return inputs


def _positions(rows: WholeRows, positions: Tensor | None) -> Tensor:
    """Positions ``[n, b, s]`` of whole rows in the form for ``MultimodalRotary``."""
    if positions is None:
        raise BatchError("positions of images must follow from their sizes, found none: pass image_grid_thw")
    return rows.ordered(positions.permute(1, 2, 0)).permute(2, 0, 1)


def _hidden(chunk: Any, own: Tensor) -> Tensor:
    """Hidden states ``[rows, tokens, h]`` as ``[tokens, rows, h]``; with SP, the part of this TP rank."""
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    hidden = own.transpose(0, 1).contiguous()
    if not chunk.config.sequence_parallel:
        return hidden
    whole: Tensor = scatter_to_sequence_parallel_region(hidden, group=chunk.pg_collection.tp)
    return whole.clone()  # it is a view, which would keep the tokens of all ranks
