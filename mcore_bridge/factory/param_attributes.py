"""Set attributes of parameters for megatron-core's optimizer that megatron-core 0.16 does not always set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def mark_cut(chunk: GPTModel) -> None:
    """Mark the parameters that tensor parallelism cuts: otherwise the norm of gradients counts only the first rank.

    megatron-core 0.16.1 marks them only while it draws initial values, which a loaded model skips; 0.19.2 always does.
    All experts are marked: if etp is smaller than tp, tensor-parallel ranks hold different ones.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    for name, module in chunk.named_modules():
        # TransformerEngine also marks whole parameters. Overlapped shared experts look whole, but are cut.
        if getattr(module, "parallel_mode", "") is None and ".shared_experts." not in name:
            for parameter in module.parameters(recurse=False):
                parameter.tensor_model_parallel, parameter.partition_dim = False, -1
        elif isinstance(module, VocabParallelEmbedding | ColumnParallelLinear):
            _mark(module.weight, 0)
            if name == "output_layer":
                _mark(module.bias, 0)
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
    """Mark whether gradients of experts are summed over the data-parallel ranks of experts, or over all of them.

    megatron-core 0.16.1 marks them only for ep > 1. But if etp is smaller than tp, tensor-parallel ranks run different
    tokens through one set of experts, and these gradients would not be summed. 0.19.2 also marks them in this case.
    """
    config = chunk.config
    apart = config.expert_model_parallel_size > 1
    apart = apart or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = not apart
