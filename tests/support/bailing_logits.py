"""Logits that the code of Ling's publisher computes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from tests.support import bailing, stepping
from tests.support.parity import tokens
from tests.support.strategies import save


def reference(fields: dict[str, Any], folder: Path) -> Tensor:
    """The logits of transformers' equivalent family."""
    hf = bailing.twin(fields)
    save(bailing.twin_state(fields), hf, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens(hf)).logits


def logits(folder: str, dims: ParallelDims) -> Tensor:
    """Runs in each worker."""
    with stepping.mesh(dims):
        (model,) = mb.build_model(folder, dims=dims, dtype=torch.float32, device="cpu")
        model.eval()
        batch = tokens(model.bridge.hf)
        with torch.no_grad():
            ours = model(batch, torch.arange(batch.shape[1]).expand_as(batch), None, runtime_gather_output=True)
        return ours[..., : model.bridge.hf.vocab_size]
