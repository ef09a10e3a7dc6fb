"""Kimi delta attention: the rule, loss and gradients on every mesh against transformers', keys in checkpoints."""

import json
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core import tensor_parallel

from mcore_bridge import ParallelDims, build_model, iter_hf_weights, load_hf_weights, to_transformer_config
from mcore_bridge.architecture import architecture_of, read_hf
from mcore_bridge.config.hf import with_fields
from mcore_bridge.config.mesh.divisibility import check_model
from mcore_bridge.errors import CheckpointError, ConfigError, MeshError
from mcore_bridge.factory.hybrid_support import require_hybrid
from mcore_bridge.factory.modules.mixers import kda
from mcore_bridge.factory.supports import require_supported
from mcore_bridge.weights.provenance import write_config
from tests import zoo
from tests.support import pool, stepping, tiny
from tests.support.strategies import random_state
from tests.support.training import MESHES_WITH_EXPERTS, Kind

CASES = {name: case.hf for name, case in zoo.cases().items() if case.model_type in ("kimi_linear", "bailing_hybrid")}
pytestmark = pytest.mark.skipif(not CASES, reason="the installed transformers lacks the family")
KIND = Kind(CASES, MESHES_WITH_EXPERTS, every=2)


@pytest.mark.parametrize("world_size", MESHES_WITH_EXPERTS)
def test_every_mesh_trains_as_transformers_does(world_size, tmp_path):
    KIND.check(world_size, tmp_path)


class OwnGradient(torch.autograd.Function):
    """The gather of narrow inputs, whose backward forgets the gradients that other ranks have of this rank's part."""

    @staticmethod
    def forward(ctx, narrow, group):
        ctx.start, ctx.size = group.rank() * narrow.size(-1), narrow.size(-1)
        return GATHER(narrow, group=group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.narrow(-1, ctx.start, ctx.size).contiguous(), None


GATHER = kda.all_gather_last_dim_from_tensor_parallel_region


def gradients(folder):
    """Runs in each worker: gradients with the gather, and with the mistake."""
    dims, found = ParallelDims(tp=2, sp=True), []
    for gather in (GATHER, lambda narrow, group: OwnGradient.apply(narrow, group)):
        with mock.patch.object(kda, "all_gather_last_dim_from_tensor_parallel_region", gather), stepping.mesh(dims):
            found.append(stepping.train(folder, dims, tiny.tokens(2))["grads"])
    return found


def test_gradients_would_show_a_gather_that_does_not_sum(tmp_path):
    folder = str(tiny.random_checkpoint(CASES["kimi_linear"], tmp_path))
    right, wrong = pool.run(2, gradients, folder)[0]
    for name in ("f_a_proj", "g_a_proj"):
        name = f"model.layers.0.self_attn.{name}.weight"
        assert tiny.relative_error(wrong[name], right[name]) > 0.1


def token_by_token(query, key, value, decay, beta):
    """The formula in the docstring of the rule, one token after the other."""
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    query = query * query.size(-1) ** -0.5
    state = torch.zeros(*value[:, 0].shape[:2], key.size(-1), value.size(-1), dtype=value.dtype)
    answers = []
    for q, k, v, g, b in zip(*(part.unbind(1) for part in (query, key, value, decay.exp(), beta)), strict=True):
        state = state * g[..., None]
        wrong = v - torch.einsum("bnkv,bnk->bnv", state, k)
        state = state + torch.einsum("bnk,bnv->bnkv", k, b[..., None] * wrong)
        answers.append(torch.einsum("bnkv,bnk->bnv", state, q))
    return torch.stack(answers, dim=1)


def drawn(length, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, 3, 6), (2, length, 3, 6), (2, length, 3, 10), (2, length, 3, 6), (2, length, 3)]
    query, key, value, decay, beta = (torch.randn(shape, generator=generator) for shape in shapes)
    return [query, key, value, -scale * torch.nn.functional.softplus(decay), beta.sigmoid()]


