"""Rotary embeddings. transformers computes the frequencies, so that this library needs no second formula."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from mcore_bridge.config.fields import Hf, count
from mcore_bridge.config.rope_spelling import MULTIMODAL, OF_ENGINES, ORIGINAL_LENGTH, checked, read_parameters, spelled
from mcore_bridge.errors import ConfigError, shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ATTENTION_FACTOR = ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim")
"""Config attributes from which mcore's attention computes the attention factor, for any type of rope."""
_NOT_FREQUENCIES = ("partial_rotary_factor", "llama_4_scaling_beta", "max_position_embeddings", OF_ENGINES, *MULTIMODAL)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The rotary embedding of a model: its parameters, and the frequencies that transformers computes from them.

    Args:
        parameters: with the names of transformers 5: ``rope_type``, ``rope_theta`` and the keys of this type.
        head_dim: the size of an attention head. Its first ``rotary_dim`` dims are rotated. With the proportional type
            all dims are, some of them by 0.
        max_position_embeddings: the length in tokens for which the model is made.
    """

    parameters: Mapping[str, object] = field(hash=False)
    head_dim: int
    max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"partial_rotary_factor must rotate an even number of the {self.head_dim} dims of a head, found "
                f"{self.partial_rotary_factor}, which rotates {self.rotary_dim}."
            )
        if (factor := self._number("factor")) is not None and factor <= 0:
            raise ConfigError(f"factor of a rope must be above 0, found {factor}. Correct the HF config.")
        for name in ("short_factor", "long_factor"):
            if isinstance(factors := self.parameters.get(name), list) and 2 * len(factors) != self.rotary_dim:
                raise ConfigError(
                    f"{name} must have a number for each of the {self.rotary_dim // 2} pairs of rotated dims, found "
                    f"{len(factors)}."
                )

    @property
    def rope_type(self) -> str:
        return str(self.parameters["rope_type"])

    @property
    def theta(self) -> float:
        theta = self._number("rope_theta")
        if theta is None:
            raise ConfigError("rope_theta must be a number, found None. Correct the HF config.")
        return theta

    @property
    def partial_rotary_factor(self) -> float:
        """The rotated fraction of each head."""
        factor = self._number("partial_rotary_factor")
        return 1.0 if factor is None else factor

    @property
    def rotary_dim(self) -> int:
        """The number of rotated dims of a head."""
        return self.head_dim if self._is_proportional else int(self.head_dim * self.partial_rotary_factor)

    @property
    def _is_proportional(self) -> bool:
        """Whether the frequencies of a part of each head are 0, so that they already contain the factor."""
        return self.rope_type == "proportional"

    @property
    def longest_plain(self) -> float:
        """The length in tokens beyond which the frequencies change; infinite if they never do."""
        lengths = {"dynamic": self.max_position_embeddings, "longrope": self._number(ORIGINAL_LENGTH)}
        return lengths.get(self.rope_type) or math.inf

    @property
    def is_dynamic(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.longest_plain < math.inf

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines, at any length. It is 1 except for yarn and longrope."""
        return _attention_factor(self)

    @property
    def query_temperature(self) -> tuple[float, float] | None:
        """``(beta, length)``: the query at a position is multiplied by ``1 + beta * log(1 + position // length)``."""
        beta, length = self._number("llama_4_scaling_beta"), self._number(ORIGINAL_LENGTH)
        return None if beta is None or length is None else (beta, length)

    def frequencies(self, seq_len: int | None = None) -> torch.Tensor:
        """The inverse frequencies: fp32, on CPU, of shape ``[rotary_dim // 2]``.

        Args:
            seq_len: the length in tokens of a sequence. Only the dynamic type and longrope depend on it, and only
                beyond ``longest_plain``. transformers uses the longest sequence of a batch and, with the dynamic type,
                of earlier batches. Here each sequence gets the frequencies of a first batch with only this sequence.
        """
        return self._computed(seq_len if seq_len is not None and seq_len > self.longest_plain else None)[0]

    def is_changed_by(self, key: str, value: object) -> bool:
        """Whether another key of the parameters changes what transformers computes, also for a long sequence.

        If transformers does not accept the key, it changes the rope, too.
        """
        other = replace(self, parameters={**self.parameters, key: value})
        try:
            return not all(map(torch.equal, self._rotated(), other._rotated()))
        except Exception:  # transformers may raise any type
            return True

    def _rotated(self) -> tuple[torch.Tensor, ...]:
        """Cosines and sines of transformers' module, for a short sequence and for a long one."""
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        with torch.device("cpu"), torch.no_grad():
            module = LlamaRotaryEmbedding(self._config(self.parameters))
            lengths = (torch.arange(8)[None], torch.tensor([[4 * self.max_position_embeddings]]))
            return tuple(part for positions in lengths for part in module(torch.zeros(1), positions))

    def overridden(self, overrides: Mapping[str, object]) -> "Rope":
        """The rope with overrides of ``kv_channels`` and of mcore's rope arguments, with mcore's meaning."""
        parameters = _scaling(overrides) or dict(self.parameters)
        theta = overrides.get("rotary_base")
        parameters["rope_theta"] = self.theta if theta is None else theta
        if overrides.get("kv_channels") is None:
            return replace(self, parameters=checked(parameters))
        return replace(self, parameters=checked(parameters), head_dim=count(overrides, "kv_channels"))

    def to_mcore(self) -> dict[str, object]:
        """The config attributes that make mcore's attention multiply cosines and sines by the attention factor.

        For every rope type, mcore (transformer/attention.py) multiplies by a factor of these three:
        ``(0.1 * yarn_mscale * log(scaling_factor) + 1) / (0.1 * yarn_mscale_all_dim * log(scaling_factor) + 1)``.
        """
        factor = self.attention_factor
        if factor == 1.0:
            return {}
        return dict(zip(ATTENTION_FACTOR, (math.e, _mscale(factor), 0.0), strict=True))

    def to_latent(self) -> dict[str, object]:
        """The fields of mcore's multi-latent attention for the rope and for its factor in the softmax scale.

        mcore multiplies the scale by the square of ``0.1 * mscale_all_dim * log(rotary_scaling_factor) + 1``, as
        transformers does for yarn. ``rope_type`` is always "yarn": only then does mcore use the attention factor of
        the embedding.
        """
        given = self.parameters if self.rope_type == "yarn" else {}
        names = ("beta_fast", "beta_slow", "mscale", ORIGINAL_LENGTH)
        named = {name: given[name] for name in names if given.get(name) is not None}
        factor, all_dim = given.get("factor", 1.0), given.get("mscale_all_dim") or 0.0
        return {"rope_type": "yarn", "rotary_scaling_factor": factor, "mscale_all_dim": all_dim, **named}

    def _computed(self, seq_len: int | None) -> tuple[torch.Tensor, float]:
        """The frequencies and the attention factor, from the function of transformers for this type.

        transformers' modules are not used: inside a meta-device context they would have no values.
        """
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        left_out = _NOT_FREQUENCIES[self._is_proportional :]
        whole = {name: value for name, value in self.parameters.items() if name not in left_out}
        config = self._config(whole)
        if self.rope_type in ROPE_INIT_FUNCTIONS:
            compute = ROPE_INIT_FUNCTIONS[self.rope_type]
        else:  # transformers 5 keeps the default type out of its table
            compute = LlamaRotaryEmbedding.compute_default_rope_parameters
        with torch.device("cpu"), torch.no_grad():
            longest = None if seq_len is None else torch.tensor(seq_len)  # transformers passes a tensor too
            try:
                frequencies, attention_factor = compute(config, device=torch.device("cpu"), seq_len=longest)
                return frequencies, float(attention_factor)
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"transformers must be able to compute the frequencies of this rope, but raises {error!r:.200} for "
                    f"{shown(whole)}. Correct the HF config."
                ) from error

    def _config(self, parameters: Mapping[str, object]) -> "PretrainedConfig":
        """A config of transformers with heads of the rotated size."""
        from transformers import LlamaConfig

        sizes = {"hidden_size": self.rotary_dim, "num_attention_heads": 1, "head_dim": self.rotary_dim}
        return LlamaConfig(**sizes, max_position_embeddings=self.max_position_embeddings, **spelled(parameters))

    def _number(self, name: str) -> float | None:
        value = self.parameters.get(name)
        if value is None or isinstance(value, int | float):
            return value
        raise ConfigError(f"{name} of a rope must be a number, found {shown(value)}. Correct the HF config.")


