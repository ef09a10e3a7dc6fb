"""Conversion tasks with the attributes of Megatron-Bridge's: one for each parameter of the model, in one order on all
ranks.

A task of an expert stands for the experts at this place on all expert-parallel ranks, as in Megatron-Bridge: each rank
has its own expert in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError, describe
from mcore_bridge.rules.names import expert_of, global_name, kind_of
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.trace import Shape
from mcore_bridge.weights.bound import bind, provenance_on
from mcore_bridge.weights.export import iter_with_sources
from mcore_bridge.weights.model_chunks import Models, chunks_of, numbering_of
from mcore_bridge.weights.model_tensors import local_names
from mcore_bridge.weights.plan.positions import ShardPositions
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.failures import raise_failures

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class TaskMapping:
    """How the parameter of a task becomes HF tensors, with the attributes of Megatron-Bridge's mappings.

    Attributes:
        megatron_param: the name of the parameter, with global numbers.
        hf_param: the name of its HF tensor; if it has several, a dict with each name as key and value.
        is_expert: whether it belongs to a routed expert.
        tp_size, tp_rank: of the group that cuts it: expert tensor parallel for an expert.
        ep_size, ep_rank, pp_size, pp_rank: expert and pipeline parallel sizes, and this rank in them.
        is_grouped_export: whether its HF tensor holds all experts of a layer.
        group_key: the name of this HF tensor, or None. Tasks with one key are exported together.
    """

    megatron_param: str
    hf_param: str | dict[str, str]
    is_expert: bool
    tp_size: int
    tp_rank: int
    ep_size: int
    ep_rank: int
    pp_size: int
    pp_rank: int
    is_grouped_export: bool
    group_key: str | None


@dataclass(frozen=True, eq=False)
class ConversionTask:
    """One parameter of the model. ``dataclasses.replace(task, param_weight=...)`` exports another tensor in its place.

    Attributes:
        param_name: its name in this rank's chunk without wrappers, or its global name if this rank lacks it.
        global_param_name: its name with global numbers of layer and expert.
        mapping: how it becomes HF tensors.
        pp_rank: the pipeline rank that owns it, on all ranks.
        vp_stage: the number of this rank's chunk that holds it, or None.
        megatron_module: the module that holds it, or None.
        param_weight: this rank's shard of it, or None.
        shape, dtype: of a shard.
        hf: the HF tensors that it becomes, or of which it is a part, with their whole shapes, on all ranks that have
            a parameter in this task.
        positions: where the elements of this rank's shard are in HF tensors, or None.
        row: the number of the task.
        names: for all parameters of the model, their global names by canonical name.
    """

    param_name: str
    global_param_name: str
    mapping: TaskMapping
    pp_rank: int
    vp_stage: int | None
    megatron_module: nn.Module | None
    param_weight: Tensor | None
    shape: Shape
    dtype: torch.dtype
    hf: tuple[TensorSpec, ...]
    mcore: str
    row: int
    positions: ShardPositions | None = field(repr=False)
    names: Mapping[str, str] = field(repr=False)

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The names of ``hf``."""
        return tuple(spec.name for spec in self.hf)

    @property
    def is_expert(self) -> bool:
        """Whether the parameter belongs to a routed expert."""
        return self.mapping.is_expert

    @property
    def group(self) -> str | None:
        """The HF tensor of all experts to which the parameter belongs, or None."""
        return self.mapping.group_key

    @property
    def num_bytes(self) -> int:
        """The size of a shard in bytes."""
        return TensorSpec(self.mcore, self.shape, self.dtype).num_bytes


class _Parameter(NamedTuple):
    """What a rank tells other ranks of one of its parameters."""

    kind: str
    place: int
    """The number of this parameter among the rank's parameters of the kind, which differ in their expert."""
    name: str
    pp_rank: int
    ep_rank: int
    held: TensorSpec
    hf: tuple[TensorSpec, ...]
    axis: str
    group: str | None


class _Held(NamedTuple):
    """Where a rank has a parameter, without the tensor."""

    local: str
    vp_stage: int
    positions: ShardPositions


