"""EAGLE3 heads beside a policy: losses, logits and gradients on any mesh against plain torch, folders, refusals."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from safetensors.torch import load_file
from transformers import LlamaConfig

import mcore_bridge as mb
from mcore_bridge.engines import EngineWorker
from mcore_bridge.errors import BatchError, BridgeError, ConfigError
from tests.support import eagle3, mapped, pool, stepping, tiny
from tests.support.drafted_policy import BOUND, POLICY, batch, policy, reference

SHARED = eagle3.fields_of(POLICY)
OWN = eagle3.fields_of(
    POLICY,
    hidden_size=40,
    target_hidden_size=POLICY.hidden_size,
    attention_bias=True,
    norm_before_residual=True,
    fc_norm=True,
    sliding_window=4,
    eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True},
    eagle_aux_hidden_state_layer_ids=[1, 4, 7],
    rope_theta=500.0,
)
CASES = {"shared": (SHARED, False, (2, 4, 5)), "own": (OWN, True, (1, 4, 7))}
"""The config of a head, whether it has an embedding, and the layers of the policy whose inputs it reads."""
MESHES = [
    *(({}, True), ({}, False), ({"tp": 2, "sp": True}, True), ({"tp": 2}, False), ({"cp": 2}, True)),
    *(({"cp": 2}, False), ({"tp": 4, "sp": True}, False), ({"tp": 2, "cp": 2, "sp": True}, True)),
]
"""Sizes of a mesh, and whether sequences are packed. With TP4 two ranks share a KV head."""
LENGTHS = (9, 12)
STEPS = 4


def expected(name, state, mistake="", steps=1):
    """The losses of the batch, their mean gradient over two microbatches, and the logits of the second row."""
    fields, _, layers = CASES[name]
    state = {key: value.clone().requires_grad_(value.is_floating_point()) for key, value in state.items()}
    ids, mask = batch()
    model, found = reference(), torch.zeros(ids.shape)
    for row in range(len(ids)):
        start = int(mask[row].argmax())
        each, logits = eagle3.losses(fields, state, model, ids[row, start:], layers, mistake, steps)
        found[row, start + 1 :] = each
    (found.sum() / 2).backward()
    grads = {key: value.grad for key, value in state.items() if value.is_floating_point()}
    return found.detach(), grads, logits.detach()


def half_of(name, whole):
    """What the second of two ranks of an engine has of a tensor. It pads vocabularies to a multiple of 64."""
    if re.search("embed_tokens|lm_head", name):
        return whole[64 if len(whole) > 64 else 32 :]
    if re.search("[qkv]_proj|gate_proj|up_proj", name):
        return whole.chunk(2)[1]
    return whole.chunk(2, 1)[1] if re.search(r"(o|down)_proj\.weight", name) else whole


def train(folder, sizes, packed, steps):
    """Runs in each worker: losses, and gradients and weights under the names of the folder."""
    dims = mb.ParallelDims(**sizes)
    with stepping.mesh(dims):
        models = policy(dims)
        drafts = mb.build_draft(models, folder)
        logits = []
        drafts[0].register_forward_hook(lambda module, inputs, output: logits.append(output.detach()))
        options = {"packed": packed, "micro_batch_size": 1, "draft_steps": steps}
        plain = mb.forward(models, *batch())
        outputs = mb.forward(models, *batch(), drafts=drafts, loss=lambda out, rows: out.draft_loss.sum(), **options)
        assert torch.equal(plain.log_probs, mb.forward(models, *batch()).log_probs)
        assert plain.draft_loss is None
        assert not any(parameter.grad is not None and parameter.grad.any() for parameter in models[0].parameters())
        weights = mb.to_hf_state_dict(drafts)
        engine = mb.engine_ranks(tp=2)[1] if parallel_state.get_tensor_model_parallel_rank() else "nothing"
        sliced = dict(mb.iter_hf_weights(drafts, target=engine))
        assert all(torch.equal(value, half_of(name, weights[name])) for name, value in sliced.items())
        for parameter in drafts[0].parameters():
            parameter.data = parameter.grad
        return outputs.draft_loss, mb.to_hf_state_dict(drafts), weights, logits[-1]


@pytest.mark.parametrize(("name", "steps"), [("shared", STEPS), ("own", 1), ("own", 2)])
@pytest.mark.parametrize(("sizes", "packed"), MESHES, ids=str)
def test_every_mesh_trains_a_head_as_plain_torch_does(name, steps, sizes, packed, tmp_path):
    fields, own_embedding, _ = CASES[name]
    state = eagle3.random_head(fields, POLICY, own_embedding=own_embedding)
    folder = eagle3.write(tmp_path, fields, state)
    losses, grads, logits = expected(name, state, steps=steps)
    world = mb.ParallelDims(**sizes).smallest_world
    for found, ours, weights, own in pool.run(world, train, folder, sizes, packed, steps):
        assert tiny.relative_error(found, losses) < BOUND
        assert {key: value.dtype for key, value in weights.items()} == {k: v.dtype for k, v in state.items()}
        assert all(torch.equal(weights[key], value) for key, value in state.items())
        for key, grad in grads.items():
            assert tiny.relative_error(ours[key], grad) < 10 * BOUND, key
        if not sizes:
            assert tiny.relative_error(own[0], logits) < BOUND


@pytest.mark.parametrize("mistake", eagle3.MISTAKES + eagle3.STEP_MISTAKES)
def test_the_batch_would_show_a_mistake(mistake):
    state = eagle3.random_head(SHARED, POLICY, own_embedding=False)
    steps = STEPS if mistake in eagle3.STEP_MISTAKES else 1
    right, wrong = (expected("shared", state, each, steps)[0] for each in ("", mistake))
    assert tiny.relative_error(wrong, right) > 100 * BOUND


def folders(places):
    """Runs in one process: heads in both dialects are saved under published names, also into their own folder."""
    published, other, saved = places
    found = []
    with stepping.mesh(mb.ParallelDims()):
        models = policy(mb.ParallelDims())
        for folder in (published, other):
            drafts = mb.build_draft(models, folder)
            mb.save_hf_checkpoint(drafts, saved)
            mb.save_hf_checkpoint(mb.build_draft(models, saved), saved)
            (file,) = Path(saved).glob("*.safetensors")
            found.append((load_file(file), json.loads((Path(saved) / "config.json").read_text())))
        mb.save_checkpoint(drafts, str(Path(saved) / "dist"))
        new = mb.build_draft(
            models, LlamaConfig(**OWN, own_embedding=True), token_ids=torch.arange(50, 50 + eagle3.DRAFT_VOCAB)
        )
        half = mb.to_hf_state_dict(drafts, dtype=torch.bfloat16)
        return found, mb.to_hf_state_dict(new), half


def test_both_dialects_are_saved_under_published_names(tmp_path):
    state = eagle3.random_head(OWN, POLICY, own_embedding=True)
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in state.items()}
    renamed["d2t"] = renamed["d2t"].int()  # a load widens integers
    places = [eagle3.write(tmp_path / "a", OWN, state), eagle3.write(tmp_path / "b", OWN, renamed), str(tmp_path / "c")]
    found, new, half = pool.run(1, folders, places)[0]
    for saved, fields in found:
        assert saved.keys() == state.keys()
        assert all(torch.equal(saved[name], value) for name, value in state.items())
        again = {name: fields[name] for name in OWN if name != "rope_theta"}
        assert again == {name: value for name, value in OWN.items() if name != "rope_theta"}
    assert new["embed_tokens.weight"].shape == (POLICY.vocab_size, OWN["hidden_size"])
    assert torch.equal(new["d2t"] + torch.arange(eagle3.DRAFT_VOCAB), torch.arange(50, 50 + eagle3.DRAFT_VOCAB))
    assert new["t2d"].nonzero()[:, 0].tolist() == [*range(50, 50 + eagle3.DRAFT_VOCAB)]
    assert float(new["fc.weight"].std()) > 0
    kinds = {name: value.dtype for name, value in half.items()}
    assert (kinds["d2t"], kinds["t2d"], kinds["fc.weight"]) == (torch.int64, torch.bool, torch.bfloat16)


def stepped(folder):
    """Runs in each worker: gradients with megatron-core's DDP, and a round trip through its checkpoints."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    dims = mb.ParallelDims(tp=2, sp=True)
    with stepping.mesh(dims):
        models = policy(dims)
        drafts = mb.build_draft(models, folder)
        as_ddp = functools.partial(DistributedDataParallel, ddp_config=DistributedDataParallelConfig())
        how = {"drafts": [as_ddp(drafts[0].config, module=drafts[0])], "draft_steps": STEPS, "micro_batch_size": 1}
        how["loss"] = lambda out, rows: out.draft_loss.sum()
        with pytest.raises(BatchError, match="both be wrapped"):
            mb.forward(models, *batch(), **how)
        models[0].config.finalize_model_grads_func = finalize_model_grads
        mb.forward([as_ddp(models[0].config, module=models[0])], *batch(), **how)
        models[0].config.finalize_model_grads_func = None
        weights = mb.to_hf_state_dict(drafts)
        mb.save_checkpoint(drafts, f"{folder}/dist")
        for parameter in drafts[0].parameters():
            parameter.data = parameter.main_grad.clone()
        grads = mb.to_hf_state_dict(drafts)
        mb.load_checkpoint(drafts, f"{folder}/dist")
        loaded = mb.to_hf_state_dict(drafts)
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())
        return grads