@pytest.mark.parametrize(("length", "scale"), [(2, 1.0), (kda.CHUNK, 1.0), (2 * kda.CHUNK + 5, 1.0), (40, 50.0)])
def test_the_rule_in_chunks_is_the_rule_token_by_token(length, scale):
    """Also where a channel forgets all within a token, so that decays over a chunk are zero in fp32."""
    inputs = drawn(length, scale)
    weight = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(1))
    tiny.assert_equal_rules(inputs, weight, kda.channel_delta_rule, token_by_token)


def test_the_kernel_is_used_on_a_gpu_that_has_it(monkeypatch):
    """The kernel is transformers' function of this name here, since the real one runs on GPUs alone."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as reference

    def chunk_kda(*inputs, use_qk_l2norm_in_kernel):
        return reference(*inputs, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

    assert kda.kernel_or_torch(torch.device("cpu")) is kda.channel_delta_rule
    monkeypatch.setattr(kda.importlib.util, "find_spec", lambda name: None)
    assert kda.kernel_or_torch(torch.device("cuda")) is kda.channel_delta_rule
    monkeypatch.setattr(kda.importlib.util, "find_spec", lambda name: SimpleNamespace())
    module: object = ModuleType("fla.ops.kda")
    module.chunk_kda = chunk_kda
    for name, each in {"fla": ModuleType("fla"), "fla.ops": ModuleType("fla.ops"), "fla.ops.kda": module}.items():
        monkeypatch.setitem(sys.modules, name, each)
    kda._kernel.cache_clear()
    rule = kda.kernel_or_torch(torch.device("cuda"))
    assert rule is not kda.channel_delta_rule
    inputs = drawn(37)
    assert tiny.relative_error(rule(*inputs), kda.channel_delta_rule(*inputs)) < 1e-5
    kda._kernel.cache_clear()


def built(name):
    """Runs in each worker: the entries of a mixer in mcore's distributed checkpoint, and its initial values."""
    with stepping.mesh(ParallelDims(tp=2, sp=True)):
        tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        hf, how = CASES[name], {"dtype": torch.float32, "device": "cpu", "load_weights": False}
        mixer = build_model(hf, dims=ParallelDims(tp=2, sp=True), **how)[0].decoder.layers[0].self_attention
        saved = mixer.sharded_state_dict(prefix="x.")
        parts = [part for entry in saved.values() for part in (entry.build() if hasattr(entry, "build") else [entry])]
        shapes = {part.key: tuple(part.global_shape) for part in parts if hasattr(part, "global_shape")}
        drawn = {name: value.detach() for name, value in mixer.named_parameters()}
        return {name.removeprefix("x."): shape for name, shape in shapes.items()}, drawn


NARROW = {"decay_up.weight": (48, 12), "gate_up.weight": (48, 12), "A_log": (1, 1, 4, 1)}
SAVED = {"kimi_linear": (4, 12, 12, NARROW), "bailing_hybrid": (8, 14, 112, {"A_log": (8,)})}
"""Heads, their size, the rows of decays or their narrow inputs, and shapes of parameters of their own."""


@pytest.mark.parametrize("name", SAVED)
def test_saved_part_by_part_and_drawn_on_each_rank(name):
    (shapes, first), (_, second) = pool.run(2, built, name)
    heads, dim, given, own = SAVED[name]
    inner = heads * dim
    rows = {**dict.fromkeys(("query", "key", "value"), inner), "beta": heads, "decay": given, "gate": given}
    assert {key: shapes[f"in_proj.weight.{key}"][-2:] for key in rows} == {key: (n, 48) for key, n in rows.items()}
    assert all(shapes[f"conv1d.weight.{key}"][-3:] == (inner, 1, 3) for key in ("query", "key", "value"))
    own = {**own, "dt_bias": (inner,)}
    whole = {**own, "out_norm.weight": (dim,), "out_proj.weight": (48, inner)}
    assert {key: shape for key, shape in shapes.items() if key.count(".") < 2 and "extra" not in key} == whole
    assert 0 <= first["A_log"].min() <= first["A_log"].max() <= 2.8  # the log of 1 to 16
    steps = torch.nn.functional.softplus(first["dt_bias"])
    assert 0.9e-3 < steps.min() < steps.max() < 0.11
    assert all(not torch.equal(first[name], second[name]) for name in own)


