"""Weights that leave encoded: as a folder has them, or by a new description, on every mesh.

``tests/support/quantized.py`` is the oracle: it encodes whole tensors, with code that shares nothing with the library.
"""

import dataclasses
import gc
import json
import math
import re
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mcore_bridge as mb
from mcore_bridge.config.quantization import LISTS
from mcore_bridge.convert.convert import convert
from mcore_bridge.engines import EngineWorker
from mcore_bridge.errors import BridgeError, ConfigError, ExportError, MappingError, TargetError, TransferError
from mcore_bridge.rules.codec import Codec, as_bytes
from mcore_bridge.rules.scheme import joined_names
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.agreement import open_plain
from mcore_bridge.weights.engine import across_ranks, pull_writer
from mcore_bridge.weights.engine import writer as writing
from mcore_bridge.weights.engine.pull_writer import PullWriter
from mcore_bridge.weights.manifest import Manifest
from mcore_bridge.weights.plan.boxes import ByteCopy, placed_rows, rows_of
from mcore_bridge.weights.sent import encoded_shard
from mcore_bridge.weights.sent.encode_tables import Blocks
from mcore_bridge.weights.sent.encoding import encoded_tensors
from mcore_bridge.weights.sent.launches import _needs_no_more
from mcore_bridge.weights.source.source import open_source
from mcore_bridge.weights.source.weight_format import is_linear, weight_format
from mcore_bridge.weights.transfer.collectives import Group
from tests import zoo
from tests.support import pool, quantized
from tests.support.conversions import quiet
from tests.support.encode_on_cpu import launches_on_cpu
from tests.support.near import Near
from tests.support.quantized import Format, deepseek
from tests.support.quantized_cases import CASES, MISTRAL4, Case, case, family
from tests.support.strategies import random_state, save, tiny
from tests.support.sync_trainer import into_one_file

ENGINES = {
    "qwen3": {"tp": 2},
    "qwen3_moe": {"tp": 2, "ep": 2},
    "each layer": {"tp": 2},
    "bf16 rows": {"tp": 2},
    "ministral3": {"tp": 2},
    "gpt_oss": {"tp": 2, "ep": 2, "whole": ("*.self_attn.*",)},
    "kimi_k2": {"tp": 2, "ep": 2},
}
"""Engines whose cuts are cuts between blocks, by case."""
STEP = {"nvfp4": 1, "modelopt": 1}
"""How many times the largest number of its weight the changed number is, by case: 7 if the scales have no limit."""


def bits(tensors: Any) -> dict[str, tuple[torch.Size, torch.dtype, Tensor]]:
    """What can be sent between processes and compared: torch cannot do so with float8."""
    return {
        name: (tensor.shape, tensor.dtype, tensor.contiguous().flatten().view(torch.uint8).clone())
        for name, tensor in dict(tensors).items()
    }


def tensors_of(sent: dict[str, tuple[torch.Size, torch.dtype, Tensor]]) -> dict[str, Tensor]:
    return {name: octets.view(dtype).view(shape) for name, (shape, dtype, octets) in sent.items()}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    mine, theirs = bits(found), bits(expected)
    same = lambda one, other: one[:2] == other[:2] and torch.equal(one[2], other[2])  # noqa: E731
    return [
        name for name in {**mine, **theirs} if not (name in mine and name in theirs and same(mine[name], theirs[name]))
    ]


def published(folder: str, changed: str, dims: mb.ParallelDims, dtype: torch.dtype, engine: dict[str, Any]) -> Any:
    """On one rank: a manifest and a save of the untrained model, slices for an engine, and an export after a change."""
    rank = torch.distributed.get_rank()
    dims.initialize(device="cpu")
    models = mb.build_model(folder, dims=dims, device="cpu", dtype=dtype)
    before = mb.manifest(models, quantize="as_published", digests=True)
    mb.save_hf_checkpoint(models, f"{folder}-saved", quantize="as_published")
    slices = {}
    if engine:
        target = mb.engine_ranks(**engine)[rank % engine["tp"]]
        for quantize in (None, "as_published"):
            slices[quantize] = bits(mb.iter_hf_weights(models, target=target, quantize=quantize))
    mb.load_hf_weights(models, changed)
    return before, slices, bits(mb.iter_hf_weights(models, quantize="as_published"))


@pytest.mark.parametrize("name", [*CASES, "mistral4"])
def test_a_model_leaves_as_published_until_a_step_changes_a_block(name: str, tmp_path: Path) -> None:
    hf, form, dtype, dims = case(name, {**CASES, "mistral4": MISTRAL4})
    folder, changed = tmp_path / "published", tmp_path / "changed"
    files, plain = quantized.write(hf, form, folder, dtype=dtype)
    encoded = [each for each, tensor in plain.items() if form.is_quantized(each, tensor)]
    weight = max(encoded, key=lambda each: (".experts." in each, each))
    index = (-1,) * plain[weight].dim()
    new = {**plain, weight: plain[weight].clone()}
    new[weight][index] = STEP.get(name, 7) * plain[weight].abs().max()
    changed.mkdir()
    save_file({each: tensor.contiguous() for each, tensor in new.items()}, changed / "model.safetensors")
    arguments = str(folder), str(changed), dims, dtype, ENGINES.get(name, {})
    results = pool.run(dims.smallest_world, published, *arguments)

    expected = Manifest.from_folder(folder, digests=True)
    assert expected.differences(Manifest.from_folder(f"{folder}-saved", digests=True)) == ()
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, Path(f"{folder}-saved"))]
    notes = [(config["quantization_config"], config.get("expert_dtype")) for config in configs]
    assert notes[0] == notes[1]
    for before, slices, after in results:
        assert expected.differences(before) == ()
        if slices:
            as_decoded(tensors_of(slices["as_published"]), tensors_of(slices[None]), form)
        found = tensors_of(after)
        parts = set(differing(found, files))
        assert parts
        assert all(each.startswith(weight.removesuffix(".weight")) for each in parts)
        only_one_block_is_new({each: (found[each], files[each]) for each in parts}, form)
        error = (open_source(found, form.note)[weight].to(torch.float32)[index] - new[weight][index].float()).abs()
        assert error <= new[weight][index].float() / (4 if re.search("mxfp4|'fp4'", str(form.note)) else 12)


def as_decoded(slices: dict[str, Tensor], expected: dict[str, Tensor], form: Format) -> None:
    """The slices of codes and scales are those of an engine: decoded alone, they give the slices of the weights."""
    source = open_source(slices, form.note)
    assert set(source) == set(expected)
    for name, tensor in expected.items():
        found = source[name]
        found = found.to(tensor.dtype) if form.is_quantized(name, tensor) else found
        assert torch.equal(found, tensor.to(found.dtype)), name


