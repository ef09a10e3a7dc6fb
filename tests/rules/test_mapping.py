"""Rules and canonical names: exactly one rule for each parameter, and both directions from one table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_bridge.errors import MappingError
from mcore_bridge.models.blocks import GQA, MLA, NORMS, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, SWIGLU_BIAS, decoder
from mcore_bridge.models.blocks_sparse import INDEXER
from mcore_bridge.rules.layout import QK, QKV, REPLICATED
from mcore_bridge.rules.mapping import WeightMapping, numbered, of_layers, table, under
from mcore_bridge.rules.names import Numbering, canonical, fused_norms, plain_key
from mcore_bridge.rules.variants import LM_HEAD, tied_lm_head

RULES = decoder(NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, SWIGLU, SWIGLU_BIAS)
MAPPING = WeightMapping((*RULES, *LM_HEAD), ignored=("*.inv_freq",))


def test_braces_list_the_parts_in_order():
    binding = MAPPING.bind("decoder.layers.7.self_attention.linear_qkv.weight")
    assert binding.hf == tuple(f"model.layers.7.self_attn.{x}_proj.weight" for x in "qkv")


@given(st.sampled_from(MAPPING.rules), st.integers(0, 200))
def test_every_name_of_a_binding_leads_back_to_its_parameter(rule, number):
    mcore = rule.mcore.replace("*", str(number))
    for name in MAPPING.bind(mcore).hf:
        assert MAPPING.consumers(name) == (mcore,)


@given(st.integers(0, 90), st.integers(0, 300))
def test_offsets_and_two_numbers_invert(layer, expert):
    rules = under(
        "mtp.layers.*", "model.layers.*", under("experts.*", "mlp.experts.*", table(("a", "{x,y}", REPLICATED)))
    )
    mapping = WeightMapping(under("deep", "top", rules))
    assert mapping.bind(f"deep.mtp.layers.{layer}.experts.{expert}.a").hf[1] == (
        f"top.model.layers.{layer}.mlp.experts.{expert}.y"
    )
    shifted = WeightMapping(numbered(under("mtp.*", "model.*", table(("a", "b", REPLICATED))), offset=61))
    (name,) = shifted.bind(f"mtp.{layer}.a").hf
    assert name == f"model.{layer + 61}.b"
    assert shifted.consumers(name) == (f"mtp.{layer}.a",)
    assert shifted.consumers("model.60.b") == ()


def test_a_tied_head_is_read_and_not_exported():
    mapping = WeightMapping((*RULES, *tied_lm_head(RULES)))
    binding = mapping.bind("output_layer.weight")
    assert binding.hf == ("model.embed_tokens.weight",)
    assert not binding.exported
    assert set(mapping.consumers("model.embed_tokens.weight")) == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }


def test_a_parameter_without_a_rule_raises_with_the_nearest_rules():
    with pytest.raises(
        MappingError, match=r"decoder\.layers\.3\.self_attention\.linear_qkv\.wight.*linear_qkv\.weight"
    ):
        MAPPING.bind("decoder.layers.3.self_attention.linear_qkv.wight")


def test_a_rule_has_as_many_numbers_on_both_sides():
    for rule in (("layers.*.a", "b", REPLICATED), ("a", "layers.*.b", REPLICATED)):
        with pytest.raises(MappingError, match=r"must have as many numbers \('\*'\) as its HF names"):
            WeightMapping(table(rule))


def test_two_rules_for_one_parameter_raise():
    with pytest.raises(MappingError, match="must have one rule, found two"):
        WeightMapping((*RULES, *RULES))


def test_ignored_names_are_patterns_and_count_case():
    assert MAPPING.is_unused("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not MAPPING.is_unused("model.layers.0.self_attn.rotary_emb.INV_FREQ")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "decoder.layers.9.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_bias", "decoder.layers.4.input_layernorm.bias"),
        ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.9.mlp.linear_fc1.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        ("output_layer.weight", "output_layer.weight"),
        (
            "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.bias",
            "decoder.layers.9.mlp.experts.7.linear_fc2.bias",
        ),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight0", "decoder.layers.4.mlp.experts.6.linear_fc1.weight"),
        (
            "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
            "decoder.layers.4.mlp.shared_experts.linear_fc1.weight",
        ),
    ],
)
def test_canonical_names_are_global_and_unfused(name, expected):
    assert canonical(name, Numbering((4, 9), (6, 7))) == expected


@given(st.sampled_from([rule.mcore for rule in MAPPING.rules]), st.permutations(range(6)))
def test_canonical_is_injective_on_any_placement_of_layers(pattern, numbers):
    names = {canonical(pattern.replace("*", str(local)), Numbering(tuple(numbers))) for local in range(6)}
    assert len(names) == (6 if "*" in pattern else 1)


def test_norms_of_latents_are_apart_where_an_indexer_reads_what_they_give():
    dense, sparse = ({rule.mcore.rpartition(".")[0] for rule in (*MLA, *SWIGLU, *more)} for more in ((), INDEXER))
    assert fused_norms(sparse) == {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    assert len(fused_norms(dense)) == 3
    assert all(plain_key(f"{fused}bias") == f"{norm}bias" for norm, fused in fused_norms(dense).items())


def test_rules_of_some_layers_have_no_tensors_of_others():
    shared = table(("linear_qk.weight", "{q,k}_proj.weight", QK))
    own = table(("linear_qkv.weight", "{q,k,v}_proj.weight", QKV))
    mapping = WeightMapping(under("decoder.layers.*", "layers.*", of_layers(shared, [1]), of_layers(own, [0, 2])))
    assert mapping.consumers("layers.1.q_proj.weight") == ("decoder.layers.1.linear_qk.weight",)
    assert mapping.consumers("layers.2.q_proj.weight") == ("decoder.layers.2.linear_qkv.weight",)
    assert mapping.consumers("layers.1.v_proj.weight") == ()
    names = [name for name in mapping.names(3, 0) if "v_proj" in name]
    assert names == ["layers.0.v_proj.weight", "layers.2.v_proj.weight"]