def test_refused_and_overridden():
    kinds = {"num_layers": 1, "layer_kinds": ("K-",), "linear_num_key_heads": 6, "linear_key_head_dim": 8}
    with pytest.raises(MeshError, match="tp=4 must divide linear_num_key_heads=6"):
        check_model(ParallelDims(tp=4, sp=True), kinds)
    with pytest.raises(MeshError, match="tp=3 must divide linear_key_head_dim=8"):
        check_model(ParallelDims(tp=3, sp=True), kinds)
    hf = CASES["kimi_linear"]
    with pytest.raises(ConfigError, match="Kimi delta attention, and HybridModel has no layer for them"):
        require_hybrid(architecture_of(hf), to_transformer_config(hf), positions="none", vision="text_only")
    config = to_transformer_config(hf, overrides={"num_layers": 2, "linear_key_head_dim": 16})
    assert config.layer_kinds[:2] == ("K-", "*E")
    assert config.linear_key_head_dim == 16


def loaded(name, state, others):
    """Runs in a worker: whether the model holds ``state`` after a load of each of the others, or the error."""
    found = []
    with stepping.mesh(ParallelDims()):
        for other in others:
            (model,) = build_model(zoo.cases()[name].hf, dtype=torch.float32, device="cpu", load_weights=False)
            for source in (other, iter([*other.items()])):
                try:
                    load_hf_weights([model], source)
                except CheckpointError as error:
                    found.append(str(error))
                else:
                    found.append(all(torch.equal(value, state[name]) for name, value in iter_hf_weights([model])))
    return found


SECOND = {
    "kimi_linear": (".mlp.", ".block_sparse_moe.", "layers.0.mlp.up_proj.weight"),
    "bailing_hybrid": (".attention.o_proj.", ".attention.dense.", "layers.0.attention.o_proj.weight"),
    "olmo_hybrid": (".attention_layer_norm.", ".input_layernorm.", "layers.0.attention_layer_norm.weight"),
}
"""Parts of published names and of the names that transformers writes, and a published name."""


@pytest.mark.parametrize("name", zoo.params(SECOND))
def test_names_that_transformers_writes_load(name):
    """They are in memory or come one by one, alone or beside equal tensors under the published names."""
    own, second, one = SECOND[name]
    state = random_state(zoo.cases()[name].hf)
    theirs = {key.replace(own, second): tensor for key, tensor in state.items()}
    assert theirs.keys() != state.keys()
    changed = {key: tensor + 1 if one.replace(own, second) in key else tensor for key, tensor in theirs.items()}
    (found,) = pool.run(1, loaded, name, state, [theirs, state | theirs, state | changed])
    assert found[:4] == [True] * 4
    assert all(one in error and "differs" in error for error in found[4:]), found[4:]


FIELDS = {"head_dim": 14, "short_conv_kernel_size": 3, "num_experts_per_tok": 4, "n_group": 4, "norm_topk_prob": True}


def test_ling_is_written_with_the_fields_that_engines_read(tmp_path):
    hf = CASES["bailing_hybrid"]
    write_config(hf, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.items() >= {**FIELDS, "max_position_embeddings": 128}.items()
    again = read_hf(tmp_path)
    assert {**again.to_dict(), "_name_or_path": ""} == {**hf.to_dict(), "rope_parameters": again.rope_parameters}
    with pytest.raises(ConfigError, match="lightning attention"):
        to_transformer_config(with_fields(hf, {"group_norm_size": 4}))
    with pytest.raises(ConfigError, match="BailingMoeV2_5ForCausalLM"):
        require_supported(with_fields(hf, {"architectures": ["BailingMoeV2_5ForCausalLM"]}))
    config = to_transformer_config(with_fields(hf, {"kda_safe_gate": False}))
    assert (config.kda_lower_bound, config.kda_full_rank, config.attention_gate) == (None, True, "head")
