"""``drafting``: a draft head learns from its policy, while the policy runs for any other reason.

Hooks record what the head reads: the inputs of three layers of the policy, its tokens and its logits. They are there
only inside of the block. At place t the head reads the hidden states of token t and the embedding of token t + 1. It
learns the distribution from which the policy draws token t + 2. So tokens and logits are moved by one place.

Each further step reads what the step before has made at the same place, and tokens and logits are moved once more. A
DFlash or DSpark head reads blocks of masked tokens instead (``planned`` and ``losses`` of the head).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.arguments import COUNT, require
from mcore_bridge.batches.logprobs import in_fp32, num_valid
from mcore_bridge.batches.rows import inputs_by_name
from mcore_bridge.batches.text_collectives import gather, reduce_max, reduce_sum
from mcore_bridge.errors import BatchError
from mcore_bridge.weights.model_chunks import Models, all_chunks_of, chunks_of, modules_of

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from torch.distributed import ProcessGroup


DECAY = 0.8
"""The weight of each further step, in units of the weight of the step before it: as in SpecForge."""


@contextlib.contextmanager
def drafting(models: Models, drafts: Models, *, steps: int = 1) -> Iterator[Callable[..., Tensor]]:
    """In the block, a draft head can learn from each forward of its policy. ``forward`` does all of this by itself.

    The loss of a step is the cross-entropy of the policy's distribution and the head's, over the vocabulary of the
    head. The temperature is 1. The loss is zero if the most likely token of the policy is not in that vocabulary. The
    loss of a place is the sum over steps, where step k (from 0) is weighted with ``0.8**k``. A DFlash head has a block
    at a place, and there the weighted sum of its cross-entropies with the tokens of the batch. A DSpark head weights
    these with 0.1. It adds 0.9 of the absolute differences from the policy's distribution, and the cross-entropy of its
    confidence with the share of drafts that an engine would accept. Only the head gets gradients. After the backward
    passes they are complete only with megatron-core's DDP around the head, and
    ``finalize_model_grads([*models, *drafts])``.

    Args:
        models: the chunks of the policy on this rank, wrapped or not, in one pipeline stage.
        drafts: the result of ``build_draft``, wrapped or not.
        steps: how many tokens an EAGLE3 head drafts from each place. SpecForge trains with 7.

    Returns:
        A function to call after each forward of the policy. It returns fp32 ``[b, s]``, with the places of the inputs
        of the policy on this rank. Its argument, bool ``[b, s]``, says for each place whether the next token counts,
        such as ``packed.loss_mask``; None if sequences have no padding. All tensor-parallel and context-parallel ranks
        call it together.

    Raises:
        BatchError: ``drafts`` are not one head, or the policy has not run, or it gathers its logits. Or the head
            recomputes activations with several steps, or drafts blocks in a mesh that it cannot run in.

    Example:
        >>> packed = mb.pack_sequences(input_ids, attention_mask)
        >>> with mb.drafting(models, mb.build_draft(models, "path/of/EAGLE3-Qwen3-8B")) as losses:
        ...     options = {"packed_seq_params": packed.packed_seq_params}
        ...     logits = models[0](packed.input_ids, packed.position_ids, None, **options)
        ...     loss = losses(packed.loss_mask).sum() / packed.loss_mask.sum()
        >>> loss.requires_grad
        True
    """
    policy, wrapped = all_chunks_of(models)[0], modules_of(drafts)
    require(BatchError, steps=(steps, COUNT))
    if problem := problem_of(policy, wrapped, steps):
        raise BatchError(f"{problem}: correct it")
    record = _Record(policy, wrapped[0], steps)
    with contextlib.ExitStack() as hooks:
        for hook in record.hooks():
            hooks.callback(hook.remove)
        yield record.losses


def problem_of(policy: GPTModel, drafts: Sequence[nn.Module], steps: int = 1) -> str:
    """Why ``drafts`` cannot run beside a policy, or ""."""
    if len(drafts) != 1 or not hasattr(chunks_of(drafts)[0].config, "draft"):
        return "drafts must be the list of one head that build_draft has returned"
    draft: Any = chunks_of(drafts)[0]
    problem: str = draft.problem_beside(policy, steps)
    return problem


class _Record:
    """What a policy has read and computed in its last forward, as far as its draft head needs it."""

    def __init__(self, policy: GPTModel, module: nn.Module, steps: int) -> None:
        self._policy, self._module, self._draft, self._steps = policy, module, chunks_of(module)[0], steps
        own: Any = self._draft.config
        self._own: Any = own
        self._layers = own.draft.layers_read(policy.config.num_layers)
        self._inputs: dict[str, Any] = {}
        self._hidden: dict[int, Tensor] = {}
        self._logits: Tensor | None = None

    def hooks(self) -> Iterator[Any]:
        """Register all hooks, and yield their handles."""
        yield self._policy.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
        yield self._policy.output_layer.register_forward_hook(self._note_logits)
        for layer in self._policy.decoder.layers:
            number = layer.layer_number - 1
            if number in self._layers:
                yield layer.register_forward_pre_hook(partial(self._note_hidden, number), with_kwargs=True)

    def _note_inputs(self, chunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs, self._hidden = inputs_by_name(chunk, args, kwargs), {}

    def _note_hidden(self, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._inputs:  # a backward recomputes the layer
            return
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        self._hidden.setdefault(number, hidden.detach())  # the first half of a layer, if a layer has two

    def _note_logits(self, layer: nn.Module, inputs: object, output: tuple[Tensor, Tensor | None]) -> None:
        self._logits = output[0].detach()  # the last call is the one of the policy; MTP layers come before it

    def losses(self, loss_mask: Tensor | None = None) -> Tensor:
        """See ``drafting``. The recorded tensors are freed."""
        inputs, logits = self._inputs, self._logits
        if logits is None or len(self._hidden) < len(self._layers):
            raise BatchError("the policy must have run since the last losses, found no forward of it: run it first")
        width = logits.size(-1)
        if self._draft.reads_logits and width * self._draft.pg_collection.tp.size() != self._policy.vocab_size:
            raise BatchError(
                f"each tensor-parallel rank must have its own logits, found all {width} on each: build the policy with "
                "parallel_output=True"
            )
        hidden = torch.cat([self._hidden[number] for number in self._layers], -1)
        self._inputs, self._hidden, self._logits = {}, {}, None
        has_next = torch.ones_like(inputs["input_ids"], dtype=torch.bool) if loss_mask is None else loss_mask
        if hasattr(self._draft, "planned"):
            return self._of_blocks(inputs, hidden, logits, has_next)
        return self._of_steps(inputs, hidden, logits, has_next.t())

    def _of_blocks(self, inputs: Mapping[str, Any], hidden: Tensor, logits: Tensor, has_next: Tensor) -> Tensor:
        """fp32 ``[b, s]``: at the first token of a block the loss of its other tokens."""
        from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

        ids, group, draft = inputs["input_ids"], self._draft.pg_collection.tp, self._own.draft
        if self._policy.config.sequence_parallel:
            hidden = torch.cat([*gather(hidden, group)])
        packed = inputs.get("packed_seq_params")
        lengths = _lengths(ids, packed, self._draft.pg_collection.cp) * (len(ids) if packed is None else 1)
        with torch.no_grad():
            plan = self._draft.planned(ids.flatten(), has_next.flatten(), lengths)
            masked = self._embedded(plan.masked)
        flat = hidden.transpose(0, 1).reshape(1, ids.numel(), -1).transpose(0, 1)
        states = self._module(flat, masked, plan.places, plan.of_blocks, plan.blocks)
        states = states.view(len(plan.anchors), draft.block_size, -1)[:, -draft.num_drafted :]
        policy = self._policy
        tied = policy.share_embeddings_and_output_weights
        weight = policy.shared_embedding_or_output_weight() if tied else policy.output_layer.weight
        drafted = nn.functional.linear(copy_to_tensor_model_parallel_region(states, group=group), weight.detach())
        losses = self._draft.losses(states, drafted, logits, plan) * plan.weights
        whole = torch.zeros(ids.numel(), dtype=torch.float32, device=ids.device)
        return whole.index_add(0, plan.anchors, losses.sum(-1)).view(ids.shape)

    def _embedded(self, ids: Tensor) -> Tensor:
        """``[tokens, 1, hidden_size]`` by the embedding of the policy, on all tensor-parallel ranks."""
        group, embedding = self._draft.pg_collection.tp, self._policy.embedding.word_embeddings
        padded = nn.functional.pad(ids, (0, -len(ids) % group.size()))  # so that sequence parallelism can cut it
        rows: Tensor = embedding.forward(padded[None])
        whole = torch.cat([*gather(rows, group)]) if embedding.reduce_scatter_embeddings else rows.transpose(0, 1)
        return whole[: len(ids)]

    def _of_steps(self, inputs: Mapping[str, Any], hidden: Tensor, logits: Tensor, has_next: Tensor) -> Tensor:
        """fp32 ``[b, s]``: the weighted sum of the losses of all steps from each token on."""
        groups, packed = self._draft.pg_collection, inputs.get("packed_seq_params")
        move = partial(following, lengths=_lengths(inputs["input_ids"], packed, groups.cp), group=groups.cp)
        ids = inputs["input_ids"].t()
        with torch.no_grad():
            targets, is_known = self._targets(logits)
        whole = torch.zeros(inputs["input_ids"].shape, dtype=torch.float32, device=logits.device)
        self._draft.forget()
        for step in range(self._steps):
            with torch.no_grad():
                ids, targets, is_known = map(move, (ids, targets, is_known))
                has_next = move(has_next) if step else has_next
            drafted = self._module(
                hidden,
                ids.t().contiguous(),
                inputs.get("position_ids"),
                packed,
                embedding=self._policy.embedding.word_embeddings,
                step=step,
            )
            hidden = self._draft.state
            whole = whole + DECAY**step * self._loss(drafted, targets) * (is_known & has_next).t()
        self._draft.forget()
        return whole

    def _loss(self, drafted: Tensor, targets: Tensor) -> Tensor:
        """fp32 ``[b, s]``, of logits ``[b, s, padded own vocab / tp]`` and ``[s, b, padded own vocab / tp]``."""
        group = self._draft.pg_collection.tp
        flat = targets.transpose(0, 1).reshape(-1, targets.size(-1))
        valid = num_valid(flat, self._own.hf_vocab_size, group)
        loss: Tensor = _SoftCrossEntropy.apply(drafted.reshape(flat.shape), flat, valid, group)
        return loss.view(drafted.shape[:2])

    def _targets(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's logits of the tokens of the head, and whether the most likely token is among them.

        Returns:
            ``[s, b, padded own vocab / tp]``, and bool ``[s, b]``.
        """
        from megatron.core.tensor_parallel.mappings import reduce_scatter_last_dim_to_tensor_parallel_region

        group, width = self._draft.pg_collection.tp, logits.size(-1)
        vocabulary, first = self._draft.vocabulary, group.rank() * width
        size = self._own.hf_vocab_size
        ids = torch.arange(size, device=logits.device) if vocabulary is None else vocabulary.target_ids()
        own = ((ids >= first) & (ids < first + width)).nonzero()[:, 0]
        chosen = logits[..., ids[own] - first]
        peaks = torch.full((2, *logits.shape[:-1]), -torch.inf, dtype=torch.float32, device=logits.device)
        peaks[0] = logits.amax(-1)
        if len(own):
            peaks[1] = chosen.amax(-1)
        peaks = reduce_max(peaks, group)
        targets = logits.new_zeros(*logits.shape[:-1], self._draft.vocab_size)
        targets[..., own] = chosen
        if group.size() > 1:  # each column comes from one rank
            targets = reduce_scatter_last_dim_to_tensor_parallel_region(targets, group=group)
        return targets, peaks[1] >= peaks[0]


