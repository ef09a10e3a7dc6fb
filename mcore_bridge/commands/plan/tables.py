"""``mcore-bridge plan``: tables of what every rank would hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Group
from rich.table import Table

from mcore_bridge.commands import text
from mcore_bridge.commands.plan.batch import BANDWIDTH
from mcore_bridge.commands.plan.cost import cost_of
from mcore_bridge.commands.plan.engine_cost import feed
from mcore_bridge.commands.plan.mesh_plan import Chunk, MeshPlan, plan_mesh
from mcore_bridge.config.unread_fields import notes_on
from mcore_bridge.rules.dtypes import dtype_name
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
        options: of the build; the layout may be "balanced". Device and head are replaced.
        dtype: of the parameters. None: that of the config, or bfloat16.
        world_size: of the job. None: the smallest world of the mesh.

    Raises:
        BridgeError: the config, the mesh or the world size do not fit each other.
    """
    blueprint = blueprint_of(provenance_of(folder, head=None), options, dtype=dtype)
    return plan_mesh(blueprint, world_size=world_size or options.dims.smallest_world)


def blueprint_of(provenance: Provenance, options: BuildOptions, *, dtype: torch.dtype | None) -> Blueprint:
    """The blueprint of a model on the meta device. Other arguments and errors: see ``plan``.

    Args:
        provenance: of the folder, which is read once for all meshes.
    """
    from mcore_bridge.factory.blueprint import make_blueprint

    published = getattr(provenance.config, "dtype", None)
    dtype = dtype or (published if isinstance(published, torch.dtype) else torch.bfloat16)
    return make_blueprint(provenance, replace(options, dtype=dtype, device="meta", head=provenance.head))


def render(mesh_plan: MeshPlan, engine: Sequence[EngineRank] = (), *, bandwidth: float = BANDWIDTH) -> Group:
    """The report: a title, a row per chunk, and the cost of an export, and of feeding engines if there are any.

    Args:
        mesh_plan: the planned mesh.
        engine: all ranks of one engine.
        bandwidth: GB/s that a rank receives.
    """
    feeding = ("", _feeding(mesh_plan, engine, bandwidth)) if engine else ()
    notes = [note for _, note in notes_on(mesh_plan.blueprint.unread)]
    return Group(title(mesh_plan), *notes, "", _table(mesh_plan), "", _export(mesh_plan, bandwidth), *feeding)


def title(mesh_plan: MeshPlan) -> str:
    """One line about the model and the mesh."""
    blueprint = mesh_plan.blueprint
    numel = sum(spec.numel for spec in mesh_plan.export.tensors())
    mesh = blueprint.dims.describe(world_size=mesh_plan.world_size, num_layers=blueprint.config.num_layers)
    return f"{blueprint.hf.model_type}, {text.count(numel)} parameters in {dtype_name(blueprint.dtype)}: {mesh}"


def layers_of(chunk: Chunk) -> str:
    """The layers of a chunk as text: ``E 0-7``, ``8-15``, ``56-63 M L``, ``-``."""
    stage, layers = chunk.stage, chunk.stage.layers
    middle = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else "".join(map(str, layers))
    words = (
        ["V"] * chunk.has_tower
        + ["E"] * stage.embedding
        + [middle] * bool(middle)
        + ["M"] * chunk.num_mtp_layers
        + ["L"] * stage.loss
    )
    return " ".join(words) or "-"


def _table(mesh_plan: MeshPlan) -> Table:
    table = Table(caption=_caption(mesh_plan), caption_justify="left")
    rows = [_row(chunk, chunks) for chunks in mesh_plan.ranks for chunk in chunks]
    shown = [name for name in rows[0] if _is_shown(name, mesh_plan)]
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _row(chunk: Chunk, chunks: tuple[Chunk, ...]) -> dict[str, str]:
    """The cells of a chunk's row. Only the first chunk of a rank has the cells of the whole rank."""
    first = chunk is chunks[0]
    return {
        "pp": str(chunk.stage.pp_rank) if first else "",
        "vp": str(chunk.stage.vp_stage),
        "layers": layers_of(chunk),
        "parameters": text.count(chunk.num_parameters),
        "bytes": _by_dtype(chunk),
        "experts": f"{chunk.experts.num_bytes / max(chunk.num_bytes, 1):.0%}",
        "rank": text.num_bytes(sum(other.num_bytes for other in chunks)) if first else "",
    }


def _is_shown(column: str, mesh_plan: MeshPlan) -> bool:
    """Whether a column is needed for this mesh."""
    if column in ("vp", "rank"):
        return mesh_plan.blueprint.dims.vp > 1
    return column != "experts" or bool(mesh_plan.blueprint.config.num_moe_experts)


def _caption(mesh_plan: MeshPlan) -> str:
    dims, world_size = mesh_plan.blueprint.dims, mesh_plan.world_size
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


def _by_dtype(chunk: Chunk) -> str:
    sizes: Counter[str] = Counter()
    for held in chunk.held:
        sizes[dtype_name(held.dtype)] += held.num_bytes
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    dtypes = "+".join(short.get(name, name) for name, _ in sizes.most_common())
    return f"{text.num_bytes(chunk.num_bytes)} {dtypes}" if sizes else "-"


def _largest(mesh_plan: MeshPlan) -> str:
    tensors = (tensor for chunks in mesh_plan.ranks for chunk in chunks for tensor in chunk.held)
    largest = max(tensors, key=lambda tensor: tensor.num_bytes)
    return f"{largest.name} of {text.num_bytes(largest.num_bytes)}"


def _export(mesh_plan: MeshPlan, bandwidth: float) -> str:
    sizes = [spec.num_bytes for spec in mesh_plan.export.tensors()]
    yields = (
        f"An export yields {text.plural(len(sizes), 'HF tensor')}, {text.num_bytes(sum(sizes))} in all and the largest "
        f"{text.num_bytes(max(sizes))}"
    )
    cost = cost_of(mesh_plan.export, bandwidth=bandwidth)
    memory = f"{text.num_bytes(cost.memory)} beside the model at most"
    if cost.num_ranks == 1:
        return f"{yields}, on one rank alone, which takes {memory}."
    return (
        f"{yields}, in {text.plural(cost.num_messages, 'message')} among {text.plural(cost.num_ranks, 'rank')}. A rank "
        f"sends {text.num_bytes(cost.sent)}, of which at most {text.num_bytes(cost.weights)} are weights (windows that "
        f"are sent at once are as wide as the fullest), receives {text.num_bytes(cost.received)}, and takes {memory}. "
        f"{_predicted(cost.seconds, bandwidth)}"
    )


def _feeding(mesh_plan: MeshPlan, engine: Sequence[EngineRank], bandwidth: float) -> str:
    cost, last = feed(mesh_plan, engine, bandwidth=bandwidth), engine[-1]
    messages = text.plural(cost.num_messages, "message")
    return (
        f"To engines of TP{last.tp} PP{last.pp} EP{last.ep}, where rank r of the job feeds rank r % {len(engine)} of "
        f"one, {text.num_bytes(cost.total)} travel within a model replica, in {messages}. A rank receives at most "
        f"{text.num_bytes(cost.received)}, sends at most {text.num_bytes(cost.sent)}, and takes "
        f"{text.num_bytes(cost.memory)} beside the model and what it feeds. {_predicted(cost.seconds, bandwidth)}"
    )


def _predicted(seconds: float, bandwidth: float) -> str:
    return f"Predicted: {seconds:.3g} s, were all ranks in one domain in which each receives {bandwidth:g} GB/s."
