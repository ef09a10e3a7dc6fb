"""Inserts ModelOpt's quantizers of NVFP4 into a model (QAT), as verl does."""

import copy
from typing import Any

NOTE = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
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
