"""Reads the description of quantized weights in a config, and refuses unsupported formats by name.

The files alone decide which tensors are quantized, and the config must agree with them.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, Union

from mcore_bridge.arguments import is_count
from mcore_bridge.errors import ConfigError

Grain = Literal["tensor", "row"] | tuple[int, int]
"""The elements that share a scale: the whole weight, a row, or a block with these numbers of rows and columns."""

Quantize: TypeAlias = Union[Literal["as_published"], str, "os.PathLike[str]", Mapping[str, Any], None]
"""How weights leave. None: plain. "as_published": as the folder of the model has them.

A folder, or its hub name: as this other release of the model has them. A dict: by this ``quantization_config``, as it
stands in a config.json.
"""

_MODELOPT: dict[str, tuple[str, Grain]] = {
    "FP8": ("fp8", "tensor"),
    "NVFP4": ("nvfp4", (1, 16)),
    "W4A16_NVFP4": ("nvfp4", (1, 16)),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", "row"),
    "FP8_PB_WO": ("fp8", (128, 128)),
}
_ORDERS = (None, False, "static", "weight")
"""Values of ``actorder`` (the order of columns during compressed-tensors' rounding) that do not change its format."""
_E4M3 = ("e4m3", "float8_e4m3fn")
_BLOCK = (128, 128)
"""The block size of transformers if a config gives none; null means no blocks."""
DESCRIPTION = ("quantization_config", "expert_dtype")
"""Fields of an HF config that describe encoded weights: the description, and DeepSeek V4's field beside it."""
_EXPERTS: dict[object, tuple[tuple[str, Grain], ...]] = {"fp8": (), "fp4": (("mxfp4", (1, 32)),), None: ()}
"""Encodings of experts beside FP8, by ``expert_dtype``."""
LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""Fields with modules that are not encoded; each method reads one of them."""
LINEAR = ("Linear",)
"""The target of compressed-tensors that means all linear layers."""
_WAY_OUT = (
    "load the release of this model in bf16, or write one with a program that reads this format (with transformers: "
    "from_pretrained, dequantize and save_pretrained, if it supports the format)"
)


class NotReadError(ConfigError):
    """A format is not supported; ``said`` has its words without the way out for a reader."""

    def __init__(self, said: str) -> None:
        super().__init__(f"quantization_config: {said}, which is not read: {_WAY_OUT}.")
        self.said = said


@dataclass(frozen=True, slots=True)
class Quantization:
    """The encodings that the weights of a checkpoint may have: pairs of a kind of codes and a grain of scales."""

    method: str
    allowed: frozenset[tuple[str, Grain]]
    powers: bool = False
    """Whether scales are powers of two."""
    left_out: tuple[str, ...] = ()
    """Names of modules, or patterns of names, whose weights are not encoded."""
    targets: tuple[str, ...] = LINEAR
    """Names, patterns or classes of modules whose weights are encoded. Only compressed-tensors has some."""

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale of FP8; None if the config gives none."""
        return next((grain for kind, grain in self.allowed if kind == "fp8" and isinstance(grain, tuple)), None)


def read_quantization(note: object) -> Quantization | None:
    """Reads the ``quantization_config`` of an HF config, or ModelOpt's own form of it. None stays None.

    Raises:
        ConfigError: the format is not supported; the message says what to do.

    Example:
        >>> read_quantization({"quant_method": "fp8", "weight_block_size": [128, 128]}).block
        (128, 128)
    """
    if note is None:
        return None
    fields = fields_of(note)
    method = fields.get("quant_method")
    readers = {
        "fp8": _fp8,
        "mxfp4": _mxfp4,
        "compressed-tensors": _compressed,
        "modelopt": _modelopt,
        "fbgemm_fp8": _fbgemm,
    }
    if not isinstance(method, str) or method not in readers:
        actual = method if method is not None else f"none beside {sorted(map(str, fields))}"
        raise _refused("quant_method", actual, ", ".join(map(repr, readers)))
    powers = fields.get("scale_fmt") == "ue8m0"
    return Quantization(method, frozenset(readers[method](fields)), powers, left_out_by(fields), _targets(fields))


def description_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an HF config that describe encoded weights, as they stand there; none without a description.

    Example:
        >>> description_in({"model_type": "qwen3", "expert_dtype": "fp4"})
        {}
    """
    fields = {name: config[name] for name in DESCRIPTION if config.get(name) is not None}
    return fields if DESCRIPTION[0] in fields else {}


def note_of(description: Mapping[str, Any]) -> Any:
    """The ``quantization_config`` of ``description_in``, with the fields beside it; None without one."""
    note, *_ = (description.get(name) for name in DESCRIPTION)
    beside = {name: description[name] for name in DESCRIPTION[1:] if name in description}
    return {**beside, **note} if beside and isinstance(note, Mapping) else note


def fields_of(note: object) -> Mapping[str, Any]:
    """The fields of a ``quantization_config``; also if it is in the form that ModelOpt writes to a separate file.

    Raises:
        ConfigError: it is no object.
    """
    fields: Any = note if isinstance(note, Mapping) else note.to_dict() if hasattr(note, "to_dict") else None
    if not isinstance(fields, Mapping):
        raise ConfigError(f"quantization_config must be an object, found {note!r:.200}. Correct the HF config.")
    if isinstance(fields.get("quantization"), Mapping):
        fields = {"quant_method": "modelopt", **fields["quantization"]}
    return fields if "quant_method" in fields or "quant_algo" not in fields else {"quant_method": "modelopt", **fields}


def left_out_by(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The names and patterns of modules that are not encoded, in all lists of a config."""
    lists = (fields.get(name) for name in LISTS)
    return tuple(str(module) for modules in lists if isinstance(modules, list | tuple) for module in modules)


def _targets(fields: Mapping[str, Any]) -> tuple[str, ...]:
    groups = fields.get("config_groups")
    if fields["quant_method"] != "compressed-tensors" or not isinstance(groups, Mapping):
        return LINEAR
    lists = [group.get("targets") or LINEAR for group in groups.values() if isinstance(group, Mapping)]
    if wrong := [targets for targets in lists if not isinstance(targets, list | tuple)]:
        raise _refused("targets of compressed-tensors", wrong[0], "a list of names, patterns or classes of modules")
    return tuple(dict.fromkeys(str(target) for targets in lists for target in targets))


def _fp8(fields: Mapping[str, Any]) -> Iterator[tuple[str, Grain]]:
    if (fields.get("fmt") or "e4m3") not in _E4M3:
        raise _refused("fmt", fields["fmt"], " or ".join(map(repr, _E4M3)))
    yield "fp8", _block(fields.get("weight_block_size", _BLOCK)) or "tensor"
    if not isinstance(experts := fields.get("expert_dtype"), str | None) or experts not in _EXPERTS:
        raise _refused("expert_dtype", experts, "'fp8' or 'fp4'")
    yield from _EXPERTS[experts]
    if algorithm := fields.get("moe_quant_algo"):  # of NVIDIA's releases, where MTP layers keep expert_dtype
        yield from _modelopt({"quant_algo": algorithm})


def _fbgemm(fields: Mapping[str, Any]) -> Iterator[tuple[str, Grain]]:
    yield "fp8", "row"


def _mxfp4(fields: Mapping[str, Any]) -> Iterator[tuple[str, Grain]]:
    yield "mxfp4", (1, 32)


def _modelopt(fields: Mapping[str, Any]) -> Iterator[tuple[str, Grain]]:
    """Nothing if only the KV cache is quantized."""
    names, layers = [fields.get("quant_algo")], fields.get("quantized_layers")
    if names == ["MIXED_PRECISION"]:
        known = layers.values() if isinstance(layers, Mapping) and layers else []
        names = [layer.get("quant_algo") if isinstance(layer, Mapping) else layer for layer in known] or [*_MODELOPT]
    for name in names:
        encoding = _MODELOPT.get(name.upper()) if isinstance(name, str) else None
        if encoding is not None:
            yield encoding
        elif name not in (None, "UNQUANTIZED"):
            raise _refused("quant_algo of ModelOpt", name, ", ".join(map(repr, _MODELOPT)))


def _compressed(fields: Mapping[str, Any]) -> Iterator[tuple[str, Grain]]:
    for name in ("transform_config", "sparsity_config"):
        value = fields.get(name)
        if value and not (isinstance(value, Mapping) and value.get("format", "") == "dense"):
            raise _refused(f"{name} of compressed-tensors", value, "none")
    groups = fields.get("config_groups")
    if not groups and fields.get("kv_cache_scheme"):  # only the cache is quantized
        return
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("config_groups of compressed-tensors", groups, "an object for each kind of weights")
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else group
        if isinstance(weights, Mapping):
            yield _of_group(weights)
        elif weights:
            raise _refused("weights of compressed-tensors", weights, "an object, or null")


def _of_group(weights: Mapping[str, Any]) -> tuple[str, Grain]:
    kind, bits, strategy = (weights.get(name) for name in ("type", "num_bits", "strategy"))
    size = weights.get("group_size")
    order = weights.get("actorder")
    actual = f"{kind} of {bits} bits by {strategy} (group_size={size}, symmetric={weights.get('symmetric')}"
    actual += ")" if order in _ORDERS else f", actorder={order})"
    expected = "symmetric float of 8 bits by tensor, channel or block, int of 4 by group, float of 4 by 16"
    expected += "" if order in _ORDERS else ", in the order of the columns (actorder null, 'static' or 'weight')"
    if weights.get("symmetric") is False or order not in _ORDERS:
        raise _refused("weights of compressed-tensors", actual, expected)
    if (kind, bits) == ("float", 8) and strategy in ("tensor", "channel"):
        return "fp8", "tensor" if strategy == "tensor" else "row"
    if (kind, bits, strategy) == ("float", 8, "block") and (block := _block(_apart(weights.get("block_structure")))):
        return "fp8", block
    if (kind, bits, strategy) == ("int", 4, "group") and is_count(size):
        return "int4", (1, size)
    if (kind, bits, strategy, size) == ("float", 4, "tensor_group", 16):
        return "nvfp4", (1, 16)
    raise _refused("weights of compressed-tensors", actual, expected)


def _apart(sizes: object) -> object:
    """The sizes in "128x128", as compressed-tensors wrote it at first."""
    return [int(size) if size.isdecimal() else size for size in sizes.split("x")] if isinstance(sizes, str) else sizes


def _block(sizes: object) -> tuple[int, int] | None:
    if sizes is None:
        return None
    if isinstance(sizes, list | tuple) and len(sizes) == 2 and all(is_count(size) and size < 1 << 31 for size in sizes):
        return sizes[0], sizes[1]
    raise _refused("the size of blocks", sizes, "two positive whole numbers below 2 ** 31")


def _refused(what: str, value: object, expected: str) -> NotReadError:
    return NotReadError(f"{what} must be {expected}, found {value!r:.200}")
