"""What a trainer exports: an iterator of pairs that still knows its models, and the format of a model in QAT.

To import this file takes no megatron-core.
"""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mcore_bridge.errors import ConfigError

if TYPE_CHECKING:
    from mcore_bridge.weights.model_chunks import Models


NVFP4 = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}


def qat_format(models: Models) -> dict[str, Any]:
    """The ``quantization_config`` of a model whose weights ModelOpt's quantizers round to NVFP4 in training (QAT).

    Pass it as ``quantize``. All ranks of a replica call this together, after the quantizers were inserted.

    Args:
        models: this rank's chunks, wrapped or not.

    Returns:
        ``exclude_modules`` lists the modules that training does not round. Experts have names of their own
        (``expert_format="split"``).

    Raises:
        ConfigError: on every rank, when training rounds nothing, or activations, or a weight to another format, or a
            weight that cannot leave in NVFP4.
    """
    from mcore_bridge.weights.bound import bind
    from mcore_bridge.weights.manifest import manifest
    from mcore_bridge.weights.model_chunks import chunks_of
    from mcore_bridge.weights.model_tensors import quantizers_of
    from mcore_bridge.weights.transfer.collectives import Group
    from mcore_bridge.weights.transfer.failures import raise_on_all

    group, rounded, problems = Group.of_replica(chunks_of(models)[0].pg_collection), set[str](), set[str]()
    with raise_on_all(group, kind=ConfigError):
        bound = bind(models, expert_format="split")
        for mcore, module, quantizer in quantizers_of(bound.chunks):
            names = [name for own in mcore for name in bound.mapping.bind(own).hf]
            rounded.update(names)
            if problem := _unlike_nvfp4(module, quantizer):
                problems.add(f"{names[0]}: {problem}")
    everywhere = group.all_gather_object((rounded, problems))
    rounded, problems = (set[str]().union(*of_ranks) for of_ranks in zip(*everywhere, strict=True))
    sent = {spec.name for spec in manifest(models, expert_format="split", quantize=NVFP4)}
    encoded = {name for name in sent if f"{name}_scale" in sent}
    problems.update(f"{name}: it cannot leave in NVFP4" for name in rounded - encoded)
    if problems or not rounded:
        others = f"{'; '.join(sorted(problems)[:4])} ({len(problems)} in all)" if problems else "no quantizer"
        raise ConfigError(
            f"expected quantizers of ModelOpt that round weights to NVFP4 and no activations, found {others}. Change "
            "the config of mtq.quantize, such as `qat` of verl or `quant_cfg` of NeMo-RL; disable other quantizers"
        )
    plain = sorted(name.removesuffix(".weight") for name in encoded - rounded)
    return {**NVFP4, "exclude_modules": plain}


def _unlike_nvfp4(module: Any, quantizer: Any) -> str:
    """In which way training rounds a weight or its inputs otherwise; empty if it does not."""
    bits = getattr(quantizer, "num_bits", type(quantizer).__name__)
    blocks = getattr(quantizer, "block_sizes", None) or {}
    if (bits, blocks.get(-1), blocks.get("scale_bits")) != ((2, 1), 16, (4, 3)):
        return f"num_bits={bits}, block_sizes={blocks}"
    of_inputs = getattr(module, "input_quantizer", None)
    return "its input_quantizer is enabled" if of_inputs is not None and of_inputs.is_enabled else ""


class WeightExport(Generator[tuple[str, Tensor], None, None]):
    """The generator ``iter_hf_weights(models, ...)``. Whoever gets it may send the models by another way instead.

    Args:
        models: this rank's chunks, wrapped or not.
        merged: whether adapters are merged, as for ``iter_hf_weights``.
        device: where tensors are yielded, as for ``iter_hf_weights``.
    """

    def __init__(self, models: Models, *, merged: bool | None = None, device: str | None = None) -> None:
        from mcore_bridge.weights.export import iter_hf_weights

        self.models, self.merged = models, merged
        self._pairs: Any = iter_hf_weights(models, merged=merged, device=device)

    def send(self, value: None) -> tuple[str, Tensor]:
        """The next pair."""
        pair: tuple[str, Tensor] = self._pairs.send(value)
        return pair

    def throw(self, kind: Any, value: object = None, at: TracebackType | None = None) -> tuple[str, Tensor]:
        """Raise an error inside of the generator, which then ends."""
        pair: tuple[str, Tensor] = self._pairs.throw(kind if value is None else value)
        return pair
