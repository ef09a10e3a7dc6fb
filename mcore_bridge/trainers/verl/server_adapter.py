"""verl's adapter of vLLM, which takes a round of a ``WeightSync`` for tensors.

It runs in two kinds of processes: in the trainer's ranks beside rollouts on the same GPUs, and beside the workers of
rollouts on other GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_bridge.engines.vllm import Extension
from mcore_bridge.trainers.module_patch import original
from mcore_bridge.trainers.verl.rollouts import BACKEND, TIMEOUT, Caller, Meeting, Rollouts, Round
from mcore_bridge.trainers.weight_export import WeightExport

_THEIRS: Any = original("verl.workers.rollout.vllm_rollout.vllm_rollout")


class ServerAdapter(_THEIRS.ServerAdapter):
    """The adapter. What it does not send itself, verl's own class sends: adapters, and tensors of other bridges."""

    _rollouts: Rollouts | None = None
    _caller: Caller
    _meeting: Meeting

    async def update_weights(self, weights: Any, global_steps: int | None = None, **options: Any) -> None:
        """Bring the weights into the rollout.

        Args:
            weights: what our bridge exported, or a round of ``checkpoint_engine.backend=mcore_bridge``; else a
                generator of pairs.
            global_steps: the version of the weights.
            options: as for verl's method.

        Raises:
            TransferError: as ``WeightSync``.
        """
        if isinstance(weights, Round):
            await weights.join(self._call_workers if self._ensure_server_handle() else None)
        elif isinstance(weights, WeightExport) and self._syncs(options):
            await self._send(weights, global_steps)
        else:
            await super().update_weights(weights, global_steps=global_steps, **options)
            return
        if self._ensure_server_handle():
            await self.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)

    def _syncs(self, options: Mapping[str, Any]) -> bool:
        """Whether a round takes the place of verl's sender: not for a base beside adapters, nor before verl 0.8."""
        engine_kwargs = self.config.checkpoint_engine.engine_kwargs.get(BACKEND, {})
        is_wanted = engine_kwargs.get("colocated", True) and hasattr(self, "_ensure_server_handle")
        return is_wanted and options.get("peft_config") is None

    async def _send(self, export: WeightExport, version: int | None) -> None:
        """A round on the trainer's ranks, each of which may also call a rollout."""
        calls = self._ensure_server_handle()
        if self._rollouts is None:
            timeout = self.config.checkpoint_engine.engine_kwargs.get(BACKEND, {}).get("timeout", TIMEOUT)
            self._rollouts, self._caller = Rollouts(timeout), Caller()
            self._meeting = self._rollouts.meeting(calls)
            self._caller.calls = calls
        joined = self._caller.pass_on(self._meeting.address, self._call_workers if calls else None)
        self._rollouts.send(export, version, self._meeting.num_callers)
        await joined

    async def _call_workers(self, info: Mapping[str, Any]) -> None:
        await self._execute_method(Extension.receive_from_trainer.__name__, args=(dict(info),))
