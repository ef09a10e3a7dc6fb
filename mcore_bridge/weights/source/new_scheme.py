"""The scheme of weights that no file has encoded yet: which tensors a ``quantization_config`` encodes, and how.

The tensors are described as a file would store them, and then read like the tensors of a file. So a new scheme and the
scheme of a folder that was written with it are equal.

A published config describes files that exist. A description for new files must say more: engines read it beside the
files, and no file has scales of activations.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import torch

from mcore_bridge.config.quantization import (
    LINEAR,
    LISTS,
    Grain,
    NotReadError,
    Quantization,
    fields_of,
    left_out_by,
    read_quantization,
)
from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.codec import PER_BYTE
from mcore_bridge.rules.scheme import Scheme, Shape, scheme_of
from mcore_bridge.rules.spec import TensorSpec

logger = logging.getLogger("mcore_bridge")
_NUMBER = re.compile(r"\d+")

_FLOAT8 = torch.float8_e4m3fn
_WORD = 8
"""Numbers of four bits in a word of int4."""
_STACKS = ("fp8", "mxfp4")
"""Methods whose engines read codes of a stack of experts. For other methods, an expert is a module."""
_REQUIRED: dict[str, dict[str, Any]] = {
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fbgemm_fp8": {"activation_scale_ub": 1200.0},
    "compressed-tensors": {"quantization_status": "compressed"},
}
"""Fields, by method, without which vLLM or transformers refuse a config or read its weights wrongly; with usual values.

