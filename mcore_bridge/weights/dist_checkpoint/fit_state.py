"""Changes states of a checkpoint so that they fit a model of another class, another mesh, or layers one by one.

* A folder may stack the tensors of all layers along a leading dim. megatron-core makes such state dicts only for dense
  models. Here they are made for any model, from the state dicts of single layers.
* ``GPTModel`` and ``HybridModel`` have different keys. The keys of one class are translated to the other.
* On some meshes different ranks sum the gradients of experts. megatron-core then chains a second optimizer for experts.
  States of parameters go by names, and fit with or without the second optimizer. States of groups of parameters (step,
  learning rate) go by their place in the chain, so they are converted to a chain of the right length.
* Parameters in FP8 have no memory for values. They are read into buffers, and quantized afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mcore_bridge.config.layer_kinds import inner_letters, letters_of
from mcore_bridge.rules.hybrid_keys import HalfKeys
from mcore_bridge.weights.dist_checkpoint.folder import in_layer_stack
from mcore_bridge.weights.model_chunks import is_hybrid, whole_config
from mcore_bridge.weights.transfer.quantized_parameters import Targets

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig


def stack_layers(state: dict[str, Any], num_layers: int) -> None:
    """Change the entries for single layers in ``state`` to slices of tensors that stack ``num_layers`` layers."""
    for name, sharded in state.items():
        key, layer = in_layer_stack(sharded.key)
        if layer is not None:
            state[name] = _in_stack(replace(sharded, key=key), layer, num_layers)


def _in_stack(sharded: Any, layer: int, num_layers: int) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    shape, offset = getattr(sharded, "global_shape", ()), getattr(sharded, "global_offset", ())
    if isinstance(sharded, ShardedTensor):
        return replace(
            sharded,
            global_shape=(num_layers, *shape),
            global_offset=(layer, *offset),
            axis_fragmentations=(num_layers, *(sharded.axis_fragmentations or ())),
            prepend_axis_num=sharded.prepend_axis_num + 1,
        )
    if isinstance(sharded, ShardedObject):
        if shape == (1,):  # an object that is not cut
            shape = offset = ()
        return replace(sharded, global_shape=(num_layers, *shape), global_offset=(layer, *offset))

    def build(*arguments: Any) -> Any:  # for the parameter, or for its state in an optimizer
        return dict_list_map_inplace(lambda part: _in_stack(part, layer, num_layers), sharded.build_fn(*arguments))

    return replace(sharded, build_fn=build)


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


_DECODER = "decoder."


def translation(config: TransformerConfig, *, own: bool, other: bool) -> Callable[[str], str]:
    """A function that translates keys of one class to another; ``own``, ``other``: whether it is ``HybridModel``."""
    if own == other:
        return lambda key: key
    keys, mtp = HalfKeys(letters_of(config)), HalfKeys((inner_letters(config),))
    change, of_mtp = (keys.to_hybrid, mtp.mtp_to_hybrid) if other else (keys.to_gpt, mtp.mtp_to_gpt)
    return lambda key: _DECODER + change(key.removeprefix(_DECODER)) if key.startswith(_DECODER) else of_mtp(key)


def respell(state: Mapping[str, Mapping[str, Any]], chunk: GPTModel, *, hybrid: bool) -> None:
    """Change the keys of sharded state dicts to the keys of ``HybridModel`` or of ``GPTModel``, in place.

    Args:
        state: of all chunks, from ``compare.sharded_states``.
        chunk: one of them.
        hybrid: whether to use the keys of ``HybridModel``.
    """
    spelled = translation(whole_config(chunk), own=is_hybrid(chunk), other=hybrid)
    for entries in state.values():
        for sharded in entries.values():
            sharded.key = spelled(sharded.key)


class Buffered:
    """The buffers for the parameters in FP8 of sharded state dicts, in which ``state`` then names these buffers.

    Args:
        state: of all chunks, from ``compare.sharded_states``.
    """

    def __init__(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._targets: dict[str, Targets] = {}
        for chunk, entries in state.items():
            held = {name: sharded.data for name, sharded in entries.items() if isinstance(sharded.data, Tensor)}
            own = self._targets[chunk] = Targets(held)
            for name in own.quantized:
                entries[name].data = own[name]

    def quantize(self, loaded: Mapping[str, dict[str, Any]], *, has_masters: bool) -> None:
        """Take the values of these parameters out of a loaded state, and quantize them.

        Args:
            loaded: the tensors of each chunk, by their names in ``state``.
            has_masters: whether the masters of an optimizer are loaded, too.
        """
        for chunk, targets in self._targets.items():
            for name in targets.quantized:
                targets[name].copy_(loaded[chunk].pop(name))
            targets.close(has_masters=has_masters)
