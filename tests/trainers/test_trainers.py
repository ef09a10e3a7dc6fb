"""Behaviour that trainers need, for both interfaces, through verl's calls: build, train, sync, save, resume."""

import json
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mcore_bridge import ParallelDims
from mcore_bridge.architecture import read_hf
from mcore_bridge.errors import CheckpointError, ConfigError, MeshError
from mcore_bridge.trainers import mbridge, megatron_bridge
from mcore_bridge.trainers.settings import with_mtp_layers
from mcore_bridge.trainers.verl.replacements import linear_cross_entropy
from tests import zoo
from tests.support import mtp_checkpoints, pool, stepping, tiny
from tests.support.strategies import random_state, save
from tests.support.trainer_calls import (
    attention_switches,
    become_rlinfs,
    build_role,
    rlinf_config,
    stepping_config,
    violations,
)
from tests.support.written_weights import read

FACES = ("mbridge", "megatron_bridge")
DENSE = ParallelDims(tp=2, pp=2, vp=2, sp=True)
SPARSE = ParallelDims(tp=2, ep=2, sp=True)


def in_mesh(dims: ParallelDims, function: Any, *args: Any) -> Any:
    """Runs in a worker."""
    with attention_switches(), stepping.mesh(dims):
        return function(dims, *args)


