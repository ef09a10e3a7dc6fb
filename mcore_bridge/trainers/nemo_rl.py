"""NeMo-RL's map of what a rank holds, for its refit without a gather (``nccl_reshard``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from mcore_bridge.errors import MappingError
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.weights.bound import BoundModel, Models, bind, provenance_on
from mcore_bridge.weights.local_slices import SliceOrigin, origins_of
from mcore_bridge.weights.param_sync import require_gathered
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.endpoints import check_storage

Spec = TypeVar("Spec")
_OF_EXPERT = re.compile(r"(.+\.experts)\.\d+(\..+)")


def local_params(
    models: Models,
    refit_info: Mapping[str, Any],
    *,
    spec: Callable[..., Spec],
    context: Callable[..., Any],
    hf: HF | None = None,
) -> dict[str, Spec]:
    """What ``build_hf_to_local_param_map`` has to find: by HF name, how this rank's part of it is got.

    The map may be kept. It names parameters and no memory, so that parts are those of the moment they are asked for,
    also after parameters were moved to the CPU and back.

    Args:
        models: this rank's chunks, wrapped or not.
        refit_info: NeMo-RL's, with the names of what travels. Those of routed experts are named together, without a
            number, and have a leading dim for them.
        spec, context: its ``LocalParamSpec`` and ``RefitCtx``.
        hf: for models that ``build_model`` did not make: their HF config or folder.

    Returns:
        ``spec(base=parameters, pre=...)`` for each name that this rank has a part of; ``pre(base)`` is
        ``context(buf=part)``, with the part contiguous: along the dim that tensor parallelism cuts, or the experts of
        this rank, in their order.

    Raises:
        MappingError: no rule knows a name, or this rank's part of an HF tensor is not one block of it, as that of fused
            q, k and v is not.
        ExportError: from ``pre``: parameters have no storage, or a step has left some for the next forward to gather.
    """
    bound = bind(models, provenance_on(models, hf, "lm"), dialect="split")
    places = _by_name(bound)
    wanted = [info["name"] for layer in refit_info["layer_names"] for info in refit_info["per_layer_params"][layer]]
    if unknown := [name for name in wanted if not _is_known(name, bound.mapping)]:
        raise MappingError(
            f"refit_info must have names of HF tensors that a rule gives, found {len(unknown)} others: {unknown[:8]}. "
            "Name each expert's tensor, or all of one projection together: experts.gate_proj.weight"
        )
    return {name: _spec_of(name, places[name], bound, models, spec, context) for name in wanted if name in places}


def _is_known(name: str, mapping: WeightMapping) -> bool:
    """Whether some rank has a part of this tensor, or of these of all experts."""
    return any(map(mapping.consumers, (name, name.replace(".experts.", ".experts.0.")))) or mapping.is_copy(name)


def _by_name(bound: BoundModel) -> dict[str, list[SliceOrigin]]:
    """Where this rank's parts are, by the names that NeMo-RL has: that of single experts is that of all, too."""
    found: dict[str, list[SliceOrigin]] = {}
    for place in origins_of(bound):
        for name in _names(place):
            found.setdefault(name, []).append(place)
    return found


def _names(place: SliceOrigin) -> Iterator[str]:
    yield place.name
    if match := _OF_EXPERT.fullmatch(place.name):
        yield match[1] + match[2]


def _spec_of(
    name: str,
    places: Sequence[SliceOrigin],
    bound: BoundModel,
    models: Models,
    spec: Callable[..., Spec],
    context: Callable[..., Any],
) -> Spec:
    of_experts = places[0].name != name
    if len({place.name for place in places}) != len(places) or any(each.copy.part_step != 1 for each in places):
        raise MappingError(
            f"this rank has {len(places)} blocks of {name}, expected one: send it whole, by iter_hf_weights"
        )
    pre = partial(_send, models=models, places=places, of_experts=of_experts, context=context)
    return spec(base=[bound.tensors[place.mcore] for place in places], pre=pre)


def _send(
    parameters: Sequence[Tensor],
    *,
    models: Models,
    places: Sequence[SliceOrigin],
    of_experts: bool,
    context: Callable[..., Any],
) -> Any:
    require_gathered(models)
    check_storage(dict(zip([place.mcore for place in places], parameters, strict=True)))
    parts = [place.of(parameter) for place, parameter in zip(places, parameters, strict=True)]
    return context(buf=torch.stack(parts) if of_experts else parts[0].contiguous())
