"""A step with adapters against ``peft``: the loss and the gradient of each A and B, over the meshes."""

from functools import partial

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from mcore_bridge import ParallelDims, build_model, to_hf_state_dict
from mcore_bridge.errors import BridgeError, ConfigError
from mcore_bridge.factory.adapter_sets import set_adapters
from mcore_bridge.factory.add_adapters import add_adapters
from mcore_bridge.factory.modules.adapter import Adapter
from mcore_bridge.rules.adapters import base_name
from mcore_bridge.rules.names import canonical_names
from mcore_bridge.weights.model_chunks import numbering_of
from mcore_bridge.weights.peft.hf_adapters import iter_hf_adapters
from tests import zoo
from tests.support import experts, mtp_checkpoints, pool, stepping, tiny
from tests.support.fake_mesh import rank_of
from tests.support.peft_models import ALPHA, EXPERTS, RANK, batch, entries, expected, fill, parameters

P = 0.3
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME = ("q_proj", "v_proj", "up_proj")
"""Some projections of each layer of mcore that joins projections."""
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
SHARED = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj")
SP = {"tp": 2, "sp": True}
ALL_EXPERTS = {"num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "moe"]}
OWN = {
    "llama": lambda: tiny.config("llama"),
    "llama, two groups": lambda: tiny.config("llama", num_key_value_heads=2),
    "qwen3": lambda: tiny.config("qwen3"),
    "qwen3_moe": lambda: experts.HF,
    "qwen3_moe, split": lambda: zoo.case("qwen3_moe", **ALL_EXPERTS).hf,
}
"""The configs of cases that are not in the zoo."""
CASES = {
    "llama": (DENSE, "", ({"tp": 2}, SP, {"pp": 2}, {"cp": 2})),
    "qwen3": (
        SOME,
        "",
        ({"tp": 2}, {**SP, "overrides": FULL}, {"pp": 2, "vp": 2, "overrides": FULL}, {"cp": 2, "overrides": PARTS}),
    ),
    "llama, dora": (DENSE, "", ({"tp": 2}, {**SP, "overrides": FULL}, {"pp": 2}, {"cp": 2})),
    "llama, two groups": (DENSE, "", ({"tp": 4, "sp": True},)),
    "llama, two groups, dora": (DENSE, "", ({"tp": 4, "sp": True},)),
    "qwen3, dora": (SOME, "", (SP,)),
    "qwen3_next, dora": (
        ("in_proj_qkvz", "out_proj", *DENSE[:4], *SHARED),
        "fused",
        ({**SP, "etp": 2}, {"ep": 2}),
    ),
    "gpt_oss, dora": (DENSE[:4], "", (SP, {"ep": 2})),
    "deepseek_v3-dense, dora": (LATENT, "", (SP,)),
    "qwen3_moe": (
        (*DENSE[:4], *EXPERTS),
        "fused",
        ({"ep": 2}, {**SP, "overrides": PARTS}, {**SP, "etp": 2}, {"etp": 2}),
    ),
    "qwen3_moe, split": (DENSE, "split", ({"ep": 2}, {**SP, "etp": 2})),
    "gemma2": (DENSE, "", ({**SP, "overrides": FULL}, {"pp": 2})),
    "nemotron_h-no-experts": (("in_proj", *DENSE[:4], "up_proj", "down_proj"), "", (SP,)),
    "lfm2": (("in_proj", "q_proj", "v_proj", "out_proj", "w1", "w3", "w2"), "", (SP, {"pp": 2})),
    "lfm3": (("in_proj", "q_proj", "o_proj", "w1", "w3", "w2"), "", (SP, {"pp": 2})),
    "apertus": ((*DENSE[:4], "up_proj", "down_proj"), "", ({**SP, "overrides": FULL}, {"pp": 2})),
    "muse_glimmer": (("q_proj", "o_proj", "up_proj", "down_proj"), "", ({**SP, "overrides": FULL}, {"pp": 2})),
    "kimi_linear": (("k_proj", "f_a_proj", "b_proj", "o_proj", "kv_b_proj", *DENSE[4:]), "", (SP, {"pp": 2})),
    "olmo_hybrid": (("q_proj", "a_proj", "b_proj", "g_proj", "o_proj", *DENSE[4:]), "", (SP, {"pp": 2})),
    "bailing_hybrid": (
        ("k_proj", "f_proj", "g_proj", "b_proj", "kv_b_proj", *DENSE[4:], *EXPERTS),
        "fused",
        (SP, {"pp": 2}),
    ),
    "gpt_oss": (("o_proj", *EXPERTS), "fused", ({"ep": 2},)),
    "step3p5": (("q_proj", "g_proj", "gate_proj", "up_proj"), "", (SP, {"ep": 2})),
    "llama4": (("o_proj", *SHARED, *EXPERTS), "fused", ({"ep": 2}, {**SP, "etp": 2})),
    "qwen3_vl_moe": (EXPERTS, "fused", ({**SP, "etp": 2},)),
    "deepseek_v3-dense": (LATENT, "", ({"tp": 2},)),
    "deepseek_v3": ((*LATENT, *EXPERTS), "fused", ({**SP, "etp": 2},)),
    "deepseek_v32": ((*LATENT, *EXPERTS), "fused", ({**SP, "etp": 2}, {"pp": 2, "overrides": FULL})),
    "deepseek_v32, dora": (LATENT, "fused", (SP,)),
    "qwen3.5": (
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", *DENSE),
        "",
        ({"tp": 2, "overrides": FULL},),
    ),
    "qwen3_next": (
        ("in_proj_qkvz", "in_proj_ba", "out_proj", *DENSE[:4], *SHARED, *EXPERTS),
        "fused",
        ({**SP, "etp": 2}, {"pp": 2, "vp": 2}),
    ),
}


def steps(folder, meshes, targets, expert_format, values, dora):
    """Runs in each worker: for each mesh the loss, and the gradients by HF name."""
    found = []
    for sizes in meshes:
        overrides = sizes.pop("overrides", None)
        dims = ParallelDims(**sizes)
        with stepping.mesh(dims):
            chunks = build_model(folder, dims=dims, dtype=torch.float32, device="cpu", overrides=overrides)
            options = {"targets": targets, "expert_format": expert_format or None, "dora": dora}
            made = add_adapters(chunks, rank=RANK, alpha=ALPHA, **options)
            absent, own = fill(chunks, made, values), parameters(chunks)
            assert {id(p) for p in own} == {id(p) for c in chunks for p in c.parameters() if p.requires_grad}
            loss = stepping.forward_backward(stepping.wrap(chunks), dims, batch(), micro_batch_size=4)
            with torch.no_grad():  # gradients have the places of their parameters, so the export gives them HF names
                for parameter in own:
                    parameter.copy_(parameter.main_grad)
            assert not any(rows.any() for rows in absent), "what HF has no adapter for gets no gradient"
            grads = entries(iter_hf_adapters(chunks))
            found.append((f"{sizes} {overrides}", "", {"loss": loss, "grads": grads}))
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_peft(case, tmp_path):
    targets, expert_format, meshes = CASES[case]
    name = case.removesuffix(", dora")
    if (expert_format == "fused" and not zoo.NEWEST) or not (name in OWN or zoo.here([name])):
        pytest.skip("the installed releases have no such model, or a module for each expert")
    make = OWN.get(name, lambda: zoo.cases()[name].hf)
    tiny.random_checkpoint(make(), tmp_path)
    dora = case.endswith("dora")
    values, loss, grads = expected(make(), targets, expert_format, use_dora=dora)
    num_ranks = max(sizes.get("tp", 2) for sizes in meshes)
    ranks = pool.run(num_ranks, steps, str(tmp_path), meshes, targets, expert_format, values, dora)
    for results in zip(*ranks, strict=True):
        tiny.assert_losses(results, loss)
        for label, _, step in results:
            assert step["grads"].keys() == grads.keys(), set(step["grads"]) ^ set(grads)
            tiny.assert_near(step["grads"], grads, f"{case} on {label}")


def note_kept(calls, module, inputs, output):
    calls.append(output != 0)


def dropped(folder, meshes, targets, values, options):
    """Runs in each worker: for each mesh the loss, the gradients, and what each dropout has kept, in order."""
    found = []
    for sizes in meshes:
        overrides = sizes.pop("overrides", None)
        dims, kept = ParallelDims(**sizes), {}
        with stepping.mesh(dims):
            chunks = build_model(folder, dims=dims, dtype=torch.float32, device="cpu", overrides=overrides)
            made = add_adapters(chunks, rank=RANK, alpha=ALPHA, targets=targets, dropout=P, **options)
            fill(chunks, made, values)
            for chunk in chunks:
                for path, module in chunk.named_modules():
                    if isinstance(module, Adapter):
                        names = canonical_names(f"{path}.linear_in.weight", numbering_of(chunk))
                        module.dropout.register_forward_hook(partial(note_kept, kept.setdefault(names, [])))
            torch.manual_seed(3)
            model_parallel_cuda_manual_seed(3)
            loss = stepping.forward_backward(stepping.wrap(chunks), dims, batch(), micro_batch_size=4)
            get_cuda_rng_tracker().reset()
            with torch.no_grad():
                for parameter in parameters(chunks):
                    parameter.copy_(parameter.main_grad)
            by_name = {}
            for names, calls in kept.items():
                hf = [own for name in names for own in made.mapping.bind(name).hf]
                again = len(hf) * bool(overrides)  # a recompute follows each forward
                for number, own in enumerate(hf):
                    by_name[base_name(own)] = calls[number :: len(hf) + again]
                    assert not again or all(
                        map(torch.equal, by_name[base_name(own)], calls[number + again :: len(hf) + again])
                    )
            found.append((f"{sizes} {overrides}", dims, loss, entries(iter_hf_adapters(chunks)), by_name))
    return found


def joined(ranks, dims, is_cut):
    """What a dropout has kept on the whole mesh, ``[batch, sequence, in]``, and whether parts of ranks differ."""
    if dims.cp > 1:
        first, last = zip(*(part.chunk(2) for part in ranks), strict=True)
        return torch.cat((*first, *reversed(last))).transpose(0, 1), True
    if dims.tp == 1:
        return ranks[0].transpose(0, 1), True
    if is_cut or dims.sp:
        return torch.cat(ranks, -1 if is_cut else 0).transpose(0, 1), not torch.equal(*ranks)
    assert torch.equal(*ranks), "ranks with one input zero the same elements"
    return ranks[0].transpose(0, 1), True


@pytest.mark.parametrize("dora", [False, True])
def test_a_step_with_dropout_is_that_of_peft_with_the_same_zeros(dora, tmp_path):
    tiny.random_checkpoint(hf := tiny.config("llama"), tmp_path)
    values, *_ = expected(hf, DENSE, "", use_dora=dora)
    meshes = ({"tp": 2}, {**SP, "overrides": FULL}, {"pp": 2}, {"cp": 2})
    ranks = pool.run(2, dropped, str(tmp_path), meshes, DENSE, values, {"dora": dora})
    for (label, dims, loss, grads, kept), (_, _, last_loss, _, further) in zip(*ranks, strict=True):
        whole = {}
        for name in {*kept, *further}:
            of_ranks = [each[name] for each in (kept, further) if name in each]
            batches = [joined(own, dims, name.endswith(("o_proj", "down_proj"))) for own in zip(*of_ranks, strict=True)]
            whole[name] = torch.cat([own for own, _ in batches])
            assert all(differs for _, differs in batches), f"{label}: parts of ranks are zeroed independently"
            assert 0.5 < whole[name].float().mean() < 0.9
            assert not torch.equal(*whole[name].chunk(2)), "each micro batch draws for itself"
        first = whole["model.layers.0.self_attn.q_proj"]
        assert not torch.equal(first, whole["model.layers.0.self_attn.v_proj"]), "each projection draws for itself"
        _, wanted, expected_grads = expected(hf, DENSE, "", kept=whole, use_dora=dora, lora_dropout=P)
        torch.testing.assert_close(last_loss if loss is None else loss, wanted, rtol=1e-5, atol=1e-6, msg=label)
        tiny.assert_near(grads, expected_grads, label)
    other = "model.layers.0.self_attn.v_proj"
    *_, wrong = expected(hf, DENSE, "", kept={**whole, other: first}, use_dora=dora, lora_dropout=P)
    with pytest.raises(AssertionError, match="self_attn"):
        tiny.assert_near(grads, wrong, "zeros of another projection")


def test_ranks_that_cut_an_expert_zero_the_same_elements_of_whole_inputs_alone(tmp_path):
    tiny.random_checkpoint(OWN["qwen3_moe, split"](), tmp_path)
    arguments = ({**SP, "etp": 2},), DENSE, None, {"expert_format": "split"}
    ((*_, first),), ((*_, second),) = pool.run(2, dropped, str(tmp_path), *arguments)
    assert sum(".experts." in name for name in first) == 8 * 3
    for name in first:
        is_whole = ".experts." in name and not name.endswith("down_proj")
        assert all(torch.equal(*pair) for pair in zip(first[name], second[name], strict=True)) == is_whole, name


def drawn(folder, meshes):
    """Runs in each worker: A of two layers on each mesh, after calls that are refused."""
    found = []
    for sizes in meshes:
        dims = ParallelDims(**sizes)
        with stepping.mesh(dims):
            chunks = build_model(folder, dims=dims, dtype=torch.float32, device="cpu")
            with pytest.raises(ConfigError, match=r"rank must be at least 1.*must not be wrapped"):
                add_adapters(stepping.wrap(chunks), rank=0, alpha=1, targets=DENSE)
            with pytest.raises(ConfigError, match="matches no module"):
                add_adapters(chunks, rank=1, alpha=1, targets=["q_prj"])
            assert all(parameter.requires_grad for parameter in chunks[0].parameters()), "a refusal changes nothing"
            add_adapters(chunks, rank=2, alpha=1, targets=DENSE, **({"seed": 0} if sizes else {}))  # the default
            with pytest.raises(ConfigError, match="models have adapters named 'default': pass another name"):
                add_adapters(chunks, rank=2, alpha=1, targets=DENSE)
            with pytest.raises(BridgeError, match="could be mistaken for the trained model"):
                to_hf_state_dict(chunks)
            layer = chunks[0].decoder.layers[1].self_attention
            found.append([linear.adapter.linear_in.weight.detach() for linear in (layer.linear_qkv, layer.linear_proj)])
    return found


def test_all_meshes_begin_with_the_same_adapter(tmp_path):
    tiny.random_checkpoint(tiny.config("llama"), tmp_path)
    (one, first), (_, second) = pool.run(2, drawn, str(tmp_path), ({}, {"tp": 2}))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[0], one[0])
    assert torch.equal(torch.cat((first[1], second[1]), 1), one[1])
    assert one[0].unique().numel() == one[0].numel(), "each projection of each layer has its own"


