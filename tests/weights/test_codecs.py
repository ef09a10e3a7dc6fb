"""Codecs and schemes: the values of codes and scales, in any slice; and encodings that cannot be decoded."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from hypothesis import given, strategies
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mcore_bridge.config.quantization import read_quantization
from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules import codec, encoded, scheme
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.encoded_copy import EncodedCopy
from mcore_bridge.weights.sent.encoding import encoded_tensors
from mcore_bridge.weights.source.new_scheme import new_scheme
from mcore_bridge.weights.source.source import open_source
from mcore_bridge.weights.source.weight_format import PLAIN
from tests import zoo
from tests.support import quantized
from tests.support.quantized import Format, deepseek, mx_values, mxfp4

# edges, against the publisher's formula -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(192, 256), (320, 128), (576, 448), (64, 300)])
def test_edge_blocks_are_cut_and_not_stretched(shape: tuple[int, int]) -> None:
    """For edge blocks transformers 5.23 is silently wrong (192 rows) or raises: DeepSeek's formula is the reference."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, shape[0])[:, None]
    form = deepseek((128, 128))
    parts = form.encode(weight)
    found = plain_of({f"x{end}": part for end, part in parts.items()})["x.weight"].to(torch.float32)
    assert torch.equal(found, form.decode(parts, torch.float32))
    if zoo.NEWEST:
        assert not torch.equal(found, _by_transformers(parts))


def _by_transformers(parts: dict[str, Tensor]) -> Tensor:
    """The errors of transformers for edge blocks. If they are fixed, this fails, and the docs can be changed."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    try:
        return Fp8Dequantize(None)._dequantize_one(*parts.values(), output_dtype=torch.float32)
    except ValueError:
        return torch.empty(0)


def plain_of(files: Mapping[str, Tensor], note: dict[str, Any] | None = None) -> Any:
    return open_source(files, note)


def test_all_codes_and_scales_of_fp8_and_mxfp4() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.rand(1, 64, generator=torch.Generator().manual_seed(0)).exp().to(torch.bfloat16)
    files = {"x.weight": codes.view(torch.float8_e4m3fn).repeat(1, 32), "x.weight_scale_inv": scales}
    found = plain_of(files)["x.weight"]
    values = files["x.weight"].float() * scales.float().repeat_interleave(128, 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(found.to(dtype).nan_to_num(7), values.to(dtype).nan_to_num(7))
    files = {
        "x_blocks": codes.view(1, 1, 16, 16).repeat(1, 256, 1, 1),
        "x_scales": codes.view(1, 256, 1).repeat(1, 1, 16),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        expected = convert_moe_packed_tensors(files["x_blocks"], files["x_scales"], dtype=dtype)
        assert torch.equal(plain_of(files)["x"].to(dtype), expected)
    matrix, powers = codes.repeat(255, 1), codes[:255, None].repeat(1, 16)  # 255 is no number in e8m0
    expected = mx_values(matrix.view(255, 16, 16), powers)
    for name, dtype in (("x.scale", torch.int8), ("x.weight_scale_inv", torch.uint8), ("x.weight_scale", torch.int8)):
        files = {"x.weight": matrix.view(dtype), name: powers.view(torch.float8_e8m0fnu)}
        assert torch.equal(plain_of(files)["x.weight"].to(torch.float32), expected)


@pytest.mark.parametrize("form", [deepseek((128, 128)), deepseek((3, 5)), mxfp4()], ids=["fp8", "odd", "mxfp4"])
def test_any_slice_is_a_slice_of_the_whole(form: Format) -> None:
    """Slices of odd rows, of every other column, transposed, and by entries: all slices of layouts, and more."""
    generator = torch.Generator().manual_seed(2)
    shape = (4, 96, 130) if "mxfp4" in form.note.values() else (300, 410)
    weight = torch.randn(shape, generator=generator)
    files = {f"x{end}": part for end, part in form.encode(weight).items()}
    ((_, weights),) = plain_of(files, form.note).items()
    whole = form.decode(form.encode(weight), torch.float32)
    cuts: list[Callable[[Tensor], Tensor]] = [
        lambda each: each[..., 7:91, 1:66],
        lambda each: each.transpose(-1, -2)[..., 5:60:3, 2:90],
        lambda each: each[-1:, ..., 3:64:2],
        lambda each: each[3],
        lambda each: each[..., 31:65, :].transpose(0, -1),
        lambda each: each[..., :12:2, :30:3],  # with the rows and columns of two blocks
    ]
    for cut in cuts:
        assert torch.equal(weights.cut(cut).to(torch.float32), cut(whole))
        pieces = weights.cut(cut)
        target = torch.empty(cut(whole).shape)
        for piece, part in pieces.pieces(pieces.arranged(target), 17):
            assert piece.shape == part.shape
            piece.put(part)
        assert torch.equal(target, cut(whole))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "form",
    [
        quantized.rows(),
        quantized.rows(torch.bfloat16),
        quantized.one_scale(torch.bfloat16),
        quantized.blocks((128, 128)),
        quantized.int4(32),
        quantized.nvfp4("compressed-tensors"),
        quantized.nvfp4("modelopt"),
        quantized.modelopt_fp8(),
    ],
    ids=["rows", "bf16 rows", "one scale", "blocks", "int4", "nvfp4", "modelopt nvfp4", "modelopt fp8"],
)
def test_formats_of_compressed_tensors_and_modelopt(form: Format, dtype: torch.dtype) -> None:
    """Bits are equal to the package's result; for ModelOpt, whose package needs CUDA, to its formula."""
    weight = torch.randn(192, 256, generator=torch.Generator().manual_seed(4))
    parts = form.encode(weight)
    found = plain_of({f"x{end}": part for end, part in parts.items()}, form.note)["x.weight"].to(dtype)
    assert torch.equal(found, form.decode(parts, dtype))
    if form.note["quant_method"] == "compressed-tensors":
        config = QuantizationConfig.model_validate(form.note)
        (group,) = config.config_groups.values()
        compressor = BaseCompressor.get_value_from_registry(config.format)
        own = {end.removeprefix("."): part for end, part in parts.items()}
        assert torch.equal(found, compressor.decompress(own, group)["weight"].to(dtype))


