"""The text of checkpoints_published.md: which checkpoints of the hub load, from the records of their configs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_bridge.architecture import architectures, composites
from mcore_bridge.config.quantization import description_in, note_of

HEAD = """# Which published checkpoints load

Made from the records in `tests/data/published` by `docs/tools/make_families.py`; CI checks that it is up to date.

A record has the fields of a checkpoint's config and the source of these fields. `tests/config/test_published.py` tries
all records. It reads no weights. [support.md](support.md) lists what was run with weights.

- **Loads** says whether the library accepts the published config without changes. *In part* means that the source
  quotes only a part of the config, so the answer is not certain.
- **Besides** lists parts of the checkpoint beside the model of text that is built. Some families build layers for
  multi-token prediction (MTP) on request. A save copies models of images or sound from the source.
- **From** has the first release that loads it. The tested releases are transformers 4.57 and 5.24, megatron-core 0.16.1
  and 0.19.2.
- **Parameters** are the parameters of the text, as `mcore-bridge plan` counts them: in all and, for models with
  experts, active for each token. Tied weights count once. Releases of transformers may differ on which weights are
  tied; then this page has the larger number, and a load decides by the weights.
- **Published** has the numbers of the publisher, from the name of the checkpoint or from the source in
  `tests/data/published/sizes.json`. Many publishers count the embedding or MTP layers differently.

"""
REASONS = {
    "family": "its family is [refused](refused.md)",
    "transformers": "transformers has no such `model_type`",
    "unknown": "nobody has written its family",
}
"""Why a config is refused, by the words in the files of outcomes."""


def page(folder: Path) -> str:
    """The text of the page, from the records in ``folder``."""
    rows = _rows(folder)
    loading, count = counts(folder)
    return "\n".join(
        [
            f"{HEAD}Of {count} checkpoints {loading} load as published.\n",
            "| checkpoint | `model_type` | format | loads | besides | from | parameters | published |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def counts(folder: Path) -> tuple[int, int]:
    """How many of the checkpoints load as published, and how many there are."""
    rows = _rows(folder)
    return sum(row.split(" | ")[3].startswith("yes") for row in rows), len(rows)


def _rows(folder: Path) -> list[str]:
    """The rows of the table, by name."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]
    records = sorted((json.loads(line) for line in lines), key=lambda record: record["name"].lower())
    outcomes = {release: _json(folder / f"outcomes_transformers{release}.json") for release in ("4", "5")}
    sizes = _json(folder / "sizes.json")
    return [_row(record, outcomes, sizes) for record in records]


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _row(record: dict[str, Any], outcomes: dict[str, Any], sizes: dict[str, Any]) -> str:
    name, config = record["name"], record["config"]
    outcome = outcomes["5"][name]
    loads = _loads(record, outcome)
    cells = (
        name,
        f"`{config['model_type']}`",
        format_of(record),
        loads,
        ", ".join(_besides(config)) if loads.startswith("yes") else "",
        _from(config["model_type"], outcomes["4"][name]) if loads.startswith("yes") else "",
        _counted(outcome, outcomes["4"][name]),
        _published(name, sizes),
    )
    return f"| {' | '.join(cells)} |"


def _loads(record: dict[str, Any], outcome: dict[str, Any]) -> str:
    if "partial" in record:
        return "in part"
    if "refused" in outcome:
        return f"no: {', '.join(map(_reason, outcome['refused']))}"
    architecture = record["config"].get("architectures", [""])[0]
    embeds = "Embedding" in record["name"] and not record["config"].get("tie_word_embeddings")
    if embeds or (architecture.endswith("Model") and record["config"]["model_type"] not in composites()):
        return 'yes, with `head="none"`'
    return 'yes, with `head="classification"`' if architecture.endswith("ForSequenceClassification") else "yes"


def _reason(obstacle: str) -> str:
    word, _, detail = obstacle.partition(" ")
    if word == "quantized":
        return f"`{detail}` of its quantization is [not read](../guide/quantized.md)"
    return REASONS.get(word, f"`{detail or word}`")


