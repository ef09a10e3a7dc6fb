"""What parameters tell megatron-core's optimizer about themselves, where megatron-core 0.16 leaves it out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def mark_cut(chunk: GPTModel) -> None:
    """Say of what tensor-parallel ranks hold a part each: the norm of gradients would count the first rank's alone.

    0.16.1 says so while it draws initial values, and models that are loaded have none (0.19.2 says so always). Experts
    are marked all of them: with fewer ranks in etp than in tp, these hold different ones.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    for name, module in chunk.named_modules():
        # TransformerEngine marks what each rank holds whole as well; overlapped shared experts only say that they do.
        if getattr(module, "parallel_mode", "") is None and ".shared_experts." not in name:
            for parameter in module.parameters(recurse=False):
                parameter.tensor_model_parallel, parameter.partition_dim = False, -1
        elif isinstance(module, VocabParallelEmbedding | ColumnParallelLinear):
            _mark(module.weight, 0)
        elif isinstance(module, RowParallelLinear):
            _mark(module.weight, 1)
    for name, parameter in chunk.named_parameters():
        if ".experts." in name or name.endswith(".softmax_offset"):
            _mark(parameter, 1 if ".linear_fc2.weight" in name else 0)


def _mark(parameter: nn.Parameter | None, dim: int) -> None:
    if parameter is not None and not getattr(parameter, "tensor_model_parallel", False):
        parameter.tensor_model_parallel, parameter.partition_dim = True, dim  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]


def mark_experts(chunk: GPTModel) -> None:
    """Say of the experts' parameters who sums their gradients: the data-parallel ranks of experts, or those of all.

    0.16.1 says so for ep > 1 only. With fewer ranks in etp than in tp, tensor-parallel ranks see other tokens each with
    the same experts, and nobody would sum what they find (0.19.2 says so there as well).
    """
    config = chunk.config
    apart = config.expert_model_parallel_size > 1
    apart = apart or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = not apart
