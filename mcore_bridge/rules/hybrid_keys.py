"""Translates checkpoint keys between megatron-core's ``GPTModel``, which numbers layers, and ``HybridModel``.

``HybridModel`` numbers halves of layers:

* Layer k becomes one layer for each of its halves. ``input_layernorm`` and ``self_attention`` are in the first half,
  ``pre_mlp_layernorm`` and ``mlp`` in the second.
* In a layer of Mamba-2, ``self_attention`` is called ``mixer``, and its norm ``norm``.
* ``final_layernorm`` is called ``final_norm``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_LAYER = re.compile(r"layers\.(\d+)\.(.*)", re.DOTALL)
_MTP = re.compile(r"(mtp\.layers\.\d+\.)transformer_layer\.(.*)", re.DOTALL)
_MTP_HALVES = re.compile(r"(mtp\.layers\.\d+\.)mtp_model_layer\.(layers\..*)", re.DOTALL)
_FINAL = ("final_layernorm.", "final_norm.")
_SECOND = ("pre_mlp_layernorm.", "mlp.")
_MIXER = (("self_attention.", "mixer."), ("input_layernorm.", "norm."))
"""Names of a Mamba-2 layer in both classes."""


@dataclass(frozen=True)
class HalfKeys:
    """Translates keys, which are relative to the decoder, such as ``layers.3.mlp.linear_fc1.weight``.

    Args:
        letters: the letters of each layer, from ``config.layer_kinds.letters_of``.
    """

    letters: tuple[str, ...]

    @cached_property
    def _halves(self) -> tuple[tuple[int, str], ...]:
        """For each layer of a ``HybridModel`` the number of its whole layer, and its letter."""
        return tuple((layer, letter) for layer, letters in enumerate(self.letters) for letter in letters)

    @property
    def layers(self) -> tuple[int, ...]:
        """For each layer of a ``HybridModel`` the number of its whole layer."""
        return tuple(layer for layer, _ in self._halves)

    def to_hybrid(self, key: str) -> str:
        """Translate a key of a ``GPTModel`` to a ``HybridModel``."""
        if (match := _LAYER.match(key)) is None:
            return _renamed(key, *_FINAL)
        layer, name = int(match[1]), match[2]
        letters = self.letters[layer]
        half = len(letters) - 1 if name.startswith(_SECOND) else 0
        if letters[half] == "M":
            for own, other in _MIXER:
                name = _renamed(name, own, other)
        return f"layers.{sum(map(len, self.letters[:layer])) + half}.{name}"

    def mtp_to_hybrid(self, key: str) -> str:
        """As ``to_hybrid``, for a key of MTP layers: the letters describe the layer within."""
        if (match := _MTP.match(key)) is None:
            return key
        return f"{match[1]}mtp_model_layer.{self.to_hybrid(f'layers.0.{match[2]}')}"

    def mtp_to_gpt(self, key: str) -> str:
        """The inverse of ``mtp_to_hybrid``."""
        if (match := _MTP_HALVES.match(key)) is None:
            return key
        return f"{match[1]}transformer_layer.{self.to_gpt(match[2]).removeprefix('layers.0.')}"

    def to_gpt(self, key: str) -> str:
        """Translate a key of a ``HybridModel`` to a ``GPTModel``."""
        if (match := _LAYER.match(key)) is None:
            return _renamed(key, *reversed(_FINAL))
        layer, letter = self._halves[int(match[1])]
        name = match[2]
        if letter == "M":
            for own, other in _MIXER:
                name = _renamed(name, other, own)
        return f"layers.{layer}.{name}"


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