def test_ddp_and_checkpoints_of_megatron_core(tmp_path):
    state = eagle3.random_head(SHARED, POLICY, own_embedding=False)
    _, grads, _ = expected("shared", state, steps=STEPS)
    for ours in pool.run(2, stepped, eagle3.write(tmp_path, SHARED, state)):
        for name, grad in grads.items():
            assert tiny.relative_error(ours[name], grad) < 10 * BOUND, name


def fed(folder):
    """Runs in one process: rounds of a sync, and a map of vLLM's loader."""
    with stepping.mesh(mb.ParallelDims()):
        models = policy(mb.ParallelDims())
        drafts = mb.build_draft(models, folder)
        states = [eagle3.random_head(SHARED, POLICY, own_embedding=False, seed=seed) for seed in range(5)]

        def read(number):
            engine = eagle3.VllmHead(states[0])
            engine.load(states[number - 1].items())
            return engine

        engine = eagle3.VllmHead(states[0])
        norm = torch.nn.Linear(1, POLICY.hidden_size, bias=False)
        load = lambda pairs: norm.weight.data[:, 0].copy_(dict(pairs)["model.norm.weight"])  # noqa: E731
        of_policy = EngineWorker(norm, load, name="a policy")
        client = functools.partial(of_policy.receive)
        client.draft = EngineWorker(engine, lambda pairs: engine.load(pairs), name="a head").receive
        with mb.WeightSync(models, client, drafts=drafts) as sync:
            for number in (1, 2):
                mb.load_hf_weights(drafts, states[number - 1])
                assert sync().version == number
                assert not mapped.differences(engine, read(number))
                assert torch.equal(norm.weight[:, 0], models[0].decoder.final_layernorm.weight)
                models[0].decoder.final_layernorm.weight.data.add_(1.0)
        engine = eagle3.VllmHead(states[0])
        return mapped.fed_by_map(engine, engine.load, drafts, states, read)


