"""The model of an EAGLE3 head, whose layer reads an embedding and a hidden state side by side.

``[embedding, hidden]`` travels through megatron-core's layer as one tensor of two widths. Its first norm is two norms,
one for each half. Its projection of queries, keys and values has two widths of inputs. Its first residual is the half
of the hidden state. All other code is megatron-core's, so checkpoints of activations work as in any layer.

An engine drafts several tokens one after the other. For each of them after the first the head reads its own output, and
not the hidden states of the policy. Training unrolls these steps: at every place at once, step k drafts the token that
follows k tokens later. There it attends to what the first step has read up to its place, and to its own earlier steps.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from mcore_bridge.factory.modules.torch_modules import CoreAttention, placement, places_in_text

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class TwoNorms(nn.Module):
    """A norm for each half of ``[..., embedding and hidden]``.

    With ``norm_before_residual`` the model has already normed the hidden state, which is also the residual.
    """

    norm: Any

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.embedding, self.hidden = (self.norm(config, hidden_size, eps) for _ in range(2))
        self.is_normed = config.draft.norm_before_residual

    def forward(self, joined: Tensor) -> Tensor:
        """The same shape."""
        embedding, hidden = joined.chunk(2, -1)
        return torch.cat((self.embedding(embedding), hidden if self.is_normed else self.hidden(hidden)), -1)


@functools.cache
def two_norms(norm: type) -> type:
    """The class of ``TwoNorms`` of this class. Cached, so that equal arguments give one class."""
    return type(f"Two{norm.__name__}s", (TwoNorms,), {"norm": norm, "__doc__": TwoNorms.__doc__})


class TwiceAsWide:
    """Before a linear layer: it has twice as many inputs."""

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(2 * input_size, output_size, **options)  # type: ignore[call-arg]


class LaterSteps(CoreAttention):
    """Attention of a later step: ``key`` and ``value`` have the steps side by side, ``[t, b, groups, steps * dim]``.

    All tokens up to a place have a key of the first step. Of other steps only the keys of the place itself count.
    """

    def _sequence(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        visible: Tensor | None = None,
    ) -> Tensor:
        (key, *own_keys), (value, *own_values) = (part.split(query.size(-1), -1) for part in (key, value))
        places = places_in_text(query, key, self.cp_group)
        if self.cp_group.size() > 1:
            key, value = self._gather(key, value)
        ahead = torch.arange(key.size(0), device=query.device) > places[:, None]
        others = ~torch.eye(query.size(0), dtype=torch.bool, device=query.device)
        hidden = torch.cat((ahead, *(others for _ in own_keys)), -1)
        parts = query, torch.cat((key, *own_keys)), torch.cat((value, *own_values))
        query, key, value = (rearrange(part, "s b n d -> b n s d") for part in parts)
        context = self._attend(query, key, value, hidden)
        return rearrange(context, "b n s d -> s b (n d)")


class UnrolledAttention:
    """Before core attention: it keeps keys and values until ``forget``, and then attends as ``LaterSteps``.

    Attributes:
        steps: keys and values of the steps so far, of this context-parallel rank.
        step: how many steps came before. A recompute of a first step finds steps of a later microbatch.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.later = LaterSteps(**options)
        self.steps: list[tuple[Tensor, Tensor]] = []
        self.step = 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """As core attention in the first step."""
        self.steps[self.step :] = [(key, value)]
        if not self.step:
            first: Tensor = super().forward(query, key, value, *arguments, **options)  # type: ignore[misc]
            return first
        keys, values = (torch.cat(parts, -1) for parts in zip(*self.steps, strict=True))
        later: Tensor = self.later(query, keys, values, packed_seq_params=options.get("packed_seq_params"))
        return later


class Vocabulary(nn.Module):
    """The choice of tokens of a draft head: int64 ``d2t`` ``[own tokens]`` and bool ``t2d`` ``[tokens of the policy]``.

    ``d2t`` has the id of a token for the policy minus its own id. ``t2d`` says which tokens of the policy are chosen.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, size: int, target_size: int, *, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64, device=device))
        self.register_buffer("t2d", torch.zeros(target_size, dtype=torch.bool, device=device))

    def choose(self, token_ids: Tensor) -> None:
        """Let the own tokens be these tokens of the policy, in this order."""
        token_ids = token_ids.to(self.d2t.device)
        self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))
        self.t2d.zero_()[token_ids] = True

    def target_ids(self) -> Tensor:
        """int64 ``[own tokens]``: the id of each token for the policy. The inverse of ``choose``."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


