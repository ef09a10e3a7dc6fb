"""Models on GPUs, wrapped for training."""

import contextlib
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


@contextlib.contextmanager
def away(tensors):
    """Move tensors to the CPU in the block, and free their memory on the GPU, so that reading it fails."""
    kept = [(tensor, tensor.untyped_storage().nbytes(), tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    for tensor, _, _ in kept:
        tensor.untyped_storage().resize_(0)
    yield
    for tensor, num_bytes, value in kept:
        tensor.untyped_storage().resize_(num_bytes)
        tensor.detach().copy_(value)


def buffers_of(models):
    """The buffers of megatron-core's DDP; parameters and gradients are views of the buffers."""
    return [buffer for model in models for buffer in model.buffers + model.expert_parallel_buffers]


def by_name(chunks, gradient_of):
    """Gradients by HF name, exported in the places of the parameters. They are zero for buffers, and for parameters
    that are not trained.
    """
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.data.copy_(gradient_of(parameter)) if parameter.requires_grad else parameter.data.zero_()
    for buffer in (buffer for chunk in chunks for buffer in chunk.buffers()):
        buffer.zero_()
    return mb.to_hf_state_dict(chunks)


def distances(found, exact):
    """The errors of gradients, for each kind of tensor over all layers and experts."""
    squares = defaultdict(float)
    for name, grad in exact.items():
        squares[re.sub(r"\d+", "*", name)] += float((found[name].float() - grad).square().sum())
    return {kind: square**0.5 for kind, square in squares.items()}
