"""The scheme of weights that no file has encoded yet: which tensors a ``quantization_config`` encodes, and how.

The tensors are described as a file would store them, and then read like the tensors of a file. So a new scheme and the
scheme of a folder that was written with it are equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from mcore_bridge.config.quantization import Grain, Quantization
from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.codec import PER_BYTE
from mcore_bridge.rules.scheme import Scheme, Shape, scheme_of
from mcore_bridge.rules.spec import TensorSpec

_FLOAT8 = torch.float8_e4m3fn
_WORD = 8
"""Numbers of four bits in a word of int4."""
_LISTS = {"fp8": "modules_to_not_convert", "mxfp4": "modules_to_not_convert", "modelopt": "ignore"}
"""The field with modules that are not encoded, by method; "ignore" for all others."""


def new_scheme(specs: Iterable[TensorSpec], quantization: Quantization) -> Scheme:
    """The scheme for ``specs``, the plain weights of linear layers. Modules that the config leaves out stay plain.

    Raises:
        ConfigError: the config describes several encodings, or a weight does not divide into its groups; the message
            names all such weights.
    """
    if len(quantization.allowed) != 1:
        raise ConfigError(
            f"quantize must describe one encoding for all weights, found {len(quantization.allowed)} in the "
            f"quantization_config of {quantization.method}: leave one"
        )
    ((kind, grain),) = quantization.allowed
    stored: dict[str, TensorSpec] = {}
    wrong = []
    for spec in specs:
        if is_left_out(spec.name, quantization.left_out) or (kind == "mxfp4" and len(spec.shape) < 3):
            continue
        group = grain[1] if kind != "fp8" and isinstance(grain, tuple) else 1
        if spec.shape[-2 if kind == "mxfp4" else -1] % group or (kind in ("int4", "nvfp4") and len(spec.shape) > 2):
            wrong.append(f"{spec.name} {list(spec.shape)}")
        else:
            parts = _MAKERS[kind](spec.name, spec.shape, grain, quantization.method)
            stored.update((part.name, part) for part in parts)
    if wrong:
        raise ConfigError(
            f"{len(wrong)} weights must be matrices whose columns divide into groups of {kind} ({grain}), found "
            f"{', '.join(wrong[:5])}. Name their modules in {list_of(quantization.method)!r} of the "
            "quantization_config, or export experts one by one"
        )
    return scheme_of(stored, quantization.block, powers=quantization.powers)


def list_of(method: str) -> str:
    """The field of a ``quantization_config`` that names the modules that are not encoded."""
    return _LISTS.get(method, "ignore")


def is_left_out(name: str, modules: Iterable[str]) -> bool:
    """Whether a config leaves the tensor out: by the whole name of its module, a part of the name, or ``re:PATTERN``.

    >>> is_left_out("model.layers.0.mlp.gate.weight", ["lm_head", "mlp.gate"])
    True
    """
    module = name.removesuffix(".weight")
    return any(
        re.match(pattern.removeprefix("re:"), module) is not None
        if pattern.startswith("re:")
        else f".{pattern}." in f".{module}."
        for pattern in modules
    )


def _fp8(name: str, shape: Shape, grain: Grain, method: str) -> Iterator[TensorSpec]:
    yield TensorSpec(name, shape, _FLOAT8)
    if isinstance(grain, tuple):
        grid = (*shape[:-2], *(-(-size // block) for size, block in zip(shape[-2:], grain, strict=True)))
    elif grain == "row":
        grid = (*shape[:-1], 1)
    else:
        grid = (1,) if method == "compressed-tensors" else ()
    dtype = torch.bfloat16 if method == "compressed-tensors" else torch.float32
    yield TensorSpec(f"{name}_scale_inv" if method == "fp8" else f"{name}_scale", grid, dtype)


def _int4(name: str, shape: Shape, grain: Grain, method: str) -> Iterator[TensorSpec]:
    rows, columns = shape
    yield TensorSpec(f"{name}_packed", (rows, columns // _WORD), torch.int32)
    yield TensorSpec(f"{name}_scale", (rows, columns // int(grain[1])), torch.bfloat16)
    yield TensorSpec(f"{name}_shape", (2,), torch.int64)


def _nvfp4(name: str, shape: Shape, grain: Grain, method: str) -> Iterator[TensorSpec]:
    rows, columns = shape
    packed = method == "compressed-tensors"
    yield TensorSpec(f"{name}_packed" if packed else name, (rows, columns // PER_BYTE["nvfp4"]), torch.uint8)
    yield TensorSpec(f"{name}_scale", (rows, columns // int(grain[1])), _FLOAT8)
    yield TensorSpec(f"{name}_global_scale" if packed else f"{name}_scale_2", (1,) if packed else (), torch.float32)


def _mxfp4(name: str, shape: Shape, grain: Grain, method: str) -> Iterator[TensorSpec]:
    experts, columns, rows = shape
    size = int(grain[1])
    yield TensorSpec(f"{name}_blocks", (experts, rows, columns // size, size // PER_BYTE["mxfp4"]), torch.uint8)
    yield TensorSpec(f"{name}_scales", (experts, rows, columns // size), torch.uint8)


_MAKERS = {"fp8": _fp8, "int4": _int4, "nvfp4": _nvfp4, "mxfp4": _mxfp4}
