"""The families that ``forward`` runs on GPUs."""

import torch

import mcore_bridge as mb
from tests import zoo
from tests.support import forward_batches
from tests.support.gpu_models import DENSE, SPARSE

FAMILIES = {
    "sized": {**DENSE, **SPARSE},
    "zoo": {
        model_type: zoo.cases()[name].hf
        for model_type, name in forward_batches.FAMILIES.items()
        if model_type not in {**DENSE, **SPARSE}
    },
}

if "olmo_hybrid" in FAMILIES["zoo"]:  # of 6 channels some keys are nearly zero, and gradients in bf16 are only noise
    FAMILIES["zoo"]["olmo_hybrid"].linear_key_head_dim = 16


def is_refused(error, dims, hf):
    """Whether an error refuses, by name, context parallelism, so many ranks of it, or TP without SP.

    Only three kinds of families may be refused: with linear attention, with heads that cannot be divided, or with an
    indexer.
    """
    words = []
    if dims.cp > 1:
        words += ["context parallel"] if "linear_attention" in (getattr(hf, "layer_types", None) or ()) else []
        words += [f"times cp={dims.cp} must divide"] if dims.cp > 2 else []
    if dims.tp > 1 and not dims.sp:
        words += [f"tp={dims.tp} needs sp=True"] if hasattr(hf, "index_topk") else []
    refused = isinstance(error, mb.BridgeError) and any(each in str(error) for each in words)
    if refused and torch.distributed.get_rank() == 0:
        print(dims, hf.model_type, "refused:", error, flush=True)
    return refused


def has_experts(hf):
    return mb.to_transformer_config(hf).num_moe_experts is not None
