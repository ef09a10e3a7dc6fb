"""Checkpoints as publishers quantize them, made from plain ones; and their decoded values, by the publishers' formulas.

No code of the library is used: scales are repeated over their blocks, and nibbles are taken one by one.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.strategies import random_state, save

State = dict[str, Tensor]
LUT = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
OF_ACTIVATIONS = (".activation_scale", "_activation_scale", ".input_scale", ".input_scale_ub")
"""Tensors that no weight needs."""
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "block_sparse_moe.gate.", "router", "eh_proj")
"""Parts of names of tensors that no publisher quantizes."""


@dataclass(frozen=True)
class Format:
    """One published format.

    Attributes:
        note: the ``quantization_config``.
        encode: a plain weight to its parts, by what they add to its name (of which ``.weight`` is taken away).
        decode: the parts back, in a dtype.
        quantizes: which tensors, by name.
    """

    note: dict[str, Any] | None
    encode: Callable[[Tensor], State]
    decode: Callable[[State, torch.dtype], Tensor]
    quantizes: Callable[[str], bool] = lambda name: name.endswith(".weight")

    def files(self, state: State) -> State:
        """A whole checkpoint."""
        found: State = {}
        for name, tensor in state.items():
            if self.is_quantized(name, tensor):
                base = name.removesuffix(".weight")
                found |= {f"{base}{end}": part.clone() for end, part in self.encode(tensor).items()}
            else:
                found[name] = tensor
        return found

    def decoded(self, state: State, dtype: torch.dtype) -> State:
        """The decoded values of its ``files``; plain tensors do not change."""
        return {
            name: self.decode(self.encode(tensor), dtype) if self.is_quantized(name, tensor) else tensor
            for name, tensor in state.items()
        }

    def is_quantized(self, name: str, tensor: Tensor) -> bool:
        return self.quantizes(name) and tensor.dim() > 1 and not any(part in name for part in PLAIN)


@dataclass(frozen=True, kw_only=True)
class Mixed(Format):
    """Two formats in one checkpoint."""

    other: Format
    is_other: Callable[[str], bool]

    def files(self, state: State) -> State:
        mine, theirs = self._halves(state)
        return super().files(mine) | self.other.files(theirs)

    def decoded(self, state: State, dtype: torch.dtype) -> State:
        mine, theirs = self._halves(state)
        return super().decoded(mine, dtype) | self.other.decoded(theirs, dtype)

    def is_quantized(self, name: str, tensor: Tensor) -> bool:
        return self.other.is_quantized(name, tensor) if self.is_other(name) else super().is_quantized(name, tensor)

    def _halves(self, state: State) -> tuple[State, State]:
        theirs = {name: tensor for name, tensor in state.items() if self.is_other(name)}
        return {name: tensor for name, tensor in state.items() if name not in theirs}, theirs


@dataclass(frozen=True, kw_only=True)
class Joined(Format):
    """A format with one overall number for all weights that engines join into one matrix.

    Attributes:
        beside: the format of weights whose largest magnitude is given.
    """

    beside: Callable[[Tensor], Format]

    def files(self, state: State) -> State:
        return {name: part for form, own in self._joined(state) for name, part in form.files(own).items()}

    def decoded(self, state: State, dtype: torch.dtype) -> State:
        return {name: part for form, own in self._joined(state) for name, part in form.decoded(own, dtype).items()}

    def _joined(self, state: State) -> Iterator[tuple[Format, State]]:
        groups: dict[str, State] = {}
        for name, tensor in state.items():
            key = re.sub(r"\.([qkv]|gate|up|q_a)_proj\.|\.kv_a_proj_with_mqa\.", ".joined.", name)
            groups.setdefault(key, {})[name] = tensor
        for own in groups.values():
            most = torch.stack([tensor.float().abs().amax() for tensor in own.values()]).amax()
            yield replace(self.beside(most), quantizes=self.quantizes), own


def write(hf: Any, form: Format, folder: Path, *, dtype: torch.dtype = torch.float32) -> tuple[State, State]:
    """Write a random checkpoint of ``hf`` to a folder; returns its files, and their decoded values."""
    state = random_state(hf, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    files = form.files(state)
    save(files, hf, folder)
    config = folder / "config.json"
    note = dict(form.note or {})
    beside = {name: note.pop(name) for name in ("expert_dtype",) if name in note}
    described = {"quantization_config": note if form.note is not None else None, **beside}
    config.write_text(json.dumps({**json.loads(config.read_text()), **described}))
    return files, form.decoded(state, dtype)


def oracle(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model of a folder, which transformers dequantizes. It may be the model of the equivalent family."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = folder / "config.json"
    fields = json.loads(config.read_text())
    arguments: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
    if fields["quantization_config"]["quant_method"] == "compressed-tensors":
        arguments["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    twin = {"kimi_k2": "deepseek_v3"}.get(fields["model_type"])
    if twin is not None:
        config.write_text(json.dumps({**fields, "model_type": twin}))
    model = AutoModelForCausalLM.from_pretrained(folder, **arguments).eval()
    config.write_text(json.dumps(fields))
    return model


# FP8 ------------------------------------------------------------------------------------------------------------------


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """A scale for each element: blocks of the full size, cut at the edges."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def amax(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block. Elements beyond an edge count as zero."""
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight.float().abs()
    return padded.view(rows, block[0], columns, block[1]).amax((1, 3))


