"""A training step like a trainer's: mcore's DDP, schedules and gradient finalization around bare chunks.

It runs in workers of the pool. Results come back under HF names, through the export.
"""

import contextlib
import gc
import multiprocessing
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_bridge import ParallelDims, build_model, to_hf_state_dict
from mcore_bridge.cpu import _TorchOnCpu
from mcore_bridge.errors import MeshError


@contextlib.contextmanager
def mesh(dims: ParallelDims, device: str = "cpu") -> Iterator[None]:
    """``parallel_state`` of ``dims`` inside the worker's process group; it is removed afterwards."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        leave_mesh()
    dims.initialize(device=device)
    try:
        yield
    finally:
        leave_mesh()
        assert not parallel_state.model_parallel_is_initialized()


def meet(dims: ParallelDims) -> None:
    """Make the groups of this mesh. Groups of an equal mesh before are kept, since making them takes long."""
    try:
        dims.initialize(device="cpu")
    except MeshError:
        leave_mesh()
        dims.initialize(device="cpu")


_left: list[Any] = []
"""Groups of earlier meshes that objects may still hold."""


def leave_mesh() -> None:
    """Destroy megatron-core's groups. megatron-core only drops them, and threads of gloo would go on waking up for
    each.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    parallel_state.destroy_model_parallel()
    for ddp in [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]:
        ddp.__dict__.clear()  # hooks of autograd hold it, in a cycle that no collector sees, and it held the model
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    _left.extend(groups)
    while groups:
        dist.destroy_process_group(groups.pop())
    forget_metrics()
    gc.collect()  # chunks hold groups, and themselves by cycles
    _end_groups()


def _end_groups() -> None:
    """End all groups that no object holds, together, since the end of each waits 10 ms for a thread of gloo."""
    alone: list[Any] = []
    held: list[Any] = []
    while _left:
        group = _left.pop()
        (alone if sys.getrefcount(group) == 2 else held).append(group)  # held by the variable and the argument
        del group
    _left.extend(held)
    threads = [threading.Thread(target=lambda: alone.pop() and None) for _ in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


LOSS_HELPERS = {
    "megatron.core.transformer.multi_token_prediction": "MTPLossLoggingHelper",
    "megatron.core.transformer.experimental_attention_variant.dsa": "DSAIndexerLossLoggingHelper",
}


def forget_metrics() -> None:
    """Empty megatron-core's trackers of losses: each has as many places as the first model of the process had layers.

    The trackers hold groups, too. A module that was not imported has no tracker yet.
    """
    for module, helper in LOSS_HELPERS.items():
        if module in sys.modules:
            getattr(sys.modules[module], helper).tracker.clear()
    if logging := sys.modules.get("megatron.core.transformer.moe.moe_logging"):
        logging.destroy_moe_metrics_tracker()
    elif moe := sys.modules.get("megatron.core.transformer.moe.moe_utils"):
        moe.get_moe_layer_wise_logging_tracker().clear()  # megatron-core before 0.19


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
    head = build.get("head", "lm") != "lm"
    loss = forward_backward(wrapped, dims, batch, micro_batch_size=micro_batch_size, head=head)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = parameter.main_grad.to(parameter.dtype)
    torch.optim.SGD(parameters, lr=lr).step()
    weights = {name: tensor.clone() for name, tensor in to_hf_state_dict(chunks).items()}
    return {"loss": loss, "grads": gradients(chunks), "weights": weights}


@torch.no_grad()
def gradients(chunks: Sequence[Any]) -> dict[str, Tensor]:
    """The gradients in mcore's buffers, by HF name. They replace the values of their parameters and are exported."""
    for parameter in trained(chunks):
        parameter.copy_(parameter.main_grad)
    return {name: tensor.clone() for name, tensor in to_hf_state_dict(chunks).items()}


def wrap(chunks: Sequence[Any], **options: Any) -> list[Any]:
    """mcore's DDP around each chunk, with fp32 gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    settings = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, "overlap_grad_reduce": False, **options})
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    wrapped = [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]
    for ddp in wrapped:
        ddp.zero_grad_buffer()
    return wrapped


def gathering_late(chunks: Sequence[Any]) -> list[Any]:
    """mcore's DDP around each chunk, with which the next forward gathers parameters."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    return [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]


def let_megatron_save() -> None:
    """Let megatron-core save in a worker. It writes in forked processes, which workers may not start, and gets their
    results from a server that outlives it.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    module: Any = filesystem_async
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    module._results_queue = queue.SimpleQueue()  # it is read in this process, unless a save runs during training


class FusedAdam(torch.optim.Optimizer):
    """Apex's Adam, by its formula. The number of the step is in the group, so that mcore can load a state into a new
    optimizer.
    """

    def __init__(self, params: Any, adam_w_mode: bool = True, **settings: Any) -> None:
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            (first, second), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
                mean = state["exp_avg"].lerp_(parameter.grad, 1 - first)
                square = state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                scale = (square / (1 - second**step)).sqrt_().add_(group["eps"])
                parameter.addcdiv_(mean, scale, value=-lr / (1 - first**step))


def distributed_optimizer(wrapped: Sequence[Any], *, lr: float, **options: Any) -> Any:
    """mcore's distributed optimizer as on a GPU, with Apex's Adam and types of CUDA."""
    from megatron.core import optimizer as package
    from megatron.core.optimizer import distrib_optimizer, optimizer

    modules: list[Any] = [package, distrib_optimizer, optimizer]
    modules[0].Adam = modules[1].Adam = FusedAdam
    modules[0].USING_PYTORCH_OPTIMIZER = False
    modules[1].HAVE_APEX_OR_TE = modules[1].USING_APEX_OPTIMIZER = True
    modules[2].torch = _TorchOnCpu("torch")
    tensor: Any = torch.Tensor
    own = tensor.type
    tensor.type = lambda self, *to: own(self, *to) if to else own(self).replace("torch.", "torch.cuda.")
    try:
        chosen = {"weight_decay": 0.0, "clip_grad": 0.0, "use_distributed_optimizer": True, **options}
        settings = package.OptimizerConfig(lr=lr, **chosen)
        return package.get_megatron_optimizer(settings, list(wrapped))
    finally:
        tensor.type = own


def forward_backward(
    models: Sequence[Any], dims: ParallelDims, batch: Tensor, *, micro_batch_size: int = 1, head: bool = False
) -> Tensor | None:
    """mcore's schedule over this DP rank's share of ``batch``; the mean loss on last stages.

    The loss of a token is its cross entropy or, for a head, the mean square of the head's outputs.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    share = batch.chunk(dims.dp(dist.get_world_size()))[parallel_state.get_data_parallel_rank()]
    micro_batches = share.split(micro_batch_size)

    def forward(iterator: Any, model: Any) -> Any:
        micro = next(iterator)
        places = positions(dims, micro.size(1) - 1)
        inputs, labels = micro[:, :-1][:, places], micro[:, 1:][:, places]
        output = model(inputs, places.expand_as(inputs), None, labels=None if head else labels.contiguous())
        return output, mean_loss

    def mean_loss(output: Tensor) -> Any:
        loss = output.square().mean() if head else output.float().mean()
        return loss / dims.cp, {"loss": loss.detach()}  # mcore multiplies what it backpropagates by cp

    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(micro_batches) for _ in models],
        model=list(models),
        num_microbatches=len(micro_batches),
        seq_length=batch.size(1) - 1,
        micro_batch_size=micro_batch_size,
        forward_only=False,
    )
    if not losses:
        return None
    loss = torch.stack([entry["loss"] for entry in losses]).mean()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(loss, group=group)
    return loss / group.size()


