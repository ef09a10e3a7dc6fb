"""A stub in the place of a composite's language model, which records the arguments of transformers' call.

transformers' ``forward`` of the composite runs the tower, replaces image tokens by features, and computes positions and
masks. It passes all results as arguments to the language model, so this library needs no second formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

Embed = Callable[[Tensor], Tensor]
"""Embeds token ids: int64 ``[batch, seq]`` to ``[batch, seq, size]``."""


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
