"""Configs of published models, as ``tests/data/published`` has them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "data" / "published"


@dataclass(frozen=True, slots=True)
class Published:
    """One checkpoint: what its repository publishes as JSON, and where this was seen.

    ``partial`` says what the source leaves out, where it quotes a part only.
    """

    name: str
    source: str
    config: dict[str, Any]
    hf_quant_config: dict[str, Any] | None = None
    inferred: str = ""
    partial: str = ""

    def write(self, folder: Path) -> Path:
        """The files of the checkpoint in ``folder``, without weights."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.hf_quant_config is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(self.hf_quant_config))
        return folder


def records() -> list[Published]:
    """Every record, by name."""
    lines = [line for path in FOLDER.glob("*.jsonl") for line in path.read_text().splitlines()]
    read = [Published(**expand(json.loads(line))) for line in lines]
    return sorted(read, key=lambda record: record.name.lower())


def expand(value: Any) -> Any:
    """``value`` with its short forms written out.

    ``{"cycle": [a, b], "length": 5}`` is ``[a, b, a, b, a]``, and ``{"runs": [[a, 2], [b, 1]]}`` is ``[a, a, b]``.
    ``{"numbered": names}``, a list or a dict of names, has each ``x.{0-2,7}.y`` four times, with the numbers in its
    place.
    """
    if isinstance(value, list):
        return [expand(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"cycle", "length"}:
        cycle = value["cycle"]
        return [cycle[index % len(cycle)] for index in range(value["length"])]
    if value.keys() == {"runs"}:
        return [item for item, times in value["runs"] for _ in range(times)]
    if value.keys() == {"numbered"} and isinstance(names := value["numbered"], list):
        return [name for pattern in names for name in _numbered(pattern)]
    if value.keys() == {"numbered"}:
        return {name: expand(item) for pattern, item in value["numbered"].items() for name in _numbered(pattern)}
    return {name: expand(item) for name, item in value.items()}


def _numbered(pattern: str) -> list[str]:
    if (match := re.search(r"\{([\d,-]+)\}", pattern)) is None:
        return [pattern]
    ends = [[int(end) for end in part.split("-")] for part in match[1].split(",")]
    numbers = [number for part in ends for number in range(part[0], part[-1] + 1)]
    return [pattern.replace(match[0], str(number)) for number in numbers]