@functools.lru_cache(maxsize=256)
def _attention_factor(rope: Rope) -> float:
    """Cached, since every build asks several times, and transformers makes a config for each answer."""
    return rope._computed(None)[1]


def rope_from(hf: Hf) -> Rope:
    """The rope of an HF config, in the spelling of transformers 4.57 or 5.

    Raises:
        ConfigError: we do not reproduce the rope type, or one of its keys, exactly.
    """
    length = count(hf, "max_position_embeddings")
    dims = head_dim(hf) if hf.get("qk_rope_head_dim") is None else count(hf, "qk_rope_head_dim")
    return Rope(parameters=read_parameters(hf), head_dim=dims, max_position_embeddings=length)


def head_dim(hf: Hf) -> int:
    """The size of an attention head: ``head_dim`` if it is set, else ``hidden_size / num_attention_heads``."""
    if hf.get("head_dim") is not None:
        return count(hf, "head_dim")
    heads, hidden_size = count(hf, "num_attention_heads"), count(hf, "hidden_size")
    if hidden_size % heads:
        raise ConfigError(f"hidden_size={hidden_size} must be a multiple of num_attention_heads={heads}.")
    return hidden_size // heads


def _scaling(overrides: Mapping[str, object]) -> dict[str, object]:
    """The rope parameters for mcore's own scaling arguments; empty if none is given."""
    linear, llama3 = overrides.get("seq_len_interpolation_factor"), overrides.get("rope_scaling")
    given = [
        name for name in ("seq_len_interpolation_factor", "rope_scaling", "rope_scaling_factor") if name in overrides
    ]
    if given and (linear is None) == (not llama3):
        raise ConfigError(
            f"The overrides {given} must switch on one kind of rope scaling: seq_len_interpolation_factor=... or "
            "rope_scaling=True. To switch scaling off, change the rope of the HF config."
        )
    if linear is not None:
        return {"rope_type": "linear", "factor": linear}
    if llama3:  # mcore's rotary_pos_embedding.py, _apply_scaling, fixes the other three
        constants = {"low_freq_factor": 1, "high_freq_factor": 4, ORIGINAL_LENGTH: 8192}
        return {"rope_type": "llama3", "factor": overrides.get("rope_scaling_factor", 8.0), **constants}
    return {}


def _mscale(factor: float) -> float:
    """The ``m`` for which mcore's formula ``0.1 * m * log(e) + 1.0`` gives exactly ``factor``."""
    mscale = (factor - 1.0) / 0.1
    candidates = (mscale, math.nextafter(mscale, -math.inf), math.nextafter(mscale, math.inf))
    return min(candidates, key=lambda m: abs(0.1 * m * math.log(math.e) + 1.0 - factor))