def test_a_sync_and_a_map_of_an_engine_cover_a_head(tmp_path):
    state = eagle3.random_head(SHARED, POLICY, own_embedding=False)
    found = pool.run(1, fed, eagle3.write(tmp_path, SHARED, state))[0]
    assert (found.uncovered, found.wrong) == ([], [])


IDS = "eagle_aux_hidden_state_layer_ids"
WRONG = {
    "absolute ids": ({}, {"d2t": lambda d2t: d2t + torch.arange(len(d2t))}, "subtract arange"),
    "another choice": ({}, {"t2d": lambda t2d: t2d.roll(1)}, "t2d must mark these target ids"),
    "no map": ({}, {"d2t": None, "t2d": None}, "equal to it without a tensor d2t"),
    "no norm": ({}, {"midlayer.hidden_norm.weight": None}, "missing.*hidden_norm"),
    "two layers": ({"num_hidden_layers": 2}, {}, "num_hidden_layers must be 1"),
    "layers": ({IDS: [2, 4, 8]}, {}, "rising order and below 8"),
    "dialects": ({IDS: [2, 4, 5], "eagle_config": {IDS: [2, 4, 5]}}, {}, "must be one more than in eagle_config"),
    "a norm": ({"fc_norm": True}, {}, "missing.*fc_norm.0.weight"),
    "a field": ({"input_norm": True}, {}, "does not know input_norm=True"),
    "an output": ({"norm_output": False}, {}, "vLLM and SpecForge disagree"),
    "a key": ({"eagle_config": {"norm_before_fc": True}}, {}, "found .'norm_before_fc'"),
    "a choice": ({"eagle_config": {"use_mtp_layernorm": True}}, {}, "nobody has written"),
    "sizes": ({"vocab_size": 91, "target_hidden_size": 47}, {}, "vocab_size of the draft is 91.*target_hidden_size of"),
    "words": ({"eagle_aux_hidden_state_layer_ids": ["1", 2, 3]}, {}, "list of whole numbers, found"),
    "parts": ({"eagle_aux_hidden_state_layer_ids": [1, 2.5, 3]}, {}, "list of whole numbers, found"),
    "a class": ({"architectures": ["LlamaForCausalLM"]}, {}, "must name a draft head first"),
    "a tie": ({"tie_word_embeddings": True}, {}, "tie_word_embeddings must be False"),
}


