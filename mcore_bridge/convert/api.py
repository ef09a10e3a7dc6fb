"""``mcore-bridge convert``: HF folders to checkpoints of megatron-core and back, one parameter in memory at a time.

All is planned first, in this process: which parameters go to which file. Files are then written side by side, by any
number of processes, each under its name only when it is whole. Whole files are kept when a conversion is run again, and
the target gets all of them in one step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mcore_bridge import __version__
from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.megatron_release import installed
from mcore_bridge.config.unread import require_no_unread
from mcore_bridge.convert.conversion import Conversion
from mcore_bridge.convert.dist_to_hf import FromDist
from mcore_bridge.convert.hf_to_dist import ToDist
from mcore_bridge.convert.hf_to_torch import RankFiles, ToTorch
from mcore_bridge.convert.rank_files.file import NAME
from mcore_bridge.convert.rank_files.folder import find_rank_files
from mcore_bridge.convert.torch_to_hf import FromTorch
from mcore_bridge.errors import CheckpointError, MeshError
from mcore_bridge.launch.processes import OnEvent, run_ranks
from mcore_bridge.launch.worker import Report
from mcore_bridge.weights.dist_checkpoint.folder import find_checkpoint, track
from mcore_bridge.weights.files.atomic_folder import CONVERSION, Update, commit, target_of, updating
from mcore_bridge.weights.files.file_shards import MAX_SHARD_BYTES, require_positive
from mcore_bridge.weights.files.folder_lock import PREFIX
from mcore_bridge.weights.files.hf_folder import shard_names
from mcore_bridge.weights.files.sidecars import config_folders, first_with_config

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

        def progress(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            report("files", done, total)

        try:
            for number in mine:
                self.conversion.write(number, progress)
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {self.conversion.staging}: {error}; mend that and run the same command again: files "
                "that are whole are kept"
            ) from error


def convert(
    source: Path,
    target: Path,
    *,
    hf: Path | None = None,
    dtype: torch.dtype | None = None,
    num_mtp_layers: int = 0,
    rank_files: RankFiles | None = None,
    num_processes: int = 1,
    num_gpus: int = 0,
    file_bytes: int | None = None,
    strict_config: bool = False,
    on_event: OnEvent,
) -> Converted:
    """Convert a folder: one of HF to one of megatron-core, and the other way round.

    Args:
        source: HF folder, or one in which ``find_checkpoint`` finds a checkpoint of megatron-core.
        target: of which other files stay, if it is there.
        hf: folder of the HF config and tokenizer, where ``source`` has none.
        dtype: what tensors are cast to; by default each keeps its own.
        num_mtp_layers: to take over from a HF folder; of a checkpoint of megatron-core, all are.
        rank_files: of Megatron's ``torch`` format, to write in place of ``torch_dist``.
        num_processes: that write side by side.
        num_gpus: in place of ``num_processes``: one for each, which puts parameters together on its GPU.
        file_bytes: of a file at most, unless one parameter is larger; files of Megatron's ``torch`` format are as large
            as the mesh makes them.
        strict_config: as for ``build_model``.
        on_event: told how many bytes each process has written.

    Raises:
        BridgeError: the source does not fit its config, a process failed, or another run writes the same target. Files
            that are whole by then are kept for the next run, and the target is as it was.
    """
    if file_bytes is not None:
        require_positive(file_bytes=file_bytes)
    target = target_of(target)
    if target == source.resolve():
        raise CheckpointError(f"{target} would be written into itself; name another folder")
    _require_processes(num_processes, num_gpus)
    staging = Update(target, target / f"{PREFIX}{CONVERSION}").new
    if shard_names(source):
        conversion = _from_hf(source, staging, hf or source, rank_files, dtype, num_mtp_layers, file_bytes)
    elif rank_files is not None:
        raise CheckpointError(f"{source} has no *.safetensors: a mesh can be chosen only for what a HF folder becomes")
    else:
        conversion = _to_hf(source, staging, hf, dtype, file_bytes)
    if strict_config:
        hf_config = conversion.model.provenance.hf
        require_no_unread(hf_config, architecture_of(hf_config).fields)
    device = "cuda" if num_gpus else "cpu"
    conversion = dataclasses.replace(conversion, device=device)
    with updating(target, CONVERSION) as update:
        kept = _resume(conversion)
        work = _Work(conversion, tuple(number for number in range(len(conversion.names)) if number not in kept))
        if max(num_processes, num_gpus) == 1 and device == "cpu":
            work.do(0, 1, partial(on_event, 0))
        else:
            run_ranks(_do_share, work, world_size=num_gpus or num_processes, device=device, on_event=on_event)
        conversion.finish()
        commit(update, conversion.replaced(target), conversion.heads)
    if isinstance(conversion, ToDist):
        track(target)
    return Converted(conversion, len(kept))


def _require_processes(processes: int, wanted: int) -> None:
    if processes < 1 or wanted < 0:
        raise MeshError(f"expected one process or more, and no GPUs or some, found {processes} and {wanted}")
    if wanted > (found := torch.cuda.device_count() if wanted else 0):
        raise MeshError(
            f"--gpus {wanted} needs as many GPUs, found {found}; --processes {wanted} writes the same bytes"
        )


def _from_hf(
    source: Path,
    staging: Path,
    hf: Path,
    rank_files: RankFiles | None,
    dtype: torch.dtype | None,
    num_mtp_layers: int,
    file_bytes: int | None,
) -> Conversion:
    if rank_files is None:
        size = file_bytes or DIST_FILE_BYTES
        return ToDist.plan(source, staging, hf, dtype=dtype, num_mtp_layers=num_mtp_layers, file_bytes=size)
    if num_mtp_layers:
        raise CheckpointError("layers of multi-token prediction are written to torch_dist only; leave out --mtp")
    return ToTorch.plan(source, staging, hf, rank_files, dtype=dtype)


def _to_hf(
    source: Path, staging: Path, hf: Path | None, dtype: torch.dtype | None, file_bytes: int | None
) -> Conversion:
    rank_files, size = find_rank_files(source), file_bytes or MAX_SHARD_BYTES
    found = rank_files or find_checkpoint(source)
    conversion = FromTorch if rank_files else FromDist
    return conversion.plan(found, staging, hf or _config_beside(source, found), dtype=dtype, file_bytes=size)


def _do_share(work: _Work, report: Report) -> None:
    import torch.distributed as dist

    work.do(dist.get_rank(), dist.get_world_size(), report)


def _config_beside(source: Path, found: Path) -> Path:
    """Where the HF config of a checkpoint is."""
    places = config_folders(source, found)
    place = first_with_config(places)
    if place is None:
        tried = ", ".join(map(str, places))
        raise CheckpointError(f"no config.json in any of {tried}: pass the folder of the HF config by --hf")
    return place


def _resume(conversion: Conversion) -> frozenset[int]:
    """The files of the same conversion that an earlier run wrote. What any other one left is removed."""
    plan = conversion.staging.with_name(_PLAN)
    own = json.dumps(_identity(conversion))
    if not plan.is_file() or plan.read_text() != own:
        for path in conversion.staging.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        plan.write_text(own)
    there = {str(path.relative_to(conversion.staging)) for path in conversion.staging.rglob("*")}
    return frozenset(number for number, name in enumerate(conversion.names) if name in there)


def _identity(conversion: Conversion) -> object:
    """Equal for conversions that write the same files: the source as it is now, the plan, the config, and releases."""
    found = (*conversion.source.iterdir(), *conversion.source.glob(f"mp_rank_*/{NAME}"))
    files = sorted(path for path in found if path.is_file())
    model = conversion.model
    plan = hashlib.sha256()
    for each in zip(model.entries, model.placed, strict=True):  # shapes alone do not tell heads of other sizes
        plan.update(repr(each).encode())
    sources = [
        [str(path.relative_to(conversion.source)), path.stat().st_size, path.stat().st_mtime_ns] for path in files
    ]
    return [
        conversion.kind,
        str(conversion.source.absolute()),
        sources,
        list(map(list, conversion.units)),
        plan.hexdigest(),
        model.provenance.hf.to_json_string(use_diff=False),
        conversion.asked,
        [__version__, installed()],
    ]
