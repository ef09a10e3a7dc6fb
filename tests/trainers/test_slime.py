"""slime's functions: parameters of a real model, one by one, give every HF tensor, and a folder fills them.

``test_slime_modules.py`` runs slime's own modules with them.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.errors import ConfigError, ExportError, MappingError, MeshError
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.trainers.slime import (
    _ROUTING,
    convert_to_hf,
    load_hf_weights,
    model_provider,
    needs_all_experts,
    supports_hf_weight_loading,
)
from mcore_bridge.weights.model_tensors import held_tensors
from tests import zoo
from tests.support import mtp_checkpoints, quantized, twins
from tests.support.quantized_cases import GPT_OSS, family
from tests.support.rlinf_models import LATENT, SPARSE
from tests.support.strategies import random_state, save, tiny
from tests.support.target_models import assert_gets

LATENTS = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
QUERIES = zoo.params(("deepseek_v3", "deepseek_v2-groups", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"))


def parameters(hf, state, **overrides):
    """All tensors that slime passes, by slime's names: padded parameters, and biases of routers."""
    with rank_of(ParallelDims(), 0, 1):
        (model,) = mb.build_model(hf, dtype=torch.float32, device="cpu", load_weights=state, overrides=overrides)
    biases = [(name, tensor) for name, tensor in model.named_buffers() if name.endswith("expert_bias")]
    found = {f"module.module.{name}": tensor for name, tensor in (*model.named_parameters(), *biases)}
    word = "module.module.embedding.word_embeddings.weight"
    return found | {word: torch.cat((found[word], torch.zeros(32, hf.hidden_size)))}


def union(args, params, note=None):
    """The tensors of all calls, each of which comes from one call only."""
    found = {}
    for name, param in params.items():
        given = convert_to_hf(args, "any", name, param, note)
        assert len(dict(given)) == len(given)
        assert not found.keys() & dict(given).keys()
        found.update(given)
    own = {tensor.untyped_storage().data_ptr() for tensor in params.values()}
    assert not own & {tensor.untyped_storage().data_ptr() for tensor in found.values()}
    return found


@pytest.mark.parametrize(
    "hf",
    [
        *(SPARSE, tiny("qwen2", tie_word_embeddings=True), tiny("phi3", pad_token_id=0)),
        zoo.cases()["deepseek_v3-whole-queries"].hf,
    ],
    ids=["experts", "tied", "fused", "whole-queries"],
)
def test_all_parameters_give_all_tensors(hf, tmp_path):
    hf.save_pretrained(tmp_path)
    state = random_state(hf)
    assert_gets(union(SimpleNamespace(hf_checkpoint=tmp_path), parameters(hf, state)), state)


@pytest.mark.parametrize("first", LATENTS)
@pytest.mark.parametrize("name", [*QUERIES, "kimi_k2", "mtp"])
def test_latents_are_given_out_in_pairs_in_whatever_order_they_come(name, first, tmp_path):
    if name == "mtp":
        hf = mtp_checkpoints.config("deepseek_v3")
        state = mtp_checkpoints.published(hf)
    else:
        hf = twins.read(name, LATENT.to_dict()) if name == "kimi_k2" else zoo.cases()[name].hf
        state = random_state(hf)
    hf.save_pretrained(tmp_path)
    args = SimpleNamespace(hf_checkpoint=tmp_path, mtp_num_layers=1 if name == "mtp" else None)
    params = parameters(hf, state, **({"mtp_num_layers": 1} if name == "mtp" else {}))
    near = sorted(params, key=lambda name: (name.rpartition("self_attention")[0], not name.endswith(first)))
    apart = sorted(params, key=lambda name: not name.endswith(first))  # first all first latents
    for order in (near, apart):
        assert_gets(union(args, {name: params[name] for name in order}), state)


