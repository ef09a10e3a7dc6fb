"""Convert optimizer states between meshes with and without a separate optimizer for experts.

If other ranks sum the gradients of experts than of other parameters, megatron-core chains two optimizers: the second is
for experts. This depends on the mesh. States of parameters have names as keys, and fit any chain. States of parameter
groups (step, learning rate) have positions in the saved chain as keys, and fit only a chain of equal length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_EXPERTS = "is_expert_parallel"


def fit_chain(state: Mapping[Any, Any], length: int) -> Mapping[Any, Any]:
    """Convert the loaded state of an optimizer to the state of a chain of ``length`` optimizers.

    Args:
        state: the saved state, merged with the tensors that the chain has requested. For one optimizer the keys are
            names; for several they are positions in the chain.
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
    """The groups of all optimizers, each once for experts and once for other parameters. Saved groups win."""
    groups = [group for state in saved for group in state["optimizer"]["param_groups"]]
    return [*({**group, _EXPERTS: not group[_EXPERTS]} for group in groups), *groups]
