"""``mcore-bridge plan``: what every rank would hold, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Group
from rich.table import Table

from mcore_bridge.commands import text
from mcore_bridge.commands.fake import Chunk, MeshPlan, plan_mesh
from mcore_bridge.commands.options import smallest_world
from mcore_bridge.config.parallel import ParallelDims, Stage
from mcore_bridge.weights.dtypes import dtype_name
from mcore_bridge.weights.export import BUCKET_BYTES
from mcore_bridge.weights.plan import Held


def plan(folder: Path, dims: ParallelDims, *, dtype: torch.dtype | None, world_size: int | None) -> MeshPlan:
    """Plan a mesh for a model of which only the config is there.

    Args:
        folder: with a config.json.
        dims: the mesh; "balanced" layouts are resolved.
        dtype: of the parameters; None is that of the config, or bfloat16.
        world_size: of the job; None is the smallest that the mesh fits.

    Raises:
        BridgeError: the config, the mesh or the world size do not fit each other.
    """
    from mcore_bridge.architecture import read_hf
    from mcore_bridge.factory.blueprint import draw

    noted = getattr(read_hf(folder), "dtype", None)
    dtype = dtype or (noted if isinstance(noted, torch.dtype) else torch.bfloat16)
    blueprint = draw(folder, dims=dims, dtype=dtype, device="meta")
    return plan_mesh(blueprint, world_size=world_size or smallest_world(dims))


def render(found: MeshPlan) -> Group:
    """Title, a row per chunk, and what an export would move."""
    return Group(title(found), "", _table(found), "", _export(found))


def title(found: MeshPlan) -> str:
    """One line: the model and the mesh."""
    blueprint = found.blueprint
    numel = sum(torch.Size(shape).numel() for _, shape, _ in found.export.tensors())
    mesh = blueprint.dims.describe(world_size=found.world_size, num_layers=blueprint.config.num_layers)
    return f"{blueprint.hf.model_type}, {text.count(numel)} parameters in {dtype_name(blueprint.dtype)}: {mesh}"


def layers_of(stage: Stage) -> str:
    """``E 0-7``, ``8-15``, ``56-63 L``, ``-``."""
    layers = stage.layers
    middle = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else "".join(map(str, layers))
    words = ["E"] * stage.embedding + [middle] * bool(middle) + ["L"] * stage.loss
    return " ".join(words) or "-"


def _table(found: MeshPlan) -> Table:
    table = Table(caption=_caption(found), caption_justify="left")
    for name in ("pp", "vp", "layers", "parameters", "bytes", "rank"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("largest tensor", overflow="fold")
    for pp_rank, chunks in enumerate(found.ranks):
        total = text.num_bytes(sum(chunk.num_bytes for chunk in chunks))
        for chunk in chunks:
            first = chunk is chunks[0]
            table.add_row(
                str(pp_rank) if first else "",
                str(chunk.stage.vp_stage),
                layers_of(chunk.stage),
                text.count(chunk.num_parameters),
                _by_dtype(chunk),
                total if first else "",
                _largest(chunk),
            )
    return table


def _caption(found: MeshPlan) -> str:
    dims, world_size = found.blueprint.dims, found.world_size
    totals = [sum(chunk.num_bytes for chunk in chunks) for chunks in found.ranks]
    alike = text.plural(world_size // dims.pp, "rank")
    return (
        f"One rank's numbers; {alike} of each stage hold the like (TP{dims.tp} CP{dims.cp} "
        f"DP{dims.dp(world_size)}). Over its chunks a rank holds {text.num_bytes(min(totals))} to "
        f"{text.num_bytes(max(totals))}. "
        f"E is the embedding, L the final norm and the output layer.{_layout(dims)}"
    )


def _layout(dims: ParallelDims) -> str:
    return f" Layout: {dims.layout}" if dims.layout else ""


def _by_dtype(chunk: Chunk) -> str:
    sizes: Counter[str] = Counter()
    for held in _held(chunk):
        sizes[dtype_name(held.dtype)] += held.num_bytes
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return ", ".join(f"{text.num_bytes(size)} {short.get(name, name)}" for name, size in sizes.most_common()) or "-"


def _largest(chunk: Chunk) -> str:
    largest = max(_held(chunk), key=lambda held: held.num_bytes, default=None)
    if largest is None:
        return "-"
    name = largest.mcore.removesuffix(".weight").rsplit(".", 1)[-1]
    return f"{name}, {text.num_bytes(largest.num_bytes)}"


def _held(chunk: Chunk) -> Iterable[Held]:
    return (held for cell in chunk.cells for held in cell.held)


def _export(found: MeshPlan) -> str:
    sizes = [torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in found.export.tensors()]
    buckets = found.export.buckets
    window = max((bucket.num_bytes for bucket in buckets), default=0)
    return (
        f"An export yields {text.plural(len(sizes), 'HF tensor')}, {text.num_bytes(sum(sizes))} in all and the largest "
        f"{text.num_bytes(max(sizes))}, in {text.plural(len(buckets), 'bucket')} of at most "
        f"{text.num_bytes(BUCKET_BYTES)} or one parameter; a rank sends at most {text.num_bytes(window)} per bucket."
    )
