"""The report of ``plan --gpus``: suggested meshes, with the memory of their fullest rank."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from mcore_bridge.commands import text
from mcore_bridge.commands.options import Batch
from mcore_bridge.commands.plan.suggest import Search, Suggestion
from mcore_bridge.config.mesh.parallel_dims import ParallelDims

_PARTS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "Adam",
    "activations": "activ.",
    "logits": "logits",
}
_SHOWN = 3  # meshes of one reason


def render(search: Search) -> Group:
    """The report: a row for each suggestion, and the reasons why other meshes were left out."""
    table = Table(caption=_caption(search.batch), caption_justify="left", box=SIMPLE_HEAD, padding=0)
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


def _caption(batch: Batch) -> str:
    recomputed = ", with only the inputs of layers kept" if batch.recompute else ""
    sequences = f"{batch.micro_batch} x {batch.sequence} tokens a microbatch{recomputed}"
    return (
        f"GB of the fullest rank at {sequences}; gradients in fp32, Adam sharded over DP and EDP, flash attention, "
        "no dropout. Estimates are fitted to seven steps on one GPU, to 3 %: leave room elsewhere. Export: "
        "seconds to receive all weights. Best first: fewest ranks in a replica, then fewest pipeline ranks."
    )


def _others(search: Search) -> list[str]:
    lines = []
    if search.too_large:
        least = search.too_large[0]
        number = text.plural(len(search.too_large), "mesh")
        advice = "" if search.batch.recompute else " --recompute keeps fewer activations."
        needed = text.num_bytes(least.bytes)
        lines.append(f"Too large for a GPU: {number}, of which {least.mesh} needs the least, {needed}.{advice}")
    lines += [f"refused: {_meshes(refused.meshes)}: {refused.reason}" for refused in search.refused]
    return ["", *lines] if lines else []


def _meshes(meshes: tuple[ParallelDims, ...]) -> str:
    rest = f" and {len(meshes) - _SHOWN} more" if len(meshes) > _SHOWN else ""
    return ", ".join(map(str, meshes[:_SHOWN])) + rest
