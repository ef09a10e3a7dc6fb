"""The field of an HF config about quantized weights. It changes how files are read, and does not change the model."""

from mcore_bridge.config.fields import Derive, Hf
from mcore_bridge.config.quantization import read_quantization


def _accept(hf: Hf) -> dict[str, object]:
    read_quantization(hf.get("quantization_config"))
    return {}


QUANTIZATION = Derive(
    ("quantization_config",),
    _accept,
    lambda mcore: {},
    refuses=(
        "`quant_method` other than fp8, mxfp4, compressed-tensors and modelopt: load the release in bf16, or write one",
        "formats of compressed-tensors and ModelOpt that [quantized.md](../guide/quantized.md) does not list: load "
        "the release in bf16, or write one",
    ),
)
