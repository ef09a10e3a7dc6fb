"""Run a batch through a model on any mesh. Every rank of the replica gets outputs in the shape of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.arguments import COUNT, FLAG, FUNCTION, ids_on, require, tensor_on
from mcore_bridge.batches.drafting import drafting
from mcore_bridge.batches.gradients import finishing_gradients
from mcore_bridge.batches.image_rows import images_of_rows
from mcore_bridge.batches.images import Images, SeenImages, num_positions
from mcore_bridge.batches.logprobs import require_temperature, vocab_parallel
from mcore_bridge.batches.microbatches import agreed_micro_batches, balances_experts, micro_batches, shared_by_stages
from mcore_bridge.batches.packing import PackedSequences, unpack_sequences
from mcore_bridge.batches.refusals import (
    require_batch,
    require_drafts,
    require_own_mesh,
    require_runnable,
    require_scalar,
    require_vocabulary,
)
from mcore_bridge.batches.row_sets import ROW_SETS, RowSets, Wrapped, adapters_of, using_row_sets, with_wrappers
from mcore_bridge.batches.text_collectives import broadcast_from_last, digest, digest_of_tokens, gather, reduce_max
from mcore_bridge.config.mesh.alike import Shared
from mcore_bridge.config.mesh.lost_ranks import naming_lost_ranks
from mcore_bridge.errors import BatchError
from mcore_bridge.weights.bound import provenance_on
from mcore_bridge.weights.model_chunks import Models, all_chunks_of, chunks_of, modules_of
from mcore_bridge.weights.provenance import HF, Provenance, identity

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """The outputs of a model for each token of a batch, in fp32. They are zero at padding.

    Attributes:
        log_probs: ``[batch, seq]``: log-probability of the token, given those before it. Zero for the first token of a
            sequence. None without an LM head.
        entropy: ``[batch, seq]``: entropy of the distribution that predicts the token. Zero and None as for
            ``log_probs``.
        values: outputs of a value or classification head at the token: ``[batch, seq]``, or ``[batch, seq, labels]``
            with several labels. None with another head.
        hidden: for models without a head, the hidden states after the final norm: ``[batch, seq, hidden]``. Else None.
        draft_loss: ``[batch, seq]``: the loss of a draft head that has read the token and predicts the next one, and
            further ones with ``draft_steps``, as in ``drafting``. Zero for the first token of a sequence. None without
            a draft head.

    Example:
        >>> outputs = mb.forward(models, input_ids, attention_mask)
        >>> outputs.log_probs[0, 0].item(), outputs.entropy.shape, outputs.values
        (0.0, torch.Size([2, 4]), None)
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    hidden: Tensor | None = None
    draft_loss: Tensor | None = None


Loss = Callable[[TokenOutputs, slice], Tensor]
"""A function that computes the scalar loss of a microbatch, from its outputs and its rows of the batch."""


