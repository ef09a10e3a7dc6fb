"""What the command may be asked for, with its defaults. It imports nothing heavy, since ``--help`` shows it."""

from __future__ import annotations

from dataclasses import dataclass

BANDWIDTH = 255.0
"""GB/s that a rank receives from others, measured with exports of 16 and 61 GB among 4 H200s by NVLink."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes at a time.

    Attributes:
        sequence: tokens of a sequence.
        micro_batch: sequences of a microbatch.
        recompute: keep only the input of each layer, and compute all else again in the backward pass.
    """

    sequence: int
    micro_batch: int
    recompute: bool = False
