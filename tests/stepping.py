"""A training step as a trainer takes it: mcore's DDP, schedules and gradient finalization around bare chunks.

All of it runs in workers of the pool; what comes back is by HF names, through the export.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_bridge import ParallelDims, build_model, to_hf_state_dict


@contextlib.contextmanager
def mesh(dims: ParallelDims) -> Iterator[None]:
    """``parallel_state`` of ``dims`` inside the worker's process group, and nothing of it afterwards."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dims.initialize(device="cpu")
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def train(
    folder: str, dims: ParallelDims, batch: Tensor, *, lr: float = 0.0, micro_batch_size: int = 1, **build: Any
) -> dict[str, Any]:
    """One step of SGD on ``batch``, split over the DP ranks.

    Returns:
        loss: the mean over this replica's tokens, on last stages (else None).
        grads: of the mean loss of the whole batch, by HF name.
        weights: after the step, by HF name.
    """
    chunks = build_model(folder, dims=dims, dtype=torch.float32, device="cpu", **build)
    wrapped = wrap(chunks)
    loss = forward_backward(wrapped, dims, batch, micro_batch_size=micro_batch_size)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = parameter.main_grad.to(parameter.dtype)
    torch.optim.SGD(parameters, lr=lr).step()
    weights = {name: tensor.clone() for name, tensor in to_hf_state_dict(chunks).items()}
    with torch.no_grad():  # gradients have the places of their parameters, so the export gives them HF names
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
    grads = {name: tensor.clone() for name, tensor in to_hf_state_dict(chunks).items()}
    return {"loss": loss, "grads": grads, "weights": weights}


def wrap(chunks: Sequence[Any]) -> list[Any]:
    """mcore's DDP around each chunk, with fp32 gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    wrapped = [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]
    for ddp in wrapped:
        ddp.zero_grad_buffer()
    return wrapped


def forward_backward(
    models: Sequence[Any], dims: ParallelDims, batch: Tensor, *, micro_batch_size: int = 1, forward_only: bool = False
) -> Tensor | None:
    """mcore's schedule over this DP rank's share of ``batch``; the mean loss on last stages."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    share = batch.chunk(dims.dp(dist.get_world_size()))[parallel_state.get_data_parallel_rank()]
    micro_batches = share.split(micro_batch_size)

    def forward(iterator: Any, model: Any) -> Any:
        micro = next(iterator)
        places = positions(dims, micro.size(1) - 1)
        inputs, labels = micro[:, :-1][:, places], micro[:, 1:][:, places]
        output = model(inputs, places.expand_as(inputs), None, labels=labels.contiguous())
        return output, mean_loss

    def mean_loss(output: Tensor) -> Any:
        loss = output.float().mean()
        return loss / dims.cp, {"loss": loss.detach()}  # mcore multiplies what it backpropagates by cp

    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(micro_batches) for _ in models],
        model=list(models),
        num_microbatches=len(micro_batches),
        seq_length=batch.size(1) - 1,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
    )
    if not losses:
        return None
    loss = torch.stack([entry["loss"] for entry in losses]).mean()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(loss, group=group)
    return loss / group.size()


def positions(dims: ParallelDims, seq_len: int) -> Tensor:
    """The places of this context-parallel rank's tokens, as mcore deals them."""
    from megatron.core import parallel_state

    rank = parallel_state.get_context_parallel_rank()
    chunks = torch.arange(seq_len).chunk(2 * dims.cp)
    return torch.arange(seq_len) if dims.cp == 1 else torch.cat([chunks[rank], chunks[2 * dims.cp - 1 - rank]])


def logits(chunks: Sequence[Any], dims: ParallelDims, inputs: Tensor) -> Tensor | None:
    """What a pipeline of bare chunks (pp=1) says: gathered over TP, without padding, in the order of the text."""
    from megatron.core import parallel_state

    places = positions(dims, inputs.size(1))
    with torch.no_grad():
        output = chunks[0](inputs[:, places], places.expand(len(inputs), -1), None, runtime_gather_output=True)
    parts = [torch.empty_like(output) for _ in range(dims.cp)]
    dist.all_gather(parts, output, group=parallel_state.get_context_parallel_group())
    places = [torch.empty_like(places) for _ in range(dims.cp)]
    dist.all_gather(places, positions(dims, inputs.size(1)), group=parallel_state.get_context_parallel_group())
    return torch.cat(parts, dim=1)[:, torch.cat(places).argsort()]