def on(dims: ParallelDims, world_size: int, function: Any, *args: Any) -> list[Any]:
    return pool.run(world_size, in_mesh, dims, function, *args)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A dense model whose head is its embedding. A critic made from it must be untied."""
    hf = tiny.config("qwen2")
    return str(tiny.random_checkpoint(hf, tmp_path_factory.mktemp("qwen2"), dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """Experts whose router has a bias in fp32, a vocabulary that tp does not divide, and an MTP layer on disk."""
    folder = tmp_path_factory.mktemp("deepseek_v3")
    hf = mtp_checkpoints.config("deepseek_v3")
    state = mtp_checkpoints.published(hf)
    halves = {name: tensor if name.endswith("correction_bias") else tensor.bfloat16() for name, tensor in state.items()}
    save(halves, hf, folder)
    return str(folder)


# -- a dense actor and its critic in one process -----------------------------------------------------------------------


def life(dims: ParallelDims, face: str, folder: str, out: str) -> dict[str, Any]:
    """Runs in a worker: an actor, then a critic that takes a step, is saved, and comes back."""
    from megatron.core.distributed import finalize_model_grads

    truth = read(folder)
    actor = build_role(face, folder, dims)
    actor.load(folder)
    early, late = actor.export(), actor.export()  # verl makes a generator and uses it later, after another one
    broken, order = violations(late, truth)
    again, order_again = violations(early, truth)
    broken += again
    critic = build_role(face, folder, dims, value=True)
    critic.load(folder)
    critic.config.finalize_model_grads_func = finalize_model_grads
    loss = stepping.forward_backward(critic.models, dims, tiny.tokens(4), head=True)
    with torch.no_grad():
        for parameter in (each for ddp in critic.models for each in ddp.parameters()):
            parameter -= (parameter.main_grad / parameter.main_grad.abs().max()).to(parameter.dtype)
    before = dict(critic.export())
    critic.save(out)
    resumed = build_role(face, folder, dims, value=True)
    resumed.load(out, resume=True)
    after = dict(resumed.export())
    broken += [f"{name} is lost" for name in before if not torch.equal(before[name], after[name])]
    moved = [name for name in before if name in truth and not torch.equal(before[name], truth[name])]
    return {
        "broken": broken,
        "order": [order, order_again],
        "loss": loss,
        "moved": moved,
        "critic": before,
        "restored": list(after),
        "actor": {name: bool(torch.equal(tensor, truth[name])) for name, tensor in actor.export()},
    }


@pytest.mark.parametrize("face", FACES)
def test_an_actor_and_its_critic(face, tied, tmp_path):
    out = tmp_path / "critic"
    out.mkdir()
    (out / "tokenizer.json").write_text("{}")  # verl writes these before the weights
    config = json.loads(Path(tied, "config.json").read_text()) | {"max_position_embeddings": 777}
    (out / "config.json").write_text(json.dumps(config))
    ranks = on(DENSE, 4, life, face, tied, str(out))
    truth, saved = read(tied), read(out)
    for rank in ranks:
        assert rank["broken"] == []
        assert rank["order"] == [ranks[0]["order"][0]] * 2, "ranks or exports differ"
        assert rank["critic"].keys() == {*truth, "score.weight"} == {*rank["restored"]} == saved.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in rank["critic"].items())
        assert set(rank["moved"]) == truth.keys(), "a step trains everything"
        assert all(rank["actor"].values()), "the critic's step is none of the actor's"
    assert all(rank["loss"].isfinite() for rank in ranks[2:])
    assert saved["score.weight"].shape == (1, tiny.DISTINCT["hidden_size"])
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    assert config["max_position_embeddings"] == 777
    assert (out / "tokenizer.json").read_text() == "{}"


# -- experts -----------------------------------------------------------------------------------------------------------


def experts(dims: ParallelDims, face: str, folder: str) -> dict[str, Any]:
    """Run in a worker: the stream, the stream after weights have changed, and the frozen names."""
    hf = read_hf(folder)
    truth = {name: tensor for name, tensor in read(folder).items() if not mtp_checkpoints.is_mtp(hf, name)}
    role = build_role(face, folder, dims)
    role.load(folder)
    broken, order = violations(role.export(), truth)
    offload(role.models)
    broken += violations(role.export(), truth)[0]
    with torch.no_grad():
        for ddp in role.models:
            for parameter in ddp.parameters():
                parameter.mul_(2)
    doubled = {name: 2 * tensor if "correction_bias" not in name else tensor for name, tensor in truth.items()}
    broken += violations(role.export(), doubled)[0]
    reference = build_role(face, folder, dims, ddp=False)
    reference.load(folder)
    broken += violations(reference.export(), truth)[0]
    named = [each for ddp in role.models for each in ddp.named_parameters()]
    inputs = tiny.tokens(1)[:, :-1]
    logits = reference.models[0](inputs, torch.arange(inputs.size(1)).expand_as(inputs), None).detach()
    biases = [tensor for chunk in reference.models for name, tensor in chunk.named_buffers() if "expert_bias" in name]
    return {
        "broken": broken,
        "order": order,
        "frozen": {name.rpartition("mlp.")[2] for name, parameter in named if not parameter.requires_grad},
        "logits": logits,
        "biases": {bias.dtype for bias in biases},
        "config": type(role.config).__mro__,
    }


def offload(models: list[Any]) -> None:
    """Like verl while its rollout uses the GPU: all parameters lose their storage, and later get another one."""
    for model in models:
        for parameter in model.parameters():
            left, parameter.data = parameter.data, parameter.data.clone()
            left.fill_(float("nan"))


@pytest.mark.parametrize("face", FACES)
def test_experts_and_latent_attention(face, sparse):
    from megatron.core.transformer import MLATransformerConfig

    ranks = on(SPARSE, 2, experts, face, sparse)
    for rank in ranks:
        assert rank["broken"] == []
        assert rank["order"] == ranks[0]["order"]
        assert rank["frozen"] == {"router.weight"}
        assert rank["biases"] == {torch.float32}
        assert MLATransformerConfig in rank["config"]
    assert any(dtype == "torch.float32" for _, _, dtype in ranks[0]["order"])
    logits = torch.cat([rank["logits"] for rank in ranks], -1)  # the vocabulary is padded by one token
    assert logits.shape[-1] == 98
    entropy = torch.softmax(logits / 1e-8, -1) * (logits / 1e-8)  # verl divides padding's logits by 1e-8
    assert entropy.isfinite().all()


# -- settings and refusals ---------------------------------------------------------------------------------------------


def say_no(dims: ParallelDims, folder: str) -> None:
    """Runs in a worker: everything that is refused, on one rank."""
    from transformers import AutoConfig

    hf = AutoConfig.from_pretrained(folder)
    bridge = mbridge.AutoBridge.from_config(hf)
    with pytest.raises(ConfigError, match="use_fused_rmsnorm"):
        bridge.set_extra_args(use_fused_rmsnorm=True)
    bridge = mbridge.AutoBridge.from_config(hf)
    with pytest.raises(ConfigError, match="attention_backend must be one of flash"):
        bridge.set_extra_args(attention_backend="flush")
    bridge = mbridge.AutoBridge.from_config(hf)
    bridge.set_extra_args(context_parallel_size=2)
    with pytest.raises(MeshError, match=r"dims\): {'cp': \(1, 2\)}"):
        bridge.get_model()
    bridge = mbridge.AutoBridge.from_config(hf)
    bridge.config.sequence_parallel = True
    with pytest.raises(ConfigError, match="the mesh decides it"):
        bridge.get_model()
    bridge = mbridge.AutoBridge.from_config(hf)
    with pytest.raises(ConfigError, match="contradict the HF config: layernorm_epsilon="):
        bridge.set_extra_args(layernorm_epsilon=0.5)
    bridge = mbridge.AutoBridge.from_config(hf)
    bridge.config.softmax_scale = 1.0
    with pytest.raises(ConfigError, match=r"softmax_scale=1\.0, expected None"):
        bridge.get_model()
    bridge = mbridge.AutoBridge.from_config(hf)
    with pytest.raises(ConfigError, match="megatron-core refuses these settings"):
        bridge.get_model(wrap_with_ddp=True, ddp_config={"overlap": True})
    with attention_switches():
        (model,) = mbridge.AutoBridge.from_config(hf, dtype=torch.float32).get_model()
    with pytest.raises(ConfigError, match="must have been built for a value head"):
        mbridge.make_value_model(model, pre_process=True, post_process=True, config=model.config, hf_config=hf)
    theirs = megatron_bridge.AutoBridge.from_hf_pretrained(folder)
    provider = theirs.to_megatron_provider()
    with pytest.raises(ConfigError, match="nearest names: num_layers"):
        provider.apply_overrides_and_finalize(overrides={"num_layer": 3})
    with pytest.raises(ConfigError, match="needs a ddp_config"):
        provider.provide_distributed_model()
    with pytest.raises(ConfigError, match="use_megatron_fsdp must be False"):
        provider.provide_distributed_model(wrap_with_ddp=False, use_megatron_fsdp=True)
    quantized = theirs.to_megatron_provider()
    quantized.transformer_layer_spec = None  # verl sets this for QAT
    with pytest.raises(ConfigError, match="transformer_layer_spec must not be overridden"):
        quantized.finalize()
    with pytest.raises(ConfigError, match="allowed_mismatched_params may only name"):
        theirs.load_hf_weights([model], folder, allowed_mismatched_params=["*.bias"])
    with pytest.raises(ConfigError, match="conversion_tasks must come from get_conversion_tasks"):
        theirs.export_hf_weights([model], conversion_tasks=[object()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="models must have adapters"):
        theirs.export_adapter_weights([model])
    with pytest.raises(CheckpointError, match=r"nothing was written: .*models must have adapters"):
        theirs.save_hf_adapter([model], folder, None)


def replaying(dims: ParallelDims, folder: str) -> tuple[list[object], str]:
    """Runs in a worker: the values on the config for verl 0.7's routers, and the error without verl's routers."""
    from megatron.core.transformer.moe.router import TopKRouter
    from transformers import AutoConfig

    bridge = mbridge.AutoBridge.from_config(AutoConfig.from_pretrained(folder))
    with pytest.raises(ConfigError) as caught:
        bridge.set_extra_args(enable_routing_replay=True)
    bridge = mbridge.AutoBridge.from_config(AutoConfig.from_pretrained(folder))
    with mock.patch.object(TopKRouter, "_router_replay_patched", True, create=True):
        bridge.set_extra_args(enable_routing_replay=True)
        bridge.set_extra_args(moe_aux_loss_coeff=0.0)
        (model,) = bridge.get_model()
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    return [module.config.enable_routing_replay for module in routers], str(caught.value)


def test_routers_of_verl_find_what_it_says_of_replay(sparse):
    ((found, said),) = on(ParallelDims(), 1, replaying, sparse)
    assert found
    assert all(each is True for each in found)
    assert "found 'enable_routing_replay'; nearest names: moe_enable_routing_replay" in said


def uneven_shares() -> list[str]:
    """Runs in a worker: errors that prevent verl's kernels, for ranks that would differ and for capped logits."""
    said = []
    for rows, marks in ((1025, {"hf_vocab_size": 2049}), (3, {"hf_vocab_size": 3}), (4, {"logit_softcap": 30.0})):
        weight = torch.empty(rows, 8)
        vars(weight).update(marks)
        with pytest.raises(ConfigError, match="Set use_fused_kernels=False") as caught:
            linear_cross_entropy(torch.empty(2, 8), weight, torch.zeros(2).long(), dist_process_group=dist.group.WORLD)
        said.append(str(caught.value))
    return said


