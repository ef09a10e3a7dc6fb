"""The real ``GPTModel`` of any rank of any mesh, in this one process, by torch's `fake` backend.

A rank's chunks are bound while its process groups exist. Then a list of the windows that each rank packs replaces the
transport.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_bridge import ParallelDims, build_model
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.weights.bound import BoundModel, bind
from mcore_bridge.weights.model_tensors import held_tensors
from mcore_bridge.weights.plan.all_to_all import plan_targets
from mcore_bridge.weights.plan.export_plan import LAG, ExportPlan
from mcore_bridge.weights.plan.gather import plan_export
from mcore_bridge.weights.plan.inventory import Inventory
from mcore_bridge.weights.plan.stream import HEADER
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.copier import Buffers
from mcore_bridge.weights.transfer.endpoints import Outputs
from mcore_bridge.weights.transfer.program import Program
from tests.support.exports import assert_own_memory

CPU, NOTHING = torch.device("cpu"), torch.empty(0)


def blank(tensor: Tensor) -> Tensor:
    """The tensor, filled with NaN, or with the lowest number of integers."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


def is_blank(tensor: Tensor) -> Tensor:
    """Where a tensor has what ``blank`` writes."""
    return tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).min


class NanOutputs(Outputs):
    """The open tensors of an export. Elements that were not written are ``blank``."""

    def _allocated(self, *arguments: Any) -> Sequence[Tensor]:
        return [blank(tensor) for tensor in super()._allocated(*arguments)]


