"""RLinf's actor blocks: every key is translated, conflicts with the HF config raise, the provider builds the model."""

import shutil
from pathlib import Path

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.errors import CheckpointError, ConfigError, MeshError
from mcore_bridge.factory.hybrid_support import RELEASE
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.trainers.rlinf import model_keys
from mcore_bridge.trainers.rlinf.actor import BACKENDS, read_actor
from mcore_bridge.trainers.rlinf.checkpoint import checkpoint_of, convertor_block
from mcore_bridge.trainers.rlinf.convertor import convert_hf_to_mg
from mcore_bridge.trainers.rlinf.model_provider import model_provider
from mcore_bridge.weights.dist_checkpoint.folder import TRACKER
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support.rlinf_blocks import block, filled_in
from tests.support.rlinf_models import LATENT, SPARSE
from tests.support.strategies import random_state, save, tiny

DISTILL = {  # config.json of DeepSeek-R1-Distill-Qwen-1.5B
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.fixture
def distill(tmp_path):
    import json

    (tmp_path / "config.json").write_text(json.dumps(DISTILL))
    return str(tmp_path)


NAMED = [({"tp": 1, "pp": 2}, False), ({"tp": 2, "pp": 1}, True)]


@pytest.mark.parametrize("name", ["distill_ckpt", "distill_ckpt_convertor"])
@pytest.mark.parametrize(("sizes", "sp"), NAMED, ids=["TP1 PP2", "TP2 PP1 SP"])
def test_deepseek_r1_distill_qwen_in_fp16(name, sizes, sp, distill):
    actor = block(
        name,
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        sequence_parallel=sp,
    )
    convertor_block(actor)["hf_model_path"] = distill
    read = read_actor(actor)
    assert read.dims == ParallelDims(**sizes, etp=sizes["tp"], sp=sp)
    assert read.dtype == torch.float16
    config = read.blueprint(device="meta").config
    assert (config.fp16, config.bf16, config.params_dtype) == (True, False, torch.float16)
    assert (config.num_layers, config.num_query_groups, config.add_qkv_bias) == (28, 2, True)
    assert (config.normalization, config.gated_linear_unit, config.add_bias_linear) == ("RMSNorm", True, False)
    assert (config.recompute_method, config.recompute_granularity, config.recompute_num_layers) == ("block", "full", 20)
    assert config.attention_softmax_in_fp32
    assert config.variable_seq_lengths
    assert not config.batch_p2p_comm
    for rank in range(2):
        with rank_of(read.dims, rank, 2):
            ends = (rank == 0, rank == 1) if sizes["pp"] == 2 else (True, True)
            chunk = model_provider(actor, load_weights=False, device="meta")(*ends)
            held = held_tensors([chunk])
            assert len({name.split(".")[2] for name in held if ".layers." in name}) == 28 // sizes["pp"]
            assert {tensor.dtype for tensor in held.values()} == {torch.float16}
            shape = held[
                "decoder.layers.14.mlp.linear_fc1.weight" if rank else "decoder.layers.0.mlp.linear_fc1.weight"
            ]
            assert shape.shape == (2 * 8960 // sizes["tp"], 1536)


FAMILIES = {"qwen2.5": tiny("qwen2"), "qwen3": tiny("qwen3"), "qwen3_moe": SPARSE, "deepseek_v3": LATENT}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_that_rlinf_has_filled_in_says_the_same(name):
    hf = FAMILIES[name]
    own = filled_in(hf)
    if name == "deepseek_v3":  # RLinf fills in this field differently
        own |= {"num_moe_experts": 8, "num_experts": 8, "qk_layernorm": True, "multi_latent_attention": True}
        own |= {key: getattr(hf, key) for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")}
        own |= {"kv_channels": None, "head_dim": None, "first_k_dense_replace": 1}
    read = read_actor(block("distill_ckpt_convertor", **own, model_type=name, tensor_model_parallel_size=2), hf=hf)
    assert read.blueprint(device="meta").config.num_layers == hf.num_hidden_layers
    changed = {"num_layers": 7, "hidden_size": 8, "layernorm_epsilon": 0.5, "rotary_base": 5, "activation": "geglu"}
    changed |= {"normalization": "layernorm", "num_attention_heads": 3, "share_embeddings_and_output_weights": True}
    for key, value in changed.items():
        with pytest.raises(ConfigError, match="contradicts the HF config"):
            read_actor(block("distill_ckpt_convertor", **{**own, key: value}, model_type=name), hf=hf)


def test_what_disagrees_is_named_unless_it_is_an_override():
    actor = block("qwen3_moe")  # RLinf's example has two experts for each token, this model has three
    hf = tiny("qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=True)
    with pytest.raises(ConfigError, match=r"moe_router_topk=2, expected 3"):
        read_actor(actor, hf=hf)
    read = read_actor(actor, hf=hf, overrides={"moe_router_topk": 2})
    assert read.blueprint(device="meta").config.moe_router_topk == 2
    actor["model"]["mcore_customization_config"] = {"moe_router_topk": 2}
    assert read_actor(actor, hf=hf).blueprint(device="meta").config.moe_router_topk == 2
    config = read.blueprint(device="meta").config
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("aux_loss", 0.0)
    assert config.init_method_std == 0.008
    hf.norm_topk_prob = False  # the scores before the selection are then different
    with pytest.raises(ConfigError, match="moe_router_pre_softmax=False, expected True"):
        read_actor(actor, hf=hf)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mcore_gpt": False}, r"mcore_gpt must be True, found False: the GPTModel of megatron.legacy"),
        ({"spec_name": "my_gpt"}, r"spec_name must be one of \['decoder_gpt', 'local_gpt', 'te_gpt'\]"),
        ({"model": {"precision": "fp8"}}, "precision must be one of"),
        ({"model": {"precision": None}}, "precision must be one of .*, found None"),
        ({"model": {"activation": "swish"}}, "activation must be one of"),
        ({"model": {"normalization": "batchnorm"}}, "normalization must be one of"),
        ({"model": {"no_such_key": 1}}, "found 'no_such_key'"),
        ({"model": {"num_layers": "${rollout.layers}"}}, "resolve the config first"),
        ({"model": {"model_type": "qwen3"}}, "model_type='qwen3', expected 'qwen2'"),
        ({"model": {"is_lora": True}}, "no adapter is built"),
        ({"model": {"tensor_model_parallel_size": 1}}, "sp=True needs tp > 1"),
    ],
)
def test_what_cannot_be_translated_is_refused(change, message):
    actor = block("distill_ckpt_convertor", **change.get("model", {}))
    with pytest.raises((ConfigError, MeshError), match=message):
        read_actor({**actor, **{key: value for key, value in change.items() if key != "model"}}, hf=FAMILIES["qwen2.5"])


def test_without_a_path_the_hf_config_is_asked_for():
    actor = block("distill_ckpt")
    convertor_block(actor)["hf_model_path"] = None
    with pytest.raises(ConfigError, match="pass hf="):
        read_actor(actor)


def test_every_spelling_of_a_precision():
    found = {
        spelling: model_keys.dtype_of(spelling) for spelling in (16, "16", "fp16", "bf16", "bf16-mixed", 32, "32-true")
    }
    assert list(found.values()) == [torch.float16] * 3 + [torch.bfloat16] * 2 + [torch.float32] * 2


def test_the_page_says_of_every_key_what_becomes_of_it():
    page = (Path(__file__).parent.parent.parent / "docs" / "trainers" / "rlinf.md").read_text()
    for key in (*model_keys.MESH, *model_keys.SPELLED, *model_keys.MODEL_TYPES, *BACKENDS):
        assert f"`{key}`" in page, key
    for key, reason in model_keys.IGNORED.items():
        assert f"| `{key}` | {reason} |" in page, key


# the provider ---------------------------------------------------------------------------------------------------------


def test_the_provider_builds_and_loads_each_chunk_alone():
    hf = FAMILIES["qwen3"]
    state = random_state(hf)
    dims = ParallelDims(tp=2, pp=2, vp=2, etp=2, sp=True)
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    actor = block("distill_ckpt_convertor", **sizes, model_type=None, precision=32)
    provider = model_provider(actor, hf=hf, load_weights=state, device="cpu")
    for rank in range(4):
        with rank_of(dims, rank, 4):
            wanted = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
            found = [provider(c.pre_process, c.post_process, vp_stage=i) for i, c in enumerate(wanted)]
            found = held_tensors(found)
            assert found.keys() == held_tensors(wanted).keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in held_tensors(wanted).items())
            if RELEASE.is_installed:
                hybrid = model_provider(actor, hf=hf, load_weights=state, device="cpu", model="hybrid")
                found = held_tensors([hybrid(c.pre_process, c.post_process, vp_stage=i) for i, c in enumerate(wanted)])
                assert all(torch.equal(found.pop(name), tensor) for name, tensor in held_tensors(wanted).items())
                assert not found
            with pytest.raises(MeshError, match="split the pipeline in the same way"):
                provider(rank > 1, rank < 2, vp_stage=0)
            with pytest.raises(MeshError, match="expected vp_stage below 2, found 2"):
                provider(False, False, config=object(), vp_stage=2, pg_collection=None, unknown=1)
    with rank_of(ParallelDims(tp=4, sp=True), 0, 4), pytest.raises(MeshError, match="already initialized"):
        provider(True, True)


def test_a_critic_has_a_head_that_gives_a_value():
    actor = {**block("distill_ckpt_convertor", precision=32), "use_critic_model": True}
    with rank_of(ParallelDims(tp=2, etp=2, sp=True), 0, 2):
        chunk = model_provider(actor, hf=FAMILIES["qwen2.5"], load_weights=False, device="cpu")(True, True)
    assert chunk.output_layer.weight.shape == (1, FAMILIES["qwen2.5"].hidden_size)


# a checkpoint that Megatron loads after the model is built ------------------------------------------------------------


def of_a_checkpoint(folder, hf, **block_of_convertor):
    """A block whose checkpoint was converted for TP2. Its HF folder was deleted."""
    state, own = random_state(hf), {"te_ln_linear_qkv": False, "te_ln_linear_mlp_fc1": False}
    (folder / "hf").mkdir()
    save(state, hf, folder / "hf")
    asked = {"save_path": str(folder / "mg"), "tensor_model_parallel_size": 2, **own, **block_of_convertor}
    convert_hf_to_mg(str(folder / "hf"), asked)
    shutil.rmtree(folder / "hf")
    return block("distill_ckpt_convertor", model_type=None, precision=32, megatron_checkpoint=str(folder / "mg"))


def test_with_a_checkpoint_the_config_is_its_own_and_no_weight_is_read(tmp_path):
    hf = FAMILIES["qwen2.5"]
    actor = of_a_checkpoint(tmp_path, hf)
    convertor_block(actor)["hf_model_path"] = "not/there"
    assert read_actor(actor).hf == str(tmp_path / "mg")
    for critic in (False, True):
        with rank_of(ParallelDims(tp=2, etp=2, sp=True), 1, 2):
            chunk = model_provider({**actor, "use_critic_model": critic}, device="cpu")(True, True)
        assert len(chunk.output_layer.weight) == (1 if critic else hf.vocab_size // 2)
    (tmp_path / "mg" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json in or beside what Megatron loads .*mg.*found none"):
        read_actor({**actor, "megatron": {}})


def test_what_megatron_would_not_load_raises(tmp_path):
    hf = FAMILIES["qwen2.5"]
    actor = of_a_checkpoint(tmp_path, hf, te_ln_linear_qkv=True, te_ln_linear_mlp_fc1=True)
    dims = ParallelDims(tp=2, etp=2, sp=True)
    with rank_of(dims, 0, 2):
        provider = model_provider(actor, device="cpu")
        with pytest.raises(CheckpointError, match=r"input_layernorm\.weight: expected \(\d+,\), found None"):
            provider(True, True)
        if RELEASE.is_installed:
            with pytest.raises(CheckpointError, match="with the names of a GPTModel"):
                model_provider(actor, device="cpu", model="hybrid")(True, True)
        (tmp_path / "mg" / "release" / "mp_rank_00").rename(tmp_path / "mg" / "release" / "mp_rank_07")
        with pytest.raises(CheckpointError, match=r"expected .*mp_rank_00.* for this rank"):
            provider(True, True)
        (tmp_path / "mg" / TRACKER).unlink()
        with pytest.raises(CheckpointError, match=f"found no {TRACKER}"):
            provider(True, True)


def test_what_megatron_would_load_over_our_weights_raises(tmp_path):
    actor = block("distill_ckpt_convertor")
    actor["megatron"]["load"] = "converted"
    with pytest.raises(ConfigError, match=r"megatron\.load must be None .*, found 'converted'"):
        model_provider(actor, hf=FAMILIES["qwen2.5"], load_weights=True)
    assert checkpoint_of(actor) == "converted"
    actor["megatron"] |= {"use_hf_ckpt": False}
    assert checkpoint_of(actor) is None


def test_the_block_of_the_convertor_has_two_names():
    assert convertor_block({"megatron": {"ckpt": {"model": "x"}}}) == {"model": "x"}
    assert convertor_block({}) == {}
