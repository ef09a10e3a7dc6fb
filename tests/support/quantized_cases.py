"""Families in their published forms, with the meshes on which tests try them."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import mcore_bridge as mb
from tests import zoo
from tests.support import quantized
from tests.support.quantized import Format, deepseek, ministral, mxfp4
from tests.support.strategies import tiny
from tests.support.twins import read

GPT_OSS = {"hidden_size": 64, "intermediate_size": 32}


def kimi() -> Any:
    return read("kimi_k2", zoo.described()["deepseek_v3"].hf.to_dict())


def family(name: str, **fields: Any) -> Callable[[], Any]:
    return lambda: tiny(zoo.described()[name].model_type, **{**zoo.described()[name].fields, **fields})


Case = tuple[Callable[[], Any], Format, torch.dtype, mb.ParallelDims]
CASES: dict[str, Case] = {
    "qwen3": (lambda: tiny("qwen3"), deepseek((8, 8), torch.bfloat16), torch.bfloat16, mb.ParallelDims(tp=4)),
    "qwen3_moe": (
        family("qwen3_moe"),
        deepseek((8, 8), torch.bfloat16),
        torch.float32,
        mb.ParallelDims(tp=2, ep=2, etp=2, sp=True),
    ),
    "deepseek_v3": (
        family("deepseek_v3"),
        deepseek((4, 4), rule=quantized.power_of_two),
        torch.float32,
        mb.ParallelDims(tp=2, pp=2, ep=2, sp=True),
    ),
    "deepseek_v4": (
        family("deepseek_v4", hidden_size=64, intermediate_size=64),
        quantized.deepseek_v4(),
        torch.bfloat16,
        mb.ParallelDims(tp=2, ep=2, sp=True),
    ),
    "parts in two forms": (
        lambda: tiny("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=12, intermediate_size=40),
        quantized.without_up((16, 64)),
        torch.bfloat16,
        mb.ParallelDims(),
    ),
    "minimax_m2": (family("minimax_m2"), deepseek((8, 8)), torch.bfloat16, mb.ParallelDims(ep=2, etp=2)),
    "glm4_moe": (
        family("glm4_moe"),
        quantized.rows_of_experts(alone=False),
        torch.float32,
        mb.ParallelDims(pp=2, ep=2),
    ),
    "experts alone": (
        family("qwen3_moe"),
        quantized.rows_of_experts(alone=True),
        torch.float32,
        mb.ParallelDims(tp=2, sp=True),
    ),
    "each layer": (lambda: tiny("qwen3"), quantized.groups_of_each_layer(), torch.bfloat16, mb.ParallelDims(tp=2)),
    "kimi_k2": (kimi, quantized.int4(8), torch.bfloat16, mb.ParallelDims(ep=2, etp=2)),
    "blocks": (lambda: tiny("qwen3"), quantized.blocks((8, 8)), torch.bfloat16, mb.ParallelDims(tp=2)),
    "bf16 rows": (lambda: tiny("llama"), quantized.rows(torch.bfloat16), torch.float32, mb.ParallelDims(tp=2)),
    "nvfp4": (lambda: tiny("qwen3"), quantized.nvfp4("compressed-tensors"), torch.float32, mb.ParallelDims(tp=4)),
    "ministral3": (family("ministral3"), ministral(), torch.float32, mb.ParallelDims(tp=2)),
    "modelopt": (lambda: tiny("llama"), quantized.nvfp4("modelopt"), torch.bfloat16, mb.ParallelDims(tp=2, pp=2)),
    "fbgemm": (lambda: tiny("llama"), quantized.fbgemm(), torch.bfloat16, mb.ParallelDims(tp=2)),
    "modelopt rows": (lambda: tiny("llama"), quantized.modelopt_rows(), torch.bfloat16, mb.ParallelDims(tp=2)),
    "modelopt blocks": (
        lambda: tiny("llama", hidden_size=192, intermediate_size=320, num_hidden_layers=1),
        quantized.modelopt_blocks(),
        torch.bfloat16,
        mb.ParallelDims(tp=2, sp=True),
    ),
    "modelopt mixed": (lambda: tiny("llama"), quantized.modelopt_mixed(), torch.float32, mb.ParallelDims(tp=2)),
    "gpt_oss": (family("gpt_oss", **GPT_OSS), mxfp4(), torch.bfloat16, mb.ParallelDims(tp=2, pp=2, ep=2, sp=True)),
}
"""For each family or special case: its config, its published form, a dtype, and a mesh."""


MISTRAL4: Case = (
    family("mistral4"),
    quantized.stacks_with_one_scale(),
    torch.float32,
    mb.ParallelDims(tp=2, ep=2, sp=True),
)
"""transformers 5.24 leaves out the scales of its stacks where it dequantizes them, so it is no oracle."""


def case(name: str, cases: Mapping[str, Case] = CASES) -> tuple[Any, Format, torch.dtype, mb.ParallelDims]:
    """One of ``cases``, with its config. A test without the family is skipped."""
    make, form, dtype, dims = cases[name]
    try:
        return make(), form, dtype, dims
    except KeyError:
        pytest.skip("the installed transformers lacks it")
