"""The backend ``mcore_bridge`` of vLLM's weight transfer. vLLM imports this module in its workers, and nobody else."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from mcore_bridge.engines.engine_worker import EngineWorker
from mcore_bridge.engines.vllm import worker_of
from mcore_bridge.errors import TransferError


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: a worker learns all that it needs in each round."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What a ``WeightSync`` sends: the fields of an ``Invitation``."""

    address: dict[str, Any] = field(default_factory=dict)
    engine: int = 0
    seconds: float = 600.0


class Backend(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One worker of vLLM. A whole round runs inside of one ``update_weights``, while the worker computes nothing."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take what vLLM gives: its configs, the device and the model."""
        super().__init__(*arguments, **options)
        self._workers: dict[int, EngineWorker] = {}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do before the first round."""

    def start_weight_update(self) -> None:
        """Nothing to do: weights are written in their final form."""

    def finish_weight_update(self) -> None:
        """Nothing to do: ``receive_weights`` returns when the worker has the new weights."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take part in a round, for the model that is the target of the update."""
        worker = self._workers.get(id(self.model))
        if worker is None:
            rank = self.parallel_config.rank
            worker = worker_of(self.model, self.vllm_config, self.model_config, self.device, rank)
            self._workers[id(self.model)] = worker
        worker.receive(asdict(update_info))

    def shutdown(self) -> None:
        """Let go of the trainer."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """Not the way of this backend; vLLM 0.25 to 0.27 want the method.

        Raises:
            TransferError: always.
        """
        raise TransferError("expected a trainer with a WeightSync, found trainer_send_weights: call WeightSync instead")
