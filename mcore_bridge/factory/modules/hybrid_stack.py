"""The layers of megatron-core's ``HybridModel``: each is half of an HF layer, and has the number of the HF layer.

megatron-core numbers the halves. ``GPTModel``, HF and our rules number whole layers. So ``layer_number`` is the number
of the whole layer here. Then both halves have the canonical names of one layer, and a module that differs between
layers finds its own number in the config. Keys in checkpoints have megatron-core's numbers.

An MTP layer of megatron-core's ``HybridModel`` contains the two halves of one of our layers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.tensor_parallel import get_cuda_rng_tracker, scatter_to_sequence_parallel_region
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor, nn

from mcore_bridge.rules.hybrid_keys import HalfKeys


class HalvesStack(HybridStack):
    """megatron-core's stack, with the final norm of our backend. (megatron-core always uses TransformerEngine's.)

    Args:
        places, arguments: as for megatron-core's stack.
        norm: the class of the final norm.
        keys: the names of its layers in checkpoints.
    """

    def __init__(self, *places: Any, norm: type, keys: HalfKeys, **arguments: Any) -> None:
        super().__init__(*places, post_layer_norm=False, **arguments)
        self.keys, self.post_layer_norm = keys, True
        if self.post_process:
            sizes = {"hidden_size": self.config.hidden_size, "eps": self.config.layernorm_epsilon}
            self.final_norm = norm(config=self.config, **sizes)

    @property
    def final_layernorm(self) -> nn.Module | None:
        """The final norm under its name in a ``GPTModel``; None if it is in another stage."""
        return getattr(self, "final_norm", None)

    def forward(self, hidden_states: Any, *places: Any, padding_mask: Tensor | None = None, **arguments: Any) -> Any:
        """megatron-core's forward, with the steps for sequence parallelism that ``GPTModel`` has and this class lacks.

        Each rank has other tokens. So it needs its part of the mask of padding, and its own dropout.
        """
        if not self.config.sequence_parallel:
            return super().forward(hidden_states, *places, padding_mask=padding_mask, **arguments)
        if padding_mask is not None and self.pre_process:
            own = scatter_to_sequence_parallel_region(padding_mask.mT.contiguous(), group=self.tp_group)
            padding_mask = own.mT.contiguous()
        with get_cuda_rng_tracker().fork():
            return super().forward(hidden_states, *places, padding_mask=padding_mask, **arguments)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The shards of all parameters, under the keys of megatron-core's own ``HybridModel``."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for sharded in state.values():
            sharded.key = prefix + self.keys.to_hybrid(sharded.key.removeprefix(prefix))
        return state


@functools.cache
def half_of(layer: type) -> type:
    """A subclass of ``layer`` that translates megatron-core's number of the layer.

    Its argument ``numbers`` has, for each layer of megatron-core, the number of its whole layer in the model, from 0.
    """

    class HalfLayer(layer):
        def __init__(
            self,
            config: Any,
            submodules: Any,
            layer_number: int,
            *,
            numbers: Sequence[int],
            add_layer_offset: bool = False,
            pp_layer_offset: int = 0,  # inference subtracts this count of halves from the number of a layer
            **arguments: Any,
        ) -> None:
            own = numbers[layer_number - 1] + 1
            super().__init__(config, submodules, own, add_layer_offset=add_layer_offset, **arguments)

    HalfLayer.__name__ = HalfLayer.__qualname__ = f"Half{layer.__name__}"
    return HalfLayer


_HALF = re.compile(r"(mtp\.layers\.\d+\.)mtp_model_layer\.layers\.\d+\.")


class HalvesMtpLayer(MultiTokenPredictionLayer):
    """megatron-core's MTP layer, with separate specs for its halves, which have the number of the MTP layer.

    megatron-core uses the specs of the decoder's layers, but a stage may not have all kinds.

    Args:
        config, submodules, layer_number, arguments: as for megatron-core's layer.
        halves: the specs of both halves, by their fields in ``HybridStackSubmodules``.
        keys: the names of both halves in checkpoints.
        hybrid_submodules: the submodules of the decoder, which are not used.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int = 1,
        *,
        halves: Mapping[str, Any],
        keys: HalfKeys,
        hybrid_submodules: Any = None,
        **arguments: Any,
    ) -> None:
        numbers = (layer_number - 1,) * len(halves)
        own = {
            slot: ModuleSpec(spec.module, {**spec.params, "numbers": numbers}, spec.submodules)
            for slot, spec in halves.items()
        }
        super().__init__(config, submodules, layer_number, hybrid_submodules=HybridStackSubmodules(**own), **arguments)
        self.keys = keys

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The shards of all parameters, under the keys of megatron-core's own MTP layer."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for sharded in state.values():  # both halves have the number of the MTP layer now
            sharded.key = self.keys.mtp_to_hybrid(_HALF.sub(r"\1transformer_layer.", sharded.key))
        return state
