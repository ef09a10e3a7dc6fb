"""Batches of shards on a GPU. One launch makes the codes and scales of many shards of one shape.

A launch for each of thousands of experts would take longer than to read their numbers. So a shard that a message needs
is encoded together with the next ones of its shape, which wait for their messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_bridge.rules.spec import ALIGNMENT
from mcore_bridge.weights.sent.block_geometry import Blocks
from mcore_bridge.weights.sent.encoded_shard import EncodedShard, as_bytes
from mcore_bridge.weights.transfer.copier import Buffers, has_triton

_BATCH = 1 << 25
"""Bytes of codes in a batch, if it has several shards. As many may wait for each shape."""
_KEPT = 1 << 18
"""The scales of a batch in files stay on the GPU between exports if they have at most this many bytes."""
_UNCHECKED = 2
"""Launches whose numbers may not yet be known to be finite when the next one begins."""


def batch(shards: Iterable[tuple[Blocks | None, EncodedShard]]) -> None:
    """Let shards on a GPU be encoded in batches, if they have blocks. All others are encoded alone."""
    checks = _Checks()
    begun: dict[tuple[Blocks, torch.device], _Batch] = {}
    for blocks, shard in shards:
        if blocks is None or not runs_kernel(shard.held.device):
            continue
        key = blocks, shard.held.device
        current = begun.get(key)
        if current is None or len(current.shards) >= max(1, _BATCH // blocks.num_bytes):
            current = begun[key] = _Batch(*key, checks)
            checks.left += 1
        current.shards.append(shard)
        shard.make = current.make


def runs_kernel(device: torch.device) -> bool:
    """Whether a kernel encodes shards on ``device``."""
    return device.type == "cuda" and has_triton()


@dataclass(eq=False)
class _Batch:
    """Shards that one launch encodes, when the first of them is needed."""

    blocks: Blocks
    device: torch.device
    checks: _Checks
    shards: list[EncodedShard] = field(default_factory=list)
    _is_made: bool = False

    def make(self, shard: EncodedShard) -> None:
        """Make what is sent of all shards; if they were made before, of this one alone."""
        with torch.cuda.device(self.device), torch.no_grad():
            shards = [shard] if self._is_made else self.shards
            self.checks.add(shards, self._encoded(shards), is_new=not self._is_made)
        self._is_made = True

    def _encoded(self, shards: Sequence[EncodedShard]) -> Tensor:
        """Encode shards. Returns int32 [shards], 1 for each shard with a number that is not finite."""
        from mcore_bridge.weights.sent.triton_encode import encode_blocks

        blocks, count = self.blocks, len(shards)
        values = [shard.values().contiguous() for shard in shards]
        stride = -(-blocks.num_bytes // ALIGNMENT) * ALIGNMENT
        codes = torch.empty((count, stride), dtype=torch.uint8, device=self.device)
        scales = torch.empty((count, *blocks.grid), dtype=blocks.scales, device=self.device)
        not_finite = torch.zeros(count, dtype=torch.int32, device=self.device)
        held = Buffers(values)
        outputs = codes, as_bytes(scales), not_finite
        encode_blocks(blocks, held.addresses_on(self.device), self._kept(shards), *outputs, aligned=held.is_aligned)
        dtype, shape = blocks.codes
        sent = codes.view(dtype)[:, : blocks.num_bytes // dtype.itemsize].unflatten(1, shape)
        for shard, own, of_shard in zip(shards, sent.unbind(), scales.unbind(), strict=True):
            shard.ready = {"codes": own, "scales": of_shard}
        return not_finite

    def _kept(self, shards: Sequence[EncodedShard]) -> Tensor | None:
        """The scales of shards in files, on the GPU, [shards, *grid]; None if there are none."""
        form, parts = shards[0].form, [shard.roles["scales"] for shard in shards]
        if not shards[0].is_kept:
            return None
        key = self.device, *((id(part), shard.shard) for part, shard in zip(parts, shards, strict=True))
        if key in form.on_gpu:
            return form.on_gpu[key][0]
        own = torch.stack([kept for shard in shards if (kept := shard.kept()) is not None]).to(self.device)
        if own.nbytes <= _KEPT:
            form.on_gpu[key] = own, parts  # which keep their ids
        return own


@dataclass
class _Checks:
    """Sees that all numbers were finite, without a wait for each launch.

    Attributes:
        left: batches that are not made yet. After the last one, all numbers are known to be finite.
    """

    left: int = 0
    _waiting: deque[tuple[Sequence[EncodedShard], Tensor, torch.cuda.Event]] = field(default_factory=deque)

    def add(self, shards: Sequence[EncodedShard], not_finite: Tensor, *, is_new: bool) -> None:
        """Check earlier launches, and note this one: 1 in ``not_finite`` for each shard with NaN or infinity."""
        self.left -= is_new
        flags = torch.empty(len(not_finite), dtype=not_finite.dtype, pin_memory=True)
        flags.copy_(not_finite, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(not_finite.device))
        self._waiting.append((shards, flags, event))
        while len(self._waiting) > (_UNCHECKED if self.left > 0 else 0):
            done, flags, event = self._waiting.popleft()
            event.synchronize()
            for shard, is_wrong in zip(done, flags.tolist(), strict=True):
                if is_wrong:
                    raise shard.not_finite()
