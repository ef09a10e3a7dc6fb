"""Draws the newest figures for README and site: ``python benchmarks/picture.py``; ``--check`` compares only.

Steps of a training are lines that ``examples/grpo.py`` wrote. Whole syncs of an engine are lines of JSON, copied from
``results/DATE_engine_HARDWARE.md``. The other lines were printed by ``peers.py``. They are kept as
``results/DATE_peers_HARDWARE.jsonl``, and for a model with experts as ``results/DATE_peers-experts_HARDWARE.jsonl``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mcore_bridge.commands.svg import Picture

ROOT = Path(__file__).parent.parent
NAMES = {
    "ours": "mcore_bridge",
    "megatron_bridge": "Megatron-Bridge",
    "mcore_bridge": "ModelScope mcore-bridge",
    "mbridge": "mbridge",
}
MEASURES = {"export": "export, all ranks get all tensors", "load": "load, warm page cache", "save": "save, to memory"}
WIDTH, LABEL, BAR, ROW, HEAD, TOP = 820, 270, 430, 22, 34, 62
OURS, THEIRS = "#2a6fb0", "#9aa7b3"


def main() -> None:
    """Draw the pictures, or report that the existing ones are outdated."""
    for name, (pattern, draw) in PICTURES.items():
        picture, newest = ROOT / "docs" / "images" / name, max((ROOT / "benchmarks" / "results").glob(pattern))
        text = draw([json.loads(line) for line in newest.read_text().splitlines()], newest.stem)
        if "--check" not in sys.argv:
            picture.write_text(text)
        elif picture.read_text() != text:
            sys.exit(f"{name} does not show {newest.name}: run python benchmarks/picture.py")


def draw_peers(rows: list[dict[str, Any]], source: str) -> str:
    """Seconds beside other libraries: a panel for each measure, a bar for each call."""
    first = rows[0]
    machine = f"{first['ranks']} {first['device']}, torch {first['torch']}, megatron-core {first['megatron-core']}"
    panels = {
        title: [(label(row), float(row["median_s"]), row["library"] == "ours") for row in rows if row["measure"] == key]
        for key, title in MEASURES.items()
    }
    return draw(panels, f"Seconds for {first['case']}, {first['gb']:.1f} GB", f"{machine}; {source}.jsonl")


def draw_syncs(rows: list[dict[str, Any]], source: str) -> str:
    """Seconds of a whole sync into an engine: a panel for each model, a bar for each way."""
    panels: dict[str, list[tuple[str, float, bool]]] = {}
    for row in rows:
        panels.setdefault(row["case"], []).append((row["what"], float(row["median_s"]), row["ours"]))
    return draw(panels, "Seconds until vLLM has new weights", f"trainer and vLLM 0.24 on one H100; {source}.md")


def draw_training(rows: list[dict[str, Any]], source: str) -> str:
    """The reward of each step, and the mean of the last ten; below, the seconds of the parts of a step."""
    picture = Picture(WIDTH, TOP + 240, dark=True, font_size=12)
    picture.text(20, 28, "SmolLM2-135M learns to add: share of right sums", font_size=15, font_weight="bold")
    picture.text(20, 46, f"GRPO with megatron-core and vLLM 0.26 on one H200; {source}.md", opacity=0.7)
    left, width, height = 60, WIDTH - 100, 180
    rewards = [float(row["reward"]) for row in rows]
    means = [fmean(rewards[max(0, step - 9) : step + 1]) for step in range(len(rewards))]
    across = width / (len(rewards) - 1)
    for share in (0.0, 0.5, 1.0):
        y = TOP + height * (1 - share)
        picture.line(left, y, left + width, y, stroke=THEIRS, stroke_width=0.5)
        picture.text(left - 8, y + 4, f"{share:.1f}", text_anchor="end")
    for values, colour, thick in ((rewards, THEIRS, 1.0), (means, OURS, 2.5)):
        points = [(left + step * across, TOP + height * (1 - value)) for step, value in enumerate(values)]
        picture.polyline(points, stroke=colour, stroke_width=thick)
    picture.text(left, TOP + height + 20, "step 0")
    picture.text(left + width, TOP + height + 20, f"step {rows[-1]['step']}", text_anchor="end")
    parts = {part: median(row["seconds"][part] for row in rows[5:]) for part in ("sync", "rollout", "train")}
    words = ", ".join(f"{part} {seconds:.3g} s" for part, seconds in parts.items())
    picture.text(left + width / 2, TOP + height + 44, f"a step in the median: {words}", text_anchor="middle")
    return str(picture)


PICTURES: dict[str, tuple[str, Callable[[list[dict[str, Any]], str], str]]] = {
    "trained.svg": ("*_grpo_*.jsonl", draw_training),
    "sync.svg": ("*_engine_*.jsonl", draw_syncs),
    "speed.svg": ("*_peers_*.jsonl", draw_peers),
    "speed-experts.svg": ("*_peers-experts_*.jsonl", draw_peers),
}


def draw(panels: dict[str, list[tuple[str, float, bool]]], heading: str, source: str) -> str:
    """The text of an SVG file: bars of a name, seconds, and whether it is ours."""
    picture = Picture(
        WIDTH, TOP + sum(HEAD + ROW * len(bars) + 12 for bars in panels.values()), dark=True, font_size=12
    )
    picture.text(20, 28, heading, font_size=15, font_weight="bold")
    picture.text(20, 46, source, opacity=0.7)
    top = TOP
    for title, bars in panels.items():
        draw_panel(picture, title, sorted(bars, key=lambda bar: bar[1]), top)
        top += HEAD + ROW * len(bars) + 12
    return str(picture)


def draw_panel(picture: Picture, title: str, bars: list[tuple[str, float, bool]], top: int) -> None:
    """Draw a title and the bars; the longest is as long as the panel is wide."""
    longest = max(seconds for _, seconds, _ in bars)
    picture.text(20, top + 20, title, font_weight="bold")
    for number, (name, seconds, is_ours) in enumerate(bars):
        y, length = top + HEAD + number * ROW, seconds / longest * BAR
        picture.text(LABEL, y + 11, name, text_anchor="end")
        picture.rect(LABEL + 8, y, max(length, 1.0), 14, fill=OURS if is_ours else THEIRS)
        picture.text(LABEL + 16 + length, y + 11, f"{seconds:.3g} s")


def label(row: dict[str, Any]) -> str:
    """The library, its release, and the way of its call if that is not the default."""
    call = row.get("call", "default")
    version = "" if row["version"] == "checkout" else f" {row['version']}"
    return f"{NAMES[row['library']]}{version}{'' if call == 'default' else f', {call}'}"


if __name__ == "__main__":
    main()