def test_verls_kernels_are_refused_where_ranks_would_not_go_together():
    for said in pool.run(2, uneven_shares):
        assert ["found 1024 and 1025" in said[0], "found 0 and 3" in said[1], "caps them at 30" in said[2]] == [
            True
        ] * 3


def test_refusals(tied):
    on(ParallelDims(), 1, say_no, tied)


def resume_without_head(dims: ParallelDims, face: str, folder: str, other: str) -> list[str]:
    """Runs in a worker: changes of a critic that loads a causal LM, and a critic of another bridge, without
    resuming.
    """
    critic = build_role(face, folder, dims, value=True)
    critic.load(folder)
    with torch.no_grad():
        for parameter in (each for ddp in critic.models for each in ddp.parameters()):
            parameter.add_(1)
    before = dict(critic.export())
    with pytest.raises(CheckpointError, match=r"lacks score.weight"):
        critic.load(folder, resume=True)
    with pytest.raises(CheckpointError, match=r"rename the tensor to score.weight"):
        critic.load(other)
    return [name for name, tensor in critic.export() if not torch.equal(tensor, before[name])]


@pytest.mark.parametrize("face", FACES)
def test_a_critic_does_not_resume_without_its_head(face, tied, tmp_path):
    state = read(tied)
    state["lm_head.weight"] = torch.ones(1, tiny.DISTINCT["hidden_size"], dtype=torch.bfloat16)
    save(state, tiny.config("qwen2"), tmp_path)
    assert on(ParallelDims(pp=2), 2, resume_without_head, face, tied, str(tmp_path)) == [[], []]


