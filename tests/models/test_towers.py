"""Towers: transformers' models of images, on the first stage, are loaded and saved under published names."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mcore_bridge as mb
from mcore_bridge.commands.plan.tables import StageRow, layers_of, plan
from mcore_bridge.commands.plan.training_memory import counted_sizes, rank_sizes
from mcore_bridge.config.hf import read_config
from mcore_bridge.convert.convert import convert
from mcore_bridge.convert.hf_to_torch import rank_files
from mcore_bridge.errors import CheckpointError, ConfigError, MeshError
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint
from mcore_bridge.factory.param_count import count_params
from mcore_bridge.factory.vision.tower import build_tower
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.weights.manifest import Manifest
from tests.support import composites as tiny
from tests.support import pool, seeing, towers
from tests.support.bounds import ONE
from tests.support.composites import assert_same
from tests.support.conversions import quiet
from tests.support.published import expand
from tests.support.published import records as configs
from tests.support.written_weights import read

PUBLISHED = Path(__file__).parent.parent / "data" / "tower_names.jsonl"
VISIONS = ("text_only", "frozen", "train")
SIZES = ("num_parameters", "num_bytes")
EXPERTS = mb.ParallelDims(ep=2)
MESHES = (mb.ParallelDims(tp=2, sp=True), mb.ParallelDims(pp=2))


@pytest.mark.parametrize("name", towers.NAMES)
def test_a_tower_goes_round_and_is_the_one_of_transformers(name: str, tmp_path: Path) -> None:
    """Each tower runs on a mesh, through exports, a saved folder and a checkpoint of megatron-core, bit for bit."""
    tiny.written(name, tmp_path / "source")
    dims = EXPERTS if "moe" in name else MESHES[len(name) % 2]
    if dims.pp > 1 and tiny.text_of(tiny.config(name)).num_hidden_layers % 4 == 0:
        dims = replace(dims, vp=2)
    ranks = [both for both in pool.run(2, towers.go_round, tmp_path / "source", dims, tmp_path) if both]
    assert len(ranks) == (1 if dims.pp > 1 else 2)
    assert_same(tmp_path / "source", tmp_path / "saved")
    theirs = towers.in_transformers(name, tmp_path / "saved")
    for drawn, tower in ranks:
        assert drawn.keys() == tower.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in tower.items())
        assert all(torch.equal(tensor, ranks[0][0][key]) and tensor.isfinite().all() for key, tensor in drawn.items())
    if name in ("qwen3_5", "qwen3_vl_moe"):
        again = tmp_path / "again"
        converted = convert(tmp_path / "source", again, vision="train", on_event=quiet)
        assert converted.conversion.ignored == ()
        whole = rank_files("torch", ONE, "torch")
        with pytest.raises(CheckpointError, match="only torch_dist can have a tower, found vision='train'"):
            convert(tmp_path / "source", tmp_path / "older", vision="train", rank_files=whole, on_event=quiet)
        for kind, checkpoint in (("back", tmp_path / "dist"), ("home", again)):
            convert(checkpoint, tmp_path / kind, hf=tmp_path / "source", on_event=quiet)
            assert_same(tmp_path / "source", tmp_path / kind)
        note = {"quant_method": "fp8", "weight_block_size": [8, 8], "modules_to_not_convert": ["experts"]}
        convert(again, tmp_path / "fp8", hf=tmp_path / "source", quantize=note, on_event=quiet)
        coded = [spec.name for spec in Manifest.from_folder(tmp_path / "fp8") if spec.dtype == torch.float8_e4m3fn]
        assert coded
        assert not [name for name in coded if "visual" in name]
        with rank_of(ONE, 0, 1):  # the tower that a training loads
            build: dict[str, Any] = {"dims": ONE, "dtype": torch.float32, "device": "cpu", "vision": "train"}
            models = mb.build_model(tmp_path / "source", **build, load_weights=False)
            mb.load_checkpoint(models, again)
            assert all(torch.equal(each, theirs[key]) for key, each in towers.tower_of(models).items())


@pytest.mark.skipif(not towers.NAMES, reason="the installed transformers is too old")
@pytest.mark.parametrize("name", ["gemma3", "video_llava", "qwen2_5_vl"])
def test_a_tower_is_named_as_its_folder_names_it(name: str, tmp_path: Path) -> None:
    """Without a folder, names are the published ones. A folder may have ``vision_model``, transformers' names, or names
    in memory.
    """
    tiny.written(name, tmp_path / "published")
    tiny.written(name, tmp_path / "theirs", published=False)
    shutil.copytree(tmp_path / "published", tmp_path / "memory")
    prefix = {"qwen2_5_vl": "visual."}.get(name, "multi_modal_projector.")
    state = {re.sub(rf"^{prefix}", f"model.{prefix}", key): value for key, value in read(tmp_path / "theirs").items()}
    state = {re.sub(r"^((vision|image|video)_tower)", r"model.\1", key): value for key, value in state.items()}
    save_file(state, tmp_path / "memory" / "model.safetensors", metadata={"format": "pt"})
    sources = {kind: read(tmp_path / kind) for kind in ("published", "theirs", "memory")}
    assert any("vision_model" in key for key in sources["published"]) == (name != "qwen2_5_vl")
    assert len({frozenset(source) for source in sources.values()}) == 2 + (name != "qwen2_5_vl")
    build: dict[str, Any] = {"dims": ONE, "dtype": torch.float32, "device": "cpu", "vision": "train"}
    with rank_of(ONE, 0, 1):
        bare = mb.build_model(read_config(tmp_path / "published"), **build, load_weights=False)
        assert mb.to_hf_state_dict(bare).keys() == sources["published"].keys()
        for kind, source in sources.items():
            places = [key for key in source if key.endswith("embeddings.position_embedding.weight")]
            old = {key.replace("position_embedding.weight", "position_ids"): torch.arange(4)[None] for key in places}
            assert bool(old) == (name != "qwen2_5_vl")
            mb.load_hf_weights(bare, source | old)  # transformers wrote such numbers once
            models = mb.build_model(tmp_path / kind, **build)
            exported = mb.to_hf_state_dict(models)
            assert exported.keys() == source.keys()
            assert all(torch.equal(exported[key], source[key]) for key in source)
            assert mb.manifest(bare, digests=True).num_bytes == mb.manifest(models).num_bytes
            assert all(map(torch.equal, bare[0].parameters(), models[0].parameters()))


@pytest.mark.skipif(not towers.NAMES, reason="the installed transformers is too old")
@pytest.mark.parametrize("record", map(json.loads, PUBLISHED.read_text().splitlines()), ids=lambda each: each["source"])
def test_a_published_index_has_the_names_of_the_tower_and_no_others(record: dict[str, Any], tmp_path: Path) -> None:
    """Models have the published sizes; ``others`` are all names of the index except the text's."""
    (tmp_path / "config.json").write_text(json.dumps(record["config"]))
    published = expand(record["others"])
    blueprint = make_blueprint(tmp_path, BuildOptions(dims=ONE, dtype=torch.bfloat16, device="meta", vision="train"))
    mapping = blueprint.provenance.mapping(tied=True)
    names = [mapping.bind(f"vision.{spec.name}").hf[0] for spec in blueprint.provenance.tower]
    assert sorted(names) == sorted(published)
    assert [mapping.consumers(name) for name in names] == [
        (f"vision.{spec.name}",) for spec in blueprint.provenance.tower
    ]


