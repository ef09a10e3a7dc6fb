"""Draws a plan as an SVG: a row per pipeline rank, a bar per chunk, a cell per layer. Widths are bytes."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator
from html import escape
from pathlib import Path

from mcore_bridge.commands import text
from mcore_bridge.commands.plan.mesh_plan import Cell, Chunk, MeshPlan
from mcore_bridge.commands.plan.tables import title
from mcore_bridge.errors import CheckpointError

_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 130, 72, 56  # margins
_WIDTH = 960  # of the widest row
_ROW, _GAP = 26, 8  # height of a row, and space between two
_BETWEEN = 3  # space between two bars of a row
_DIGIT = 6.4  # width of a character at font size 11
_ENDS = {"embedding": "E", "mtp": "M", "output": "L"}


def write_svg(mesh_plan: MeshPlan, path: Path) -> None:
    """Writes the picture to a file.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        path.write_text(draw_svg(mesh_plan), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"--picture must be a file that can be written, found {path}: {error.strerror}. Make its folder, or choose "
            "another one that you may write to"
        ) from error


def draw_svg(mesh_plan: MeshPlan) -> str:
    """The picture as the text of an SVG file."""
    totals = [sum(chunk.num_bytes for chunk in chunks) for chunks in mesh_plan.ranks]
    scale = _WIDTH / max(totals)
    height = _TOP + len(totals) * (_ROW + _GAP) + _BOTTOM
    width = _LEFT + _WIDTH + (mesh_plan.blueprint.dims.vp - 1) * _BETWEEN + _RIGHT
    bottom = height - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(_LEFT, 28, _short(title(mesh_plan)), size=15, weight="bold"),
        _text(_LEFT, 48, _subtitle(mesh_plan)),
        *_axis(max(totals), scale, bottom),
    ]
    for pp_rank, chunks in enumerate(mesh_plan.ranks):
        parts.extend(_row(mesh_plan, pp_rank, chunks, scale))
    parts.append(_text(_LEFT, bottom + 36, "bytes of parameters on one rank", color="#777"))
    return "\n".join([*parts, "</svg>", ""])


def _short(line: str) -> str:
    return line if len(line) <= 120 else line[:119] + "..."


def _subtitle(mesh_plan: MeshPlan) -> str:
    dims, world_size = mesh_plan.blueprint.dims, mesh_plan.world_size
    alike = text.plural(world_size // dims.pp, "rank")
    mtp = "multi-token prediction (M), " if mesh_plan.blueprint.config.mtp_num_layers else ""
    return (
        f"A row is a pipeline rank ({alike} of it hold as much), a colour a stage, a cell a layer. "
        f"Darker cells: the embedding (E), {mtp}the final norm and output layer (L)."
    )


def _axis(largest: int, scale: float, bottom: int) -> Iterator[str]:
    """Vertical lines at round numbers of bytes."""
    step: float = 10 ** math.floor(math.log10(largest))
    while largest / step < 4:
        step /= 2
    for index in range(int(largest / step) + 1):
        x = _LEFT + index * step * scale
        yield f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>'
        yield _text(x, bottom + 16, text.num_bytes(index * step), anchor="middle", color="#777")


def _row(mesh_plan: MeshPlan, pp_rank: int, chunks: tuple[Chunk, ...], scale: float) -> Iterator[str]:
    y = _TOP + pp_rank * (_ROW + _GAP)
    x: float = _LEFT
    yield _text(_LEFT - 10, y + _ROW / 2 + 4, f"pp rank {pp_rank}", anchor="end")
    for chunk in chunks:
        yield from _bar(mesh_plan, chunk, x, y, scale)
        x += chunk.num_bytes * scale + _BETWEEN
    total = sum(chunk.num_bytes for chunk in chunks)
    numel = sum(chunk.num_parameters for chunk in chunks)
    yield _text(x + 6, y + _ROW / 2 + 4, f"{text.num_bytes(total)}, {text.count(numel)}", color="#555")


def _bar(mesh_plan: MeshPlan, chunk: Chunk, x: float, y: float, scale: float) -> Iterator[str]:
    stages = mesh_plan.blueprint.stages
    hue = (0.58 + stages.index(chunk.stage) / len(stages)) % 1.0
    numbered = all(_fits(cell.name, cell.num_bytes * scale) for cell in chunk.cells if cell.name.isdigit())
    for cell in chunk.cells:
        width = cell.num_bytes * scale
        yield _cell(cell, chunk, hue, x, y, width)
        word = _ENDS.get(cell.name.partition(" ")[0], cell.name if numbered else "")
        if _fits(word, width):
            yield _text(x + width / 2, y + _ROW / 2 + 4, word, anchor="middle")
        x += width


def _fits(word: str, width: float) -> bool:
    return (len(word) + 1) * _DIGIT < width


def _cell(cell: Cell, chunk: Chunk, hue: float, x: float, y: float, width: float) -> str:
    name = f"layer {cell.name}" if cell.name.isdigit() else cell.name
    stage = f"pp rank {chunk.stage.pp_rank}, virtual stage {chunk.stage.vp_stage}"
    said = f"{name} ({stage}): {text.count(cell.num_parameters)} parameters, {text.num_bytes(cell.num_bytes)}"
    color = _color(hue, 0.80 if cell.name.isdigit() else 0.62)
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" fill="{color}" stroke="#fff" '
        f'stroke-width="{min(1.0, width / 4):.2f}"><title>{escape(said)}</title></rect>'
    )


def _color(hue: float, lightness: float) -> str:
    red, green, blue = (round(255 * value) for value in colorsys.hls_to_rgb(hue, lightness, 0.55))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 11,
    weight: str = "normal",
    anchor: str = "start",
    color: str = "#333",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{color}">{escape(words)}</text>'
    )
