"""The projection of an MTP layer whose weight multiplies hidden states, then the embedding, as in MiMo.

megatron-core joins the embedding with hidden states in the other order. A layout cannot exchange the halves of the
weight: tensor parallelism cuts its rows, and a layout moves elements along one dim. So this module exchanges the halves
of its input. Its weight has a name of its own. Then no other model of megatron-core takes it for the usual weight.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class HiddenFirst(MegatronModule):
    """A linear layer that takes ``[..., embedding and hidden states]`` and multiplies hidden states first.

    Args:
        sizes, options: as for ``linear``.
        linear: the class of the linear layer.
    """

    def __init__(self, *sizes: int, linear: type, **options: Any) -> None:
        super().__init__(options["config"])
        self.hidden_first = linear(*sizes, **options)

    def forward(self, joined: Tensor) -> Any:
        """The result of the linear layer, for the halves of ``joined`` in the other order."""
        embedding, hidden = joined.chunk(2, -1)
        return self.hidden_first(torch.cat((hidden, embedding), -1))

    def backward_dw(self) -> None:
        """Compute the gradient of the weight, if megatron-core has delayed it."""
        self.hidden_first.backward_dw()
