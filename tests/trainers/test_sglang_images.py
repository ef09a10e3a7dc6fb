"""SGLang loads models with their towers, and then has the bits that it reads from files of transformers.

SGLang and torchvision must be installed, as in docs/trainers/sglang.md.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import mcore_bridge as mb
from tests import zoo
from tests.support import composites, pool, seeing, towers
from tests.workers import sglang_engine, sglang_updates
from tests.zoo.latent import YARN

pytestmark = [
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("sglang", "torchvision"))),
        reason="SGLang or torchvision is not installed",
    ),
    pytest.mark.usefixtures("own_workers"),
]

Fields = Mapping[str, Any]
SPARSE = {"moe_intermediate_size": 64}
"""On CPU, a rank must have at least 32 rows of an expert."""
ROPE = zoo.rope("yarn", **YARN, mscale=1.3, mscale_all_dim=0.7)
"""The only backend of latent attention on CPUs in SGLang."""
TEXT: Mapping[str, Fields] = {
    "gemma3": {"tie_word_embeddings": True},
    "glm4v_moe": SPARSE,
    "kimi_k25": {**SPARSE, **ROPE},
    "hunyuan_vl": {"intermediate_size": 96},
    "llama4": {"attention_bias": False, "interleave_moe_layer_step": 1, "moe_layers": [0, 1, 2, 3]},
    "qwen3_5_moe": SPARSE,
    "qwen3_vl_moe": {**SPARSE, "mlp_only_layers": [], "decoder_sparse_step": 1},
}
"""Changes of texts for SGLang. It lacks untied heads of Gemma and dense layers between sparse ones. For Llama 4 it
refuses dense layers and biases. Its wrapper pads widths on CPU.
"""
VISION: Mapping[str, Fields] = {"gemma3": {"vision_use_head": False}, "llava_onevision": {"intermediate_size": 64}}
"""Changes of towers for SGLang: Gemma's has no pooling head, as published; on CPU transformers' backend pads widths."""
KIMI = {"architectures": ["DeepseekV3ForCausalLM"], "moe_layer_freq": 1, "scoring_func": "sigmoid"}
OF_KIMI = {"vt_hidden_size": 32, "vt_intermediate_size": 48, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1}
QWEN3_5 = {"text_config": {"full_attention_interval": 2}, "vision_config": {"deepstack_visual_indexes": []}}
PUBLISHED: Mapping[str, Mapping[str, Fields]] = {
    "kimi_k25": {
        "": {"architectures": ["KimiK25ForConditionalGeneration"]},
        "text_config": {**KIMI, "topk_method": "noaux_tc"},
        "vision_config": {**OF_KIMI, "text_hidden_size": 48},
    },
    "lighton_ocr": {"": {"architectures": ["LightOnOCRForConditionalGeneration"], "multimodal_projector_bias": False}},
    "qwen2_vl": {"vision_config": {"in_chans": 3}},
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
}
"""Fields of published configs, by part, that SGLang reads and transformers does not write."""
BY_TRANSFORMERS = (
    *("exaone4_5", "got_ocr2", "internvl", "llava_next", "llava_next_video", "llava_onevision", "video_llava"),
    "vipllava",
)
"""Families without a class in SGLang, which then wraps the class of transformers."""
NOT_READ = {
    "glm46v": "Unsupported TP style 'colwise_gather_output' for Transformers backend",
    "hunyuan_vl": "No module or parameter named 'model.vit'",
    "llava": "'Conv2d' object has no attribute 'num_embeddings'",
}
"""Families that SGLang cannot build or read, with its error: it wraps a CLIP as if that were a language model, and a
Hunyuan-VL without its published names.
"""
WARNED_OF = {"llama4": "Some weights are not initialized from checkpoints"}
"""Warnings of a family in each call with a part of the weights."""
AS_PUBLISHED = {
    "gemma3": "vision_tower.embeddings.patch_embedding.weight",
    "kimi_k25": "blocks",
    "qwen3_vl_moe": "must match the size",
}
"""Families of which SGLang reads only published names and shapes, with its error for files of transformers 5."""


def write(family: str, folder: Path, seed: int = 0, *, published: bool) -> Path:
    """Other weights for each seed, as transformers writes them or as they are published."""
    hf = seeing.config(family, **TEXT.get(family, {}))
    hf.vision_config.update(VISION.get(family, {}))
    model = composites.model_class(family)(hf).bfloat16()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    if published:
        save_file(dict(composites.as_published(family, load_file(file))), file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(file), file.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))  # SGLang looks there for Llama 4's tower
    fields = json.loads((folder / "config.json").read_text())
    for part, values in PUBLISHED.get(family, {}).items():
        (fields[part] if part else fields).update(values)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def feed(family: str, out: str) -> tuple[list[str], set[str], set[str]]:
    """Runs in a worker, which trains and serves: wrong tensors after each round, names that the engine leaves out, and
    the names of the tower.
    """
    folders = [Path(out, str(seed)) for seed in range(len(sglang_updates.WAYS))]
    if dist.get_rank() == 0:
        for seed, folder in enumerate(folders):
            write(family, folder, seed, published=family in AS_PUBLISHED)
    dist.barrier()
    dims = mb.ParallelDims(tp=dist.get_world_size(), sp=dist.get_world_size() > 1)
    dims.initialize(device="cpu")
    models = mb.build_model(folders[0], dims=dims, dtype=torch.bfloat16, device="cpu", vision="train")
    found, unused = sglang_updates.in_rounds(models, folders, multimodal=True)
    if family in WARNED_OF:
        found = [each for each in found if WARNED_OF[family] not in each]
    return found, unused, set(composites.parts_of(folders[0])[1])


def read(family: str, out: str) -> None:
    """Runs in a worker, without a model of ours: SGLang reads the files of transformers."""
    folder = str(write(family, Path(out), published=False))
    with sglang_engine.server(folder) as server:
        server.read(folder)


FED = [family for family in towers.NAMES if family not in NOT_READ]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FED)
def test_the_engine_holds_what_it_reads_from_files(family: str, tp: int, tmp_path: Path) -> None:
    """Three rounds with three states, each in another way. No name causes a warning, and none is skipped by all
    ranks.
    """
    found, unused, of_tower = zip(*pool.run(tp, feed, family, str(tmp_path)), strict=True)
    assert found == ([],) * tp
    assert set.intersection(*unused) == set()
    assert all(len(names) > 10 for names in of_tower)


@pytest.mark.parametrize("family", [*NOT_READ, *AS_PUBLISHED])
def test_what_is_left_out_fails_without_us(family: str, tmp_path: Path) -> None:
    """SGLang's own reading of a folder that transformers wrote."""
    with pytest.raises(Exception, match=re.escape({**NOT_READ, **AS_PUBLISHED}[family])):
        pool.run(1, read, family, str(tmp_path))


def test_its_own_classes_are_used_where_it_has_some() -> None:
    (theirs,) = pool.run(1, sglang_engine.architectures)
    aliases = {family: fields[""]["architectures"] for family, fields in PUBLISHED.items() if "" in fields}
    names = {family: aliases.get(family, [composites.model_class(family).__name__])[0] for family in towers.NAMES}
    assert {family for family, name in names.items() if name not in theirs} == {
        *BY_TRANSFORMERS,
        "glm46v",
        "hunyuan_vl",
    }
