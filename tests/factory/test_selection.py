"""Selections of blocks: loss and gradients on every mesh against transformers', recomputation, and what is selected."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.layer_kinds import layer_config
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules import selection
from tests import zoo
from tests.support.fake_mesh import rank_of
from tests.support.strategies import random_state
from tests.support.training import MESHES_WITH_EXPERTS, Kind, check_recompute

CASES = {name: case.hf for name, case in zoo.cases().items() if case.model_type == "minimax_m3_vl_text"}
pytestmark = pytest.mark.skipif(not CASES, reason="the installed transformers lacks the family")
KIND = Kind(CASES, MESHES_WITH_EXPERTS, every=2)


@pytest.mark.parametrize("world_size", MESHES_WITH_EXPERTS)
def test_every_mesh_trains_as_transformers_does(world_size, tmp_path):
    KIND.check(world_size, tmp_path)


def test_gradients_keep_their_bits_if_layers_are_recomputed(tmp_path):
    check_recompute(CASES["minimax_m3_vl_text"], ["moe", "mlp"], tmp_path)


@pytest.mark.parametrize("name", ["minimax_m3_vl_text", "minimax_m3_vl_text-heads"])
def test_blocks_begin_with_the_first_token_of_a_padded_row(name):
    """transformers' indexer says which keys each query selects. It gets a row that is padded on the left without it."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer, MiniMaxM3VLTextModel

    hf, dims, length, padding = CASES[name], ParallelDims(), 23, 5
    with rank_of(dims, 0, 1):
        (model,) = mb.build_model(hf, dims=dims, device="cpu", dtype=torch.float32, load_weights=random_state(hf))
    attention = model.decoder.layers[1].self_attention
    core, theirs = attention.core_attention, MiniMaxM3VLIndexer(hf, 1)
    own = core.indexer.state_dict()
    names = {"q_proj.weight": "linear_wq.weight", "k_proj.weight": "linear_wk.weight"}
    theirs.load_state_dict({name: own[names.get(name, name)] for name in theirs.state_dict()})
    hidden = torch.randn(3, length, hf.hidden_size, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[0, :padding], mask[1, length - padding :] = False, False
    rope = MiniMaxM3VLTextModel(hf).rotary_emb
    with torch.no_grad():
        indexed = core.indexer(
            *(hidden.transpose(0, 1),) * 2,
            lambda heads: selection.in_halves(heads, model.rotary_pos_emb(length), None, 1.0, core.cp_group),
        )
        found = ~core._unselected(indexed, mask)
        for row, first in enumerate((padding, 0, 0)):
            states, places = hidden[row : row + 1, first:], torch.arange(length - first)[None]
            chosen = theirs(states, rope(states, places), None, places)
            bias = theirs.build_block_mask(chosen, None, length - first, torch.float32, states.device, places)
            tokens = mask[row, first:]
            assert torch.equal(found[row, :, first:, first:][:, tokens], (bias == 0)[0][:, tokens])
            assert not found[row, :, first:, :first].any()
    causal = torch.ones(length, length).tril().bool()
    assert found[2].sum() < causal.sum() * hf.num_attention_heads  # more keys than blocks hold


def test_the_published_config_of_minimax_is_read_and_written_back():
    """The sizes and names of MiniMax-M3. transformers has made its own fields of ``sparse_attention_config``."""
    later = [0] * 3 + [1] * 57
    given = {"sparse_attention_freq": later, "sparse_num_index_heads": 4, "sparse_index_dim": 128}
    given |= {"sparse_block_size": 128, "sparse_topk_blocks": 16, "sparse_local_block": 1}
    switches = dict.fromkeys(("use_gemma_norm", "use_qk_norm", "use_routing_bias"), True)
    more = {"hidden_act": "swigluoai", "first_k_dense_replace": 3, "partial_rotary_factor": 0.5, "n_shared_experts": 1}
    hf = type(CASES["minimax_m3_vl_text"])(sparse_attention_config=given, moe_layer_freq=later, **switches, **more)
    config = mb.to_transformer_config(hf, dims=ParallelDims(tp=4, sp=True, ep=8, pp=4))
    assert [layer_config(config, number).dsa_indexer_topk for number in (2, 3)] == [None, 16]
    table = architecture_of(hf).fields
    back = to_hf_config(config, to_gpt_arguments(hf, table), table)
    assert {name: getattr(hf, name, back[name]) for name in back} == back
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(hf)
    tensors = [*theirs.parameters(), *theirs.buffers()]
    assert mb.supports(hf).parameters == sum(each.numel() for each in tensors if each.ndim > 1 or each.numel() >= 128)
    overlap = {"moe_shared_expert_overlap": True}
    with pytest.raises(ConfigError, match="moe_shared_expert_overlap must be False"):
        mb.to_transformer_config(hf, overrides=overlap)
