"""Logits of a model of ours against transformers': fp32, CPU, everything random."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mcore_bridge as mb
from tests.strategies import random_state

SEQ, BATCH = 24, 2


def tokens(hf: Any, seq: int = SEQ) -> Tensor:
    """Token ids, int64 [BATCH, seq]."""
    return torch.randint(0, hf.vocab_size, (BATCH, seq), generator=torch.Generator().manual_seed(3))


def reference_logits(hf: Any, seq: int = SEQ) -> Tensor:
    """What transformers computes from ``random_state``, fp32 [BATCH, seq, vocab]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager", dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(random_state(hf), strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if hf.tie_word_embeddings else set())
    model.tie_weights()
    with torch.no_grad():
        return model(tokens(hf, seq)).logits


def our_logits(hf: Any, dims: mb.ParallelDims, seq: int = SEQ) -> Tensor:
    """What this mesh (one pipeline stage) computes from the same state; gathered over tp, padding cut off."""
    dims.initialize(device="cpu")
    (model,) = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=random_state(hf))
    model.eval()
    with torch.no_grad():
        logits = model(tokens(hf, seq), torch.arange(seq).expand(BATCH, seq), None)
    parts = [torch.empty_like(logits) for _ in range(dims.tp)]
    dist.all_gather(parts, logits.contiguous(), group=model.pg_collection.tp)
    return torch.cat(parts, -1)[..., : hf.vocab_size]


def worst_differences(cases: list[tuple[Any, mb.ParallelDims, Tensor]]) -> list[float]:
    """The largest difference of each case (config, mesh, reference), relative to the spread of the reference."""
    from megatron.core import parallel_state

    worst = []
    for hf, dims, reference in cases:
        logits = our_logits(hf, dims, reference.shape[1])
        worst.append(float((logits - reference).abs().max() / reference.std()))
        parallel_state.destroy_model_parallel()
    return worst
