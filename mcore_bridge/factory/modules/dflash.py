"""The model of a DFlash head: layers read blocks of masked tokens, and as a context hidden states of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from einops import rearrange
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from mcore_bridge.batches.logprobs import vocab_parallel
from mcore_bridge.config.draft import BlockFields
from mcore_bridge.factory.modules.torch_modules import CoreAttention, placement

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


ANCHORS = 512
"""The most blocks of a sequence, as in SpecForge."""


@dataclass(frozen=True, slots=True)
class SequenceBlocks:
    """The blocks of one sequence, among all tokens and all blocks of a batch."""

    context: slice
    """Its tokens."""
    queries: slice
    """The places of its blocks, one block behind the other."""
    hidden: Tensor
    """bool ``[queries, tokens and queries]``: what a place of a block does not see."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The blocks that a head drafts in a batch, as tensors on its device.

    Attributes:
        anchors: int64 ``[blocks]``: the first token of each block, as an index into all tokens.
        masked: int64 ``[blocks * block size]``: the known first token of each block, and masks.
        places: int64 ``[tokens]``: the position of each token in its sequence.
        of_blocks: int64 ``[blocks * block size]``: such positions of the places of blocks.
        rows: int64 ``[blocks, num_drafted]``: the token before each drafted one, as an index into all tokens.
        before: int64 ``[blocks, num_drafted]``: these tokens.
        targets: int64 ``[blocks, num_drafted]``: the tokens to draft.
        weights: fp32 ``[blocks, num_drafted]``: zero behind the end, else ``exp(-number / fading)``.
        blocks: what each sequence has of them.
    """

    anchors: Tensor
    masked: Tensor
    places: Tensor
    of_blocks: Tensor
    rows: Tensor
    before: Tensor
    targets: Tensor
    weights: Tensor
    blocks: Sequence[SequenceBlocks]


def planned(ids: Tensor, has_next: Tensor, lengths: Sequence[int], draft: BlockFields) -> BlockPlan:
    """The blocks of a batch: one from each token that has a next one, or from ``ANCHORS`` of them in a long sequence.

    Args:
        ids: int64 ``[tokens]``, one sequence behind the other.
        has_next: bool ``[tokens]``: whether the next token counts.
        lengths: tokens of each sequence, with padding.
        draft: size and weights of blocks, and the token of masks.
    """
    size, device = draft.block_size, ids.device
    has_next = has_next.index_fill(0, torch.tensor(lengths, device=device).cumsum(0) - 1, False)
    offsets, start, end = torch.arange(size, device=device), 0, 0
    chosen, blocks = list[Tensor](), list[SequenceBlocks]()
    draw = torch.Generator().manual_seed(int(ids.sum()))  # all tensor-parallel ranks draw the same
    for length in lengths:
        own = has_next[start : start + length].nonzero()[:, 0]
        if len(own) > ANCHORS:
            own = own[torch.randperm(len(own), generator=draw)[:ANCHORS].sort().values.to(device)]
        if not len(own) and not chosen and start + length == len(ids):
            own = torch.zeros(1, dtype=torch.int64, device=device)  # its loss is zero
        if len(own):
            block_of = torch.arange(len(own), device=device).repeat_interleave(size)
            behind = torch.arange(length, device=device) >= own.repeat_interleave(size)[:, None]
            hidden = torch.cat((behind, block_of[:, None] != block_of), -1)
            blocks.append(SequenceBlocks(slice(start, start + length), slice(end, end := end + len(block_of)), hidden))
            chosen.append(own + start)
        start += length
    anchors = torch.cat(chosen)
    places = torch.cat([torch.arange(length, device=device) for length in lengths])
    numbers = offsets[: draft.num_drafted]
    rows, ahead = ((anchors[:, None] + numbers + step).clamp(max=len(ids) - 1) for step in (0, 1))
    masked = torch.full((len(anchors), size), draft.mask_token_id, device=device)
    masked[:, 0] = ids[anchors]
    weights = has_next[rows].long().cumprod(-1) * torch.exp(-numbers / draft.fading)
    rows = torch.where(weights > 0, rows, anchors[:, None])  # numbers of padding may not be finite
    of_blocks = (places[anchors, None] + offsets).flatten()
    return BlockPlan(anchors, masked.flatten(), places, of_blocks, rows, ids[rows], ids[ahead], weights, blocks)


class BlockAttention(CoreAttention):
    """Each place of a block attends to the tokens before its block, and to all places of the block."""

    blocks: Sequence[SequenceBlocks] = ()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """``[queries, 1, heads * dim]``; keys and values are first those of all tokens."""
        num_tokens, outputs = key.size(0) - query.size(0), []
        for part in self.blocks:
            own = slice(num_tokens + part.queries.start, num_tokens + part.queries.stop)
            keys, values = (torch.cat((given[part.context], given[own])) for given in (key, value))
            parts = query[part.queries], keys, values
            own_query, keys, values = (rearrange(given, "s b n d -> b n s d") for given in parts)
            outputs.append(self._attend(own_query, keys, values, part.hidden))
        return rearrange(torch.cat(outputs, 2), "b n s d -> s b (n d)")


class ContextAttention:
    """Before self-attention: keys and values come from a context, too, which is the same for all layers."""

    context: Tensor

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        """Queries of the blocks, and keys and values of the context and of the blocks."""
        project: Any = super().get_query_key_value_tensors  # type: ignore[misc]
        query, *own = project(hidden_states, *arguments, **options)
        _, *of_context = project(self.context, *arguments, **options)
        return query, *(torch.cat(parts) for parts in zip(of_context, own, strict=True))


class DFlashModel(GPTModel):
    """A DFlash head: layers that read blocks of masked tokens, and hidden states of the policy as a context.

    It has no sequence parallelism, since its blocks are no sequence. Each tensor-parallel rank has ``fc`` whole.
    """

    reads_logits: ClassVar[bool] = False
    """Whether it learns from the logits of its policy."""

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        draft: Any = config.draft
        super().__init__(config=config, **{**options, "pre_process": False})
        inputs = len(draft.layers) * draft.target_hidden_size
        self.fc = nn.Linear(inputs, config.hidden_size, bias=False, **placement(config))
        if config.perform_initialization:
            config.init_method(self.fc.weight)
        norm: Any = type(self.decoder.layers[0].input_layernorm)
        self.context_norm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.vocabulary = None

    def problem_beside(self, policy: GPTModel, steps: int) -> str:
        """Why the head cannot learn so many steps beside a policy, or ""."""
        groups = policy.pg_collection
        reasons = {
            "a DFlash or DSpark head must have steps=1, since it drafts a block at once": steps > 1,
            "a DFlash or DSpark head needs cp=1, since a block attends to all tokens before it": groups.cp.size() > 1,
            "a DFlash or DSpark head needs pp=1, since it reads several layers of the policy": groups.pp.size() > 1,
            "a DFlash or DSpark head must have recompute_granularity=None, since a recomputed layer would read the "
            "blocks of a later microbatch": self.config.recompute_granularity is not None,
        }
        return "; ".join(reason for reason, holds in reasons.items() if holds)

    def planned(self, ids: Tensor, has_next: Tensor, lengths: Sequence[int]) -> BlockPlan:
        """See the function of this name."""
        draft: Any = self.config.draft
        return planned(ids, has_next, lengths, draft)

    def losses(self, states: Tensor, logits: Tensor, of_policy: Tensor, plan: BlockPlan) -> Tensor:
        """fp32 ``[blocks, num_drafted]``: the cross-entropies with the tokens of the batch, without weights.

        Args:
            states: ``[blocks, num_drafted, hidden_size]``: of the places that draft.
            logits: ``[blocks, num_drafted, padded vocab / tp]``: of these states, by the output layer of the policy.
            of_policy: ``[s, b, padded vocab / tp]``: the logits of the policy, where its tokens are ``[b, s]``.
            plan: the blocks.
        """
        options: Any = {"vocab_size": self.config.hf_vocab_size, "group": self.pg_collection.tp, "temperature": 1.0}
        chosen, _ = vocab_parallel(logits, plan.targets, **options)
        return -chosen

    def forward(
        self, hidden: Tensor, masked: Tensor, places: Tensor, of_blocks: Tensor, blocks: Sequence[SequenceBlocks]
    ) -> Tensor:
        """The states of all places of all blocks, after the final norm: ``[queries, 1, hidden_size]``.

        Args:
            hidden: ``[tokens, 1, layers * target_hidden_size]``: the inputs of layers of the policy.
            masked: ``[queries, 1, hidden_size]``: embeddings of the first token of each block, and of masks.
            places: int64 ``[tokens]``: the positions of tokens in their sequences.
            of_blocks: int64 ``[queries]``: such positions of the places of blocks.
            blocks: where the blocks of each sequence are.
        """
        context = self.context_norm(self.fc(hidden))
        angles = self.rotary_pos_emb.get_emb(int(max(places.max(), of_blocks.max())) + 1)
        for layer in self.decoder.layers:
            layer.self_attention.context, layer.self_attention.core_attention.blocks = context, blocks
        self.set_input_tensor(masked)
        both = angles[of_blocks], angles[torch.cat((places, of_blocks))]
        states: Tensor = self.decoder(None, None, rotary_pos_emb=both)
        self.set_input_tensor(None)
        for layer in self.decoder.layers:
            del layer.self_attention.context, layer.self_attention.core_attention.blocks
        return states
