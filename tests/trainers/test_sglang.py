"""SGLang loads our stream, family by family, and then has the bits that it reads from files of transformers.

SGLang must be installed, as in docs/trainers/sglang.md.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

import mcore_bridge as mb
from mcore_bridge.architecture import architectures
from tests import zoo
from tests.support import pool
from tests.support.mapped import LOOKED_AT, Mapped, differences, fed_by_map, forget
from tests.support.strategies import random_state, save
from tests.workers import sglang_engine, sglang_updates
from tests.zoo.latent import YARN

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.usefixtures("own_workers"),
]

ALIASES = {"Ernie4_5ForCausalLM": "Ernie4_5_ForCausalLM"}
"""Classes that SGLang has under another name than transformers writes."""


@dataclass(frozen=True)
class Fed:
    """A case of the zoo, changed to what SGLang can hold of its family."""

    case: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)
    """Fields of published configs that SGLang reads and transformers does not write."""

    @property
    def hf(self) -> Any:
        """A new HF config. Of an expert's rows, a rank on CPU takes no fewer than 32."""
        case = zoo.cases()[self.case]
        wide = {"moe_intermediate_size": 64} if "moe_intermediate_size" in case.fields else {}
        return zoo.Case(case.model_type, {**case.fields, **wide, **self.changes}).hf


