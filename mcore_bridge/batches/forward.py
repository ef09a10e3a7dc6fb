"""A batch through a model on any mesh: what comes out has the shape of what went in, on every rank of the replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.batches.collectives import from_last, gather, reduce_max
from mcore_bridge.batches.logprobs import log_probs, require_temperature
from mcore_bridge.batches.microbatches import alike, balances, micro_batches
from mcore_bridge.batches.packing import PackedSequences, require_mask, unpack_sequences
from mcore_bridge.config.mesh.lost_ranks import naming_lost_ranks
from mcore_bridge.errors import BatchError
from mcore_bridge.weights.bound import Models, chunks_of, provenance_on
from mcore_bridge.weights.provenance import HF, Provenance

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What a model says of each token of a batch, fp32 ``[batch, seq]``; zero where it says nothing.

    Attributes:
        log_probs: of the token, given those before it; zero for the first of a sequence. None with a head.
        entropy: of the distribution that the token was drawn from, likewise.
        values: of a head, at the token: ``[batch, seq]``, or ``[batch, seq, labels]`` where it has several.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None


ROWS_ONLY = ("all_gather", "a2a+p2p")
"""Values of ``cp_comm_type`` with which TransformerEngine takes no packed sequences."""
Loss = Callable[[TokenOutputs, slice], Tensor]
"""The loss of a microbatch, a scalar, from what the model says and the rows of the batch that it is made of."""


def forward(
    models: Models,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    loss: Loss | None = None,
    hf: HF | None = None,
    head: str = "lm",
    micro_batch_size: int | None = None,
    temperature: float = 1.0,
    packed: bool = True,
    multiple_of: int | None = None,
) -> TokenOutputs:
    """Run a batch through this rank's chunks; with a ``loss``, backward as well.

    All ranks of a model replica call it together, with the same batch; where experts are cut over several replicas,
    those call it together with as many microbatches. These go through megatron-core's schedule: with a loss, gradients
    are those of the mean over microbatches, and ``config.finalize_model_grads_func``, ``no_sync_func`` and the like are
    called if a trainer has set them. Train or eval mode is as the models are in.

    Args:
        models: this rank's chunks, wrapped or not.
        input_ids: int64 ``[batch, seq]`` on the device of the models.
        attention_mask: ``[batch, seq]``, 1 or True where a token counts and 0 elsewhere. None is everywhere.
        loss: called on the ranks of the last pipeline stage with each microbatch; without it nothing is kept for a
            backward. What it raises is raised when all microbatches are through; then gradients are to be zeroed.
        hf, head: for models that ``build_model`` did not make: their HF config or folder, and their head.
        micro_batch_size: rows at once; None is all, or with pipeline stages one.
        temperature: what logits are divided by; above 0.
        packed: whether sequences share a row without padding, or have one each; for models that take no packed ones.
        multiple_of: what the tokens on one rank must be a multiple of; None is what the recipe of a model in FP8 needs.

    Raises:
        BatchError: shapes do not fit each other, the batch is empty, a token is none of the vocabulary, or replicas
            that share experts would wait for each other; on all that share experts, where it is so on any of them.
            A loss that is no scalar to be differentiated, or that raised on another rank; on all ranks of the replica.
        LostRankError: another rank has ended.
    """
    chunks, chunk = [models] if isinstance(models, nn.Module) else [*models], chunks_of(models)[0]
    _check(chunk, packed=packed, learns=loss is not None)
    provenance = provenance_on(models, hf, head)

    def checked() -> Callable[..., list[PackedSequences]]:
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask
        _check_batch(input_ids, mask, micro_batch_size, provenance.hf.vocab_size)
        require_temperature(temperature)
        size = micro_batch_size or (1 if chunk.pg_collection.pp.size() > 1 else len(input_ids))
        batch = chunk, input_ids, mask != 0, size, len(chunks)
        return partial(micro_batches, *batch, packed=packed, multiple_of=multiple_of)

    found = alike(chunk, checked, input_ids.device, learns=loss is not None)
    size = found[0].shape[0]
    rows = [slice(start, min(start + size, len(input_ids))) for start in range(0, len(input_ids), size)]
    return _Run(chunk, provenance, found, rows, temperature, loss)(chunks)


def _check_batch(input_ids: Tensor, attention_mask: Tensor, micro_batch_size: int | None, vocab_size: int) -> None:
    """Refuse shapes that do not fit, and tokens beyond the vocabulary: its padding has rows for some, and their
    log-probs would be wrong."""
    if input_ids.dim() != 2 or not input_ids.numel():
        raise BatchError(f"input_ids must be [batch, seq] with at least one token, found {tuple(input_ids.shape)}")
    if input_ids.dtype != torch.int64:
        raise BatchError(f"input_ids must be int64, found {input_ids.dtype}: pass input_ids.long()")
    if attention_mask.shape != input_ids.shape:
        raise BatchError(f"attention_mask {tuple(attention_mask.shape)} must be as input_ids {tuple(input_ids.shape)}")
    if micro_batch_size is not None and micro_batch_size < 1:
        raise BatchError(f"micro_batch_size must be at least 1, found {micro_batch_size}; None is as many as fit")
    require_mask(attention_mask)
    low, high = input_ids.where(attention_mask != 0, 0).aminmax()
    if int(low) < 0 or int(high) >= vocab_size:
        raise BatchError(f"input_ids must be 0 to {vocab_size - 1} where attention_mask counts, found {low} to {high}")


def _check(chunk: GPTModel, *, packed: bool, learns: bool) -> None:
    """Refuse what would fail or go wrong inside. All stages must come to the same: by nothing that one has alone."""
    config = chunk.config
    if packed and config.context_parallel_size > 1 and config.cp_comm_type in ROWS_ONLY:
        raise BatchError(f"with cp_comm_type={config.cp_comm_type!r} sequences cannot be packed: packed=False")
    if config.mtp_num_layers:
        raise BatchError(
            f"mtp_num_layers={config.mtp_num_layers} has megatron-core add a loss of its own to the caller's, for "
            "which forward has no labels: build without MTP layers, or call the model with labels"
        )
    if learns and balances(config) and config.moe_router_enable_expert_bias and not hasattr(chunk, "bridge"):
        raise BatchError(
            "megatron-core's own routers with expert_bias cannot leave padding out, which would count as tokens: build "
            "the model by build_model, or without moe_router_bias_update_rate and losses of routers"
        )
    if not chunk.parallel_output and config.tensor_model_parallel_size > 1:
        raise BatchError("parallel_output=False gathers logits that forward wants where they are: build without it")
    if learns and config.calculate_per_token_loss:
        raise BatchError("calculate_per_token_loss divides by tokens that forward does not count; build without it")


def _scalar(loss: object, outputs: Tensor) -> Tensor:
    """The loss, if it is one: a scalar of which gradients flow to the outputs, where these have any."""
    wanted = "loss must return a scalar tensor that is computed from the outputs it is given"
    if not isinstance(loss, Tensor):
        raise BatchError(f"{wanted}, found {type(loss).__name__}: return the sum or mean, and keep all else yourself")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise BatchError(f"{wanted}, found {loss.dtype} of shape {tuple(loss.shape)}: return its sum or mean")
    if outputs.requires_grad and not _depends(loss, outputs):
        raise BatchError(
            f"{wanted}, found one from which no gradient comes to them, so that nothing would learn: leave out detach, "
            "item and no_grad; where rows have nothing to learn from, return outputs.log_probs.sum() * 0"
        )
    return loss


def _depends(loss: Tensor, outputs: Tensor) -> bool:
    """Whether a gradient of one comes to the other."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is outputs.grad_fn:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return False


