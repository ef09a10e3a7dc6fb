"""Models on GPUs, wrapped for training."""

import re
from collections import defaultdict

import mcore_bridge as mb

ROUNDED = 2  # times as far from fp32 as torch's modules in bf16


def wrapped(chunks, **settings):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **settings)
    models = [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]
    syncs = [model.no_sync for model in models]
    chunks[0].config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    return models


def by_name(chunks, gradient_of):
    """Gradients by HF name, exported in the places of the parameters. They are zero for parameters that are not
    trained.
    """
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.data.copy_(gradient_of(parameter)) if parameter.requires_grad else parameter.data.zero_()
    return {
        name: tensor
        for name, tensor in mb.to_hf_state_dict(chunks).items()
        if not name.endswith(("correction_bias", "expert_bias"))
    }


def distances(found, exact):
    """The errors of gradients, for each kind of tensor over all layers and experts."""
    squares = defaultdict(float)
    for name, grad in exact.items():
        squares[re.sub(r"\d+", "*", name)] += float((found[name].float() - grad).square().sum())
    return {kind: square**0.5 for kind, square in squares.items()}