@pytest.mark.skipif("qwen2_5_omni" not in towers.NAMES, reason="the installed transformers is too old")
def test_a_published_thinker_has_the_size_of_its_text_and_of_its_towers(tmp_path: Path) -> None:
    """The record of the 7B is of a quantized copy, which differs in this description alone."""
    thinkers = (each for each in configs() if each.config["model_type"] == "qwen2_5_omni")
    (record,) = (each for each in thinkers if "quantization_config" in each.config)
    plain = replace(record, config={name: each for name, each in record.config.items() if "quantization" not in name})
    options = BuildOptions(dims=ONE, dtype=torch.bfloat16, device="meta", vision="train")
    provenance = make_blueprint(plain.write(tmp_path), options).provenance
    assert count_params(provenance.hf).total == 7_615_616_512
    assert count_params(provenance.hf, tower=provenance.tower).total == 8_931_813_888


@pytest.mark.skipif(not towers.NAMES, reason="the installed transformers is too old")
def test_a_part_of_a_frozen_tower_is_trained_and_each_tensor_is_accounted_for(tmp_path: Path) -> None:
    """A folder may lack no tensor of the tower and have no other; the last pattern of ``freeze`` decides."""
    tiny.written("qwen3_vl", tmp_path)
    build: dict[str, Any] = {"dims": ONE, "dtype": torch.bfloat16, "device": "cpu"}
    state = {name: tensor.bfloat16() for name, tensor in read(tmp_path).items()}
    with rank_of(ONE, 0, 1):
        freeze = ["!vision.visual.*merger*", "vision.*.norm.*"]
        models = mb.build_model(tmp_path, **build, vision="frozen", freeze=freeze)
        (chunk,) = models
        trained = {name for name, parameter in chunk.vision.named_parameters() if parameter.requires_grad}
        assert trained == {
            name for name in dict(chunk.vision.named_parameters()) if "merger" in name and ".norm." not in name
        }
        assert all(
            parameter.requires_grad for name, parameter in chunk.named_parameters() if not name.startswith("vision.")
        )
        for parameter in chunk.vision.parameters():
            assert (parameter.tensor_model_parallel, parameter.partition_dim) == (False, -1)
            assert parameter.average_gradients_across_tp_domain
            assert parameter.dtype == torch.bfloat16
        frequencies = [buffer.clone() for buffer in chunk.vision.buffers()]
        assert all(buffer.dtype == torch.float32 for buffer in frequencies)
        chunk.half().bfloat16()  # as megatron-core's Float16Module does
        assert all(map(torch.equal, chunk.vision.buffers(), frequencies))
        assert {parameter.dtype for parameter in chunk.parameters()} == {torch.bfloat16}
        meta = build_tower(chunk.bridge.whole, dtype=torch.bfloat16, device=torch.device("meta"))
        assert all(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))
        counts = count_params(chunk.bridge.hf, tower=chunk.bridge.tower)
        assert counts.total == sum(parameter.numel() for parameter in chunk.parameters())
        name = "model.visual.blocks.0.attn.qkv.weight"
        with pytest.raises(CheckpointError, match=f"{name} is float32 and vision.* bfloat16, which cannot hold"):
            mb.load_hf_weights(models, {**state, name: state[name].float()})
        with pytest.raises(CheckpointError, match=f"1 tensor missing .'{name}'.*1 unexpected .'model.visual.probe'"):
            mb.load_hf_weights(
                models, {"model.visual.probe": state[name]} | {key: state[key] for key in state if key != name}
            )
        with pytest.raises(CheckpointError, match=f"{name} has shape"):
            mb.load_hf_weights(models, {**state, name: state[name].mT})
        mb.load_hf_weights(mb.build_model(tmp_path, **build), state)


