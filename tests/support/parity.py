"""Compare logits of our model with transformers': fp32, CPU, everything random."""

import tempfile
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mcore_bridge as mb
from tests import zoo
from tests.support.shared_jobs import once
from tests.support.stepping import meet
from tests.support.strategies import random_state, save
from tests.support.twins import TWINS

SEQ, BATCH = 24, 2
LONG = 40
"""Longer than every original rope length and every window of the zoo, so that later positions are compared, too."""


def tokens(hf: Any, seq: int = SEQ) -> Tensor:
    """Token ids, int64 [BATCH, seq]."""
    size = getattr(hf, "unpadded_vocab_size", None) or hf.vocab_size
    return torch.randint(0, size, (BATCH, seq), generator=torch.Generator().manual_seed(3))


def reference_logits(hf: Any, seq: int = SEQ) -> Tensor:
    """The logits of transformers from ``random_state`` as a file, fp32 [BATCH, seq, vocab]."""

    def compute() -> Tensor:
        with tempfile.TemporaryDirectory() as folder:
            model = reference_model(hf, folder)
        with torch.no_grad():
            logits: Tensor = model(tokens(hf, seq)).logits
        return logits

    return once(f"{seq} {hf.to_json_string()}", compute)


def reference_model(
    hf: Any, folder: str, state: dict[str, Tensor] | None = None, dtype: torch.dtype = torch.float32
) -> Any:
    """transformers' model with exactly the tensors of ``state`` or ``random_state``.

    If transformers lacks the family, it is the model of the equivalent family. It is loaded in ``dtype``, which leaves
    the frequencies of rope in fp32; ``model.to(dtype)`` would round them.
    """
    from transformers import AutoModelForCausalLM

    state = state or random_state(hf)
    if twin := TWINS.get(hf.model_type):
        state, hf = twin.unnamed(state, hf), twin.config(hf)
    save(state, hf, folder)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype, output_loading_info=True
    )
    assert not info["unexpected_keys"], info["unexpected_keys"]
    assert set(info["missing_keys"]) <= ({"lm_head.weight"} if hf.tie_word_embeddings else set()), info["missing_keys"]
    if hf.model_type == "apertus":  # transformers 4 has the numbers of its activation in bf16, whatever dtype is
        activations = {name: tensor for name, tensor in state.items() if ".act_fn." in name}
        model.to(dtype).load_state_dict(activations, strict=False)
    return model.eval()


@cache
def reference_of(name: str) -> Tensor:
    """``reference_logits`` of a case of the zoo."""
    return reference_logits(zoo.cases()[name].hf, seq=LONG)


def our_logits(source: Any, dims: mb.ParallelDims, seq: int = SEQ) -> Tensor:
    """The logits of this mesh (one pipeline stage), gathered over tp, with padding cut off.

    ``source`` is a config, for the state of ``reference_model``, or a folder with weights.
    """
    meet(dims)
    weights: Any = True if isinstance(source, str) else random_state(source)
    (model,) = mb.build_model(source, dims=dims, dtype=torch.float32, device="cpu", load_weights=weights)
    return logits_of(model, dims, seq)


def logits_of(model: Any, dims: mb.ParallelDims, seq: int = SEQ) -> Tensor:
    """The logits of a model of one pipeline stage, gathered over tp, with padding cut off."""
    model.eval()
    hf = model.bridge.hf
    with torch.no_grad():
        logits = model(tokens(hf, seq), torch.arange(seq).expand(BATCH, seq), None)
    parts = [torch.empty_like(logits) for _ in range(dims.tp)]
    dist.all_gather(parts, logits.contiguous(), group=model.pg_collection.tp)
    return torch.cat(parts, -1)[..., : getattr(hf, "unpadded_vocab_size", None) or hf.vocab_size]


def worst_differences(cases: list[tuple[Any, mb.ParallelDims, Tensor]]) -> list[float]:
    """The largest difference of each case, relative to the spread of the reference.

    A case is a config or a folder, a mesh, and the reference.
    """
    worst = []
    for hf, dims, reference in cases:
        logits = our_logits(hf, dims, reference.shape[1])
        worst.append(float((logits - reference).abs().max() / reference.std()))
    return worst
