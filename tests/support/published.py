"""Configs of published models, in ``tests/data/published``, and the outcome of the library for each.

``python -m tests.support.published`` writes the outcomes for the installed releases.
"""

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_bridge.architecture import architectures, composites, refusals
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint
from mcore_bridge.factory.param_count import count_params
from mcore_bridge.weights.source.encoded_weights import quantization_in

FOLDER = Path(__file__).parent.parent / "data" / "published"

OBSTACLES = {
    r"transformers must accept \S+, but refuses it": "transformers",
    r"needs megatron-core ([\d.]+)": "megatron-core",
    r"quantization_config: ([\w ]+?)(?: of [\w-]+)? must be": "quantized",
    r"does not know (.*?)\. If": "fields",
    r"(architectures) must name a class of [^,]*(?:, [^,]*)*, found": "value",
    r"(\w+) must be [^.]*, found": "value",
    r"(\w+)=\S+ must be": "value",
}
"""Patterns of the library's errors, each with its words in the files of outcomes. Text that one pattern matches is
hidden from later patterns.
"""


@dataclass(frozen=True, slots=True)
class Published:
    """One checkpoint: the JSON that its repository publishes, and the source of this JSON.

    ``partial`` describes the missing part, if the source quotes only a part.
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


def outcomes_file() -> Path:
    """The file of outcomes for the installed release of transformers."""
    import transformers

    return FOLDER / f"outcomes_transformers{transformers.__version__.split('.')[0]}.json"


def outcome_of(record: Published, folder: Path) -> dict[str, Any]:
    """The outcome of the library for ``record``, whose files are written to ``folder``.

    For a config that loads, it has the numbers of parameters of the text, also ``active`` ones for each token, and
    ``unread`` fields if there are any. Otherwise it is ``refused``, with the result of ``obstacles_of_family`` or else
    ``obstacles``.
    """
    try:
        blueprint = make_blueprint(
            record.write(folder), BuildOptions(dims=ParallelDims(), dtype=torch.bfloat16, device="meta")
        )
        quantization_in(folder)
    except ConfigError as error:
        return {"refused": obstacles_of_family(kind_of(record.config)) or obstacles(str(error))}
    config, counts = blueprint.config, count_params(blueprint.hf)
    idle = 1 - config.moe_router_topk / config.num_moe_experts if config.num_moe_experts else 0
    loads = {"parameters": counts.total, "active": counts.total - round(sum(counts.experts) * idle)}
    unread = sorted(blueprint.unread)
    return loads | ({"unread": unread} if unread else {})


def kind_of(config: dict[str, Any]) -> str:
    """The ``model_type`` of a config, or of its text if transformers lacks the composite."""
    composite = composites().get(config["model_type"])
    inside = dict(composite.published_fields).get("text_config", "text_config") if composite else ""
    kind: str = config[inside]["model_type"] if composite and composite.is_remote else config["model_type"]
    return kind


def obstacles_of_family(model_type: str) -> list[str]:
    """The reason why no config of a family loads: it is refused, transformers lacks it, or this library does."""
    from transformers import CONFIG_MAPPING

    if any(model_type in refusal.model_types for refusal in refusals()):
        return ["family"]
    architecture = architectures().get(model_type)
    if model_type not in CONFIG_MAPPING and (architecture is None or architecture.reads_as not in CONFIG_MAPPING):
        return ["transformers"]
    return [] if architecture or model_type in composites() else ["unknown"]


def obstacles(message: str) -> list[str]:
    """An error in the words of ``OBSTACLES``; the message itself if no pattern fits."""
    said = set[str]()
    rest = message
    for pattern, word in OBSTACLES.items():
        for match in re.finditer(pattern, rest):
            details = re.findall(r"(\w+)=", match[1]) if word == "fields" else match.groups()
            said |= {f"{word} {detail}" for detail in details} or {word}
        rest = re.sub(pattern, "", rest)
    return sorted(said) or [message[:100]]


def outcomes() -> dict[str, dict[str, Any]]:
    """The outcome of every record, by name."""
    with tempfile.TemporaryDirectory() as folder:
        return {record.name: outcome_of(record, Path(folder) / record.name) for record in records()}


def expand(value: Any) -> Any:
    """Expand the short forms in ``value``.

    ``{"cycle": [a, b], "length": 5}`` is ``[a, b, a, b, a]``, and ``{"runs": [[a, 2], [b, 1]]}`` is ``[a, a, b]``.
    ``{"numbered": names}``, a list or a dict of names, has each ``x.{0-2,7}.y`` four times, with the numbers in its
    place; several of these in a name are combined.
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
    return [name for number in numbers for name in _numbered(pattern.replace(match[0], str(number), 1))]


def waits_for_megatron_core(outcome: dict[str, Any]) -> bool:
    """Whether the installed release of megatron-core is too old for any other outcome."""
    return any(obstacle.startswith("megatron-core ") for obstacle in outcome.get("refused", ()))


def main() -> None:
    """Write all outcomes. Outcomes that need a newer megatron-core stay unchanged."""
    path = outcomes_file()
    before = json.loads(path.read_text()) if path.exists() else {}
    lines = [
        f"{json.dumps(name)}: {json.dumps(before.get(name, now) if waits_for_megatron_core(now) else now)}"
        for name, now in outcomes().items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
