"""NeMo-RL's map of the local parts of HF tensors, for its refit without a gather (``nccl_reshard``).

``qat_format`` is for its refit of a model in quantization-aware training (``real_quant``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from mcore_bridge.errors import ExportError, MappingError
from mcore_bridge.rules.adapters import Adapters
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.trainers.weight_export import qat_format as qat_format
from mcore_bridge.weights.bound import BoundModel, bind, provenance_on
from mcore_bridge.weights.export import SliceOrigin, origins_of
from mcore_bridge.weights.model_chunks import Models, chunks_of
from mcore_bridge.weights.param_sync import require_gathered
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.endpoints import Merge, check_storage

Spec = TypeVar("Spec")
_OF_EXPERT = re.compile(r"(.+\.experts)\.\d+(\..+)")


def local_params(
    models: Models,
    refit_info: Mapping[str, Any],
    *,
    spec: Callable[..., Spec],
    context: Callable[..., Any],
    hf: HF | None = None,
    merged: bool | None = None,
) -> dict[str, Spec]:
    """The map that ``build_hf_to_local_param_map`` must return: for each HF name, how to get this rank's part of it.

    The map may be kept. It refers to parameters, not to memory. So parts always have current values, also after
    parameters were moved to the CPU and back.

    Args:
        models: this rank's chunks, wrapped or not.
        refit_info: NeMo-RL's description, with the names to transfer. All routed experts of a layer have one name,
            without a number, and a leading dim.
        spec, context: NeMo-RL's ``LocalParamSpec`` and ``RefitCtx``.
        hf: deprecated; call ``adopt`` once for models that ``build_model`` did not make.
        merged: whether adapters are merged when a part is sent, as for ``iter_hf_weights``.

    Returns:
        ``spec(base=parameters, pre=...)`` for each name of which this rank has a part. ``pre(base)`` is
        ``context(buf=part)`` with a contiguous part: a block of the dim that tensor parallelism cuts, or the experts of
        this rank, in their order.

    Raises:
        MappingError: a name has no rule, or this rank's part of an HF tensor is no single block, as with fused q, k and
            v.
        ExportError: from ``pre``: parameters have no storage, or a step has left some for the next forward to gather.
    """
    bound = bind(models, provenance_on(models, hf, "lm"), expert_format="split", merged=merged)
    origins = _by_name(bound)
    wanted = [info["name"] for layer in refit_info["layer_names"] for info in refit_info["per_layer_params"][layer]]
    if unknown := [name for name in wanted if not _is_known(name, bound.mapping)]:
        raise MappingError(
            f"refit_info must have names of HF tensors with rules, found {len(unknown)} others: {unknown[:8]}. "
            "Name each expert's tensor, or all of one projection together: experts.gate_proj.weight"
        )
    return {name: _spec_of(name, origins[name], bound, models, spec, context) for name in wanted if name in origins}


def _is_known(name: str, mapping: WeightMapping) -> bool:
    """Whether some rank has a part of this tensor, or of the tensors of experts behind this name."""
    return any(map(mapping.consumers, (name, name.replace(".experts.", ".experts.0.")))) or mapping.is_copy(name)


def _by_name(bound: BoundModel) -> dict[str, list[SliceOrigin]]:
    """The origins of this rank's parts, by NeMo-RL's names. Parts of experts also have the common name of experts."""
    by_name: dict[str, list[SliceOrigin]] = {}
    for origin in origins_of(bound):
        for name in _names(origin):
            by_name.setdefault(name, []).append(origin)
    return by_name


def _names(origin: SliceOrigin) -> Iterator[str]:
    yield origin.name
    if match := _OF_EXPERT.fullmatch(origin.name):
        yield match[1] + match[2]


def _spec_of(
    name: str,
    origins: Sequence[SliceOrigin],
    bound: BoundModel,
    models: Models,
    spec: Callable[..., Spec],
    context: Callable[..., Any],
) -> Spec:
    of_experts = origins[0].name != name
    if len({origin.name for origin in origins}) != len(origins) or any(o.copy.part_step != 1 for o in origins):
        raise MappingError(
            f"this rank has {len(origins)} blocks of {name}, expected one: send it whole, with iter_hf_weights"
        )
    merges = [bound.merges.get(origin.mcore, _same) for origin in origins]
    held: dict[str, Any] = {
        "origins": origins,
        "merges": merges,
        "made": getattr(bound.chunks[0], "bridge_adapters", None),
    }
    pre = partial(_send, models=models, of_experts=of_experts, context=context, **held)
    return spec(base=[bound.tensors[origin.mcore] for origin in origins], pre=pre)


def _same(parameter: Tensor) -> Tensor:
    return parameter


def _send(
    parameters: Sequence[Tensor],
    *,
    models: Models,
    made: Adapters | None,
    origins: Sequence[SliceOrigin],
    merges: Sequence[Merge],
    of_experts: bool,
    context: Callable[..., Any],
) -> Any:
    require_gathered(models)
    if getattr(chunks_of(models)[0], "bridge_adapters", None) is not made:
        raise ExportError("models must use the adapters with which their parts were described: call set_adapters first")
    check_storage(dict(zip([origin.mcore for origin in origins], parameters, strict=True)))
    sent = (merge(parameter) for merge, parameter in zip(merges, parameters, strict=True))
    parts = [origin.of(parameter) for origin, parameter in zip(origins, sent, strict=True)]
    return context(buf=torch.stack(parts) if of_experts else parts[0].contiguous())