See vllm.model_executor.layers.quantization and transformers.utils.quantization_config.
"""
_FORMATS = {"fp8": "float-quantized", "int4": "pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
"""The ``format`` of compressed-tensors by kind of codes."""
_HEAD = "lm_head"
"""The head in the names of transformers. A tied head has no tensor, and engines would look for its codes."""
_KNOWN = (
    *("quant_method", "activation_scheme", "weight_block_size", "fmt", "scale_fmt", "dequantize", *LISTS),
    *("config_groups", "format", "global_compression_ratio", "quantization_status", "sparsity_config"),
    *("run_compressed", "transform_config", "kv_cache_scheme", "version", "producer", "quant_algo"),
    *("quantized_layers", "group_size", "quantization", "kv_cache_quant_algo", "activation_scale_ub"),
    *("weight_per_tensor", "act_per_tensor"),
)
"""Fields of published configs that change nothing of the codes, or that are read."""
_SCALES = (None, "float", "ue8m0")
"""The values of ``scale_fmt`` that transformers and engines know."""
_NUMBERS_OF_A_WORD = 8
"""Codes of int4 lie in words of 32 bits."""
_INSTEAD = {"FP8": "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4": "W4A16_NVFP4"}
"""Algorithms of ModelOpt that need scales of activations, each with an algorithm that does not."""


def new_scheme(specs: Iterable[TensorSpec], quantization: Quantization) -> Scheme:
    """The scheme for ``specs``, the plain weights of linear layers. Modules that the config leaves out stay plain.

    Raises:
        ConfigError: the config describes several encodings, or a weight does not divide into its groups; the message
            names all such weights.
    """
    if len(quantization.allowed) != 1:
        raise ConfigError(
            f"quantize must describe one encoding for all weights, found {len(quantization.allowed)} in the "
            f"quantization_config of {quantization.method}: describe one, or pass the folder of a release"
        )
    ((kind, grain),) = quantization.allowed
    stored: dict[str, TensorSpec] = {}
    group = grain[1] if kind != "fp8" and isinstance(grain, tuple) else 1
    group = math.lcm(group, _NUMBERS_OF_A_WORD) if kind == "int4" else group
    undivided, stacks = [], []
    for spec in specs:
        if not _is_encoded(spec, kind, quantization):
            continue
        inputs = spec.shape[-2 if kind == "mxfp4" else -1]
        if len(spec.shape) > 2 and quantization.method not in _STACKS:
            stacks.append(f"{spec.name} {list(spec.shape)}")
        elif inputs % group:
            undivided.append(f"{spec.name} {list(spec.shape)} with {inputs} inputs")
        else:
            parts = _MAKERS[kind](spec.name, spec.shape, grain, quantization.method)
            stored.update((part.name, part) for part in parts)
    _require_encodable(kind, grain, undivided, stacks, quantization)
    return scheme_of(stored, quantization.block, powers=quantization.powers)


def require_some(scheme: Scheme, quantization: Quantization) -> None:
    """Require that a config encodes any weight of a whole model."""
    if not scheme.held:
        only = " (mxfp4 encodes stacks of experts alone)" if quantization.method == "mxfp4" else ""
        raise ConfigError(
            "quantize must encode weights of linear layers, found a quantization_config that leaves all of them "
            f"out{only}: shorten its list {list_of(quantization.method)!r} of modules, or correct its targets"
        )


def warn_of_misspelt(modules: Iterable[str], names: Collection[str]) -> None:
    """Warn of modules that shall stay plain, but that the model has under a similar name alone.

    Lists may name what a model lacks, such as a tower or further layers. So it is no error.

    Args:
        modules: names and patterns of modules.
        names: the plain names of all tensors of the model.
    """
    known = {_NUMBER.sub("#", module): module for module in (name.rpartition(".")[0] for name in names)}
    given = {_NUMBER.sub("#", module): module for module in modules if "*" not in module and ":" not in module}
    for text in given.keys() - known.keys():  # all layers at once
        near, module = get_close_matches(text, known, 1, 0.9), given[text]
        if near and not any(is_left_out(name, [module]) for name in names):
            logger.warning(
                "quantize leaves out %s, of which the model has none, and encodes %s: correct the name if it is meant",
                module,
                known[near[0]],
            )


def _is_encoded(spec: TensorSpec, kind: str, quantization: Quantization) -> bool:
    if is_left_out(spec.name, quantization.left_out) or not is_target(spec.name, quantization.targets):
        return False
    return kind != "mxfp4" or len(spec.shape) > 2


def _require_encodable(
    kind: str, grain: Grain, undivided: Sequence[str], stacks: Sequence[str], quantization: Quantization
) -> None:
    modules = f"Name their modules in {list_of(quantization.method)!r} of the quantization_config"
    wrong = []
    if undivided:
        wrong.append(
            f"{len(undivided)} weights must be matrices whose columns (inputs) divide into groups of {kind} ({grain})"
            f"{' and words of 8 codes' if kind == 'int4' else ''}, found "
            f"{', '.join(undivided[:5])}. {modules}"
        )
    if stacks:
        wrong.append(
            f"{len(stacks)} weights must be matrices for {quantization.method}, found stacks of experts: "
            f"{', '.join(stacks[:5])}. Export experts one by one (expert_format='split'). Or {modules.lower()}"
        )
    if wrong:
        raise ConfigError("\n".join(wrong))


def _fp8(name: str, shape: Shape, grain: Grain, method: str) -> Iterator[TensorSpec]:
    """ModelOpt has other shapes of scales, see vllm.model_executor.layers.quantization.modelopt."""
    yield TensorSpec(name, shape, _FLOAT8)
    if isinstance(grain, tuple):
        rows, columns = (-(-size // block) for size, block in zip(shape[-2:], grain, strict=True))
        grid = (rows, 1, columns, 1) if method == "modelopt" else (*shape[:-2], rows, columns)
    elif grain == "row":
        grid = shape[:-1] if method == "modelopt" else (*shape[:-1], 1)
    elif len(shape) > 2:
        grid = (*shape[:-2], 1, 1)  # see transformers.integrations.finegrained_fp8.FP8Experts
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


# descriptions ---------------------------------------------------------------------------------------------------------


def read_description(note: Mapping[str, Any]) -> Quantization:
    """Read a ``quantization_config`` by which weights shall be encoded.

    Raises:
        ConfigError: the format is not supported, a field is not known or has a wrong value, or files of this
            format need scales of activations; the message names all such fields.

    Example:
        >>> read_description({"quant_method": "fp8", "weight_block_size": [64, 64]}).block
        (64, 64)
    """
    try:
        quantization = read_quantization(note)
    except NotReadError as error:
        raise ConfigError(f"the quantization_config of quantize= cannot be used: {error.said}. Correct it") from None
    assert quantization is not None
    fields = fields_of(note)
    if wrong := [
        *_unknown(note),
        *_powers(fields),
        *_modules(fields, quantization),
        *_static(fields),
        *_beside(fields, quantization),
    ]:
        raise ConfigError(f"quantize must describe codes and scales of weights alone: {'; '.join(wrong)}")
    return quantization


def _unknown(note: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(map(str, {**note, **fields_of(note)}.keys())):
        if name not in _KNOWN:
            near = get_close_matches(name, _KNOWN, n=1)
            yield f"found the unknown field {name!r}{f' (is it {near[0]!r}?)' if near else ''}, correct or remove it"


def _powers(fields: Mapping[str, Any]) -> Iterator[str]:
    if (given := fields.get("scale_fmt")) not in _SCALES:
        yield f"found scale_fmt={given!r}, pass 'ue8m0' (powers of two) or 'float'"


def _modules(fields: Mapping[str, Any], quantization: Quantization) -> Iterator[str]:
    """What is wrong with lists of modules."""
    for name in LISTS:
        names = fields.get(name) or []
        if not isinstance(names, list | tuple) or not all(isinstance(module, str) for module in names):
            yield f"found {name}={names!r}, pass a list of names"
    for pattern in (*quantization.left_out, *quantization.targets):
        try:
            _regex(pattern)
        except re.error as error:
            yield f"found the pattern {pattern!r}, correct it: {error}"


def _static(fields: Mapping[str, Any]) -> Iterator[str]:
    """What asks for scales of activations, which only a calibration gives."""
    static = []
    if (scheme := fields.get("activation_scheme", "dynamic")) != "dynamic":
        static.append(f"activation_scheme={scheme!r} (pass 'dynamic')")
    algorithm = str(fields.get("quant_algo", "")).upper()
    if fields["quant_method"] == "modelopt" and algorithm in _INSTEAD:
        static.append(f"quant_algo={algorithm!r} (pass {_INSTEAD[algorithm]!r})")
    elif fields["quant_method"] == "compressed-tensors":
        for name, group in (fields.get("config_groups") or {}).items():
            for end in ("input_activations", "output_activations"):
                activations = group.get(end) if isinstance(group, Mapping) else None
                if isinstance(activations, Mapping) and activations.get("dynamic") is not True:
                    static.append(f"{end} of {name} with dynamic={activations.get('dynamic')!r} (pass null, or true)")
    if static:
        yield (
            f"{' and '.join(static)} needs scales of activations, which only a calibration gives. Or pass the folder "
            "of a release that has them"
        )


def _beside(fields: Mapping[str, Any], quantization: Quantization) -> Iterator[str]:
    """What contradicts the codes: the files would describe themselves falsely."""
    if layers := fields.get("quantized_layers"):
        yield f"found quantized_layers={layers!r:.80}, pass one quant_algo, and list other modules in 'exclude_modules'"
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if fields.get(name) is not None:
            yield f"found {name}={fields[name]!r:.80}, leave it out: only a calibration gives its scales"
    if len(quantization.allowed) != 1:  # refused where weights are encoded
        return
    ((kind, grain),) = quantization.allowed
    is_in_groups = quantization.method == "compressed-tensors"
    every = fields["config_groups"].values() if is_in_groups else ()
    groups = [group for group in every if isinstance(group.get("weights"), Mapping)]
    size = grain[1] if isinstance(grain, tuple) and not (is_in_groups and kind == "fp8") else None
    given_and_expected: list[tuple[str, Any, Any]] = [
        ("format", own.get("format"), _FORMATS[kind]) for own in (fields, *groups) if is_in_groups
    ]
    for weights in [group["weights"] for group in groups] if is_in_groups else [fields]:
        given_and_expected.append(("group_size", weights.get("group_size"), size))
        given_and_expected.append(("dynamic", weights.get("dynamic"), False))
    for name, given, expected in given_and_expected:
        if given not in (None, expected):
            yield f"found {name}={given!r} of weights, pass {expected!r} or leave it out"


def written_description(note: Mapping[str, Any], kind: str, plain: Iterable[str]) -> dict[str, Any]:
    """The ``quantization_config`` of files that were encoded by ``note``, with all fields that engines require.

    Args:
        kind: the kind of codes.
        plain: the modules in the files that are not encoded. Names in ``note`` stay, since files may lack a module.
    """
    fields = dict(fields_of(note))
    if fields["quant_method"] == "compressed-tensors":
        groups = {name: {"targets": [*LINEAR], **group} for name, group in fields["config_groups"].items()}
        fields = {"format": _FORMATS[kind], **fields, "config_groups": groups}
    kept = {name: value for name, value in fields.items() if name not in LISTS}
    listed = {*left_out_by(fields), *plain, _HEAD}
    return {**_REQUIRED.get(fields["quant_method"], {}), **kept, list_of(fields["quant_method"]): sorted(listed)}


def list_of(method: str) -> str:
    """The field of a ``quantization_config`` that names the modules that are not encoded."""
    return "ignore" if method in ("compressed-tensors", "modelopt") else "modules_to_not_convert"


def is_left_out(name: str, modules: Iterable[str]) -> bool:
    """Whether a config leaves the tensor out: by its module, a part of the module's name, or ``re:PATTERN``.

    In a name, ``*`` stands for any text.

    >>> is_left_out("model.layers.0.mlp.gate.weight", ["lm_head", "mlp.gate"])
    True
    >>> is_left_out("model.layers.0.self_attn.q_proj.weight", ["model.layers.0.self_attn*"])
    True
    """
    module = name.removesuffix(".weight")
    return any(_matches(module, pattern) for pattern in modules)


def _matches(module: str, pattern: str) -> bool:
    if "*" not in pattern and not pattern.startswith(
        "re:"
    ):  # a quick way, since a config may list thousands of modules
        return f".{pattern}." in f".{module}."
    return _regex(pattern).search(module) is not None


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    """A pattern with ``re:`` begins where the name of the module begins; any other, where a part of the name does."""
    if pattern.startswith("re:"):
        return re.compile(rf"\A(?:{pattern.removeprefix('re:')})")
    words = ".*".join(map(re.escape, pattern.split("*")))
    return re.compile(rf"(?:^|\.){words}(?:\.|$)")


def is_target(name: str, targets: Iterable[str]) -> bool:
    """Whether groups of compressed-tensors with these targets encode the tensor of a linear layer.

    >>> is_target("model.layers.0.mlp.up_proj.weight", ["re:.*self_attn.*"])
    False
    """
    module = name.removesuffix(".weight")
    return any(
        target in (*LINEAR, module) or (target.startswith("re:") and _matches(module, target)) for target in targets
    )
