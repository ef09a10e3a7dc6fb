"""Writes the config of a PEFT folder, and gives the names and shapes that ``peft`` has for the tensors of an adapter.

Readers differ in what they support. All of them support an adapter with one rank, one ``lora_alpha`` and no patterns.
Only such folders are written; others can be read (``peft_read.py``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mcore_bridge.rules.adapters import Adapters, base_name
from mcore_bridge.rules.layout import Rearrange
from mcore_bridge.rules.mapping import Prefixes, respelled_module

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The prefix of all names of tensors in a PEFT folder."""
STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""The parameters of a module with all experts of a layer, in its order. ``peft`` wraps the first one first."""
# fmt: off
STACKED = {"lora_A": Rearrange("(experts r) i", "experts r i"),  # from PEFT's tensor to a stack of experts
           "lora_B": Rearrange("o (r experts)", "experts o r")}
SWAPPED = {"lora_A": Rearrange("i (r experts)", "experts r i"),  # if PEFT's A has the outputs, and its B the inputs
           "lora_B": Rearrange("(experts r) o", "experts o r")}
# fmt: on
_OTHER = {"lora_A": "lora_B", "lora_B": "lora_A"}
_WRAPPED = re.compile(r"(?P<module>.*\.experts)(?P<depth>(?:\.base_layer)*)\.(?P<factor>lora_[AB])\.weight")


@dataclass(frozen=True, slots=True)
class PeftNames:
    """The names of an adapter's tensors in a PEFT folder, and their order of experts.

    Args:
        stacks: the names in ``STACKS`` with adapters.
        memory: prefixes of HF names, each with the prefix in transformers' memory, which ``peft`` uses.
        renamed: parts of HF names, each with its name in memory: ``Architecture.renamed_in_memory``.
        swapped: whether in ``stacks`` PEFT's A has the outputs and its B the inputs: ``Architecture.swapped_in_peft``.
    """

    stacks: tuple[str, ...] = ()
    memory: Prefixes = ()
    renamed: Prefixes = ()
    swapped: bool = False

    def to_peft(self, name: str) -> str:
        """The name in a PEFT folder.

        >>> PeftNames(STACKS).to_peft("model.layers.0.mlp.experts.gate_up_proj.lora_A.weight")
        'base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight'
        """
        base = base_name(name)
        end, is_stack, base = name.removeprefix(base), self.is_stack(base), self.in_memory(base)
        if is_stack:
            module, _, last = base.rpartition(".")
            base = module + ".base_layer" * (len(self.stacks) - 1 - self.stacks.index(last))
            end = f".{_OTHER[_factor(name)]}.weight" if self.swapped else end
        return f"{PREFIX}{base}{end}"

    def to_hf(self, name: str) -> str:
        """The inverse of ``to_peft``, with names as in memory. From other names only ``PREFIX`` is removed."""
        plain = name.removeprefix(PREFIX)
        match = _WRAPPED.fullmatch(plain)
        number = len(self.stacks) - 1 - match["depth"].count(".") if match else -1
        if match is None or number < 0:
            return plain
        factor = _OTHER[match["factor"]] if self.swapped else match["factor"]
        return f"{match['module']}.{self.stacks[number]}.{factor}.weight"

    def is_stack(self, module: str) -> bool:
        """Whether an HF name is the name of a parameter with all experts of a layer."""
        inside, _, last = self.in_memory(module).rpartition(".")
        return inside.endswith(".experts") and last in self.stacks

    def in_memory(self, module: str) -> str:
        """The name of a module, or of a parameter that stacks experts, in transformers' memory."""
        for old, new in self.renamed:
            module = module.replace(old, new)
        return respelled_module(module, self.memory)

    def unstacked(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of an adapter in the form of a PEFT folder: ``[experts, rank, in]`` becomes two-dimensional."""
        if tensor.dim() != 3:
            return tensor
        (flat,) = (~self._layout(name))((tensor,), {"experts": len(tensor)})
        return flat

    def stacked(self, name: str, tensor: Tensor, num_experts: int) -> Tensor:
        """The inverse of ``unstacked``, for a factor of experts in one tensor.

        Raises:
            ValueError: the tensor cannot have so many experts.
        """
        (stack,) = self._layout(name)((tensor,), {"experts": num_experts})
        return stack

    def _layout(self, name: str) -> Rearrange:
        return (SWAPPED if self.swapped else STACKED)[_factor(name)]


def _factor(name: str) -> str:
    return name.removeprefix(f"{base_name(name)}.").removesuffix(".weight")


def portable_config(
    modules: Collection[str], parameters: Collection[str], made: Adapters, *, base: str | None, head: str
) -> dict[str, Any]:
    """The config of an adapter that ``peft`` reads; and vLLM and SGLang, if it has no DoRA.

    Args:
        modules, parameters: ends of names of the targets.
        made: the adapters.
        base: the folder or hub name of the model.
        head: the model's head.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else None,
        "base_model_name_or_path": base,
        "r": made.rank,
        "lora_alpha": int(made.alpha) if float(made.alpha).is_integer() else made.alpha,
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "lora_dropout": float(made.dropout),
        "bias": "none",
        "use_rslora": False,
        "use_dora": made.dora,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "inference_mode": True,
    }


def shortest_ends(modules: Iterable[str], others: Iterable[str]) -> list[str] | None:
    """Ends of names (whole words) that match all ``modules`` and none of ``others``; None if there are no such ends.

    Args:
        modules, others: patterns of names.

    >>> shortest_ends(["layers.*.mlp.up_proj", "layers.*.attn.q_proj"], ["layers.*.mlp.shared.up_proj"])
    ['mlp.up_proj', 'q_proj']
    """
    dotted, ends = [f".{name}" for name in others], set()
    for module in modules:
        words = module.split(".")
        candidates = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        end = next((end for end in candidates if not any(name.endswith(f".{end}") for name in dotted)), "*")
        if "*" in end:
            return None
        ends.add(end)
    return sorted(ends)
