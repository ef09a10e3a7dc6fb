"""Parameters that TransformerEngine holds in FP8 (``fp8_param``): where their memory is, and how to read and set them.

Such a tensor has the shape and the dtype of a bf16 parameter. But its values are codes and scales in other tensors, and
it has no views. An export makes its values when it needs them. A load collects new values in a buffer, and
TransformerEngine quantizes the buffer when all of them have come. So all other code meets plain tensors.

TransformerEngine keeps the values of which it made the codes, on the CPU, until an optimizer takes them as its first
masters. A load replaces them. Otherwise masters would begin at the random values with which the model was built.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mcore_bridge.errors import plural
from mcore_bridge.rules.codec import scales_of
from mcore_bridge.rules.dtypes import dtype_name
from mcore_bridge.rules.encoded import EncodedSlice

logger = logging.getLogger(__name__)
_PLAIN = frozenset({Tensor, nn.Parameter})
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def of_other_classes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are neither torch's tensors nor its parameters, by name; nearly always none."""
    if _PLAIN.issuperset(map(type, tensors.values())):
        return {}
    return {name: tensor for name, tensor in tensors.items() if type(tensor) not in _PLAIN}


def is_quantized(tensor: Tensor) -> bool:
    """Whether TransformerEngine holds a tensor as codes and scales."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "quantize_")


def memory_of(tensor: Tensor) -> Tensor:
    """The tensor in whose memory the values are: ``tensor`` itself, or its codes."""
    if not is_quantized(tensor):
        return tensor
    quantized: Any = tensor
    return next(codes for codes in quantized.get_data_tensors() if codes is not None)


def memory_of_all(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """``memory_of`` for each of thousands of tensors, which are nearly always plain."""
    return tensors if _PLAIN.issuperset(map(type, tensors)) else [*map(memory_of, tensors)]


@torch.no_grad()
def values_of(tensor: Tensor) -> Tensor:
    """The values of a tensor in its dtype: ``tensor`` itself, or a new tensor for a quantized one."""
    return tensor.detach().dequantize() if is_quantized(tensor) else tensor


def format_of(tensor: Tensor) -> str:
    """The name of the format in which a tensor holds its values: its dtype, or the class of a quantized one."""
    return type(tensor).__name__ if is_quantized(tensor) else dtype_name(tensor.dtype)


class Targets:
    """The plain tensors into which a load copies values: the tensors of a rank, and buffers for quantized ones.

    Args:
        tensors: the tensors of a rank, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._buffers: dict[str, Tensor] = {}
        self._late = 0
        """The number of parameters whose first masters an optimizer has already taken."""
        self._rescaled: set[str] = set()
        """Parameters that lose the codes of their source."""
        self.quantized = frozenset(name for name, tensor in of_other_classes(tensors).items() if is_quantized(tensor))

    def __getitem__(self, name: str) -> Tensor:
        """The tensor to write to. A new buffer has the current values, as some sources lack a part of them."""
        tensor = self._tensors[name]
        if name not in self.quantized:
            return tensor
        if name not in self._buffers:
            self._buffers[name] = values_of(tensor)
        return self._buffers[name]

    def note_source(self, name: str, source: EncodedSlice) -> None:
        """Note whether an encoded slice, which goes into the tensor ``name``, has other scales than this tensor can."""
        if name in self.quantized and name not in self._rescaled and _loses_codes(self._tensors[name], source):
            self._rescaled.add(name)

    def num_buffered(self, names: Iterable[str]) -> int:
        """How many bytes the buffers of some tensors take."""
        return sum(self._tensors[name].nbytes for name in self.quantized.intersection(names))

    def settle(self, is_complete: Callable[[str], bool]) -> None:
        """Quantize the buffers that are complete, and free them."""
        for name in [*filter(is_complete, self._buffers)]:
            self._late += not _set(self._tensors[name], self._buffers.pop(name))

    def close(self, *, has_masters: bool = False) -> None:
        """Quantize all buffers. Warn if an optimizer has other masters, or if codes of the source are lost.

        Args:
            has_masters: whether the masters of an optimizer are loaded, too.
        """
        self.settle(lambda _: True)
        if self._rescaled:
            logger.warning(
                "%s lost the codes of the source, and have new ones: the source has FP8 blocks whose scales are no "
                "powers of two, and TransformerEngine's scales are. On Hopper, set "
                "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 in the environment of the job, and codes are kept",
                plural(len(self._rescaled), "parameter"),
            )
        if self._late and not has_masters:
            logger.warning(
                "an optimizer still has the old masters of the %d parameters in FP8 that were loaded now. Load before "
                "the optimizer is made, and its masters begin at the loaded values. Or call its "
                "reload_model_params(), and they begin at these values rounded to FP8",
                self._late,
            )


def _loses_codes(parameter: Any, source: EncodedSlice) -> bool:
    """Whether TransformerEngine gives the blocks of a source other scales, from which other codes follow.

    Scales that are powers of two are found again: the largest number of a block decides about both. Scales of any
    value are found again within an error of bf16, if the quantizer may make such scales, and codes stay. This holds for
    blocks of one size. In other recipes and other formats, codes cannot be kept.
    """
    quantizer, codec = parameter._quantizer, source.weight.codec
    size = getattr(quantizer, "block_len", None)
    if codec.kind != "fp8" or codec.block[-2:] != (size, size) or not quantizer.force_pow_2_scales:
        return False
    return not bool((torch.frexp(scales_of(codec, source.parts[1])).mantissa == 0.5).all())


@torch.no_grad()
def _set(parameter: Any, values: Tensor) -> bool:
    """Let TransformerEngine quantize new values. The result is False if an optimizer has masters of other values."""
    _fit_scale(parameter, values)
    parameter.quantize_(values)
    if (get := getattr(parameter, "get_high_precision_init_val", None)) is None:  # it was built without gradients
        return True
    if (first := get()) is None:
        return False
    first.copy_(values)
    return True


def _fit_scale(parameter: Any, values: Tensor) -> None:
    """Give the one scale of a whole tensor the largest value that the codes of these values allow.

    With delayed scaling, TransformerEngine quantizes by the scale of earlier steps, and before the first step by 1.
    Small weights would lose most of their bits. It also keeps the largest value so far, for later scales. Before a
    load, this may be a value of memory that nobody has set. Its other recipes find both by themselves.
    """
    quantizer = parameter._quantizer
    if isinstance(scale := getattr(quantizer, "scale", None), Tensor) and values.numel():
        amax = values.abs().amax().float()
        scale.copy_(torch.where(amax > 0, _LARGEST / amax, 1.0).view(scale.shape))
        quantizer.amax.zero_()
