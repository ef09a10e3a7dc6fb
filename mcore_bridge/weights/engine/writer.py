"""The sender's side without a ring: the memory of an engine's process, opened here, and written by the engine's map.

The shards of all ranks become the engine's tensors, and no HF tensor is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from mcore_bridge.arguments import COUNT, accepts_former_names, instance_of, list_of, problem_of, require
from mcore_bridge.config.quantization import Quantize
from mcore_bridge.errors import TransferError, plural
from mcore_bridge.machine import uncollected
from mcore_bridge.rules.mapping import ExpertFormat
from mcore_bridge.rules.spec import Pair, runs_within
from mcore_bridge.weights.agreement import Export, Look, Options, open_plain, unless, with_codes
from mcore_bridge.weights.engine.across_ranks import AcrossRanks, MoreHandles
from mcore_bridge.weights.engine.composed import LastRound, MapWriter, MemoryWriter
from mcore_bridge.weights.engine.group_copies import MapCopies, take_expected
from mcore_bridge.weights.ipc.shared_memory import Handle, open_all
from mcore_bridge.weights.model_chunks import Models
from mcore_bridge.weights.param_sync import is_pending
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.copier import Buffers
from mcore_bridge.weights.transfer.endpoints import Sources
from mcore_bridge.weights.transfer.executor import Ends, exhaust, new_tensors, run_messages

GROUP_BYTES = 1 << 30
"""Bytes of HF tensors that one kernel copies. They are kept in memory until then."""


class EngineWriter(MemoryWriter):
    """Writes into the memory of one rank of an engine on the same machine. It works for any number of rounds.

    The engine's GPU may differ from the current device, which then writes over the link between the two.

    The engine announces a round with ``MappedEngine.share`` and ends it with ``MappedEngine.complete``. Between these
    calls the engine must not compute. ``export_into`` writes shards of megatron-core, ``write`` HF tensors.

    Args:
        engine_map: the engine's map.
        handles: the result of ``share``. If ``share`` returns new handles later, make another writer from them.
        group_bytes: bytes of HF tensors that are copied at once.

    Raises:
        TransferError: when the handles belong to another map, or this process cannot open their memory.

    Example:
        >>> head = torch.nn.Linear(48, 96, bias=False)                # an engine, and its loader
        >>> head.weight.data = torch.from_file("head", shared=True, size=96 * 48).view(96, 48)  # a GPU needs no file
        >>> load_weights = lambda pairs: head.weight.data.copy_(dict(pairs)["lm_head.weight"])
        >>> engine = engines.map_engine(mb.manifest(models), head, load_weights)
        >>> writer = engines.EngineWriter(engine.map, engine.share())      # in the trainer's process
        >>> writer.write(mb.iter_hf_weights(models))
        >>> engine.complete()                                         # in the engine's process
        >>> torch.equal(head.weight, mb.to_hf_state_dict(models)["lm_head.weight"])
        True
    """

    def __init__(self, engine_map: EngineMap, handles: Sequence[Handle], *, group_bytes: int = GROUP_BYTES) -> None:
        require(
            TransferError,
            engine_map=(engine_map, instance_of("an EngineMap", EngineMap, advice="pass the map of a MappedEngine")),
            handles=(
                handles,
                list_of("what MappedEngine.share returned", Handle, advice="call share() there, and send the result"),
            ),
            group_bytes=(group_bytes, COUNT),
        )
        if len(handles) != 1 + len(engine_map.tensors):
            raise TransferError(
                f"expected a handle for a mark and for each of the map's {len(engine_map.tensors)} tensors, found "
                f"{len(handles)}; pass the map and the handles of one engine"
            )
        super().__init__(engine_map)
        self._group_bytes = group_bytes
        other = (
            "expected handles of an engine with this map, found handles of another map: pass the handles of this engine"
        )
        self._mark, *tensors = open_all(handles, engine_map.digest, other)
        self.memory = Buffers(tensors)
        self._copies = MapCopies(engine_map)

    def write(self, pairs: Iterable[Pair]) -> None:
        """Write all HF tensors, as ``iter_hf_weights`` yields them. When this returns, the GPU has written them.

        Raises:
            TransferError: when a tensor of the map has not come, or came with another shape or dtype. The engine's
                weights are then half old and half new.
        """
        expected = {spec.name: spec for spec in self.map.sources}
        contiguous = ((name, tensor.contiguous()) for name, tensor in pairs)
        for group in runs_within(contiguous, lambda pair: pair[1].nbytes, self._group_bytes):
            take_expected(group, expected)
            self._copies.run(group, self.memory)
        if expected:
            raise TransferError(f"{plural(len(expected), 'tensor')} never came, such as {next(iter(expected))}")
        self.complete()

    def complete(self) -> None:
        """Wait until everything is written, then set the mark, by which the engine detects writes to old addresses."""
        self._mark.view(torch.int64).add_(1)
        if self._mark.is_cuda:
            torch.cuda.current_stream(self._mark.device).synchronize()

    def close(self) -> None:
        """Close the engine's memory."""
        super().close()
        self.memory, self._mark = Buffers([]), torch.zeros(8, dtype=torch.uint8)
        self._copies = MapCopies(self.map)


