"""A scheme maps plain HF tensors to codecs, by the names, dtypes and shapes in a checkpoint.

Only the files decide. A tensor is encoded if its companions are there; lists of modules in a config do not matter.
Tensors that fit nothing raise, and the error names all of them: a scale without its weight, codes without their scales,
a grid of another size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch

from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.codec import PER_BYTE, Codec, Kind
from mcore_bridge.rules.spec import TensorSpec

Shape = tuple[int, ...]
BLOCK = (128, 128)
"""The block of FP8 if a config gives none; all publishers use it."""
_FP8 = torch.float8_e4m3fn
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_E8M0 = tuple(getattr(torch, name) for name in ("float8_e8m0fnu",) if hasattr(torch, name))
_CODES = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2")
    if hasattr(torch, name)
)
"""Dtypes of codes, which need a scale."""
_UNUSED = (
    *(f".{name}_scale" for name in ("activation", "input", "input_global", "output", "q", "k", "v")),
    *(".qscale_act", ".input_scale_ub", "_proj_activation_scale"),
)
"""Name suffixes of the scales of activations. Inference in low precision uses them, and no weight needs them."""
_COMPANIONS = ("_scale_inv", "_scale_2", "_global_scale", "_scale", "_shape", "_zero_point", "_g_idx", "_scales")
"""Suffixes that scales and other companions of codes add to the name of a weight."""
_GROUPS = {"nvfp4": 16, "mxfp4": 32}
"""Columns that share a scale, where a format has one size."""
_BESIDE = (".scale", ".qscale_weight")
"""Suffixes of companions that replace ``.weight``."""
_JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "linear_gate", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv"),
)
"""Linear layers that engines run as one matrix."""
_PARTS = (*_COMPANIONS, *_BESIDE, *_UNUSED, "_blocks", "_packed")
_PART_DTYPES = (*_CODES, torch.uint8, torch.int8)
"""Suffixes and dtypes of all tensors that may be parts of encoded weights."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a checkpoint encodes one plain tensor: its codec and shape, and its parts as they are stored.

    Attributes:
        codec: how codes and scales become numbers.
        shape: the shape of the plain tensor.
        order: for each dim of the codes, the dim of the plain tensor.
        codes, scales: the tensors of codes and of scales.
        overall: the single number for the whole weight; None if there is none.
        shape_tensor: a tensor that holds the shape once more; None if there is none.
        powers: whether all scales are powers of two.
        beside: tensors that no weight needs, such as scales of activations, of the module of this weight.
    """

    codec: Codec
    shape: Shape
    order: tuple[int, ...]
    codes: TensorSpec
    scales: TensorSpec
    overall: TensorSpec | None = None
    shape_tensor: TensorSpec | None = None
    powers: bool = False
    beside: tuple[TensorSpec, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of codes, scales, and the overall number if there is one."""
        return tuple(part.name for part in (self.codes, self.scales, self.overall) if part is not None)

    @property
    def stored(self) -> tuple[TensorSpec, ...]:
        """All tensors in the checkpoint that belong to this tensor, codes first."""
        return tuple(part for part in (self.codes, self.scales, self.overall, self.shape_tensor) if part is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the checkpoint that belong to this tensor."""
        return tuple(part.name for part in self.stored)

    @property
    def grid(self) -> Shape:
        """The number of blocks along each dim of the codes."""
        sizes = (self.shape[dim] for dim in self.order)
        return tuple(-(-size // block) for size, block in zip(sizes, self.codec.block, strict=True))


@dataclass(frozen=True, slots=True)
class Scheme:
    """The encoded tensors of a checkpoint, by plain name; and the names that no weight needs."""

    held: Mapping[str, Encoding] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def plain(self, names: Iterable[str]) -> Iterator[str]:
        """The names in a checkpoint, in order, with one plain name for all parts of an encoded tensor."""
        whole = {held.codes.name: name for name, held in self.held.items()}
        hidden = {name for held in self.held.values() for name in held.names}.union(self.unused) - whole.keys()
        return (whole.get(name, name) for name in names if name not in hidden)


def scheme_of(specs: Mapping[str, TensorSpec], block: tuple[int, int] | None = None, *, powers: bool = False) -> Scheme:
    """The scheme of a checkpoint.

    Args:
        specs: the tensors in the checkpoint, by name.
        block: rows and columns that share a scale of FP8, by the config. None: ``BLOCK``.
        powers: whether the config says that scales are powers of two.

    Raises:
        CheckpointError: tensors do not fit together; the message names all of them.
    """
    held: dict[str, Encoding] = {}
    problems: dict[str, str] = {}
    for name in specs:
        try:
            if (encoded := _held(name, specs, block or BLOCK)) is not None:
                plain, encoding = encoded
                held[plain] = replace(encoding, powers=powers or encoding.powers)
        except _ProblemError as problem:
            problems[stem_of(name)] = f"{name} {problem}"
    used = {name for weight in held.values() for name in weight.names}
    left = [name for name in specs if name not in used]
    if lost := [name for name in left if _is_companion(specs[name]) and stem_of(name) not in problems]:
        problems[""] = f"{len(lost)} companions of codes belong to no encoded weight, such as {lost[:5]}"
    if problems:
        raise unreadable(list(problems.values()))
    unused = tuple(filter(is_unused, left)) if held else ()
    for name in unused:
        owner = max(held, key=lambda weight: _shared_words(weight, name))
        held[owner] = replace(held[owner], beside=(*held[owner].beside, specs[name]))
    return Scheme(held, unused)


def _shared_words(name: str, other: str) -> int:
    """With how many equal words two names begin."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda words: words[0] == words[1], pairs))


def joined_names(name: str) -> tuple[str, ...]:
    """The names of the weights that engines run as one matrix with a weight, itself among them.

    Such a matrix has one overall number. vLLM takes the largest of the files, and SGLang refuses others.

    >>> joined_names("model.layers.0.mlp.up_proj.weight")[::2]
    ('model.layers.0.mlp.gate_proj.weight', 'model.layers.0.mlp.up_proj.weight')
    """
    stem, dot, tensor = name.rpartition(".")
    module = stem.rpartition(".")[2]
    joined = next((own for own in _JOINED if module in own), ())
    return tuple(f"{stem.removesuffix(module)}{own}{dot}{tensor}" for own in joined) or (name,)


def unreadable(problems: list[str]) -> CheckpointError:
    """The error for encoded weights that cannot be decoded."""
    more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
    return CheckpointError(
        f"the encoded weights cannot be decoded: {'; '.join(problems[:8])}{more}. Copy the files again, or use a "
        "folder of plain tensors"
    )


def plain_names(names: Iterable[str]) -> Iterator[str]:
    """Like ``Scheme.plain``, if only the names in a checkpoint are known."""
    known = dict.fromkeys(names)
    for name in known:
        weight = name.removesuffix("_blocks").removesuffix("_packed")
        if weight != name and known.keys() & {f"{weight}_scales", f"{weight}_scale"}:
            yield weight
        elif not any(name.endswith(end) and _is_weight(name.removesuffix(end), known) for end in _COMPANIONS):
            yield name


def _is_weight(name: str, known: Mapping[str, None]) -> bool:
    return not known.keys().isdisjoint((name, f"{name}_packed", f"{name}_blocks"))


def stem_of(name: str) -> str:
    """The common prefix of the names of all parts of a weight."""
    for end in (*_COMPANIONS, "_blocks", "_packed", ".weight", *_BESIDE):
        name = name.removesuffix(end)
    return name


def is_unused(name: str) -> bool:
    """Whether ``name`` belongs to a scale of activations, which a load does not need."""
    return name.endswith(_UNUSED)


def is_part(spec: TensorSpec) -> bool:
    """Whether a tensor may be a part of an encoded weight, and cannot be used without its companions."""
    return spec.name.endswith(_PARTS) or spec.dtype in _PART_DTYPES


def _is_companion(spec: TensorSpec) -> bool:
    """Whether a tensor has a use only together with codes."""
    name = spec.name
    if name.endswith("_scales"):
        return spec.dtype == torch.uint8
    if name.endswith(".scale"):
        return spec.dtype in _E8M0
    return name.endswith(("_scale_inv", *_BESIDE, *(f"weight{end}" for end in _COMPANIONS)))


# by format ------------------------------------------------------------------------------------------------------------


class _ProblemError(Exception):
    """The reason why a weight cannot be decoded. The name of the weight is put before the message."""


Specs = Mapping[str, TensorSpec]


def _held(name: str, specs: Specs, block: tuple[int, int]) -> tuple[str, Encoding] | None:
    """The plain name of an encoded tensor and its encoding, if ``name`` is the name of its codes."""
    spec = specs[name]
    if name.endswith("_blocks") and spec.dtype == torch.uint8:
        return _mxfp4(name.removesuffix("_blocks"), spec, specs)
    if name.endswith("weight_packed"):
        return _packed(name.removesuffix("_packed"), spec, specs)
    if spec.dtype in _CODES and not name.endswith(("_scale_inv", "_scale", *_BESIDE)):
        return name, _float8(spec, specs, block)
    if spec.dtype in (torch.uint8, torch.int8) and any(scales in specs for scales in _scales_of(name)):
        return name, _halves(spec, specs)
    return None


def _mxfp4(name: str, spec: TensorSpec, specs: Specs) -> tuple[str, Encoding]:
    """gpt-oss: codes are [experts, out, in / 32, 16], and plain files have [experts, in, out]."""
    scales = _companion(f"{name}_scales", specs)
    if len(spec.shape) != 4:
        raise _ProblemError(f"has shape {spec.shape}, expected [experts, out, in / 32, 16]")
    experts, rows, groups, num_bytes = spec.shape
    size = num_bytes * PER_BYTE["mxfp4"]
    _require(scales, (experts, rows, groups), (torch.uint8,))
    held = Encoding(Codec("mxfp4", (1, 1, size)), (experts, groups * size, rows), (0, 2, 1), spec, scales)
    return name, held


def _packed(name: str, spec: TensorSpec, specs: Specs) -> tuple[str, Encoding]:
    """compressed-tensors: int4 in words of 32 bits, or NVFP4 in bytes with an overall scale."""
    scales = _companion(f"{name}_scale", specs)
    if spec.dtype == torch.int32:
        rows, columns, group = _groups(spec, scales, "int4", 8)
        _require(scales, (rows, columns // group), _FLOATS)
        codec = Codec("int4", (1, group), scales.dtype)
        return name, Encoding(codec, (rows, columns), (0, 1), spec, scales, None, specs.get(f"{name}_shape"))
    if spec.dtype != torch.uint8:
        raise _ProblemError(f"is {spec.dtype}, expected int32 (int4) or uint8 (NVFP4)")
    return name, _nvfp4(spec, scales, _companion(f"{name}_global_scale", specs))


def _halves(spec: TensorSpec, specs: Specs) -> Encoding:
    """Two codes in a byte under the plain name: DeepSeek V4's MXFP4, or ModelOpt's NVFP4 with an overall scale."""
    scales = next(specs[name] for name in _scales_of(spec.name) if name in specs)
    if scales.dtype in _E8M0:
        rows, columns, group = _groups(spec, scales, "mxfp4", PER_BYTE["mxfp4"])
        _require(scales, (rows, columns // group), _E8M0)
        return Encoding(Codec("mxfp4", (1, group)), (rows, columns), (0, 1), spec, scales)
    if spec.dtype != torch.uint8:
        raise _ProblemError(
            f"is {spec.dtype} with scales of {scales.dtype}: expected float8_e8m0fnu (MXFP4), or uint8 (NVFP4)"
        )
    return _nvfp4(spec, _companion(f"{spec.name}_scale", specs), _companion(f"{spec.name}_scale_2", specs))


def _nvfp4(spec: TensorSpec, scales: TensorSpec, overall: TensorSpec) -> Encoding:
    rows, columns, group = _groups(spec, scales, "nvfp4", PER_BYTE["nvfp4"])
    _require(scales, (rows, columns // group), (_FP8,))
    if math.prod(overall.shape) != 1 or overall.dtype not in _FLOATS:
        raise _ProblemError(f"takes one number as {overall.name}, found {overall.shape} of {overall.dtype}")
    if overall.name.endswith("_global_scale"):  # compressed-tensors always decodes to bf16
        codec = Codec("nvfp4", (1, group), torch.bfloat16, "divides")
    else:
        codec = Codec("nvfp4", (1, group), None, "multiplies")
    return Encoding(codec, (rows, columns), (0, 1), spec, scales, overall)


def _groups(spec: TensorSpec, scales: TensorSpec, kind: Kind, per: int) -> tuple[int, int, int]:
    """Rows and columns of a matrix, and the number of columns that share a scale."""
    if len(spec.shape) != 2 or len(scales.shape) != 2:
        raise _ProblemError(f"has shape {spec.shape}, expected a matrix, and one of scales")
    rows, columns = spec.shape[0], spec.shape[1] * per
    group, rest = divmod(columns, max(1, scales.shape[1]))
    if rest or not group or group != _GROUPS.get(kind, group):
        raise _ProblemError(
            f"has {columns} columns, which {scales.name} of shape {scales.shape} does not divide into groups"
        )
    return rows, columns, group


def _float8(spec: TensorSpec, specs: Specs, block: tuple[int, int]) -> Encoding:
    name, shape = spec.name, spec.shape
    if spec.dtype != _FP8:
        raise _ProblemError(f"is {spec.dtype}, whose codes are not read: expected float8_e4m3fn")
    scales_name = next((scales for scales in _scales_of(name) if scales in specs), None)
    if scales_name is None:
        raise _ProblemError(f"is float8_e4m3fn and has no scale: expected one of {list(_scales_of(name))}")
    scales = specs[scales_name]
    if len(shape) < 2 or scales.dtype not in (*_FLOATS, *_E8M0):
        raise _ProblemError(f"has shape {shape} and scales of {scales.dtype}: expected a matrix, and floats")
    outer = shape[:-2]
    grid = (*outer, *(-(-size // cell) for size, cell in zip(shape[-2:], block, strict=True)))
    spread = tuple(size for cells in grid[-2:] for size in (cells, 1))  # the shape of ModelOpt's blocks
    blocks = {shape[:-1]: (1, shape[-1]), (*outer, *spread): block, grid: block, (*shape[:-1], 1): (1, shape[-1])}
    is_one = math.prod(scales.shape) == math.prod(outer) and scales.shape[: len(outer)] in (outer, ())  # for a matrix
    own = blocks.get(scales.shape, shape[-2:] if is_one else None)
    if own is None:
        raise _ProblemError(
            f"has shape {shape} and {scales_name} {scales.shape}: expected {grid} or {(*outer, *spread)} for blocks of "
            f"{block}, {(*shape[:-1], 1)} or {shape[:-1]} for rows, or one number for a matrix"
        )
    # As in transformers: compressed-tensors' code computes in the dtype of scales, but not for experts.
    rounded = scales.dtype if scales_name.endswith("weight_scale") and ".experts." not in name else None
    codec = Codec("fp8", (*(1 for _ in outer), *own), rounded)
    return Encoding(codec, shape, tuple(range(len(shape))), spec, scales, powers=scales.dtype in _E8M0)


def _scales_of(name: str) -> tuple[str, ...]:
    """Possible names for the scales of a tensor, the usual name first."""
    module = name.removesuffix(".weight")
    beside = tuple(f"{module}{end}" for end in _BESIDE) if module != name else ()
    return (f"{name}_scale_inv", f"{name}_scale", *beside)


def _companion(name: str, specs: Specs) -> TensorSpec:
    if name not in specs:
        raise _ProblemError(f"is encoded, but {name} is missing")
    return specs[name]


def _require(scales: TensorSpec, shape: Shape, dtypes: tuple[torch.dtype, ...]) -> None:
    if scales.shape != shape or scales.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        actual = f"{scales.name} {scales.shape} of {scales.dtype}"
        raise _ProblemError(f"takes scales {shape} of {expected}, found {actual}")