def as_siirl(dims: ParallelDims, folder: str, out: str) -> tuple[Any, ...]:
    """Runs in a worker: a critic of a tied model that stays tied, made with required arguments only."""
    from transformers import AutoConfig

    bridge = mbridge.AutoBridge.from_config(AutoConfig.from_pretrained(folder))
    bridge.set_extra_args(attention_backend="flash")
    models = bridge.get_model(post_model_creation_callbacks=[mbridge.make_value_model], wrap_with_ddp=True)
    bridge.load_weights(models, folder)
    bridge.save_weights(models, out)
    (ddp,) = models
    settings = ddp.ddp_config.grad_reduce_in_fp32, ddp.ddp_config.use_distributed_optimizer
    return settings, {parameter.dtype for parameter in ddp.parameters()}, list(dict(bridge.export_weights(models)))


def test_a_critic_with_nothing_said_of_it(tied, tmp_path):
    ((settings, dtypes, names),) = on(ParallelDims(), 1, as_siirl, tied, str(tmp_path / "out"))
    assert (settings, dtypes) == ((True, True), {torch.bfloat16})
    truth, saved = read(tied), read(tmp_path / "out")
    assert set(names) == saved.keys() == {*truth, "score.weight"}
    assert all(torch.equal(saved[name], tensor) for name, tensor in truth.items())


def as_rlinf(dims: ParallelDims, folder: str, out: str) -> tuple[Any, ...]:
    """Runs in a worker: a provider that is a dataclass, with all fields set one by one, loaded as it is built."""
    import copy

    bridge = megatron_bridge.AutoBridge.from_hf_pretrained(folder, trust_remote_code=True)
    provider = bridge.to_megatron_provider(load_weights=True)
    become_rlinfs(provider, rlinf_config(read_hf(folder), dims, hidden_dropout=0.25))
    provider.finalize()
    ddp_config = megatron_bridge.create_ddp_config(wrap_with_ddp=True, use_distributed_optimizer=False)
    models = provider.provide_distributed_model(ddp_config=ddp_config)
    bridge.save_hf_pretrained(models, out, source_path=folder, show_progress=False, strict=True)
    assert "_hooks" not in vars(copy.deepcopy(provider))
    return provider.hidden_dropout, {parameter.dtype for parameter in models[0].parameters()}, type(models[0]).__name__


