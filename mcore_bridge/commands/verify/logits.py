"""Compares the logits of a mesh with transformers' logits, both in fp32, on a small random batch.

If a load puts weights in wrong places, an export may still take them back from there. Only computed values show such a
mistake.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_bridge.commands.verify.constant_weights import alike_in, told_apart
from mcore_bridge.commands.verify.random_image import shown
from mcore_bridge.commands.verify.transformers_logits import reference_logits, shortage, why_no_reference
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.factory.blueprint import BuildOptions
from mcore_bridge.launch.worker import Report
from mcore_bridge.weights.peft.hf_adapters import load_adapters
from mcore_bridge.weights.transfer.collectives import Group

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

TOLERANCE = 1e-3
"""The largest allowed difference of logits, divided by the largest logit.

Two fp32 implementations of one model differ by rounding in another order; we have seen 1e-7 to 1e-5. With any tensor in
a wrong place, or another rope, norm or activation, the difference is above 1e-2. TransformerEngine multiplies fp32 in
TF32 (10 bits of mantissa), which the tolerance also covers.
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of our logits with logits of a reference.

    Attributes:
        difference: the largest difference of two logits.
        scale: the largest logit.
        count: the number of logits.
        images: the number of images in the batch.
        missing: the reason why there is no image, although the model has a tower.
        varied: names of tensors with constant or repeated values, which got random changes on both sides.
        untold: names of encoded tensors with constant or repeated values, which stayed unchanged.
        tolerance: the largest allowed ``relative``.
    """

    difference: float
    scale: float = field(repr=False)
    count: int
    images: int = 0
    missing: str = field(default="", repr=False)
    varied: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()
    tolerance: float = TOLERANCE

    @property
    def relative(self) -> float:
        """The difference divided by the largest logit; NaN if one of them is NaN."""
        return self.difference / self.scale if self.scale else self.difference

    def agree(self) -> bool:
        """Whether our logits equal the logits of the reference. NaN means that they do not."""
        return self.relative <= self.tolerance


def compare_logits(
    chunks: list[GPTModel],
    folder: Path,
    options: BuildOptions,
    *,
    num_tokens: int,
    num_parameters: int,
    adapter: Path | None = None,
    report: Report,
) -> tuple[Comparison | None, str]:
    """Compares the logits of the mesh with transformers' logits. All ranks call it together.

    Args:
        chunks: the chunks of this rank in fp32; if empty, they are built here.
        folder: the checkpoint.
        options: options of the build in fp32. With a tower, the first sequence has an image. Without a head, hidden
            states are compared in place of logits.
        num_tokens: the length of a sequence, which is rounded up to a multiple that the mesh can split.
        num_parameters: the parameters of the whole model, to check whether it fits into memory.
        adapter: a PEFT folder, whose adapters the chunks have, or get here. The reference is then computed by ``peft``.

    Returns:
        The comparison on rank 0 (None on others). If memory is short, or there is no reference, None and why.
    """
    gc.collect()
    dims, device, head = options.dims, str(options.device), options.head
    if lack := why_no_reference(folder, adapter) or shortage(num_parameters, dims, device):
        return None, lack
    with tempfile.TemporaryDirectory() as scratch:  # the folder of rank 0 is used
        if not chunks:
            from mcore_bridge.factory.build import build_model

            chunks = build_model(folder, **vars(options))
        adapter = adapter and _adapted(chunks, adapter, Path(scratch))
        mapping = chunks[0].bridge.mapping(tied=chunks[0].share_embeddings_and_output_weights)
        alike = alike_in(folder, mapping)
        alike.write(chunks, folder, mapping)
        hf = chunks[0].bridge.hf
        batch = shown(chunks, _batch(hf.vocab_size, dims, num_tokens), 2 * dims.cp * dims.tp, _agreed)
        report("logits", 1, 3)
        ours = forward(chunks, dims, batch.input_ids.to(device), batch.images)
        chunks.clear()  # frees the caller's references too: their memory is needed
        gc.collect()
        report("logits", 2, 3)
        ours = _to_rank_0(ours, (*batch.input_ids.shape, hf.hidden_size if head == "none" else hf.vocab_size), device)
        comparison = None
        if ours is not None:
            comparison = replace(
                _compare(ours, reference_logits(folder, alike, batch, device, adapter, head)),
                images=batch.count,
                missing=batch.missing,
                varied=tuple(alike.keys),
                untold=alike.encoded,
            )
        report("logits", 3, 3)
        return comparison, ""


def _adapted(chunks: list[GPTModel], adapter: Path, scratch: Path) -> Path:
    """Add an adapter without constant tensors to the chunks, and return its folder."""
    from mcore_bridge.factory.add_adapters import add_adapters

    if not hasattr(chunks[0], "bridge_adapters"):
        add_adapters(chunks, adapter, dtype=torch.float32)
    world = Group(None)
    if world.rank == 0:
        told_apart(adapter, scratch, swapped=chunks[0].bridge.swapped_in_peft)
    copy = Path(world.all_gather_object(str(scratch))[0])
    load_adapters(chunks, copy, dtype=torch.float32)
    return copy


def _agreed(count: int | None) -> int:
    """A number that some rank has, on all ranks."""
    return next(number for number in Group(None).all_gather_object(count) if number is not None)


def _batch(vocab_size: int, dims: ParallelDims, num_tokens: int) -> Tensor:
    """Random token ids, int64 [micro batches, num_tokens]. An interleaved schedule needs a multiple of pp."""
    step = 2 * dims.cp * dims.tp
    num_tokens = math.ceil(num_tokens / step) * step
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (max(2, dims.pp), num_tokens), generator=generator)


@torch.no_grad()
def forward(
    chunks: Sequence[GPTModel], dims: ParallelDims, batch: Tensor, images: Sequence[dict[str, Tensor]] = ()
) -> Tensor | None:
    """The logits of ``batch`` [micro batches, tokens], from megatron-core's own schedule, one row at a time.

    Args:
        images: the inputs of images of each row. Empty: there are none.

    Returns:
        fp32 [micro batches, tokens, vocabulary] on the ranks of the last pipeline stage, None on the others.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.eval()
    places = _places(dims, batch)

    def step(rows: Iterator[tuple[Tensor, dict[str, Tensor]]], model: GPTModel) -> tuple[Tensor, Any]:
        row, inputs = next(rows)
        row = row[:, places]
        output = model(row, places.expand_as(row), None, runtime_gather_output=True, **inputs)
        return output, lambda output, non_loss_data=False: output

    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[zip(batch.split(1), images or [{}] * len(batch), strict=True) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batch),
        seq_length=batch.size(1),
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not outputs:
        return None
    whole, bridge = _whole(torch.cat(outputs), places, chunks[0]), chunks[0].bridge
    return whole if bridge.head == "none" else whole[..., : bridge.hf.vocab_size]


