"""Converts HF folders to checkpoints of megatron-core and back, with one parameter in memory at a time.

First this process plans which parameters go to which file. Then any number of processes write files in parallel, and a
file gets its name only when it is complete. If a conversion runs again, it keeps complete files. At the end all files
go to the target in one step.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mcore_bridge.architecture import architecture_of
from mcore_bridge.arguments import COUNT, accepts_former_names, given_path, require
from mcore_bridge.config.hf import CONFIG, find_folder, read_fields
from mcore_bridge.config.quantization import Quantize
from mcore_bridge.config.unread_fields import require_no_unread
from mcore_bridge.convert.conversion import Conversion, ModelConversion
from mcore_bridge.convert.dist_to_hf import FromDist
from mcore_bridge.convert.hf_merged import ToMerged
from mcore_bridge.convert.hf_to_dist import ToDist
from mcore_bridge.convert.hf_to_encoded import ToEncoded
from mcore_bridge.convert.hf_to_plain import ToPlain
from mcore_bridge.convert.hf_to_torch import RankFiles, ToTorch
from mcore_bridge.convert.rank_files.rank_folder import find_rank_files
from mcore_bridge.convert.resume import resume
from mcore_bridge.convert.torch_to_hf import FromTorch
from mcore_bridge.errors import CheckpointError, ConfigError, MeshError
from mcore_bridge.factory.supports import require_supported
from mcore_bridge.launch.processes import OnEvent, run_ranks
from mcore_bridge.launch.worker import Report
from mcore_bridge.weights.dist_checkpoint.folder import dist_files, find_checkpoint, track
from mcore_bridge.weights.files.atomic_folder import CONVERSION, Update, commit, target_of, updating
from mcore_bridge.weights.files.file_shards import MAX_SHARD_BYTES
from mcore_bridge.weights.files.folder_lock import PREFIX
from mcore_bridge.weights.files.hf_folder import shard_names, weight_files
from mcore_bridge.weights.files.sidecars import NOTES, config_folders, first_with_config
from mcore_bridge.weights.files.sources import SourceFolders
from mcore_bridge.weights.not_built import Mtp
from mcore_bridge.weights.peft.peft_config import CONFIG as ADAPTER_CONFIG
from mcore_bridge.weights.source.encoded_weights import quantization_in
from mcore_bridge.weights.source.weight_format import AS_PUBLISHED

DIST_FILE_BYTES = 512 << 20
"""Size limit of a file of ``torch_dist``: torch keeps the content of a file in memory until the end."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of ``convert``: the conversion, and how many of its files an earlier run had written."""

    conversion: Conversion
    num_kept: int


@dataclass(frozen=True, slots=True)
class _Work:
    """The files that must still be written, by number."""

    conversion: Conversion
    numbers: tuple[int, ...]

    def do(self, rank: int, num_ranks: int, report: Report) -> None:
        """Write the share of one rank."""
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
                f"cannot write to {self.conversion.staging}: {error}; solve this and run the command again, which "
                "keeps complete files"
            ) from error