def test_a_provider_whose_fields_are_set_one_by_one(tmp_path):
    folder = tiny.random_checkpoint(tiny.config("qwen2", use_sliding_window=False), tmp_path, dtype=torch.bfloat16)
    found = on(ParallelDims(tp=2, etp=2, sp=True), 2, as_rlinf, str(folder), str(tmp_path / "out"))
    assert found == [(0.25, {torch.float32}, "DistributedDataParallel")] * 2
    truth, saved = read(folder), read(tmp_path / "out")
    assert saved.keys() == truth.keys()
    assert all(torch.equal(saved[name], truth[name].float()) for name in truth)


def provider_of(name: str, tmp_path: Path) -> tuple[Any, Any]:
    hf = zoo.cases()[name].hf
    hf.save_pretrained(tmp_path)
    provider = megatron_bridge.AutoBridge.from_hf_pretrained(tmp_path).to_megatron_provider()
    return provider, read_hf(tmp_path)


OTHERWISE = {  # attributes that RLinf sets for every model, and that do not fit these
    "gpt_oss": ["activation_func", "glu_linear_offset", "softmax_type='vanilla'", "window_size=None"],
    "olmo3": ["qk_layernorm=False", "window_attn_skip_freq=None, expected [1, 0, 1, 0]"],
    "qwen3_next": ["linear_attention_freq=None", "layernorm_zero_centered_gamma=False", "moe_shared_expert_gate"],
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_model_that_rlinfs_config_does_not_describe_is_refused(name, tmp_path):
    provider, hf = provider_of(name, tmp_path)
    become_rlinfs(provider, rlinf_config(hf, ParallelDims()))
    with pytest.raises(ConfigError, match="contradict the HF config") as caught:
        provider.finalize()
    assert [part for part in OTHERWISE[name] if part not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mixtral"])
def test_a_model_that_rlinfs_config_describes_is_itself(name, tmp_path):
    provider, hf = provider_of(name, tmp_path)
    before = dict(vars(provider))
    theirs = rlinf_config(hf, ParallelDims(), attention_dropout=0.5)
    become_rlinfs(provider, theirs)
    provider.finalize()
    assert provider.attention_dropout == 0.5
    names = {"hidden_size", "activation_func", "kv_channels", "qk_layernorm", "moe_router_topk", "window_size"}
    assert {each: getattr(provider, each) for each in names} == {each: before[each] for each in names}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layernorm_epsilon", 0.1),
        ("moe_router_score_function", "sigmoid"),
        ("activation_func", torch.nn.functional.relu),
        ("softmax_scale", 1.0),
        ("num_layers", 2),
        ("rotary_base", 5.0),
    ],
)
def test_no_setting_makes_another_model(name, value, tmp_path):
    provider, _ = provider_of("qwen3_moe", tmp_path)
    setattr(provider, name, value)
    with pytest.raises(ConfigError, match=f"{name}=.*, expected"):
        provider.finalize()


def test_a_tied_head_may_be_untied_and_no_other_tied(tied, tmp_path):
    provider = megatron_bridge.AutoBridge.from_hf_pretrained(tied).to_megatron_provider()
    provider.share_embeddings_and_output_weights = False
    provider.finalize()
    provider, _ = provider_of("qwen3", tmp_path)
    provider.share_embeddings_and_output_weights = True
    with pytest.raises(ConfigError, match="share_embeddings_and_output_weights=True, expected False"):
        provider.finalize()


def untouched(dims: ParallelDims, folder: str, fields: dict[str, Any]) -> tuple[int, int]:
    """Runs in a worker: a provider on which nothing is set but ``fields``."""
    provider = megatron_bridge.AutoBridge.from_hf_pretrained(folder).to_megatron_provider()
    vars(provider).update(fields)
    provider.finalize()
    finalized = provider.expert_tensor_parallel_size
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
    return finalized, stepping_config([model]).expert_tensor_parallel_size