def pair_of_latents(folder, scale=1.0):
    """Two parameters of one layer, filled with ``scale``, and slime's arguments."""
    LATENT.save_pretrained(folder)
    shapes = ((LATENT.q_lora_rank, 48), (LATENT.kv_lora_rank + LATENT.qk_rope_head_dim, 48))
    names = (f"module.module.decoder.layers.2.self_attention.{name}" for name in LATENTS)
    params = zip(names, (torch.full(shape, scale) for shape in shapes), strict=True)
    return SimpleNamespace(hf_checkpoint=folder), list(params)


Q_A, KV_A = (f"model.layers.2.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa"))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_first_latent_waits_for_the_second_as_it_was(order, tmp_path):
    args, params = pair_of_latents(tmp_path)
    (first, held), (second, last) = (params[number] for number in order)
    for value in (1.0, 2.0):  # passes
        held.fill_(value)
        last.fill_(value)
        assert convert_to_hf(args, "any", first, held) == []
        held.fill_(-1.0)  # the trainer may reuse its memory
        found = dict(convert_to_hf(args, "any", second, last))
        assert found.keys() == {Q_A, KV_A}
        assert all((tensor == value).all() for tensor in found.values())


def test_each_folder_has_latents_of_its_own(tmp_path):
    args, (latent, other) = pair_of_latents(tmp_path / "one")
    others, (_, doubled) = pair_of_latents(tmp_path / "two", 2.0)
    assert convert_to_hf(args, "any", *latent) == []
    assert convert_to_hf(others, "any", *doubled) == []
    assert all((tensor == 1).all() for _, tensor in convert_to_hf(args, "any", *other))


@pytest.mark.parametrize(("again", "missing"), [(0, KV_A), (1, Q_A)])
def test_a_latent_that_comes_again_before_the_other_is_refused_once(again, missing, tmp_path):
    args, params = pair_of_latents(tmp_path)
    found = (Q_A, KV_A)[again]
    name, param = params[again]
    assert convert_to_hf(args, "any", name.replace(".2.", ".1."), param) == []  # also after an earlier pass
    assert convert_to_hf(args, "any", name, param) == []
    with pytest.raises(ExportError, match=f"expected {missing}, found {found} a second time") as raised:
        convert_to_hf(args, "any", name, param)
    assert "begin this pass again" in str(raised.value)
    for layer in (1, 2):  # from the start again, as the error demands
        assert convert_to_hf(args, "any", name.replace(".2.", f".{layer}."), 3 * param) == []
        other, tensor = params[1 - again]
        given = convert_to_hf(args, "any", other.replace(".2.", f".{layer}."), 3 * tensor)
        assert [bool((tensor == 3).all()) for _, tensor in given] == [True, True]


@pytest.mark.parametrize("has_weights", [True, False])
def test_weights_leave_in_the_format_of_the_folder(has_weights, tmp_path):
    """Latents still come together, each with its scales. New scales are equal to the scales of the folder."""
    hf, form = zoo.cases()["deepseek_v3"].hf, quantized.deepseek((16, 16))
    files, plain = quantized.write(hf, form, tmp_path, dtype=torch.float32)
    if not has_weights:
        (tmp_path / "model.safetensors").unlink()
        files = replace(form, quantizes=lambda name: name.endswith(".weight") and "o_proj" not in name).files(plain)
    args = SimpleNamespace(hf_checkpoint=tmp_path)
    own = {"activation_scheme": "static"} if has_weights else {"modules_to_not_convert": ["lm_head", "o_proj"]}
    note = {**form.note, **own}
    assert_gets(union(args, parameters(hf, plain), note), files)


