"""Whether a map does what the engine's loader does: drawn values go both ways, and every bit has to be the same.

All of these functions overwrite the engine's weights, so a whole round has to follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from random import Random

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mcore_bridge.errors import TransferError, plural
from mcore_bridge.rules.spec import TensorSpec, runs_within
from mcore_bridge.weights.engine.engine_tensors import EngineMemory
from mcore_bridge.weights.engine.loader_thread import Loader

_PATTERNS = {
    torch.bfloat16: (0x81FF, 0x3E00),
    torch.float16: (0x8FFF, 0x3000),
    torch.float32: (0x81FFFFFF, 0x3E000000),
    torch.float64: (0x803FFFFFFFFFFFFF, 0x3FC0000000000000),
    torch.float8_e4m3fn: (0x9F, 0x20),
    torch.float8_e5m2: (0x8F, 0x30),
    torch.float8_e8m0fnu: (0x03, 0x7C),
    torch.bool: (0x01, 0x00),
}
"""The mask of random bits, and the bits of the exponent that are always set. All bits of integers are random."""
_LOW, _SECOND_LOWEST = 0x3, 0x2
"""With an odd seed the last two bits are these. So no tensor has equal maxima, or minima, with even and odd seeds."""
_STRETCH = 1 << 16
"""The size of a stretch, in words of 8 bytes."""
_TOGETHER = 64 << 20
"""Bytes that are drawn at once. Larger amounts save time, since each draw must leave the torch modes of the loader."""
_LOWEST = -1 << 63
_ALL = {size: (1 << 8 * size) - 1 for size in (1, 2, 4, 8)}
_ROW = 1 << 16  # words of 8 bytes that are mixed with one pattern; on a CPU they fit into its cache
_ROWS = {"cpu": 1}  # rows that are mixed at once on a CPU; on a GPU more, for fewer kernels
_FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd, below 2 ** 63


def prove_kept(memory: EngineMemory, load: Loader, specs: Sequence[TensorSpec], engine: str) -> None:
    """Prove a map that was made earlier, by one run of the loader.

    Args:
        specs: the HF tensors that will come.
        engine: the line that identifies the engine.

    Raises:
        TransferError: when the map belongs to another engine or to other HF tensors, is damaged, or fails the proof.
    """
    kept = memory.map
    wrong = kept.differences(specs)
    if kept.engine != engine:
        wrong.insert(0, f"expected an engine {engine!r}, found {kept.engine!r}")
    if wrong:
        raise TransferError(f"the kept map belongs to another engine: {'; '.join(wrong[:8])}")
    memory.find()
    wrong = kept.problems(memory.device)
    if wrong:
        raise TransferError(f"the kept map is damaged: {'; '.join(wrong[:8])}")
    if disproof := disagreement(memory, load, specs, 0):
        raise TransferError(f"the kept map and the engine's loader {disproof}")


def disagreement(memory: EngineMemory, load: Loader, specs: Sequence[TensorSpec], seed: int) -> str:
    """Load random values by the engine's loader and by the map. Return the difference, or an empty string.

    Args:
        specs: the HF tensors in the order in which the loader gets them.

    Raises:
        TransferError: when the engine does not fit the map.
    """
    load(drawn_values(specs, seed, memory.device))
    reference = checksums(memory.held())
    _forget(memory, load, seed + 1)
    wrong = differing(memory, load, seed, reference)
    return f"disagree on {plural(len(wrong), 'tensor')}, such as {wrong[0]}" if wrong else ""


def differing(memory: EngineMemory, load: Loader | None, seed: int, reference: dict[str, int]) -> list[str]:
    """Put random values into the engine. Return the tensors whose checksums differ from ``reference``.

    Args:
        load: the engine's loader, for tensors that the map does not cover. None compares only tensors that the map
            covers.
    """
    _put(memory, load, seed)
    left_out = () if load else {entry.tensor for entry in memory.map.uncovered}
    now, compared = checksums(memory.held()), memory.map.places.keys() - left_out
    return [name for name in reference if name in compared and now.get(name) != reference[name]]


def _put(memory: EngineMemory, load: Loader | None, seed: int) -> None:
    memory.find()
    rest = memory.copy(drawn_values(memory.map.sources, seed, memory.device))
    if memory.map.by_loader and load:
        load(rest)
    for _ in rest:
        pass


def _forget(memory: EngineMemory, load: Loader, seed: int) -> None:
    """Overwrite the engine's tensors with other values, except for parts that neither map nor loader writes."""
    if any(tensor.kept for tensor in memory.map.tensors) or memory.map.uncovered:
        _put(memory, load, seed)
        return
    memory.find()
    memory.invert()


