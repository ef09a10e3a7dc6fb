"""verl's fused kernels (``use_fused_kernels``), which go around an output layer: they take its weight, and no logits.

What such a layer does beside multiplying is done here, or refused. On each tensor-parallel rank the kernels take a row
for a label, the first for the one that comes next if all lower ranks have as many rows.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from mcore_bridge.errors import ConfigError
from mcore_bridge.trainers.seams import original

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NAME = "verl.utils.kernel.linear_cross_entropy"


def __getattr__(name: str) -> Any:
    return getattr(original(_NAME), name)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: "ProcessGroup | None" = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of labels and entropies, by verl's kernels; rows that pad the vocabulary take no part.

    Args:
        hidden: of all tokens.
        weight: this rank's rows of an output layer.
        labels: of all tokens, in the whole vocabulary.
        temperature, reduction, dist_process_group: as verl gives them.

    Raises:
        ConfigError: the model caps its logits, or a rank's rows are nothing but padding.
    """
    if (cap := getattr(weight, "logit_softcap", None)) is not None:
        raise ConfigError(
            "verl's fused kernels need logits as the weight of the output layer gives them, found a model that caps "
            f"them at {cap}: set use_fused_kernels=False"
        )
    rank, size = (0, 1) if dist_process_group is None else (dist_process_group.rank(), dist_process_group.size())
    rows = weight.size(0)
    vocab_size = getattr(weight, "hf_vocab_size", rows * size)
    if vocab_size <= rows * (size - 1):
        raise ConfigError(
            f"verl's fused kernels need a part of the vocabulary on each of {size} tensor-parallel ranks, found "
            f"{vocab_size} tokens in shares of {rows}: set use_fused_kernels=False or a smaller tensor parallel size"
        )
    if (padding := rows * (rank + 1) - vocab_size) > 0:
        weight, labels = weight[:-padding], labels - rank * padding
    log_probs, entropy = original(_NAME).linear_cross_entropy(
        hidden, weight, labels, temperature, reduction, dist_process_group
    )
    return log_probs, entropy
