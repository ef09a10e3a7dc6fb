"""verl's ``delta_sharded`` up to its wire: changes of all ranks are merged on the first one, and written to an engine.

``wire`` does what verl's engine of checkpoints does with entries, which itself needs CUDA.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.trainers import megatron_bridge
from tests.support.exports import built
from tests.support.strategies import random_state
from tests.workers.verl_engine import engine_of
from tests.workers.verl_life import copied, inferred, step

SPECIAL = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), 2.0**-133], dtype=torch.bfloat16)


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor as the rollout has it, which verl sends in bf16."""
    return tensor.to(torch.bfloat16).contiguous().view(torch.int16)


def changed(state: Mapping[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """A copy of a checkpoint in which a share of all elements is another number, or a number like -0.0 and NaN."""
    generator = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in state.items():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        values = (torch.randn(tensor.shape, generator=generator) + seed).to(tensor.dtype)
        rare = torch.rand(tensor.shape, generator=generator) < 0.01
        values[rare] = SPECIAL[torch.randint(0, len(SPECIAL), (int(rare.sum()),), generator=generator)].to(values)
        new[name] = torch.where(chosen, values, tensor)
    return new


def wire(entries: Iterable[tuple[Any, ...]], gather: Any) -> dict[str, tuple[tuple[int, ...], Tensor, Tensor]]:
    """Merge entries on the first rank: for each HF tensor its shape, and the positions and values that changed.

    Args:
        entries: of this rank, in the order that all ranks have.
        gather: verl's ``gather_slot_entries_to_rank0``, or ``gathered``.
    """
    found: dict[str, tuple[tuple[int, ...], list[Tensor], list[Tensor]]] = {}
    for slots, dtype, counts, indices, values, group in entries:
        assert (str(values.dtype), indices.dtype, len(counts)) == (f"torch.{dtype}", torch.int32, len(slots))
        assert int(counts.sum()) == len(indices) == len(values)
        pieces = zip(indices.split(counts.tolist()), values.split(counts.tolist()), strict=True)
        if group is not None:
            pieces = gather(indices, values, counts, group=group) or ()
        if dist.get_rank() == 0:
            for (name, shape), (at, value) in zip(slots, pieces, strict=True):
                _, positions, new = found.setdefault(name, (tuple(shape), [], []))
                positions.append(at)
                new.append(value)
    return {name: (shape, torch.cat(at), torch.cat(new)) for name, (shape, at, new) in found.items()}


def gathered(indices: Tensor, values: Tensor, counts: Tensor, group: Any) -> list[tuple[Tensor, Tensor]] | None:
    """The pieces of all ranks of a group, for each slot, on its first rank."""
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, (indices.split(counts.tolist()), values.split(counts.tolist())), group=group)
    if dist.get_rank(group) > 0:
        return None
    slots = zip(*(zip(*rank, strict=True) for rank in ranks), strict=True)
    return [(torch.cat([at for at, _ in slot]), torch.cat([value for _, value in slot])) for slot in slots]


def written(
    engine: dict[str, Tensor], merged: Mapping[str, tuple[tuple[int, ...], Tensor, Tensor]]
) -> tuple[int, list[str]]:
    """Write what came over the wire into an engine's tensors. Return the number of elements, and what is wrong."""
    problems = []
    for name, (shape, positions, values) in merged.items():
        if engine[name].shape != shape or (len(positions) and int(positions.max()) >= engine[name].numel()):
            problems.append(f"{name} has another shape")
            continue
        if len(positions.unique()) != len(positions):
            problems.append(f"an element of {name} came twice")
        engine[name].view(-1)[positions.long()] = values.to(engine[name].dtype)
    return sum(len(positions) for _, positions, _ in merged.values()), problems


def differences(engine: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> list[str]:
    """The tensors of an engine that a full sync would change, or that it has not."""
    wrong = (name for name, tensor in truth.items() if not torch.equal(bits(engine[name]), bits(tensor)))
    return [*wrong, *(engine.keys() ^ truth.keys())]


def life(dims: ParallelDims, hf: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in a worker, with the interface of verl in place of verl: deltas after changes of a part and of all."""
    from verl.workers.engine.megatron.delta_export import build_export_index, mcore_hf_delta_entry

    state = random_state(hf, dtype=torch.bfloat16)
    models, _ = built(dims, hf, dtype=torch.bfloat16, load_weights=state, **arguments)
    bridge: Any = megatron_bridge.AutoBridge("unused")
    index = build_export_index(bridge, models, {})
    snapshots = {record.megatron_name: flat(record).clone() for record in index}
    assert len(snapshots) == len(index), "verl keeps snapshots by name"

    def entries() -> Iterator[tuple[Any, ...]]:
        for record in index:
            new, old, spec = flat(record), snapshots[record.megatron_name], record.spec
            (where,) = (new.view(torch.int16) != old.view(torch.int16)).nonzero(as_tuple=True)
            where = where if spec.contributes else where[:0]
            yield *mcore_hf_delta_entry(record, spec.place, where, new[where], {}), spec.gather_group
            old.copy_(new)

    engine, problems, counts = {name: tensor.clone() for name, tensor in mb.to_hf_state_dict(models).items()}, [], []
    for share, seed in [(0.01, 1), (1.0, 2), (0.0, 3)]:
        state = changed(state, share, seed)
        mb.load_hf_weights(models, state)
        count, wrong = written(engine, wire(entries(), gathered))
        counts.append(count)
        problems += wrong
        truth = mb.to_hf_state_dict(models)
        if dist.get_rank() == 0:
            problems += [f"{share}: {name}" for name in differences(engine, truth)]
    return {"problems": problems, "counts": counts, "numel": sum(tensor.numel() for tensor in truth.values())}


def flat(record: Any) -> Tensor:
    """The shard of a record as verl compares it: in bf16, flat, or empty."""
    if record.param is None:
        return torch.empty(0, dtype=torch.bfloat16)
    return record.param.data.to(torch.bfloat16).reshape(-1)


def engine_life(dims: ParallelDims, folder: str) -> dict[str, Any]:
    """Runs in a worker, with verl: its engine after a step of PPO, and after a change of 1 % of the weights."""
    from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0

    engine = engine_of(folder, dims, vanilla=False)
    rollout, problems, counts = copied(engine), [], []
    engine.prime_delta_snapshots()
    vocab_size = engine.model_config.hf_config.vocab_size
    said = inferred(engine, vocab_size)
    for change in ("step", "1 %"):
        if change == "step":
            step(engine, vocab_size, said)
        else:
            mb.load_hf_weights(engine.module, changed(copied(engine), 0.01, 1))
        entries, _ = engine.get_per_tensor_param_delta_shard()
        count, wrong = written(rollout, wire(entries, gather_slot_entries_to_rank0))
        counts.append(count)
        problems += wrong
        truth = copied(engine)
        if dist.get_rank() == 0:
            problems += [f"{change}: {name}" for name in differences(rollout, truth)]
    return {"problems": problems, "counts": counts, "numel": sum(tensor.numel() for tensor in truth.values())}
