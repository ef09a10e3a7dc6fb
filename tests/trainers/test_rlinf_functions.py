"""The functions of RLinf's resharder, made from our rules: against slices of HF tensors, and against RLinf's own."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge import EngineRank, ParallelDims
from mcore_bridge.errors import ConfigError, MappingError, MeshError
from mcore_bridge.rules.mapping import matches
from mcore_bridge.trainers.rlinf.functions import ReshardFunctions
from mcore_bridge.trainers.rlinf.rules import convertor_rules
from tests.support import pool
from tests.support.rlinf_models import LATENT, SPARSE, TIED
from tests.support.strategies import random_state, tiny
from tests.support.target_models import assert_gets, expected

DENSE = tiny("qwen2", vocab_size=256, num_key_value_heads=4)
LAYER = r"decoder\.layers\.(?P<i>\d+)\."
HF_LAYER = r"model.layers.\g<i>."
EITHER = r"\.(?P<wb>weight|bias)$"
QWEN2_5 = {  # RLinf 0.3.0 and 0.4.0, Qwen25Convertor.build_rules: pattern, transform, targets
    r"embedding\.word_embeddings\.weight$": ("split_none", ["model.embed_tokens.weight"]),
    r"decoder\.final_layernorm\.weight$": ("split_none", ["model.norm.weight"]),
    r"output_layer\.weight$": ("split_none", ["lm_head.weight"]),
    rf"{LAYER}self_attention\.linear_qkv\.layer_norm_weight$": ("split_none", [f"{HF_LAYER}input_layernorm.weight"]),
    rf"{LAYER}self_attention\.linear_qkv{EITHER}": (
        "split_qkv",
        [rf"{HF_LAYER}self_attn.{part}_proj.\g<wb>" for part in "qkv"],
    ),
    rf"{LAYER}self_attention\.linear_proj{EITHER}": ("split_none", [rf"{HF_LAYER}self_attn.o_proj.\g<wb>"]),
    rf"{LAYER}mlp\.linear_fc1{EITHER}": (
        "split_fc1",
        [rf"{HF_LAYER}mlp.{part}_proj.\g<wb>" for part in ("gate", "up")],
    ),
    rf"{LAYER}mlp\.linear_fc2{EITHER}": ("split_none", [rf"{HF_LAYER}mlp.down_proj.\g<wb>"]),
    rf"{LAYER}mlp\.linear_fc1\.layer_norm_weight$": ("split_none", [f"{HF_LAYER}post_attention_layernorm.weight"]),
}


def told(rules):
    return {rule.pattern.pattern: (rule.transform.value, list(rule.targets)) for rule in rules}


def test_the_rules_of_qwen_are_those_of_rlinf():
    rules = convertor_rules(DENSE)
    assert len(rules) == len(QWEN2_5)
    assert told(rules) == QWEN2_5


def test_the_rules_of_qwen_are_those_of_the_installed_rlinf():
    theirs = pytest.importorskip("rlinf.utils.convertor.utils", reason="rlinf is not installed: it needs ray and more")
    assert told(theirs.Qwen25Convertor(None).rules) == told(convertor_rules(DENSE))


@pytest.mark.parametrize("hf", [SPARSE, LATENT], ids=["qwen3_moe", "deepseek_v3"])
def test_every_name_matches_one_rule_and_all_tensors_are_named(hf):
    """The names of a model with TransformerEngine and separate experts, which RLinf's convertors expect."""
    rules = convertor_rules(hf)
    state = random_state(hf)
    found = set()
    for layer in range(hf.num_hidden_layers):
        for rule in rules:
            for expert in range(8):
                name = rule.pattern.pattern.replace(r"(?P<i>\d+)", str(layer)).replace(r"(?P<ei>\d+)", str(expert))
                name = name.replace("(?P<wb>weight|bias)", "weight").replace("\\", "").removesuffix("$")
                hits = [each for each in rules if each.pattern.fullmatch(name)]
                assert hits == [rule]
                found.update(rule.pattern.fullmatch(name).expand(target) for target in rule.targets)
    assert state.keys() <= found


def test_a_layout_that_rlinf_has_no_transform_for_is_refused():
    hf = tiny("phi3", num_key_value_heads=2, pad_token_id=0)
    with pytest.raises(ConfigError, match="use our resharder"):
        convertor_rules(hf)
    with pytest.raises(ConfigError, match="use our resharder"):
        ReshardFunctions(SimpleNamespace(), hf=hf)


# functions ------------------------------------------------------------------------------------------------------------


def fused(name):
    """The name that a parameter has with TransformerEngine's modules."""
    for plain, linear in (
        ("input_layernorm", "self_attention.linear_qkv"),
        ("pre_mlp_layernorm", "mlp.linear_fc1"),
    ):
        name = name.replace(f"{plain}.weight", f"{linear}.layer_norm_weight")
    return name


def built(hf, dims):
    dims.initialize(device="cpu")
    state = random_state(hf)
    models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
    own = {name: t for name, t in models[0].state_dict().items() if isinstance(t, torch.Tensor)}
    own = {name if SPARSE is hf else fused(name): tensor for name, tensor in own.items()}
    return models, state, own