class _Run:
    """A batch, cut into microbatches of ``rows``, on its way through megatron-core's schedule."""

    def __init__(
        self,
        chunk: GPTModel,
        provenance: Provenance,
        micro_batches: Sequence[PackedSequences],
        rows: Sequence[slice],
        temperature: float,
        loss: Loss | None,
    ) -> None:
        self._groups = chunk.pg_collection
        self._hf, self._head, self._is_lm = provenance.hf, provenance.head, provenance.head == "lm"
        self._micro_batches, self._rows = micro_batches, rows
        self._temperature, self._loss = temperature, loss
        self._problem: Exception | None = None

    @naming_lost_ranks("forward")
    def __call__(self, chunks: Sequence[nn.Module]) -> TokenOutputs:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        first = self._micro_batches[0]
        with torch.set_grad_enabled(self._loss is not None):
            found = get_forward_backward_func()(
                forward_step_func=self._step,
                data_iterator=[iter(enumerate(self._micro_batches)) for _ in chunks],
                model=[*chunks],
                num_microbatches=len(self._micro_batches),
                seq_length=first.num_tokens,
                micro_batch_size=first.input_ids.size(0),
                forward_only=self._loss is None,
                collect_non_loss_data=self._loss is None,
            )
        self._raise_problems()
        return self._everywhere([outputs for _, outputs in sorted(found, key=itemgetter(0))])

    def _step(self, iterator: Iterator[tuple[int, PackedSequences]], model: nn.Module) -> tuple[Tensor, Any]:
        number, batch = next(iterator)
        options = {"packed_seq_params": batch.packed_seq_params, **self._padding(batch, model)}
        output = model(batch.input_ids, batch.position_ids, None, **options)
        return output, partial(self._finish, number)

    def _padding(self, batch: PackedSequences, model: nn.Module) -> dict[str, Tensor]:
        """What routers are not to learn from, where they learn from how many tokens each expert gets."""
        chunk = chunks_of(model)[0]
        if self._loss is None or not balances(chunk.config):
            return {}
        mask = batch.places[self._groups.cp.rank()] < 0
        if chunk.config.sequence_parallel and not chunk.pre_process:  # megatron-core cuts it on the first stage alone
            mask = mask.chunk(self._groups.tp.size(), 1)[self._groups.tp.rank()]
        return {"padding_mask": mask}

    def _finish(self, number: int, output: Tensor, non_loss_data: bool = False) -> Any:
        """What comes of a microbatch on the last stage: its outputs, and first of all its loss if it has one."""
        found = self._stacked(self._micro_batches[number], output)
        data = number, found.detach()
        if non_loss_data:
            return data
        assert self._loss is not None
        if number >= len(self._rows):  # it only fills the last round of virtual stages
            return found.sum() * 0.0, data
        return self._loss_of(number, found) * (len(self._micro_batches) / len(self._rows)), data

    def _loss_of(self, number: int, found: Tensor) -> Tensor:
        """The loss of a microbatch; nothing where it raises, since other ranks wait for what follows from it."""
        assert self._loss is not None
        rows = self._rows[number]
        if self._problem is None:
            try:
                loss = self._loss(self._outputs(found[:, : rows.stop - rows.start]), rows)
                return _scalar(loss, found)
            except Exception as problem:
                self._problem = problem
        return found.sum() * 0.0

    def _raise_problems(self) -> None:
        """Raise on all ranks of a replica what a loss raised on any of them."""
        if self._loss is None:
            return
        failed = torch.tensor(
            [self._problem is not None], dtype=torch.int64, device=self._micro_batches[0].places.device
        )
        for group in (self._groups.tp, self._groups.cp, self._groups.pp):
            reduce_max(failed, group)
        if self._problem is not None:
            raise self._problem
        if failed:
            raise BatchError(
                "the loss failed on another rank of this replica, which says why: zero gradients, start again"
            )

    def _stacked(self, batch: PackedSequences, output: Tensor) -> Tensor:
        """fp32 ``[2 or outputs of a head, batch, seq]``, of all context-parallel ranks."""
        if self._is_lm:
            options: Any = {"vocab_size": self._hf.vocab_size, "temperature": self._temperature}
            values = torch.stack(log_probs(output, batch.labels, group=self._groups.tp, **options))
        else:
            values = output.float().movedim(-1, 0)
        whole = gather(values, self._groups.cp).unbind(1)
        return torch.stack([unpack_sequences(batch, each, following=self._is_lm) for each in whole])

    def _everywhere(self, found: Sequence[Tensor]) -> TokenOutputs:
        """The outputs of all microbatches, from the last pipeline stage on every one."""
        batch, (_, seq) = self._rows[-1].stop, self._micro_batches[0].shape
        count = {"lm": 2, "value": 1}.get(self._head, self._hf.num_labels)
        device = self._micro_batches[0].input_ids.device
        whole = torch.cat([*found], 1)[:, :batch] if found else torch.empty(count, batch, seq, device=device)
        return self._outputs(from_last(whole.contiguous(), self._groups.pp))

    def _outputs(self, stacked: Tensor) -> TokenOutputs:
        if self._is_lm:
            return TokenOutputs(log_probs=stacked[0], entropy=stacked[1])
        return TokenOutputs(values=stacked[0] if len(stacked) == 1 else stacked.movedim(0, -1))