def test_a_number_for_all_multiplies_or_divides() -> None:
    """ModelOpt and compressed-tensors store each other's reciprocal."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))
    both = [quantized.nvfp4(owner) for owner in ("compressed-tensors", "modelopt")]
    values = [plain_of({f"x{e}": p for e, p in f.encode(weight).items()})["x.weight"].to(torch.bfloat16) for f in both]
    assert torch.allclose(values[0], values[1], rtol=1e-2)
    assert float((values[0] - weight).abs().max()) < 0.5


# what does not fit ----------------------------------------------------------------------------------------------------

FP8, GRID = torch.zeros(128, 256).to(torch.float8_e4m3fn), torch.ones(1, 2)
WORDS, GROUPS = torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, 2)
BYTES, STACK = torch.zeros(4, 8, dtype=torch.uint8), FP8.expand(3, 128, 256)
NOTE = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("shape", [(5, 20, 12), (1, 20, 12), (5, 4, 12), (2, 3, 20, 12)], ids=str)
def test_scales_of_stacked_experts_may_have_any_shape_of_a_matrix(shape: tuple[int, ...]) -> None:
    """Scales for each row, for each block of 8 x 8 with smaller blocks at edges, or for the only expert."""
    generator = torch.Generator().manual_seed(6)
    codes = (torch.rand(shape, generator=generator) * 100).to(torch.float8_e4m3fn)
    *outer, rows, columns = shape
    down, across = -(-rows // 8), -(-columns // 8)
    for form in (
        [rows],
        [rows, 1],
        [down, across],
        [down, 1, across, 1],
        *([[1], []] if math.prod(outer) == 1 else []),
    ):
        sizes = [*outer, *form] if form not in ([1], []) else form
        scales = torch.rand(sizes, generator=generator) + 1
        if form in ([rows], [rows, 1]):
            spread = scales.reshape(*outer, rows, 1)
        elif form in ([1], []):
            spread = scales.reshape([1] * len(shape))
        else:
            each = scales.reshape(*outer, down, across).repeat_interleave(8, -2).repeat_interleave(8, -1)
            spread = each[..., :rows, :columns]
        files = {"x.weight": codes, "x.weight_scale_inv": scales}
        found = open_source(files, None if form in ([rows], [rows, 1], [1], []) else EIGHTS)["x.weight"]
        assert torch.equal(found.to(torch.float32), codes.float() * spread), form
        assert torch.equal(found[-1].to(torch.float32), codes[-1].float() * spread.expand(shape)[-1]), form


EIGHTS = {"quant_method": "fp8", "weight_block_size": [8, 8]}


def test_slices_of_codes_have_even_steps() -> None:
    weight = plain_of({"x.weight": FP8[:4, :1], "x.weight_scale_inv": GRID[:, :1]})["x.weight"]
    cuts: list[Callable[[Tensor], Tensor]] = [lambda whole: whole[[0, 1, 3]], lambda whole: whole.flip(0)]
    for cut in cuts:
        with pytest.raises(CheckpointError, match="must have even steps, found"):
            weight.cut(cut)


def test_names_alone_say_which_tensors_are_parts() -> None:
    names = ["a_blocks", "a_scales", "b_blocks", "x.weight_packed", "x.weight_scale", "x.weight_shape"]
    names += ["y.weight_packed", "z.weight", "z.weight_scale_inv", "v.weight_scale", "attention.k_scale"]
    wanted = ["a", "b_blocks", "x.weight", "y.weight_packed", "z.weight", "v.weight_scale", "attention.k_scale"]
    assert list(scheme.plain_names(names)) == wanted


def test_a_shape_beside_codes_is_theirs_and_parts_come_once() -> None:
    note = quantized.compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32})
    files = {"x.weight_packed": WORDS, "x.weight_scale": GROUPS, "x.weight_shape": torch.tensor([4, 32])}
    with pytest.raises(CheckpointError, match=r"x.weight_shape is .4, 32., while there are codes for .4, 64."):
        plain_of(files, note)["x.weight"]
    with pytest.raises(CheckpointError, match=r"x.weight_shape is .64,., while there are codes"):
        plain_of({**files, "x.weight_shape": torch.tensor(64)}, note)["x.weight"]
    with pytest.raises(CheckpointError, match=r"is torch.int8 with scales of torch.float32: expected .* uint8 .NVFP4."):
        plain_of({"x.weight": BYTES.char(), "x.weight_scale": GROUPS})
    pairs = [("x.weight", FP8), ("x.weight_scale_inv", GRID)]
    for twice in (pairs[:1] * 2, [*pairs, pairs[0]], [*pairs, pairs[1]]):
        with pytest.raises(
            CheckpointError, match=r"x\.weight(_scale_inv)? came twice; every HF tensor must come exactly"
        ):
            list(open_source(twice, NOTE))


def test_blocks_of_another_size_than_the_config_says_are_refused_though_there_are_fewer_rows() -> None:
    """Blocks lie along columns, which are the last dim of codes but not of the weight."""
    files = {"x_blocks": torch.zeros(2, 8, 4, 8), "x_scales": torch.zeros(2, 8, 4)}
    with pytest.raises(CheckpointError, match=r"says mxfp4 by \(1, 32\), found others: x is mxfp4"):
        open_source({name: each.byte() for name, each in files.items()}, {"quant_method": "mxfp4"})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"x.weight": FP8}, "x.weight is float8_e4m3fn and has no scale: expected one of"),
        (
            {"x.weight_scale_inv": GRID},
            "1 companions of codes belong to no encoded weight, such as .'x.weight_scale_inv'",
        ),
        ({"x.weight": torch.zeros(128, 256), "x.weight_scale_inv": GRID}, "belong to no encoded weight"),
        (
            {"x.weight": FP8, "x.weight_scale_inv": GRID.T},
            "expected .1, 2. or .1, 1, 2, 1. for blocks of .128, 128., .128, 1. or .128,. for",
        ),
        ({"x.weight": FP8, "x.weight_scale_inv": GRID.int()}, "scales of torch.int32: expected a matrix, and floats"),
        (
            {"x.weight": FP8, "x.weight_scale_inv": torch.tensor(1.0)},
            "says fp8 by .128, 128., found others: x.weight",
        ),
        (
            {"x.weight": FP8.view(torch.float8_e5m2), "x.weight_scale_inv": GRID},
            "is torch.float8_e5m2, whose codes",
        ),
        ({"x_blocks": torch.zeros(2, 4, 3, 16, dtype=torch.uint8)}, "x_blocks is encoded, but x_scales is missing"),
        ({"x_scales": torch.zeros(2, 4, 3, dtype=torch.uint8)}, "belong to no encoded weight"),
        (
            {"x.weight_packed": WORDS, "x.weight_scale": GROUPS.float()},
            "says fp8 by .*, found others: x.weight is int4",
        ),
        ({"x.weight_packed": WORDS, "x.weight_scale": GRID[:, [0, 1, 1]]}, "has 64 columns, which x.weight_scale of"),
        (
            {"x.weight_packed": WORDS.byte(), "x.weight_scale": GROUPS},
            "is encoded, but x.weight_global_scale is missing",
        ),
        ({"x.weight": WORDS.byte(), "x.weight_scale": GROUPS}, "is encoded, but x.weight_scale_2 is missing"),
        ({"x.weight": FP8, "x.weight_scale": GRID, "x.weight_zero_point": GRID}, "such as .'x.weight_zero_point'"),
        ({"x_blocks": BYTES.view(2, 2, 8), "x_scales": BYTES}, r"has shape .2, 2, 8., expected .experts, out, in / 32"),
        (
            {"x_blocks": BYTES.view(1, 1, 2, 16), "x_scales": BYTES[:1, :1, None]},
            r"takes scales .1, 1, 2. of uint8, found x_scales .1, 1, 1. of torch.uint8",
        ),
        (
            {"x.weight_packed": WORDS, "x.weight_scale": GROUPS.int()},
            r"takes scales .4, 2. of float32 or .*, found x.weight_scale .4, 2. of torch.int32",
        ),
        ({"x.weight_packed": WORDS.long(), "x.weight_scale": GROUPS}, "is torch.int64, expected int32 .int4. or uint8"),
        ({"x.weight_packed": WORDS[:, :0], "x.weight_scale": GROUPS}, r"has 0 columns, which .* does not divide into"),
        ({"x.weight_packed": WORDS[0], "x.weight_scale": GROUPS}, r"has shape .8,., expected a matrix, and one of"),
        ({"x.weight_packed": WORDS, "x.weight_scale": GROUPS[0]}, r"has shape .4, 8., expected a matrix, and one of"),
        (
            {"x.weight": BYTES, "x.weight_scale": FP8[:4, :1], "x.weight_scale_2": torch.ones(2)},
            r"takes one number as x.weight_scale_2, found .2,. of torch.float32",
        ),
        (
            {"x.weight": BYTES, "x.weight_scale": FP8[:4, :1], "x.weight_scale_2": torch.ones(1).int()},
            r"takes one number as x.weight_scale_2, found .1,. of torch.int32",
        ),
        ({"x.weight": BYTES, "x.weight_scale": FP8[:4, :2], "x.weight_scale_2": torch.ones(1)}, "does not divide into"),
        ({"x.weight": FP8[0], "x.weight_scale_inv": GRID}, r"has shape .256,. and scales of torch.float32: expected a"),
        ({"x.weight": STACK, "x.weight_scale_inv": torch.tensor(1.0)}, r"has shape .3, 128, 256. and x.weight_scale"),
    ],
)
def test_what_cannot_be_decoded_raises(files: Mapping[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        plain_of(files, NOTE)
    with pytest.raises(CheckpointError, match=message):
        list(open_source(iter(files.items()), NOTE))


def test_all_obstacles_are_named_at_once() -> None:
    files = {"a.weight": FP8, "b.weight": FP8, "b.weight_scale_inv": GRID.T, "c.weight_scale_inv": GRID}
    with pytest.raises(CheckpointError, match=r"a\.weight is.*; b\.weight has .*; 1 compan.*c\.weight_scale_inv"):
        plain_of(files)


def test_plain_tensors_with_like_names_stay_as_they_are() -> None:
    """Tensors with any name, without codes beside them."""
    plain = {"a.k_scale": torch.ones(2), "a.scale": torch.ones(2), "a.weight": torch.ones(2, 2)}
    assert dict(plain_of(plain)) == dict(open_source(iter(plain.items()))) == plain


# planted mistakes -----------------------------------------------------------------------------------------------------


def is_right() -> bool:
    """Whether weights of each kind decode to the values of the publishers' formulas."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(192, 256, generator=generator) * torch.logspace(-2, 2, 192)[:, None]
    square = torch.randn(2, 64, 64, generator=generator)
    forms = (deepseek((128, 128)), quantized.int4(32), quantized.nvfp4("modelopt"), quantized.mxfp4_in_matrices())
    for form, weight in (*((form, matrix) for form in forms), (mxfp4(), square)):
        parts = form.encode(weight)
        (weight,) = plain_of({f"x{end}": part for end, part in parts.items()}).values()
        if not torch.equal(weight.to(torch.float32), form.decode(parts, torch.float32)):
            return False
    return True


