"""mcore to an engine's memory: copy the shards of all ranks into its tensors by its map, without HF tensors.

The copies from shards to HF tensors are composed with the copies of the engine's map. An HF tensor is still made in two
cases: if the map casts it, or if the composed copies are not a few boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mcore_bridge.arguments import instance_of, problem_of
from mcore_bridge.rules.mapping import Dialect
from mcore_bridge.weights.agreement import Options, open_export
from mcore_bridge.weights.bound import Models
from mcore_bridge.weights.engine.group_copies import GroupCopies
from mcore_bridge.weights.engine.writer import EngineWriter
from mcore_bridge.weights.plan.engine_map import EngineMap, SliceCopy
from mcore_bridge.weights.plan.export_plan import Message
from mcore_bridge.weights.plan.map_slices import MapSlices
from mcore_bridge.weights.plan.payload import OutputTensor
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.byte_copy import ByteCopy, stacked
from mcore_bridge.weights.transfer.copier import Buffers
from mcore_bridge.weights.transfer.endpoints import Outputs
from mcore_bridge.weights.transfer.executor import Ends, run_messages
from mcore_bridge.weights.transfer.program import Program, Step

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
