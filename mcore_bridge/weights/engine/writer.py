"""The sender's side without a ring: the memory of an engine's process, opened here, and written by the engine's map.

mcore to an engine's own memory: the shards of all ranks become its tensors, by its map, and no HF tensor is made.

The copies from shards to HF tensors are composed with those of the engine's map. An HF tensor is still made if the map
casts it, or if the composition of the two is not a few boxes. It is then copied from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mcore_bridge.arguments import COUNT, instance_of, list_of, problem_of, require
from mcore_bridge.errors import TransferError
from mcore_bridge.rules.mapping import Dialect
from mcore_bridge.rules.spec import runs_within
from mcore_bridge.weights.agreement import Options, open_export
from mcore_bridge.weights.engine.group_copies import GroupCopies, MapCopies, Pair, take_expected
from mcore_bridge.weights.ipc.shared_memory import Handle, open_all
from mcore_bridge.weights.model_chunks import Models
from mcore_bridge.weights.plan.boxes import ByteCopy, stacked
from mcore_bridge.weights.plan.engine_map import EngineMap, SliceCopy
from mcore_bridge.weights.plan.export_plan import Message
from mcore_bridge.weights.plan.map_slices import MapSlices
from mcore_bridge.weights.plan.payload import OutputTensor
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.copier import Buffers
from mcore_bridge.weights.transfer.endpoints import Outputs
from mcore_bridge.weights.transfer.executor import Ends, run_messages
from mcore_bridge.weights.transfer.program import Program, Step

GROUP_BYTES = 1 << 30
"""Bytes of HF tensors that one kernel copies. They are kept in memory until then."""


class EngineWriter:
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
        >>> engine = mb.map_engine(mb.manifest(models), head, load_weights)
        >>> writer = mb.EngineWriter(engine.map, engine.share())      # in the trainer's process
        >>> writer.write(mb.iter_hf_weights(models))
        >>> engine.complete()                                         # in the engine's process
        >>> torch.equal(head.weight, mb.to_hf_state_dict(models)["lm_head.weight"])
        True
    """

    def __init__(self, engine_map: EngineMap, handles: Sequence[Handle], *, group_bytes: int = GROUP_BYTES) -> None:
        require(
            TransferError,
            engine_map=(engine_map, instance_of("an EngineMap", EngineMap)),
            handles=(handles, list_of("what MappedEngine.share returned", Handle)),
            group_bytes=(group_bytes, COUNT),
        )
        if len(handles) != 1 + len(engine_map.tensors):
            raise TransferError(
                f"expected a handle for a mark and for each of the map's {len(engine_map.tensors)} tensors, found "
                f"{len(handles)}; pass the map and the handles of one engine"
            )
        self.map, self._group_bytes = engine_map, group_bytes
        other = (
            "expected handles of an engine with this map, found handles of another map: pass the handles of this engine"
        )
        self._mark, *tensors = open_all(handles, engine_map.digest, other)
        self.memory = Buffers(tensors)
        """The engine's tensors in the order of its map, uint8 [bytes] each."""
        self.program: object = None
        """What ``export_into`` keeps between rounds."""
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
            raise TransferError(f"{len(expected)} tensors never came, such as {next(iter(expected))}")
        self.complete()

    def complete(self) -> None:
        """Wait until everything is written, then set the mark, by which the engine detects writes to old addresses."""
        self._mark.view(torch.int64).add_(1)
        if self._mark.is_cuda:
            torch.cuda.current_stream(self._mark.device).synchronize()

    def close(self) -> None:
        """Close the engine's memory."""
        self.memory, self._mark, self.program = Buffers([]), torch.zeros(8, dtype=torch.uint8), None
        self._copies = MapCopies(self.map)


_WRITER = instance_of("an EngineWriter", EngineWriter)