def replica(dims: ParallelDims) -> list[int]:
    """World ranks of the first replica, in the order of the group that exports it."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    with rank_of(dims, 0, dims.smallest_world):
        group = Group.of_replica(ProcessGroupCollection.use_mpu_process_groups())
        return dist.get_process_group_ranks(group.group)


def build_everywhere(
    hf: Any, dims: ParallelDims, load: Callable[[list[Any]], Any], expert_format: str | None = None, **arguments: Any
) -> list[Any]:
    """The tensors of every rank of a replica after ``load(chunks)``, by rank of the model-parallel group. If ``load``
    has added adapters, only these.
    """
    bound = []
    for rank in replica(dims):
        with rank_of(dims, rank, dims.smallest_world):
            chunks = build_model(hf, dims=dims, load_weights=False, device="cpu", **arguments)
            with torch.no_grad():
                for chunk in chunks:
                    for tensor in held_tensors([chunk]).values():
                        blank(tensor)
            load(chunks)
            bound.append(
                with_inventory(
                    bind(chunks, expert_format=expert_format, adapters=getattr(chunks[0], "bridge_adapters", None))
                )
            )
    return bound


def with_inventory(bound: BoundModel) -> Any:
    """Compute the inventory now, since it needs process groups, and keep it with the model."""
    return bound, bound.inventory()


def plan_of(held: Sequence[Any], *, bucket_bytes: int | None) -> ExportPlan:
    """The plan that every rank would make."""
    first = held[0][0]
    inventories = [inventory for _, inventory in held]
    num_layers = first.chunks[0].config.num_layers
    return plan_export(first.mapping, first.axes, num_layers, inventories, bucket_bytes=bucket_bytes)


def programs_for(
    held: Sequence[Any], targets: Sequence[Target], *, bucket_bytes: int | None, guests: Sequence[Target] = ()
) -> list[Program]:
    """The programs that every rank would make for the targets of all ranks, and then the programs of guests."""
    first, inventories = held[0][0], [inventory for _, inventory in held]
    inventories += [Inventory(dict.fromkeys(inventories[0].ranks, 0), ())] * len(guests)
    arguments = first.mapping, first.axes, first.chunks[0].config.num_layers, inventories, [*targets, *guests]
    feeds = plan_targets(*arguments, bucket_bytes=bucket_bytes, guests=len(guests))
    return [Program(feeds.plans_of(rank), rank) for rank in range(len(inventories))]


def export_to(
    held: Sequence[Any], targets: Sequence[Target], *, bucket_bytes: int = 1 << 16, guests: Sequence[Target] = ()
) -> tuple[list[dict[str, Tensor]], int]:
    """The tensors that each rank and guest gets, and the bytes that ranks send. Windows are passed in lists."""
    programs = programs_for(held, targets, bucket_bytes=bucket_bytes, guests=guests)
    ranks = range(len(programs))
    assert sum(program.balance() for program in programs) == 0
    tensors = [*(bound.tensors for bound, _ in held), *[{}] * len(guests)]
    staying = [Buffers([own[name] for name in p.names]) for p, own in zip(programs, tensors, strict=True)]
    states: list[dict[str, Tensor]] = [{} for _ in ranks]
    outputs = [NanOutputs(program.plan, CPU) for program in programs]
    travelled, arrived = 0, [[NOTHING.byte()] * len(ranks)] * LAG
    for number in range(len(programs[0].plan.messages)):
        sent = [[NOTHING.byte()]]
        for rank, program in enumerate(programs if len(ranks) > 1 else ()):
            own = torch.empty(sum(program.sent(number)), dtype=torch.uint8)
            header = torch.full((HEADER,), rank, dtype=torch.uint8)
            step = program.step(number - LAG if number >= LAG else None, number, unpack=False)
            step.copies.run(staying[rank], Buffers([arrived[number][rank], header, own]), CPU)
            sent[rank:] = [own.split(list(program.sent(number)))]
            travelled += sum(program.sent(number)) if rank < len(held) else 0
        arrived.append([torch.cat([sent[sender][rank] for sender in ranks]) for rank in ranks])
        for rank, program in enumerate(programs):
            windows = arrived[-1][rank]
            assert len(windows) == sum(program.received(number))
            headers = torch.full((len(ranks), HEADER), rank, dtype=torch.uint8)
            program.headers(number).run(Buffers([windows]), Buffers([headers]), CPU)
            outputs[rank].run(program.step(number, None), staying[rank], [windows, NOTHING, NOTHING], CPU)
            assert (headers == torch.arange(len(ranks))[:, None]).all()
            for name, tensor in outputs[rank].closed(program.plan.messages[number]):
                assert name not in states[rank], f"{name} came twice"
                states[rank][name] = tensor
    for state, of_rank in zip(states, outputs, strict=True):
        assert not of_rank._open
        assert_own_memory(state)
    return states, travelled


def export(held: Sequence[Any], *, bucket_bytes: int = 1 << 16) -> dict[str, Tensor]:
    """The HF state dict: pack on every rank, pass the windows in a list, unpack."""
    plan = plan_of(held, bucket_bytes=bucket_bytes)
    programs = [Program([plan], rank) for rank in range(len(held))]
    assert sum(program.balance() for program in programs) == 0
    staying = [Buffers([bound.tensors[name] for name in p.names]) for p, (bound, _) in zip(programs, held, strict=True)]
    state: dict[str, Tensor] = {}
    outputs = NanOutputs(plan, CPU)
    for number, message in enumerate(plan.messages):
        windows = torch.empty(sum(message.widths), dtype=torch.uint8)
        for rank in range(len(held)):
            own = windows.split(message.widths)[rank]
            header = torch.full((HEADER,), rank, dtype=torch.uint8)
            step = programs[rank].step(None, number)
            step.copies.run(staying[rank], Buffers([NOTHING, header, own]), CPU)
        for rank in {0, number % len(held)}:  # other ranks would give equal results
            step = programs[rank].step(number, None)
            headers = torch.full((len(held), HEADER), rank, dtype=torch.uint8)
            programs[rank].headers(number).run(Buffers([windows]), Buffers([headers]), CPU)
            outputs.run(step, staying[rank], [windows, NOTHING, NOTHING], CPU)
            assert (headers == torch.arange(len(held))[:, None]).all()
        for name, tensor in outputs.closed(message):
            assert name not in state, f"{name} came twice"
            state[name] = tensor
    assert not outputs._open
    assert_own_memory(state)
    return state
