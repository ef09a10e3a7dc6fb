"""verl's adapter of vLLM, which takes a round of a ``WeightSync`` for tensors, beside rollouts on other GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_bridge.engines.vllm import Extension
from mcore_bridge.trainers.module_patch import original
from mcore_bridge.trainers.verl.rollouts import Round

_THEIRS: Any = original("verl.workers.rollout.vllm_rollout.vllm_rollout")


class ServerAdapter(_THEIRS.ServerAdapter):
    """The adapter. What it does not send itself, verl's own class sends: tensors of all other backends."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **options: Any) -> None:
        """Bring the weights into the rollout.

        Args:
            weights: a round of ``checkpoint_engine.backend=mcore_bridge``, or a generator of pairs.
            global_steps: the version of the weights.
            options: as for verl's method.

        Raises:
            TransferError: as ``WeightSync``.
        """
        if isinstance(weights, Round):
            await weights.join(self._call_workers if self._ensure_server_handle() else None)
        else:
            await super().update_weights(weights, global_steps=global_steps, **options)
            return
        if self._ensure_server_handle():
            await self.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)

    async def _call_workers(self, info: Mapping[str, Any]) -> None:
        await self._execute_method(Extension.receive_from_trainer.__name__, args=(dict(info),))