def _lengths(input_ids: Tensor, packed: Any, group: ProcessGroup) -> list[int]:
    """The numbers of tokens of each sequence on this context-parallel rank: of packed sequences, or of rows."""
    if packed is None:
        return [input_ids.size(1)]
    if group.size() > 1 and getattr(packed, "cp_partition_mode", "zigzag") != "zigzag":
        raise BatchError(
            f"packed sequences must be cut in a zigzag for a draft head, found {packed.cp_partition_mode!r}: each rank "
            "needs one early and one late part of each sequence"
        )
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    starts = packed.cu_seqlens_q if padded is None else padded
    return [length // group.size() for length in starts.diff().tolist()]


def following(own: Tensor, *, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """For each token what the next token of its sequence has, on any context-parallel rank; zero at the end.

    megatron-core gives rank r the parts r and 2n - 1 - r of each sequence. So the first tokens of parts travel alone.

    Args:
        own: ``[tokens, ...]`` of this rank.
        lengths: the number of tokens of each sequence on this rank.
        group: the context-parallel group.

    Returns:
        A new tensor of the same shape.
    """
    num_ranks, rank = group.size(), group.rank()
    places = [0] if num_ranks == 1 else [rank, 2 * num_ranks - 1 - rank]
    sizes = [length // len(places) for length in lengths for _ in places]
    ends = torch.tensor(sizes, device=own.device).cumsum(0) - 1
    starts = ends + 1 - torch.tensor(sizes, device=own.device)
    firsts = gather(own[starts], group)
    moved = own.roll(-1, 0)
    last = 2 * num_ranks if num_ranks > 1 else 1
    for index, end in enumerate(ends.tolist()):
        sequence, part = divmod(index, len(places))
        after = places[part] + 1
        if after == last:
            moved[end] = 0
            continue
        owner = after if after < num_ranks else last - 1 - after
        moved[end] = firsts[owner, sequence * len(places) + (after >= num_ranks)]
    return moved


class _SoftCrossEntropy(torch.autograd.Function):
    """fp32 ``[tokens]``: the cross-entropy of the softmax of targets and of logits, both ``[tokens, vocab / tp]``.

    The backward computes both again, as for ``log_probs``. Targets have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, valid: int, group: ProcessGroup) -> Tensor:
        peaks = torch.full((2, len(logits)), -torch.inf, dtype=torch.float32, device=logits.device)
        for peak, values in zip(peaks, (logits, targets), strict=True):
            for at, part in in_fp32(values, valid):
                peak[at] = part.amax(-1)
        peaks = reduce_max(peaks, group)
        sums = torch.zeros(3, len(logits), dtype=torch.float32, device=logits.device)
        for (at, own), (_, wanted) in zip(in_fp32(logits, valid), in_fp32(targets, valid), strict=True):
            own, weights = own.sub_(peaks[0, at, None]), wanted.sub_(peaks[1, at, None]).exp_()
            sums[2, at] = (weights * own).sum(-1)
            sums[0, at], sums[1, at] = own.exp_().sum(-1), weights.sum(-1)
        total, wanted_total, cross = reduce_sum(sums, group)
        ctx.valid = valid
        ctx.save_for_backward(logits, targets, peaks[0] + total.log(), peaks[1] + wanted_total.log())
        return total.log() - cross / wanted_total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, log_total, log_wanted = ctx.saved_tensors
        of_logits = torch.zeros_like(logits)
        for (at, own), (_, wanted) in zip(in_fp32(logits, ctx.valid), in_fp32(targets, ctx.valid), strict=True):
            difference = own.sub_(log_total[at, None]).exp_().sub_(wanted.sub_(log_wanted[at, None]).exp_())
            of_logits[at, : ctx.valid] = difference.mul_(grad[at, None])
        return of_logits, None, None, None