def forward(
    models: Models | Mapping[str, Models],
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    images: Images | None = None,
    adapters: Sequence[str | None] | None = None,
    drafts: Models | None = None,
    draft_steps: int = 1,
    loss: Loss | None = None,
    hf: HF | None = None,
    head: str = "lm",
    micro_batch_size: int | None = None,
    temperature: float = 1.0,
    packed: bool = True,
    multiple_of: int | None = None,
) -> TokenOutputs:
    """Run a batch through this rank's chunks. With a ``loss``, run the backward too.

    All ranks of a model replica call it together, with equal arguments, which they compare first. If experts are spread
    over several replicas, these replicas call it together, with equal numbers of microbatches.

    Microbatches go through megatron-core's schedule. With a loss, gradients belong to the mean of the loss over
    microbatches. The schedule calls ``config.finalize_model_grads_func``, ``no_sync_func`` and the like if a trainer
    has set them. Without megatron-core's DDP, ``parameter.grad`` is complete afterwards, and is also a mean over
    replicas: with a loss all replicas must call together. Train or eval mode does not change.

    Args:
        models: this rank's chunks, wrapped or not. With ``adapters``, also a mapping: for the name of each set the
            chunks in the DDP that was made while this set was in use. With a loss, the gradients in these DDPs are
            complete afterwards, by ``config.finalize_model_grads_func`` if it is set.
        input_ids: int64 ``[batch, seq]`` on the device of the models.
        attention_mask: ``[batch, seq]``, 1 or True for tokens and 0 for padding. None: there is no padding.
        images: for each row the inputs of its images and videos, or None for a row of text. These are the results of
            the model's processor for this row (``pixel_values``, ``image_grid_thw``, ...). Or one mapping that the
            processor made of all rows, which is split by rows. Log-probabilities of tokens with the id of an image or a
            video mean nothing. If the model may have sampled such an id, mark in ``mm_token_type_ids`` which tokens are
            text (0). ``position_ids`` ``[n, seq]`` are used unchanged. None: the batch is of text. Images need a model
            that was built with ``vision="train"`` or ``"frozen"``.
        adapters: for each row the name of a set of adapters, or None for the base alone. None: all rows use the set in
            use. With a loss, sets in megatron-core's DDP need a mapping as ``models``.
        drafts: the result of ``build_draft`` for ``models``, wrapped as they are. The outputs then have its
            ``draft_loss``, whose gradients reach the draft head alone. The batch must be of text.
        draft_steps: how many tokens an EAGLE3 head drafts from each token, as ``steps`` of ``drafting``.
        loss: called with each microbatch on the ranks of the last pipeline stage. If it raises, the error is raised
            after all microbatches are done; the caller must then zero the gradients. None: no backward follows.
        hf, head: deprecated; call ``adopt`` once for models that ``build_model`` did not make.
        micro_batch_size: rows of a microbatch. None: all rows; with pipeline stages, one.
        temperature: logits are divided by this number above 0.
        packed: True: sequences share a row, without padding. False: each sequence has a separate row, for models that
            cannot take packed sequences.
        multiple_of: the tokens of a rank are padded to a multiple of this. None: the multiple that the FP8 recipe of
            the model needs.

    Returns:
        Fp32 tensors ``[batch, seq]`` for each token, equal on all ranks of the replica.

    Raises:
        BatchError: an argument has a wrong type, shapes do not fit, the batch is empty, or a token is not in the
            vocabulary. Ranks of a replica have different arguments (the message names them). Replicas that share
            experts have batches with which one would wait for another. The loss is not a scalar with a gradient, or
            raised on another rank. Images do not fit the tokens of their row (the message names the row), or the model
            has no tower. Every rank that would wait for the failed rank raises too.
        MappingError: ``models`` or ``drafts`` are no chunks of this rank. Other ranks raise a BatchError.
        LostRankError: another rank has ended.

    Example:
        >>> outputs = mb.forward(models, input_ids, attention_mask, loss=lambda out, rows: -out.log_probs.mean())
        >>> outputs.log_probs.shape, models[0].decoder.final_layernorm.weight.grad is not None
        (torch.Size([2, 4]), True)
    """
    models, wrapped = with_wrappers(models)
    learns, runs = loss is not None, []

    def checked() -> tuple[Callable[..., list[PackedSequences]], Shared]:
        chunk, chunks = all_chunks_of(models)[0], modules_of(models)
        drafted = [] if drafts is None else modules_of(drafts)
        require_own_mesh(chunk)
        device = next((parameter.device for parameter in chunk.parameters()), None)  # a stage may be empty
        require(
            BatchError,
            input_ids=(input_ids, ids_on(device)),
            attention_mask=(attention_mask, tensor_on(device).or_none()),
            micro_batch_size=(micro_batch_size, COUNT.or_none()),
            packed=(packed, FLAG),
            adapters=(adapters, ROW_SETS.or_none()),
            draft_steps=(draft_steps, COUNT),
            multiple_of=(multiple_of, COUNT.or_none()),
            loss=(loss, FUNCTION.or_none()),
        )
        require_drafts(chunk, drafted, draft_steps, learns=learns, has_images=images is not None)
        require_runnable(chunk, packed=packed, learns=learns)
        divisor = require_temperature(temperature)
        provenance = provenance_on(models, hf, head)
        readable = getattr(chunk, "image_inputs", None)
        config = provenance.whole.core if provenance.whole else None
        require_batch(input_ids, attention_mask)
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        of_rows, stands = images_of_rows(images, input_ids, mask, config, readable)
        require_vocabulary(input_ids, mask & ~stands, provenance.hf.vocab_size)
        size = micro_batch_size or (1 if chunk.pg_collection.pp.size() > 1 else len(input_ids))
        rows = [slice(start, min(start + size, len(input_ids))) for start in range(0, len(input_ids), size)]
        seen = SeenImages(of_rows, mask, rows, num_positions(chunk)) if any(of_rows) else None
        given: Any = {"temperature": divisor, "loss": loss, "seen": seen, "sets": adapters, "wrapped": wrapped}
        runs.append(partial(_Run, chunk, provenance, rows=rows, drafts=drafted, steps=draft_steps, **given))
        shared = {
            "input_ids": digest_of_tokens(input_ids, mask),
            "images": [{name: digest(value) for name, value in sorted(row.items())} for row in of_rows if row],
            "loss": "given" if learns else None,
            "drafts": [identity(provenance_on(draft)) for draft in drafted],
            "draft_steps": draft_steps,
            "micro_batch_size": size,
            "temperature": divisor,
            "packed": packed,
            "multiple_of": multiple_of,
            "hf": None if hf is None else identity(provenance),
            "head": provenance.head,
            "training": chunk.training,
            **adapters_of(chunks, adapters, wrapped, len(input_ids), learns=learns),
            **shared_by_stages(chunks, learns=learns),
        }
        batch = chunk, input_ids, mask, size, len(chunks)
        return partial(micro_batches, *batch, packed=packed, multiple_of=multiple_of), shared

    batches = agreed_micro_batches(models, checked, learns=learns)
    run: _Run = runs[0](micro_batches=batches)
    return run(modules_of(models))


