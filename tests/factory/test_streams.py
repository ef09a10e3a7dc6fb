"""Residual streams, and selections of keys: loss and gradients on every mesh against transformers', recomputation, and
what is refused.
"""

import functools
import itertools
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.hf import with_fields
from mcore_bridge.config.mesh.divisibility import DELTA_CONTEXT
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config
from mcore_bridge.errors import CheckpointError, ConfigError, MeshError
from mcore_bridge.factory.modules import selection, streams
from mcore_bridge.factory.modules.backend import norm_of
from mcore_bridge.factory.modules.torch_modules import Norm, own_text
from tests import zoo
from tests.support import pool, stepping, tiny
from tests.support.fake_mesh import rank_of
from tests.support.strategies import random_state
from tests.support.training import MESHES_WITH_EXPERTS, WHOLE, Kind, check_recompute

FAMILIES = ("hy_v4", "glm5_next_text", "deepseek_v4", "qwen4_exp_text")
CASES = {name: case.hf for name, case in zoo.cases().items() if case.model_type in FAMILIES}
pytestmark = pytest.mark.skipif(not CASES, reason="the installed transformers lacks the family")


def fits(name, dims):
    """Whether each stage starts with an indexer, the first knows all tokens that are read, and texts may be cut."""
    stages = dims.vp == 1 or name not in ("hy_v4", "qwen4_exp_text")
    texts = not name.startswith("qwen4") or DELTA_CONTEXT.is_installed
    return stages and (dims.cp == 1 or texts)


KIND = Kind(CASES, MESHES_WITH_EXPERTS, every=2, fits=fits)


@pytest.mark.parametrize("world_size", MESHES_WITH_EXPERTS)
def test_every_mesh_trains_as_transformers_does(world_size, tmp_path):
    KIND.check(world_size, tmp_path)


def unmarked(config, *sizes):
    """Parameters of gates, without the mark that lets their gradients be summed."""
    return nn.Parameter(torch.empty(*sizes))


def gradients(folder):
    """Runs in each worker: gradients with the mark, and without it."""
    dims, found = ParallelDims(tp=2, sp=True), []
    for made in (streams._whole, unmarked):
        with mock.patch.object(streams, "_whole", made), stepping.mesh(dims):
            found.append(stepping.train(folder, dims, tiny.tokens(2))["grads"])
    return found


def test_gradients_would_show_gates_that_are_not_summed(tmp_path):
    right, wrong = pool.run(2, gradients, str(tiny.random_checkpoint(CASES["hy_v4"], tmp_path)))[0]
    differing = {name for name in right if tiny.relative_error(wrong[name], right[name]) > 0.1}
    assert {name for name in right if name.endswith("_fn")} <= differing <= {name for name in right if ".hc_" in name}


@pytest.mark.parametrize(
    ("name", "modules"),
    [("hy_v4-indexers", ["moe", "mla_up_proj"]), ("deepseek_v4", ["core_attn"]), ("qwen4_exp_text-no-ngrams", ["moe"])],
)
def test_gradients_keep_their_bits_if_layers_are_recomputed(name, modules, tmp_path):
    check_recompute(CASES[name], modules, tmp_path, whole=name != "deepseek_v4")