def _besides(config: dict[str, Any]) -> Iterator[str]:
    text = config.get("text_config") or config
    mtp = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "_num_mtp_layers")
    if any(text.get(name) for name in mtp):
        yield "MTP"
    if "vision_config" in config:
        yield "images"
    if config.get("audio_config") is not None:
        yield "sound"


def _from(model_type: str, with_transformers_4: dict[str, Any]) -> str:
    architecture = architectures().get(model_type)
    transformers = "transformers 5.24" if "refused" in with_transformers_4 else "transformers 4.57"
    if architecture is None or architecture.megatron_core is None:
        return transformers
    return f"transformers 5.24, megatron-core {architecture.megatron_core.version}"


def format_of(record: dict[str, Any]) -> str:
    """How the weights of a checkpoint are kept: a dtype, or a kind of quantization."""
    config = record["config"]
    text = config.get("text_config") or {}
    quantized = note_of(description_in(config)) or text.get("quantization_config")
    if quantized is None and "hf_quant_config" in record:
        return _modelopt(record["hf_quant_config"]["quantization"])
    if quantized is not None:
        return _quantized(quantized)
    dtype = next((each.get(key) for each in (config, text) for key in ("dtype", "torch_dtype") if each.get(key)), "")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(dtype), "not said")


def _quantized(quantized: dict[str, Any]) -> str:
    unnamed = "modelopt" if "quant_algo" in quantized else "MLX"
    method, blocks = quantized.get("quant_method", unnamed), quantized.get("weight_block_size")
    if method == "fp8":
        scale = ", scales are powers of two" if quantized.get("scale_fmt") == "ue8m0" else ""
        experts = quantized.get("moe_quant_algo") or {"fp4": "MXFP4"}.get(quantized.get("expert_dtype", ""))
        mixed = f", experts in {experts}" if experts else ""
        return f"FP8 in blocks of {blocks[0]} by {blocks[1]}{scale}{mixed}" if blocks else "FP8 per tensor"
    if method == "modelopt":
        return _modelopt(quantized)
    if method == "compressed-tensors":
        return f"compressed-tensors {_compressed(quantized)}"
    return {"mxfp4": "MXFP4", "awq": "AWQ", "gptq": "GPTQ"}.get(method, method)


def _modelopt(quantized: dict[str, Any]) -> str:
    algorithm = quantized["quant_algo"]
    return "ModelOpt, mixed" if algorithm == "MIXED_PRECISION" else f"ModelOpt {algorithm}"


def _compressed(quantized: dict[str, Any]) -> str:
    """The first group of a config of compressed-tensors: its numbers, and what shares a scale."""
    weights = next(iter(quantized["config_groups"].values()))["weights"]
    kind = "FP" if weights["type"] == "float" else "int"
    size = f" of {weights['group_size']}" if weights.get("group_size") else ""
    return f"{kind}{weights['num_bits']} per {weights['strategy']}{size}"


def _counted(*outcomes: dict[str, Any]) -> str:
    if "refused" in outcomes[0]:
        return ""
    total, active = (max(outcome.get(key, 0) for outcome in outcomes) for key in ("parameters", "active"))
    return _short(total) if total == active else f"{_short(total)}, {_short(active)}"


def _short(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 995e6 else f"{count / 1e6:.0f}M"


def _published(name: str, sizes: dict[str, Any]) -> str:
    if name in sizes:
        return f"{sizes[name]['total']}, {sizes[name]['active']}"
    said = re.search(r"(?<![\w.])(?:\d+x)?\d+(?:\.\d+)?[BMbm](?![\w.])", name.split("/")[1].replace("_", "."))
    active = re.search(r"-A(\d+(?:\.\d+)?B)", name)
    return ", ".join([*([said[0][:-1] + said[0][-1].upper()] if said else []), *([active[1]] if active else [])])