def refused(cases):
    """Runs in one process: the errors of heads that contradict themselves or their policy."""
    found = {}
    with stepping.mesh(mb.ParallelDims()):
        models = policy(mb.ParallelDims())
        of_head = [*models[0].output_layer._forward_hooks]
        for name, folder in cases.items():
            with pytest.raises(BridgeError) as error:
                mb.build_draft(models, folder)
            found[name] = str(error.value)
        with pytest.raises(ConfigError, match="of a draft head"):
            mb.build_model(folder, dims=mb.ParallelDims(), device="cpu")
        for token_ids in (None, torch.arange(3), torch.arange(eagle3.DRAFT_VOCAB).flip(0)):
            with pytest.raises(ConfigError, match="37 different ids below 90 in rising order"):
                mb.build_draft(models, LlamaConfig(**SHARED), token_ids=token_ids)
        drafts = mb.build_draft(models, LlamaConfig(**{**SHARED, "draft_vocab_size": None}))
        with pytest.raises(ConfigError, match="must be no draft head"):
            mb.add_adapters(drafts, rank=2, alpha=4, targets="all-linear")
        assert drafts[0].vocabulary is None
        assert mb.forward(models, *batch(), drafts=drafts).draft_loss[:, 4:].all()
        with pytest.raises(BatchError, match=r"the list of one head.*images must be None"):
            mb.forward(models, *batch(), drafts=models, images=[None, None])
        with pytest.raises(BatchError, match="run it first"), mb.drafting(models, drafts) as losses:
            losses()
        drafts[0].config.recompute_granularity = "full"
        with pytest.raises(BatchError, match="recompute_granularity=None for several steps"):
            mb.forward(models, *batch(), drafts=drafts, draft_steps=2)
        drafts[0].config.recompute_granularity = None
        assert not drafts[0].decoder.layers[0].self_attention.core_attention.steps
        assert [*models[0].output_layer._forward_hooks] == of_head
        hooks = models[0]._forward_pre_hooks
        assert not [*hooks, *(hook for layer in models[0].decoder.layers for hook in layer._forward_pre_hooks)]
    return found


def test_a_head_that_does_not_fit_is_refused(tmp_path):
    cases = {}
    for name, (changes, tensors, _) in WRONG.items():
        state = eagle3.random_head(SHARED, POLICY, own_embedding=False)
        changed = {key: change and change(state[key]) for key, change in tensors.items()}
        kept = {key: value for key, value in {**state, **changed}.items() if value is not None}
        cases[name] = eagle3.write(tmp_path / name, {**SHARED, **changes}, kept)
    found = pool.run(1, refused, cases)[0]
    for name, (_, _, message) in WRONG.items():
        assert re.search(message, found[name], re.DOTALL), (name, found[name])


def staged():
    """Runs in each worker: the error of a policy with pipeline stages."""
    dims = mb.ParallelDims(pp=2)
    with stepping.mesh(dims):
        with pytest.raises(BridgeError, match="without pipeline stages, found 2") as error:
            mb.build_draft(policy(dims), LlamaConfig(**SHARED))
        return str(error.value)


def test_pipeline_stages_are_refused_on_all_ranks():
    assert len(pool.run(2, staged)) == 2
