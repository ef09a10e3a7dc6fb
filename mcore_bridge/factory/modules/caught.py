"""What stands in the place of a composite's language model: it notes what it is called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call of a language model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Caught(nn.Module):
    """Notes each call as ``call``, and gives back the embeddings that it got. It has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Call | None = None

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        """Note the call. transformers reads these fields of the output afterwards."""
        self.call = Call(args, kwargs)
        return BaseModelOutputWithPast(last_hidden_state=kwargs.get("inputs_embeds"))
