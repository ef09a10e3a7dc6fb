"""Linear attention alone: the gated delta rule, gradients on every mesh against transformers', and refusals."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.spec_utils import ModuleSpec

from mcore_bridge import ParallelDims, build_model, to_layer_spec, to_transformer_config
from mcore_bridge.config.mesh.divisibility import DELTA_CONTEXT
from mcore_bridge.config.tables.linear_attention import LINEAR_LAYERS
from mcore_bridge.errors import CheckpointError, ConfigError, MeshError
from mcore_bridge.factory.modules.mixers.delta import (
    CHUNK,
    GatedSelfAttention,
    TorchGatedDeltaNet,
    _delta_spec,
    gated_delta_rule,
)
from mcore_bridge.rules.names import Numbering, canonical
from tests import zoo
from tests.support import pool, stepping, tiny
from tests.support.fake_mesh import rank_of
from tests.support.strategies import random_state
from tests.support.training import Kind
from tests.zoo.delta import EXPERTS, delta

HF = delta("qwen3_next", **EXPERTS, mlp_only_layers=[0, 1, 2, 3], vocab_size=90).hf
LENGTH = 16


def token_by_token(query, key, value, decay, beta):
    """The formula in the docstring of the rule, one token after the other."""
    each = value.size(2) // key.size(2)
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    query, key = (part.repeat_interleave(each, dim=2) for part in (query * query.size(-1) ** -0.5, key))
    state = torch.zeros(*value[:, 0].shape[:2], key.size(-1), value.size(-1), dtype=value.dtype)
    answers = []
    for q, k, v, g, b in zip(*(part.unbind(1) for part in (query, key, value, decay.exp(), beta)), strict=True):
        state = state * g[..., None, None]
        wrong = v - torch.einsum("bnkv,bnk->bnv", state, k)
        state = state + torch.einsum("bnk,bnv->bnkv", k, b[..., None] * wrong)
        answers.append(torch.einsum("bnkv,bnk->bnv", state, q))
    return torch.stack(answers, dim=1)


@pytest.mark.parametrize("length", [2, CHUNK, 2 * CHUNK + 5])
def test_the_rule_in_chunks_is_the_rule_token_by_token(length):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, 2, 6), (2, length, 2, 6), (2, length, 4, 10), (2, length, 4), (2, length, 4)]
    query, key, value, decay, beta = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [query, key, value, -torch.nn.functional.softplus(decay), beta.sigmoid()]
    weight = torch.randn(value.shape, generator=generator)
    tiny.assert_equal_rules(inputs, weight, gated_delta_rule, token_by_token)


def is_built(sizes):
    return sizes.get("cp", 1) == 1 or DELTA_CONTEXT.is_installed


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_all_layers_may_be_of_one_kind(kind):
    hf = {"layer_types": [kind] * 3, "num_hidden_layers": 3, "hidden_act": "silu"}
    mcore = {**LINEAR_LAYERS.to_mcore(hf), "num_layers": 3}
    assert mcore["linear_attention_freq"] == ([1, 1, 1] if kind == "linear_attention" else None)
    assert LINEAR_LAYERS.to_hf(mcore) == {"layer_types": [kind] * 3}


MESHES = {
    1: [{}],
    2: [{"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}, {"pp": 2, "vp": 2}],
    4: [{"tp": 4, "sp": True}, {"tp": 4}, {"tp": 2, "cp": 2, "sp": True}, {"tp": 2, "sp": True, "pp": 2}],
}


KIND = Kind(
    {"qwen3_next": HF, **{name: zoo.cases()[name].hf for name in zoo.here(["olmo_hybrid", "olmo_hybrid-no-rope"])}},
    {size: [*filter(is_built, meshes)] for size, meshes in MESHES.items()},
    num_sequences=2,
)


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(world_size, tmp_path):
    KIND.check(world_size, tmp_path)


def loaded(hf, state):
    """Runs in a worker."""
    with (
        stepping.mesh(ParallelDims()),
        pytest.raises(
            CheckpointError,
            match=r"q_conv1d.weight has shape \(59, 1, 4\), .* takes \(48, 1, 4\).* equal parts: .*\[48, 48, 80\] rows",
        ),
    ):
        build_model(hf, dtype=torch.float32, device="cpu", load_weights=state)


@pytest.mark.parametrize("name", zoo.params(["olmo_hybrid"]))
def test_convolutions_that_transformers_cut_into_equal_parts_are_refused(name):
    """It writes such parts for values that are wider than keys: 176 rows in 59, 59 and 58, not in 48, 48 and 80."""
    hf = zoo.cases()[name].hf
    state = random_state(hf)
    names = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    state |= zip(names, torch.cat([state[part] for part in names]).chunk(3), strict=True)
    pool.run(1, loaded, hf, state)


def recomputed(folder, options):
    """Runs in each worker: gradients for each way to recompute."""
    found = []
    for overrides in options:
        with stepping.mesh(ParallelDims(tp=2, sp=True)):
            step = stepping.train(
                folder, ParallelDims(tp=2, sp=True), tiny.tokens(2, seq_len=LENGTH), overrides=overrides
            )
            found.append(step["grads"])
    return found


def test_recompute_changes_nothing(tmp_path):
    folder = str(tiny.random_checkpoint(HF, tmp_path))
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    selective = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    plain, *others = pool.run(2, recomputed, folder, [{}, full, selective])[0]
    for other in others:
        assert all(tiny.relative_error(other[name], plain[name]) < 1e-5 for name in plain)


def saved_shards():
    """Runs in each worker: how mcore's distributed checkpoint saves linear attention."""
    with stepping.mesh(ParallelDims(tp=2)):
        (model,) = build_model(HF, dims=ParallelDims(tp=2), dtype=torch.float32, device="cpu", load_weights=False)
        saved = model.decoder.layers[0].self_attention.sharded_state_dict(prefix="x.")
        parts = [part for entry in saved.values() for part in (entry.build() if hasattr(entry, "build") else [entry])]
        return {part.key: tuple(part.global_shape) for part in parts if hasattr(part, "global_shape")}


