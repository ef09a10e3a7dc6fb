"""A step with adapters against ``peft``: the loss and the gradient of each A and B, over the meshes."""

import pytest
import torch

from mcore_bridge import ParallelDims, build_model, to_hf_state_dict
from mcore_bridge.errors import BridgeError, ConfigError
from mcore_bridge.factory.add_adapters import add_adapters
from mcore_bridge.weights.peft.hf_adapters import iter_hf_adapters
from tests import zoo
from tests.support import experts, mtp_checkpoints, pool, stepping, tiny
from tests.support.fake_mesh import rank_of
from tests.support.peft_models import ALPHA, EXPERTS, RANK, batch, entries, expected, fill, held

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
    "llama, dora": lambda: tiny.config("llama"),
    "qwen3, dora": lambda: tiny.config("qwen3"),
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
    "qwen3, dora": (SOME, "", (SP,)),
    "qwen3_moe": (
        (*DENSE[:4], *EXPERTS),
        "fused",
        ({"ep": 2}, {**SP, "overrides": PARTS}, {**SP, "etp": 2}, {"etp": 2}),
    ),
    "qwen3_moe, split": (DENSE, "split", ({"ep": 2}, {**SP, "etp": 2})),
    "gemma2": (DENSE, "", ({**SP, "overrides": FULL}, {"pp": 2})),
    "nemotron_h-no-experts": (("in_proj", *DENSE[:4], "up_proj", "down_proj"), "", (SP,)),
    "gpt_oss": (("o_proj", *EXPERTS), "fused", ({"ep": 2},)),
    "llama4": (("o_proj", *SHARED, *EXPERTS), "fused", ({"ep": 2}, {**SP, "etp": 2})),
    "qwen3_vl_moe": (EXPERTS, "fused", ({**SP, "etp": 2},)),
    "deepseek_v3-dense": (LATENT, "", ({"tp": 2},)),
    "deepseek_v3": ((*LATENT, *EXPERTS), "fused", ({**SP, "etp": 2},)),
    "deepseek_v32": ((*LATENT, *EXPERTS), "fused", ({**SP, "etp": 2}, {"pp": 2, "overrides": FULL})),
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
            absent, own = fill(chunks, made, values), held(chunks).values()
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
    if (expert_format == "fused" and not zoo.NEWEST) or not (case in OWN or zoo.here([case])):
        pytest.skip("the installed releases have no such model, or a module for each expert")
    make = OWN.get(case, lambda: zoo.cases()[case].hf)
    tiny.random_checkpoint(make(), tmp_path)
    dora = case.endswith("dora")
    values, loss, grads = expected(make(), targets, expert_format, use_dora=dora)
    ranks = pool.run(2, steps, str(tmp_path), meshes, targets, expert_format, values, dora)
    for results in zip(*ranks, strict=True):
        tiny.assert_losses(results, loss)
        for label, _, step in results:
            assert step["grads"].keys() == grads.keys(), set(step["grads"]) ^ set(grads)
            tiny.assert_near(step["grads"], grads, f"{case} on {label}")


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
            with pytest.raises(ConfigError, match="one set is supported"):
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
