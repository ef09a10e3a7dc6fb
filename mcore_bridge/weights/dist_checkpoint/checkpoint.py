"""Checkpoints of models and optimizers in megatron-core's format: written at one mesh, read at any mesh.

megatron-core's ``dist_checkpointing`` writes and reads. It silently accepts some faults, which are checked before:
missing keys, other names of keys, other shapes, and values that parameters cannot hold.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mcore_bridge.arguments import COUNT, FLAG, MAPPING, require
from mcore_bridge.errors import CheckpointError, describe, plural
from mcore_bridge.rules.dtypes import DtypeLike, as_dtype, has_overflown, warn_of_overflow
from mcore_bridge.weights.bound import provenance_on
from mcore_bridge.weights.dist_checkpoint.adapter_shards import (
    ADAPTERS,
    Part,
    description,
    is_in,
    require_part,
    require_same,
)
from mcore_bridge.weights.dist_checkpoint.common import require_equal
from mcore_bridge.weights.dist_checkpoint.compare import Check, chunk_names, dtypes_of, leaves_of, sharded_states
from mcore_bridge.weights.dist_checkpoint.extra_state import with_extra_states
from mcore_bridge.weights.dist_checkpoint.fit_state import Buffered, fit_chain, respell, stack_layers
from mcore_bridge.weights.dist_checkpoint.folder import CONTENT, HEADS, VERSION, TorchDistFolder, dist_files, track
from mcore_bridge.weights.dist_checkpoint.metadata import without_code
from mcore_bridge.weights.files.atomic_folder import Update, commit, require_files, target_of, updating_by_all
from mcore_bridge.weights.files.background import HostCopies, PendingSave, copy_all, settle
from mcore_bridge.weights.files.hf_folder import shard_names
from mcore_bridge.weights.files.sidecars import NOTES, copy_companions
from mcore_bridge.weights.files.sources import SourceFolders
from mcore_bridge.weights.model_chunks import Models, adapters_in_use, all_chunks_of, whole_config
from mcore_bridge.weights.model_tensors import held_tensors, require_as_built, shapes_of
from mcore_bridge.weights.own_folder import is_source, note_source, require_held
from mcore_bridge.weights.param_sync import gather_pending, require_gatherable
from mcore_bridge.weights.provenance import HF, config_in, identity, write_config
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.endpoints import check_storage
from mcore_bridge.weights.transfer.failures import raise_on_all, require_alike

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_OURS = "mcore_bridge_common"


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The result of ``load_checkpoint``.

    Attributes:
        folder: the checkpoint that was read, such as the iteration that a tracker file names.
        common: the saved ``common``. In a checkpoint of another writer, everything that is in no tensor (``iteration``,
            ``args``, ...).
        cast: keys whose dtype was changed, with the change as ``"float32 -> bfloat16"``.
        missing: keys that the folder lacks, an error without ``strict=False``.
        unexpected: keys of the folder that no rank needs, an error without ``strict=False``.

    Example:
        >>> mb.save_checkpoint(models, "run/iter_0000100")
        >>> mb.load_checkpoint(models, "run").missing
        ()
    """

    folder: Path
    common: Mapping[str, Any]
    cast: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def save_checkpoint(
    models: Models,
    folder: str | os.PathLike[str],
    *,
    optimizer: Any = None,
    common: Mapping[str, Any] | None = None,
    hf: HF | None = None,
    head: str = "lm",
    part: Part = "everything",
    wait: bool = True,
    host_bytes: int | None = None,
) -> PendingSave[None] | None:
    """Write a checkpoint of megatron-core (``torch_dist``), with the HF config and tokenizer files beside it.

    All ranks of the job call it together, with a ``folder`` on a file system that they share. Its files change in one
    step, as with ``save_hf_checkpoint``. ``folder`` may be the folder that was loaded, unless a tensor there would lose
    bits by a cast. If it has Megatron-LM's name for an iteration, it becomes the latest iteration.

    Args:
        models: this rank's chunks, wrapped or not.
        folder: created if it does not exist.
        optimizer: megatron-core's optimizer, to write its state as well, so that any mesh can continue from it.
        common: other values that a trainer needs to continue (iteration, scheduler), equal on every rank and picklable.
            Its ``iteration`` is also written to the place from which Megatron-LM reads it.
        hf, head: deprecated; call ``adopt`` once for models that ``build_model`` did not make.
        part: for models with adapters, "base" or "adapters" writes only these tensors.
        wait: False returns as soon as this rank has copied what it writes, and training may go on. A thread writes the
            files, and then all files appear in one step.
        host_bytes: how many bytes of copies a rank may hold with ``wait=False``. It then copies further tensors when
            others are written, so the call takes longer. None: everything that the rank writes.

    Returns:
        With ``wait=False`` a handle; its ``wait()`` ends when the folder is complete.

    Raises:
        CheckpointError: on every rank, when any rank cannot write, ranks pass different arguments, or another job
            writes to this folder. The folder is then unchanged. With ``wait=False``, errors of the thread are raised by
            ``wait()``, or else by the next save.

    Example:
        >>> mb.save_checkpoint(models, "run/iter_0000100", common={"iteration": 100})
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    from mcore_bridge.weights.dist_checkpoint.dist_writer import InThisProcess

    world = Group(None)
    with raise_on_all(world, "nothing was written"):
        settle()
        require(CheckpointError, wait=(wait, FLAG), host_bytes=(host_bytes, COUNT.or_none()))
        target, chunks, provenance = target_of(folder), all_chunks_of(models), provenance_on(models, hf, head)
        _require_ready(chunks, part, optimizer)
        require_as_built(chunks, shapes_of(held_tensors(chunks)))
        require(CheckpointError, common=(common, MAPPING.or_none()))
        pickle.dumps(common)  # only one rank would fail to write it
    named = {"hf": identity(provenance), "head": head, "part": part, "optimizer": type(optimizer), "wait": wait}
    adapters = None if part == "base" else adapters_in_use(chunks)
    require_alike(world, {**named, "adapters": adapters, "common": sorted(common or ())})
    require_equal(world, common or {})
    together = partial(raise_on_all, world, f"{target} was not changed")
    with ExitStack() as opened:
        update = opened.enter_context(updating_by_all(world, target))
        with together():
            require_gatherable(models, Group.of_replica(chunks[0].pg_collection))
        gather_pending(models)
        with together():  # in a separate block, because the next steps communicate by themselves
            metadata = {**CONTENT, "dp_cp_group": chunks[0].pg_collection.dp_cp}
            state = sharded_states(chunks, metadata, part)
            if part == "adapters":
                respell(state, chunks[0], hybrid=False)
            if is_source(models, target) and dist_files(target):
                require_held(target, *dtypes_of(TorchDistFolder.open(target), state))
            content: dict[str, Any] = {name: with_extra_states(of_chunk) for name, of_chunk in state.items()}
            if optimizer is not None:
                content["optimizer"] = _state_of(optimizer, _parts(state), metadata)
            content |= {_OURS: dict(common or {}), **VERSION}
            content |= {key: value for key, value in (common or {}).items() if key == "iteration"}
            if part != "base" and hasattr(chunks[0], "bridge_adapters"):
                content[ADAPTERS] = description(chunks[0].bridge_adapters)
        tied = chunks[0].share_embeddings_and_output_weights
        finishing = _Finishing(update, provenance.folder, config_in(provenance, _dtype_of(chunks), tied=tied))
        with together():
            strategy = FullyParallelSaveStrategyWrapper(InThisProcess(), metadata["dp_cp_group"])
            options: dict[str, Any] = {"content_metadata": dict(CONTENT), "async_sharded_save": not wait}
            request = dist_checkpointing.save(content, str(update.new), strategy, **options)
        if request is None:
            finishing.commit(world)
            return None
        copies = HostCopies(host_bytes)
        work = partial(finishing.write_and_commit, request, copies)
        pending = PendingSave(target, None, copies, work, opened)
    return copy_all(pending, world, request.preload_fn())


@dataclass(frozen=True, slots=True)
class _Finishing:
    """The end of a save: everything beside the tensors, and the commit."""

    update: Update
    source: HF | None
    config: Any

    def commit(self, world: Group) -> None:
        """Write the HF files, and commit. All ranks call it together, when all tensors are written."""
        target, new = self.update.target, self.update.new
        with raise_on_all(world, f"{target} was not changed"):
            if world.rank == 0:
                require_files(new, TorchDistFolder.open(new).files)
                write_config(self.config, new)
                copy_companions(self.source, new)
                notes = () if shard_names(target) else NOTES  # files of HF weights that stay
                commit(self.update, SourceFolders(), (*dist_files(target), *notes), HEADS)
        with raise_on_all(world, f"{target} was written"):
            if world.rank == 0:
                track(target)

    def write_and_commit(self, request: Any, copies: HostCopies, world: Group) -> None:
        """Run a request of megatron-core, and commit.

        Its last function waits for all ranks over the group of training, so we do instead what it does before.
        """
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        together = partial(raise_on_all, world, f"{self.update.target} was not changed")
        with together():
            request.async_fn(copies.taken())
        with together():
            request.finalize_fns[0](world)
            if world.rank == 0:
                save_config(CheckpointingConfig("torch_dist", 1), str(self.update.new))
        self.commit(world)


def load_checkpoint(
    models: Models,
    folder: str | os.PathLike[str],
    *,
    optimizer: Any = None,
    hf: HF | None = None,
    head: str = "lm",
    dtype: DtypeLike | None = None,
    strict: bool = True,
    part: Part = "everything",
) -> CheckpointReport:
    """Read a checkpoint of megatron-core (``torch_dist``) that was written at any mesh, by us or by other trainers.

    All ranks of the job call it together. It ignores other contents of a training checkpoint. A ``GPTModel`` can read a
    checkpoint of a ``HybridModel``, and the other way round.

    Args:
        models: this rank's chunks, wrapped or not.
        folder: the checkpoint; or a folder with ``latest_checkpointed_iteration.txt``, or with a ``dist_ckpt``.
        optimizer: megatron-core's optimizer, to read its state as well.
        hf, head: deprecated; call ``adopt`` once for models that ``build_model`` did not make.
        dtype: cast tensors to this first, if a parameter cannot hold all values of the folder. By default such a
            parameter is an error.
        strict: whether missing and unexpected tensors of the model raise; otherwise they are reported.
        part: "base" or "adapters" reads only these tensors; the folder and the models may have others.

    Returns:
        The folder that was read, the saved ``common``, and what was cast, missing or unexpected. It is equal on
        all ranks.

    Raises:
        CheckpointError: on every rank. It names tensors that are missing, unexpected, of another shape, or would lose
            bits, or differences of adapters; the models are then unchanged. Or it names a file that cannot be read.

    Example:
        >>> mb.save_checkpoint(models, "run/iter_0000100", common={"iteration": 100})
        >>> mb.load_checkpoint(models, "run").common["iteration"]     # at this mesh, or at another
        100
    """
    from megatron.core import dist_checkpointing

    world = Group(None)
    with raise_on_all(world, f"{folder} was not read, and the models were not changed"):
        require(CheckpointError, strict=(strict, FLAG))
        chunks, provenance = all_chunks_of(models), provenance_on(models, hf, head)
        _require_ready(chunks, part, optimizer)
        checkpoint = TorchDistFolder.open(folder)
        sources = SourceFolders.of(checkpoint.path)  # the folder is read several times
        with _reading_common(checkpoint.path):
            written = dist_checkpointing.load_content_metadata(str(checkpoint.path))
        numbered = {"non_homogeneous_layers": True, "dp_cp_group": chunks[0].pg_collection.dp_cp}
        metadata = {**checkpoint.spelling, **(written or {}), **numbered}
        state = sharded_states(chunks, metadata, part)
        respell(state, chunks[0], hybrid=checkpoint.is_hybrid)
        if part != "base" and hasattr(chunks[0], "bridge_adapters"):
            with _reading_common(checkpoint.path):
                common = dist_checkpointing.load_common_state_dict(str(checkpoint.path))
            require_same(common.get(ADAPTERS), chunks[0].bridge_adapters)
        if checkpoint.is_stacked:
            for of_chunk in state.values():
                stack_layers(of_chunk, whole_config(chunks[0]).num_layers)
        check = Check(checkpoint, provenance.hf.vocab_size, as_dtype(dtype), part)
        check.compare(state)
    _require_one(world.all_gather_object(os.path.relpath(checkpoint.path, folder)), folder)
    given: dict[str, object] = {"dtype": as_dtype(dtype), "strict": strict, "part": part, "head": provenance.head}
    given |= {"folder": checkpoint.content, "hf": identity(provenance), "optimizer": type(optimizer)}
    require_alike(world, given)
    with raise_on_all(world, f"{checkpoint.path} was not read, and the models were not changed"):
        missing, unexpected = check.agree(Group.of_replica(chunks[0].pg_collection), strict=strict)
        of_optimizer: dict[str, Any] = {}
        if optimizer is not None:
            of_optimizer["optimizer"] = optimizer.sharded_state_dict(_parts(state), is_loading=True, metadata=metadata)
            _require_states(of_optimizer, checkpoint)
        buffered = Buffered(state)
    with raise_on_all(world, f"{checkpoint.path} was not read, or in part"), checkpoint.reading():
        loaded = dist_checkpointing.load(state | of_optimizer, str(checkpoint.path))
        sources.require_unchanged()
    buffered.quantize(loaded, has_masters=optimizer is not None)
    for name, chunk in zip(chunk_names(chunks), chunks, strict=True):
        chunk.load_state_dict(loaded.pop(name, {}), strict=False)  # megatron-core drops the name of an empty stage
    if optimizer is not None:
        length = len(getattr(optimizer, "chained_optimizers", [optimizer]))
        optimizer.load_state_dict(fit_chain(loaded.pop("optimizer"), length))
    note_source(chunks, checkpoint.path)
    if check.cast:
        warn_of_overflow([name for name, tensor in held_tensors(chunks).items() if has_overflown(tensor)])
    return CheckpointReport(checkpoint.path, loaded.get(_OURS, loaded), check.cast, missing, unexpected)


@contextmanager
def _reading_common(path: Path) -> Iterator[None]:
    """Name the file of common entries if it cannot be read. megatron-core's errors do not."""
    try:
        with without_code():
            yield
    except Exception as error:
        raise CheckpointError(
            f"{path} has no readable common.pt ({describe(error):.300}); copy the folder again"
        ) from None