@accepts_former_names
def convert(
    source: Path,
    target: Path,
    *,
    hf: Path | None = None,
    dtype: torch.dtype | None = None,
    num_mtp_layers: int = 0,
    vision: str = "text_only",
    mtp: Mtp = "copied",
    rank_files: RankFiles | None = None,
    plain: bool = False,
    quantize: Quantize = None,
    num_processes: int = 1,
    num_gpus: int = 0,
    file_bytes: int | None = None,
    strict_config: bool = False,
    on_event: OnEvent,
) -> Converted:
    """Convert an HF folder to a checkpoint of megatron-core, or a checkpoint of megatron-core to an HF folder.

    Encoded weights of an HF folder are decoded.

    Args:
        source: an HF folder, or a folder in which ``find_checkpoint`` finds a checkpoint of megatron-core.
        target: the folder to write to, without a checkpoint of another kind. Other files in it stay. It must differ
            from folders that are read, except folders with only a config and a tokenizer.
        hf: folder of the HF config and tokenizer, if ``source`` has none.
        dtype: cast tensors to this; by default each tensor keeps its dtype.
        num_mtp_layers: MTP layers to convert from an HF folder. From megatron-core all are converted.
        vision: "train" or "frozen" also convert the tower of a composite from an HF folder, "text_only" only its text.
            From megatron-core an existing tower is always converted.
        mtp: the fate of MTP layers that a checkpoint of megatron-core lacks, when an HF folder is written: as for
            ``save_hf_checkpoint``. They come from the folder of the HF config.
        rank_files: write Megatron's ``torch`` format with these settings, and not ``torch_dist``.
        plain: write an HF folder of the source's tensors, with encoded weights (docs/guide/quantized.md) as bf16 or
            ``dtype``, also tensors that a model does not use.
        quantize: the format of the weights of an HF folder, as for ``save_hf_checkpoint``. "as_published" is the format
            of ``hf``. From a folder of plain tensors, it needs ``plain``.
        num_processes: processes that write in parallel.
        num_gpus: use one process for each of these GPUs, instead of ``num_processes``. Parameters are assembled on the
            GPU.
        file_bytes: upper limit on the size of a file, unless one parameter is larger. In Megatron's ``torch`` format,
            the mesh decides the size.
        strict_config: as for ``build_model``.
        on_event: called with the bytes that each process has written.

    Raises:
        BridgeError: the source does not fit its config, or was changed meanwhile, a process failed, or another run
            writes to the same target. The target is then unchanged, and the next run keeps the files that are whole.
    """
    require(CheckpointError, file_bytes=(file_bytes, COUNT.or_none()))
    source, target = given_path(source), target_of(target)
    _require_processes(num_processes, num_gpus)
    _require_config(source if hf is None else given_path(hf), plain)
    checkpoint = source if plain or shard_names(source) else _find(source, rank_files)
    hf = given_path(hf) if hf is not None else source if plain else _config_of(source, checkpoint)
    sources = SourceFolders.of(source, checkpoint, configs=[hf, *_folder_of_format(quantize, hf)])
    sources.require_apart(target)
    staging = Update(target, target / f"{PREFIX}{CONVERSION}").new
    if plain and quantize is not None:
        size = file_bytes or MAX_SHARD_BYTES
        decoded = ToPlain.of_any(source, staging, dtype=dtype, file_bytes=size)
        conversion: Conversion = ToEncoded.of(decoded, quantize)
    elif plain:
        conversion = ToPlain.plan(source, staging, dtype=dtype, file_bytes=file_bytes or MAX_SHARD_BYTES)
    elif shard_names(source) and quantize is not None:
        raise ConfigError(
            "quantize encodes the weights of an HF folder, and a checkpoint of megatron-core has plain ones: pass "
            "--to hf, or leave quantize out"
        )
    elif shard_names(source):
        conversion = _from_hf(source, staging, hf, rank_files, dtype, num_mtp_layers, vision, file_bytes)
    else:
        to_hf = FromTorch if find_rank_files(checkpoint) else FromDist
        size = file_bytes or MAX_SHARD_BYTES
        from_megatron = to_hf.plan(checkpoint, staging, hf, dtype=dtype, file_bytes=size, mtp=mtp)
        conversion = from_megatron if quantize is None else from_megatron.encoded(quantize, dtype)
    if strict_config and isinstance(conversion, ModelConversion):
        hf_config = conversion.model.provenance.hf
        require_no_unread([(hf_config, architecture_of(hf_config).fields)])
    return _run(conversion, sources, target, num_processes, num_gpus, on_event)


def merge(
    base: Path,
    adapter: Path,
    target: Path,
    *,
    quantize: Quantize = None,
    num_processes: int = 1,
    file_bytes: int = MAX_SHARD_BYTES,
    on_event: OnEvent,
) -> Converted:
    """Write an HF folder with the weights of ``base``, into which the adapters of a PEFT folder are merged.

    Sums are in fp64 and rounded once to the dtype of each weight: the bits of an export with ``merged=True``. All other
    tensors and files come from the base. A process holds a piece of a tensor at a time.

    Args:
        base: an HF folder of plain tensors, of a supported family.
        adapter: a folder of ``peft`` or ``save_hf_adapters``.
        target: the folder to write to, without a checkpoint of another kind. Other files in it stay. It must differ
            from both sources.
        quantize: the format of the merged weights, as for ``save_hf_checkpoint``, other than "as_published".
        num_processes: processes that write in parallel.
        file_bytes: upper limit on the size of a file, unless one tensor is larger.
        on_event: called with the bytes that each process has written.

    Raises:
        BridgeError: the adapter does not fit the base, one of the two was changed during the merge, a process failed,
            or another run writes to the same target. The target is then unchanged, and the next run keeps the files
            that are whole.
    """
    require(CheckpointError, file_bytes=(file_bytes, COUNT))
    require_supported(base)
    base, adapter, target = given_path(base), given_path(adapter), target_of(target)
    sources = SourceFolders.of(base, adapter, configs=_folder_of_format(quantize, base))
    sources.require_apart(target)
    _require_processes(num_processes, 0)
    staging = Update(target, target / f"{PREFIX}{CONVERSION}").new
    merged = ToMerged.of(base, adapter, staging, file_bytes=file_bytes)
    conversion = merged if quantize is None else ToEncoded.of(merged, quantize)
    return _run(conversion, sources, target, num_processes, 0, on_event)


