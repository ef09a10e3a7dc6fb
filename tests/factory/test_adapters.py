"""A step with adapters, held against ``peft``: loss and the gradient of each A and B, over the meshes."""

import functools

import peft
import pytest
import torch

from mcore_bridge import ParallelDims, build_model, to_hf_state_dict
from mcore_bridge.errors import BridgeError, ConfigError
from mcore_bridge.factory.adapters import add_adapters
from mcore_bridge.rules.adapters import is_adapter
from mcore_bridge.rules.mapping import axes_of
from mcore_bridge.rules.trace import trace
from mcore_bridge.weights.adapters import iter_hf_adapters
from mcore_bridge.weights.bound import bind
from mcore_bridge.weights.model_tensors import held_tensors
from tests import zoo
from tests.support import experts, pool, stepping, tiny

RANK, ALPHA = 3, 5
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME = ("q_proj", "v_proj", "up_proj")
"""Of each layer of mcore that joins projections, some."""
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
SP = {"tp": 2, "sp": True}
CASES = {
    "llama": (lambda: tiny.config("llama"), DENSE, ({"tp": 2}, SP, {"pp": 2}, {"cp": 2})),
    "qwen3": (lambda: tiny.config("qwen3"), SOME, ({"tp": 2}, SP, {"pp": 2}, {"cp": 2})),
    "qwen3_moe": (lambda: experts.HF, (*DENSE[:4], *EXPERTS), ({"ep": 2}, SP, {**SP, "etp": 2})),
    "deepseek_v3-dense": (lambda: zoo.cases()["deepseek_v3-dense"].hf, LATENT, ({"tp": 2},)),
    "deepseek_v3": (lambda: zoo.cases()["deepseek_v3"].hf, (*LATENT, *EXPERTS), ({**SP, "etp": 2},)),
}


def batch():
    return tiny.tokens(8, vocab_size=64)


def named(tensors, num_experts):
    """The tensors of ``peft`` in our names; for experts, one of each."""
    for name, tensor in tensors.items():
        if ".lora_" not in name:
            continue
        name = name.removeprefix("base_model.model.").replace(".default.", ".")
        if ".experts." not in name:
            yield name, tensor
            continue
        kind = "gate_up_proj" if ".base_layer." in name else "down_proj"
        name = name.replace(".base_layer.", ".").replace(".experts.", f".experts.{kind}.")
        own = tensor.unflatten(0, (num_experts, RANK)) if "lora_A" in name else tensor.unflatten(1, (RANK, num_experts))
        for number, entry in enumerate(own if "lora_A" in name else own.permute(2, 0, 1)):
            yield f"{name}[{number}]", entry


@functools.cache
def expected(case):
    """The adapter, its loss and its gradients, by ``peft``; the gradients of the factors in our names."""
    hf, targets = CASES[case][0](), CASES[case][1]
    model = tiny.random_model(hf)
    linear = [target for target in targets if target not in EXPERTS]
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=linear,
        target_parameters=[f"mlp.{target}" for target in targets if target in EXPERTS] or None,
    )
    model = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    _, loss, grads = tiny.reference(model, batch())
    count = getattr(hf, "num_experts", None) or getattr(hf, "n_routed_experts", 0)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return dict(named(values, count)), loss, dict(named(grads, count))


def steps(folder, meshes, targets, values):
    """Runs in each worker: for each mesh the loss, and the gradients by HF name."""
    found = []
    for sizes in meshes:
        dims = ParallelDims(**sizes)
        with stepping.mesh(dims):
            chunks = build_model(folder, dims=dims, dtype=torch.float32, device="cpu")
            made = add_adapters(chunks, rank=RANK, alpha=ALPHA, targets=targets, dialect="fused")
            bound = bind(chunks, adapters=made.mapping)
            own = {name: parameter for name, parameter in held_tensors(chunks).items() if is_adapter(name)}
            assert {id(p) for p in own.values()} == {id(p) for c in chunks for p in c.parameters() if p.requires_grad}
            absent = []
            for name, parameter in own.items():
                binding = made.mapping.bind(name)
                traced = trace(binding.layout, tuple(parameter.shape), axes_of(binding, bound.axes))
                rank = bound.ranks[binding.axis]
                absent += [parameter.narrow(*place) for place in traced.padding(rank)]
                with torch.no_grad():
                    parts = [values[part] for part in binding.hf]
                    parameter.copy_(traced.shard(rank, parts, torch.float32))
            loss = stepping.forward_backward(stepping.wrap(chunks), dims, batch(), micro_batch_size=4)
            with torch.no_grad():  # gradients have the places of their parameters, so the export gives them HF names
                for parameter in own.values():
                    parameter.copy_(parameter.main_grad)
            assert not any(rows.any() for rows in absent), "what HF has no adapter for gets no gradient"
            grads = {name: tensor.clone() for name, tensor in iter_hf_adapters(chunks)}
            found.append((str(sizes), "", {"loss": loss, "grads": grads}))
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_peft(case, tmp_path):
    make, targets, meshes = CASES[case]
    if EXPERTS[0] in targets and not zoo.NEWEST:
        pytest.skip("transformers 4 has a module for each expert, to which peft gives other names")
    tiny.random_checkpoint(make(), tmp_path)
    values, loss, grads = expected(case)
    ranks = pool.run(2, steps, str(tmp_path), meshes, targets, values)
    for results in zip(*ranks, strict=True):
        tiny.assert_losses(results, loss)
        for label, _, step in results:
            whole = {}
            for name, tensor in step["grads"].items():
                entries = enumerate(tensor) if tensor.dim() == 3 else ()
                whole |= {f"{name}[{number}]": entry for number, entry in entries} or {name: tensor}
            assert whole.keys() == grads.keys(), set(whole) ^ set(grads)
            tiny.assert_near(whole, grads, f"{case} on {label}")


def drawn(folder, meshes):
    """Runs in each worker: A of two layers on each mesh, after what is refused."""
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
            add_adapters(chunks, rank=2, alpha=1, targets=DENSE)
            with pytest.raises(ConfigError, match="one set is supported"):
                add_adapters(chunks, rank=2, alpha=1, targets=DENSE)
            with pytest.raises(BridgeError, match="would pass for the trained model"):
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
