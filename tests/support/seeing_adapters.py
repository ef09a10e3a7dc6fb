"""Adapters of the text of a composite whose tower is frozen: by ``peft``, and on a mesh."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.weights.peft.hf_adapters import adapters_of
from tests.support import seeing, stepping
from tests.support.peft_models import ALPHA, RANK, fill, held

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def made(folder: Path, out: Path, targets: Any = None) -> None:
    """Save random adapters of one rank, under ``out``."""
    dims = mb.ParallelDims()
    with stepping.mesh(dims):
        chunks = _with_adapters(folder, dims, targets=targets)
        fill(chunks, adapters_of(chunks))
        mb.save_hf_adapters(chunks, out)


def _with_adapters(folder: Path, dims: mb.ParallelDims, given: Path | None = None, targets: Any = None, **options: Any) -> list[Any]:
    chunks = seeing.built(folder, dims, vision="frozen", **options)
    asked: Any = {"rank": RANK, "alpha": ALPHA, "targets": targets or TARGETS} if given is None else {"folder": given}
    mb.add_adapters(chunks, **asked)
    return chunks


def expected(folder: Path, adapter: Path, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Computed by ``peft``: log-probs, and the gradient of each factor for the loss of ``seeing.loss``."""
    import peft

    model = peft.PeftModel.from_pretrained(seeing.reference(folder), adapter, is_trainable=True).eval()
    log_probs, _ = seeing.expected(model.base_model.model, *batch)
    grads = {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return log_probs, grads


def step(
    folder: Path, adapter: Path, sizes: dict[str, Any], batch: Any, *, bare: bool = False, **options: Any
) -> dict[str, Any]:
    """Runs in each worker: log-probs, the gradient of each factor by HF name, and gradients of the frozen tower."""
    dims = mb.ParallelDims(**sizes)
    with stepping.mesh(dims):
        chunks = _with_adapters(folder, dims, adapter, **options)
        ids, mask, images, wanted = batch
        outputs = mb.forward(
            chunks if bare else stepping.wrap(chunks),
            ids,
            mask,
            images=images,
            loss=lambda out, rows: seeing.loss(out.log_probs * (wanted != 0)[rows], range(len(ids))[rows]),
            micro_batch_size=1,
        )
        tower = [pair for chunk in chunks if hasattr(chunk, "vision") for pair in chunk.vision.named_parameters()]
        assert not any(parameter.requires_grad for name, parameter in tower if ".adapter." not in name)
        with torch.no_grad():
            for parameter in held(chunks).values():
                parameter.copy_(parameter.grad if bare else parameter.main_grad)
        return {
            "log_probs": outputs.log_probs.detach() * (wanted != 0),
            "grads": {name: tensor.clone() for name, tensor in mb.iter_hf_adapters(chunks)},
        }


def steps(folder: Path, adapter: Path, cases: Any, batch: Any) -> list[dict[str, Any]]:
    """Runs in each worker: ``step`` of each case, a mesh and options."""
    return [step(folder, adapter, sizes, batch, **options) for sizes, options in cases]
