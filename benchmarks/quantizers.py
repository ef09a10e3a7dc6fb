"""Compares the bits of FP8 blocks with those of slime and Megatron-Bridge, whose functions come from checkouts.

python benchmarks/quantizers.py --slime CHECKOUT --megatron-bridge CHECKOUT

Each function encodes equal weights in bf16. A line says how many scales and codes differ from ours, and the largest
error of a number, as a share of the largest one of its block. Without a GPU, slime's kernel runs in Triton's
interpreter, whose scales are right. But it rounds many numbers to a wrong code of FP8, such as 31.8 to 16. So on a CPU
the codes of slime are made from its scales, by its formula.
"""

from __future__ import annotations

import importlib.util
import json
import os
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.sent.encoding import encoded_tensors
from mcore_bridge.weights.source.weight_format import weight_format

BLOCK, MOST = 128, 448.0
NOTE: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
SLIME = "slime/backends/megatron_utils/kernels/fp8_kernel.py"
MEGATRON_BRIDGE = "src/megatron/bridge/models/conversion/quantization_utils.py"
Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From a weight to its codes and scales."""


def ours(weight: Tensor, **powers: str) -> tuple[Tensor, Tensor]:
    """By a ``quantization_config``; with ``scale_fmt="ue8m0"`` scales are powers of two."""
    form = weight_format(NOTE | powers, None)
    scheme = form.scheme_for([TensorSpec.of("x.weight", weight)])
    made = dict(encoded_tensors("x.weight", weight, scheme, form))
    return made["x.weight"], made["x.weight_scale_inv"]


def module_at(folder: Path, file: str) -> Any:
    """A single file of a checkout, without the package around it."""
    spec = importlib.util.spec_from_file_location("peer", folder / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quantizers(slime: Path | None, megatron_bridge: Path | None) -> dict[str, tuple[Quantizer, Quantizer]]:
    """The functions of peers by name, each beside ours with equal settings."""
    found: dict[str, tuple[Quantizer, Quantizer]] = {}
    if slime is not None:
        cast = module_at(slime, SLIME).blockwise_cast_to_fp8_triton

        def of_slime(weight: Tensor) -> tuple[Tensor, Tensor]:
            codes, scales = cast(weight, [BLOCK, BLOCK])
            if weight.device.type == "cpu":
                products = weight.float() * (1 / spread(scales, weight.shape))
                codes = products.clamp(-MOST, MOST).to(codes.dtype)
            return codes, scales

        found["slime"] = of_slime, ours
    if megatron_bridge is not None:
        like = module_at(megatron_bridge, MEGATRON_BRIDGE).quantize_fp8_e4m3fn_like_scale

        def of(dtype: torch.dtype) -> Quantizer:
            return lambda weight: like(weight, torch.empty(*(-(-size // BLOCK) for size in weight.shape), dtype=dtype))

        found["Megatron-Bridge"] = of(torch.float32), ours
        powers = of(torch.float8_e8m0fnu), lambda weight: ours(weight, scale_fmt="ue8m0")
        found["Megatron-Bridge, powers of two"] = powers
    return found


def weights(device: str) -> dict[str, Tensor]:
    """Weights in bf16: normal ones, whose last blocks are smaller; of many magnitudes; and a block of zeros."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(1300, 1000, generator=generator) * 0.02
    rows = torch.logspace(-14, 4, 1280)[:, None]
    many = torch.randn(1280, 1024, generator=generator) * rows
    zeros = normal.clone()
    zeros[:BLOCK, :BLOCK] = 0
    made = {"normal": normal, "many magnitudes": many, "zeros": zeros, "tiny": normal * 1e-12}
    return {name: weight.bfloat16().to(device) for name, weight in made.items()}


def compared(theirs: Quantizer, own: Quantizer, weight: Tensor) -> Mapping[str, float | int]:
    """The differences between both, and the largest error of each."""
    (codes, scales), (own_codes, own_scales) = theirs(weight), own(weight)
    return {
        "scales": scales.numel(),
        "scales_differ": int((scales.float() != own_scales.float()).sum()),
        "codes": codes.numel(),
        "codes_differ": int((codes.view(torch.uint8) != own_codes.view(torch.uint8)).sum()),
        "error": error_of(weight, codes, scales),
        "our_error": error_of(weight, own_codes, own_scales),
    }


def error_of(weight: Tensor, codes: Tensor, scales: Tensor) -> float:
    """The largest error of a number, divided by the largest number of its block."""
    strips = [strip.split(BLOCK, 1) for strip in weight.float().abs().split(BLOCK)]
    largest = torch.tensor([[float(block.max()) for block in strip] for strip in strips], device=weight.device)
    most = spread(largest, weight.shape).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((codes.float() * spread(scales, weight.shape) - weight.float()).abs() / most).max())


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """The scale of each number of a weight."""
    return scales.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]


def main() -> None:
    """Compare, and print a line for each peer and weight, and one of JSON."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--slime", type=Path)
    parser.add_argument("--megatron-bridge", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    for name, (theirs, own) in quantizers(arguments.slime, arguments.megatron_bridge).items():
        for kind, weight in weights(arguments.device).items():
            found = compared(theirs, own, weight)
            print(
                f"{name}, {kind}: {found['scales_differ']} of {found['scales']} scales and {found['codes_differ']} of "
                f"{found['codes']} codes differ; largest error {found['error']:.4f}, ours {found['our_error']:.4f}"
            )
            print(json.dumps({"peer": name, "weight": kind, **found}))


if __name__ == "__main__":
    main()