def _transposed(right: Any) -> Any:
    return lambda *args: right(*args).mT


def _off_by_one(right: Any) -> Any:
    return lambda start, *rest: right(start + 1, *rest).clamp(max=int(right(start, *rest)[-1]))


def _stretched(right: Any) -> Any:
    def places(start: int, size: int, step: int, block: int, device: Any) -> Tensor:
        return right(start, size, step, size // -(-size // block), device)

    return places


def _halved(right: Any) -> Any:
    return lambda device: right(device) / 2


def _high_first(right: Any) -> Any:
    return lambda form, codes: _flipped(right(form, codes)) if form.per_byte == 2 else right(form, codes)


def _rounded(right: Any) -> Any:
    return lambda *args: right(*args).bfloat16().float()


def _divided(right: Any) -> Any:
    return lambda form, *rest: right(dataclasses.replace(form, overall="divides"), *rest)


def _up_first(right: Any) -> Any:
    return lambda form, codes: right(form, codes.unflatten(1, (-1, 2)).flip(2).flatten(1, 2))


def _in_major(right: Any) -> Any:
    def held(*args: Any) -> Any:
        name, found = right(*args)
        return name, type(found)(found.codec, found.shape, (0, 1, 2), found.codes, found.scales)

    return held


def _flipped(numbers: Tensor) -> Tensor:
    return numbers.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


MISTAKES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "the grid of scales is transposed": (encoded, "scales_of", _transposed),
    "blocks begin one too early": (encoded, "_places", _off_by_one),
    "edge blocks are stretched": (encoded, "_places", _stretched),
    "exponents have a bias of 128": (codec, "_powers", _halved),
    "the high half comes first": (encoded, "numbers_of", _high_first),
    "scales are rounded before the product": (encoded, "scales_of", _rounded),
    "up comes before gate": (encoded, "numbers_of", _up_first),
    "square blocks are in-major": (scheme, "_mxfp4", _in_major),
    "integers have no offset": (codec, "_INT4_OFFSET", lambda right: 0),
    "the number for all divides everywhere": (encoded, "scales_of", _divided),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, wrong = MISTAKES[mistake]
    assert is_right()
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    codec._table.cache_clear()
    assert not is_right()
    codec._table.cache_clear()


def test_an_error_names_eight_weights_and_counts_the_rest() -> None:
    names = [f"weight {number}" for number in range(10)]
    assert "weight 7; and 2 more. Copy" in str(scheme.unreadable(names))
    assert "weight 7. Copy" in str(scheme.unreadable(names[:8]))


def test_pieces_of_stacked_experts_are_as_small_as_they_are_asked_for() -> None:
    codes = torch.zeros(3, 4, 8, dtype=torch.uint8)
    whole = encoded.Encoded("experts", codec.Codec("fp8", (1, 4, 8)), (3, 4, 8), (0, 1, 2), codes, torch.ones(3, 1, 1))
    assert [math.prod(piece.shape) for piece in whole.in_order(16)] == [16] * 6
    assert [math.prod(piece.shape) for piece in whole.in_order(4)] == [8] * 12  # a row is not cut
    whole_copy = EncodedCopy.of(whole.cut(lambda each: each), torch.empty(3, 4, 8))
    assert [math.prod(piece.source.shape) for piece in whole_copy.pieces(1)] == [1] * 96  # no slot is too small


# encoding -------------------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[codec.Codec, Tensor]] = {
    "fp8": (codec.Codec("fp8", (128, 128)), torch.exp2(torch.linspace(-30, 30, 4001))),
    "fp8 of rows": (codec.Codec("fp8", (1, 8), torch.bfloat16), torch.exp2(torch.linspace(-30, 30, 4001)).bfloat16()),
    "int4": (codec.Codec("int4", (1, 32), torch.bfloat16), torch.exp2(torch.linspace(-30, 30, 4001)).bfloat16()),
    "mxfp4": (codec.Codec("mxfp4", (1, 32)), torch.arange(4, 250, dtype=torch.uint8)),
    "nvfp4": (codec.Codec("nvfp4", (1, 16)), torch.exp2(torch.linspace(-30, 30, 4001))),
}
"""A codec of each kind, and scales over the whole range."""


