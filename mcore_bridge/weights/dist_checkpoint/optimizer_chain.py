"""The state of an optimizer for another mesh, on which experts have an optimizer of their own, or no longer have.

megatron-core chains one optimizer for experts behind that of all else where other ranks sum their gradients, which is a
matter of the mesh. What it keeps of each parameter is named by parameter, and fits any chain. What it keeps of groups
of parameters (step, learning rate) it looks up in the chain that was saved, which must be of the same length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_EXPERTS = "is_expert_parallel"


def fit_chain(state: Mapping[Any, Any], length: int) -> Mapping[Any, Any]:
    """The loaded state of an optimizer as a chain of ``length`` takes it; as it is, where it was saved by such a one.

    Args:
        state: what was saved beside tensors, merged with the tensors that the chain has asked for: of one optimizer by
            names, of several by their places in the chain.
        length: how many optimizers there are.
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
    """The groups of all optimizers, each also as that of experts or of all else: the latter ones win where both are."""
    groups = [group for each in saved for group in each["optimizer"]["param_groups"]]
    return [*({**group, _EXPERTS: not group[_EXPERTS]} for group in groups), *groups]
