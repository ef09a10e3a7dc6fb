"""The model of a DSpark head: a DFlash head whose logits also follow from the token before.

An engine draws the tokens of a block one after the other. Two low-rank tables add to the logits of a place what its
last token makes likely. Training knows this token, so it computes all places at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from mcore_bridge.batches.logprobs import in_fp32, num_valid
from mcore_bridge.batches.text_collectives import reduce_max, reduce_sum
from mcore_bridge.factory.modules.dflash import BlockPlan, DFlashModel
from mcore_bridge.factory.modules.torch_modules import placement

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from torch.distributed import ProcessGroup

OF_TOKENS, OF_DISTANCES, OF_CONFIDENCE = 0.1, 0.9, 1.0
"""The weights of the three parts of the loss, as in DeepSpec and SpecForge."""


class DSparkModel(DFlashModel):
    """A DSpark head. Each tensor-parallel rank has its part of both tables, and the confidence head whole."""

    reads_logits = True

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config=config, **options)
        draft: Any = config.draft
        tp = self.pg_collection.tp
        rows, rank = -(-draft.target_vocab_size // tp.size()) * tp.size(), draft.markov_rank
        how: Any = {"config": config, "init_method": config.init_method, "tp_group": tp}
        self.markov_w1 = VocabParallelEmbedding(rows, rank, **how)
        self.markov_w2 = ColumnParallelLinear(rank, rows, bias=False, **how)
        self.confidence_head: nn.Linear | None = None
        if draft.enable_confidence_head:
            width = config.hidden_size + rank * draft.confidence_head_with_markov
            self.confidence_head = nn.Linear(width, 1, **placement(config))
            if config.perform_initialization:
                config.init_method(self.confidence_head.weight)
                nn.init.zeros_(self.confidence_head.bias)

    def losses(self, states: Tensor, logits: Tensor, of_policy: Tensor, plan: BlockPlan) -> Tensor:
        """As for a DFlash head, with the distance to the policy's distribution and the loss of the confidence head."""
        before = self.markov_w1(plan.before)
        logits = logits + self.markov_w2(before)[0]
        group, flat = self.pg_collection.tp, logits.flatten(0, 1)
        valid = num_valid(flat, self.config.hf_vocab_size, group)
        distances = _Distance.apply(flat, of_policy, plan.rows.flatten(), valid, group).view(plan.rows.shape)
        whole = OF_TOKENS * super().losses(states, logits, of_policy, plan) + OF_DISTANCES * distances
        if self.confidence_head is None:
            return whole
        if self.confidence_head.in_features > states.size(-1):
            states = torch.cat((states, before), -1)
        predicted = self.confidence_head(states)[..., 0].float()
        accepted = 1 - distances.detach() / 2
        return whole + OF_CONFIDENCE * binary_cross_entropy_with_logits(predicted, accepted, reduction="none")


class _Distance(torch.autograd.Function):
    """fp32 ``[places]``: the sum of the absolute differences of two distributions over the vocabulary.

    One has the logits ``[places, vocab / tp]``, and the other the policy's ``[s, b, vocab / tp]`` in ``rows`` of
    ``[b, s]``. The policy's have no gradient. The backward computes both again, as for ``log_probs``.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, of_policy: Tensor, rows: Tensor, valid: int, group: ProcessGroup) -> Tensor:
        totals = torch.full((2, len(logits)), -torch.inf, dtype=torch.float32, device=logits.device)
        for at, *both in _pairs(logits, of_policy, rows, valid):
            totals[:, at] = torch.stack([part.amax(-1) for part in both])
        reduce_max(totals, group)
        sums = torch.zeros_like(totals)
        for at, *both in _pairs(logits, of_policy, rows, valid):
            sums[:, at] = torch.stack([part.sum(-1) for part in _exp(both, totals[:, at])])
        totals += reduce_sum(sums, group).log()
        sums = torch.zeros_like(totals)
        for at, *both in _pairs(logits, of_policy, rows, valid):
            own, wanted = _exp(both, totals[:, at])
            difference = own - wanted
            sums[0, at], sums[1, at] = difference.abs().sum(-1), (own * difference.sign()).sum(-1)
        distances, signed = reduce_sum(sums, group)
        ctx.valid = valid
        ctx.save_for_backward(logits, of_policy, rows, totals, signed)
        return distances

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, of_policy, rows, totals, signed = ctx.saved_tensors
        of_logits = torch.zeros_like(logits)
        for at, *both in _pairs(logits, of_policy, rows, ctx.valid):
            own, wanted = _exp(both, totals[:, at])
            of_logits[at, : ctx.valid] = (own - wanted).sign_().sub_(signed[at, None]).mul_(own).mul_(grad[at, None])
        return of_logits, None, None, None, None


def _pairs(logits: Tensor, of_policy: Tensor, rows: Tensor, valid: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Both logits without padding, as new fp32, some places at a time."""
    length = len(of_policy)
    for at, own in in_fp32(logits, valid):
        yield at, own, of_policy[rows[at] % length, rows[at] // length, :valid].float()


def _exp(logits: Sequence[Tensor], shifts: Tensor) -> list[Tensor]:
    """The exponential functions of logits minus one number for each place, in place."""
    return [part.sub_(shift[:, None]).exp_() for part, shift in zip(logits, shifts, strict=True)]
