"""SGLang takes FP8 codes and scales from a trainer, and then has the bits that it reads from a saved FP8 folder.

SGLang must be installed, as in docs/trainers/sglang.md. Its code for GPUs prepares the weights here, as far as it runs
without kernels: its code for CPUs wants AMX.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from tests import zoo
from tests.support import pool
from tests.support.mapped import LOOKED_AT, Mapped, fed_by_map
from tests.support.strategies import random_state
from tests.workers import sglang_engine, sglang_updates
from tests.zoo.latent import YARN

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.usefixtures("own_workers"),
]
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 4, "intermediate_size": 256}
LATENT = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 256}
LATENT |= {
    "head_dim": 64,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
LATENT |= {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
LATENT |= zoo.rope("yarn", **YARN, mscale=1.3, mscale_all_dim=0.7)
FED = {
    "qwen3": ("qwen3", {**SIZES, "intermediate_size": 512}),
    "qwen3_moe": ("qwen3_moe", {**SIZES, **EXPERTS, "mlp_only_layers": []}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "moe_intermediate_size": 256}),
}
"""Cases of the zoo, and sizes whose shards have whole blocks, which SGLang wants."""


def mapped(name: str, out: str, ep: bool) -> Mapped:
    """Runs in a worker, which trains and serves: one model of SGLang, fed by a map of its loader."""
    case, changes = FED[name]
    tiny = zoo.cases()[case]
    hf = zoo.Case(tiny.model_type, {**tiny.fields, **changes}).hf
    states = [random_state(hf, dtype=torch.bfloat16, seed=seed) for seed in range(5)]
    dims = mb.ParallelDims(tp=dist.get_world_size(), sp=dist.get_world_size() > 1)
    dims.initialize(device="cpu")
    models = mb.build_model(hf, dims=dims, dtype=torch.bfloat16, device="cpu", load_weights=False)
    for number in LOOKED_AT:
        mb.load_hf_weights(models, states[number - 1])
        mb.save_hf_checkpoint(models, Path(out, str(number)), quantize=BLOCKS)
    sglang_engine.prepare()
    from sglang.srt.layers.quantization import fp8

    with mock.patch.object(fp8, "_is_cpu", False), sglang_engine.server(f"{out}/1", ep=ep) as server:
        served = server.read(f"{out}/5")
        load = sglang_updates.update_by(server.updater(served))
        return fed_by_map(served, load, models, states, lambda number: server.read(f"{out}/{number}"), BLOCKS)


@pytest.mark.parametrize("mesh", ["TP1", "TP2", "EP2"])
@pytest.mark.parametrize("name", FED)
def test_a_map_gives_the_bits_of_a_saved_folder(name: str, mesh: str, tmp_path: Path, capsys: Any) -> None:
    """Every tensor of every rank is compared, after the first, second and fifth round of changed weights."""
    results = pool.run(int(mesh[-1]), mapped, name, str(tmp_path), mesh == "EP2")
    with capsys.disabled():
        print(f"\n{mesh} {name}: {results}", end=" ")
    assert [name for result in results for name in result.wrong] == []
