"""verl's extension of vLLM's workers, which takes rounds of a ``WeightSync`` besides."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.engines.engine_worker import EngineWorker
from mcore_bridge.engines.vllm import Extension, worker_of
from mcore_bridge.rules.spec import runs_within
from mcore_bridge.trainers.module_patch import original

_THEIRS: Any = original("verl.workers.rollout.vllm_rollout.utils")
_BUCKETS = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
_BUCKET_BYTES = 256 << 20
Pair = tuple[str, Tensor]


class vLLMColocateWorkerExtension(_THEIRS.vLLMColocateWorkerExtension, Extension):  # noqa: N801
    """The class that verl names to vLLM."""

    @cached_property
    def worker_of_trainer(self) -> EngineWorker:
        """The part of this worker in weight syncs. What verl itself does to weights, its own steps do in each round."""
        if reason := self.reason_for_own_steps():
            parts = (self.model_runner.model, self.vllm_config, self.model_config, self.device, self.rank)
            return worker_of(*parts, load=self.load_by_own_steps, hidden=reason)
        return super().worker_of_trainer

    def reason_for_own_steps(self) -> str:
        """Why a map of vLLM's loader would miss something; empty for most models."""
        if self.vllm_config.quant_config is not None:
            return "verl quantizes the weights that it loads into vLLM, which no map does"
        if getattr(self, "_use_mtp_drafter_weight_sync", bool)():
            return "verl loads the weights into a draft model, too"
        if torch.version.hip is not None:
            return "verl repairs maps of experts before it loads weights into vLLM on AMD's GPUs"
        return ""

    def load_by_own_steps(self, pairs: Iterable[Pair]) -> None:
        """Load as verl does, with all that it does before and after."""
        module = importlib.import_module(_BUCKETS)
        theirs = module.BucketedWeightReceiver
        module.BucketedWeightReceiver = lambda **options: _Given(pairs)  # type: ignore[attr-defined]
        try:
            self.update_weights_from_ipc()
        finally:
            module.BucketedWeightReceiver = theirs  # type: ignore[attr-defined]


class _Given:
    """In the place of verl's receiver: pairs that have come by another way."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._pairs = pairs

    def receive_weights(self, on_bucket_received: Callable[[list[Pair], bool], None]) -> None:
        """Call the function for each bucket."""
        for bucket in runs_within(self._pairs, lambda pair: pair[1].nbytes, _BUCKET_BYTES):
            on_bucket_received(bucket, False)
        on_bucket_received([], True)