@pytest.mark.skipif(not towers.NAMES, reason="the installed transformers is too old")
@pytest.mark.parametrize("name", ["qwen3_5", "gemma3"])
def test_a_plan_and_a_balanced_layout_count_the_tower_on_the_first_stage(name: str, tmp_path: Path) -> None:
    """Every tensor-parallel rank has all of a tower. A frozen tower needs neither gradients nor an optimizer."""
    tiny.written(name, tmp_path)
    dims = mb.ParallelDims(tp=2, pp=2, layout="balanced")
    plans = {vision: plan(tmp_path, BuildOptions(dims=dims, vision=vision), dtype=torch.float32) for vision in VISIONS}
    text, seeing = plans["text_only"], plans["train"]
    (tower,) = (cell for chunks in seeing.ranks for chunk in chunks for cell in chunk.cells if cell.name == "tower")
    assert tower.num_parameters == seeing.blueprint.counts.tower
    assert tower in seeing.ranks[0][0].cells
    assert len(seeing.ranks[0][0].stage.layers) < len(text.ranks[0][0].stage.layers)
    assert "V E" in layers_of(StageRow.of(seeing.ranks[0][0]))
    for vision, planned in plans.items():
        counted = counted_sizes(planned.blueprint, planned.blueprint.counts)
        sizes = rank_sizes(planned.blueprint, planned.ranks)
        trained, kept = ([getattr(size, field) for size in sizes] for field in SIZES)
        assert trained[0] == pytest.approx(counted[0].num_parameters, rel=0.02), vision
        assert kept[0] == pytest.approx(counted[0].num_bytes, rel=0.02)
        assert (kept[0] != 4 * trained[0]) == (vision == "frozen")


