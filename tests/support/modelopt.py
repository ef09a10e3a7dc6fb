"""ModelOpt's quantizers of NVFP4: how verl inserts them into a model (QAT), and what they make of weights."""

import copy
import itertools
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.rules import codec as rules

NOTE = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
_INEXACT = 2**-20  # more than a GPU's fast division may be wrong by
_WEIGHTS = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}, "axis": None}


def fake_quantized(chunk: Any, *ignored: str) -> None:
    """Insert quantizers as verl's ``apply_qat`` does."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.config import _default_disabled_quantizer_cfg as disabled

    config = {"*weight_quantizer": {**_WEIGHTS, "enable": True}, "*input_quantizer": {"enable": False}}
    quantizers = mtq.normalize_quant_cfg_list(config)
    off = copy.deepcopy(disabled)
    quantizers.extend(mtq.normalize_quant_cfg_list(off) if isinstance(off, dict) else off)
    quantizers.extend({"quantizer_name": pattern, "enable": False} for pattern in ignored)
    mtq.quantize(chunk, {"quant_cfg": quantizers, "algorithm": "max"})


def range_of(weight: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number that a quantizer may make of each number of a weight, fp32.

    ModelOpt's kernel divides inexactly. In the middle between two codes, or between two scales, it may choose either.

    Args:
        amax: the largest magnitude of the weight for the quantizer.
    """
    inexact = [1 + sign * _INEXACT for sign in (-1, 0, 1)]
    every = [_rounded(weight.float(), amax.float(), *factors) for factors in itertools.product(inexact, inexact)]
    return torch.stack(every).amin(0), torch.stack(every).amax(0)


def _rounded(numbers: Tensor, amax: Tensor, of_scales: float, of_numbers: float) -> Tensor:
    codec = rules.Codec("nvfp4", (1, 16), None, "multiplies")
    blocks, overall = numbers.unflatten(-1, (-1, 16)), rules.new_overall(codec, amax)
    largest = blocks.abs().amax(-1, True) * of_scales
    scales = rules.scales_of(codec, rules.new_scales(codec, largest, torch.float8_e4m3fn, overall=overall), overall)
    codes = rules.codes_of(codec, rules.divided(codec, blocks * of_numbers, scales))
    return rules.decoded(codec, rules.numbers_of(codec, codes), scales, torch.float32).flatten(-2)