def _run(
    conversion: Conversion, sources: SourceFolders, target: Path, num_processes: int, num_gpus: int, on_event: OnEvent
) -> Converted:
    """Write files that an earlier run has not written, and put all files into the target."""
    device = "cuda" if num_gpus else "cpu"
    conversion = dataclasses.replace(conversion, device=device)
    with updating(target, CONVERSION) as update:
        _require_no_other_kind(target, conversion.kind)
        kept = resume(conversion, sources)
        work = _Work(conversion, tuple(number for number in range(len(conversion.names)) if number not in kept))
        if max(num_processes, num_gpus) == 1 and device == "cpu":
            work.do(0, 1, partial(on_event, 0))
        else:
            run_ranks(_do_share, work, world_size=num_gpus or num_processes, device=device, on_event=on_event)
        conversion.finish()
        commit(update, sources, (*conversion.replaced(target), *NOTES), conversion.heads)
    if isinstance(conversion, ToDist):
        track(target)
    return Converted(conversion, len(kept))


def _require_no_other_kind(target: Path, kind: str) -> None:
    """Raise if the target has a checkpoint of another kind: the one ``config.json`` would have to describe both."""
    weights = [name for name in weight_files(target) if (target / name).exists()]
    # transformers would load the base of the adapter in place of these weights
    adapter = (target / ADAPTER_CONFIG).exists()
    there = {"hf": weights, "torch_dist": dist_files(target), "torch": find_rank_files(target), "adapter": adapter}
    if others := [other for other, files in there.items() if files and other != kind]:
        raise CheckpointError(
            f"{target} holds a checkpoint of kind {' and '.join(others)}, whose config.json a checkpoint of kind "
            f"{kind} would replace: name another folder, or remove that checkpoint"
        )


def _require_processes(num_processes: int, num_gpus: int) -> None:
    if num_processes < 1 or num_gpus < 0:
        raise MeshError(
            f"expected processes of at least 1 and GPUs of at least 0, found {num_processes} and {num_gpus}"
        )
    if num_gpus > (visible := torch.cuda.device_count() if num_gpus else 0):
        raise MeshError(
            f"--gpus {num_gpus} needs as many GPUs, found {visible}; --processes {num_gpus} writes the same bytes"
        )


def _require_config(folder: Path, plain: bool) -> None:
    """Raise for a config that cannot be converted, before weights are looked for. Checkpoints may have none."""
    if not plain and os.path.lexists(folder / CONFIG):
        require_supported(folder)
    if plain and folder.is_dir():
        read_fields(folder / CONFIG)
        quantization_in(folder)


def _folder_of_format(quantize: Quantize, hf: Path) -> list[Path]:
    """The folder that shows the format of the target, if one does."""
    if quantize is None or isinstance(quantize, Mapping):
        return []
    folder = hf if quantize == AS_PUBLISHED else find_folder(quantize)
    if not shard_names(folder):
        raise CheckpointError(
            f"quantize={os.fspath(quantize)!r} needs a folder with quantized weights, found none in {folder}: pass the "
            "folder of a release (with --hf for as_published), or a quantization_config"
        )
    return [folder]


def _from_hf(
    source: Path,
    staging: Path,
    hf: Path,
    rank_files: RankFiles | None,
    dtype: torch.dtype | None,
    num_mtp_layers: int,
    vision: str,
    file_bytes: int | None,
) -> Conversion:
    if rank_files is None:
        return ToDist.plan(
            source,
            staging,
            hf,
            dtype=dtype,
            num_mtp_layers=num_mtp_layers,
            vision=vision,
            file_bytes=file_bytes or DIST_FILE_BYTES,
        )
    if num_mtp_layers:
        raise CheckpointError("only torch_dist can have layers of multi-token prediction; leave out --mtp")
    if vision != "text_only":
        raise CheckpointError(f"only torch_dist can have a tower, found vision={vision!r}; leave out --vision")
    return ToTorch.plan(source, staging, hf, rank_files, dtype=dtype)


def _do_share(work: _Work, report: Report) -> None:
    import torch.distributed as dist

    work.do(dist.get_rank(), dist.get_world_size(), report)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a checkpoint of megatron-core, and no HF weights."""
    try:
        return not shard_names(folder) and bool(_find(folder, None))
    except CheckpointError:
        return False


def _find(source: Path, rank_files: RankFiles | None) -> Path:
    """The folder of a checkpoint of megatron-core: ``source`` itself, or a folder that is found from it."""
    if rank_files is not None:
        raise CheckpointError(f"{source} has no *.safetensors: a mesh and --to torch need an HF folder as source")
    return find_rank_files(source) or find_checkpoint(source)


def _config_of(source: Path, checkpoint: Path) -> Path:
    """The folder with the HF config of a checkpoint."""
    if shard_names(source):
        return source
    folders = config_folders(source, checkpoint)
    folder = first_with_config(folders)
    if folder is None:
        tried = ", ".join(map(str, folders))
        raise CheckpointError(f"no config.json in any of {tried}: pass the folder of the HF config with --hf")
    return folder