@pytest.mark.skipif(not towers.NAMES, reason="the installed transformers is too old")
def test_the_layers_that_take_features_of_the_tower_are_on_the_first_stage() -> None:
    """A balanced layout keeps them there, beside the bytes of the tower. Other layouts raise before a rank builds."""
    hf = tiny.config("qwen3_vl")
    hf.vision_config.depth, hf.vision_config.deepstack_visual_indexes = 3, [0, 1, 2]
    for layout, vision in (("Et|tttL", "text_only"), ("Ettt|tL", "train"), ("balanced", "train")):
        dims = mb.ParallelDims(pp=2, layout=layout)
        blueprint = make_blueprint(hf, BuildOptions(dims=dims, dtype=torch.float32, device="meta", vision=vision))
        assert blueprint.dims.layout == layout.replace("balanced", "Ettt|tL")
    for asked in (mb.ParallelDims(pp=2), mb.ParallelDims(pp=4, layout="balanced", vp=2)):
        with pytest.raises(MeshError, match=r"first pipeline stage must have at least 3 layers.* use fewer stages"):
            make_blueprint(hf, BuildOptions(dims=asked, dtype=torch.float32, device="meta", vision="frozen"))


@pytest.mark.skipif("kimi_k25" not in towers.NAMES, reason="the installed transformers is too old")
def test_queries_keys_and_values_that_files_join_learn_as_in_transformers(tmp_path: Path) -> None:
    """The joined weight has the gradients of three weights, in the order of its rows."""
    file = seeing.written("kimi_k25", tmp_path) / "model.safetensors"
    save_file(dict(tiny.as_published("kimi_k25", read(tmp_path))), file, metadata={"format": "pt"})
    model = seeing.reference(tmp_path)
    batch = seeing.batch_of(model)
    log_probs, tower = seeing.expected(model, *batch)
    heads = model.config.vision_config.num_attention_heads
    for name in [name for name in tower if ".q_proj." in name]:
        query, key, value = (tower.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj"))
        neighbours = [each.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) for each in (query, key)]
        tower[name.replace("q_proj", "wqkv")] = torch.cat([*neighbours, value])
    found = pool.run(2, seeing.steps, tmp_path, [({"tp": 2, "sp": True}, {})], (*batch, log_probs))
    assert seeing.problems([each for (each,) in found], (log_probs, tower), seeing.BOUND) == []


@pytest.mark.parametrize(
    ("name", "vision", "release", "message"),
    [
        ("qwen3_vl", "yes", "5.17.0", "vision must be 'train', 'frozen' or 'text_only', found 'yes'"),
        ("qwen3_vl", "train", "5.16.2", "qwen3_vl needs transformers 5.17 or later with vision='train', found 5.16.2"),
        ("llama4", "train", "5.24.0", "llama4 needs another release of transformers with vision='train', found 5.24.0"),
        ("voxtral", "train", "5.17.0", "for voxtral, found 'train': models of sound are not built"),
        ("qwen3", "train", "5.17.0", "for a model of text, found 'train'"),
    ],
)
def test_a_tower_that_cannot_be_built_is_refused(
    name: str, vision: str, release: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the family's name, and is raised before anything is built."""
    if name not in (*tiny.NAMES, "qwen3"):
        pytest.skip("the installed transformers lacks it")
    hf = tiny.TEXTS["qwen3"] if name == "qwen3" else tiny.config(name)
    monkeypatch.setattr("transformers.__version__", release)
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_blueprint(hf, BuildOptions(dims=ONE, dtype=torch.float32, vision=vision))
