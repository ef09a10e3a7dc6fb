"""Residual streams: loss and gradients on every mesh against transformers', recomputation, and what is refused."""

import re
from unittest import mock

import pytest
import torch
from torch import nn

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config
from mcore_bridge.errors import ConfigError, MeshError
from mcore_bridge.factory.modules import streams
from tests import zoo
from tests.support import pool, stepping, tiny
from tests.support.fake_mesh import rank_of
from tests.support.training import Kind, check_recompute

FAMILIES = ("hy_v4", "glm5_next_text")
CASES = {name: case.hf for name, case in zoo.cases().items() if case.model_type in FAMILIES}
pytestmark = pytest.mark.skipif(not CASES, reason="the installed transformers lacks the family")
MESHES = {
    1: [{}],
    2: [{"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2, "layout": "balanced"}, {"ep": 2}],
    4: [
        {"tp": 4, "sp": True},
        {"tp": 2, "cp": 2, "sp": True},
        {"tp": 2, "sp": True, "pp": 2, "vp": 2},
        {"tp": 2, "etp": 2, "ep": 2, "sp": True},
    ],
}


def fits(name, dims):
    """Whether each stage starts with an indexer."""
    return dims.vp == 1 or name != "hy_v4"


KIND = Kind(CASES, MESHES, every=2, fits=fits)


@pytest.mark.parametrize("world_size", MESHES)
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


def test_gradients_keep_their_bits_if_layers_are_recomputed(tmp_path):
    check_recompute(CASES["hy_v4-indexers"], ["moe", "mla_up_proj"], tmp_path)


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
