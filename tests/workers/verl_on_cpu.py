"""What ``VERL_USE_EXTERNAL_MODULES`` names where verl's own tests are to run on CPUs, in every process that Ray starts.

``RANKS`` is how many of them there are to be.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

import mcore_bridge.trainers.verl  # noqa: F401 - what a user names
from mcore_bridge.cpu import enable_cpu
from tests.workers.verl_engine import CpuForCuda, use_us_on_cpu

RANKS = int(os.environ["RANKS"])

named = os.environ["VERL_USE_EXTERNAL_MODULES"]
use_us_on_cpu()
os.environ.update(VERL_USE_EXTERNAL_MODULES=named, VERL_ENGINE_DEVICE="cuda", VERL_ENGINE_VENDOR="nvidia")
from verl.plugin.platform import get_platform  # noqa: E402 - reads the environment

platform: Any = type(get_platform())
platform.device_count = lambda self: RANKS
platform.ray_resource_name = lambda self: "rank"
platform.visible_devices_envvar = lambda self: "RANK_VISIBLE_DEVICES"
cpu: Any = torch.cpu
cpu.device_count = lambda: RANKS
for counted in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(cpu, counted, lambda *_: 0)
init_process_group = dist.init_process_group


def init(backend: str | None = None, **others: Any) -> None:
    """verl asks for "cpu:gloo" and the device's own, which is gloo again."""
    init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **others)


dist.init_process_group = init
enable_cpu()
CpuForCuda().__enter__()
