"""mcore to an engine's own memory: the shards of all ranks become its tensors, by its map, and no HF tensor is made."""

from __future__ import annotations

import torch

from mcore_bridge.rules.mapping import Dialect
from mcore_bridge.weights.agreement import Options, open_export
from mcore_bridge.weights.bound import Models
from mcore_bridge.weights.engine_program import EngineOutputs, EngineProgram
from mcore_bridge.weights.ipc.direct_writer import DirectWriter
from mcore_bridge.weights.plan.map_slices import MapSlices
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.executor import Ends, run_messages
from mcore_bridge.weights.transfer.program import Program


def export_into(
    models: Models,
    writer: DirectWriter,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dialect: Dialect | None = None,
    bucket_bytes: int | None = None,
    merged: bool | None = None,
) -> None:
    """Write the weights of a model into an engine's memory. When this returns, the device has done so.

    It is an export with the engine's map as this rank's target, so all ranks of the replica take part. Those without an
    engine run ``iter_hf_weights(models, target="nothing")`` to its end. Only what the engine's rank uses travels.

    The engine announces a round with ``MappedEngine.share`` and ends it with ``MappedEngine.complete``. An HF tensor is
    made only where the map casts it.

    Args:
        models, hf, head, dialect, bucket_bytes, merged: as for ``iter_hf_weights``.
        writer: the memory of the engine's rank, which this process has opened.

    Raises:
        ExportError, MappingError, TargetError: as ``iter_hf_weights``. The engine's weights may then be half old and
            half new.

    Example:
        >>> writer = DirectWriter(engine_map, handles)  # doctest: +SKIP
        >>> export_into(models, writer)  # doctest: +SKIP
    """
    options: Options = {"dialect": dialect, "bucket_bytes": bucket_bytes, "target": writer.map, "merged": merged}
    export = open_export(models, hf, head, **options)

    def into(program: Program, device: torch.device) -> Ends:
        kept = writer.program
        if not isinstance(kept, EngineProgram) or kept.of is not program:
            kept = EngineProgram(program, MapSlices(writer.map).narrowed(program.plan.tensors()))
            writer.program = kept
        return kept, EngineOutputs(kept, writer.memory, device)

    bound = export.bound
    for pairs in run_messages(export.program, export.group, bound.tensors, merges=bound.merges, into=into):
        for _ in pairs:
            pass
    writer.finish()