WIDE = {"hidden_size": 192}
"""The heads of one token are as wide as its hidden state: SGLang sizes norms by it, or derives ``head_dim`` from it."""
ROPE = zoo.rope("yarn", **YARN, mscale=1.3, mscale_all_dim=0.7)
"""The only backend of latent attention on CPUs in SGLang."""
UNGROUPED = {"n_group": 1, "topk_group": 1}
SOFTMAX = {"moe_layer_freq": 1, "scoring_func": "softmax"}
SIGMOID = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
UNBIASED = {"attention_bias": False}
INTERVAL = {"full_attention_interval": 2}
QK_NORM = {"use_qk_norm": True}
HY_V3 = {"first_k_dense_replace": 1, "route_norm": True, "qk_norm": True}
EXPERTS_OF_ONE_SIZE = {"moe_intermediate_size": 80, "num_shared_expert": 1, "use_mixed_mlp_moe": True}
FED = {
    "arcee": Fed("arcee-no-bias", {"tie_word_embeddings": False}),
    "cohere": Fed("cohere"),
    "cohere-normed-heads": Fed("cohere-normed-heads", {**UNBIASED, "tie_word_embeddings": True}),
    "cohere2": Fed("cohere2", {**UNBIASED, "tie_word_embeddings": True}),
    "deepseek_v2": Fed("deepseek_v2", {**UNGROUPED, "q_lora_rank": 28}, SOFTMAX),
    "deepseek_v2-whole-queries": Fed("deepseek_v2", UNGROUPED, SOFTMAX),
    "deepseek_v3": Fed("deepseek_v3", ROPE, SIGMOID),
    "deepseek_v3-whole-queries": Fed("deepseek_v3-whole-queries", ROPE, SIGMOID),
    "deepseek_v32": Fed("deepseek_v32", ROPE, SIGMOID),
    "ernie4_5": Fed("ernie4_5-no-bias"),
    "ernie4_5_moe": Fed("ernie4_5_moe"),
    "ernie4_5_moe-tied": Fed("ernie4_5_moe-alone-tied"),
    "exaone4": Fed("exaone4", WIDE, {"sliding_window_pattern": "LG"}),
    "exaone_moe": Fed("exaone_moe", WIDE, {"is_moe_layer": [False, True, True, True]}),
    "gemma": Fed("gemma"),
    "gemma2": Fed("gemma2", {}, {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma3_text": Fed("gemma3"),
    "glm4": Fed("glm4"),
    "glm4-tied": Fed("glm4-no-bias-quarter"),
    "glm4_moe": Fed("glm4_moe"),
    "glm4_moe-groups": Fed("glm4_moe-groups"),
    "glm4_moe_lite": Fed(
        "glm4_moe_lite",
        {**UNGROUPED, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        {"first_k_dense_replace": 1, "moe_layer_freq": 1},
    ),
    "glm_moe_dsa": Fed("glm_moe_dsa", ROPE, SIGMOID),
    "gpt_oss": Fed("gpt_oss"),
    "gpt_oss-uneven": Fed("gpt_oss-uneven-clamped"),
    "granite": Fed("granite", {**UNBIASED, "mlp_bias": False}),
    "granitemoe": Fed("granitemoe"),
    "granitemoeshared": Fed("granitemoeshared", UNBIASED),
    "hunyuan_v1_dense": Fed("hunyuan", {}, QK_NORM),
    "hunyuan_v1_dense-tied": Fed("hunyuan-plain-rope", {}, QK_NORM),
    "hunyuan_v1_moe": Fed("hunyuan_v1_moe", {}, {**QK_NORM, **EXPERTS_OF_ONE_SIZE}),
    "hy_v3": Fed("hy_v3", {"attention_bias": False}, HY_V3),
    "internlm3": Fed("internlm3", {**UNBIASED, "mlp_bias": False}),
    "iquestcoder": Fed("iquestcoder"),
    "llama": Fed("llama"),
    "llama-tied": Fed("llama-biases-tied", {"mlp_bias": False}),
    "mellum": Fed("mellum"),
    "minimax_m2": Fed("minimax_m2", {}, {**QK_NORM, "scoring_func": "sigmoid", "use_routing_bias": True}),
    "ministral3": Fed("ministral3"),
    "mistral": Fed("mistral-window"),
    "mixtral": Fed("mixtral", WIDE),
    "nemotron_h": Fed("nemotron_h", {}, {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}),
    "olmo2": Fed("olmo2", WIDE),
    "olmoe": Fed("olmoe-normalised", {"num_key_value_heads": 8}),
    "phi3": Fed("phi3"),
    "phi3-tied": Fed("phi3-partial"),
    "qwen2": Fed("qwen2"),
    "qwen2_moe": Fed("qwen2_moe"),
    "qwen3": Fed("qwen3"),
    "qwen3-tied": Fed("qwen3-yarn-tied"),
    "qwen3_5_moe_text": Fed("qwen3.5-moe", {}, INTERVAL),
    "qwen3_5_text": Fed("qwen3.5", {}, INTERVAL),
    "qwen3_moe": Fed("qwen3_moe", {"mlp_only_layers": []}),
    "qwen3_moe-bias": Fed("qwen3_moe-window-bias", {"decoder_sparse_step": 1}),
    "qwen3_next": Fed("qwen3_next", {}, INTERVAL),
    "starcoder2": Fed("starcoder2"),
    "starcoder2-tied": Fed("starcoder2-no-bias"),
}


UNREAD = {
    "cohere2_moe": "SGLang puts a config of its own in the place of transformers', and ours is built beside it",
    "falcon_h1": "it has norms of queries and keys that no file fills, and at TP2 it is as the next one",
    "granitemoehybrid": "at TP2 it refuses the projections of a Mamba with one group in these sizes",
    "llama4_text": "it leaves out experts, with a warning",
    "phi": "it asks for partial_rotary_factor, which transformers 5 has elsewhere",
}
"""Families that both have, but that SGLang cannot load here from any trainer."""


def trained(fed: Fed) -> Any:
    """Our model of this rank: the mesh is as wide as the engine."""
    dims = mb.ParallelDims(tp=dist.get_world_size(), sp=dist.get_world_size() > 1)
    dims.initialize(device="cpu")
    return mb.build_model(fed.hf, dims=dims, dtype=torch.bfloat16, device="cpu", load_weights=False)


def write(fed: Fed, state: dict[str, Tensor], folder: Path) -> None:
    """Write ``state`` like a published checkpoint. transformers could round tensors that are published in fp32."""
    own = folder / "own"
    own.mkdir(parents=True)
    save(state, fed.hf, folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(own)
    written = load_file(own / "model.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(tensor, state[name].to(tensor.dtype)) for name, tensor in written.items())
    fields = json.loads((own / "config.json").read_text())
    names = [ALIASES.get(name, name) for name in fields["architectures"]]
    (folder / "config.json").write_text(json.dumps({**fields, **fed.published, "architectures": names}))


def feed(name: str, out: str) -> tuple[list[str], set[str]]:
    """Runs in a worker, which trains and serves: wrong tensors after each round, and names that were left out."""
    fed = FED[name]
    folders = [Path(out, str(seed)) for seed in range(len(sglang_updates.WAYS))]
    models = trained(fed)
    if dist.get_rank() == 0:
        for seed, folder in enumerate(folders):
            write(fed, random_state(fed.hf, dtype=torch.bfloat16, seed=seed), folder)
    dist.barrier()
    return sglang_updates.in_rounds(models, folders)


def mapped(name: str, out: str, ep: bool) -> Mapped:
    """Runs in a worker, which trains and serves: one model of SGLang, fed by a map of its loader."""
    fed = FED[name]
    states = [random_state(fed.hf, dtype=torch.bfloat16, seed=seed) for seed in range(5)]
    models = trained(fed)
    folders = [Path(out, str(number)) for number in range(1, 6)]
    if dist.get_rank() == 0:
        for number in LOOKED_AT:
            write(fed, states[number - 1], folders[number - 1])
    dist.barrier()
    with sglang_engine.server(str(folders[0]), ep=ep) as server:
        served = server.read(str(folders[-1]))
        load = sglang_updates.update_by(server.updater(served))
        return fed_by_map(served, load, models, states, lambda number: server.read(str(folders[number - 1])))


WHOLE = {"gemma3_text": ("model.embed_tokens.weight",)}
"""Tensors that SGLang does not split."""
CUT = dict.fromkeys(("cohere-normed-heads", "minimax_m2"), ("q_norm", "k_norm"))
"""Tensors that SGLang cuts and megatron-core does not: norms over all heads."""
CHANGED = ("gemma", "gpt_oss", "gpt_oss-uneven", "nemotron_h")
"""Families whose tensors SGLang transposes, adds to, or raises to powers on load."""


def slices(name: str, out: str) -> tuple[int, int, int]:
    """Runs in a worker, which trains a stage and serves a rank: the number of rows that slices and the engine's
    parameters share, and the numbers of other rows of each.
    """
    fed, folder, rank, size = FED[name], Path(out), dist.get_rank(), dist.get_world_size()
    fed = replace(fed, changes={**fed.changes, "intermediate_size": 128})  # only on CPU: others are padded first
    if "shared_expert_intermediate_size" in fed.hf.to_dict():
        fed = replace(fed, changes={**fed.changes, "shared_expert_intermediate_size": 64})
    dims, state = mb.ParallelDims(pp=size), random_state(fed.hf, dtype=torch.bfloat16)
    dims.initialize(device="cpu")
    models = mb.build_model(fed.hf, dims=dims, dtype=torch.bfloat16, device="cpu", load_weights=state)
    if rank == 0:
        write(fed, state, folder)
    dist.barrier()
    target = mb.engine_ranks(tp=size, whole=WHOLE.get(name, ()))[rank]
    ours = mb.to_hf_state_dict(models, target=target)
    for each in [each for each in ours if each.endswith(tuple(f"{norm}.weight" for norm in CUT.get(name, ())))]:
        ours[each] = ours[each].chunk(size)[rank]
    with sglang_engine.server(out) as server:
        theirs = dict(server.read(out).named_parameters())
        mine, served = rows_of(ours.values()), rows_of(theirs.values())
    return (mine & served).total(), (mine - served).total(), (served - mine).total()


def rows_of(tensors: Iterable[Tensor]) -> Counter[bytes]:
    """All rows that are not zero, since zeros are padding. An engine may join several tensors in one.

    An engine also cuts and joins vectors, so each number of a vector counts as a row.
    """
    found: Counter[bytes] = Counter()
    for tensor in tensors:
        rows = tensor.detach().bfloat16().float().reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
        found.update(row.tobytes() for row in rows[rows.any(1)].numpy())
    return found


def in_halves(name: str, out: str) -> list[str]:
    """Runs in a worker: the tensors that differ if each tensor comes in a separate call."""
    fed, folder = FED[name], Path(out)
    state = random_state(fed.hf, dtype=torch.bfloat16)
    models = trained(fed)
    mb.load_hf_weights(models, state)
    write(fed, state, folder)
    with sglang_engine.server(out) as server:
        served = server.read(out)
        updater = server.updater(served)
        forget(served)
        with sglang_engine.warned() as warnings:
            for pair in mb.iter_hf_weights(models):
                updater.update_weights_from_tensor([pair])
        return warnings + differences(served, server.read(out))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", FED)
def test_the_engine_holds_what_it_reads_from_files(name, tp, tmp_path):
    """Three rounds with three states, each in another way. No name causes a warning, and none is skipped by all
    ranks.
    """
    found, unused = zip(*pool.run(tp, feed, name, str(tmp_path)), strict=True)
    assert found == ([],) * tp
    assert set.intersection(*unused) == set()


@pytest.mark.parametrize("mesh", ["TP1", "TP2", "EP2"])
@pytest.mark.parametrize("name", FED)
def test_a_map_gives_the_bits_that_the_loader_gives(name, mesh, tmp_path, capsys):
    """Every tensor of every rank is compared, after the first, second and fifth round of changed weights."""
    results = pool.run(int(mesh[-1]), mapped, name, str(tmp_path), mesh == "EP2")
    with capsys.disabled():
        print(f"\n{mesh} {name}: {[result[:4] for result in results]}", end=" ")
    assert [name for result in results for name in result.wrong] == []


@pytest.mark.parametrize("name", [name for name in FED if name not in CHANGED])
def test_slices_are_what_each_rank_of_the_engine_holds(name, tmp_path):
    """``engine_ranks`` cuts like SGLang, from a trainer with another mesh."""
    for alike, ours, theirs in pool.run(2, slices, name, str(tmp_path)):
        assert alike > 100
        assert (ours, theirs) == (0, 0)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite", "qwen3"])
def test_latents_are_lost_without_a_word_when_they_come_apart(name, tmp_path):
    """This is the only case in which SGLang needs ``plan_buckets`` to keep tensors together."""
    (found,) = pool.run(1, in_halves, name, str(tmp_path))
    layers = range(FED[name].hf.num_hidden_layers if name != "qwen3" else 0)
    assert found == [f"model.layers.{layer}.self_attn.fused_qkv_a_proj_with_mqa.weight" for layer in layers]


def test_every_family_that_both_have_is_fed():
    """These are families for which transformers has a config that SGLang can read."""
    (theirs,) = pool.run(1, sglang_engine.architectures)
    both = {each for each in architectures() if ALIASES.get(CLASSES.get(each), CLASSES.get(each)) in theirs}
    assert {zoo.described()[fed.case].model_type for fed in FED.values()} == both - UNREAD.keys()
