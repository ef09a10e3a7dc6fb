"""Adapters of composites whose towers are built: by ``peft``, and on a mesh."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.factory import add_adapters
from mcore_bridge.weights.model_chunks import adapters_of
from tests.support import seeing, stepping
from tests.support.peft_models import ALPHA, RANK, fill, parameters

OPTIONS: Any = {"rank": RANK, "alpha": ALPHA, "targets": "all-linear"}


def made(folder: Path, out: Path, options: Any) -> None:
    """Save random adapters of one rank, under ``out``, and merge them into a folder beside it."""
    dims = mb.ParallelDims()
    with stepping.mesh(dims):
        chunks = seeing.built(folder, dims, vision="frozen")
        mb.add_adapters(chunks, **{**OPTIONS, **options})
        fill(chunks, adapters_of(chunks))
        mb.save_hf_adapters(chunks, out)
        mb.save_hf_checkpoint(chunks, out.with_name("merged"), merged=True)


def expected(folder: Path, adapter: Path, batch: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Computed by ``peft``: log-probs, the gradient of each tensor for the loss of ``seeing.loss``, merged weights.

    It also writes its folder of the adapters, "theirs" beside ``adapter``.
    """
    import peft

    model = peft.PeftModel.from_pretrained(seeing.reference(folder), adapter, is_trainable=True).eval()
    model.save_pretrained(adapter.with_name("theirs"))
    log_probs, _ = seeing.expected(model.base_model.model, *batch)
    grads = {
        name.replace(".default", "").replace("vector.weight", "vector"): torch.zeros_like(parameter)
        if parameter.grad is None
        else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return log_probs, grads, model.merge_and_unload().state_dict()


def unequal(*bindings: Any, kind: Any = add_adapters._kind) -> str:
    """A mistake: tensor-parallel ranks do not know that they have equal gradients, which are then summed."""
    found = kind(*bindings)
    return "whole" if found == "equal" else found


def step(
    folder: Path,
    adapter: Path,
    sizes: dict[str, Any],
    batch: Any,
    *,
    bare: bool = False,
    overlap: bool = False,
    recompute: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Runs in each worker: log-probs and gradients by the names of ``peft``, and adapters after a checkpoint.

    Args:
        bare: without DDP.
        overlap: replicas have different rows, and reduce gradients in the backward.
        recompute: recompute the layers of the tower.
    """
    dims = mb.ParallelDims(**sizes)
    with stepping.mesh(dims):
        from megatron.core import parallel_state

        chunks = seeing.built(folder, dims, vision="frozen", **options)
        mb.add_adapters(chunks, adapter)
        place = adapter.with_name(f"{sizes}{bare}{recompute}")
        before = saved(chunks, place)
        wrapped = chunks if bare else stepping.wrap(chunks, overlap_grad_reduce=overlap, bucket_size=1)
        if recompute and hasattr(chunks[0], "vision"):
            chunks[0].vision.gradient_checkpointing_enable()
        ids, mask, images, wanted = batch
        own = range(len(ids))
        if overlap:
            chunks[0].config.no_sync_func = wrapped[0].no_sync
            own = own[parallel_state.get_data_parallel_rank() * 2 :][:2]
        for order in (own[::-1], own) if overlap else (own,):  # reducers record parameters in the first batch
            for model in () if bare else wrapped:
                model.zero_grad_buffer()
            outputs = mb.forward(
                wrapped,
                ids[order],
                mask[order],
                images=[images[row] for row in order],
                loss=lambda out, rows, order=order: seeing.loss(
                    out.log_probs * (wanted != 0)[order[rows]], order[rows]
                ),
                micro_batch_size=1,
            )
        of_tower = [pair for chunk in chunks if hasattr(chunk, "vision") for pair in chunk.vision.named_parameters()]
        assert not any(parameter.requires_grad for name, parameter in of_tower if ".adapter." not in name)
        with torch.no_grad():
            mb.save_checkpoint(chunks, place / "dist", part="adapters")
            for parameter in parameters(chunks):
                parameter.copy_(parameter.grad if bare else parameter.main_grad)
            grads = saved(chunks, place)
            mb.load_checkpoint(chunks, place / "dist", part="adapters")
        after = saved(chunks, place)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
        return {"rows": [*own], "log_probs": outputs.log_probs.detach() * (wanted != 0)[own], "grads": grads}


def saved(chunks: Any, folder: Path) -> dict[str, Tensor]:
    """The adapters in a folder, on all ranks."""
    mb.save_hf_adapters(chunks, folder)
    found = load_file(folder / "adapter_model.safetensors")
    torch.distributed.barrier()  # the next save replaces the file
    return found


def steps(folder: Path, adapter: Path, cases: Any, batch: Any) -> list[dict[str, Any]]:
    """Runs in each worker: ``step`` of each case, a mesh and options."""
    return [step(folder, adapter, sizes, batch, **options) for sizes, options in cases]


def mistaken(folder: Path, adapter: Path, batch: Any) -> dict[str, Any]:
    """Runs in each worker: a step with a planted mistake."""
    with mock.patch.object(add_adapters, "_kind", unequal):
        return step(folder, adapter, {"tp": 2, "sp": True}, batch)