_WRITER = instance_of("an EngineWriter", MapWriter, advice="make one by EngineWriter(...)")


@accepts_former_names
def export_into(
    models: Models,
    writer: MapWriter,
    *,
    hf: HF | None = None,
    head: str = "lm",
    expert_format: ExpertFormat | None = None,
    bucket_bytes: int | None = None,
    merged: bool | None = None,
    quantize: Quantize = None,
) -> None:
    """Write the weights of a model into an engine's memory. When this returns, the device has written them.

    This is an export with the engine's map as this rank's target, so all ranks of the replica take part. Ranks without
    an engine run ``iter_hf_weights(models, target="nothing")`` to its end. Only what the engine's rank uses travels.

    The engine announces a round with ``MappedEngine.share`` and ends it with ``MappedEngine.complete``. An HF tensor is
    made only if the map casts it.

    Args:
        models, hf, head, expert_format, bucket_bytes, merged, quantize: as for ``iter_hf_weights``.
        writer: the memory of the engine's rank, which this process has opened.

    Raises:
        ExportError, MappingError, TargetError: as ``iter_hf_weights``. The engine's weights may then be half old and
            half new.

    Example:
        >>> head = torch.nn.Linear(48, 96, bias=False)                # an engine, and its loader
        >>> head.weight.data = torch.from_file("head", shared=True, size=96 * 48).view(96, 48)  # a GPU needs no file
        >>> load_weights = lambda pairs: head.weight.data.copy_(dict(pairs)["lm_head.weight"])
        >>> engine = engines.map_engine(mb.manifest(models), head, load_weights)
        >>> writer = engines.EngineWriter(engine.map, engine.share())      # in the trainer's process
        >>> engines.export_into(models, writer)
        >>> engine.complete()                                         # in the engine's process
        >>> torch.equal(head.weight, mb.to_hf_state_dict(models)["lm_head.weight"])
        True
    """
    target = unless(problem_of(writer=(writer, _WRITER)), getattr(writer, "map", "nothing"))
    options: Options = {
        "expert_format": expert_format,
        "bucket_bytes": bucket_bytes,
        "target": target,
        "merged": merged,
        "quantize": quantize,
    }
    prepared = partial(open_plain, models, hf, head, **options)
    write_export(models, prepared, lambda: writer, last=getattr(writer, "last", None))


@uncollected()
def write_export(
    models: Models,
    prepared: Callable[[Look | None], Export],
    opened: Callable[[], MapWriter] | None = None,
    *,
    last: LastRound | None = None,
    across: AcrossRanks | None = None,
    more_handles: MoreHandles | None = None,
) -> None:
    """Run an export whose target on this rank is the map of a writer.

    If no parameter is pending, the copies of the last round run again while this rank prepares the export. They count
    only if the export then has the same plan and the same addresses.

    Args:
        models: this rank's chunks.
        prepared: ``open_plain``, together with all ranks of the group.
        opened: the writer, once the engine lets it write. It is called after the ranks have agreed on a plan, or before
            copies run again. If it raises, the export goes on without a writer for the sake of other ranks. None: this
            rank only sends.
        last: the last round of this writer, for a rank alone.
        across: copies of all ranks into the memory of all workers. Then every rank of the replica passes it.
        more_handles: as for ``AcrossRanks.run``.

    Raises:
        TransferError: what ``opened`` has raised.
        ExportError: as ``export_into``.
    """
    writer: MapWriter | None = None
    problem: TransferError | None = None

    def reached() -> MapWriter | None:
        nonlocal writer, problem
        if opened is not None and writer is None and problem is None:
            try:
                writer = opened()
            except TransferError as error:
                problem = error
        return writer

    def begin(sources: Sources, device: torch.device) -> Ends:
        into = reached()
        return new_tensors(sources, device) if into is None else into.begin(sources, device)

    def let_go() -> None:
        if writer is not None:
            writer.let_go()

    repeated: Buffers | None = None
    is_done = False
    with ExitStack() as on_failure:  # the engine's memory is closed then, so nothing may write to it any longer
        on_failure.callback(let_go)
        if across is not None:
            on_failure.callback(across.give_up)
            across.begin(reached, is_settled=not is_pending(models))
        elif last is not None and not is_pending(models) and last.allocations.find():
            if last.device.type == "cuda":
                on_failure.callback(torch.cuda.current_stream(last.device).synchronize)
            repeated = again.repeat(last) if (again := reached()) is not None else None
        export = prepared(None if across is None else across.look)
        if last is not None and repeated is not None:
            parameters = Sources(export.program, export.held).parameters
            is_done = last.is_like(export.program, export.format, parameters, repeated) and not export.held.merges
        if across is not None and across.takes(export):
            is_done = across.run(export, reached, more_handles)
        if not is_done:
            export = with_codes(export)
            exhaust(run_messages(export.program, export.group, export.held, into=begin))
        if problem is not None:
            raise problem
        if writer is not None:
            is_plain = export.group.size == 1 and not export.held.merges
            writer.end(export.group.device, repeats=export.format if is_plain else None)
        on_failure.pop_all()