REFUSED = {
    "must be without 'layernorm'": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
    "A selection is made before core attention": {"recompute_granularity": "selective"},
    "which may be of a later microbatch": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "found dsa_indexer_loss_coeff=0.1, expected 0.0": {"dsa_indexer_loss_coeff": 0.1},
    "found variable_seq_lengths=False, expected True": {"variable_seq_lengths": False},
    "mtp_num_layers": {"mtp_num_layers": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_reproduced_is_refused(message, monkeypatch):
    monkeypatch.setattr("mcore_bridge.factory.layer_specs.has_transformer_engine", lambda: True)
    with pytest.raises(ConfigError, match=re.escape(message)):
        mb.to_layer_spec(CASES["hy_v4"], backend="torch", overrides=REFUSED[message])


BY_TOKEN = {
    "experts must not be recomputed in this model": [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
    "found moe_router_score_function='sigmoid', expected 'softmax'": [{"moe_router_score_function": "sigmoid"}],
}


@pytest.mark.parametrize("message", BY_TOKEN)
def test_layers_that_choose_experts_by_tokens_refuse(message):
    for overrides in BY_TOKEN[message]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            mb.to_layer_spec(CASES["deepseek_v4"], backend="torch", overrides=overrides)


COMPRESSED = {
    "tp=4 must divide output_groups=2 (o_groups in the HF config)": {"tp": 4},
    "the first stage of the pipeline must have the first 2 layers": {"pp": 4},
}


def test_no_streams_at_all_are_refused():
    with pytest.raises(ConfigError, match=r"hc_mult=0 must give at least 1, found 0 as .*mhc_num_residual_streams"):
        mb.to_transformer_config(with_fields(CASES["hy_v4"], {"hc_mult": 0}))


def test_the_first_of_embeddings_of_ngrams_counts_as_a_reader_of_tokens():
    hf = with_fields(CASES["qwen4_exp_text"], {"ple_layer_ids": [3]})
    with pytest.raises(MeshError, match="the first stage of the pipeline must have the first 3 layers"):
        mb.to_transformer_config(hf, dims=ParallelDims(pp=2))


@pytest.mark.parametrize("message", COMPRESSED)
def test_meshes_that_cut_groups_or_part_readers_of_tokens_are_refused(message):
    more = {"mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"], "o_groups": 2}
    hf = with_fields(CASES["deepseek_v4"], more)
    with pytest.raises(MeshError, match=re.escape(message)):
        mb.to_transformer_config(hf, dims=ParallelDims(**COMPRESSED[message]))


def test_rows_with_padding_on_the_left_unknown_tokens_and_bad_tables_are_refused():
    hf, dims = CASES["deepseek_v4"], ParallelDims()
    with rank_of(dims, 0, 1):
        (model,) = mb.build_model(hf, dims=dims, device="cpu", dtype=torch.float32, load_weights=random_state(hf))
        tokens, places = torch.arange(7)[None], torch.arange(7)[None]
        mask = torch.ones(1, 7, dtype=torch.bool)
        padded = mask.clone()
        padded[0, 0] = False
        logits = model(tokens, places, mask)
        mask[0, -2:] = False
        assert torch.equal(model(tokens, places, mask)[:, :-2], logits[:, :-2])
        with pytest.raises(ConfigError, match="found padding on the left"):
            model(tokens, places, padded)
        with pytest.raises(ConfigError, match="must embed its tokens in this model"):
            model(None, places, None, decoder_input=torch.zeros(7, 1, hf.hidden_size))
        model.decoder.layers[0].mlp.router.experts_of_tokens[3] = 0
        with pytest.raises(CheckpointError, match="3 different experts below 8"):
            model(tokens, places, None)


def packed_and_apart(lengths, sizes):
    """Runs in each worker: logits of packed sequences, the tokens of this CP rank; and of each sequence by itself."""
    hf, dims = CASES["deepseek_v4"], ParallelDims(**sizes)
    with stepping.mesh(dims), torch.no_grad():
        (model,) = mb.build_model(hf, dims=dims, device="cpu", dtype=torch.float32, load_weights=random_state(hf))
        own = functools.partial(own_text, cp_group=model.pg_collection.cp)
        starts, longest = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), max(lengths)
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        places = [own(torch.arange(length)) for length in lengths]
        tokens = [own(torch.arange(length) + length) for length in lengths]
        apart = [model(text[None], place[None], None) for text, place in zip(tokens, places, strict=True)]
        together = model(torch.cat(tokens)[None], torch.cat(places)[None], None, packed_seq_params=packed)
    return together, torch.cat(apart, 1)


@pytest.mark.parametrize(("lengths", "sizes"), [((2, 11, 1, 7), {}), ((8, 4, 16, 12), {"cp": 2})], ids=str)
def test_packed_sequences_have_compressed_keys_of_their_own(lengths, sizes):
    """As each sequence by itself; none is as long as a window, or several are."""
    for together, apart in pool.run(sizes.get("cp", 1), packed_and_apart, lengths, sizes):
        assert tiny.relative_error(together, apart) < 1e-5


def test_a_stage_that_starts_with_a_shared_selection_is_refused():
    with pytest.raises(MeshError, match="pp_rank=1, vp_stage=0 starts with layer 1, which shares"):
        mb.to_transformer_config(CASES["hy_v4"], dims=ParallelDims(pp=4))


def test_the_published_sizes_are_read_and_written_back():
    """The sizes of Hy4-preview: 78 layers, of which 21 have an indexer. Layers 1, 5, 9 and so on start its stages."""
    kinds = ["full" if layer == 0 or layer % 4 == 1 else "shared" for layer in range(78)]
    sizes = {"hidden_size": 6144, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 78}
    latent = {"num_attention_heads": 64, "num_key_value_heads": 8, "q_lora_rank": 2048, "v_head_dim": 256}
    switches = dict.fromkeys(("gated_mla", "learnable_sink", "use_dsa", "enable_ihc", "enable_lm_head_fp32"), True)
    more = {"gating_type": "elementwise", "num_nextn_predict_layers": 1, "mtp_loss_factor": 0.1, **switches}
    hf = type(CASES["hy_v4"])(
        **{**sizes, **latent, **more, "index_n_heads": 32, "max_position_embeddings": 1048576, "indexer_types": kinds},
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
    )
    layout = "|".join(["Et*21", "t*20", "t*20", "t*17L"])
    config = mb.to_transformer_config(hf, dims=ParallelDims(tp=8, sp=True, ep=8, pp=4, layout=layout))
    assert (config.mhc_num_residual_streams, config.mhc_magnitude, config.mhc_sinkhorn_iterations) == (4, 2.0, 0)
    assert (config.dsa_indexer_topk_freq, config.dsa_indexer_skip_topk_offset) == (4, 2)
    table = architecture_of(hf).fields
    back = to_hf_config(config, to_gpt_arguments(hf, table), table)
    back.pop("rope_parameters")
    assert {name: hf.to_dict()[name] for name in back} == back
    assert mb.supports(hf).parameters == pytest.approx(769.9e9, rel=1e-3)


def test_gates_of_streams_begin_even_and_indexers_are_frozen():
    dims = ParallelDims()
    with rank_of(dims, 0, 1):
        (model,) = mb.build_model(CASES["hy_v4"], dims=dims, device="cpu", dtype=torch.float32, load_weights=False)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert {name.split(".")[2] for name in frozen} == {"0", "2"}
    gates = model.decoder.layers[1].pre_mlp_layernorm.connection
    torch.manual_seed(0)
    hidden = torch.randn(3, 2, gates.count * 48)
    read, writes, mixes = gates(hidden)
    assert mixes is None
    even = streams.apart(hidden, gates.count).mean(-2)
    assert tiny.relative_error(read, even + 0.01 * gates.count * even) < 0.05
    assert tiny.relative_error(writes, torch.full_like(writes, 1.5 / 2 + 0.01)) < 0.05


def test_norms_that_hold_connections_are_torchs_on_either_backend():
    """TransformerEngine's norms count the parameters of all modules below them, and fail in the backward."""
    assert norm_of("te", SimpleNamespace(enable_mhc_connections=True)) is Norm


def test_mtp_layers_that_files_lack_begin_even_and_leave_no_tokens():
    """They embed later tokens, which are not those of routers with tables in the next forward."""
    hf, dims, tokens = CASES["deepseek_v4"], ParallelDims(), torch.arange(7)[None]
    asked = {"device": "cpu", "dtype": torch.float32, "overrides": {"mtp_num_layers": 1}}
    with rank_of(dims, 0, 1):
        (model,) = mb.build_model(hf, dims=dims, load_weights=random_state(hf), **asked)
        assert model(tokens, tokens, None, labels=tokens).isfinite().all()
    gates = model.mtp.layers[0].final_layernorm.merge
    assert torch.equal(gates.scale, torch.tensor([0.01]))
    assert torch.allclose(gates.base.sigmoid(), torch.tensor(1 / gates.count))
    assert model.decoder.layers[0].mlp.router.tokens is None


@pytest.mark.parametrize("length", [2, 23])
def test_pools_begin_with_the_first_token_of_a_padded_row(length):
    """transformers' indexer says which keys each query of three rows selects: padded on the left, the right, or not."""
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

    hf = CASES["glm5_next_text"]
    dims, theirs = ParallelDims(), Glm5NextTextIndexer(hf, 1)
    with rank_of(dims, 0, 1):
        (model,) = mb.build_model(hf, dims=dims, device="cpu", dtype=torch.float32, load_weights=random_state(hf))
    core = model.decoder.layers[1].self_attention.core_attention
    names = {"index_kpool_compress_ape": "pool_places", "index_kpool_compress_gate": "linear_pool_gate.weight"}
    names |= {f"{name}.weight": f"linear_{name}.weight" for name in ("wq_b", "wk", "weights_proj")}
    own = core.indexer.state_dict()
    theirs.load_state_dict({name: own[names.get(name, name)] for name in theirs.state_dict()})
    generator = torch.Generator().manual_seed(0)
    hidden, latent = (torch.randn(3, length, size, generator=generator) for size in (hf.hidden_size, hf.q_lora_rank))
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[0, : length // 4], mask[1, length - length // 4 :] = False, False
    chosen = theirs(hidden, latent, mask, None).long()  # -1 is none
    expected = torch.zeros(3, length, length + 1, dtype=torch.bool).scatter_(-1, chosen % (length + 1), True)
    with torch.no_grad():
        indexed = core.indexer(hidden.transpose(0, 1), latent.transpose(0, 1), None)
        found = ~core._unselected(indexed, mask)[:, 0]
    assert torch.equal(found[mask], expected[..., :-1][mask])
    seen = torch.ones(length, length).tril().bool() & mask[:, None]
    assert (found[mask].sum() < seen[mask].sum()) == (length > hf.index_topk)


@pytest.mark.parametrize("length", [2, 23])
def test_pools_have_the_mean_of_their_keys_and_the_rope_of_their_first_token(length):
    """As transformers' indexer hides keys of three rows: padded on the left, the right, or not."""
    from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

    hf = CASES["qwen4_exp_text"]
    dims, indexer = ParallelDims(), theirs.Qwen4ExpTextQSAIndexer(hf, 3)
    with rank_of(dims, 0, 1):
        (model,) = mb.build_model(hf, dims=dims, device="cpu", dtype=torch.float32, load_weights=random_state(hf))
    core = model.decoder.layers[3].self_attention.core_attention
    names = {"index_qk_proj": "linear_wqk", "q_layernorm": "q_norm", "k_layernorm": "k_norm"}
    indexer.load_state_dict(
        {f"{name}.weight": core.indexer.state_dict()[f"{own}.weight"] for name, own in names.items()}
    )
    hidden = torch.randn(3, length, hf.hidden_size, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[0, : length // 4], mask[1, length - length // 4 :] = False, False
    seen = torch.ones(length, length).tril().bool() & mask[:, None]
    angles = theirs.Qwen4ExpTextRotaryEmbedding(hf)(hidden, torch.arange(length).expand(3, 3, -1))
    with rank_of(dims, 0, 1), torch.no_grad():
        expected = indexer(hidden, angles, seen[:, None], None)[:, 0]
        turn = selection.Turn(model.rotary_pos_emb(length), None, 1.0, None)
        indexed = core.indexer(hidden.transpose(0, 1), hidden.transpose(0, 1), turn)
        found = ~core._unselected(indexed, mask)[:, 0]
    assert torch.equal(found[mask], expected[mask])
    assert (found[mask].sum() < seen[mask].sum()) == (length > hf.indexer_budget)


def test_the_published_config_of_glm_is_read_and_written_back():
    """The sizes and names of GLM-5.3-Flash: every fourth layer of 45 has attention, and layers are counted from 0."""
    kinds = ["deepseek_sparse_attention" if layer % 4 == 3 else "linear_attention" for layer in range(45)]
    numbers = {"kda_layers": [n for n in range(45) if n % 4 != 3], "full_attn_layers": [*range(3, 45, 4)]}
    given = {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, **numbers}
    switches = dict.fromkeys(("mhc", "mla_use_nope", "index_kpool_compress", "index_share_for_mtp_iteration"), True)
    router = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_dtype": "float32"}
    more = {"first_k_dense_replace": 3, "moe_layer_freq": 1, "indexer_rope_interleave": True, "index_kpool": 4}
    more |= {"num_nextn_predict_layers": 1, "layer_types": kinds, "linear_attn_config": given}
    hf = type(CASES["glm5_next_text"])(**{**switches, **router, **more})
    config = mb.to_transformer_config(hf, dims=ParallelDims(tp=8, sp=True, ep=8, pp=5, layout="Et*9|t*9|t*9|t*9|t*9L"))
    assert (config.mhc_num_residual_streams, config.mhc_sinkhorn_iterations, config.mhc_epsilon) == (4, 20, 1e-6)
    assert (config.dsa_indexer_pool, config.dsa_indexer_topk, config.kda_lower_bound) == (4, 2048, -5.0)
    assert config.layer_kinds == tuple(("*" if n % 4 == 3 else "K") + ("-" if n < 3 else "E") for n in range(45))
    table = architecture_of(hf).fields
    back = to_hf_config(config, to_gpt_arguments(hf, table), table)
    assert back.pop("linear_attn_config") == {**given, "safe_gate": True}
    assert {name: hf.to_dict()[name] for name in back} == back
    assert mb.supports(hf).parameters == 313_326_811_966  # those and biases of routers, in transformers' model
    with pytest.raises(ConfigError, match="linear_attn_config must agree with"):
        mb.to_transformer_config(with_fields(hf, {"linear_head_dim": 64}))


@pytest.mark.parametrize("length", [2, 19])
def test_embeddings_of_ngrams_are_those_of_transformers_in_padded_and_packed_rows(length):
    """Three rows: padded on the left, the right, or not. Every fifth token ends a text."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

    hf = CASES["qwen4_exp_text"]
    dims, state, theirs = ParallelDims(), random_state(hf), Qwen4ExpTextPLELayer(hf, 1, 1)
    own = {name.partition(".layers.1.ple.")[2]: tensor for name, tensor in state.items()}
    table = "ple_embedding.ngram_embedding"
    shards = [own.pop(f"{table}.shard_{shard}.weight") for shard in range(hf.split_ngram_parts)]
    theirs.load_state_dict({f"{table}.weight": torch.cat(shards), **{name: own[name] for name in own if name}})
    with rank_of(dims, 0, 1):
        (model,) = mb.build_model(hf, dims=dims, device="cpu", dtype=torch.float32, load_weights=state)
    ours = model.decoder.layers[1].input_layernorm.ngrams
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(hf.eos_token_id + 3, (3, length), generator=generator)
    streams = torch.randn(3, length, hf.hc_count * hf.hidden_size, generator=generator)
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[0, : length // 4], mask[1, length - length // 4 :] = False, False
    lengths = mask.sum(1).cumsum(0)
    starts = torch.cat((lengths.new_zeros(1), lengths)).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    with rank_of(dims, 0, 1), torch.no_grad():
        expected = theirs(streams, tokens.where(mask, hf.eos_token_id), None, conv_mask=mask)[mask]
        ours.text.tokens = tokens
        ours.text.note(mask, None)
        padded = ours(streams.transpose(0, 1)).transpose(0, 1)[mask]
        ours.text.tokens = tokens[mask][None]
        ours.text.note(None, packed)
        together = ours(streams[mask][:, None])[:, 0]
    for each in (padded, together):
        assert tiny.relative_error(each, expected) < 1e-6


def test_embeddings_of_ngrams_need_tokens_and_rows_on_each_rank():
    hf, dims = CASES["qwen4_exp_text"], ParallelDims()
    with pytest.raises(MeshError, match="must have the first 2 layers, of which the last has embeddings of n-grams"):
        mb.to_transformer_config(hf, dims=ParallelDims(pp=4))
    odd = with_fields(hf, {"make_ngram_vocab_size_divisible_by": 3})
    with pytest.raises(MeshError, match="tp=2 must divide make_ngram_vocab_size_divisible_by=3"):
        mb.to_transformer_config(odd, dims=ParallelDims(tp=2, sp=True))
    with pytest.raises(ConfigError, match=r"'full' for layers .* or from n-grams"):
        mb.to_layer_spec(hf, backend="torch", overrides=WHOLE)
    with rank_of(dims, 0, 1):
        (model,) = mb.build_model(hf, dims=dims, device="cpu", dtype=torch.float32, load_weights=random_state(hf))
        with pytest.raises(ConfigError, match="must embed its tokens in this model, because some layers have embed"):
            model(None, torch.arange(7)[None], None, decoder_input=torch.zeros(7, 1, hf.hidden_size))


def test_the_published_config_of_qwen_is_read_and_written_back():
    """The sizes and names of Qwen3.8-Flash-Next: every fourth layer of 48 has attention, and the second n-grams."""
    heads = {"num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 48}
    experts = {"num_experts": 512, "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640}
    indexer = {"n_heads": 4, "kv_heads": 1, "head_dim": 128, "budget": 2048, "compress_ratio": 4}
    ngrams = {"ple_layer_ids": [2], "split_ngram_parts": 128, "eos_token_id": 248044, "output_gate_type": "sigmoid"}
    mtp = {"mtp_num_hidden_layers": 1, "mtp": {"hybrid": True, "num_hidden_layers": 1}, "mamba_ssm_dtype": "float32"}
    angles = {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    hf = type(CASES["qwen4_exp_text"])(
        **{**heads, **experts, **ngrams, **mtp, "hidden_size": 2560, "num_hidden_layers": 48, "vocab_size": 248320},
        **{f"indexer_{name}": size for name, size in indexer.items()},
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, **angles},
    )
    config = mb.to_transformer_config(hf, dims=ParallelDims(tp=2, sp=True, ep=8, pp=4), strict_config=True)
    assert (config.mhc_num_residual_streams, config.mhc_rank, config.delta_gate_activation) == (4, 320, "sigmoid")
    assert (config.dsa_indexer_pool, config.dsa_indexer_topk) == (4, 2048)
    rows = config.ngrams.rows_of_shards(0)
    assert (len(rows), set(rows), config.ngrams.rows(0)) == (128, {2500012}, 320001536)
    table = architecture_of(hf).fields
    back = to_hf_config(config, to_gpt_arguments(hf, table), table)
    assert {name: hf.to_dict()[name] for name in back} == back
    assert mb.supports(hf).parameters == 176_943_899_555  # those and integers of hashes, in transformers' model
