"""Draws a plan: a row for each pipeline rank, in it a bar for each chunk, and in the bar a cell for each layer.

A cell is as wide as the bytes of its layer.
"""

from __future__ import annotations

import colorsys
import math
from pathlib import Path

from mcore_bridge.commands import text
from mcore_bridge.commands.plan.mesh_plan import Cell, Chunk, MeshPlan
from mcore_bridge.commands.plan.tables import Planned, title
from mcore_bridge.commands.svg import Picture
from mcore_bridge.errors import CheckpointError

_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 130, 72, 56  # margins
_WIDTH = 960  # of the widest row
_ROW, _GAP = 26, 8  # height of a row, and space between two
_BETWEEN = 3  # space between two bars of a row
_DIGIT = 6.4  # width of a character at font size 11
_ENDS = {"tower": "V", "embedding": "E", "mtp": "M", "output": "L"}


def draw(planned: Planned, path: Path) -> None:
    """Draw the picture to an SVG file.

    Raises:
        CheckpointError: it cannot be written there.
    """
    plan = planned.mesh_plan
    totals = [sum(chunk.num_bytes for chunk in chunks) for chunks in plan.ranks]
    scale = _WIDTH / max(totals)
    height = _TOP + len(totals) * (_ROW + _GAP) + _BOTTOM
    bottom = height - _BOTTOM
    picture = Picture(_LEFT + _WIDTH + (plan.blueprint.dims.vp - 1) * _BETWEEN + _RIGHT, height)
    picture.text(_LEFT, 28, _short(title(planned)), font_size=15, font_weight="bold")
    picture.text(_LEFT, 48, _subtitle(plan))
    _draw_axis(picture, max(totals), scale, bottom)
    for pp_rank, chunks in enumerate(plan.ranks):
        _draw_row(picture, plan, pp_rank, chunks, scale)
    picture.text(_LEFT, bottom + 36, "bytes of parameters on one rank", fill="#777")
    try:
        path.write_text(str(picture), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"--picture must be a file that can be written, found {path}: {error.strerror}. Make its folder, or choose "
            "another one that you may write to"
        ) from error


def _short(line: str) -> str:
    return line if len(line) <= 120 else line[:119] + "..."


def _subtitle(plan: MeshPlan) -> str:
    dims, world_size = plan.blueprint.dims, plan.world_size
    alike = text.plural(world_size // dims.pp, "rank")
    tower = "the models of images (V), " if plan.blueprint.provenance.tower else ""
    mtp = "multi-token prediction (M), " if plan.blueprint.config.mtp_num_layers else ""
    return (
        f"A row is a pipeline rank ({alike} of it hold as much), a colour a stage, a cell a layer. "
        f"Darker cells: {tower}the embedding (E), {mtp}the final norm and output layer (L)."
    )


def _draw_axis(picture: Picture, largest: int, scale: float, bottom: int) -> None:
    """Draw vertical lines at round numbers of bytes."""
    step: float = 10 ** math.floor(math.log10(largest))
    while largest / step < 4:
        step /= 2
    for index in range(int(largest / step) + 1):
        x = _LEFT + index * step * scale
        picture.line(x, _TOP - 8, x, bottom, stroke="#ddd")
        picture.text(x, bottom + 16, text.num_bytes(index * step), text_anchor="middle", fill="#777")


def _draw_row(picture: Picture, plan: MeshPlan, pp_rank: int, chunks: tuple[Chunk, ...], scale: float) -> None:
    y = _TOP + pp_rank * (_ROW + _GAP)
    x: float = _LEFT
    picture.text(_LEFT - 10, y + _ROW / 2 + 4, f"pp rank {pp_rank}", text_anchor="end")
    for chunk in chunks:
        _draw_bar(picture, plan, chunk, x, y, scale)
        x += chunk.num_bytes * scale + _BETWEEN
    total = sum(chunk.num_bytes for chunk in chunks)
    numel = sum(chunk.num_parameters for chunk in chunks)
    picture.text(x + 6, y + _ROW / 2 + 4, f"{text.num_bytes(total)}, {text.count(numel)}", fill="#555")


def _draw_bar(picture: Picture, plan: MeshPlan, chunk: Chunk, x: float, y: float, scale: float) -> None:
    stages = plan.blueprint.stages
    hue = (0.58 + stages.index(chunk.stage) / len(stages)) % 1.0
    are_numbered = all(_fits(cell.name, cell.num_bytes * scale) for cell in chunk.cells if cell.name.isdigit())
    for cell in chunk.cells:
        width = cell.num_bytes * scale
        color = _color(hue, 0.80 if cell.name.isdigit() else 0.62)
        border = min(1.0, width / 4)
        picture.rect(x, y, width, _ROW, title=_described(cell, chunk), fill=color, stroke="#fff", stroke_width=border)
        word = _ENDS.get(cell.name.partition(" ")[0], cell.name if are_numbered else "")
        if _fits(word, width):
            picture.text(x + width / 2, y + _ROW / 2 + 4, word, text_anchor="middle")
        x += width


def _fits(word: str, width: float) -> bool:
    return (len(word) + 1) * _DIGIT < width


def _described(cell: Cell, chunk: Chunk) -> str:
    name = f"layer {cell.name}" if cell.name.isdigit() else cell.name
    stage = f"pp rank {chunk.stage.pp_rank}, virtual stage {chunk.stage.vp_stage}"
    return f"{name} ({stage}): {text.count(cell.num_parameters)} parameters, {text.num_bytes(cell.num_bytes)}"


def _color(hue: float, lightness: float) -> str:
    red, green, blue = (round(255 * value) for value in colorsys.hls_to_rgb(hue, lightness, 0.55))
    return f"#{red:02x}{green:02x}{blue:02x}"
