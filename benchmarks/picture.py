"""Draw the newest figures of ``peers.py`` for the README: ``python benchmarks/picture.py``; ``--check`` compares only.

They are the lines of JSON that ``peers.py`` printed, kept as ``results/DATE_peers_HARDWARE.jsonl``, and those of a
model with experts as ``results/DATE_peers-experts_HARDWARE.jsonl``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mcore_bridge.commands.svg import Picture

ROOT = Path(__file__).parent.parent
PICTURES = {"speed.svg": "*_peers_*.jsonl", "speed-experts.svg": "*_peers-experts_*.jsonl"}
NAMES = {
    "ours": "mcore_bridge",
    "megatron_bridge": "Megatron-Bridge",
    "mcore_bridge": "ModelScope mcore-bridge",
    "mbridge": "mbridge",
}
MEASURES = {"export": "export, all ranks get all tensors", "load": "load, warm page cache", "save": "save, to memory"}
WIDTH, LABEL, BAR, ROW, HEAD = 820, 250, 440, 22, 34


def main() -> None:
    """Draw, or say that what is there is not what would be drawn."""
    for name, pattern in PICTURES.items():
        picture, newest = ROOT / "docs" / "images" / name, max((ROOT / "benchmarks" / "results").glob(pattern))
        text = draw([json.loads(line) for line in newest.read_text().splitlines()], newest.stem)
        if "--check" not in sys.argv:
            picture.write_text(text)
        elif picture.read_text() != text:
            sys.exit(f"{name} does not show {newest.name}: run python benchmarks/picture.py")


def draw(rows: list[dict[str, Any]], source: str) -> str:
    """The picture as the text of an SVG file: a panel for each measure, a bar for each call."""
    panels = [[row for row in rows if row["measure"] == measure] for measure in MEASURES]
    picture = Picture(WIDTH, 62 + sum(HEAD + ROW * len(panel) + 12 for panel in panels), font_size=12)
    first = rows[0]
    machine = f"{first['ranks']} {first['device']}, torch {first['torch']}, megatron-core {first['megatron-core']}"
    heading = f"Seconds for {first['case']}, {first['gb']:.1f} GB"
    picture.text(20, 28, heading, font_size=15, font_weight="bold")
    picture.text(20, 46, f"{machine}; benchmarks/results/{source}.jsonl", fill="#777")
    top = 62
    for title, panel in zip(MEASURES.values(), panels, strict=True):
        draw_panel(picture, title, sorted(panel, key=lambda row: float(row["median_s"])), top)
        top += HEAD + ROW * len(panel) + 12
    return str(picture)


def draw_panel(picture: Picture, title: str, rows: list[dict[str, Any]], top: int) -> None:
    """Draw a title and a bar for each row; the longest is as long as the panel is wide."""
    longest = max(float(row["median_s"]) for row in rows)
    picture.text(20, top + 20, title, font_weight="bold")
    for number, row in enumerate(rows):
        y, seconds = top + HEAD + number * ROW, float(row["median_s"])
        length = seconds / longest * BAR
        picture.text(LABEL, y + 11, label(row), text_anchor="end")
        color = "#2a6fb0" if row["library"] == "ours" else "#b9c3cc"
        picture.rect(LABEL + 8, y, max(length, 1.0), 14, fill=color)
        picture.text(LABEL + 16 + length, y + 11, f"{seconds:.3g} s")


def label(row: dict[str, Any]) -> str:
    """The library, its release, and how it was called where that is not the plain way."""
    call = row.get("call", "default")
    version = "" if row["version"] == "checkout" else f" {row['version']}"
    return f"{NAMES[row['library']]}{version}{'' if call == 'default' else f', {call}'}"


if __name__ == "__main__":
    main()