@pytest.mark.parametrize("kind", KINDS)
def test_all_codes_come_back_with_their_scales(kind: str) -> None:
    """In each dtype of a model, with the sign of zero. A number that fp16 or bf16 cannot hold has no way back."""
    own, scales = KINDS[kind]
    octets = torch.arange(256, dtype=torch.uint8)
    if own.kind == "fp8":
        octets = octets[(octets & 0x7F) != 0x7F]  # NaN
    numbers = codec.numbers_of(own, octets[None])
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        narrow = scales if dtype != torch.float16 else scales[len(scales) * 2 // 5 : len(scales) * 3 // 5]
        factors = codec.scales_of(own, narrow)[:, None]
        values = codec.decoded(own, numbers.expand(len(factors), -1), factors, dtype)
        usable = values.isfinite().all(1) & (values.float().abs() > torch.finfo(dtype).tiny).any(1)
        found = codec.codes_of(own, codec.divided(own, values, factors))
        assert int(usable.sum()) > len(narrow) // 2
        assert torch.equal(found[usable], octets.expand(len(factors), -1)[usable])


@given(
    kind=strategies.sampled_from(sorted({"fp8", "int4", "mxfp4", "nvfp4"})),
    seed=strategies.integers(0, 1 << 30),
    spread=strategies.floats(-20, 20),
    powers=strategies.booleans(),
)
def test_a_number_moves_by_half_a_step_at_most(kind: codec.Kind, seed: int, spread: float, powers: bool) -> None:
    """Blocks of zeros stay zeros. The largest number of a block has the largest code, unless scales are rounded."""
    own = codec.Codec(kind, (1, 32), overall="multiplies" if kind == "nvfp4" else "")
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(16, 32, generator=generator) * torch.exp2(spread + 4 * torch.randn(16, 1, generator=generator))
    values[3] = 0
    amax = values.abs().amax(1, keepdim=True)
    overall = codec.new_overall(own, amax.amax()) if own.overall else None
    dtype = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}.get(kind, torch.float32)
    stored = codec.new_scales(own, amax, dtype, powers=powers and kind == "fp8", overall=overall)
    scales = codec.scales_of(own, stored, overall)
    numbers = codec.divided(own, values, scales)
    found = codec.numbers_of(own, codec.codes_of(own, numbers))
    table = codec.numbers_of(own, torch.arange(256, dtype=torch.uint8)[None]).flatten()
    nearest = (table[table.isfinite()] - numbers[..., None]).abs().amin(-1)
    assert torch.equal((found - numbers).abs(), nearest)
    assert not found[3].any()
    most = codec.MOST[kind] * (2 if kind == "mxfp4" else 1)
    limit = most * {"mxfp4": 4 / 3, "nvfp4": 1.26}.get(kind, 1.0001)
    assert float(numbers.abs().max()) <= limit
    if kind in ("fp8", "int4") and not powers:
        assert torch.allclose(numbers.abs().amax(1)[amax[:, 0] > 0], torch.tensor(most))


