"""Names and orientations of experts that differ between files of one model, while its rules have only one form.

- Models without their head, such as embedding models, are saved without the prefix: `layers.0.` instead of
  `model.layers.0.`. transformers adds the prefix when it reads such a file into a model with a head.
- A tied embedding may be stored under the name of the head alone.
- Published files of Qwen3-VL with experts have stacks [experts, in, out], and transformers 5 writes [experts, out, in]
  under these names. It distinguishes the two by their shapes, and so do we.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from mcore_bridge.rules.layout import upright
from mcore_bridge.rules.mapping import WeightMapping, embedding_names, pattern_of


def model_names(names: Collection[str], mapping: WeightMapping) -> dict[str, str]:
    """The new name of each tensor by its name in the source. Names that do not change are left out."""
    prefix = prefix_in(mapping)
    tied = {name: own for name, own in mapping.spare.items() if name in names and own not in names}
    if not prefix or all(
        name in names or name.removeprefix(prefix) not in names for name in embedding_names(mapping.rules)
    ):
        return tied
    new = {name: f"{prefix}{name}" for name in names if mapping.consumers(f"{prefix}{name}")}
    return tied | {name: own for name, own in new.items() if own not in names}


def prefix_in(mapping: WeightMapping) -> str:
    """The prefix that the names of a model without its head lack; empty if they lack none."""
    return next(filter(None, map(prefix_of, embedding_names(mapping.rules))), "")


def prefix_of(embedding: str) -> str:
    """The first word of an embedding's name, with its dot; empty if it has one word before its last."""
    return f"{embedding.partition('.')[0]}." if embedding.count(".") > 1 else ""


def stacks_of(mapping: WeightMapping) -> dict[str, bool]:
    """The names of stacks of experts that the rules transpose, each with whether it is the first of its layer."""
    return {
        rule.hf[0].removesuffix("[*]"): rule.mcore.endswith("linear_fc1.weight")
        for rule in mapping.rules
        if rule.axis == "etp" and upright(rule.layout) != rule.layout
    }


def transposed_in(tensors: Mapping[str, object], stacks: Mapping[str, bool]) -> list[str]:
    """The names of stacks [experts, out, in] among ``tensors``, for which the rules say [experts, in, out].

    The two stacks of a layer are compared, since one of them may be square. In [experts, out, in] the middle dim of
    gate and up is twice the last dim of down.

    Args:
        stacks: what ``stacks_of`` returned.
    """
    layers: dict[str, dict[bool, str]] = {}
    for name in tensors if stacks else ():
        if (is_first := stacks.get(pattern_of(name))) is not None:
            layers.setdefault(name.rpartition(".")[0], {})[is_first] = name
    pairs = [(layer[True], layer[False]) for layer in layers.values() if len(layer) == 2]
    return [name for pair in pairs if _is_transposed(*map(tensors.__getitem__, pair)) for name in pair]


def _is_transposed(first: object, second: object) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or not first.dim() == second.dim() == 3:
        return False
    return first.shape[1] == 2 * second.shape[2] and first.shape[2] == second.shape[1]
