"""Composites of text and images through the calls of trainers: their text trains, and all other tensors are copied.

verl treats every model whose config has a ``vision_config`` as a model of images: it passes padded rows, packed or not.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.convert.rank_files.file import NAME, read_rank_file
from mcore_bridge.errors import BatchError
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.trainers.nemo_rl import local_params
from mcore_bridge.trainers.rlinf import MegatronCoreWeightReshard, ReshardFunctions, convert_hf_to_mg, model_provider
from mcore_bridge.trainers.slime import convert_to_hf
from tests.support import composites, pool, seeing, stepping, towers
from tests.support.bounds import ONE
from tests.support.composites import parts_of
from tests.support.rlinf_files import PLAIN, asked
from tests.support.rlinf_models import config_a
from tests.support.target_models import assert_gets
from tests.support.trainer_calls import attention_switches, build_role, violations
from tests.support.written_weights import read
from tests.workers.verl_engine import CpuForCuda

HYBRID, *SPARSE = ("qwen3_5", "qwen3_5_moe") if "qwen3_5" in composites.NAMES else ("qwen3_vl",)
LENGTHS = [16, 11]
"""The lengths of the two rows. Attention is causal, so padding has no effect on them."""
CASES = {
    "mbridge-packed-sp": ("mbridge", "qwen3_vl", ParallelDims(tp=2, sp=True), True),
    "mbridge-packed-cp": ("mbridge", "qwen3_vl", ParallelDims(cp=2), True),
    "mbridge-rows-experts": ("mbridge", "qwen3_vl_moe", ParallelDims(ep=2), False),
    "megatron_bridge-packed-pp": ("megatron_bridge", HYBRID, ParallelDims(pp=2), True),
    "megatron_bridge-rows-cp": ("megatron_bridge", "qwen3_vl", ParallelDims(cp=2), False),
}


def verls_batch(dims: ParallelDims, packed: bool) -> dict[str, Any]:
    """The inputs that verl 0.9.1 makes of two sequences for a model of images. The last one is padded to fill a
    bucket.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    mask = torch.arange(16) < torch.tensor(LENGTHS)[:, None]
    rows = {"input_ids": composites.tokens().where(mask, 3), "attention_mask": mask, "position_ids": None}
    if not packed:
        return rows
    starts = torch.tensor(starts_of(dims), dtype=torch.int32)
    same = {f"cu_seqlens_{name}": starts for name in ("q", "kv", "q_padded", "kv_padded")}
    longest = max(starts.diff().tolist())
    params = PackedSeqParams(qkv_format="thd", **same, max_seqlen_q=longest, max_seqlen_kv=longest)
    return {**rows, "packed_seq_params": params}


