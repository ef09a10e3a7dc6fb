"""An MTP layer of megatron-core's ``HybridModel``, around the two halves of a layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from mcore_bridge.rules.hybrid_keys import HalfKeys

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