def subgroup(size):
    """RLinf's groups: neighbouring ranks."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)]
    return groups[dist.get_rank() // size]


def dense_functions():
    models, state, own = built(DENSE, ParallelDims(tp=4, sp=True))
    config, rank, world = models[0].config, dist.get_rank(), dist.group.WORLD
    for tp in (1, 2, 4):
        functions = ReshardFunctions(config, hf=DENSE, reshard_tp_size=tp)
        joined = functions.tp_reshard_fn(dict(own), 4 // tp, subgroup(4 // tp))
        here = EngineRank(tp=tp, tp_rank=rank // (4 // tp))
        assert_gets(functions.convert_fn(joined), expected(DENSE, state, here))
        there = EngineRank(tp=tp, tp_rank=rank % tp)
        ranked = functions.tp_reshard_rank_fn(dict(own), world, rank % tp, tp)
        assert_gets(functions.convert_fn(ranked), expected(DENSE, state, there))
        theirs = their_functions("qwen2.5", config, tp)
        if theirs is not None:
            again = theirs.tp_reshard_fn(dict(own), 4 // tp, subgroup(4 // tp))
            assert_gets(joined, again)
            assert_gets(functions.convert_fn(joined), theirs.convert_fn(again))
    functions = ReshardFunctions(config, hf=DENSE, reshard_tp_size=4)
    kept = functions.tp_gather_fn(own, world, "attn", tp_gather_is_identity=True)
    assert {spec for _, spec in kept.values()} == {None}
    values = {name: value for name, (value, _) in kept.items()}
    assert_gets(functions.convert_fn(values), expected(DENSE, state, EngineRank(tp=4, tp_rank=rank)))
    assert not {t.data_ptr() for t in values.values()} & {t.data_ptr() for t in own.values()}
    gathered = functions.tp_gather_fn(own, world, "dense")
    name = "decoder.layers.1.mlp.gate_proj.weight"
    assert torch.equal(gathered[name][0], state["model.layers.1.mlp.gate_proj.weight"])
    assert gathered[name][1] == ("slice", 0, "dense")
    whole = functions.tp_gather_fn(own, world, "dense", split_fc1=False)
    assert "decoder.layers.1.mlp.linear_fc1.weight" in whole
    with pytest.raises(MeshError, match="merge_factor must be the size of tp_group, 4, found 2"):
        functions.tp_reshard_fn(own, 2, world)
    with pytest.raises(MeshError, match="3 ranks must divide dim 0"):
        functions.tp_reshard_rank_fn(own, world, 0, 3)
    with pytest.raises(MappingError, match="no rule"):
        functions.convert_fn({"decoder.layers.0.nothing.weight": torch.zeros(1)})


def their_functions(model_type, config, tp):
    """RLinf's own functions, if RLinf is installed. It is no dependency of the tests, as it needs ray and more."""
    try:
        from rlinf.utils.resharding.reshard_config import ReshardConfig
    except ImportError:
        return None
    return ReshardConfig(model_type=model_type, model_config=config, reshard_tp_size=tp)


def test_dense_functions_give_what_each_rank_of_the_engine_holds():
    pool.run(4, dense_functions)


def sparse_functions():
    models, state, own = built(SPARSE, ParallelDims(tp=2, etp=2, sp=True))
    config, rank, world = models[0].config, dist.get_rank(), dist.group.WORLD
    functions = ReshardFunctions(config, hf=SPARSE, reshard_tp_size=2)
    experts = {name: t for name, t in own.items() if matches(name, ["*.local_experts.*"])}
    assert len(experts) == SPARSE.num_hidden_layers * 8 * 2
    for tp in (1, 2, 4):
        cut = functions.tpe_reshard_fn(own, 2, world, tp, rank % tp)
        assert all(cut[name] is own[name] for name in own.keys() - experts.keys())
        wanted = expected(SPARSE, state, EngineRank(tp=tp, tp_rank=rank % tp))
        found = functions.convert_fn({name: cut[name] for name in experts})
        assert_gets(found, {name: t for name, t in wanted.items() if ".experts." in name})
        theirs = their_functions("qwen3_moe", config, 2)
        if theirs is not None:
            assert_gets(cut, theirs.tpe_reshard_fn(dict(own), 2, world, tp, rank % tp))
    halves = [functions.ep_reshard_fn(experts, 2, half, 8) for half in range(2)]
    assert halves[0].keys() | halves[1].keys() == experts.keys()
    for first, half in zip((0, 4), halves, strict=True):
        assert {int(name.split(".local_experts.")[1].split(".")[0]) for name in half} == {*range(first, first + 4)}
    with pytest.raises(MeshError, match="rollout_ep_size must divide 8 experts, found 3"):
        functions.ep_reshard_fn(experts, 3, 0, 8)


def test_functions_of_experts_give_what_each_rank_of_the_engine_holds():
    pool.run(2, sparse_functions)


def stages():
    models, state, own = built(TIED, ParallelDims(pp=2, num_layers_in_first_pipeline_stage=3))
    functions = ReshardFunctions(models[0].config, hf=TIED)
    found = functions.pp_reshard_fn(own, dist.group.WORLD, torch.float16)
    assert found.keys() - own.keys() == {
        *(["decoder.final_layernorm.weight", "output_layer.weight"] if dist.get_rank() == 0 else ()),
        *(["embedding.word_embeddings.weight"] if dist.get_rank() == 1 else ()),
    }
    converted = functions.convert_fn({name: t for name, t in found.items() if "layers" not in name})
    assert_gets(converted, {name: state[name] for name in ("model.embed_tokens.weight", "model.norm.weight")})


def test_what_is_in_one_stage_alone_reaches_all_of_them():
    pool.run(2, stages)
