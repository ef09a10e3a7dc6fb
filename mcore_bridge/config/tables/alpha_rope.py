"""A rope whose base is multiplied once by a power of ``alpha``. HunYuan calls it dynamic, but no length changes it.

transformers 4 ignores ``alpha`` beyond ``max_position_embeddings`` tokens, and transformers 5 does not; here it always
counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mcore_bridge.config.fields import Derive, Hf, count, is_number
from mcore_bridge.config.rope import Rope, head_dim
from mcore_bridge.config.rope_spelling import merged
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.errors import ConfigError, shown

_KEYS = ("rope_type", "rope_theta", "alpha")
_UNREAD = ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim")
_NUMBERS = ("rope_theta", "alpha")
_SCALING = ("seq_len_interpolation_factor", "rope_scaling", "rope_scaling_factor")


@dataclass(frozen=True, kw_only=True)
class AlphaRope(Rope):
    """A ``Rope`` with the parameters of ``_KEYS``, and perhaps of ``_UNREAD``, which transformers does not read."""

    @property
    def longest_plain(self) -> float:
        return math.inf

    def overridden(self, overrides: Mapping[str, object]) -> Rope:
        if given := [name for name in _SCALING if name in overrides]:
            raise ConfigError(f"The overrides {given} must be left out: this rope is scaled by alpha already.")
        theta, dim = overrides.get("rotary_base"), overrides.get("kv_channels")
        return replace(
            self,
            parameters={**self.parameters, "rope_theta": self.theta if theta is None else theta},
            head_dim=self.head_dim if dim is None else count(overrides, "kv_channels"),
        )

    def _computed(self, seq_len: int | None) -> tuple[torch.Tensor, float]:
        alpha, dim = self._number("alpha"), self.head_dim
        assert alpha is not None
        stretched = {"rope_type": "default", "rope_theta": self.theta * alpha ** (dim / (dim - 2))}
        plain = Rope(parameters=stretched, head_dim=dim, max_position_embeddings=self.max_position_embeddings)
        return plain._computed(None)


def alpha_rope(own: tuple[str, ...] = ()) -> Derive:
    """Like ``derived_rope.rope`` (also for ``own``), for a family whose dynamic rope may have an alpha."""
    plain, known = rope(own=own), (*_KEYS, *_UNREAD, *own)

    def forward(hf: Hf) -> dict[str, object]:
        parameters = merged(hf)
        if parameters["rope_type"] != "dynamic" or not parameters.get("alpha"):
            return plain.forward(hf)
        if wrong := {name: value for name, value in parameters.items() if name not in known or isinstance(value, bool)}:
            raise ConfigError(f"A rope with alpha may have the keys {sorted(known)}, found {wrong}. Delete these.")
        if wrong := {name: shown(parameters.get(name)) for name in _NUMBERS if not is_number(parameters.get(name))}:
            raise ConfigError(f"A rope with alpha must have finite numbers, found {wrong}. Correct the HF config.")
        length = count(hf, "max_position_embeddings")
        hf_rope = AlphaRope(parameters=parameters, head_dim=head_dim(hf), max_position_embeddings=length)
        return {"hf_rope": hf_rope, "rotary_base": hf_rope.theta, "rotary_percent": 1.0}

    return Derive(plain.names, forward, plain.backward, plain.refuses)


ALPHA_ROPE = alpha_rope()