def test_weights_that_engines_join_leave_with_one_overall_number(tmp_path):
    sizes = {"hidden_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}
    hf, form = family("deepseek_v3", **sizes)(), quantized.nvfp4("modelopt")
    files, plain = quantized.write(hf, form, tmp_path, dtype=torch.bfloat16)
    args = SimpleNamespace(hf_checkpoint=tmp_path)
    assert_gets(union(args, parameters(hf, plain), form.note), files)
    (tmp_path / "model.safetensors").unlink()
    note = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    for name, tensor in union(args, parameters(hf, plain), note).items():
        if name.endswith("proj.weight_scale_2") and "_a_proj" not in name:
            torch.testing.assert_close(tensor, files[name], rtol=1e-6, atol=0)


def test_grouped_experts_by_their_numbers(tmp_path):
    SPARSE.save_pretrained(tmp_path)
    args = SimpleNamespace(hf_checkpoint=tmp_path)
    state = random_state(SPARSE)
    expert = "model.layers.1.mlp.experts.5"
    fc1 = torch.cat([state[f"{expert}.gate_proj.weight"], state[f"{expert}.up_proj.weight"]])
    found = convert_to_hf(args, "any", "module.decoder.layers.1.mlp.experts.linear_fc1.weight5", fc1)
    assert_gets(dict(found), {name: state[name] for name in (f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight")})


STACKED = zoo.params(("gpt_oss-uneven-clamped", "granitemoe", "qwen3_vl_moe"))


@pytest.mark.parametrize("name", STACKED)
def test_experts_leave_joined_with_the_last_of_their_layer(name, tmp_path):
    """Also from several threads, as in slime's converter of files, and in any order."""
    hf = zoo.cases()[name].hf
    hf.save_pretrained(tmp_path)
    state = random_state(hf)
    args = SimpleNamespace(hf_checkpoint=tmp_path)
    assert needs_all_experts(args)
    params = parameters(hf, state)
    for order in (list(params), list(params)[::-1]):
        assert_gets(union(args, {name: params[name] for name in order}), state)
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda pair: convert_to_hf(args, "any", *pair), params.items())
        assert_gets(dict(pair for pairs in found for pair in pairs), state)


def test_stacks_leave_as_the_codes_of_their_folder(tmp_path):
    hf, form = family("gpt_oss", **GPT_OSS)(), quantized.mxfp4()
    files, plain = quantized.write(hf, form, tmp_path, dtype=torch.float32)
    args = SimpleNamespace(hf_checkpoint=tmp_path)
    assert_gets(union(args, parameters(hf, plain), form.note), files)


def test_an_expert_that_never_came_is_named(tmp_path):
    hf = zoo.cases()["gpt_oss"].hf
    hf.save_pretrained(tmp_path)
    args = SimpleNamespace(hf_checkpoint=tmp_path)
    params = parameters(hf, random_state(hf))
    name = next(name for name in params if "linear_fc1" in name)
    assert convert_to_hf(args, "any", name, params[name]) == []
    with pytest.raises(
        ExportError, match=r"expected .*gate_up_proj(_bias)?\[1\] and \d+ others, found .*\[0\] a second"
    ):
        convert_to_hf(args, "any", name, params[name])


@pytest.mark.parametrize("asks", [False, True])
def test_stacks_are_refused_while_slime_may_send_experts_point_to_point(asks, monkeypatch, tmp_path):
    hf = zoo.cases()["gpt_oss"].hf
    hf.save_pretrained(tmp_path)
    args, routing = SimpleNamespace(hf_checkpoint=tmp_path), ModuleType(_ROUTING)
    monkeypatch.setitem(sys.modules, _ROUTING, routing)
    if asks:
        routing.needs_all_experts = needs_all_experts
        assert union(args, parameters(hf, random_state(hf)))
        return
    with pytest.raises(ConfigError, match=r"let _can_route_experts in .* ask needs_all_experts"):
        union(args, parameters(hf, random_state(hf)))
    SPARSE.save_pretrained(tmp_path / "single")
    assert union(SimpleNamespace(hf_checkpoint=tmp_path / "single"), parameters(SPARSE, random_state(SPARSE)))


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "qwen3_vl"])
@pytest.mark.parametrize("critic", [False, True])
def test_a_folder_fills_chunks_that_slime_has_built(name, critic, tmp_path):
    """The chunks have no config of ours, and a critic has slime's head, whose values stay."""
    hf = zoo.cases()[name].hf
    save(state := random_state(hf), hf, tmp_path)
    assert supports_hf_weight_loading(tmp_path)
    with rank_of(ParallelDims(), 0, 1):
        expected, chunk = (
            mb.build_model(hf, dtype=torch.float32, device="cpu", load_weights=source)[0] for source in (state, False)
        )
        if critic:
            expected.output_layer = chunk.output_layer = torch.nn.Linear(hf.get_text_config().hidden_size, 1)
        for name in [name for name in vars(chunk) if name.startswith("bridge")]:
            delattr(chunk, name)
        load_hf_weights(SimpleNamespace(), [chunk], tmp_path)
        assert_gets(held_tensors([chunk]), held_tensors([expected]))


@pytest.mark.parametrize(("name", "dims"), [("gemma3", ParallelDims(pp=2)), ("qwen3_moe", ParallelDims(tp=2, ep=2))])
def test_a_stage_is_built_from_the_hf_config(name, dims, monkeypatch, tmp_path):
    """Also for a critic, whose output layer slime replaces before the load."""
    hf = zoo.cases()[name].hf
    save(state := random_state(hf), hf, tmp_path)
    args = SimpleNamespace(
        hf_checkpoint=str(tmp_path), params_dtype=torch.float32, recompute_granularity="selective", mtp_num_layers=None
    )
    sizes = dims.to_config_fields()
    vars(args).update({field: sizes[field] for field in sizes if field.endswith("_parallel_size")})
    args.decoder_first_pipeline_num_layers = None
    module = ModuleType("megatron.training.global_vars")
    module.get_args = lambda: args
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rank = dims.tp * dims.pp - 1
    with rank_of(dims, rank, dims.tp * dims.pp):
        expected = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)[0]
        chunk = model_provider(pre_process=dims.pp == 1, post_process=True)
        assert chunk.config.recompute_granularity == "selective"
        load_hf_weights(args, [chunk], tmp_path)
        assert_gets(held_tensors([chunk]), held_tensors([expected]))
        expected.output_layer = chunk.output_layer = torch.nn.Linear(hf.hidden_size, 1)
        del expected.bridge_built
        for name, tensor in held_tensors([chunk]).items():
            tensor.data.mul_(name.startswith("output_layer."))
        load_hf_weights(args, [chunk], tmp_path)
        assert_gets(held_tensors([chunk]), held_tensors([expected]))
        with pytest.raises(MeshError, match="split the pipeline in the same way"):
            model_provider(pre_process=dims.pp != 1, post_process=True)
        args.hf_checkpoint = "nowhere"
        with pytest.raises(ConfigError):
            model_provider()


def test_the_reason_of_a_refusal_is_logged(tmp_path, caplog):
    tiny("bloom").save_pretrained(tmp_path)
    assert not supports_hf_weight_loading(tmp_path)
    assert "positions are a bias of the scores" in caplog.text


def test_what_it_cannot_do_is_refused(tmp_path):
    SPARSE.save_pretrained(tmp_path / "sparse")
    args = SimpleNamespace(hf_checkpoint=tmp_path / "sparse")
    with pytest.raises(ConfigError, match="quant_method must be 'fp8'"):
        convert_to_hf(args, "any", "module.decoder.layers.0.self_attention.linear_proj.weight", torch.zeros(48, 96), {})
    factor = "module.decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight"
    with pytest.raises(ConfigError, match="belongs to an adapter, which cannot be handed over"):
        convert_to_hf(args, "any", factor, torch.zeros(4, 48))
    with pytest.raises(MappingError, match="no rule"):
        convert_to_hf(args, "any", "module.decoder.layers.0.nothing.weight", torch.zeros(48))