class ConversionTasks(Sequence[ConversionTask]):
    """All tasks of the models. Each access makes tasks with the current tensors; this object refers to no tensor.

    All ranks of a model replica make it together.

    Args:
        models: this rank's chunks, wrapped or not.

    Raises:
        ExportError: on every rank of the replica, if the tensors of any of them have no rules.
    """

    def __init__(self, models: Models) -> None:
        self._chunks = chunks_of(models)
        self._groups = groups = self._chunks[0].pg_collection
        group = Group.of_replica(groups)
        own: list[_Parameter] = []
        self._held: dict[tuple[str, int], _Held] = {}
        error = ""
        try:
            own = self._own(models)
        except Exception as problem:  # other ranks must be informed
            error = describe(problem)
        answers = group.all_gather_object((error, own))
        raise_failures([error for error, _ in answers])
        rows: dict[tuple[str, int], list[_Parameter]] = {}
        for _, parameters in answers:
            for parameter in parameters:
                rows.setdefault((parameter.kind, parameter.place), []).append(parameter)
        self._rows = [*rows.values()]
        self.names = {parameter.held.name: parameter.name for row in self._rows for parameter in row}
        """The global names of all parameters of the model, by canonical name."""

    def _own(self, models: Models) -> list[_Parameter]:
        """Describe the parameters of this rank, in the order of its modules."""
        has_adapters = hasattr(self._chunks[0], "bridge_adapters")
        bound = bind(models, provenance_on(models), merged=False if has_adapters else None)
        own: list[_Parameter] = []
        counts: dict[str, int] = {}
        for vp_stage, chunk in enumerate(bound.chunks):
            numbering = numbering_of(chunk)
            for mcore, local in local_names(chunk).items():
                if mcore not in bound.tensors or not (binding := bound.mapping.bind(mcore)).exported:
                    continue
                held, kind = TensorSpec.of(mcore, bound.tensors[mcore]), kind_of(mcore)
                place = counts[kind] = counts.get(kind, -1) + 1
                trace, shard = bound.trace(binding), bound.ranks[binding.axis]
                positions = ShardPositions.of(binding, trace, shard, held.dtype, bound.axes["experts"])
                group = next((name.rpartition("[")[0] for name in binding.hf if name.endswith("]")), None)
                ranks = bound.ranks["pp"], _rank(self._groups.ep)
                name = global_name(local, numbering)
                own.append(_Parameter(kind, place, name, *ranks, held, positions.hf, binding.axis, group))
                self._held[kind, place] = _Held(local, vp_stage, positions)
        return own

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> ConversionTask: ...

    @overload
    def __getitem__(self, index: slice) -> list[ConversionTask]: ...

    def __getitem__(self, index: int | slice) -> ConversionTask | list[ConversionTask]:
        numbers = range(len(self._rows))[index]
        return self._task(numbers) if isinstance(numbers, int) else [*map(self._task, numbers)]

    def _task(self, number: int) -> ConversionTask:
        row, ep_rank = self._rows[number], _rank(self._groups.ep)
        mine = next((parameter for parameter in row if parameter.ep_rank == ep_rank), row[0])
        held = self._held.get((mine.kind, mine.place))
        module = tensor = None
        if held is not None:
            path, _, leaf = held.local.rpartition(".")
            module = self._chunks[held.vp_stage].get_submodule(path)
            tensor = getattr(module, leaf)
        return ConversionTask(
            param_name=mine.name if held is None else held.local,
            global_param_name=mine.name,
            mapping=self._mapping(mine),
            pp_rank=row[0].pp_rank,
            vp_stage=None if held is None else held.vp_stage,
            megatron_module=module,
            param_weight=tensor,
            shape=mine.held.shape,
            dtype=mine.held.dtype,
            hf=tuple(dict.fromkeys(spec for parameter in row for spec in parameter.hf)),
            mcore=mine.held.name,
            row=number,
            positions=None if held is None else held.positions,
            names=self.names,
        )

    def _mapping(self, parameter: _Parameter) -> TaskMapping:
        groups: ProcessGroupCollection = self._groups
        cut = groups.expt_tp if parameter.axis == "etp" else groups.tp
        names = [spec.name for spec in parameter.hf]
        return TaskMapping(
            megatron_param=parameter.name,
            hf_param=names[0] if len(names) == 1 else dict(zip(names, names, strict=True)),
            is_expert=expert_of(parameter.held.name) is not None,
            tp_size=cut.size(),
            tp_rank=cut.rank(),
            ep_size=1 if groups.ep is None else groups.ep.size(),
            ep_rank=_rank(groups.ep),
            pp_size=groups.pp.size(),
            pp_rank=groups.pp.rank(),
            is_grouped_export=parameter.group is not None,
            group_key=parameter.group,
        )