def _require_ready(chunks: Sequence[GPTModel], part: Part, optimizer: object) -> None:
    """Raise if the models lack this part, or if ``optimizer`` is torch's, or may have the state of other parameters."""
    require_part(part, chunks[0])
    held = held_tensors(chunks)
    check_storage({name: tensor for name, tensor in held.items() if is_in(part, name)})
    if optimizer is None:
        return
    if not hasattr(optimizer, "sharded_state_dict"):
        raise CheckpointError(
            f"optimizer must be megatron-core's, of get_megatron_optimizer, found {type(optimizer).__name__}: leave "
            "it out, and let each rank save its state_dict()"
        )
    names = (name for name, tensor in held.items() if tensor.requires_grad and not is_in(part, name))
    if name := next(names, None):
        raise CheckpointError(
            f"an optimizer has the state of all parameters that are trained, of which {name} is not in part={part!r}: "
            'leave optimizer out, freeze the parameter, or use part="everything"'
        )


def _state_of(optimizer: Any, parts: dict[str, Any], metadata: dict[str, Any]) -> Any:
    """The state of an optimizer, to be written."""
    try:
        return optimizer.sharded_state_dict(parts, metadata=metadata)
    except KeyError as error:  # megatron-core's distributed optimizer, whose states a first step makes
        raise CheckpointError(
            f"expected an optimizer with states, found none under {error}, as before the first step: save after a "
            "step, or leave optimizer out"
        ) from error