def test_a_provider_on_which_nothing_is_set(tied):
    assert on(ParallelDims(), 1, untouched, tied, {}) == [(1, 1)]


def of_unlike_layers(dims: ParallelDims, folder: str) -> tuple[list[str], list[int]]:
    """Runs in a worker: what is lost of a model whose layers have sizes of their own, and the sizes of heads."""
    import copy

    bridge = megatron_bridge.AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.apply_overrides_and_finalize(torch.bfloat16, {"sequence_parallel": dims.sp})
    models = provider.provide_distributed_model(wrap_with_ddp=False)
    found, truth = dict(bridge.export_hf_weights(models)), read(folder)
    plain = pickle.loads(pickle.dumps(copy.deepcopy(provider)))
    sizes = {plain.get_config_for_layer(number + 1).kv_channels for number in range(plain.num_layers)}
    return [name for name in truth if not torch.equal(found[name], truth[name])], sorted(sizes)


@pytest.mark.parametrize("name", zoo.params(["gemma4-own-values"]))
def test_a_provider_of_layers_with_sizes_of_their_own(name, tmp_path):
    hf = zoo.cases()[name].hf
    save(random_state(hf, dtype=torch.bfloat16), hf, tmp_path)
    ((lost, sizes),) = on(ParallelDims(), 1, of_unlike_layers, str(tmp_path))
    assert lost == []
    assert len(sizes) > 1


@pytest.mark.parametrize("etp", [1, 2])
def test_a_size_for_experts_that_nobody_sets_is_that_of_parallel_state(etp, sparse):
    """RLinf sets all other sizes of DeepSeek-V3."""
    dims = ParallelDims(tp=2, ep=2 // etp, etp=etp, sp=True)
    fields = dims.to_config_fields()
    del fields["expert_tensor_parallel_size"]
    assert on(dims, 2, untouched, sparse, fields) == [(etp, etp)] * 2


# -- MTP layers, as verl asks for them ---------------------------------------------------------------------------------


def with_mtp(dims: ParallelDims, face: str, folder: str, settings: dict[str, Any]) -> tuple[Any, set[str]]:
    """Runs in a worker: the number of MTP layers, and the exported names."""
    from transformers import AutoConfig

    bridge: Any
    if face == "mbridge":
        bridge = mbridge.AutoBridge.from_config(AutoConfig.from_pretrained(folder))
        bridge.set_extra_args(**settings)
        models = bridge.get_model()
        bridge.load_weights(models, folder)
    else:
        bridge = megatron_bridge.AutoBridge.from_hf_pretrained(folder)
        provider = bridge.to_megatron_provider()
        provider.apply_overrides_and_finalize(dtype=torch.bfloat16, overrides=settings)
        models = provider.provide_distributed_model(wrap_with_ddp=False)
    stream = bridge.export_weights(models) if face == "mbridge" else bridge.export_hf_weights(models)
    return stepping_config(models).mtp_num_layers, set(dict(stream))


@pytest.mark.parametrize("face", FACES)
def test_a_factor_for_the_loss_of_mtp_layers_asks_for_those_of_the_hf_config(face, sparse):
    hf, names = read_hf(sparse), read(sparse).keys()
    decoder = {name for name in names if not mtp_checkpoints.is_mtp(hf, name)}
    factor = {"mtp_loss_scaling_factor": 0.1}
    assert on(ParallelDims(), 1, with_mtp, face, sparse, factor) == [(1, names)]
    assert on(ParallelDims(), 1, with_mtp, face, sparse, {**factor, "mtp_num_layers": None}) == [(None, decoder)]


def test_a_model_without_mtp_layers_is_not_asked_for_some(tmp_path):
    provider, hf = provider_of("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="mtp_loss_scaling_factor needs MTP layers: expected one of num_nextn"):
        provider.apply_overrides_and_finalize(overrides={"mtp_loss_scaling_factor": 0.1})
    hf.num_nextn_predict_layers = 1
    assert with_mtp_layers({"mtp_loss_scaling_factor": 0.5}, hf)["mtp_num_layers"] == 1
    with pytest.raises(ConfigError, match="mtp_num_layers must be at most 0, found 1"):
        provider.apply_overrides_and_finalize(overrides={"mtp_num_layers": 1})
