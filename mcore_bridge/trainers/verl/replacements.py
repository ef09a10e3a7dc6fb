"""Functions in the place of verl's own: what it adds for adapters, exports of quantization-aware training (QAT), and
those from before it had bridges, refused.

verl's fused kernels (``use_fused_kernels``), which use the weight of an output layer and not its logits.

Other steps of an output layer are done here, or refused. The kernels assume that all tensor-parallel ranks have equally
many rows, and number the labels of each rank accordingly.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from mcore_bridge.errors import ConfigError
from mcore_bridge.trainers.module_patch import original
from mcore_bridge.trainers.peft_functions import Peft, create_peft
from mcore_bridge.trainers.weight_export import qat_format

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mcore_bridge.weights.model_chunks import Models


_NAME = "verl.utils.kernel.linear_cross_entropy"
_SPLIT = 1024
"""Rows that the kernels process at a time. Ranks exchange a maximum for each part, so they need equally many parts."""
_OF_LOGITS = {
    "logit_softcap": "caps them at {}",
    "logit_scale": "scales them (factor and divisor: {})",
    "output_bias": "adds a bias to them",
}
"""Attributes of an output layer's weight, each with a description of the change of logits."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of labels, and entropies, from verl's kernels without the padding of the vocabulary.

    Args:
        hidden: hidden states of all tokens.
        weight: this rank's rows of an output layer.
        labels: labels of all tokens, in the whole vocabulary.
        temperature, reduction, dist_process_group: as for verl's function.

    Raises:
        ConfigError: logits are capped, scaled or have a bias, or ranks have different numbers of parts
            because of padding.
    """
    rank, size = (0, 1) if dist_process_group is None else (dist_process_group.rank(), dist_process_group.size())
    rows = weight.size(0)
    vocab_size = getattr(weight, "hf_vocab_size", rows * size)
    _check(weight, vocab_size, size)
    if (padding := rows * (rank + 1) - vocab_size) > 0:
        weight, labels = weight[:-padding], labels - rank * padding
    log_probs, entropy = original(_NAME).linear_cross_entropy(
        hidden, weight, labels, temperature, reduction, dist_process_group
    )
    return log_probs, entropy


def _check(weight: Tensor, vocab_size: int, size: int) -> None:
    for name, does in _OF_LOGITS.items():
        if (value := getattr(weight, name, None)) is not None:
            raise ConfigError(
                f"verl's fused kernels need unchanged logits of the output layer, found a model that "
                f"{does.format(value)}. Set use_fused_kernels=False"
            )
    rows = weight.size(0)
    last = vocab_size - rows * (size - 1)
    if last <= 0 or (size > 1 and -(-last // _SPLIT) != -(-rows // _SPLIT)):
        raise ConfigError(
            f"verl's fused kernels need as many parts of {_SPLIT} tokens on the last of {size} tensor-parallel ranks "
            f"as on the others, found {last} and {rows} of {vocab_size} tokens. Set use_fused_kernels=False, or "
            "another tensor_model_parallel_size"
        )


def get_peft_cls(model_config: Any, bridge: object, provider: object, dtype: Any = None) -> Peft | None:
    """The adapters that verl adds to the model when it is built; None without adapters.

    Raises:
        ConfigError: ``model_config.lora`` has unsupported settings, or the bridge is mbridge's.
    """
    lora = getattr(model_config, "lora", {})
    if lora.get("rank", 0) <= 0:
        return None
    if provider is None:
        raise ConfigError("adapters need vanilla_mbridge=False: mbridge has no functions for adapters")
    return create_peft(lora, dtype)


def export_qat_weights(
    per_tensor_param: Generator[tuple[str, Tensor], None, None], modules: Models, qat_mode: str, bridge: object
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model in QAT, in NVFP4: codes and scales as ModelOpt's quantizers round them in training.

    All ranks call it together.

    Args:
        per_tensor_param: the weights in bf16, of which nothing was read. It is closed.
        modules: this rank's chunks, wrapped or not, with ModelOpt's quantizers.
        qat_mode, bridge: without effect.

    Raises:
        ConfigError: on every rank, as ``qat_format``.
    """
    from mcore_bridge.weights.export import iter_hf_weights

    per_tensor_param.close()
    return iter_hf_weights(modules, expert_format="split", quantize=qat_format(modules))


def hf_to_mcore_config(*arguments: object, **keywords: object) -> NoReturn:
    """Raise ``ConfigError``: use verl's bridges."""
    _refuse("hf_to_mcore_config")


def init_mcore_model(*arguments: object, **keywords: object) -> NoReturn:
    """Raise ``ConfigError``: use verl's bridges."""
    _refuse("init_mcore_model")


def get_mcore_weight_converter(*arguments: object, **keywords: object) -> NoReturn:
    """Raise ``ConfigError``: use verl's bridges."""
    _refuse("get_mcore_weight_converter")


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        f"verl's {name} is not served by mcore_bridge: it belongs to training with use_mbridge=False (verl up to "
        "0.7.1), and to verl's commands converter_hf_to_mcore.py and model_merger (backend megatron). Train with "
        "use_mbridge=True; for the commands use `mcore-bridge convert`, or unset VERL_USE_EXTERNAL_MODULES"
    )