class Eagle3Model(GPTModel):
    """An EAGLE3 head as a ``GPTModel`` of one layer. It reads hidden states of its policy, and embeddings.

    Each tensor-parallel rank has ``fc`` whole, as engines do. With sequence parallelism it reads only its own tokens.

    It has an ``embedding`` only if its folder has one; otherwise it reads the embedding of its policy. Without a
    ``vocabulary`` both vocabularies are equal.
    """

    reads_logits = True

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        draft = config.draft
        super().__init__(config=config, **{**options, "pre_process": False})
        tp = self.pg_collection.tp
        self.fc = nn.Linear(3 * draft.target_hidden_size, config.hidden_size, bias=False, **placement(config))
        self.fc.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            config.init_method(self.fc.weight)
        self.fc_norm = nn.ModuleList()
        if draft.fc_norm:
            norm = self.decoder.layers[0].input_layernorm.norm
            self.fc_norm.extend(norm(config, draft.target_hidden_size, config.layernorm_epsilon) for _ in range(3))
        if draft.own_embedding:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=-(-draft.target_vocab_size // tp.size()) * tp.size(),
                max_sequence_length=self.max_sequence_length,
                position_embedding_type="none",
                tp_group=tp,
            )
        sizes = config.hf_vocab_size, draft.target_vocab_size
        self.vocabulary = Vocabulary(*sizes, device=self.fc.weight.device) if draft.has_map else None
        self.state: Tensor | None = None
        """``[s, b, hidden_size]``: what the last step has made, before the final norm. The next step reads it."""
        self.decoder.final_layernorm.register_forward_pre_hook(self._note_state)

    def forward(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        *,
        embedding: VocabParallelEmbedding,
        step: int = 0,
    ) -> Tensor:
        """The logits over the own vocabulary of this tensor-parallel rank.

        Args:
            hidden: ``[s, b, 3 * target_hidden_size]``: the inputs of three layers of the policy. With sequence
                parallelism each rank has its part of ``s``. In a later step it is the ``state`` of the step before.
            input_ids: int64 ``[b, s]``: for each hidden state the token that follows, in the vocabulary of the policy;
                in step k the token that follows k tokens later.
            position_ids: ``[b, s]``: of the hidden states.
            packed_seq_params: as for the policy.
            embedding: the one of the policy, for a head without an own one. No gradient goes there.
            step: how many steps came before, with ``forget`` before the first one.

        Returns:
            ``[b, s, padded vocab / tp]``, of all tokens of this context-parallel rank.
        """
        fused = hidden if step else self._fused(hidden)
        norm = self.decoder.layers[0].input_layernorm
        if norm.is_normed:
            fused = norm.hidden(fused)
        self.set_input_tensor(torch.cat((self._embed(input_ids, embedding), fused), -1))
        self.rotary_pos_emb.first = self.decoder.layers[0].self_attention.core_attention.step = step
        logits: Tensor = super().forward(None, position_ids, None, packed_seq_params=packed_seq_params)
        self.set_input_tensor(None)
        return logits

    def problem_beside(self, policy: GPTModel, steps: int) -> str:
        """Why the head cannot learn so many steps beside a policy, or ""."""
        if steps > 1 and self.config.recompute_granularity is not None:
            return (
                "a draft head must have recompute_granularity=None for several steps, since a recomputed step would "
                "read the keys of later steps"
            )
        return "the model must have no pipeline stages" if policy.pg_collection.pp.size() > 1 else ""

    def forget(self) -> None:
        """Let go of earlier steps. The next step is the first one."""
        self.decoder.layers[0].self_attention.core_attention.steps.clear()
        self.state = None

    def _note_state(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.state = inputs[0]

    def _fused(self, hidden: Tensor) -> Tensor:
        if self.fc_norm:
            normed = (norm(part) for norm, part in zip(self.fc_norm, hidden.chunk(3, -1), strict=True))
            hidden = torch.cat([*normed], -1)
        fused: Tensor = self.fc(hidden)
        return fused

    def _embed(self, input_ids: Tensor, embedding: VocabParallelEmbedding) -> Tensor:
        """``[s, b, hidden_size]``. Hooks of the policy are left out: engines do not scale embeddings for a draft."""
        if self.config.draft.own_embedding:
            own: Tensor = self.embedding(input_ids, None)
            return own
        with torch.no_grad():
            rows: Tensor = embedding.forward(input_ids)
            if embedding.reduce_scatter_embeddings:  # they are [s, b, hidden_size] already
                return rows
            rows = rows.transpose(0, 1)
            cut = self.config.sequence_parallel
            return scatter_to_sequence_parallel_region(rows, group=self.pg_collection.tp) if cut else rows
