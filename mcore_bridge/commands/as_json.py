"""What ``--json`` prints: one object for each command, of names, numbers and lists. Bytes are whole, times in seconds.

docs/tools/command_page.py says what each key is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_bridge.commands.plan.batch import BANDWIDTH

if TYPE_CHECKING:
    from mcore_bridge.commands.doctor import Line
    from mcore_bridge.commands.draw import Drawn
    from mcore_bridge.commands.plan.batch import Batch
    from mcore_bridge.commands.plan.mesh_plan import Chunk, MeshPlan
    from mcore_bridge.commands.plan.suggest import Search
    from mcore_bridge.commands.verify.verify import Verdict
    from mcore_bridge.config.mesh.parallel_dims import ParallelDims
    from mcore_bridge.convert.convert import Converted
    from mcore_bridge.weights.plan.target import EngineRank


def of_verdict(verdict: Verdict) -> dict[str, Any]:
    """The object of ``verify``."""
    from mcore_bridge.commands.verify.verify import TOLERANCE
    from mcore_bridge.config.unread_fields import notes_on
    from mcore_bridge.rules.dtypes import dtype_name

    blueprint, findings, task = verdict.blueprint, verdict.findings, verdict.task
    comparison = findings[0].logits
    return {
        "good": verdict.is_good,
        "folder": str(task.folder),
        "model_type": blueprint.provenance.config.model_type,
        "tower": bool(blueprint.provenance.tower),
        "mesh": _mesh(task.options.dims),
        "ranks": len(findings),
        "dtype": dtype_name(task.options.dtype),
        "parameters": sum(spec.numel for spec in verdict.exported),
        "tensors": len(verdict.expected),
        "bytes": verdict.exported.num_bytes,
        "rank_bytes": max(finding.held for finding in findings),
        "seconds": {phase: max(f.seconds[phase] for f in findings) for phase in findings[0].seconds},
        "different": list(verdict.different),
        "saved_different": None if task.save is None else list(verdict.saved_different),
        "adapter_different": None if task.adapter is None else list(verdict.adapters_different),
        "logits": None
        if comparison is None
        else {
            "difference": _finite(comparison.difference),
            "relative": _finite(comparison.relative),
            "tolerance": TOLERANCE,
            "count": comparison.num_logits,
            "images": comparison.num_images,
            "varied": list(comparison.varied),
            "untold": list(comparison.untold),
        },
        "logits_left_out": None if comparison is not None else findings[0].skipped or "as asked",
        "carried": list(verdict.carried),
        "unused": list(verdict.ignored),
        "drawn": list(verdict.initialised),
        "notes": [note for _, note in notes_on(blueprint.unread)],
    }


def of_plan(mesh_plan: MeshPlan, engine: Sequence[EngineRank], *, bandwidth: float = BANDWIDTH) -> dict[str, Any]:
    """The object of ``plan`` for one mesh."""
    from mcore_bridge.commands.plan.cost import cost_of
    from mcore_bridge.commands.plan.engine_cost import feed
    from mcore_bridge.config.unread_fields import notes_on
    from mcore_bridge.rules.dtypes import dtype_name

    blueprint = mesh_plan.blueprint
    return {
        "model_type": blueprint.hf.model_type,
        "tower": bool(blueprint.provenance.tower),
        "mesh": _mesh(blueprint.dims),
        "ranks": mesh_plan.world_size,
        "dtype": dtype_name(blueprint.dtype),
        "parameters": sum(spec.numel for spec in mesh_plan.export.tensors()),
        "stages": [_stage(chunk) for chunks in mesh_plan.ranks for chunk in chunks],
        "export": _short(asdict(cost_of(mesh_plan.export, bandwidth=bandwidth))),
        "engine": _short(asdict(feed(mesh_plan, engine, bandwidth=bandwidth))) if engine else None,
        "notes": [note for _, note in notes_on(blueprint.unread)],
    }


def of_search(search: Search, *, num_gpus: int, gpu_bytes: float, batch: Batch) -> dict[str, Any]:
    """The object of ``plan --gpus``."""
    return {
        "gpus": num_gpus,
        "gpu_bytes": int(gpu_bytes),
        "batch": asdict(batch),
        "suggestions": [
            {
                "mesh": _mesh(suggestion.dims),
                "dp": suggestion.dims.dp(num_gpus),
                "edp": suggestion.dims.edp(num_gpus),
                "memory": asdict(suggestion.memory) | {"total": suggestion.memory.total},
                "export_seconds": suggestion.seconds,
            }
            for suggestion in search.suggestions
        ],
        "too_large": [{"mesh": _mesh(dims), "bytes": needed} for dims, needed in search.too_large],
        "refused": [
            {"reason": reason, "meshes": [_mesh(dims) for dims in meshes]} for reason, meshes in search.refused.items()
        ],
    }


def of_conversion(converted: Converted, target: Path) -> dict[str, Any]:
    """The object of ``convert``."""
    conversion = converted.conversion
    return {
        "target": str(target),
        "kind": conversion.kind,
        "parameters": conversion.size_text[0],
        "bytes": sum(conversion.sizes),
        "files": list(conversion.names),
        "kept": converted.num_kept,
        "carried": list(conversion.carried_names),
        "unused": list(conversion.ignored),
    }


def of_drawn(drawn: Drawn) -> dict[str, Any]:
    """The object of ``draw``."""
    return {
        "target": str(drawn.target),
        "parameters": drawn.num_parameters,
        "tensors": drawn.num_tensors,
        "bytes": drawn.num_bytes,
        "files": list(drawn.names),
    }


def of_doctor(lines: Iterable[Line]) -> dict[str, Any]:
    """The object of ``doctor``."""
    from mcore_bridge.commands.doctor import conclusion

    lines = list(lines)
    return {
        "ready": not any(line.is_problem for line in lines),
        "conclusion": conclusion(lines),
        "lines": [asdict(line) for line in lines],
    }


def _mesh(dims: ParallelDims) -> dict[str, Any]:
    given = {field.name: getattr(dims, field.name) for field in fields(dims)}
    return {name: given[name] for name in ("tp", "pp", "vp", "cp", "ep", "etp", "sp", "layout")}


def _stage(chunk: Chunk) -> dict[str, Any]:
    return {
        "pp": chunk.stage.pp_rank,
        "vp": chunk.stage.vp_stage,
        "layers": list(chunk.stage.layers),
        "tower": chunk.has_tower,
        "embedding": chunk.stage.embedding,
        "mtp": chunk.num_mtp_layers,
        "output": chunk.stage.loss,
        "parameters": chunk.num_parameters,
        "bytes": chunk.num_bytes,
        "expert_bytes": chunk.experts.num_bytes,
    }


def _short(counts: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("num_"): value for name, value in counts.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