# drawn values ---------------------------------------------------------------------------------------------------------


def drawn_values(specs: Sequence[TensorSpec], seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield pairs of a name and a contiguous random tensor in separate memory, as a loader takes them.

    Absolute values of floats are between 1/8 and 2, so that no sum or product hides them. Seed and name determine the
    values.

    Words of 8 bytes are drawn once. Each stretch of a tensor repeats these words from another position on, with other
    bits flipped. This takes no longer than a copy.
    """
    for together in runs_within(specs, lambda spec: spec.num_bytes, _TOGETHER):
        # disable the modes of the loader and the recorder while drawing
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            drawn = deque((spec.name, _drawn(spec, seed, device)) for spec in together)
        while drawn:
            yield drawn.popleft()


def _drawn(spec: TensorSpec, seed: int, device: torch.device) -> Tensor:
    size = _STRETCH if device.type == "cpu" else 64 * _STRETCH  # fits into a CPU's cache; a GPU needs few kernels
    mask, always = _PATTERNS.get(spec.dtype, (_ALL[spec.dtype.itemsize], 0))
    if seed % 2 and mask > _LOW:
        mask, always = mask & ~_LOW, always | _SECOND_LOWEST
    drawn, fixed = (_repeated(bits, spec.dtype.itemsize) for bits in (mask, always))
    numbers = _numbers(device, 2 * size, drawn, fixed)
    words = torch.empty(-(-spec.num_bytes // 8), dtype=torch.int64, device=device)
    mix = Random(f"{seed} {spec.name}")
    for start in range(0, len(words), size):
        stretch, first = words[start : start + size], mix.randrange(size)
        torch.bitwise_xor(numbers[first : first + len(stretch)], (mix.getrandbits(64) + _LOWEST) & drawn, out=stretch)
    return words.view(torch.uint8)[: spec.num_bytes].view(spec.dtype).view(spec.shape)


@cache
def _numbers(device: torch.device, count: int, drawn: int, fixed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    words = torch.empty(count, dtype=torch.int64, device=device).random_(_LOWEST, None, generator=generator)
    return words.bitwise_and_(drawn).bitwise_or_(fixed)


def _repeated(bits: int, itemsize: int) -> int:
    """A signed word of 8 bytes that repeats ``bits``."""
    word = int.from_bytes(bits.to_bytes(itemsize, "little") * (8 // itemsize), "little")
    return word - (word >> 63 << 64)


# checksums ------------------------------------------------------------------------------------------------------------


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A checksum of each tensor, in the order of its dims. It depends on every bit and its position.

    It is computed on the tensor's device, and is equal on every device. It detects mistakes. It is not secure against
    somebody who constructs two tensors with one checksum.
    """
    sums = {
        name: _checksum(tensor.detach()) for name, tensor in tensors.items()
    }  # the device works on all before the first result is read
    return {name: int(total.item()) for name, total in sums.items()}


def _checksum(tensor: Tensor) -> Tensor:
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    words = octets[:whole] if octets.storage_offset() % 8 == 0 else octets[:whole].clone()
    words, pattern = words.view(torch.int64), _pattern(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    num_rows = _ROWS.get(tensor.device.type, 64)
    in_rows = len(words) // _ROW * _ROW
    for start in range(0, in_rows, num_rows * _ROW):
        rows = words[start : min(start + num_rows * _ROW, in_rows)].view(-1, _ROW)
        total += _mixed(rows ^ pattern, start // _ROW)
    rest = words[in_rows:]
    total += _mixed((rest ^ pattern[: len(rest)]).view(1, -1), in_rows // _ROW)
    return total + _mixed((octets[whole:].to(torch.int64) ^ pattern[-8 : octets.numel() - whole - 8]).view(1, -1), -1)


@cache
def _pattern(device: torch.device) -> Tensor:
    """A different number for each position in a row."""
    places = torch.arange(1, _ROW + 1, device=device) * _FIRST
    return (places ^ (places >> 31)) * _SECOND


def _mixed(rows: Tensor, first: int) -> Tensor:
    """The sum of all words, each of them mixed, with another weight for each row. ``rows`` is overwritten."""
    rows.mul_(_SECOND)
    sums = rows.bitwise_xor_(rows >> 32).sum(1)
    weights = torch.arange(first, first + len(sums), device=rows.device) * 2 + 3
    return (sums * weights).sum()
