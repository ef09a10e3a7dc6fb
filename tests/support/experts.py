"""A model with experts, in both formats."""

import torch

from tests.support.strategies import tiny

HF = tiny(
    "qwen3_moe",
    num_hidden_layers=2,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    mlp_only_layers=[0],
    vocab_size=64,
)


KINDS = ("gate_proj", "up_proj", "down_proj")


def fused(state):
    """A checkpoint with the experts of a layer in one tensor, as some publishers write them."""
    kept = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    for layer in sorted({name.partition(".experts.")[0] for name in state.keys() - kept.keys()}):
        parts = {kind: [state[f"{layer}.experts.{i}.{kind}.weight"] for i in range(8)] for kind in KINDS}
        gate_up = [torch.cat(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
        kept[f"{layer}.experts.gate_up_proj"] = torch.stack(gate_up)
        kept[f"{layer}.experts.down_proj"] = torch.stack(parts["down_proj"])
    return kept