class _Run:
    """Runs a batch through megatron-core's schedule, in microbatches that hold ``rows`` of it."""

    def __init__(
        self,
        chunk: GPTModel,
        provenance: Provenance,
        *,
        micro_batches: Sequence[PackedSequences],
        rows: Sequence[slice],
        temperature: float,
        loss: Loss | None,
        seen: SeenImages | None,
        sets: RowSets | None,
        wrapped: Wrapped,
        drafts: Sequence[nn.Module],
        steps: int,
    ) -> None:
        self._groups = chunk.pg_collection
        self._hf, self._head, self._is_lm = provenance.hf, provenance.head, provenance.head == "lm"
        self._micro_batches, self._rows = micro_batches, rows
        self._temperature, self._loss, self._seen = temperature, loss, seen
        self._sets, self._wrapped = sets, wrapped
        self._drafts, self._steps, self._draft_losses = drafts, steps, list[Callable[[Tensor], Tensor]]()
        self._problem: Exception | None = None

    @naming_lost_ranks("forward")
    def __call__(self, chunks: Sequence[nn.Module]) -> TokenOutputs:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        first, learns = self._micro_batches[0], self._loss is not None
        with (
            using_row_sets(chunks, self._sets, self._wrapped, self._micro_batches, self._rows, learns=learns) as (
                begin,
                holders,
            ),
            torch.set_grad_enabled(learns),
            finishing_gradients(chunks, self._drafts, holders) if learns else nullcontext(),
            ExitStack() as recording,
        ):
            self._draft_losses = [
                recording.enter_context(drafting(chunks, draft, steps=self._steps)) for draft in self._drafts
            ]
            outputs = get_forward_backward_func()(
                forward_step_func=partial(self._step, begin),
                data_iterator=[iter(enumerate(self._micro_batches)) for _ in chunks],
                model=[*chunks],
                num_microbatches=len(self._micro_batches),
                seq_length=first.num_tokens,
                micro_batch_size=first.input_ids.size(0),
                forward_only=not learns,
                collect_non_loss_data=not learns,
            )
        self._raise_problems()
        return self._everywhere([values for _, values in sorted(outputs, key=itemgetter(0))])

    def _step(
        self, begin: Callable[[int], None], iterator: Iterator[tuple[int, PackedSequences]], model: nn.Module
    ) -> tuple[Tensor, Any]:
        number, batch = next(iterator)
        begin(number)
        options = {"packed_seq_params": batch.packed_seq_params, **self._padding(batch, model)}
        if self._seen is not None:
            options.update(self._seen.of(number, batch, self._groups.cp.rank()))
        output = model(batch.input_ids, options.pop("position_ids", batch.position_ids), None, **options)
        return output, partial(self._finish, number)

    def _padding(self, batch: PackedSequences, model: nn.Module) -> dict[str, Tensor]:
        """The mask of padding for routers, which must not count padding if they balance the load of experts."""
        chunk = chunks_of(model)[0]
        if self._loss is None or not balances_experts(chunk.config):
            return {}
        mask = batch.places[self._groups.cp.rank()] < 0
        if chunk.config.sequence_parallel and not chunk.pre_process:  # megatron-core cuts it on the first stage alone
            mask = mask.chunk(self._groups.tp.size(), 1)[self._groups.tp.rank()]
        return {"padding_mask": mask}

    def _finish(self, number: int, output: Tensor, non_loss_data: bool = False) -> Any:
        """The result of a microbatch on the last stage for the schedule: its loss, if there is one, and its outputs."""
        stacked = self._stacked(self._micro_batches[number], output)
        data = number, stacked.detach()
        if non_loss_data:
            return data
        assert self._loss is not None
        if number >= len(self._rows):  # it only fills the last round of virtual stages: padding, whose values are zero
            return stacked.sum(), data
        return self._loss_of(number, stacked) * (len(self._micro_batches) / len(self._rows)), data

    def _loss_of(self, number: int, stacked: Tensor) -> Tensor:
        """The loss of a microbatch. If it raises, it is zero for now, because other ranks wait for the backward."""
        assert self._loss is not None
        rows = self._rows[number]
        if self._problem is None:
            try:
                loss = self._loss(self._outputs(stacked[:, : rows.stop - rows.start]), rows)
                return require_scalar(loss, stacked)
            except Exception as problem:
                self._problem = problem
        return stacked.sum() * 0.0

    def _raise_problems(self) -> None:
        """Raise on all ranks of a replica if the loss raised, or images did not fit, on any of them."""
        if self._loss is None and self._seen is None:
            return
        if self._seen is not None and self._seen.misfits:
            self._problem = self._seen.misfits[0]
        failed = torch.tensor(
            [self._problem is not None], dtype=torch.int64, device=self._micro_batches[0].places.device
        )
        for group in (self._groups.tp, self._groups.cp, self._groups.pp):
            reduce_max(failed, group)
        if self._problem is not None:
            raise self._problem
        if failed:
            raise BatchError(
                "the loss or the images failed on another rank of this replica: see the error there, zero the "
                "gradients, start again"
            )

    def _stacked(self, batch: PackedSequences, output: Tensor) -> Tensor:
        """fp32 ``[2 and drafts, or outputs of a head, rows, seq]``, gathered from all context-parallel ranks."""
        if self._is_lm:
            options: Any = {"vocab_size": self._hf.vocab_size, "temperature": self._temperature}
            own = vocab_parallel(output, batch.labels, group=self._groups.tp, **options)
            values = torch.stack((*own, *(losses(batch.loss_mask) for losses in self._draft_losses)), -1)
        else:
            values = output.float()
        return unpack_sequences(batch, gather(values, self._groups.cp), following=self._is_lm).movedim(-1, 0)

    def _everywhere(self, outputs: Sequence[Tensor]) -> TokenOutputs:
        """The outputs of all microbatches, sent from the last pipeline stage to every stage."""
        batch, (_, seq) = self._rows[-1].stop, self._micro_batches[0].shape
        counts = {"lm": 2 + len(self._drafts), "value": 1, "none": self._hf.hidden_size}
        count = counts.get(self._head, self._hf.num_labels)
        device = self._micro_batches[0].input_ids.device
        # independent of torch's default dtype
        empty = torch.empty(count, batch, seq, dtype=torch.float32, device=device)
        whole = torch.cat([*outputs], 1)[:, :batch] if outputs else empty
        return self._outputs(broadcast_from_last(whole.contiguous(), self._groups.pp))

    def _outputs(self, stacked: Tensor) -> TokenOutputs:
        if self._is_lm:
            log_probs, entropy, *draft_loss = stacked
            return TokenOutputs(log_probs, entropy, draft_loss=draft_loss[0] if draft_loss else None)
        if self._head == "none":
            return TokenOutputs(hidden=stacked.movedim(0, -1))
        return TokenOutputs(values=stacked[0] if len(stacked) == 1 else stacked.movedim(0, -1))
