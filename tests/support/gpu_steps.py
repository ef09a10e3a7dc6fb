"""Steps of training on GPUs, and the difference between two of them."""

import torch

import mcore_bridge as mb
from tests.support.forward_batches import batch_of
from tests.support.gpu_gradients import by_name, wrapped


def learn(hf, dims, state, *, packed, **how):
    """Log-probs of a batch, and all gradients of their sum by HF name, as megatron-core's DDP leaves them."""
    chunks = mb.build_model(hf, dims=dims, load_weights=state, **how)
    models = wrapped(chunks)
    for model in models:
        model.zero_grad_buffer()
    ids, mask = (tensor.cuda() for tensor in batch_of(hf))
    outputs = mb.forward(models, ids, mask, packed=packed, loss=lambda outputs, rows: outputs.log_probs.sum())
    exported = mb.to_hf_state_dict(models)
    assert all(torch.equal(exported[name].cpu(), tensor.to(exported[name].dtype)) for name, tensor in state.items())
    grads = by_name(chunks, lambda parameter: parameter.main_grad)
    return outputs.log_probs.detach(), torch.cat([grads[name].float().flatten() for name in sorted(grads)])


def distances(found, exact):
    """The errors of log-probs, and of gradients relative to their norm."""
    return [float((each - known).norm() / known.norm()) for each, known in zip(found, exact, strict=True)]
