"""``mcore-bridge plan``: tables of the tensors and memory of every rank of a mesh."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Group
from rich.table import Table

from mcore_bridge.commands import text
from mcore_bridge.commands.options import BANDWIDTH
from mcore_bridge.commands.plan.cost import Cost, Feeding, cost_of, feed
from mcore_bridge.commands.plan.mesh_plan import Chunk, MeshPlan, plan_mesh
from mcore_bridge.config.unread_fields import notes_on
from mcore_bridge.rules.dtypes import AUTO, dtype_name
from mcore_bridge.weights.plan.target import EngineRank
from mcore_bridge.weights.provenance import Provenance, provenance_of

if TYPE_CHECKING:
    from mcore_bridge.config.mesh.parallel_dims import ParallelDims
    from mcore_bridge.factory.blueprint import Blueprint, BuildOptions


def plan(
    folder: Path, options: BuildOptions, *, dtype: torch.dtype | None = None, world_size: int | None = None
) -> MeshPlan:
    """Plans a mesh for a model, from its config alone.

    Args:
        folder: with a config.json.
        options: options of the build; the layout may be "balanced". Device and head are replaced.
        dtype: the dtype of the parameters. None: the dtype in the config, or bfloat16.
        world_size: the ranks of the job. None: the smallest world of the mesh.

    Raises:
        BridgeError: the config, the mesh or the world size do not fit each other.
    """
    blueprint = blueprint_of(provenance_of(folder, head=None), options, dtype=dtype)
    return plan_mesh(blueprint, world_size=world_size or options.dims.smallest_world)


def blueprint_of(provenance: Provenance, options: BuildOptions, *, dtype: torch.dtype | None) -> Blueprint:
    """The blueprint of a model on the meta device. Other arguments and errors: see ``plan``.

    Args:
        provenance: the provenance of the folder, which is read once for all meshes.
    """
    from mcore_bridge.factory.blueprint import make_blueprint

    return make_blueprint(provenance, replace(options, dtype=dtype or AUTO, device="meta", head=provenance.head))


@dataclass(frozen=True, slots=True)
class StageRow:
    """The part of a stage on one rank.

    Attributes:
        pp: the pipeline rank.
        vp: the virtual stage.
        layers: their global numbers.
        tower: whether the rank has a composite's models of images.
        embedding: whether it has the embedding.
        mtp: how many MTP layers it has.
        output: whether it has the output layer.
        parameters: how many it has.
        bytes: the bytes of all tensors.
        expert_bytes: the bytes of routed experts.
    """

    pp: int
    vp: int
    layers: tuple[int, ...]
    tower: bool
    embedding: bool
    mtp: int
    output: bool
    parameters: int
    bytes: int
    expert_bytes: int
    bytes_by_dtype: Counter[str] = field(repr=False)

    @classmethod
    def of(cls, chunk: Chunk) -> StageRow:
        """The row of a chunk."""
        by_dtype: Counter[str] = Counter()
        for held in chunk.held:
            by_dtype[dtype_name(held.dtype)] += held.num_bytes
        return cls(
            pp=chunk.stage.pp_rank,
            vp=chunk.stage.vp_stage,
            layers=tuple(chunk.stage.layers),
            tower=chunk.has_tower,
            embedding=chunk.stage.embedding,
            mtp=chunk.num_mtp_layers,
            output=chunk.stage.loss,
            parameters=chunk.num_parameters,
            bytes=chunk.num_bytes,
            expert_bytes=chunk.experts.num_bytes,
            bytes_by_dtype=by_dtype,
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """The memory and exports of a mesh.

    Attributes:
        model_type: the ``model_type`` of the text.
        tower: whether a composite's models of images are planned.
        mesh: sizes by axis, ``sp``, and the ``layout`` or None.
        ranks: the number of ranks of the whole job.
        dtype: the dtype of the parameters.
        parameters: the number of parameters of the whole model.
        stages: by pipeline rank, and then by virtual stage.
        export: the cost of an export for the rank with the highest cost.
        published: the cost of an export in the format of a quantized folder. None: the folder has no quantized
            weights, or they cannot leave so on this mesh.
        engine: the cost of sending to engines. None: it was not requested.
        notes: remarks on fields of the config that change nothing.
        engine_ranks: all ranks of one engine.
        bandwidth: GB/s that a rank receives.
    """

    model_type: str
    tower: bool
    mesh: ParallelDims
    ranks: int
    dtype: torch.dtype
    parameters: int
    stages: tuple[StageRow, ...]
    export: Cost
    published: Cost | None
    engine: Feeding | None
    notes: tuple[str, ...]
    mesh_plan: MeshPlan = field(repr=False)
    published_bytes: int = field(repr=False)
    engine_ranks: tuple[EngineRank, ...] = field(repr=False)
    bandwidth: float = field(repr=False)

    @classmethod
    def of(
        cls, mesh_plan: MeshPlan, engine_ranks: tuple[EngineRank, ...] = (), *, bandwidth: float = BANDWIDTH
    ) -> Planned:
        """The answer of a planned mesh, with the cost of feeding engines if there are any.

        Raises:
            TargetError: engines of this size do not fill the job, or the model cannot be sliced so.
        """
        blueprint, published = mesh_plan.blueprint, mesh_plan.as_published()
        return cls(
            model_type=blueprint.hf.model_type,
            tower=bool(blueprint.provenance.tower),
            mesh=blueprint.dims,
            ranks=mesh_plan.world_size,
            dtype=blueprint.dtype,
            parameters=sum(spec.numel for spec in mesh_plan.export.tensors()),
            stages=tuple(StageRow.of(chunk) for chunks in mesh_plan.ranks for chunk in chunks),
            export=cost_of(mesh_plan.export, bandwidth=bandwidth),
            published=cost_of(published, bandwidth=bandwidth) if published else None,
            engine=feed(mesh_plan, engine_ranks, bandwidth=bandwidth) if engine_ranks else None,
            notes=tuple(note for _, note in notes_on(blueprint.unread)),
            mesh_plan=mesh_plan,
            published_bytes=sum(spec.num_bytes for spec in published.tensors()) if published else 0,
            engine_ranks=engine_ranks,
            bandwidth=bandwidth,
        )


def render(planned: Planned) -> Group:
    """The report: a title, a row per chunk, and the cost of an export, and of feeding engines if there are any."""
    feeding = ("", _feeding(planned)) if planned.engine else ()
    exports = [_export(planned), *([_published(planned)] if planned.published else [])]
    return Group(title(planned), *planned.notes, "", _table(planned), "", *exports, *feeding)


def title(planned: Planned) -> str:
    """One line about the model and the mesh."""
    num_layers = planned.mesh_plan.blueprint.config.num_layers
    mesh = planned.mesh.describe(world_size=planned.ranks, num_layers=num_layers)
    return f"{planned.model_type}, {text.count(planned.parameters)} parameters in {dtype_name(planned.dtype)}: {mesh}"


def layers_of(row: StageRow) -> str:
    """The layers of a stage as text: ``E 0-7``, ``8-15``, ``56-63 M L``, ``-``."""
    layers = row.layers
    middle = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else "".join(map(str, layers))
    words = ["V"] * row.tower + ["E"] * row.embedding + [middle] * bool(middle) + ["M"] * row.mtp + ["L"] * row.output
    return " ".join(words) or "-"


def _table(planned: Planned) -> Table:
    table = Table(caption=_caption(planned), caption_justify="left")
    held: Counter[int] = Counter()
    for stage in planned.stages:
        held[stage.pp] += stage.bytes
    rows = [_cells(stage, held[stage.pp]) for stage in planned.stages]
    shown = [name for name in rows[0] if _is_shown(name, planned)]
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _cells(row: StageRow, rank_bytes: int) -> dict[str, str]:
    """The cells of a row. Only the first stage of a rank has the cells of the whole rank."""
    is_first = row.vp == 0
    return {
        "pp": str(row.pp) if is_first else "",
        "vp": str(row.vp),
        "layers": layers_of(row),
        "parameters": text.count(row.parameters),
        "bytes": _by_dtype(row),
        "experts": f"{row.expert_bytes / max(row.bytes, 1):.0%}",
        "rank": text.num_bytes(rank_bytes) if is_first else "",
    }


def _is_shown(column: str, planned: Planned) -> bool:
    """Whether a column is needed for this mesh."""
    if column in ("vp", "rank"):
        return planned.mesh.vp > 1
    return column != "experts" or bool(planned.mesh_plan.blueprint.config.num_moe_experts)


def _caption(planned: Planned) -> str:
    mesh_plan, dims, world_size = planned.mesh_plan, planned.mesh, planned.ranks
    totals = [sum(chunk.num_bytes for chunk in chunks) for chunks in mesh_plan.ranks]
    alike = text.plural(world_size // dims.pp, "rank")
    mtp = ", M a layer of multi-token prediction" if mesh_plan.blueprint.config.mtp_num_layers else ""
    tower = ", V the models of images" if mesh_plan.blueprint.provenance.tower else ""
    return (
        f"Numbers of one rank; {alike} of each stage hold as much (TP{dims.tp} CP{dims.cp} "
        f"DP{dims.dp(world_size)}{_expert_axes(mesh_plan)}). Over its chunks a rank holds "
        f"{text.num_bytes(min(totals))} to {text.num_bytes(max(totals))}; the largest tensor is {_largest(mesh_plan)}. "
        f"E is the embedding, L the final norm and the output layer{mtp}{tower}.{_experts(mesh_plan)}{_layout(dims)}"
    )


def _expert_axes(mesh_plan: MeshPlan) -> str:
    dims = mesh_plan.blueprint.dims
    if not mesh_plan.blueprint.config.num_moe_experts:
        return ""
    return f"; of experts ETP{dims.etp} EP{dims.ep} DP{dims.edp(mesh_plan.world_size)}"


def _experts(mesh_plan: MeshPlan) -> str:
    num_experts = mesh_plan.blueprint.config.num_moe_experts
    if not num_experts:
        return ""
    here = num_experts // mesh_plan.blueprint.dims.ep
    return f" Experts: the part of the bytes that are routed experts, {here} of {num_experts} in a layer."


def _layout(dims: ParallelDims) -> str:
    return f" Layout: {dims.layout}" if dims.layout else ""


def _by_dtype(row: StageRow) -> str:
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    dtypes = "+".join(short.get(name, name) for name, _ in row.bytes_by_dtype.most_common())
    return f"{text.num_bytes(row.bytes)} {dtypes}" if dtypes else "-"


def _largest(mesh_plan: MeshPlan) -> str:
    tensors = (tensor for chunks in mesh_plan.ranks for chunk in chunks for tensor in chunk.held)
    largest = max(tensors, key=lambda tensor: tensor.num_bytes)
    return f"{largest.name} of {text.num_bytes(largest.num_bytes)}"


def _export(planned: Planned) -> str:
    cost, sizes = planned.export, [spec.num_bytes for spec in planned.mesh_plan.export.tensors()]
    yields = (
        f"An export yields {text.plural(len(sizes), 'HF tensor')}, {text.num_bytes(sum(sizes))} in all and the largest "
        f"{text.num_bytes(max(sizes))}"
    )
    memory = f"{text.num_bytes(cost.memory)} beside the model at most"
    if cost.ranks == 1:
        return f"{yields}, on one rank alone, which takes {memory}."
    return (
        f"{yields}, in {text.plural(cost.messages, 'message')} among {text.plural(cost.ranks, 'rank')}. A rank "
        f"sends {text.num_bytes(cost.sent)}, of which at most {text.num_bytes(cost.weights)} are weights (windows that "
        f"are sent at once are as wide as the fullest), receives {text.num_bytes(cost.received)}, and takes {memory}. "
        f"{_predicted(cost.seconds, planned.bandwidth)}"
    )


def _published(planned: Planned) -> str:
    cost = planned.published
    assert cost is not None
    received = f"; a rank receives {text.num_bytes(cost.received)}" if cost.ranks > 1 else ""
    yields = f"it yields {text.num_bytes(planned.published_bytes)}{received}."
    return f'In the format of the folder (quantize="as_published") {yields}'


def _feeding(planned: Planned) -> str:
    cost, engine = planned.engine, planned.engine_ranks
    assert cost is not None
    last = engine[-1]
    messages = text.plural(cost.messages, "message")
    return (
        f"To engines of TP{last.tp} PP{last.pp} EP{last.ep}, where rank r of the job feeds rank r % {len(engine)} of "
        f"one, {text.num_bytes(cost.total)} travel within a model replica, in {messages}. A rank receives at most "
        f"{text.num_bytes(cost.received)}, sends at most {text.num_bytes(cost.sent)}, and takes "
        f"{text.num_bytes(cost.memory)} beside the model and what it feeds. "
        f"{_predicted(cost.seconds, planned.bandwidth)}"
    )


def _predicted(seconds: float, bandwidth: float) -> str:
    return f"Predicted: {seconds:.3g} s, were all ranks in one domain in which each receives {bandwidth:g} GB/s."
