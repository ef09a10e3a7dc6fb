"""The answer of ``plan --gpus``: suggested meshes with the memory of their fullest rank, and a report of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from mcore_bridge.commands import text
from mcore_bridge.commands.options import Batch
from mcore_bridge.commands.plan.training_memory import TrainingMemory
from mcore_bridge.config.mesh.parallel_dims import ParallelDims

_PARTS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "Adam",
    "activations": "activ.",
    "logits": "logits",
}
_SHOWN = 3  # meshes of one reason


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A mesh that fits.

    Attributes:
        mesh: as of ``verify``.
        dp: data parallel size.
        edp: data parallel size of the experts.
        memory: bytes of the fullest rank.
        export_seconds: the time to receive all weights at a given bandwidth. ``plan`` also counts padding.
    """

    mesh: ParallelDims
    dp: int
    edp: int
    memory: TrainingMemory
    export_seconds: float


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A mesh that needs more memory than a GPU has.

    Attributes:
        mesh: as of ``verify``.
        bytes: the memory of the fullest rank.
    """

    mesh: ParallelDims
    bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The meshes that are refused for one reason.

    Attributes:
        reason: the message of the error.
        meshes: each as of ``verify``.
    """

    reason: str
    meshes: tuple[ParallelDims, ...]


@dataclass(frozen=True, slots=True)
class Enough:
    """GPUs for which a mesh fits.

    Attributes:
        gpus: ranks of the whole job.
        recompute: as of ``batch``.
    """

    gpus: int
    recompute: bool


@dataclass(frozen=True, slots=True)
class Search:
    """The meshes that were compared for a number of GPUs.

    Attributes:
        gpus: ranks of the whole job.
        gpus_per_node: GPUs of a node.
        gpu_bytes: the bytes that a GPU may hold.
        batch: the batch of one step on one replica.
        suggestions: meshes that fit, best first.
        too_large: meshes that do not fit, the smallest first.
        refused: meshes that cannot be built, by reason.
        enough: if nothing fits, the least doublings of the GPUs for which something does.
        has_experts: whether the model has routed experts.
    """

    gpus: int
    gpus_per_node: int
    gpu_bytes: int
    batch: Batch
    suggestions: tuple[Suggestion, ...]
    too_large: tuple[TooLarge, ...]
    refused: tuple[Refused, ...]
    enough: tuple[Enough, ...]
    has_experts: bool = field(repr=False)


def render(search: Search) -> Group:
    """The report: a row for each suggestion, and the reasons why other meshes were left out."""
    table = Table(caption=_caption(search), caption_justify="left", box=SIMPLE_HEAD, padding=0)
    rows = [_row(suggestion, search.has_experts) for suggestion in search.suggestions]
    for name in rows[0] if rows else ():
        is_mesh = name == "mesh"
        table.add_column(name, justify="left" if is_mesh else "right", no_wrap=not is_mesh)
    for row in rows:
        table.add_row(*row.values())
    return Group(_title(search), *([table] if search.suggestions else []), *_others(search))


def _row(suggestion: Suggestion, has_experts: bool) -> dict[str, str]:
    memory = suggestion.memory
    return {
        "mesh": str(suggestion.mesh),
        "DP": str(suggestion.dp),
        **({"EDP": str(suggestion.edp)} if has_experts else {}),
        **{short: _gigabytes(getattr(memory, name)) for name, short in _PARTS.items()},
        "sum": _gigabytes(memory.total),
        "export": f"{suggestion.export_seconds:.3g} s",
    }


def _gigabytes(value: int) -> str:
    """Without a unit, so that ten columns fit into 80 characters."""
    return f"{value / 1e9:.{2 if value < 1e10 else 1}f}"


def _title(search: Search) -> str:
    gpus = f"{text.plural(search.gpus, 'GPU')} of {text.num_bytes(search.gpu_bytes)}"
    return (
        f"{text.plural(len(search.suggestions), 'mesh')} for {gpus}" if search.suggestions else f"no mesh fits {gpus}"
    )


def _caption(search: Search) -> str:
    batch = search.batch
    experts = f"experts within a node of {search.gpus_per_node}, " if search.has_experts else ""
    recomputed = ", with only the inputs of layers kept" if batch.recompute else ""
    sequences = f"{batch.micro_batch} x {batch.sequence} tokens a microbatch{recomputed}"
    return (
        f"GB of the fullest rank at {sequences}; gradients in fp32, Adam sharded over DP and EDP, flash attention, "
        "no dropout. Estimates are fitted to seven steps on one GPU, to 3 %: leave room elsewhere. Export: "
        f"seconds to receive all weights. Best first: {experts}fewest ranks in a replica, then fewest pipeline ranks."
    )


def _others(search: Search) -> list[str]:
    lines = []
    if search.too_large:
        least = search.too_large[0]
        number = text.plural(len(search.too_large), "mesh")
        advice = "" if search.batch.recompute or search.enough else " --recompute keeps fewer activations."
        needed = text.num_bytes(least.bytes)
        lines.append(f"Too large for a GPU: {number}, of which {least.mesh} needs the least, {needed}.{advice}")
    if search.enough:
        fits = [f"{enough.gpus} GPUs{' with --recompute' * enough.recompute}" for enough in search.enough]
        lines.append(f"Fits from {', or from '.join(fits)}.")
    lines += [f"refused: {_meshes(refused.meshes)}: {refused.reason}" for refused in search.refused]
    return ["", *lines] if lines else []


def _meshes(meshes: tuple[ParallelDims, ...]) -> str:
    rest = f" and {len(meshes) - _SHOWN} more" if len(meshes) > _SHOWN else ""
    return ", ".join(map(str, meshes[:_SHOWN])) + rest
