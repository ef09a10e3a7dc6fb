"""A stand-in for a parameter that TransformerEngine holds in FP8, since TransformerEngine needs a GPU.

It has the interface of ``Float8BlockwiseQTensor`` that the library uses, and like it no memory of its own: codes of
e4m3, and a scale for each block, by either of TransformerEngine's two rules. ``tests/gpu/test_gpu_fp8_parameters.py``
uses the real one.
"""

import types
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.quantized import amax, power_of_two, spread

BLOCK = (8, 8)
"""Small enough for blocks to fit into the shards of tiny models."""


class StandIn(Tensor):
    """A parameter in FP8 blocks."""

    _codes: Tensor
    _scales: Tensor
    _quantizer: Any
    _high_precision_init_val: Tensor

    @staticmethod
    def __new__(
        cls, values: Tensor, codes: Tensor | None = None, scales: Tensor | None = None, *, powers: bool = True
    ) -> "StandIn":
        made: StandIn = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined]
        made._quantizer = types.SimpleNamespace(block_len=BLOCK[0], force_pow_2_scales=powers)
        if codes is None or scales is None:
            made.quantize_(values)
        else:
            made._codes, made._scales = codes, scales
        return made

    def quantize_(self, values: Tensor) -> "StandIn":
        assert values.shape == self.shape
        assert values.is_contiguous()
        largest = amax(values, BLOCK)
        factors = 448 / torch.where(largest > 0, largest, 448.0)
        if self._quantizer.force_pow_2_scales:
            factors = 1 / power_of_two(1 / factors)
        self._scales = 1 / factors
        self._codes = (values.float() * spread(factors, BLOCK, values.shape)).to(torch.float8_e4m3fn)
        return self

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        return (self._codes.float() * spread(self._scales, BLOCK, self.shape)).to(dtype or self.dtype)

    def get_data_tensors(self) -> tuple[Tensor, Tensor | None]:
        return self._codes, None

    def detach(self) -> "StandIn":  # type: ignore[override]
        return StandIn(self, self._codes, self._scales, powers=self._quantizer.force_pow_2_scales)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return arguments[0].detach()
        if function in (
            torch.ops.aten.is_pinned.default,
            torch.ops.aten.split.Tensor,
        ):  # which megatron-core's saves call
            return function(arguments[0].dequantize(), *arguments[1:])
        raise NotImplementedError(f"{function} of a parameter in FP8")

    __torch_function__ = torch._C._disabled_torch_function_impl


def quantize_linears(models: Any, *, powers: bool = True) -> list[StandIn]:
    """Replace the weights of all linear layers by stand-ins, as ``fp8_param`` does; returns these.

    Args:
        powers: whether scales are powers of two, TransformerEngine's default.
    """
    made = []
    for chunk in models:
        for module in chunk.decoder.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2:
                module.weight = nn.Parameter(StandIn(weight.detach(), powers=powers))
                module.weight._high_precision_init_val = weight.detach().clone()
                module.weight.get_high_precision_init_val = types.MethodType(_first, module.weight)
                made.append(module.weight)
    return made


def _first(parameter: Any) -> Tensor | None:
    return getattr(parameter, "_high_precision_init_val", None)