@pytest.mark.parametrize("exponent", [-100, -9, 0, 7, 100])
def test_powers_of_two_are_the_smallest_that_fit(exponent: int) -> None:
    """Also beside their borders, where a logarithm in fp32 is wrong."""
    border = torch.tensor(448.0) * 2.0**exponent
    near = torch.stack(
        [torch.nextafter(border, torch.tensor(0.0)), border, torch.nextafter(border, torch.tensor(torch.inf))]
    )
    own = codec.Codec("fp8", (1, 1))
    for dtype, powers in ((torch.float32, True), (torch.float8_e8m0fnu, False)):
        found = codec.new_scales(own, near, dtype, powers=powers).float()
        assert (found / 2.0**exponent).tolist() == [1, 1, 2]


@pytest.mark.parametrize("name", ["rows", "one scale", "blocks", "int4", "nvfp4"])
def test_codes_are_those_of_compressed_tensors(name: str) -> None:
    """With scales of ours, its own quantizer gives our codes. It is given fp32: in bf16, it would round twice."""
    form, shape = {
        "rows": (quantized.rows(), (24, 64)),
        "one scale": (quantized.one_scale(), (24, 64)),
        "blocks": (quantized.blocks((8, 16)), (24, 64)),
        "int4": (quantized.int4(32), (24, 64)),
        "nvfp4": (quantized.nvfp4("compressed-tensors"), (24, 64)),
    }[name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(8)).bfloat16()
    spec = TensorSpec("x.weight", tuple(shape), weight.dtype)
    made = new_scheme([spec], read_quantization(form.note))
    parts = dict(encoded_tensors("x.weight", weight, made, PLAIN))
    config = QuantizationConfig.model_validate(form.note)
    (group,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    scales = {end.removeprefix("x."): part.float() for end, part in parts.items() if "scale" in end}
    theirs = compressor.compress({"weight": weight.float(), **scales}, group)
    codes = next(part for end, part in parts.items() if end.endswith(("weight", "packed")))
    own = next(part for end, part in theirs.items() if end in ("weight", "weight_packed"))
    assert torch.equal(codes.view(torch.uint8), own.view(torch.uint8))
