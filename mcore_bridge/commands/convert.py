"""``mcore-bridge convert``: HF folders to checkpoints of megatron-core and back, one parameter in memory at a time.

All is planned first, in this process: which parameters go to which file. Files are then written side by side, by any
number of processes, each under its name only when it is whole. Whole files are kept when a conversion is run again, and
the folder takes its name when all are there.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mcore_bridge.commands.conversion import Conversion
from mcore_bridge.commands.processes import OnEvent, run_ranks
from mcore_bridge.commands.serving import Report
from mcore_bridge.commands.to_dist import ToDist
from mcore_bridge.commands.to_hf import ToHF
from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.shards import MAX_SHARD_BYTES
from mcore_bridge.weights.swap import beside, replace
from mcore_bridge.weights.torch_dist import find_checkpoint, track
from mcore_bridge.weights.torch_dist_files import NOTES

DIST_FILE_BYTES = 512 << 20
"""torch keeps what it has written of a file until all of it is."""
_PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written, and how many of its files by an earlier run."""

    conversion: Conversion
    num_kept: int


@dataclass(frozen=True, slots=True)
class _Work:
    """The files that are left to write."""

    conversion: Conversion
    numbers: tuple[int, ...]

    def do(self, rank: int, num_ranks: int, report: Report) -> None:
        """Write one rank's share of them."""
        mine, sizes = self.numbers[rank::num_ranks], self.conversion.sizes
        done, total = 0, sum(sizes[number] for number in mine)
        for number in mine:
            self.conversion.write(number)
            done += sizes[number]
            report("files", done, total)


def convert(
    source: Path,
    target: Path,
    *,
    hf: Path | None = None,
    dtype: torch.dtype | None = None,
    num_mtp_layers: int = 0,
    num_processes: int = 1,
    file_bytes: int | None = None,
    on_event: OnEvent,
) -> Converted:
    """Convert a folder: one of HF to one of megatron-core, and the other way round.

    Args:
        source: HF folder, or one in which ``find_checkpoint`` finds a checkpoint of megatron-core.
        target: of which other files stay, if it is there.
        hf: folder of the HF config and tokenizer, where ``source`` has none.
        dtype: what tensors are cast to; by default each keeps its own.
        num_mtp_layers: to take over from a HF folder; of a checkpoint of megatron-core, all are.
        num_processes: that write side by side.
        file_bytes: of a file at most, unless one parameter is larger.
        on_event: told how many bytes each process has written.

    Raises:
        BridgeError: the source does not fit its config, or a process failed. Files that are whole by then are kept for
            the next run, and the target is as it was.
    """
    target = target.absolute()
    if target.resolve() == source.resolve():
        raise CheckpointError(f"{target} would be written into itself; name another folder")
    staging = beside(target, "convert")
    if any(source.glob("*.safetensors")):
        size = file_bytes or DIST_FILE_BYTES
        conversion: Conversion = ToDist.plan(
            source, staging, hf or source, dtype=dtype, num_mtp_layers=num_mtp_layers, file_bytes=size
        )
    else:
        found = find_checkpoint(source)
        config = hf or _config_beside(source, found)
        conversion = ToHF.plan(found, staging, config, dtype=dtype, file_bytes=file_bytes or MAX_SHARD_BYTES)
    kept = _resume(conversion)
    work = _Work(conversion, tuple(number for number in range(len(conversion.names)) if number not in kept))
    if num_processes == 1:
        work.do(0, 1, partial(on_event, 0))
    else:
        run_ranks(_do_share, work, world_size=num_processes, device="cpu", on_event=on_event)
    conversion.finish()
    (staging / _PLAN).unlink()  # from here on, a new run would begin anew
    for path in staging.glob(f"*{NOTES}"):
        path.unlink()
    replace(target, staging, conversion.dropped)
    if isinstance(conversion, ToDist):
        track(target)
    return Converted(conversion, len(kept))


def _do_share(work: _Work, report: Report) -> None:
    import torch.distributed as dist

    work.do(dist.get_rank(), dist.get_world_size(), report)


def _config_beside(source: Path, found: Path) -> Path:
    """Where the HF config of a checkpoint is: in it, or where verl writes it."""
    places = [found, source, source / "huggingface", found.parent / "huggingface"]
    for place in places:
        if (place / "config.json").is_file():
            return place
    tried = ", ".join(map(str, dict.fromkeys(places)))
    raise CheckpointError(f"no config.json in any of {tried}: pass the folder of the HF config by --hf")


def _resume(conversion: Conversion) -> frozenset[int]:
    """The files of the same conversion that an earlier run wrote. What any other one left is removed."""
    plan = conversion.staging / _PLAN
    own = json.dumps(_identity(conversion))
    if not plan.is_file() or plan.read_text() != own:
        shutil.rmtree(conversion.staging, ignore_errors=True)
        conversion.staging.mkdir(parents=True)
        plan.write_text(own)
    there = {path.name for path in conversion.staging.iterdir()}
    return frozenset(number for number, name in enumerate(conversion.names) if name in there)


def _identity(conversion: Conversion) -> object:
    """Equal for conversions that write the same files: the source as it is now, and the plan."""
    files = sorted(path for path in conversion.source.iterdir() if path.is_file())
    held = [
        [each.places[0].key if each.places else "", str(entry.held), list(entry.hf)]
        for entry, each in zip(conversion.model.entries, conversion.model.placed, strict=True)
    ]
    sources = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return [conversion.kind, str(conversion.source.absolute()), sources, list(map(list, conversion.units)), held]
