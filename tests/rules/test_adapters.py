"""Adapters follow the rules of weights: the layout changes ``B A`` by changing B alone or A alone."""

import re

import peft
import pytest
import torch
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS_OF_PEFT
from transformers import AutoModelForCausalLM

from mcore_bridge import mapping, to_transformer_config
from mcore_bridge.architecture import architecture_of
from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.adapters import DEFAULT_TARGETS, LINEAR, adapter_rules, all_linear, base_name, rows_of_parts
from mcore_bridge.rules.layout import TRANSPOSED, Chain
from mcore_bridge.rules.mapping import pattern_of
from mcore_bridge.rules.trace import trace
from mcore_bridge.rules.variants import fused, with_joined_stacks
from mcore_bridge.weights.bound import axes_of_config
from mcore_bridge.weights.peft.peft_config import STACKS, PeftNames
from mcore_bridge.weights.source.source import Source
from tests import zoo
from tests.support.strategies import random_state
from tests.support.twins import TWINS

RANK = 3
WITHOUT = (
    *(".router", ".router.gate", "shared_expert_gate", ".gate.wg", ".out_proj", "_latent_proj"),
    *(".indexer.wq_b", ".indexer.wk", ".indexer.weights_proj", ".f_b_proj", ".g_b_proj"),
    *(".indexer.kv_proj", ".indexer.q_b_proj", ".indexer.gate_proj", ".scorer.weights_proj", ".o_a_proj", ".r_proj"),
    *(".indexer.q_proj", ".indexer.k_proj", ".indexer.index_qk_proj"),
    *(".input_mix_weight_down", ".input_mix_weight_up", ".block_inject_weight", ".ple.key_proj", ".ple.value_proj"),
)
"""Linear layers of transformers without an adapter here: routers, gates, what kernels of Mamba-2 read, indexers,
layers behind narrow inputs of Kimi delta attention, a layer of groups of heads, a layer of scores by distance, gates
of residual streams, and layers behind embeddings of n-grams.
"""
JOINED = {"minimax_m3_vl_text": (".gate_proj", ".up_proj", ".gate_up_proj")}
"""Layers that files have apart, and transformers as one: of dense MLPs and shared experts. peft finds none of them."""


def projection(name):
    """The HF module of a weight, or of its adapter."""
    return base_name(name).removesuffix(".weight")


def adaptable(rules):
    """The weights among ``rules`` that have adapters, each with its two rules: for all parts, and for some parts."""
    present = {rule.mcore.split(".")[-2] for rule in rules if rule.mcore.endswith(".weight") and "." in rule.mcore}
    if any(rule.hf[0].endswith((".mixer.out_proj.weight", ".mamba.out_proj.weight")) for rule in rules):
        with pytest.raises(ConfigError, match="peft refuses it"):
            adapter_rules(rules, ["out_proj"])
        present -= {"out_proj"}
    for module in sorted(present - LINEAR - {"out_proj"}):
        with pytest.raises(ConfigError, match=f"'{module}'.* cannot have an adapter|{module}' is a layer of MTP"):
            adapter_rules(rules, [module])
    made = adapter_rules(rules, sorted(present & LINEAR))
    of = {rule.mcore: rule for rule in rules if not rule.copy}
    for first, second in zip(made[::2], made[1::2], strict=True):
        rule = of[first.mcore.replace(".adapter.linear_in", "")]
        yield rule, first, second
        for some in ((rule.hf[0],), (rule.hf[-1],), (rule.hf[0], rule.hf[-1])) if len(rule.hf) > 1 else ():
            module = rule.mcore.removesuffix("weight")  # the HF names may be names of other attention, too
            made = adapter_rules(rules, list(map(projection, some)))
            yield rule, *(own for own in made if own.mcore.startswith(module))


def joined(state):
    """The tensors, with one stack of gate and up where a file has two, as in the memory of transformers."""
    pairs = {name: name.replace(".gate_proj.", ".up_proj.") for name in state if name.endswith(".moe.gate_proj.weight")}
    stacks = {name: torch.cat((state[name], state[up]), 1) for name, up in pairs.items()}
    return {
        **{name: state[name] for name in state},
        **{name.replace("gate_proj.weight", "gate_up_proj"): stack for name, stack in stacks.items()},
    }


def parts_of(rule, state):
    """The HF tensors of the first layer and expert that has them, and the number of this layer."""
    pattern = re.escape(rule.hf[0].removesuffix("[*]")).replace(r"\*", r"(\d+)")
    found = next((match for name in state if (match := re.fullmatch(pattern, name))), None)
    if found is None:  # no layer is of this kind
        return (), ""
    names = []
    for name in rule.hf:
        head, *tails = name.removesuffix("[*]").split("*")
        names.append(head + "".join(number + tail for number, tail in zip(found.groups(), tails, strict=True)))
    tensors = (state[name][0] if rule.hf[0].endswith("[*]") else state[name] for name in names)
    return tuple(tensors), next(iter(found.groups()), "")


