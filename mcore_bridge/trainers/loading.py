"""Loads the weights of any HF folder into chunks of a trainer, with or without wrappers."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.bound import provenance_on
from mcore_bridge.weights.files.hf_folder import Checkpoint, names_in
from mcore_bridge.weights.load import load_as, note_folder
from mcore_bridge.weights.load_state import LoadReport
from mcore_bridge.weights.model_chunks import chunks_of

_HEADS = ("score.weight", "score.2.weight")


def load_folder(
    models: Sequence[nn.Module], folder: str | os.PathLike[str], *, dtype: torch.dtype, may_draw_head: bool = True
) -> LoadReport:
    """Copy the weights of a folder into this rank's chunks. Chunks without a folder get it as their folder.

    The config in the folder describes its tensors, because a trainer may have changed the model's config. For example,
    verl removes the number of MTP layers, while a checkpoint still has them.

    Args:
        models: this rank's chunks, wrapped or not.
        folder: an HF folder of a causal LM or of a composite, or of a model that was saved with its head.
        dtype: cast weights to this.
        may_draw_head: whether the folder may lack the model's head, which then keeps its values.

    Raises:
        CheckpointError: as ``load_hf_weights``. Also when the folder lacks the head, or has it under another bridge's
            name; then all ranks raise before a weight is written.
    """
    chunks = chunks_of(models)
    provenance = provenance_on(models, folder, chunks[0].bridge.head)
    if provenance.head not in ("lm", "none"):
        _check_head(provenance.folder or folder, provenance.lm_head, may_draw_head)
    report = load_as(models, provenance, folder, dtype=dtype)
    held = provenance.folder or str(folder)
    note_folder(chunks, held, names_in(held))
    return report


def _check_head(folder: str | os.PathLike[str], lm_head: str, may_draw_head: bool) -> None:
    if not {*_HEADS}.isdisjoint(names_in(folder)):
        return
    checkpoint = Checkpoint(folder)
    if lm_head in checkpoint and checkpoint[lm_head].shape[0] == 1:
        raise CheckpointError(
            f"{folder} has a value head under the name {lm_head}, as other bridges save it: rename the tensor to "
            f"{_HEADS[0]} to load it"
        )
    if not may_draw_head:
        raise CheckpointError(
            f"{folder} lacks {_HEADS[0]}, and the critic would keep its current head: load its own checkpoint. With "
            "Megatron-Bridge's functions allowed_mismatched_params=['output_layer.weight'] allows this; with "
            "mbridge's, only the first load may lack the head"
        )