def power_of_two(scales: Tensor) -> Tensor:
    return torch.exp2(scales.log2().ceil())


def fp8(
    block: tuple[int, int] | None,
    note: dict[str, Any],
    *,
    name: str = ".weight_scale_inv",
    dtype: torch.dtype = torch.float32,
    rule: Callable[[Tensor], Tensor] = lambda scales: scales,
    product: torch.dtype | None = None,
    extra: State | None = None,
    dims: Callable[[Tensor], list[int]] | None = None,
) -> Format:
    """FP8 in blocks; with a scale for each row if the block is (1, 0), and with one scale if it is None.

    ``dims`` is another shape of scales.
    """

    def sizes(weight: Tensor) -> tuple[int, int]:
        rows, columns = block or (0, 0)
        return rows or weight.shape[0], columns or weight.shape[1]

    def encode(weight: Tensor) -> State:
        scales = rule(amax(weight, sizes(weight)) / 448).to(dtype)
        codes = (weight.float() / spread(scales.float(), sizes(weight), weight.shape)).clamp(-448, 448)
        if dims or not block:
            scales = scales.reshape(dims(scales) if dims else [] if name.endswith("_inv") else [1])
        return {".weight": codes.to(torch.float8_e4m3fn), name: scales, **(extra or {})}

    def decode(parts: State, wanted: torch.dtype) -> Tensor:
        codes, scales = parts[".weight"], parts[name].float()
        scales = scales.reshape([-(-size // cell) for size, cell in zip(codes.shape, sizes(codes), strict=True)])
        values = codes.float() * spread(scales, sizes(codes), codes.shape)
        return values.to(product or torch.float32).to(wanted)

    return Format({"activation_scheme": "dynamic", **note}, encode, decode)


def deepseek(block: tuple[int, int], dtype: torch.dtype = torch.float32, **arguments: Any) -> Format:
    note = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    return fp8(block, note, dtype=dtype, **arguments)


def without_up(block: tuple[int, int]) -> Format:
    """FP8 for all but one of two matrices that a trainer holds as one."""
    own = deepseek(block)
    note = {**(own.note or {}), "modules_to_not_convert": ["up_proj"]}
    return replace(own, note=note, quantizes=lambda name: name.endswith(".weight") and ".up_proj." not in name)


def fbgemm() -> Format:
    """The format of Meta's files of Llama 3.1 405B."""
    note = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    bound = {".input_scale_ub": torch.tensor([1200.0])}
    return fp8((1, 0), note, name=".weight_scale", extra=bound)


def ministral() -> Format:
    note = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    skipped = {"modules_to_not_convert": ["lm_head"]}
    return fp8(None, {**note, **skipped}, extra={".activation_scale": torch.tensor(0.5)})


def stacks_with_one_scale() -> Format:
    """The format of Mistral Small 4: one scale for each matrix, also in stacks of experts."""
    own = ministral()

    def encode(weight: Tensor) -> State:
        if weight.dim() == 2:
            return own.encode(weight)
        parts = [own.encode(expert) for expert in weight]
        codes = torch.stack([part[".weight"].view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        scales = torch.stack([part[".weight_scale_inv"] for part in parts])
        return {"": codes, "_scale_inv": scales[:, None, None], "_activation_scale": torch.full((len(parts),), 0.5)}

    def decode(parts: State, wanted: torch.dtype) -> Tensor:
        return (parts[""].float() * parts["_scale_inv"]).to(wanted) if "" in parts else own.decode(parts, wanted)

    return Format(own.note, encode, decode, lambda name: name.endswith((".weight", "experts.gate_up_proj", "_proj")))


# MXFP4 ----------------------------------------------------------------------------------------------------------------


def _mx_parts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., blocks, 16] and exponents [..., blocks] of a weight, uint8."""
    blocks = weight.float().unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1).log2().floor() - 2
    nearest = (blocks / torch.exp2(exponents)[..., None])[..., None].sub(LUT).abs().argmin(-1)
    packed = nearest[..., 0::2] | nearest[..., 1::2] << 4
    return packed.to(torch.uint8), (exponents + 127).to(torch.uint8)


def mx_values(packed: Tensor, exponents: Tensor) -> Tensor:
    """The weight of codes [..., blocks, 16] and exponents [..., blocks], fp32."""
    codes = packed.long()
    values = torch.stack((LUT[codes & 15], LUT[codes >> 4]), -1).flatten(-2)
    return (values * torch.exp2(exponents.float() - 127)[..., None]).flatten(-2)


def mxfp4() -> Format:
    def encode(weight: Tensor) -> State:
        return dict(zip(("_blocks", "_scales"), _mx_parts(weight.transpose(1, 2)), strict=True))

    def decode(parts: State, wanted: torch.dtype) -> Tensor:
        return mx_values(parts["_blocks"], parts["_scales"]).transpose(1, 2).contiguous().to(wanted)

    note = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens"]}
    return Format(note, encode, decode, lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")))


def mxfp4_in_matrices() -> Format:
    """The routed experts of DeepSeek V4: codes in int8, and scales in e8m0."""

    def encode(weight: Tensor) -> State:
        packed, exponents = _mx_parts(weight)
        return {".weight": packed.flatten(-2).view(torch.int8), ".scale": exponents.view(torch.float8_e8m0fnu)}

    def decode(parts: State, wanted: torch.dtype) -> Tensor:
        packed = parts[".weight"].view(torch.uint8).unflatten(-1, (-1, 16))
        return mx_values(packed, parts[".scale"].view(torch.uint8)).to(wanted)

    return Format(None, encode, decode)


V4_DENSE = ("attn.wq_", "attn.wkv.", "attn.wo_", "indexer.wq_b.", "shared_experts.", ".e_proj.", ".h_proj.")
"""Parts of names of the weights that DeepSeek V4 publishes in FP8."""


def deepseek_v4() -> Format:
    """DeepSeek V4: routed experts in MXFP4, and other linear layers in FP8. All scales are e8m0."""
    dense = deepseek((4, 4), torch.float8_e8m0fnu, rule=power_of_two, name=".scale")
    return Mixed(
        *({**(dense.note or {}), "scale_fmt": "ue8m0", "expert_dtype": "fp4"}, dense.encode, dense.decode),
        lambda name: name.endswith(".weight") and any(part in name for part in V4_DENSE),
        other=mxfp4_in_matrices(),
        is_other=lambda name: ".ffn.experts." in name,
    )


def deepseek_v4_by_nvidia() -> Format:
    """NVIDIA's release of DeepSeek V4: experts in NVFP4, but experts of MTP layers in MXFP4."""
    own, experts = deepseek_v4(), nvfp4_alone("modelopt")
    note = {**(own.note or {}), "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}
    is_other = lambda name: name.startswith("mtp.")  # noqa: E731
    both = Mixed(None, experts.encode, experts.decode, other=mxfp4_in_matrices(), is_other=is_other)
    return replace(own, note=note, other=both)


# compressed-tensors and ModelOpt --------------------------------------------------------------------------------------


def compressed(kind: str, weights: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    """The config of compressed-tensors for one kind of weights."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    status = {"quantization_status": "compressed", "kv_cache_scheme": None, "global_compression_ratio": None}
    methods = {"quant_method": "compressed-tensors", "format": kind}
    return {**methods, "config_groups": {"group_0": group}, "ignore": [*ignore, "re:.*mlp.gate$"], **status}


ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}


def rows(dtype: torch.dtype = torch.float32, *, product: torch.dtype | None = None) -> Format:
    note = compressed("float-quantized", ROWS)
    return fp8((1, 0), note, name=".weight_scale", dtype=dtype, product=product or dtype)


def rows_of_experts(*, alone: bool) -> Format:
    """A bf16 scale for each row, in experts alone or in all weights. Only products of weights outside of experts are
    rounded to bf16.
    """
    experts, others = rows(torch.bfloat16, product=torch.float32), rows(torch.bfloat16)
    if alone:
        plain = ("lm_head", "re:.*self_attn.*", "re:.*mlp.shared_expert.*", "re:.*mlp.(gate|up|down)_proj")
        note = compressed("float-quantized", ROWS, plain)
        return replace(experts, note=note, quantizes=lambda name: ".experts." in name and name.endswith(".weight"))
    return Mixed(others.note, others.encode, others.decode, other=experts, is_other=lambda name: ".experts." in name)


def groups_of_each_layer() -> Format:
    """Scales for each row in attention, for whole weights of values and MLPs, and for each block in the last layer."""
    fp8_of = lambda **fields: {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **fields}  # noqa: E731
    weights = {
        "re:.*layers.[012].self_attn.[qko].*": fp8_of(strategy="channel"),
        "re:.*layers.[012].(mlp|self_attn.v).*": fp8_of(strategy="tensor"),
        "re:.*layers.3.*": fp8_of(strategy="block", block_structure=[8, 8]),
    }
    note = compressed("float-quantized", {})
    note["config_groups"] = {
        f"group_{number}": {"targets": [target], "weights": each}
        for number, (target, each) in enumerate(weights.items())
    }
    own, last = one_scale(), blocks((8, 8))
    rest = Mixed(None, last.encode, last.decode, other=rows(), is_other=lambda name: ".layers.3." not in name)
    return Mixed(
        *(note, own.encode, own.decode),
        other=rest,
        is_other=lambda name: ".layers.3." in name or (".self_attn." in name and "v_proj" not in name),
    )


def one_scale(dtype: torch.dtype = torch.float32) -> Format:
    note = compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"})
    return fp8(None, note, name=".weight_scale", dtype=dtype, product=dtype)


def blocks(block: tuple[int, int]) -> Format:
    sizes = {"strategy": "block", "block_structure": list(block)}
    return fp8(block, compressed("float-quantized", {"num_bits": 8, "type": "float", **sizes}), name=".weight_scale")


def int4(group: int) -> Format:
    def encode(weight: Tensor) -> State:
        scales = (amax(weight, (1, group)) / 7).bfloat16()
        values = (weight.float() / spread(scales.float(), (1, group), weight.shape)).round().clamp(-8, 7).long() + 8
        words = (values.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
        shape = torch.tensor(weight.shape)
        return {".weight_packed": words.to(torch.int32), ".weight_scale": scales, ".weight_shape": shape}

    def decode(parts: State, wanted: torch.dtype) -> Tensor:
        words = parts[".weight_packed"].long()
        values = (words[..., None] >> torch.arange(0, 32, 4) & 15).flatten(-2) - 8
        scales = parts[".weight_scale"]
        return (values * spread(scales.float(), (1, group), values.shape)).to(scales.dtype).to(wanted)

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    skipped = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*")
    note = compressed("pack-quantized", weights, skipped)
    return Format(note, encode, decode, lambda name: name.endswith(".weight") and ".experts." in name)


def nvfp4(owner: str) -> Format:
    """NVFP4 of compressed-tensors, whose global scale divides, or of ModelOpt, whose global scale multiplies."""
    alone = nvfp4_alone(owner)
    return Joined(alone.note, alone.encode, alone.decode, beside=lambda most: nvfp4_alone(owner, most))


def nvfp4_alone(owner: str, most: Tensor | None = None) -> Format:
    """NVFP4 with a global scale by the largest magnitude of each weight, or by a given one."""
    divides = owner == "compressed-tensors"
    codes_name = ".weight_packed" if divides else ".weight"
    overall_name = ".weight_global_scale" if divides else ".weight_scale_2"

    def encode(weight: Tensor) -> State:
        overall = (weight.float().abs().amax() if most is None else most) / (6 * 448)
        scales = (amax(weight, (1, 16)) / 6 / overall).to(torch.float8_e4m3fn)
        values = weight.float() / (spread(scales.float(), (1, 16), weight.shape) * overall)
        nearest = values[..., None].sub(LUT).abs().argmin(-1)
        packed = (nearest[:, 0::2] | nearest[:, 1::2] << 4).to(torch.uint8)
        held = (1 / overall).view(1) if divides else overall
        return {codes_name: packed, ".weight_scale": scales, overall_name: held, ".input_scale": torch.tensor(1.0)}

    def decode(parts: State, wanted: torch.dtype) -> Tensor:
        codes, overall = parts[codes_name].long(), parts[overall_name]
        values = torch.stack((LUT[codes & 15], LUT[codes >> 4]), -1).flatten(-2)
        scales = parts[".weight_scale"].float()
        scales = scales / overall if divides else scales * overall
        values = values * spread(scales, (1, 16), values.shape)
        return (values.bfloat16() if divides else values).to(wanted)

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    note = (
        compressed("nvfp4-pack-quantized", weights) if divides else {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    )
    return Format(note, encode, decode)


def modelopt_blocks() -> Format:
    note = {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}
    return fp8((128, 128), note, name=".weight_scale", dims=lambda scales: [len(scales), 1, scales.shape[1], 1])


def modelopt_rows() -> Format:
    note = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "quant_method": "modelopt", "exclude_modules": ["lm_head"]}
    return fp8((1, 0), note, name=".weight_scale", dims=lambda scales: [len(scales)])


def modelopt_mixed() -> Format:
    """FP8 of attention and NVFP4 of MLPs, as NVIDIA publishes Qwen3.6."""
    algorithms = {
        "self_attn.q_proj": {"quant_algo": "FP8"},
        "mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }
    layers = {f"model.layers.{number}.{name}": each for number in range(4) for name, each in algorithms.items()}
    note = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    one, other = modelopt_fp8(), nvfp4_alone("modelopt")
    return Mixed(note, one.encode, one.decode, other=other, is_other=lambda name: ".mlp." in name)


def modelopt_fp8() -> Format:
    note = {"quant_method": "modelopt", "quant_algo": "FP8"}
    return fp8(None, note, name=".weight_scale", extra={".input_scale": torch.tensor(1.0)})
