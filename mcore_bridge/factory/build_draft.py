"""``build_draft``: a draft head for speculative decoding, beside the policy whose hidden states it reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.architecture import read_draft
from mcore_bridge.arguments import WHOLE, require
from mcore_bridge.batches.text_collectives import digest
from mcore_bridge.config.draft import EAGLE3
from mcore_bridge.config.hf import find_folder
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import CheckpointError, ConfigError, MeshError
from mcore_bridge.factory.blueprint import Blueprint, BuildOptions, Overrides, make_blueprint
from mcore_bridge.factory.build import build
from mcore_bridge.rules.dtypes import DtypeLike
from mcore_bridge.weights.bound import provenance_on
from mcore_bridge.weights.files.hf_folder import names_in
from mcore_bridge.weights.model_chunks import Models, all_chunks_of
from mcore_bridge.weights.provenance import provenance_of

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from transformers import PretrainedConfig

    from mcore_bridge.config.draft import DraftFields
    from mcore_bridge.factory.modules.eagle3 import Vocabulary


def build_draft(
    models: Models,
    hf: str | os.PathLike[str] | PretrainedConfig,
    *,
    dtype: DtypeLike | None = None,
    backend: str = "auto",
    overrides: Overrides | None = None,
    token_ids: Tensor | None = None,
    freeze: Sequence[str] = (),
    seed: int = 0,
) -> list[GPTModel]:
    """Build a draft head for speculative decoding beside its policy: an EAGLE3, DFlash or DSpark head of engines.

    All ranks of a model replica call it together, and compare their arguments first. The result is a list of one chunk
    for all functions that take models: ``to_hf_state_dict``, ``save_hf_checkpoint``, ``WeightSync``, ... ``forward``
    trains it.

    Args:
        models: the chunks of the policy on this rank, wrapped or not. The head is on its device and its mesh.
        hf: the published folder of a head, or its name in the local hub cache: its weights are loaded. Or a config with
            the same fields: the head is new, with values drawn from ``seed``.
        dtype: of all parameters, as for ``build_model``. None: the dtype of the policy.
        backend: as for ``build_model``.
        overrides: as for ``build_model``.
        token_ids: for a new head whose vocabulary is smaller than the one of the policy: int64 ``[draft_vocab_size]``,
            the ids of its tokens in rising order. Take the most frequent tokens of your data.
        freeze: as for ``build_model``.
        seed: for all random values.

    Returns:
        The head, as a list.

    Raises:
        ConfigError: the config is of no head that we build, or does not fit the policy. Or ranks of a replica pass
            different arguments; then all of them raise.
        MeshError: the policy has pipeline stages.
        CheckpointError: the weights do not fit the head, or ``d2t`` and ``t2d`` contradict each other.

    Example:
        >>> drafts = mb.build_draft(models, "path/of/EAGLE3-Qwen3-8B")
        >>> sorted(mb.to_hf_state_dict(drafts))[:3]
        ['d2t', 'fc.weight', 'lm_head.weight']
    """
    is_folder = isinstance(hf, str | os.PathLike)

    def prepare() -> tuple[Blueprint, Any]:
        require(ConfigError, seed=(seed, WHOLE))
        policy = all_chunks_of(models)[0]
        names = names_in(folder := os.fspath(find_folder(hf))) if is_folder else None
        config = read_draft(hf, names)
        is_whole = config.model_type == EAGLE3
        provenance = provenance_of(config, head="lm" if is_whole else "none")
        if names is not None:
            provenance = provenance.loaded_from(folder, names)
        like = next(policy.parameters())
        dims = replace(ParallelDims.from_mcore(), sp=policy.config.sequence_parallel and is_whole)
        _require_whole(policy)
        chosen = like.dtype if dtype is None else dtype
        how: Any = {"device": like.device, "backend": backend, "overrides": overrides, "head": provenance.head}
        options = BuildOptions(dims=dims, dtype=chosen, **how)
        blueprint = make_blueprint(provenance, options)
        _require_fit(blueprint, policy, models)
        if not is_folder:
            _require_tokens(token_ids, blueprint)
        elif token_ids is not None:
            raise ConfigError("token_ids are of a new head, and this folder has a map of its own: remove token_ids")
        return blueprint, hf if is_folder else None

    compared = {"token_ids": digest(token_ids) if isinstance(token_ids, Tensor) else token_ids}
    drafts: list[Any] = build(prepare, freeze=freeze, seed=seed, further=compared)
    if (vocabulary := drafts[0].vocabulary) is not None:
        if not is_folder:
            vocabulary.choose(torch.arange(len(vocabulary.d2t)) if token_ids is None else token_ids)
        _require_map(vocabulary)
    return drafts


def _require_whole(policy: GPTModel) -> None:
    if (stages := policy.pg_collection.pp.size()) > 1:
        raise MeshError(
            f"a draft head needs a policy without pipeline stages, found {stages}. It reads hidden states of three "
            "layers, and megatron-core's schedule sends none of them to the stage of the loss. Build with pp=1."
        )


def _require_fit(blueprint: Blueprint, policy: GPTModel, models: Models) -> None:
    """Raise ``ConfigError`` with all the reasons for which a head does not fit its policy."""
    if problems := [*_misfits(blueprint.config, policy, models)]:
        raise ConfigError(
            f"The draft head must fit its policy: {'; '.join(problem.removesuffix('.') for problem in problems)}. Pass "
            "the head of this policy."
        )


def _misfits(config: Any, policy: GPTModel, models: Models) -> Iterator[str]:
    from mcore_bridge.factory.modules.streams import has_streams

    draft: DraftFields = config.draft
    provenance = provenance_on(models)
    if provenance.head != "lm":
        yield f"the policy has the head {provenance.head!r}, and a draft learns from logits"
    if has_streams(policy.config):
        yield "the policy has several residual streams, and a draft reads hidden states of one"
    sizes = {
        "vocab_size": (draft.target_vocab_size, provenance.hf.vocab_size),
        "target_hidden_size": (draft.target_hidden_size, policy.config.hidden_size),
        "dtype": (config.params_dtype, policy.config.params_dtype),
    }
    if not draft.own_embedding:
        sizes["hidden_size"] = (config.hidden_size, policy.config.hidden_size)
    for name, (own, theirs) in sizes.items():
        if own != theirs:
            advice = " (own_embedding=True in its config gives it an embedding)" if name == "hidden_size" else ""
            yield f"{name} of the draft is {own}, and the policy has {theirs}{advice}"
    try:
        draft.layers_read(provenance.hf.num_hidden_layers)
    except ConfigError as error:
        yield str(error)


def _require_tokens(token_ids: Tensor | None, blueprint: Blueprint) -> None:
    """Raise ``ConfigError`` unless ``token_ids`` are the vocabulary of a new head."""
    draft: Any = blueprint.config.draft
    own, whole = blueprint.hf.vocab_size, draft.target_vocab_size
    if token_ids is None and own == whole:
        return
    is_right = (
        isinstance(token_ids, Tensor)
        and token_ids.dtype == torch.int64
        and token_ids.shape == (own,)
        and bool((token_ids.diff() > 0).all())
        and int(token_ids[0]) >= 0
        and int(token_ids[-1]) < whole
        and draft.has_map
    )
    if not is_right:
        raise ConfigError(
            f"token_ids must be a tensor of int64 with {own} different ids below {whole} in rising order, found "
            f"{token_ids!r:.100} ({type(token_ids).__name__}). A new head needs them if its vocabulary is smaller than "
            "the one of its policy. Pass the ids of the most "
            "frequent tokens, or a draft_vocab_size that equals vocab_size."
        )


def _require_map(own: Vocabulary) -> None:
    """Raise ``CheckpointError`` unless ``d2t`` and ``t2d`` of a file describe one choice of tokens."""
    ids, chosen = own.target_ids(), torch.zeros_like(own.t2d)
    is_inside = bool(((ids >= 0) & (ids < len(chosen))).all())
    if is_inside:
        chosen[ids] = True
    if not is_inside or not torch.equal(chosen, own.t2d) or int(chosen.sum()) != len(ids):
        raise CheckpointError(
            "d2t must hold the target id of each token minus its own id, and t2d must mark these target ids. Found "
            f"{ids.tolist()[:8]} as the first sums of own id and d2t, and {own.t2d.nonzero()[:8, 0].tolist()} as the "
            "first marked ids. If d2t holds target ids, subtract arange(draft_vocab_size)."
        )