def test_a_recompute_of_a_forward_with_other_adapters_raises():
    with rank_of(ParallelDims(), 0, 1):
        for overrides in (FULL, {}):
            (chunk,) = build_model(tiny.config("llama"), load_weights=False, device="cpu", overrides=overrides)
            for name, targets in (("first", ["q_proj"]), ("second", ["down_proj"])):
                add_adapters(chunk, rank=2, alpha=1, targets=targets, name=name)
            set_adapters(chunk, "first")
            (first, *_), tokens = parameters(chunk), batch()[:, :-1]
            loss = chunk(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).float().square().sum()
            set_adapters(chunk, "second")
            if overrides:
                with pytest.raises(ConfigError, match="with the adapters 'first', and 'second' are in use"):
                    loss.backward()
                continue
            loss.backward()
            assert first.grad is not None
            assert not any(parameter.grad is not None for parameter in parameters(chunk))
            with pytest.raises(ConfigError, match=r"named 'third', found \['first', 'second'\]: call add_adapters"):
                set_adapters(chunk, "third")


def test_what_has_no_adapters_is_named():
    overrides = {"mtp_num_layers": 1, "moe_shared_expert_overlap": True, "moe_router_bias_update_rate": 1e-3}
    with rank_of(ParallelDims(), 0, 1):
        chunks = build_model(mtp_checkpoints.config("glm4_moe", 1), load_weights=False, overrides=overrides)
        with pytest.raises(
            ConfigError,
            match=r"list of module names, .* found 'q_proj': .*; .* at least 1, found 2.5: .*; alpha .* nan: .*; "
            r".*no MTP layers.*rate must be 0.*overlap must be off",
        ):
            add_adapters(chunks, rank=2.5, alpha=float("nan"), targets="q_proj")