@pytest.mark.parametrize("name", sorted({case.model_type: name for name, case in zoo.cases().items()}.values()))
def test_the_layout_of_a_product_is_that_of_its_factors(name):
    hf = zoo.cases()[name].hf
    state, rules, seen = random_state(hf), with_joined_stacks(mapping(hf).rules), 0
    state = joined(Source(state).for_model(mapping(hf)))
    sizes = axes_of_config(to_transformer_config(hf), vocab=hf.vocab_size, padded_vocab=hf.vocab_size)
    for tp in (1, 2):
        for rule, first, second in adaptable(rules):
            parts, layer = parts_of(rule, state)
            if not parts:
                continue
            axes = (sizes | {"tp": tp, "etp": tp}).of(rule.mcore.replace("*", layer, 1), rule.axis)
            turn = isinstance(rule.layout, Chain) and rule.layout.steps[0] == TRANSPOSED
            shapes = [part.mT.shape if turn else part.shape for part in parts]
            named = [part for part, name in enumerate(rule.hf) if projection(name) in map(projection, first.hf)]
            a = tuple(torch.randn(RANK, shapes[part][1], dtype=torch.float64) for part in named)
            b = tuple(torch.randn(shapes[part][0], RANK, dtype=torch.float64) for part in named)
            changed = dict(zip(named, (y @ x for x, y in zip(a, b, strict=True)), strict=True))
            deltas = [changed.get(i, torch.zeros(shape).double()) for i, shape in enumerate(shapes)]
            deltas = tuple(delta.mT if turn else delta for delta in deltas)
            (whole,), (ins,), (outs,) = rule.layout(deltas, axes), first.layout(a, axes), second.layout(b, axes)
            traced = trace(second.layout, outs.shape[1:], axes)
            for shard in range(tp):
                of_rows = rows_of_parts(traced, shard)
                own = ins[shard].unflatten(0, (-1, RANK))[of_rows] * (of_rows >= 0)[:, None, None]
                torch.testing.assert_close(torch.einsum("or,ori->oi", outs[shard], own), whole[shard])
            seen += 1
    assert seen >= 4  # at both sizes, attention at least


@pytest.mark.skipif(not zoo.NEWEST, reason="transformers 4 has other names in memory")
@pytest.mark.parametrize("name", sorted({case.model_type: name for name, case in zoo.cases().items()}.values()))
def test_peft_finds_what_has_adapters(name):
    hf = zoo.cases()[name].hf
    if hf.model_type in TWINS:
        pytest.skip("transformers has no such family")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    found = {*map(pattern_of, dict(model.named_modules())), *map(pattern_of, dict(model.named_parameters()))}
    naming = PeftNames(STACKS, renamed=architecture_of(hf).renamed_in_memory)
    rules, state = with_joined_stacks(mapping(hf).rules), joined(random_state(hf))
    present = {rule for rule, *_ in adaptable(rules) if parts_of(rule, state)[0]}
    names = {naming.in_memory(projection(name)) for rule in fused(tuple(present)) for name in rule.hf}
    assert names
    joined_there = JOINED.get(hf.model_type, ())
    assert {name for name in names if not name.endswith(joined_there)} <= found, names - found
    theirs = _maybe_include_all_linear_layers(peft.LoraConfig(target_modules="all-linear"), model).target_modules
    ours = {naming.in_memory(module) for module in all_linear(fused(rules))} & found
    further = {name for name in {*map(pattern_of, theirs)} - ours if not name.endswith(WITHOUT + joined_there)}
    assert (further, ours - {*map(pattern_of, theirs)}) == (set(), set())
    assert DEFAULT_TARGETS.get(hf.model_type) == _tuple(DEFAULTS_OF_PEFT.get(hf.model_type))


def _tuple(names):
    return None if names is None else tuple(names)


def test_names_are_those_of_peft_in_either_format():
    rules = mapping(zoo.cases()["qwen3_moe"].hf).rules
    made = {
        rule.mcore: rule for rule in adapter_rules(fused(rules), ["q_proj", "k_proj", "v_proj", "experts.down_proj"])
    }
    layer, hf = "decoder.layers.*", "model.layers.*"
    assert (
        made[f"{layer}.self_attention.linear_qkv.adapter.linear_in.weight"].hf[1]
        == f"{hf}.self_attn.k_proj.lora_A.weight"
    )
    down = made[f"{layer}.mlp.experts.*.linear_fc2.adapter.linear_out.weight"]
    assert down.hf == (f"{hf}.mlp.experts.down_proj.lora_B.weight[*]",)
    assert down.axis == "etp"
    assert base_name(down.hf[0]) == f"{hf}.mlp.experts.down_proj"


def test_what_cannot_be_adapted_is_refused_by_name_all_at_once():
    rules = mapping(zoo.cases()["qwen3_moe"].hf).rules
    with pytest.raises(ConfigError) as caught:
        adapter_rules(rules, ["mlp.gate", "embed_tokens", "input_layernorm", "lm_head", "q_prj"])
    text = str(caught.value)
    for word in ("'q_prj' matches no module", "embed_tokens", "mlp.gate", "input_layernorm", "lm_head"):
        assert word in text
