"""Bounds for differences between our logits or log-probs and transformers', and the meshes that are compared."""

import torch

import mcore_bridge as mb

BOUND = 2e-5
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
ROUNDING = 1 if HAS_AVX512 else 2
"""By what bounds are multiplied that were measured with AVX-512: other CPUs sum in other orders."""
ONE, TWO, FOUR = mb.ParallelDims(), mb.ParallelDims(tp=2, sp=True), mb.ParallelDims(tp=4, sp=True)
EXPERT_MESHES = [
    mb.ParallelDims(ep=2),
    mb.ParallelDims(tp=2, ep=2, sp=True),
    mb.ParallelDims(tp=2, etp=2, sp=True),
    mb.ParallelDims(tp=2, ep=2, etp=2, sp=True),
]


def excess(errors, own, *, routed):
    """The errors of all tokens ``[rows, seq]``, divided by the errors that transformers' ``own`` errors allow."""
    if routed:
        most, allowed = (each[own != 0].abs().quantile(0.75) for each in (errors, own))
        return float(most / allowed) / 3
    return float((errors.norm(dim=1) / own.norm(dim=1)).max()) / 2
