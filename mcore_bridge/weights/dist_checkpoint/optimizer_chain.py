"""Optimizer states for another mesh, on which experts do or do not have an optimizer of their own.

If different ranks sum the gradients of experts, megatron-core chains one optimizer for experts behind that of all else.
This depends on the mesh. States of parameters go by the names of parameters, and fit any chain. States of groups of
parameters (step, learning rate) go by the place in the chain that was saved, which must have the same length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_EXPERTS = "is_expert_parallel"


def fit_chain(state: Mapping[Any, Any], length: int) -> Mapping[Any, Any]:
    """Convert the loaded state of an optimizer to that of a chain of ``length`` optimizers.

    Args:
        state: what was saved, merged with the tensors that the chain has requested. Keys are names for one optimizer,
            and places in the chain for several.
        length: the number of optimizers.
    """
    places = sorted(key for key in state if isinstance(key, int))
    saved = [state[place] for place in places if "optimizer" in state[place]] or [state]
    if len(saved) == length:
        return state
    common = {key: value for key, value in saved[0].items() if isinstance(key, str) and key != "param_state"}
    common["optimizer"] = {**common["optimizer"], "param_groups": _for_either(saved)}
    if length == 1:
        return {**common, "param_state": state["param_state"]}
    return {place: {**common, **state[place]} for place in places[:length]}


def _for_either(saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups of all optimizers, each as a group of experts and of all else. The saved ones come last and win."""
    groups = [group for state in saved for group in state["optimizer"]["param_groups"]]
    return [*({**group, _EXPERTS: not group[_EXPERTS]} for group in groups), *groups]