def test_saved_as_mcores_own_module_is():
    whole = {"query": 24, "key": 24, "value": 80, "z": 80, "beta": 8, "alpha": 8}
    for found in pool.run(2, saved_shards):
        assert found.pop("x.A_log") == found.pop("x.dt_bias") == (8,)
        for name, rows in whole.items():
            assert found[f"x.in_proj.weight.{name}"][-2:] == (rows, 48)
        assert found["x.conv1d.weight.value"][-3:] == (80, 1, 4)
        assert found["x.out_norm.weight"][-1:] == (10,)


def test_initial_values_are_those_of_mcore():
    """The decay is between 1 and 16, and time steps are 1. Each rank draws its own heads."""
    first, second = pool.run(2, initial)
    for log_decay, time_step, _ in (first, second):
        assert ((log_decay.exp() >= 1) & (log_decay.exp() <= 16)).all()
        assert (time_step == 1).all()
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[2], second[2])


def initial():
    """Runs in each worker: the initial values of this rank."""
    with stepping.mesh(ParallelDims(tp=2)):
        tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        (model,) = build_model(HF, dims=ParallelDims(tp=2), dtype=torch.float32, device="cpu", load_weights=False)
        attention = model.decoder.layers[0].self_attention
        return attention.A_log.detach(), attention.dt_bias.detach(), attention.conv1d.weight.detach()


def test_only_the_layers_that_the_config_names_are_linear():
    spec = to_layer_spec(HF, backend="torch")
    modules = [layer.submodules.self_attention.module for layer in spec.layer_specs]
    assert all(isinstance(layer, ModuleSpec) for layer in spec.layer_specs)
    assert modules == [TorchGatedDeltaNet, GatedSelfAttention] * 2


@pytest.mark.parametrize("sizes", [{"tp": 8}, {"tp": 4, "cp": 2}], ids=str)
def test_heads_that_the_mesh_does_not_divide_are_refused(sizes):
    with pytest.raises(MeshError, match="linear_num_key_heads=4"):
        to_transformer_config(HF, dims=ParallelDims(**sizes))


@pytest.mark.skipif(DELTA_CONTEXT.is_installed, reason="this megatron-core has it")
def test_context_parallelism_is_refused_where_megatron_core_has_none():
    with pytest.raises(MeshError, match=r"cp=2 with linear attention needs megatron-core 0\.19.*Use cp=1, or install"):
        to_transformer_config(HF, dims=ParallelDims(cp=2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads"),
        ({"attn_output_gate": False}, "attn_output_gate must be True"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        to_transformer_config(delta("qwen3_next", **{**EXPERTS, **fields}).hf)


def inference():
    with stepping.mesh(ParallelDims()):
        (model,) = build_model(HF, dtype=torch.float32, device="cpu", load_weights=random_state(HF))
        with pytest.raises(ConfigError, match="inference_context"):
            model.decoder.layers[0].self_attention(torch.zeros(4, 1, 48), None, inference_context=object())


def test_inference_is_refused():
    pool.run(1, inference)


def test_the_norm_that_te_fuses_into_the_projection_has_its_own_name():
    name = "decoder.layers.0.self_attention.in_proj.layer_norm_weight"
    assert canonical(name, Numbering((3,), ())) == "decoder.layers.3.input_layernorm.weight"


def half_precision(dtype):
    """Runs in each worker: logits in a half precision and in fp32."""
    found = []
    for each in (dtype, torch.float32):
        with stepping.mesh(ParallelDims()):
            (model,) = build_model(HF, dtype=each, device="cpu", load_weights=random_state(HF))
            places = torch.arange(LENGTH).expand(2, LENGTH)
            found.append(model.eval()(tiny.tokens(2, seq_len=LENGTH - 1), places, None).float())
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(dtype):
    ((half, whole),) = pool.run(1, half_precision, dtype)
    assert half.isfinite().all()
    assert float((half - whole).square().mean() / whole.square().mean()) < 1e-2


def test_a_model_without_storage():
    with rank_of(ParallelDims(tp=2), 0, 2):
        (model,) = build_model(HF, dims=ParallelDims(tp=2), device="meta", load_weights=False)
        assert all(parameter.is_meta for parameter in model.parameters())


def test_megatrons_own_takes_its_place_from_the_release_on_that_packs_for_it(monkeypatch):
    """With flash-linear-attention installed. Earlier releases of megatron-core refuse the inputs of ``forward``."""
    te = ModuleType("transformer_engine")
    te.TELayerNormColumnParallelLinear = te.TERowParallelLinear = object
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", te)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "fla" else find_spec(name))
    for release, module in (("0.16.1", TorchGatedDeltaNet), ("0.19.2", GatedDeltaNet)):
        monkeypatch.setattr("mcore_bridge.installed.megatron_release", lambda release=release: release)
        assert _delta_spec(to_transformer_config(HF), "te").module is module
    monkeypatch.undo()
    assert _delta_spec(to_transformer_config(HF), "torch").module is TorchGatedDeltaNet
