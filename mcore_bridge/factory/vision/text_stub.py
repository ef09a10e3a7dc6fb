"""A stub in the place of a composite's language model, which records the arguments of transformers' call.

transformers' ``forward`` of the composite runs the tower, replaces image tokens by features, and computes positions and
masks. It passes all results as arguments to the language model, so this library needs no second formula.

If the rows of a batch use several sets of adapters, a tower runs once for each set, on the images of the set's rows.
Towers cut, pad, merge and permute patches, each in its own way. So no layer knows the row of a patch, but images do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from mcore_bridge.batches.images import OfSequences, joined
from mcore_bridge.factory.vision.deepstack import at_tokens

Embed = Callable[[Tensor], Tensor]
"""Embeds token ids: int64 ``[batch, seq]`` to ``[batch, seq, size]``."""
RunOfSet = Callable[[int, Sequence[int], dict[str, Any]], dict[str, Any]]
"""Runs a composite with a set of adapters, for some sequences by number, with the inputs of their images.

It returns the arguments for the language model.
"""


class TextStub(nn.Module):
    """A stub for the language model of a composite. It has no parameters and no buffers.

    Args:
        text: transformers' language model, of which only the rope is kept.
    """

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self._rope = (getattr(text, "rotary_emb", None),)  # in a tuple: it is no submodule
        self._embed: Embed | None = None
        self._call: dict[str, Any] = {}

    @property
    def recompose(self) -> Callable[[Tensor], Tensor] | None:
        """The rope's function that selects a position for each angle: ``[n, b, s, dims / 2]`` to ``[b, s, dims]``.

        None: the rope has one position for each token.
        """
        return getattr(self._rope[0], "recomposition_frequencies", None) if self.num_positions else None

    @property
    def num_positions(self) -> int:
        """How many positions a token has for a rope with sections: three, or four in HunYuan. Without sections, 0."""
        return len(getattr(self._rope[0], "mrope_section", None) or ())

    def get_input_embeddings(self) -> Embed | None:
        """The embedding for the call in progress."""
        return self._embed

    def forward(self, **call: Any) -> MoeModelOutputWithPast:
        """Record the call. transformers reads the fields of the result afterwards."""
        self._call = call
        return MoeModelOutputWithPast(last_hidden_state=call["inputs_embeds"])


def run_composite(composite: nn.Module, embed: Embed, aliases: Mapping[str, Tensor], **inputs: Any) -> dict[str, Any]:
    """Run a composite whose language model is ``TextStub``, and return the recorded arguments.

    Args:
        composite: transformers' base model.
        embed: embeds the tokens.
        aliases: tensors by names of parameters, used in place of the parameters.
        inputs: the arguments of the composite's ``forward``.
    """
    stub: Any = composite.language_model
    vars(composite)["rope_deltas"] = None  # from the previous call, from which generation would continue
    stub._embed, stub._call = embed, {}
    try:
        torch.func.functional_call(composite, dict(aliases), kwargs=inputs)
        call: dict[str, Any] = stub._call
        return call
    finally:
        stub._embed, stub._call = None, {}


def sequences_by_set(sets: Sequence[int], seen: OfSequences, num_sequences: int) -> dict[int, list[int]]:
    """The sequences of each run of a tower, by the number of their set. Sequences of text join the first run.

    Args:
        sets: the number of the set of each row of the batch.
        seen: the images of the microbatch.
        num_sequences: the sequences of the microbatch. Those after the last of ``seen`` are padding.
    """
    by_set: dict[int, list[int]] = {}
    for number, (row, counts) in enumerate(zip(seen.rows, seen.counts, strict=True)):
        if any(counts):
            by_set.setdefault(sets[row], []).append(number)
    others = {*range(num_sequences)}.difference(*by_set.values())
    first = next(iter(by_set), -1)
    return {**by_set, first: sorted([*by_set.get(first, []), *others])}


def features_by_set(sets: Sequence[int], seen: OfSequences, num_sequences: int, run: RunOfSet) -> dict[str, Any]:
    """The arguments for the language model that have features of images, for all sequences.

    Args:
        sets, seen, num_sequences: as for ``sequences_by_set``.
        run: runs the composite with its tower.
    """
    by_set, images = sequences_by_set(sets, seen, num_sequences), dict(enumerate(seen.images))
    calls = [run(of_set, own, joined([images.get(number) for number in own])) for of_set, own in by_set.items()]
    order = torch.tensor([number for own in by_set.values() for number in own]).argsort()
    hidden = _in_order([call["inputs_embeds"] for call in calls], order)
    if calls[0].get("deepstack_visual_embeds") is None:
        return {"inputs_embeds": hidden}
    where = _in_order([call["visual_pos_masks"] for call in calls], order)
    depths = [_in_order(of_depth, order)[where] for of_depth in zip(*map(_deepstacked, calls), strict=True)]
    return {"inputs_embeds": hidden, "visual_pos_masks": where, "deepstack_visual_embeds": depths}


def _in_order(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """Join the sequences of all runs, each ``[sequences, ...]``."""
    return torch.cat([*parts])[order.to(parts[0].device)]


def _deepstacked(call: Mapping[str, Any]) -> list[Tensor]:
    """The features of each depth at their tokens, ``[sequences, tokens, h]``."""
    where, hidden = call["visual_pos_masks"], call["inputs_embeds"]
    return [at_tokens(features, where, hidden) for features in call["deepstack_visual_embeds"]]