def optimized(
    chunks: Sequence[Any], dims: ParallelDims, batch: Tensor
) -> tuple[list[Any], Any, Callable[[], float | None]]:
    """The chunks in mcore's DDP, its distributed optimizer, and a function that makes a step and returns its loss."""
    wrapped = wrap(chunks, use_distributed_optimizer=True)
    optimizer = distributed_optimizer(wrapped, lr=1e-2)

    def step() -> float | None:
        for ddp in wrapped:
            ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = forward_backward(wrapped, dims, batch)
        assert not optimizer.prepare_grads()
        assert optimizer.step_with_ready_grads()  # between them, step() computes a norm of gradients on CUDA
        return None if loss is None else loss.item()

    return wrapped, optimizer, step


def positions(dims: ParallelDims, seq_len: int) -> Tensor:
    """The places of this context-parallel rank's tokens, as mcore deals them."""
    from megatron.core import parallel_state

    rank = parallel_state.get_context_parallel_rank()
    chunks = torch.arange(seq_len).chunk(2 * dims.cp)
    return torch.arange(seq_len) if dims.cp == 1 else torch.cat([chunks[rank], chunks[2 * dims.cp - 1 - rank]])


def trained(models: Sequence[Any]) -> list[Any]:
    """The parameters that have a gradient."""
    return [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]


@torch.no_grad()
def masters(models: Sequence[Any], optimizer: Any) -> dict[Any, Tensor]:
    """For every parameter, its fp32 values in the distributed optimizer, from all replicas."""
    from megatron.core import parallel_state

    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    found = {}
    replicas = {
        True: parallel_state.get_data_parallel_group(with_context_parallel=True),
        False: parallel_state.get_expert_data_parallel_group(),
    }
    for parameter in trained(models):
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        for each in optimizers:
            if parameter in each.model_param_gbuf_map:
                own = each._get_model_param_range_map(parameter)["param"]
                held = getattr(parameter, "main_param", None)  # no copy of parameters that are fp32 themselves
                whole[own.start : own.end] = parameter.view(-1)[own.start : own.end] if held is None else held.view(-1)
        dist.all_reduce(whole, group=replicas[getattr(parameter, "allreduce", True)])
        found[parameter] = whole.view(parameter.shape)
    return found
