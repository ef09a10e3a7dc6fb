"""What ``grpo.py --record FILE`` writes of each step: a line of JSON."""

from __future__ import annotations

import json
from time import perf_counter

import torch
from torch import Tensor

import mcore_bridge as mb


class StepRecord:
    """Seconds of the parts of a step, from the moment at which it is made."""

    def __init__(self, device: str) -> None:
        self._on_gpu, self._seconds = device == "cuda", dict[str, float]()
        self._last = perf_counter()

    def end(self, part: str) -> None:
        """The seconds since the end of the part before are seconds of this part."""
        if self._on_gpu:
            torch.cuda.synchronize()
        now = perf_counter()
        self._seconds[part], self._last = round(now - self._last, 6), now

    def write(self, file: str | None, step: int, rewards: Tensor, report: mb.VerifyReport) -> None:
        """Add the line to a file, if there is one: seconds, reward, and how far log-probs are apart."""
        if file is None:
            return
        (apart,) = report.log_probs
        line = {"step": step, "reward": float(rewards.mean()), "seconds": self._seconds, "mean": apart.mean}
        line |= {"worst": apart.worst.distance, "kl": apart.kl}
        if self._on_gpu:
            line["peak_bytes"] = torch.cuda.max_memory_allocated()
        with open(file, "a") as lines:
            lines.write(json.dumps(line) + "\n")
