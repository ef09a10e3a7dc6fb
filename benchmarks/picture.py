"""Draw the newest figures of ``peers.py`` for the README: ``python benchmarks/picture.py``; ``--check`` compares only.

They are the lines of JSON that ``peers.py`` printed, kept as ``results/DATE_peers_HARDWARE.jsonl``, and those of a
model with experts as ``results/DATE_peers-experts_HARDWARE.jsonl``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

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
        picture, newest = ROOT / "docs" / name, max((ROOT / "benchmarks" / "results").glob(pattern))
        text = draw([json.loads(line) for line in newest.read_text().splitlines()], newest.stem)
        if "--check" not in sys.argv:
            picture.write_text(text)
        elif picture.read_text() != text:
            sys.exit(f"{name} does not show {newest.name}: run python benchmarks/picture.py")


def draw(rows: list[dict[str, Any]], source: str) -> str:
    """The picture as the text of an SVG file: a panel for each measure, a bar for each call."""
    panels, top = [], 62
    for measure, title in MEASURES.items():
        found = [row for row in rows if row["measure"] == measure]
        panels += panel(title, sorted(found, key=lambda row: float(row["median_s"])), top)
        top += HEAD + ROW * len(found) + 12
    first = rows[0]
    machine = f"{first['ranks']} {first['device']}, torch {first['torch']}, megatron-core {first['megatron-core']}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#333">',
            f'<rect width="{WIDTH}" height="{top}" fill="#fff"/>',
            f'<text x="20" y="28" font-size="15" font-weight="bold">Seconds for {escape(first["case"])}, '
            f"{first['gb']:.1f} GB</text>",
            f'<text x="20" y="46" fill="#777">{escape(machine)}; benchmarks/results/{escape(source)}.jsonl</text>',
            *panels,
            "</svg>",
            "",
        ]
    )


def panel(title: str, rows: list[dict[str, Any]], top: int) -> Iterator[str]:
    """A title and a bar for each row; the longest is as long as the panel is wide."""
    longest = max(float(row["median_s"]) for row in rows)
    yield f'<text x="20" y="{top + 20}" font-weight="bold">{escape(title)}</text>'
    for number, row in enumerate(rows):
        y, seconds = top + HEAD + number * ROW, float(row["median_s"])
        length = seconds / longest * BAR
        color = "#2a6fb0" if row["library"] == "ours" else "#b9c3cc"
        yield f'<text x="{LABEL}" y="{y + 11}" text-anchor="end">{escape(label(row))}</text>'
        yield f'<rect x="{LABEL + 8}" y="{y}" width="{max(length, 1):.1f}" height="14" fill="{color}"/>'
        yield f'<text x="{LABEL + 16 + length:.1f}" y="{y + 11}">{seconds:.3g} s</text>'


def label(row: dict[str, Any]) -> str:
    """The library, its release, and how it was called where that is not the plain way."""
    call = row.get("call", "default")
    version = "" if row["version"] == "checkout" else f" {row['version']}"
    return f"{NAMES[row['library']]}{version}{'' if call == 'default' else f', {call}'}"


if __name__ == "__main__":
    main()
