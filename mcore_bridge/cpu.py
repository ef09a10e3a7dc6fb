"""Replaces megatron-core's uses of CUDA on a machine without a GPU: on request, never on import.

``enable_cpu()`` changes names of the running process, and only if CUDA is missing. Each of these names would raise
without its replacement. A config must still request weights on the CPU: ``build_model`` sets
``use_cpu_initialization=True``. Two things are not replaced. Megatron's own optimizers assert CUDA gradient types, so
use ``torch.optim``. Fused kernels, which a config has to request, need a GPU.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = frozenset({"arange", "empty", "full", "ones", "tensor", "zeros"})
_LITERAL_CUDA = (  # modules with device="cuda" or pin_memory=True on the way of a training step
    "models.common.embeddings.rope_utils",  # positions of a context-parallel rank: pinned, then .cuda()
    "pipeline_parallel.schedules",  # the count of tokens of every schedule
    "tensor_parallel.data",  # broadcast_data, with which trainers send a batch to the TP group
    "transformer.utils",  # causal and sliding-window masks of mcore's own DotProductAttention
)
_enabled = False


def enable_cpu() -> None:
    """Enable megatron-core to build, run forward and backward, recompute and pipeline on CPU tensors (gloo).

    It does nothing if CUDA is available, or if it has run before. ``ParallelDims.initialize(device="cpu")`` calls it.

    Example:
        >>> mb.enable_cpu()                               # before a model is built by other means
    """
    global _enabled
    if _enabled or torch.cuda.is_available():
        return
    _stub_torch_cuda()
    for name in _LITERAL_CUDA:
        module = importlib.import_module(f"megatron.core.{name}")
        module.torch = _TorchOnCpu("torch")  # type: ignore[attr-defined]  # a name of this module, not torch itself
    finalize: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    finalize.torch = _TorchWithMean("torch")  # for parameters whose gradients are averaged over TP
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _in_lists  # megatron-core's function does nothing with tensors on the CPU
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    mappings._gather_along_first_dim = _uneven_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _uneven_reduce_scatter(mappings._reduce_scatter_along_first_dim)
    _use_cpu_rng()
    _enabled = True


class _Stream:
    """Takes the place of ``torch.cuda.Stream`` and ``torch.cuda.Event``: on CPU work is done when a call returns."""

    def __init__(self, *arguments: object, **keywords: object) -> None:
        pass

    def record_event(self, event: object = None) -> "_Stream":
        return self

    def _done(self, *arguments: object) -> None:
        pass

    record = synchronize = wait = wait_event = wait_stream = _done


def _stub_torch_cuda() -> None:
    stream = _Stream()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU  # tensor_parallel/{layers,mappings}.py, p2p_communication.py, utils.py: buffers
    cuda.synchronize = lambda device=None: None  # p2p_communication.py: after batched sends and receives
    cuda.Stream = cuda.Event = _Stream  # distributed/distributed_data_parallel.py: the stream of the gradient buckets
    cuda.current_stream = lambda device=None: stream  # distributed/param_and_grad_buffer.py
    cuda.stream = lambda stream: contextlib.nullcontext()  # distributed/param_and_grad_buffer.py
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *arguments, **keywords: self  # language_module.py: tied embeddings; rope_utils.py


def _in_lists(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes in the form for ``all_to_all``."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _uneven_gather(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gather tensors of different sizes, such as tokens of experts. gloo gathers only equal sizes, so pad and cut."""

    @functools.wraps(even)
    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return even(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = even(_padded(input_, max(sizes)), group).chunk(len(sizes))
        return torch.cat([part[:size] for part, size in zip(padded, sizes, strict=True)])

    return gather


def _uneven_reduce_scatter(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The backward of ``_uneven_gather``."""

    @functools.wraps(even)
    def scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return even(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        padded = [_padded(part, max(sizes)) for part in input_.split(sizes)]
        return even(torch.cat(padded), group)[: sizes[group.rank()]]

    return scatter


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_zeros(size - len(tensor), *tensor.shape[1:])))


class _TorchOnCpu(ModuleType):
    """``torch`` for one module of megatron-core: factories return CPU tensors, even for "cuda" or pinned memory."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _on_cpu(value) if name in _FACTORIES else value


class _DistributedWithMean(ModuleType):
    """``torch.distributed``, whose ``all_reduce`` averages over gloo too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @staticmethod
    def all_reduce(tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None) -> None:
        averages = op == torch.distributed.ReduceOp.AVG
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.SUM if averages else op, group=group)
        if averages:
            tensor.div_(torch.distributed.get_world_size(group))


class _TorchWithMean(ModuleType):
    """``torch`` for one module of megatron-core, with ``_DistributedWithMean``."""

    distributed = _DistributedWithMean("torch.distributed")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*arguments: Any, device: Any = None, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        on_cuda = device is not None and torch.device(device).type == "cuda"
        return factory(*arguments, device=_CPU if on_cuda else device, **keywords)

    return make


def _use_cpu_rng() -> None:
    """Replace the CUDA generators of tensor_parallel/random.py, for dropout under TP, initial weights and recompute."""
    from megatron.core.tensor_parallel import random

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        """megatron-core's tracker over torch's CPU generator. A state that was not seeded is the generator's."""

        def add(self, name: str, seed: int) -> None:
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"the RNG state {name!r} or the seed {seed} is already in the tracker")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            if name not in self.states_:
                yield
                return
            outside, outer = torch.get_rng_state(), getattr(self, "forked", "")
            if outer:  # a fork inside of a fork of one state goes on where the outer one is
                self.states_[outer] = outside
            torch.set_rng_state(self.states_[name])
            self.forked = name
            try:
                yield
            finally:
                self.states_[name], self.forked = torch.get_rng_state(), outer
                torch.set_rng_state(self.states_.get(outer, outside))

    random.CudaRNGStatesTracker = CpuRNGStatesTracker  # initialize_rng_tracker makes one, now and after a reset
    random.initialize_rng_tracker(force_reset=True)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