def export_into(
    models: Models,
    writer: EngineWriter,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dialect: Dialect | None = None,
    bucket_bytes: int | None = None,
    merged: bool | None = None,
) -> None:
    """Write the weights of a model into an engine's memory. When this returns, the device has written them.

    This is an export with the engine's map as this rank's target, so all ranks of the replica take part. Ranks without
    an engine run ``iter_hf_weights(models, target="nothing")`` to its end. Only what the engine's rank uses travels.

    The engine announces a round with ``MappedEngine.share`` and ends it with ``MappedEngine.complete``. An HF tensor is
    made only if the map casts it.

    Args:
        models, hf, head, dialect, bucket_bytes, merged: as for ``iter_hf_weights``.
        writer: the memory of the engine's rank, which this process has opened.

    Raises:
        ExportError, MappingError, TargetError: as ``iter_hf_weights``. The engine's weights may then be half old and
            half new.

    Example:
        >>> head = torch.nn.Linear(48, 96, bias=False)                # an engine, and its loader
        >>> head.weight.data = torch.from_file("head", shared=True, size=96 * 48).view(96, 48)  # a GPU needs no file
        >>> load_weights = lambda pairs: head.weight.data.copy_(dict(pairs)["lm_head.weight"])
        >>> engine = mb.map_engine(mb.manifest(models), head, load_weights)
        >>> writer = mb.EngineWriter(engine.map, engine.share())      # in the trainer's process
        >>> mb.export_into(models, writer)
        >>> engine.complete()                                         # in the engine's process
        >>> torch.equal(head.weight, mb.to_hf_state_dict(models)["lm_head.weight"])
        True
    """
    problem = problem_of(writer=(writer, _WRITER))
    target: Target = "nothing" if problem else writer.map
    options: Options = {"dialect": dialect, "bucket_bytes": bucket_bytes, "target": target, "merged": merged}
    options["problem"] = problem
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
    writer.complete()


class EngineProgram(Program):
    """The steps of a rank whose outputs are tensors of an engine. The constructor computes all of them.

    Args:
        program: the steps whose outputs are HF tensors.
        engine_map: the map for exactly these HF tensors.
    """

    def __init__(self, program: Program, engine_map: EngineMap) -> None:
        super().__init__(program.plans, program.rank, program.num_stages)
        self.of, self.map = program, engine_map
        outputs = self.plan.payload.outputs
        self.copies: tuple[tuple[SliceCopy, ...], ...] = tuple(
            tuple(copy for name in (output.name, *output.copies) for copy in engine_map.by_hf.get(name, ()))
            for output in outputs
        )
        """The map's copies from each HF tensor."""
        self.made = {number for number, copies in enumerate(self.copies) if any(copy.casts for copy in copies)}
        """The numbers of outputs that are HF tensors and not tensors of the engine."""
        self._composed = [self._compose(message.number) for message in self.plan.messages]
        while any(composed is None for composed in self._composed):
            self._composed = [self._compose(message.number) for message in self.plan.messages]

    @cached_property
    def first(self) -> int:
        """The number of the engine's first tensor among the outputs. The outputs before it are HF tensors."""
        return len(self.plan.payload.outputs)

    def _written(self, arrived: int) -> dict[int, list[ByteCopy]]:
        composed = self._composed[arrived]
        assert composed is not None
        return composed

    def _alike(self, outputs: Iterable[int]) -> Iterator[tuple[OutputTensor, tuple[int, ...]]]:
        return super()._alike([number for number in outputs if number < self.first])

    def _compose(self, number: int) -> dict[int, list[ByteCopy]] | None:
        """The copies of a message into the engine's tensors; None if another HF tensor has to be made."""
        written: dict[int, list[ByteCopy]] = {}
        made = len(self.made)
        for output, byte_copies in super()._written(number).items():
            if output in self.made:
                written[output] = byte_copies
                continue
            try:
                for byte_copy in byte_copies:
                    for copy in self.copies[output]:
                        target = self.first + self.map.places[copy.tensor]
                        written.setdefault(target, []).extend(byte_copy.then(copy.box))
            except ValueError:
                self.made.add(output)
        if len(self.made) > made:
            return None
        return {output: stacked(byte_copies) for output, byte_copies in written.items()}


class EngineOutputs(Outputs):
    """The tensors of an engine, and the few HF tensors from which some of them are copied.

    Args:
        memory: the engine's tensors in the order of its map, uint8 [bytes] each.
        device: where HF tensors are made.
    """

    def __init__(self, program: EngineProgram, memory: Buffers, device: torch.device) -> None:
        super().__init__(program.plan, device)
        self._program, self._memory = program, memory
        self._gpus |= memory.gpus

    def _tensor(self, number: int) -> Tensor:
        first = self._program.first
        return self._open[number] if number < first else self._memory.tensors[number - first]

    def _copy(self, step: Step, held: Buffers, others: Sequence[Tensor], device: torch.device) -> None:
        if self._memory.is_aligned:
            super()._copy(step, held, others, device)
        else:
            step.copies.run(Buffers([*held.tensors, *others], self._gpus | held.gpus), Buffers([]), device)

    def closed(self, message: Message) -> Iterator[tuple[str, Tensor]]:
        """Copy the HF tensors that a message completes into the engine's tensors. Nothing is yielded."""
        made = [(self._outputs[number], self._open.pop(number)) for number in message.done if number in self._open]
        group = [(name, tensor) for output, tensor in made for name in (output.name, *output.copies)]
        GroupCopies(self._program.map, group).run(group, self._memory, by_kernel=False)
        yield from ()