def starts_of(dims: ParallelDims) -> list[int]:
    """Where packed sequences begin."""
    align = dims.tp * dims.cp * (2 if dims.cp > 1 else 1)
    return [0, 16, 16 + -(-11 // align) * align + 2 * align]


def stepped(role: Any, dims: ParallelDims, packed: bool, **images: Tensor) -> Tensor | None:
    """Logits of a batch on the last stage. The gradients come from a step of Adam."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    said: list[Tensor] = []

    def forward(iterator: Any, model: Any) -> Any:
        output = model(**next(iterator))
        return output, lambda output: (said.append(output.detach().clone()) or output.square().mean(), {})

    optimizer = stepping.distributed_optimizer(role.models, lr=1e-2)
    role.config.finalize_model_grads_func = finalize_model_grads
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter([{**verls_batch(dims, packed), **images}]) for _ in role.models],
        model=role.models,
        num_microbatches=1,
        seq_length=16,
        micro_batch_size=2,
        forward_only=False,
    )
    with CpuForCuda():
        optimizer.step()
    return said[0] if said else None


def life(dims: ParallelDims, face: str, folder: str, out: str, packed: bool) -> dict[str, Any]:
    """Runs in a worker: build, load, export, a step, save; and a model of what was saved."""
    with attention_switches(), stepping.mesh(dims):
        text, _ = parts_of(folder)
        role = build_role(face, folder, dims, dtype=torch.float32)
        role.load(folder)
        broken, order = violations(role.export(), text)
        images = {"pixel_values": torch.zeros(1), "image_grid_thw": torch.ones(1, 3), "video_grid_thw": None}
        with pytest.raises(BatchError, match="found pixel_values, image_grid_thw: the models of images"):
            role.models[0](**verls_batch(dims, packed), **images)
        logits = stepped(role, dims, packed)
        trained = {name: tensor.clone() for name, tensor in role.export()}
        role.save(out)
        again = build_role(face, out, dims, dtype=torch.float32)
        again.load(out, resume=True)
        broken += violations(again.export(), trained)[0]
        same = {name for name in text if torch.equal(trained[name], text[name])}
        broken += [f"{name} was not trained" for name in same if ".mlp.gate." not in name]  # verl freezes routers
        return {"broken": broken, "order": order, "trained": trained, "logits": logits}


def whole(locals_: list[Tensor], dims: ParallelDims, packed: bool) -> list[Tensor]:
    """The logits of each sequence, joined like verl: ``[tokens, vocabulary]``."""
    if dims.tp > 1:
        locals_ = [torch.cat(locals_, -1)]
    starts = starts_of(dims) if packed else [0, 16]
    sequences = []
    for row, length in enumerate(LENGTHS):
        first, end = (starts[row], starts[row + 1]) if packed else (0, 16)
        parts = [each[0, first // dims.cp : end // dims.cp] if packed else each[row] for each in locals_[: dims.cp]]
        halves = [part.chunk(2) for part in parts] if dims.cp > 1 else []
        joined = torch.cat([*(a for a, _ in halves), *(b for _, b in reversed(halves))]) if halves else parts[0]
        sequences.append(joined[:length])
    return sequences


@pytest.mark.parametrize("case", CASES)
def test_the_text_of_a_composite_trains_and_the_rest_is_copied(case: str, tmp_path: Path) -> None:
    face, family, dims, packed = CASES[case]
    reference = composites.written(family, tmp_path / "hf")
    out = tmp_path / "out"
    out.mkdir()
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"rope_theta": 10000.0}
    (out / "config.json").write_text(json.dumps(config))  # verl writes it before the weights
    ranks = pool.run(2, life, dims, face, str(tmp_path / "hf"), str(out), packed)
    saved, copied = parts_of(out)
    assert copied.keys() == parts_of(tmp_path / "hf")[1].keys()
    assert all(torch.equal(tensor, read(tmp_path / "hf")[name]) for name, tensor in copied.items())
    for rank in ranks:
        assert rank["broken"] == []
        assert rank["order"] == ranks[0]["order"]
        assert saved.keys() == rank["trained"].keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in rank["trained"].items())
    logits = whole([rank["logits"] for rank in ranks if rank["logits"] is not None], dims, packed)
    for row, (ours, length) in enumerate(zip(logits, LENGTHS, strict=True)):
        wanted = reference[row, :length].log_softmax(-1)
        ours = ours[:, : wanted.size(-1)].log_softmax(-1)
        assert (ours - wanted).abs().max() < 1e-5 * wanted.abs().max()


def of_towers(dims: ParallelDims, folder: str, out: str) -> None:
    """Runs in a worker: both interfaces build the tower on request, and train the requested parts."""
    everything = read(folder)
    asked: list[tuple[str, dict[str, Any], set[str]]] = [
        ("mbridge", {"vision": "train"}, {"tower", "connection", "text"}),
        ("mbridge", {"vision": "frozen"}, {"text"}),
        ("megatron_bridge", {"vision": "train", "freeze_vision_model": True}, {"connection", "text"}),
        ("megatron_bridge", {"vision": "train", "freeze_language_model": True}, {"tower", "connection"}),
        ("megatron_bridge", {"vision": "frozen", "freeze_language_model": True}, set()),
        ("megatron_bridge", {"vision": "train", "freeze_vision_projection": True}, {"tower", "text"}),
    ]
    with attention_switches(), stepping.mesh(dims):
        for number, (face, settings, wanted) in enumerate(asked):
            role = build_role(face, folder, dims, dtype=torch.float32, ddp=bool(wanted), **settings)
            role.load(folder)
            assert violations(role.export(), everything)[0] == []
            trained = {name for chunk in role.models for name, each in chunk.named_parameters() if each.requires_grad}
            names = {"text": ".decoder.", "tower": ".visual.blocks.", "connection": "merger"}
            assert {part for part, word in names.items() if any(word in f".{name}" for name in trained)} == wanted
            if number:
                continue
            stepped(role, dims, True)
            changed = {name for name, tensor in role.export() if not torch.equal(tensor, everything[name])}
            assert changed == {name for name in everything if "language_model." in name or "lm_head" in name}
            role.save(out)
            assert all(torch.equal(tensor, read(out)[name]) for name, tensor in role.export())


@pytest.mark.skipif(not towers.NAMES, reason="the installed transformers is too old")
def test_both_surfaces_build_a_tower_on_request_and_freeze_what_they_are_asked_to(tmp_path: Path) -> None:
    """A step of text leaves the tower unchanged, and a save has text and tower."""
    composites.written("qwen3_vl", tmp_path / "hf")
    pool.run(2, of_towers, ParallelDims(tp=2, sp=True), str(tmp_path / "hf"), str(tmp_path / "out"))


def with_an_image(dims: ParallelDims, face: str, folder: str, packed: bool) -> list[str]:
    """Runs in a worker: the tensors of the folder that a step with an image does not train."""
    with attention_switches(), stepping.mesh(dims):
        role = build_role(face, folder, dims, dtype=torch.float32, vision="train")
        role.load(folder)
        before, ids = read(folder), composites.tokens()
        ids[0, 3:7] = seeing.SPECIAL["image_token_id"]
        vision = seeing.config("qwen3_vl").vision_config
        patches = torch.randn(16, 3 * vision.temporal_patch_size * vision.patch_size**2)
        with mock.patch.object(composites, "tokens", return_value=ids):
            stepped(role, dims, packed, pixel_values=patches, image_grid_thw=torch.tensor([[1, 4, 4]]))
        return [name for name, tensor in role.export() if torch.equal(tensor, before[name])]


@pytest.mark.skipif("qwen3_vl" not in towers.NAMES, reason="the installed transformers is too old")
@pytest.mark.parametrize(
    ("face", "dims", "packed"),
    [("mbridge", ParallelDims(tp=2, sp=True), True), ("megatron_bridge", ParallelDims(pp=2), False)],
)
def test_a_tower_trains_through_what_verl_calls(face: str, dims: ParallelDims, packed: bool, tmp_path: Path) -> None:
    folder = str(seeing.written("qwen3_vl", tmp_path))
    for unchanged in pool.run(2, with_an_image, dims, face, folder, packed):
        assert unchanged == []


# -- trainers that are handed a model or its folder --------------------------------------------------------------------


def of_rlinf(folder: str, files: str) -> None:
    """Runs in a worker: RLinf's block, its resharder, its functions and its convertor, for a composite's folder."""
    dims = ParallelDims(tp=2, etp=2, sp=True)
    with attention_switches(), stepping.mesh(dims):
        text, _ = parts_of(folder)
        block: dict[str, Any] = {"model": {"precision": 32, "model_path": folder, "model_type": None, "num_layers": 4}}
        block["model"] |= {"tensor_model_parallel_size": 2, "sequence_parallel": True, "padded_vocab_size": 96}
        chunk = model_provider(block, device="cpu")(True, True)
        assert_gets(MegatronCoreWeightReshard(config_a()).gather_and_reshard_model([chunk], 0), text)
        own = {name: tensor for name, tensor in chunk.state_dict().items() if isinstance(tensor, Tensor)}
        functions = ReshardFunctions(chunk.config, hf=folder)
        assert_gets(functions.convert_fn(functions.tp_reshard_fn(own, 2, dist.group.WORLD)), text)
        rank = dist.get_rank()
        if rank == 0:
            convert_hf_to_mg(folder, asked(files, tp=2, **PLAIN))
        dist.barrier()
        assert_gets(read_rank_file(Path(files, "release", f"mp_rank_{rank:02d}", NAME))["model"], own)
        model_provider({"model": {**block["model"], "model_path": None, "megatron_checkpoint": files}})(True, True)


def test_rlinf_feeds_engines_the_text_of_a_composite(tmp_path: Path) -> None:
    composites.written("qwen3_vl", tmp_path / "hf")
    pool.run(2, of_rlinf, str(tmp_path / "hf"), str(tmp_path / "mg"))


@pytest.mark.parametrize("family", [HYBRID, *SPARSE, "llava"])
def test_slime_and_nemo_rl_give_the_text_its_published_names(family: str, tmp_path: Path) -> None:
    """slime's models of images have a ``GPTModel`` and a tower, whose parameters already have HF names."""
    composites.written(family, tmp_path)
    text, copied = parts_of(tmp_path)
    with rank_of(ONE, 0, 1):
        (model,) = mb.build_model(tmp_path, dims=ONE, dtype=torch.float32, device="cpu")
        assert mb.to_hf_state_dict([model]).keys() == text.keys()
        whole = mb.to_hf_state_dict([model], expert_format="split")
        name = next(name for name in whole if name.endswith("mlp.down_proj.weight") or ".experts." in name)
        info = {"layer_names": ["any"], "per_layer_params": {"any": [{"name": name}]}}
        spec = local_params([model], info, spec=SimpleNamespace, context=SimpleNamespace)[name]
        assert torch.equal(spec.pre(spec.base).buf, whole[name])
    found: dict[str, Tensor] = {}
    args = SimpleNamespace(hf_checkpoint=tmp_path)
    for prefix in ("module.module.", "module.module.language_model."):
        for name, parameter in model.named_parameters():
            found.update(convert_to_hf(args, "any", prefix + name, parameter))
        assert_gets(found, whole)
    if family in towers.NAMES:
        with rank_of(ONE, 0, 1):
            (model,) = mb.build_model(tmp_path, dims=ONE, dtype=torch.float32, device="cpu", vision="train")
        tower = ((name, each) for name, each in model.named_parameters() if name.startswith("vision."))
        assert_gets(dict(pair for name, each in tower for pair in convert_to_hf(args, "any", name, each)), copied)
        found.clear()
    for name, tensor in copied.items():
        if name.startswith("model."):
            ((same, given),) = convert_to_hf(args, "any", f"module.module.{name}", tensor)
            assert same == name
            assert torch.equal(given, tensor)