REFUSED = {
    "qwen3_moe": [
        (
            {"targets": ["q_proj", *EXPERTS], "dropout": 0.1},
            r"dropout=0.1 .*experts.down_proj.* in one tensor, where peft refuses dropout: pass dropout=0",
        ),
        ({"targets": ["linear_fc1"], "dora": True}, "cannot have an adapter: DoRA of routed experts is not supported"),
        ({}, "peft chooses no targets for 'qwen3_moe': pass targets="),
    ],
    "deepseek_v32": [({"targets": ["kv_b_proj"], "dropout": 0.1}, "sparse attention reads the weight of .*kv_up_proj")],
}


@pytest.mark.parametrize("case", zoo.params(REFUSED))
def test_what_cannot_have_dropout_or_dora_or_targets_of_peft_is_named(case):
    with rank_of(ParallelDims(), 0, 1):
        chunks = build_model(zoo.cases()[case].hf, load_weights=False)
        for options, message in REFUSED[case]:
            with pytest.raises(ConfigError, match=message):
                add_adapters(chunks, rank=1, alpha=1, expert_format="fused", **options)


def of_no_layer():
    """The errors of two stages for a target that only other models of the family have; and whether all parameters are
    frozen.
    """
    dims = ParallelDims(pp=2)
    with stepping.mesh(dims):
        chunks = build_model(zoo.cases()["deepseek_v3-dense"].hf, dims=dims, device="cpu", load_weights=False)
        with pytest.raises(ConfigError) as caught:
            add_adapters(chunks, rank=1, alpha=1, targets=["q_proj", "o_proj"])
        return str(caught.value), all(parameter.requires_grad for parameter in chunks[0].parameters())


def test_a_target_that_no_stage_has_is_refused_on_all_of_them():
    for text, learns in pool.run(2, of_no_layer):
        assert "targets must name layers that the model has, found ['q_proj']" in text
        assert learns
