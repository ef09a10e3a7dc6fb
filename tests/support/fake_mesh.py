"""The real ``GPTModel`` of any rank of any mesh, in this one process: torch's `fake` backend, no mock of ours.

A rank's chunks are bound while its process groups exist; transport is then a list of the windows that each rank packs.
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
from mcore_bridge.weights.plan.export_plan import ExportPlan
from mcore_bridge.weights.plan.gather import plan_export
from mcore_bridge.weights.plan.stream import HEADER
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.copier import Buffers
from mcore_bridge.weights.transfer.program import Program

CPU, NOTHING = torch.device("cpu"), torch.empty(0)


def replica(dims: ParallelDims) -> list[int]:
    """World ranks of the first replica, in the order of the group that exports it."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    with rank_of(dims, 0, dims.smallest_world):
        group = Group.of_replica(ProcessGroupCollection.use_mpu_process_groups())
        return dist.get_process_group_ranks(group.group)


def build_everywhere(hf: Any, dims: ParallelDims, load: Callable[[list[Any]], Any], **arguments: Any) -> list[Any]:
    """What every rank of a replica holds after ``load(chunks)``, by rank of the model-parallel group.

    Of a model to which that has added adapters, these alone.
    """
    bound = []
    for rank in replica(dims):
        with rank_of(dims, rank, dims.smallest_world):
            chunks = build_model(hf, dims=dims, load_weights=False, device="cpu", **arguments)
            with torch.no_grad():
                for chunk in chunks:
                    for tensor in held_tensors([chunk]).values():
                        tensor.fill_(float("nan"))
            load(chunks)
            bound.append(with_inventory(bind(chunks, adapters=getattr(chunks[0], "bridge_adapters", None))))
    return bound


def with_inventory(bound: BoundModel) -> Any:
    """The inventory needs process groups: keep it with what it describes."""
    return bound, bound.inventory()


def plan_of(held: Sequence[Any], *, bucket_bytes: int | None) -> ExportPlan:
    """The plan that every rank would make."""
    first = held[0][0]
    inventories = [inventory for _, inventory in held]
    num_layers = first.chunks[0].config.num_layers
    return plan_export(first.mapping, first.axes, num_layers, inventories, bucket_bytes=bucket_bytes)


def programs_for(held: Sequence[Any], targets: Sequence[Target], *, bucket_bytes: int | None) -> list[Program]:
    """The programs that every rank would make for the targets of all of them."""
    first = held[0][0]
    inventories = [inventory for _, inventory in held]
    arguments = first.mapping, first.axes, first.chunks[0].config.num_layers, inventories, targets
    feeds = plan_targets(*arguments, bucket_bytes=bucket_bytes)
    return [Program(feeds.plans_of(rank), rank) for rank in range(len(held))]


def export_to(
    held: Sequence[Any], targets: Sequence[Target], *, bucket_bytes: int = 1 << 16
) -> tuple[list[dict[str, Tensor]], int]:
    """What each rank gets, and the bytes of weights that travelled: each pair of ranks hands over its windows."""
    ranks = range(len(held))
    programs = programs_for(held, targets, bucket_bytes=bucket_bytes)
    assert sum(program.balance() for program in programs) == 0
    staying = [Buffers([bound.tensors[name] for name in p.names]) for p, (bound, _) in zip(programs, held, strict=True)]
    states: list[dict[str, Tensor]] = [{} for _ in ranks]
    opened: list[dict[int, Tensor]] = [{} for _ in ranks]
    travelled = 0
    for number in range(len(programs[0].plan.messages)):
        sent = [[NOTHING.byte()]]
        for rank, program in enumerate(programs if len(held) > 1 else ()):
            own = torch.empty(sum(program.sent(number)), dtype=torch.uint8)
            header = torch.full((HEADER,), rank, dtype=torch.uint8)
            step = program.step(None, number)
            step.copies.run(staying[rank], Buffers([NOTHING, header, NOTHING, own]), CPU)
            sent[rank:] = [own.split(list(program.sent(number)))]
            travelled += sum(program.sent(number))
        for rank, program in enumerate(programs):
            windows = torch.cat([sent[sender][rank] for sender in ranks])
            assert len(windows) == sum(program.received(number))
            outputs, open_ = program.plan.payload.outputs, opened[rank]
            step = program.step(number, None)
            for i in step.outputs:
                open_.setdefault(i, torch.full(outputs[i].shape, float("nan"), dtype=outputs[i].dtype))
            headers = torch.full((len(held), HEADER), rank, dtype=torch.uint8)
            passing = Buffers([windows, NOTHING, headers, NOTHING, *(open_[i] for i in step.outputs)])
            step.copies.run(staying[rank], passing, CPU)
            assert (headers == torch.arange(len(held))[:, None]).all()
            for i in program.plan.messages[number].done:
                tensor = open_.pop(i) if i in open_ else torch.empty(outputs[i].shape, dtype=outputs[i].dtype)
                for name in (outputs[i].name, *outputs[i].copies):
                    assert name not in states[rank], f"{name} came twice"
                    states[rank][name] = tensor
    assert not any(opened)
    return states, travelled


def export(held: Sequence[Any], *, bucket_bytes: int = 1 << 16) -> dict[str, Tensor]:
    """The HF state dict: pack on every rank, hand the windows over in a list, unpack."""
    plan = plan_of(held, bucket_bytes=bucket_bytes)
    programs = [Program([plan], rank) for rank in range(len(held))]
    assert sum(program.balance() for program in programs) == 0
    staying = [Buffers([bound.tensors[name] for name in p.names]) for p, (bound, _) in zip(programs, held, strict=True)]
    state: dict[str, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    for number, message in enumerate(plan.messages):
        windows = torch.empty(sum(message.widths), dtype=torch.uint8)
        for rank in range(len(held)):
            own = windows.split(message.widths)[rank]
            header = torch.full((HEADER,), rank, dtype=torch.uint8)
            step = programs[rank].step(None, number)
            step.copies.run(staying[rank], Buffers([NOTHING, header, NOTHING, own]), CPU)
        for rank in [0, number % len(held)]:  # others would do the same
            step = programs[rank].step(number, None)
            for i in step.outputs:
                shape, dtype = plan.payload.outputs[i].shape, plan.payload.outputs[i].dtype
                outputs.setdefault(i, torch.full(shape, float("nan"), dtype=dtype))
            headers = torch.full((len(held), HEADER), rank, dtype=torch.uint8)
            passing = Buffers([windows, NOTHING, headers, NOTHING, *(outputs[i] for i in step.outputs)])
            step.copies.run(staying[rank], passing, CPU)
            assert (headers == torch.arange(len(held))[:, None]).all()
        for i in message.done:
            for name in (plan.payload.outputs[i].name, *plan.payload.outputs[i].copies):
                assert name not in state, f"{name} came twice"
                state[name] = outputs[i]
    assert outputs.keys() == set(range(len(plan.payload.outputs)))
    return state