def _rank(group: Any) -> int:
    return 0 if group is None else group.rank()


class SourcedWeight(NamedTuple):
    """An HF tensor, and the parameters of which it was made, by their global names.

    Attributes:
        param_name: the HF name.
        weight: the whole tensor.
        megatron_param_names: the names of the parameters, which are several for a tensor of all experts.
    """

    param_name: str
    weight: Tensor
    megatron_param_names: tuple[str, ...]

    @property
    def megatron_param_name(self) -> str | None:
        """The name of the parameter; None if there are several."""
        return self.megatron_param_names[0] if len(self.megatron_param_names) == 1 else None


def sourced_weights(
    models: Models,
    tasks: Iterable[ConversionTask | None] | None,
    **options: Any,
) -> Iterator[SourcedWeight]:
    """Yield the HF tensors of some tasks, or of all parameters, whole on every rank of the replica.

    Args:
        models: this rank's chunks, wrapped or not.
        tasks: equal tasks on all ranks, with the tensors to send; None, or the ``ConversionTasks`` themselves: all.
        options: ``device`` and ``merged``, as for ``iter_hf_weights``.

    Raises:
        ConfigError: an entry is no task of this library.
        ExportError, MappingError: as ``iter_hf_weights``; or ranks pass different tasks, or a part of a group; or a
            tensor has another shape than the shard.
    """
    names: Mapping[str, str]
    part: dict[str, Tensor] | None = None
    rows: list[int] | None = None
    problem = ""
    if tasks is None or isinstance(tasks, ConversionTasks):
        names = (ConversionTasks(models) if tasks is None else tasks).names
    else:
        chosen = [task for task in tasks if task is not None]
        require_tasks(chosen)
        part = {task.mcore: task.param_weight for task in chosen if task.param_weight is not None}
        rows, problem = [task.row for task in chosen], _misfit(chosen)
        names = chosen[0].names if chosen else {}
    for name, tensor, sources in iter_with_sources(models, part=part, rows=rows, problem=problem, **options):
        yield SourcedWeight(name, tensor, tuple(names[source] for source in sources))


def _misfit(tasks: Iterable[ConversionTask]) -> str:
    """Why the tensors of tasks cannot be sent; "" if they can."""
    given = [(task, getattr(task.param_weight, "shape", None)) for task in tasks if task.param_weight is not None]
    wrong = [(task, shape) for task, shape in given if shape is None or tuple(shape) != task.shape]
    if not wrong:
        return ""
    task, shape = wrong[0]
    return (
        f"param_weight must be a shard {task.shape} of {task.global_param_name}, found {shape and tuple(shape)}, and "
        f"{len(wrong) - 1} others like it: pass this rank's shard"
    )


def require_tasks(tasks: Iterable[object]) -> None:
    """Raise ``ConfigError`` if an entry is no ``ConversionTask``."""
    if wrong := [type(task).__name__ for task in tasks if not isinstance(task, ConversionTask)]:
        raise ConfigError(
            f"conversion_tasks must come from get_conversion_tasks, found {len(wrong)} entries of other types, such as "
            f"{wrong[0]}: pass the tasks, or copies made by dataclasses.replace"
        )
