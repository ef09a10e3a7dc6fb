"""``checkpoint_engine.backend=mcore_bridge``: a ``WeightSync`` between verl's trainer and rollouts on other GPUs.

verl meets this module where it imports its registry, in which the backend is entered here. The driver and the processes
of rollouts import it, too, and need no megatron-core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mcore_bridge.engines.channel import Address
from mcore_bridge.errors import ConfigError, shown
from mcore_bridge.trainers.module_patch import original
from mcore_bridge.trainers.verl.rollouts import BACKEND, TIMEOUT, Caller, Rollouts, Round
from mcore_bridge.trainers.weight_export import WeightExport

_THEIRS: Any = original("verl.checkpoint_engine.base")
CheckpointEngineRegistry = _THEIRS.CheckpointEngineRegistry


@CheckpointEngineRegistry.register(BACKEND)
class WeightSyncEngine(_THEIRS.CheckpointEngine):
    """One process's part, in the trainer or beside a worker of a rollout.

    Args:
        bucket_size: without effect.
        is_master: whether this is rank 0 of the trainer; None beside a rollout.
        timeout: seconds, as for ``WeightSync``.
        colocated: without effect here: whether rollouts on the trainer's GPUs are synced in this way, too.
    """

    def __init__(
        self, bucket_size: int, is_master: bool | None = None, timeout: float = TIMEOUT, colocated: bool = True
    ) -> None:
        self._is_master = is_master
        self._rollouts, self._caller = Rollouts(timeout), Caller()
        self._address: Address | None = None
        self._num_callers = 0

    def prepare(self) -> dict[str, Any]:
        """What ``build_topology`` needs of this process."""
        if self._is_master:
            return {"address": asdict(self._rollouts.address())}
        return {} if self._is_master is not None else {"calls": self._caller.calls}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The arguments of ``init_process_group`` for the trainer's ranks, and for the processes of rollouts."""
        (address,) = (process["address"] for process in metadata if "address" in process)
        num_callers = sum(process["calls"] is not False for process in metadata[actor_wg_world_size:])
        return tuple(  # type: ignore[return-value]
            {"address": [address] * size, "num_callers": [num_callers] * size}
            for size in (actor_wg_world_size, rollout_world_size)
        )

    def init_process_group(self, address: Mapping[str, Any], num_callers: int) -> None:
        """Keep who meets where. Connections are made in the round itself."""
        self._address, self._num_callers = Address(**address), num_callers

    async def send_weights(self, weights: object, global_steps: int | None = None) -> None:
        """One round, on all ranks of the trainer.

        Args:
            weights: what our bridge exported. It is not iterated over: the models that it knows are sent.
            global_steps: the version of the weights.

        Raises:
            ConfigError: the weights are another iterator, such as one that QAT has wrapped, or have adapters beside.
            TransferError: as ``WeightSync``.
        """
        if not isinstance(weights, WeightExport):
            raise ConfigError(
                f"checkpoint_engine.backend={BACKEND} sends models that mcore_bridge exports, found {shown(weights)}; "
                "QAT and other engines than Megatron need another backend"
            )
        self._rollouts.send(weights, global_steps, self._num_callers)

    def receive_weights(self, global_steps: int | None = None) -> Round:
        """What our ``ServerAdapter`` takes for tensors."""
        assert self._address is not None
        return Round(self._caller, self._address)

    def finalize(self) -> None:
        """Nothing: connections and maps stay for the next round."""