def _require_states(of_optimizer: dict[str, Any], checkpoint: TorchDistFolder) -> None:
    """Raise if a checkpoint lacks states of an optimizer: its run has trained fewer parameters."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    states = (own for own in nested_values(of_optimizer) if isinstance(own, ShardedTensor | ShardedTensorFactory))
    keys = {leaf.key for own in states for leaf in leaves_of(own)}
    if absent := sorted(keys - checkpoint.metadata.state_dict_metadata.keys()):
        raise CheckpointError(
            f"the checkpoint lacks {plural(len(absent), 'state')} of this optimizer, such as {absent[0]}. Its run had "
            "none, or had frozen more: freeze what it had frozen before you make the optimizer, or leave optimizer out"
        )


def _require_one(paths: Sequence[str], folder: str | os.PathLike[str]) -> None:
    """Raise if ranks found different checkpoints: each rank searches itself, while a trainer may write the next one."""
    if len({*paths}) > 1:
        raise CheckpointError(
            f"ranks found different checkpoints in {folder}: {sorted({*paths})}; load again, or name one of them"
        )


def _parts(state: dict[str, Any]) -> dict[str, Any]:
    """The state of the model in the form for optimizers: of the only chunk, or of all chunks by name."""
    return next(iter(state.values())) if len(state) == 1 else state


def _dtype_of(chunks: Sequence[GPTModel]) -> torch.dtype:
    """The dtype of the largest parameter."""
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    return max(parameters, key=lambda parameter: parameter.nbytes).dtype
