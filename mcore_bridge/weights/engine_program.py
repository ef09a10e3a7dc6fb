"""A program whose outputs are an engine's own tensors: shards become slices of them, with no HF tensor in between.

The copies from shards to HF tensors are composed with those of the engine's map. An HF tensor is still made if the map
casts it, or if the composition of the two is not a few boxes. It is then copied from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mcore_bridge.weights.ipc.engine_copies import EngineCopies
from mcore_bridge.weights.ipc.engine_tensors import octets
from mcore_bridge.weights.plan.boxes import BoxCopy
from mcore_bridge.weights.plan.engine_map import EngineMap, SliceCopy
from mcore_bridge.weights.plan.export_plan import Message
from mcore_bridge.weights.plan.payload import OutputTensor
from mcore_bridge.weights.transfer.byte_copy import ByteCopy
from mcore_bridge.weights.transfer.copier import Buffers
from mcore_bridge.weights.transfer.endpoints import Outputs
from mcore_bridge.weights.transfer.program import Program, Step
from mcore_bridge.weights.transfer.rectangles import rectangles, stacked


class EngineProgram(Program):
    """The steps of a rank whose outputs are tensors of an engine. All are computed when it is made.

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
        """The map's copies out of each HF tensor."""
        self.made = {number for number, copies in enumerate(self.copies) if any(copy.casts for copy in copies)}
        """The outputs that are HF tensors all the same."""
        self._composed = [self._compose(message.number) for message in self.plan.messages]
        while any(composed is None for composed in self._composed):
            self._composed = [self._compose(message.number) for message in self.plan.messages]

    @cached_property
    def first(self) -> int:
        """The number of the engine's first tensor among the outputs; those before it are HF tensors."""
        return len(self.plan.payload.outputs)

    def _written(self, arrived: int) -> dict[int, list[ByteCopy]]:
        composed = self._composed[arrived]
        assert composed is not None
        return composed

    def _alike(self, outputs: Iterable[int]) -> Iterator[tuple[OutputTensor, tuple[int, ...]]]:
        return super()._alike([number for number in outputs if number < self.first])

    def _compose(self, number: int) -> dict[int, list[ByteCopy]] | None:
        """The copies of a message into the engine's tensors; None if one more HF tensor has to be made."""
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
                        written.setdefault(target, []).extend(_after(copy.box, byte_copy))
            except ValueError:
                self.made.add(output)
        if len(self.made) > made:
            return None
        return {output: stacked(byte_copies) for output, byte_copies in written.items()}


def _after(box: BoxCopy, first: ByteCopy) -> Iterator[ByteCopy]:
    """The copies of bytes that do both: ``first`` into an HF tensor, and ``box`` from there."""
    item = first.item
    (near, far) = ((first.source_row, first.source_col), (first.target_row, first.target_col))
    if any(number % item for number in (*near, *far, first.target_start)):
        raise ValueError("bytes that are no whole elements")
    both = box.after(
        BoxCopy.of(
            0,
            (first.rows, first.cols),
            [distance // item for distance in near],
            first.target_start // item,
            [distance // item for distance in far],
        )
    )
    if both is None:
        return
    for byte_copy in rectangles(
        [dim.size for dim in both.dims],
        [dim.source * item for dim in both.dims],
        [dim.target * item for dim in both.dims],
        first.source_start + both.source * item,
        both.target * item,
        item,
    ):
        yield byte_copy._replace(source=first.source)


class EngineOutputs(Outputs):
    """The tensors of an engine, and the few HF tensors that are made on the way to them.

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
        """Copy the HF tensors that are complete with a message into the engine's; yield none."""
        for number in message.done:
            tensor = self._open.pop(number, None)
            if tensor is not None:
                entries = [(copy, 0, tensor.dtype) for copy in self._program.copies[number]]
                engine_map = self._program.map
                EngineCopies(entries, engine_map.dtypes, engine_map.places).run_once(octets(tensor), self._memory)
        yield from ()
