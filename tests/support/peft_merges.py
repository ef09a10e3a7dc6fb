"""Weights that ``peft`` merges in fp64, and the same adapters on a mesh."""

import peft
import torch

from mcore_bridge.rules.mapping import axes_of
from mcore_bridge.rules.trace import trace
from mcore_bridge.weights.bound import bind
from tests.support import tiny

RANK, ALPHA = 3, 5
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def expected(hf, targets, dtype):
    """Factors in our names, the base, and the weights that ``peft`` merges in fp64, of a random model in ``dtype``."""
    base = tiny.random_model(hf).to(dtype).state_dict()
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=[target for target in targets if target not in EXPERTS],
        target_parameters=[f"mlp.{target}" for target in targets if target in EXPERTS] or None,
    )
    model = peft.get_peft_model(tiny.random_model(hf), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    factors = dict(_named(model.to(dtype).state_dict(), getattr(hf, "num_experts", 0)))
    wide = model.double().merge_and_unload().state_dict()
    return factors, base, {name: _nearest(tensor, dtype) for name, tensor in wide.items()}


def _named(tensors, num_experts):
    """The factors of ``peft`` in our names; for experts, one of each."""
    for name, tensor in tensors.items():
        if ".lora_" not in name:
            continue
        name = name.removeprefix("base_model.model.").replace(".default.", ".")
        if ".experts." not in name:
            yield name, tensor
            continue
        kind = "gate_up_proj" if ".base_layer." in name else "down_proj"
        name = name.replace(".base_layer.", ".").replace(".experts.", f".experts.{kind}.")
        stacked = tensor.unflatten(0, (num_experts, RANK)) if "lora_A" in name else None
        stacked = tensor.unflatten(1, (RANK, num_experts)).permute(2, 0, 1) if stacked is None else stacked
        yield from ((f"{name}[{number}]", entry) for number, entry in enumerate(stacked))


def _nearest(wide, dtype):
    """Of the neighbours in ``dtype``, that which is nearest; torch's cast to 16 bits rounds twice."""
    middle = wide.to(dtype)
    choices = [middle, *(middle.nextafter(torch.full_like(middle, side)) for side in (-torch.inf, torch.inf))]
    distance = torch.stack([(choice.double() - wide).abs() for choice in choices])
    return torch.stack(choices).gather(0, distance.argmin(0)[None])[0]


@torch.no_grad()
def fill(chunks, made, factors):
    """Give the adapters of this rank the values of ``factors``."""
    bound = bind(chunks, adapters=made)
    for name, parameter in bound.tensors.items():
        binding = made.mapping.bind(name)
        traced = trace(binding.layout, tuple(parameter.shape), axes_of(binding, bound.axes))
        parts = [factors[part] for part in binding.hf]
        parameter.copy_(traced.shard(bound.ranks[binding.axis], parts, parameter.dtype))
