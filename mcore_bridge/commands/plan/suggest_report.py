"""What ``plan --gpus`` prints and draws: suggested meshes with the memory of their fullest rank."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from mcore_bridge.commands import text
from mcore_bridge.commands.options import Batch
from mcore_bridge.commands.plan.suggest import Search, Suggestion
from mcore_bridge.commands.plan.training_memory import TrainingMemory
from mcore_bridge.commands.svg import Picture, write
from mcore_bridge.config.mesh.parallel_dims import ParallelDims

PARTS = tuple(field.name for field in fields(TrainingMemory))
_COLORS = dict(zip(PARTS, ("#2a6fb0", "#6aa5d8", "#b8d4ec", "#e59f4c", "#f3d2a8"), strict=True))
_SHORT = dict(zip(PARTS, ("params", "grads", "Adam", "activ.", "logits"), strict=True))
_SHOWN = 3  # meshes of one reason
_LEFT, _TOP, _WIDTH, _ROW, _GAP = 170, 84, 700, 26, 10


def render(search: Search) -> Group:
    """The report: a row per suggestion, and why other meshes are not among them."""
    table = Table(caption=_caption(search.batch), caption_justify="left", box=SIMPLE_HEAD, padding=0)
    rows = [_row(suggestion, search.has_experts) for suggestion in search.suggestions]
    for name in rows[0] if rows else ():
        is_mesh = name == "mesh"
        table.add_column(name, justify="left" if is_mesh else "right", no_wrap=not is_mesh)
    for row in rows:
        table.add_row(*row.values())
    return Group(_title(search), *([table] if search.suggestions else []), *_others(search))


def draw(search: Search, path: Path) -> None:
    """Draw a bar for each suggestion to an SVG file: the memory of its fullest rank, beside that of a GPU.

    Raises:
        CheckpointError: it cannot be written there.
    """
    height = _TOP + len(search.suggestions) * (_ROW + _GAP) + 30
    picture = Picture(_LEFT + _WIDTH + 110, height)
    picture.text(20, 28, _title(search), font_size=15, font_weight="bold")
    for number, name in enumerate(PARTS):
        picture.rect(_LEFT + 120 * number, 46, 12, 12, fill=_COLORS[name])
        picture.text(_LEFT + 120 * number + 18, 56, name)
    scale = _WIDTH / search.gpu_bytes
    for number, suggestion in enumerate(search.suggestions):
        _draw_bar(picture, suggestion, _TOP + number * (_ROW + _GAP), scale)
    picture.line(_LEFT + _WIDTH, _TOP - 8, _LEFT + _WIDTH, height - 24, stroke="#c33")
    picture.text(
        _LEFT + _WIDTH, height - 8, f"{text.num_bytes(search.gpu_bytes)}, a GPU", text_anchor="middle", fill="#c33"
    )
    write(picture, path)


def _draw_bar(picture: Picture, suggestion: Suggestion, y: float, scale: float) -> None:
    x: float = _LEFT
    picture.text(_LEFT - 10, y + _ROW / 2 + 4, str(suggestion.mesh), text_anchor="end")
    for name in PARTS:
        part = getattr(suggestion.memory, name)
        picture.rect(x, y, part * scale, _ROW, title=f"{name}: {text.num_bytes(part)}", fill=_COLORS[name])
        x += part * scale
    picture.text(x + 6, y + _ROW / 2 + 4, text.num_bytes(suggestion.memory.total), fill="#555")


def _row(suggestion: Suggestion, has_experts: bool) -> dict[str, str]:
    memory = suggestion.memory
    return {
        "mesh": str(suggestion.mesh),
        "DP": str(suggestion.dp),
        **({"EDP": str(suggestion.edp)} if has_experts else {}),
        **{_SHORT[name]: _gigabytes(getattr(memory, name)) for name in PARTS},
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