def _places(dims: ParallelDims, batch: Tensor) -> Tensor:
    """The tokens of this context-parallel rank: an early and a late one of ``2 * cp`` parts, as in megatron-core."""
    from megatron.core import parallel_state

    parts = torch.arange(batch.size(1), device=batch.device).chunk(2 * dims.cp)
    rank = parallel_state.get_context_parallel_rank()
    return torch.cat([parts[rank], parts[-1 - rank]])


def _whole(output: Tensor, places: Tensor, chunk: GPTModel) -> Tensor:
    """Gather the logits of all tokens from context-parallel ranks. ``places`` are the tokens that this rank has."""
    group = Group(chunk.pg_collection.cp)
    return torch.cat(group.gather(output), dim=1)[:, torch.cat(group.gather(places)).argsort()]


def _to_rank_0(logits: Tensor | None, shape: tuple[int, ...], device: str) -> Tensor | None:
    """Sends the logits from a rank that has them to rank 0, and there to CPU."""
    holder, rank = Group(None).all_gather_object(logits is not None).index(True), dist.get_rank()
    if rank == 0 and holder != 0:
        logits = torch.empty(shape, device=device)
        dist.recv(logits, src=holder)
    elif rank == holder != 0:
        assert logits is not None
        dist.send(logits.contiguous(), dst=0)
    return logits.cpu() if rank == 0 and logits is not None else None


def _compare(ours: Tensor, reference: Tensor) -> Comparison:
    difference = (ours - reference).abs().max()
    return Comparison(float(difference), float(reference.abs().max()), reference.numel())