def only_one_block_is_new(pairs: dict[str, tuple[Tensor, Tensor]], form: Format) -> None:
    for name, (found, before) in pairs.items():
        if found.dtype == torch.uint8 or found.dtype.itemsize == 1:
            found, before = found.view(torch.uint8), before.view(torch.uint8)
        if name.endswith(("scale", "scales", "scale_inv")):
            assert int((found != before).sum()) == 1, name


def of_stacks() -> Format:
    """FP8 of transposed stacks of experts, whose rows of gate and up alternate: every block lies in both."""
    own = deepseek((8, 16))

    def encode(weight: Tensor) -> dict[str, Tensor]:
        parts = [own.encode(expert) for expert in weight]
        codes, scales = (torch.stack([part[end].float() for part in parts]) for end in (".weight", ".weight_scale_inv"))
        return {"": codes.to(torch.float8_e4m3fn), "_scale_inv": scales}

    note = {**(own.note or {}), "modules_to_not_convert": ["self_attn"]}
    return Format(note, encode, own.decode, lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")))


def with_note(given: Case, **fields: Any) -> Case:
    """A case with other fields in its config: such as scales of activations that an engine makes."""
    hf, form, dtype, dims = given
    return hf, dataclasses.replace(form, note={**(form.note or {}), **fields}), dtype, dims


NEW: dict[str, Case] = {
    **{name: CASES[name] for name in ("minimax_m2", "glm4_moe", "experts alone", "kimi_k2", "bf16 rows", "gpt_oss")},
    "parts in two forms": CASES["parts in two forms"],
    "blocks that shards share": (
        family("qwen3_moe"),
        deepseek((16, 32)),
        torch.bfloat16,
        mb.ParallelDims(tp=4, ep=2, etp=4, sp=True),
    ),
    "powers of two": (
        family("deepseek_v3"),
        dataclasses.replace(
            deepseek((16, 16), rule=quantized.power_of_two),
            note={"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"},
        ),
        torch.float32,
        mb.ParallelDims(tp=2, pp=2, ep=2, sp=True),
    ),
    "one scale": (lambda: tiny("llama"), quantized.one_scale(torch.bfloat16), torch.bfloat16, mb.ParallelDims(tp=4)),
    "transposed stacks": (*CASES["gpt_oss"][:1], of_stacks(), *CASES["gpt_oss"][2:]),
    "nvfp4": CASES["nvfp4"],
    "modelopt": with_note(CASES["modelopt"], quant_algo="W4A16_NVFP4"),
    "modelopt rows": CASES["modelopt rows"],
    "modelopt blocks": CASES["modelopt blocks"],
    "mistral4": with_note(MISTRAL4, activation_scheme="dynamic"),
    "fbgemm": with_note(CASES["fbgemm"], activation_scale_ub=1200.0),
}
"""Formats whose rule for new scales is ours."""


def newly(folder: str, saved: str, dims: mb.ParallelDims, dtype: torch.dtype, note: dict[str, Any]) -> Any:
    """On one rank: a save by a description."""
    dims.initialize(device="cpu")
    models = mb.build_model(folder, dims=dims, device="cpu", dtype=dtype)
    return mb.save_hf_checkpoint(models, saved, quantize=note)


def as_by_a_kernel(folder: str) -> list[bool]:
    """On one rank: whether an export has equal bits if launches encode all, with adapters too; and all is made."""
    mb.ParallelDims(ep=2).initialize(device="cpu")
    models = mb.build_model(folder, dims=mb.ParallelDims(ep=2), device="cpu", load_weights=False)
    target = "nothing" if torch.distributed.get_rank() else "everything"
    equal = []
    for merged in (None, True):
        if merged:
            mb.add_adapters(models, rank=2, alpha=4, targets="all-linear")
            with torch.no_grad():
                for name, parameter in models[0].named_parameters():
                    parameter.normal_() if "adapter" in name else None
        options: dict[str, Any] = {"quantize": {"quant_method": "fp8", "weight_block_size": [8, 8]}, "merged": merged}
        expected = dict(mb.iter_hf_weights(models, target=target, **options))
        with launches_on_cpu() as made:
            for _ in range(2):
                found = dict(mb.iter_hf_weights(models, target=target, **options))
        is_once = sum(map(len, made)) == 2 * len(set[int]().union(*made))  # in each of two exports
        equal += [found.keys() == expected.keys(), len(made) > 1, is_once]
        equal += [torch.equal(as_bytes(found[name]), as_bytes(own)) for name, own in expected.items()]
    spoil(models, rank=1)
    with launches_on_cpu(), pytest.raises(ExportError, match="finite numbers") as refused:
        dict(mb.iter_hf_weights(models, target=target, **options))
    return [*equal, "rank 1" in str(refused.value)]


def spoil(models: Any, rank: int = 0) -> None:
    """Make all matrices of a rank NaN."""
    for parameter in models[0].parameters() if torch.distributed.get_rank() == rank else ():
        if parameter.dim() > 1:
            parameter.data.fill_(torch.nan)


def test_launches_make_all_that_one_of_two_holders_of_a_weight_sends(tmp_path: Path) -> None:
    tiny("qwen3_moe").save_pretrained(tmp_path)
    assert all(map(all, pool.run(2, as_by_a_kernel, str(tmp_path))))


def stopped_early(folder: str, dims: mb.ParallelDims) -> None:
    """All ranks stop after a tensor, while a launch of the first one still encodes others."""
    dims.initialize(device="cpu")
    models = mb.build_model(folder, dims=dims, device="cpu", load_weights=False)
    spoil(models)
    note = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    with launches_on_cpu(is_done=False):
        pairs = mb.iter_hf_weights(models, quantize=note, bucket_bytes=1 << 14)
        next(pairs)
        with pytest.raises(ExportError, match="finite numbers"):
            pairs.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("dims", [mb.ParallelDims(), mb.ParallelDims(pp=2)], ids=str)
def test_codes_of_an_export_that_ends_early_are_checked(dims: mb.ParallelDims, tmp_path: Path) -> None:
    tiny("qwen3").save_pretrained(tmp_path)
    pool.run(dims.pp, stopped_early, str(tmp_path), dims)


class StackingEngine(nn.Module):
    """An engine with gate and up of all experts of a layer in one parameter, and with unused rows before them.

    With ``turns`` it keeps one projection of each layer transposed. With ``casts`` its scales are bf16. With two
    ``parts`` it has tensor parallelism, and this is one of two such engines.
    """

    def __init__(
        self,
        manifest: Manifest,
        folder: Path,
        *,
        turns: bool = False,
        casts: bool = False,
        parts: int = 1,
        part: int = 0,
    ) -> None:
        super().__init__()
        self._turned, self._parts, self._part = "o_proj.weight" if turns else "nothing", parts, part
        self._shapes = {spec.name: self._cut(spec.name, torch.empty(spec.shape)).shape for spec in manifest}
        sizes = {self._place(spec.name)[0]: spec for spec in manifest}
        folder.mkdir(parents=True)
        for number, (name, spec) in enumerate(sizes.items()):
            shape = tuple(self._shapes[spec.name])
            shape = (shape[0] * 8 + 3, *shape[1:]) if name.endswith("w13") else shape
            shape = shape[::-1] if name.endswith(self._turned) else shape
            dtype = torch.bfloat16 if casts and name.endswith("scale_inv") else spec.dtype
            count = math.prod(shape) * dtype.itemsize
            memory = torch.from_file(str(folder / str(number)), shared=True, size=count, dtype=torch.uint8)
            self.register_parameter(name.replace(".", "-"), nn.Parameter(memory.view(dtype).view(shape), False))

    def _place(self, name: str) -> tuple[str, int]:
        layer, _, rest = name.partition(".mlp.experts.")
        expert, _, kind = rest.partition(".")
        if kind not in ("gate_proj.weight", "up_proj.weight"):
            return name, -1
        return f"{layer}.w13", 3 + self._shapes[name][0] * (2 * int(expert) + (kind == "up_proj.weight"))

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        if "_proj.weight" not in name:
            return tensor
        return tensor.chunk(self._parts, dim=int("o_proj" in name or "down_proj" in name))[self._part]

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Load HF tensors."""
        for name, tensor in pairs:
            tensor, (place, row) = self._cut(name, tensor), self._place(name)
            own = self.get_parameter(place.replace(".", "-")).data
            own = own.mT if name.endswith(self._turned) else own
            (own if row < 0 else own[row : row + len(tensor)]).copy_(tensor)


class EncodedRounds:
    """Rounds in FP8 from a trainer into a ``StackingEngine`` of a ``kind``, both in this process."""

    def __init__(self, folder: Path, note: Any, **kind: bool) -> None:
        is_published = note == "as_published"
        self.models = mb.build_model(folder.parent, device="cpu", dtype=torch.bfloat16, load_weights=is_published)
        self.parameters, self._note = dict(self.models[0].named_parameters()), note
        manifest = mb.manifest(self.models, quantize=note)
        self._own, self._other = (StackingEngine(manifest, folder / part, **kind) for part in ("own", "other"))
        self.engine = mb.engines.map_engine(manifest, self._own, self._own.load)
        self.writer: Any = None

    def step(self) -> None:
        """Change all weights."""
        for parameter in self.parameters.values():
            parameter.data.mul_(1.25).add_(0.01)

    def begin(self) -> None:
        """Announce a round."""
        if (handles := self.engine.share()) is not None:
            self.writer = mb.engines.EngineWriter(self.engine.map, handles)

    def complete(self) -> None:
        """End a round."""
        self.engine.complete()

    def run(self) -> tuple[bool, bool, bool]:
        """A round: whether the engine has all bits, whether messages carried it, and whether few launches made all."""
        self.begin()
        messages = mock.patch.object(writing, "run_messages", side_effect=writing.run_messages)
        with launches_on_cpu() as made, messages as whole:
            mb.engines.export_into(self.models, self.writer, quantize=self._note)
        self.complete()
        self._other.load(mb.iter_hf_weights(self.models, quantize=self._note))
        pairs = zip(self._own.parameters(), self._other.parameters(), strict=True)
        is_equal = all(torch.equal(as_bytes(one.data), as_bytes(two.data)) for one, two in pairs)
        return is_equal, whole.called, len(made) <= 4


def rounds_into_an_engine(folder: str, note: dict[str, Any], **kind: bool) -> list[tuple[bool, bool, bool]]:
    """Rounds of which the third begins with a weight in other memory; then a round with NaN, and two further rounds."""
    mb.ParallelDims().initialize(device="cpu")
    rounds = EncodedRounds(Path(folder) / str(kind), note, **kind)
    first, moving = (rounds.parameters[f"decoder.layers.{n}.self_attention.linear_proj.weight"] for n in range(2))
    first.data, moving.data = torch.stack([first.data, moving.data]).unbind()
    found = []
    for number in range(4):
        rounds.step()
        if number == 2:
            moving.data = moving.data.clone()
        found.append(rounds.run())
    kept = {name: parameter.data.clone() for name, parameter in rounds.parameters.items()}
    spoil(rounds.models)
    with pytest.raises(ExportError, match="finite numbers"):
        rounds.run()
    with pytest.raises(TransferError, match="mark"):  # the engine does not count it as written
        rounds.engine.complete()
    rounds.engine.break_off()
    for name, parameter in rounds.parameters.items():
        parameter.data.copy_(kept[name])
    found += [rounds.run(), rounds.run()]
    memory = weakref.ref(rounds.writer.memory.tensors[0])
    gc.collect()  # frames of the error
    gc.disable()
    rounds.writer.close()
    assert memory() is None
    gc.enable()
    return found


OF_ENGINES = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}
BY_ENGINES = {"quant_method": "fp8", "weight_block_size": [16, 32], "modules_to_not_convert": ["layers.1.mlp"]}


def test_codes_are_made_where_an_engine_keeps_them_in_rounds_that_repeat(tmp_path: Path) -> None:
    """If not all codes can be made there, some are copied, and no round begins like the last one."""
    tiny("qwen3_moe", **OF_ENGINES).save_pretrained(tmp_path)
    for casts in (False, True):
        (found,) = pool.run(1, partial(rounds_into_an_engine, casts=casts), str(tmp_path), BY_ENGINES)
        assert found == [(True, messages, True) for messages in (True, False, True, False, True, False)]
    (found,) = pool.run(1, partial(rounds_into_an_engine, turns=True), str(tmp_path), BY_ENGINES)
    assert found == [(True, True, True)] * 6


class PulledRounds(EncodedRounds):
    """Rounds in which the engine's worker opens the trainer's memory."""

    def __init__(self, folder: Path, note: Any, **kind: bool) -> None:
        super().__init__(folder, note, **kind)
        specs = tuple(TensorSpec.of(spec.name, spec) for spec in mb.manifest(self.models, quantize=note))
        self.worker = EngineWorker(self._own, self._own.load, name="it")
        self.writer = PullWriter(self.worker.ask_map(specs), Near(self.worker))
        self.move(0)
        with launches_on_cpu():
            self.writer.can_encode = self.worker.ask_pull(specs, self.writer.open(self.parameters.values()))

    def move(self, between: int) -> None:
        """Move all weights."""
        self.memory = into_one_file([*self.parameters.values()], between=between)

    def begin(self) -> None:
        """Announce a round. What it leaves of the last round is found in no engine."""
        for parameter in self._own.parameters():
            as_bytes(parameter.data).zero_()
        self.writer.announce()

    def complete(self) -> None:
        """End a round."""
        self.worker.ask_complete(None)


def rounds_of_a_pull(folder: str, note: Any, **kind: bool) -> list[tuple[bool, bool, bool]]:
    """Rounds; the third begins with all weights elsewhere, the fourth with other distances. One with NaN, one more.

    For each also whether the engine's process has made all codes.
    """
    mb.ParallelDims().initialize(device="cpu")
    rounds, found = PulledRounds(Path(folder) / f"pulled {kind}", note, **kind), []

    def run() -> None:
        is_equal, by_messages, _ = rounds.run()
        found.append((is_equal, by_messages, rounds.writer._makes))

    for number in range(4):
        if number:  # before a step, scales of a published folder stay
            rounds.step()
        if number >= 2:
            rounds.move(number - 2)
        run()
    weight = rounds.parameters["decoder.layers.1.self_attention.linear_proj.weight"]
    kept = weight.detach().clone()
    weight.data[3, 5] = torch.nan
    with pytest.raises(ExportError, match=r"layers\.1\.self_attn\.o_proj\.weight must have finite numbers"):
        run()
    weight.data.copy_(kept)
    run()
    apart = [into_one_file([parameter]) for parameter in rounds.parameters.values()]
    fewer = mock.patch.object(pull_writer, "MOST_ALLOCATIONS", len(apart) - 1)
    with fewer, pytest.raises(TransferError, match=r"weights in at most \d\d allocations"):
        run()
    rounds.move(0)
    run()
    return found


def publish(folder: str, to: str) -> None:
    """In a worker: save a model in FP8, with scales that are twice as large as the scales of our rule."""
    mb.ParallelDims().initialize(device="cpu")
    models = mb.build_model(folder, device="cpu", dtype=torch.bfloat16, load_weights=False)
    mb.save_hf_checkpoint(models, to, quantize=BY_ENGINES)
    for path in Path(to).glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] *= 2
            codes = name.removesuffix("_scale_inv")
            tensors[codes] = (tensors[codes].float() / 2).to(tensors[codes].dtype)
        save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("published", [False, True])
def test_an_engine_that_pulls_makes_the_codes_itself(published: bool, tmp_path: Path) -> None:
    """If not all codes have places, the trainer makes them, and also if it must cast scales for the engine.

    Blocks of a published folder may keep their scales.
    """
    tiny("qwen3_moe", **OF_ENGINES).save_pretrained(tmp_path)
    folder, note = tmp_path, BY_ENGINES
    if published:
        folder, note = tmp_path / "published", "as_published"
        pool.run(1, publish, str(tmp_path), str(folder))
    (found,) = pool.run(1, rounds_of_a_pull, str(folder), note)
    assert found == [(True, messages, True) for messages in (True, False, False, True, False, True)]
    for kind in ("turns", "casts"):
        (found,) = pool.run(1, partial(rounds_of_a_pull, **{kind: True}), str(folder), note)
        assert found == [(True, True, False)] * 6


class Repacking(nn.Module):
    """An engine that keeps HF tensors, but computes what it keeps of output projections, as kernels for 4 bits want."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        for spec in manifest:
            self.register_buffer(spec.name.replace(".", "-"), torch.zeros(spec.shape, dtype=spec.dtype))

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Load HF tensors."""
        for name, tensor in pairs:
            own = self.get_buffer(name.replace(".", "-"))
            if name.endswith("o_proj.weight"):
                own.copy_(tensor ^ 0x88)
            else:
                own.copy_(1 / tensor if name.endswith("o_proj.weight_scale_2") else tensor)


def numbers_alone_by_a_map(folder: str, dims: mb.ParallelDims) -> list[bool]:
    """On one rank: whether an engine has the bits of its loader. Scales of whole weights have no dims."""
    dims.initialize(device="cpu")
    models = mb.build_model(folder, dims=dims, device="cpu", dtype=torch.bfloat16, load_weights=False)
    note = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    manifest = mb.manifest(models, quantize=note)
    engine, by_loader = Repacking(manifest), Repacking(manifest)
    mapped = mb.engines.map_engine(manifest, engine, engine.load)
    assert {entry.tensor.rpartition("-")[2] for entry in mapped.map.uncovered} == {"weight", "weight_scale_2"}
    by_loader.load(mb.iter_hf_weights(models, quantize=note))
    sent = dict(mb.iter_hf_weights(models, target=mapped.map, quantize=note))
    assert sum(not tensor.shape for tensor in sent.values()) > 4
    mapped.begin([TensorSpec.of(*pair) for pair in sent.items()])
    mapped.write([*sent.items()])
    mapped.complete()
    pairs = zip(engine.buffers(), by_loader.buffers(), strict=True)
    return [torch.equal(as_bytes(one), as_bytes(two)) for one, two in pairs]


def test_numbers_alone_go_into_an_engine_by_its_map_and_its_loader(tmp_path: Path) -> None:
    tiny("qwen3", hidden_size=64, intermediate_size=64, head_dim=16).save_pretrained(tmp_path)
    assert all(map(all, pool.run(2, numbers_alone_by_a_map, str(tmp_path), mb.ParallelDims(tp=2))))


def rounds_of_all_ranks(
    folder: str, note: dict[str, Any], dims: mb.ParallelDims, parts: int
) -> tuple[list[Any], list[Any]]:
    """On one of two ranks, which each write into two engines: rounds of which the third begins with a weight in other
    memory; then a round with NaN, and two further rounds. With EP alone, rank 1 has no engine.

    Returns:
        For each round whether the engine has all bits, whether messages carried it, and how often this rank wrote
        before there was a plan, and in all; and for each encoded weight, into how many parts its rows are cut; 0 if
        its codes are copied.
    """
    dims.initialize(device="cpu")
    rank = torch.distributed.get_rank()
    serves = dims.tp > 1 or rank == 0
    models = mb.build_model(folder, dims=dims, device="cpu", dtype=torch.bfloat16, load_weights=False)
    manifest = mb.manifest(models, quantize=note)
    own, other = (
        StackingEngine(manifest, Path(folder) / f"{kind}{parts}{rank}", parts=parts, part=rank % parts)
        for kind in ("own", "other")
    )
    engine, across = mb.engines.map_engine(manifest, own, own.load), across_ranks.WrittenByRanks()
    writers: list[Any] = []
    before, found, placed = list[int](), list[Any](), list[int]()

    def reached() -> Any:
        if (handles := engine.share()) is not None:
            writers.append(mb.engines.EngineWriter(engine.map, handles))
        return writers[-1]

    def note_places(copies: Any, sizes: Any, first: int) -> Any:
        rows = placed_rows(copies, sizes, first)
        placed.extend(rows[number].starts.shape[1] if number in rows else 0 for number in sizes)
        return rows

    def run() -> None:
        def prepared(look: Any) -> Any:
            before.append(written.call_count)
            return open_plain(models, None, "lm", look, target=engine.map if serves else "nothing", quantize=note)

        messages = mock.patch.object(writing, "run_messages", side_effect=writing.run_messages)
        writes = mock.patch.object(across, "_copy", side_effect=across._copy)
        places = mock.patch.object(across_ranks, "placed_rows", side_effect=note_places)
        with launches_on_cpu(), messages as whole, writes as written, places:
            opened = reached if serves else None
            writing.write_export(models, prepared, opened, across=across, more_handles=engine.more_handles)
        other.load(mb.iter_hf_weights(models, quantize=note))
        if not serves:
            found.append((True, whole.called, before.pop(), written.call_count))
            return
        engine.complete()
        pairs = zip(own.parameters(), other.parameters(), strict=True)
        is_equal = all(torch.equal(as_bytes(one.data), as_bytes(two.data)) for one, two in pairs)
        found.append((is_equal, whole.called, before.pop(), written.call_count))

    parameters = dict(models[0].named_parameters())
    first, moving = (parameters[f"decoder.layers.{n}.self_attention.linear_proj.weight"] for n in range(2))
    first.data, moving.data = torch.stack([first.data, moving.data]).unbind()
    for number in range(4):
        for parameter in parameters.values():
            parameter.data.mul_(1.25).add_(0.01)
        if number == 2 and rank:
            moving.data = moving.data.clone()
        run()
    kept = {name: parameter.data.clone() for name, parameter in parameters.items()}
    spoil(models, rank=1)
    with pytest.raises(ExportError, match="finite numbers"):
        run()
    engine.break_off()
    before.clear()
    for name, parameter in parameters.items():
        parameter.data.copy_(kept[name])
    run()
    run()
    return found, placed


@pytest.mark.parametrize(
    ("dims", "parts", "cuts"),
    [
        (mb.ParallelDims(tp=2, ep=2, sp=True), 1, {0}),
        (mb.ParallelDims(tp=2, ep=2, sp=True), 2, {1, 2}),
        (mb.ParallelDims(ep=2), 1, {1}),
    ],
    ids=["two whole engines", "two halves", "one engine"],
)
def test_all_ranks_make_codes_where_the_engines_of_all_keep_them(
    dims: mb.ParallelDims, parts: int, cuts: set[int], tmp_path: Path
) -> None:
    """Two whole engines need all rows, which are then copied from a buffer. Halves need rows, or halves of rows.

    With one engine, rank 1 holds attention that rank 0 sends.
    """
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    tiny("qwen3_moe", **sizes).save_pretrained(tmp_path)
    note = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["layers.1.mlp"]}
    for rank, (found, placed) in enumerate(pool.run(2, rounds_of_all_ranks, str(tmp_path), note, dims, parts)):
        writes = (0, 1), (1, 1), (1, 1 + rank), (1, 1), (0, 1), (1, 1)
        assert found == [(True, False, *each) for each in writes]
        assert {*placed} == cuts


def pulled_of_all_ranks(
    folder: str, note: dict[str, Any], dims: mb.ParallelDims, parts: int, turns: bool
) -> tuple[list[Any], bool]:
    """On a rank, whose worker opens the memory of all ranks: rounds of which the third begins with all weights
    elsewhere; then a round with NaN on the last rank, and a further one. Without TP, only rank 0 has a worker. At last
    two rounds in which no worker can open the memory of another rank, if there are workers on several ranks.

    Returns:
        For each round whether the engine has all bits, whether messages carried it, and from how many ranks its worker
        got new tables; and whether the worker leaves out codes that it does not need.
    """
    dims.initialize(device="cpu")
    rank = torch.distributed.get_rank()
    serves = dims.tp > 1 or rank == 0
    models = mb.build_model(folder, dims=dims, device="cpu", dtype=torch.bfloat16, load_weights=False)
    parameters, manifest = dict(models[0].named_parameters()), mb.manifest(models, quantize=note)
    memory = [into_one_file([*parameters.values()])]
    own, other = (
        StackingEngine(manifest, Path(folder) / f"{kind}{rank}", turns=turns, parts=parts, part=rank % parts)
        for kind in ("own", "other")
    )
    worker, across, found = EngineWorker(own, own.load, name="it"), pull_writer.PulledByWorkers(), list[Any]()
    skips = set[bool]()

    def learn(sender: int, handle: Any) -> None:
        worker._puller.learn(sender, handle)  # type: ignore[union-attr]
        maker: Any = worker._puller._senders[sender].maker  # type: ignore[union-attr]
        skips.update(tables.skips for tables in maker._tables)

    def open_own(sender: int, *given: Any) -> None:
        if sender not in (rank, -1):
            raise TransferError("no link")
        worker._puller.begin(sender, *given)  # type: ignore[union-attr]

    writer = PullWriter(worker.ask_map(tuple(TensorSpec.of(spec.name, spec) for spec in manifest)), Near(worker))
    target = writer.map if serves else "nothing"
    specs = tuple(TensorSpec.of(spec.name, spec) for spec in mb.manifest(models, quantize=note, target=target))
    with launches_on_cpu():
        writer.can_encode = worker.ask_pull(specs, writer.open(parameters.values()))

    def run() -> None:
        def prepared(look: Any) -> Any:
            return open_plain(models, None, "lm", look, target=target, quantize=note)

        for parameter in own.parameters():
            as_bytes(parameter.data).zero_()
        writer.announce()
        messages = mock.patch.object(writing, "run_messages", side_effect=writing.run_messages)
        learns = mock.patch.object(worker, "ask_pull_learn", side_effect=learn)
        with launches_on_cpu(), messages as whole, learns as learned:
            writing.write_export(models, prepared, (lambda: writer) if serves else None, across=across)
        other.load(mb.iter_hf_weights(models, quantize=note))
        if serves:
            worker.ask_complete(None)
        pairs = zip(own.parameters(), other.parameters(), strict=True)
        is_equal = not serves or all(torch.equal(as_bytes(one.data), as_bytes(two.data)) for one, two in pairs)
        found.append((is_equal, whole.called, learned.call_count))

    for number in range(3):
        for parameter in parameters.values():
            parameter.data.mul_(1.25).add_(0.01)
        if number == 2:
            memory.append(into_one_file([*parameters.values()], between=1))
        run()
    kept = {name: parameter.data.clone() for name, parameter in parameters.items()}
    spoil(models, rank=torch.distributed.get_world_size() - 1)
    with pytest.raises(ExportError, match="finite numbers"):
        run()
    for name, parameter in parameters.items():
        parameter.data.copy_(kept[name])
    run()
    assert bool(across.problem) == turns
    if dims.tp > 1 and not turns:
        with mock.patch.object(worker, "ask_pull_begin", side_effect=open_own):
            run()
            run()
        assert "no link" in across.problem
    return found, any(skips)


@pytest.mark.parametrize(
    ("dims", "parts", "turns", "makers"),
    [
        (mb.ParallelDims(tp=2, ep=2, sp=True), 1, False, (2, 2)),
        (mb.ParallelDims(tp=2, ep=2, sp=True), 2, False, (2, 2)),
        (mb.ParallelDims(pp=2, ep=2), 2, False, (4, 0, 0, 0)),
        (mb.ParallelDims(tp=2), 1, True, (0, 0)),
    ],
    ids=["two whole engines", "two halves", "codes and scales of other ranks", "turned"],
)
def test_workers_pull_from_all_ranks_and_make_the_codes(
    dims: mb.ParallelDims, parts: int, turns: bool, makers: tuple[int, ...], tmp_path: Path
) -> None:
    """A worker that needs half of the codes makes these alone. Codes in another order come by messages.

    Of two ranks with equal weights, one may send the codes of a weight, and the other one the scales.
    """
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    tiny("qwen3_moe", **sizes).save_pretrained(tmp_path)
    note = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["layers.1.mlp"]}
    of_ranks = pool.run(len(makers), pulled_of_all_ranks, str(tmp_path), note, dims, parts, turns)
    for (found, skips), made in zip(of_ranks, makers, strict=True):
        assert found[:4] == [(True, turns, made if not number else 0) for number in range(4)]
        assert found[4:] == ([(True, True, 0)] * 2 if dims.tp == 2 and not turns else [])
        assert skips == (parts == 2 and made > 0)


@pytest.mark.parametrize(("first_row", "scale_rows", "leaves_out"), [(0, 1, False), (16, 1, True), (16, 2, False)])
def test_tiles_are_left_out_only_if_no_scale_of_them_is_needed(
    first_row: int, scale_rows: int, leaves_out: bool
) -> None:
    """An engine has places for rows from one on, and needs some rows of the scales, counted from the last."""
    codes_and_shape = torch.float8_e4m3fn, (32, 32)
    blocks = Blocks(Codec("fp8", (16, 16)), (32, 32), (16, 16), torch.bfloat16, codes_and_shape, torch.float32, False)
    shard: Any = SimpleNamespace(blocks=blocks, codes=0, scales=1)
    of_codes = ByteCopy(0, first_row * 32, 2, 0, 32 - first_row, 32, 1, 32, 1, 32, 1)
    of_scales = ByteCopy(1, (2 - scale_rows) * 8, 2, 0, scale_rows, 2, 4, 8, 4, 8, 4)
    rows = rows_of([of_codes], blocks.row_size)
    assert rows is not None
    assert _needs_no_more([shard], {0: rows}, [of_codes, of_scales]) == leaves_out


IN_TWO_FORMS = {
    "quant_method": "fp8",
    "weight_block_size": [24, 40],
    "modules_to_not_convert": ["up_proj", "k_proj", "v_proj"],
}


def unlike_whole_tensors() -> tuple[int, list[str]]:
    """In a worker: the number of encoded weights of all families, and those that leave unlike a whole tensor."""
    mb.ParallelDims().initialize(device="cpu")
    form, count, wrong = weight_format(IN_TWO_FORMS, None), 0, list[str]()
    for case_name, found in zoo.cases().items():
        models = mb.build_model(found.hf, device="cpu", dtype=torch.bfloat16, load_weights=False)
        for parameter in models[0].parameters():  # rows of very different magnitudes
            powers = torch.randint(-9, 9, (*parameter.shape[:-1], 1)).float().exp2()
            parameter.data.normal_().mul_(powers.to(parameter.dtype))
        try:
            sent = mb.to_hf_state_dict(models, quantize=IN_TWO_FORMS)
        except BridgeError:  # a few families have other classes of linear layers
            continue
        plain = {name: own for name, own in mb.to_hf_state_dict(models).items() if f"{name}_scale_inv" in sent}
        scheme = form.scheme_for(map(TensorSpec.of, plain, plain.values()))
        for name, whole in plain.items():
            parts = {name: whole} if whole.dim() == 2 else {f"{name}[{n}]": own for n, own in enumerate(whole)}
            stack = len(parts) if whole.dim() == 3 else 0
            made = [dict(encoded_tensors(part, own, scheme, form, stack=stack)) for part, own in parts.items()]
            for kind, *of_parts in zip(("", "_scale_inv"), *(each.values() for each in made), strict=True):
                octets = torch.cat([as_bytes(part).flatten() for part in of_parts])
                count += 1
                if not torch.equal(octets, as_bytes(sent[f"{name}{kind}"]).flatten()):
                    wrong.append(f"{case_name}: {name}{kind}")
    return count, wrong


def test_weights_of_every_family_leave_as_whole_tensors() -> None:
    ((count, wrong),) = pool.run(1, unlike_whole_tensors)
    assert not wrong
    assert count > 4000


@pytest.mark.parametrize("name", NEW)
def test_new_scales_are_those_of_whole_tensors(name: str, tmp_path: Path) -> None:
    """Also where a block lies on several ranks, and in a conversion. What is saved is read again with equal values."""
    hf, form, dtype, dims = case(name, NEW)
    state = random_state(hf, dtype=dtype)
    save(state, hf, tmp_path)
    expected = {n: t for n, t in form.files(state).items() if not n.endswith(quantized.OF_ACTIVATIONS)}
    written = pool.run(dims.smallest_world, newly, str(tmp_path), str(tmp_path / "saved"), dims, dtype, form.note)[0]
    found: dict[str, Tensor] = {}
    for path in (tmp_path / "saved").glob("*.safetensors"):
        found |= load_file(path)
    assert written.differences(Manifest.from_folder(tmp_path / "saved")) == ()
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    note = config["quantization_config"]
    (listed,) = (value for key, value in note.items() if key in LISTS)
    assert "lm_head" in listed
    assert note["quant_method"] != "fp8" or note["activation_scheme"] == "dynamic"
    assert not any(".experts." in module for module in listed)
    assert config.get("dtype", config.get("torch_dtype")) == str(dtype).removeprefix("torch.")
    convert(tmp_path, tmp_path / "converted", plain=True, quantize=form.note, on_event=quiet)
    saved, converted = (Manifest.from_folder(tmp_path / each, digests=True) for each in ("saved", "converted"))
    assert saved.differences(converted) == ()
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["quantization_config"] == note
    if "fp4" in str(open_source(found, note).scheme.held):  # the oracle has no -0, and rounds middles down
        decoded = form.decoded(state, dtype)
        source = open_source(found, note)
        assert set(source) == set(decoded)
        for each, tensor in decoded.items():
            own = source[each].to(tensor.dtype)
            assert (own.float() - tensor.float()).abs().max() <= tensor.float().abs().max() / 6, each
        for each in (name for name in expected if name.endswith(("weight_scale_2", "weight_global_scale"))):
            torch.testing.assert_close(found[each], expected[each], rtol=1e-6, atol=0)
    else:
        assert differing(found, expected) == []


def grown(folder: str, module: str) -> Any:
    """On one rank: an export as published after the numbers of one module of the last layer have grown fourfold."""
    dims = mb.ParallelDims(tp=2, sp=True, pp=2)
    dims.initialize(device="cpu")
    models = mb.build_model(folder, dims=dims, device="cpu", dtype=torch.bfloat16)
    state = mb.to_hf_state_dict(models)
    (name,) = (name for name in state if name.endswith(f".3.self_attn.{module}.weight"))
    mb.load_hf_weights(models, {**state, name: 4 * state[name]})
    return bits(mb.iter_hf_weights(models, quantize="as_published"))


@pytest.mark.parametrize(
    ("model", "module", "joined"),
    [("llama", "k_proj", ("q_proj", "v_proj")), ("deepseek_v3", "q_a_proj", ("kv_a_proj_with_mqa",))],
)
def test_weights_that_engines_join_have_one_overall_number(
    model: str, module: str, joined: tuple[str, ...], tmp_path: Path
) -> None:
    """If the number of the files is too small for one of them, all get a new one. A conversion does the same."""
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    sizes |= {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16} if model == "deepseek_v3" else {}
    note = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    form = dataclasses.replace(quantized.nvfp4("modelopt"), note=note)
    files, plain = quantized.write(family(model, **sizes)(), form, tmp_path / "published", dtype=torch.bfloat16)
    found = tensors_of(pool.run(4, grown, str(tmp_path / "published"), module)[0])
    (name,) = (name for name in plain if name.endswith(f".3.self_attn.{module}.weight"))
    changed = {*joined, module}
    parts = {each for each in differing(found, files) if not each.endswith(".input_scale")}
    assert {each.split(".")[-2] for each in parts} == changed
    assert all(each.startswith("model.layers.3.self_attn.") for each in parts)
    stem = name.removesuffix(f"{module}.weight")
    numbers = [found[f"{stem}{each}.weight_scale_2"].item() for each in changed]
    assert numbers == [numbers[0]] * len(changed) != [files[f"{name}_scale_2"].item()] * len(changed)

    config = (tmp_path / "published" / "config.json").read_text()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps({**json.loads(config), "quantization_config": None}))
    save_file({**plain, name: 4 * plain[name]}, tmp_path / "plain" / "model.safetensors")
    convert(tmp_path / "plain", tmp_path / "one", plain=True, quantize=tmp_path / "published", on_event=quiet)
    convert(tmp_path / "plain", tmp_path / "dist", on_event=quiet)
    options = {"hf": tmp_path / "plain", "quantize": tmp_path / "published"}
    convert(tmp_path / "dist", tmp_path / "two", on_event=quiet, **options)
    for folder in ("one", "two"):
        converted = [load_file(path) for path in (tmp_path / folder).glob("*.safetensors")]
        assert differing(dict(ChainMap(*converted)), found) == []


def test_all_names_that_a_linear_parameter_joins_are_known() -> None:
    cases = {case.model_type: case for case in zoo.described().values()}
    joined = {
        rule.hf
        for case in cases.values()
        for rule in mb.mapping(case.hf).rules
        if len(rule.hf) > 1 and is_linear(rule.mcore)
    }
    assert len(joined) > 4
    assert [names for names in joined if len(set(map(joined_names, names))) > 1] == []


def in_turn(folder: str) -> list[list[str]]:
    """The tensors that differ if a model leaves as several releases in turn, whose scales have equal shapes."""
    mb.ParallelDims().initialize(device="cpu")
    models = mb.build_model(folder, dims=mb.ParallelDims(), device="cpu", load_weights=False)
    notes = [
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        {"quant_method": "fp8", "weight_block_size": [20, 20]},
        {"quant_method": "fp8", "weight_block_size": [20, 20], "scale_fmt": "ue8m0"},
    ]
    for number, note in enumerate(notes):
        mb.save_hf_checkpoint(models, f"{folder}/{number}", quantize=note)
    for parameter in models[0].parameters():
        parameter.data.mul_(torch.rand_like(parameter))
    wrong = []
    for number, note in enumerate(notes):
        found = mb.to_hf_state_dict(models, quantize=f"{folder}/{number}")
        expected = mb.to_hf_state_dict(models, quantize=note)
        wrong.append([name for name, own in expected.items() if not torch.equal(as_bytes(found[name]), as_bytes(own))])
    return wrong


def test_releases_that_differ_in_blocks_or_powers_alone_leave_in_turn(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
    }
    tiny("qwen3", **sizes).save_pretrained(tmp_path)
    assert pool.run(1, in_turn, str(tmp_path)) == [[[], [], []]]


def rounds(folder: str, changed: str, dims: mb.ParallelDims) -> Any:
    """On one rank: two rounds into an engine that holds codes and scales, the second after a step."""
    dims.initialize(device="cpu")
    models = mb.build_model(folder, dims=dims, device="cpu", dtype=torch.bfloat16)
    engine, first = torch.nn.Module(), torch.distributed.get_rank() == 0
    specs = mb.manifest(models, quantize="as_published")
    held = {}
    for number, spec in enumerate(specs):  # in files, which the trainer's process can open
        octets = torch.from_file(f"{folder}/{number}-{first}", shared=True, size=spec.num_bytes, dtype=torch.uint8)
        held[spec.name] = octets.view(spec.dtype).view(spec.shape)
        engine.register_buffer(f"held{number}", held[spec.name])

    def load(pairs: Any) -> None:
        for name, tensor in pairs:
            held[name].copy_(tensor)

    worker = EngineWorker(engine, load, name="in this process")
    with mb.WeightSync(models, worker.receive if first else (), quantize="as_published") as sync:
        before = sync(), bits(held)
        mb.load_hf_weights(models, changed)
        return [before, (sync(), bits(held))], bits(mb.iter_hf_weights(models, quantize="as_published"))


def test_an_engine_gets_codes_and_scales_by_its_map(tmp_path: Path) -> None:
    files, plain = quantized.write(tiny("qwen3"), deepseek((8, 8)), tmp_path / "a", dtype=torch.bfloat16)
    weight = "model.layers.1.mlp.up_proj.weight"
    (tmp_path / "b").mkdir()
    save_file({**plain, weight: -3 * plain[weight]}, tmp_path / "b" / "model.safetensors")
    outcome, *_ = pool.run(2, rounds, str(tmp_path / "a"), str(tmp_path / "b"), mb.ParallelDims(tp=2))
    (before, after), exported = outcome
    assert differing(tensors_of(before[1]), files) == []
    assert differing(tensors_of(after[1]), tensors_of(exported)) == []
    assert set(differing(tensors_of(exported), files)) == {weight, f"{weight}_scale_inv"}
    assert {report.workers[0].transport for report, _ in (before, after)} == {"shards"}


# refusals -------------------------------------------------------------------------------------------------------------

BLOCKS = {"quant_method": "fp8", "weight_block_size": [8, 8]}


def refusals(folder: str, plain: str, dims: mb.ParallelDims) -> list[str]:
    """On one rank: the errors of exports that cannot be."""
    dims.initialize(device="cpu")
    models = mb.build_model(folder, dims=dims, device="cpu", dtype=torch.bfloat16)
    bare = mb.build_model(tiny("qwen3"), dims=dims, device="cpu", dtype=torch.bfloat16, load_weights=False)
    target = mb.engine_ranks(tp=4)[0]
    asked: list[tuple[Any, dict[str, Any]]] = [
        (models, {"quantize": 8}),
        (models, {"quantize": {"quant_method": "awq"}}),
        (models, {"quantize": f"{folder}/absent"}),
        (bare, {"quantize": "as_published"}),
        (models, {"quantize": {**BLOCKS, "weight_block_size": [16, 16]}, "target": target}),
        (models, {"quantize": quantized.int4(32).note | {"ignore": []}}),
        (models, {"quantize": quantized.groups_of_each_layer().note}),
        (models, {"quantize": {**BLOCKS, "modules_to_not_convert": ["layers"]}}),
        (models, {"quantize": {"quant_method": "mxfp4"}}),
        (bare, {"quantize": plain}),
    ]
    found = [error_of(lambda: list(mb.iter_hf_weights(chunks, **given))) for chunks, given in asked]  # noqa: B023
    found.append(error_of(lambda: mb.save_hf_checkpoint(models, folder, quantize="as_published")))
    next(p for chunk in models for n, p in chunk.named_parameters() if "linear_fc2" in n).data[0, 0] = torch.nan
    return [*found, error_of(lambda: list(mb.iter_hf_weights(models, quantize="as_published")))]


def error_of(call: Any) -> str:
    try:
        call()
    except (ConfigError, ExportError, MappingError, TargetError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_what_cannot_leave_encoded_is_refused_on_every_rank(tmp_path: Path) -> None:
    quantized.write(tiny("qwen3"), deepseek((8, 8)), tmp_path / "a", dtype=torch.bfloat16)
    quantized.write(tiny("qwen3", num_hidden_layers=5), deepseek((8, 8)), tmp_path / "deeper", dtype=torch.bfloat16)
    before = Manifest.from_folder(tmp_path / "a", digests=True)
    expected = [
        'quantize must be None, "as_published", a folder',
        "quant_method must be 'fp8'",
        "must be an existing folder or a repository",
        'quantize="as_published" needs the folder that the model came from',
        r"cannot be cut for the engine: a cut after \d+ of \d+ numbers lies within 16",
        r"weights must be matrices whose columns \(inputs\) divide into groups of int4 .* with \d+ inputs",
        "quantize must describe one encoding for all weights, found 3",
        "leaves all of them out: shorten its list 'modules_to_not_convert'",
        "mxfp4 encodes stacks of experts alone",
        "encodes .* tensors that this export does not have, such as model.layers.4",
        "no error",
        "down_proj.weight must have finite numbers to be encoded, found NaN",
    ]
    for errors in pool.run(2, refusals, str(tmp_path / "a"), str(tmp_path / "deeper"), mb.ParallelDims(tp=2)):
        for error, message in zip(errors, expected, strict=True):
            assert re.search(message, error), (message, error)
    assert before.differences(Manifest.from_folder(tmp_path / "a", digests=True)) == ()


# planted mistakes -----------------------------------------------------------------------------------------------------


def _unreduced(right: Any) -> Any:
    return lambda self, tensor: tensor


def _always_kept(right: Any) -> Any:
    return lambda self, *args: torch.zeros_like(right(self, *args))


def _never_kept(right: Any) -> Any:
    return lambda self, *args: torch.ones_like(right(self, *args))


def _unrounded(right: Any) -> Any:
    return lambda codec, scales, *rest: right(codec, scales, *rest) * (1 + 2**-9)


def _of_next_row(right: Any) -> Any:
    return lambda self, scales, rows: right(self, scales.roll(1, 0), rows)


def _first_column(right: Any) -> Any:
    return lambda self, numbers: right(self, numbers).roll(1, 1)


MISTAKES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "each rank has its own maximum": (Group, "maximum", _unreduced),
    "scales are kept where numbers have changed": (encoded_shard.EncodedShard, "_changed", _always_kept),
    "scales are always new": (encoded_shard.EncodedShard, "_changed", _never_kept),
    "codes are made with other scales than those sent": (encoded_shard, "scales_of", _unrounded),
    "scales are of the next row of blocks": (encoded_shard._Grid, "spread", _of_next_row),
    "maxima are of the next column of blocks": (encoded_shard._Grid, "_of_columns", _first_column),
}


def mistaken(folder: str, changed: str, dims: mb.ParallelDims) -> dict[str, Any]:
    """On one rank: what an untrained and a changed model export with each mistake, and without."""
    dims.initialize(device="cpu")
    first, second = (mb.build_model(folder, dims=dims, device="cpu", dtype=torch.bfloat16) for _ in range(2))
    mb.load_hf_weights(second, changed)
    found = {}
    for mistake in ("", *MISTAKES):
        with pytest.MonkeyPatch.context() as patch:
            if mistake:
                owner, name, wrong = MISTAKES[mistake]
                patch.setattr(owner, name, wrong(getattr(owner, name)))
            found[mistake] = [bits(mb.iter_hf_weights(models, quantize="as_published")) for models in (first, second)]
    return found


def test_planted_mistakes_are_found(tmp_path: Path) -> None:
    calibrated, form = (deepseek((16, 16), torch.bfloat16, rule=lambda own, factor=by: own * factor) for by in (1.5, 1))
    files, plain = quantized.write(tiny("qwen3"), calibrated, tmp_path / "a", dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    changed = {
        name: tensor * torch.randn(tensor.shape, generator=generator).bfloat16()
        if form.is_quantized(name, tensor)
        else tensor
        for name, tensor in plain.items()
    }
    (tmp_path / "b").mkdir()
    save_file(changed, tmp_path / "b" / "model.safetensors")
    expected = [files, form.files(changed)]
    arguments = str(tmp_path / "a"), str(tmp_path / "b"), mb.ParallelDims(tp=4)
    found = pool.run(4, mistaken, *arguments)[0]
    wrong = {
        mistake: [differing(tensors_of(own), right) for own, right in zip(exported, expected, strict=True)]
        for mistake, exported in found.items()
    }
    assert wrong.pop("") == [[], []]
    assert [mistake for mistake, names in wrong.items() if not any(names)] == []
