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

from mcore_bridge.rules.codec import Codec
from mcore_bridge.weights.plan.encoded_entries import cells_of, upright_of
from mcore_bridge.weights.plan.inventory import Role
from mcore_bridge.weights.sent.encoded_shard import EncodedShard
from mcore_bridge.weights.transfer.copier import Buffers, has_triton

_BATCH = 1 << 25
"""Bytes of codes in a batch, if it has several shards. As many may wait for each shape."""
_KEPT = 1 << 18
"""The scales of a batch in files stay on the GPU between exports if they have at most this many bytes."""
_UNCHECKED = 2
"""Launches whose numbers may not yet be known to be finite when the next one begins."""
_ALIGNMENT = 512
_LARGEST = 1 << 15
"""Numbers of the largest block. A program of the kernel holds all of them in registers."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_E8M0 = getattr(torch, "float8_e8m0fnu", torch.float32)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What the shards of a batch have in common.

    Attributes:
        codec: their codec.
        shape: rows and columns of a shard.
        cells: rows and columns of a block; the last block of a row or column may be smaller.
        dtype: the dtype of the numbers.
        scales: the dtype of the scales; uint8 are exponents of powers of two.
        powers: whether new scales are powers of two.
        are_kept: whether there are scales of files.
        device: where the shards are.
    """

    codec: Codec
    shape: tuple[int, int]
    cells: tuple[int, int]
    dtype: torch.dtype
    scales: torch.dtype
    powers: bool
    are_kept: bool
    device: torch.device

    @classmethod
    def of(cls, shard: EncodedShard) -> Blocks:
        """The blocks of a shard."""
        part, (rows, columns) = shard.roles["scales"], shard.held.shape
        first = part.encodings[0]
        height, width = cells_of(upright_of(part.plain.trace, first), first)
        return cls(
            first.codec,
            (rows, columns),
            (min(height, rows), min(width, columns)),
            shard.held.dtype,
            first.scales.dtype,
            first.powers,
            shard.is_kept,
            shard.held.device,
        )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the scales of a shard."""
        (rows, columns), (height, width) = self.shape, self.cells
        return -(-rows // height), -(-columns // width)

    @property
    def num_bytes(self) -> int:
        """Bytes of the codes of a shard."""
        return self.shape[0] * self.shape[1] // self.codec.per_byte

    @property
    def have_kernel(self) -> bool:
        """Whether the kernel knows such blocks."""
        height, width = (1 << (cell - 1).bit_length() for cell in self.cells)
        known = (torch.uint8,) if self.codec.kind == "mxfp4" else (*_FLOATS, _E8M0)
        is_plain = self.codec.kind != "nvfp4" and not self.codec.overall and self.dtype in _FLOATS
        is_whole = self.cells[1] % self.codec.per_byte == 0
        return is_plain and is_whole and self.scales in known and height * width <= _LARGEST


def batch(shards: Iterable[EncodedShard]) -> None:
    """Let shards on a GPU be encoded in batches, if the kernel can encode them. All others are encoded alone."""
    checks = _Checks()
    open_batches: dict[Blocks, _Batch] = {}
    for shard in shards:
        if shard.agreed is not None or not runs_kernel(shard.held.device):
            continue
        blocks = Blocks.of(shard)
        if not blocks.have_kernel:
            continue
        current = open_batches.get(blocks)
        if current is None or (len(current.shards) + 1) * blocks.num_bytes > _BATCH:
            current = open_batches[blocks] = _Batch(blocks, checks)
            checks.left += 1
        current.shards.append(shard)
        shard.maker = current.take


def runs_kernel(device: torch.device) -> bool:
    """Whether a kernel encodes shards on ``device``."""
    return device.type == "cuda" and has_triton()


@dataclass
class _Batch:
    """Shards that one launch encodes, when the first of them is needed."""

    blocks: Blocks
    checks: _Checks
    shards: list[EncodedShard] = field(default_factory=list)
    _made: dict[tuple[int, Role], Tensor] = field(default_factory=dict)
    _is_made: bool = False

    def take(self, shard: EncodedShard, role: Role) -> Tensor:
        """What is sent of a shard in a role; a ``Maker``."""
        key = id(shard), role
        if key not in self._made:
            with torch.cuda.device(self.blocks.device):
                self._make([shard] if self._is_made else self.shards)
            self._is_made = True
        return self._made.pop(key)

    def _make(self, shards: Sequence[EncodedShard]) -> None:
        from mcore_bridge.weights.sent.triton_encode import encode_blocks

        blocks, device, count = self.blocks, self.blocks.device, len(shards)
        values = [shard.values().contiguous() for shard in shards]
        stored = torch.uint8 if blocks.scales.itemsize == 1 else blocks.scales
        stride = -(-blocks.num_bytes // _ALIGNMENT) * _ALIGNMENT
        codes = torch.empty((count, stride), dtype=torch.uint8, device=device)
        scales = torch.empty((count, *blocks.grid), dtype=stored, device=device)
        not_finite = torch.zeros(count, dtype=torch.int32, device=device)
        addresses = Buffers(values).addresses_on(device)
        encode_blocks(blocks, addresses, self._kept(shards), codes, scales, not_finite)
        for shard, own, of_shard in zip(shards, codes.unbind(), scales.unbind(), strict=True):
            self._made[id(shard), "codes"] = shard.as_sent(own[: blocks.num_bytes])
            self._made[id(shard), "scales"] = of_shard.view(blocks.scales)
        self.checks.add(shards, not_finite, is_new=not self._is_made)

    def _kept(self, shards: Sequence[EncodedShard]) -> Tensor | None:
        """The scales of shards in files, on the GPU, [shards, *grid]; None if there are none."""
        if not self.blocks.are_kept:
            return None
        on_gpu = shards[0].form.on_gpu
        key = (
            self.blocks,
            *((shard.roles["scales"].plain.hf, shard.roles["scales"].parts, shard.shard) for shard in shards),
        )
        if key in on_gpu:
            return on_gpu[key]
        own = torch.stack([kept for shard in shards if (kept := shard.kept()) is not None]).to(self.blocks.device)
        if own.nbytes <= _KEPT:
            on_gpu[key] = own
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
        event.record()
        self._waiting.append((shards, flags, event))
        while len(self._waiting) > (_UNCHECKED if self.left > 0 else 0):
            done, flags, event = self._waiting.popleft()
            event.synchronize()
            for shard, is_wrong in zip(done, flags.tolist(), strict=True):
                if is_wrong:
                    raise shard.not_finite()
