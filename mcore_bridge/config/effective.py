"""The HF config of a model with overrides: each override of what a table maps comes back in it, or raises. Pure.

Rules, names of weights and what a save writes all follow the HF config, so an override that is not in it would make a
folder that does not load, or that computes something else. What no table maps is free: no HF config says it.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_bridge.config.fields import Const, Field, Hf, Map, Mcore, Preset, to_mcore
from mcore_bridge.config.hf import with_fields
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.overrides import config_class
from mcore_bridge.config.rope import Rope
from mcore_bridge.config.tables.derived import layers_but_full
from mcore_bridge.config.tables.derived_rope import layers_without_rope
from mcore_bridge.config.tables.moe import layers_of
from mcore_bridge.config.transformer import settings_of
from mcore_bridge.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OF_SOME = frozenset(
    (
        *("activation_func_clamp_value", "glu_linear_offset", "softmax_scale", "softmax_type", "no_rope_freq"),
        *("attention_output_gate", "experimental_attention_variant", "apply_residual_connection_post_layernorm"),
        *("moe_layer_freq", "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"),
    )
)
"""What the HF config of some families says; with the others it is megatron-core's default that computes the same."""
_PADDED = frozenset({"vocab_size"})
"""Of these, megatron-core's value may be larger than HF's, which ``hf_vocab_size`` keeps."""
_BY_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers", "attn_type_list")
"""Lists of HF with an entry for each layer. transformers looks at the length of some that no table reads, too."""


@dataclass(frozen=True, slots=True)
class Effective:
    """What overrides make of an HF config.

    Attributes:
        fields: the HF fields that are other than in the config that was given, and their values.
        free: the overrides that no HF field stands for, which are still to be applied.
    """

    fields: Mapping[str, object]
    free: Mapping[str, object]


def effective(
    hf: "PretrainedConfig", table: tuple[Field, ...], *, tp: int, overrides: Mapping[str, object]
) -> Effective:
    """The HF fields that say what ``overrides`` say.

    Args:
        hf: the config, as ``read_config`` gives it.
        table: the fields of its architecture.
        tp: what a vocabulary is padded for.
        overrides: as for ``to_transformer_config``.

    Raises:
        ConfigError: naming all overrides that this architecture's HF config has no place for.
    """
    if not overrides:
        return Effective({}, {})
    dims, source = ParallelDims(tp=tp), hf.to_dict()
    base = settings_of(hf, table, dims=dims, overrides=None)
    given = settings_of(hf, table, dims=dims, overrides=overrides)
    decided = decided_by(table, source)
    changed = {name for name in decided if not same(name, given, base)}
    problems, fields = [*_foreign(overrides, decided, given)], dict[str, object]()
    if changed:
        wanted = changed | (decided & overrides.keys())
        writing = _Writing(source, base, given, overrides, wanted)
        fields = writing.fields(table, changed)
        problems += writing.problems or writing.lost(table, hf, fields)
    if problems:
        raise ConfigError(
            f"Each override must have a place in the HF config of a {hf.model_type}, which says what a saved folder "
            f"computes, but these have none: {'; '.join(dict.fromkeys(problems))}. Remove them, or change the HF "
            "config that you pass."
        )
    return Effective(fields, {name: value for name, value in overrides.items() if name not in decided})


def decided_by(table: tuple[Field, ...], source: Hf) -> frozenset[str]:
    """The mcore names whose values an HF config says, by this table."""
    entries = (entry for entry in table if not isinstance(entry, Preset))
    return frozenset(name for entry in entries for name in entry.to_mcore(source)) - _PADDED


def same(name: str, one: Mcore, other: Mcore) -> bool:
    """Whether two models have the same under an mcore name, in whichever of megatron-core's spellings."""
    return _meant(name, one) == _meant(name, other)


def _meant(name: str, mcore: Mcore) -> object:
    value = mcore[name]
    if name in ("window_size", "window_attn_skip_freq") and "num_layers" in mcore:
        slides = layers_but_full(mcore, "window_attn_skip_freq", unset=1) if mcore["window_size"] else []
        return any(slides) and (_plain(value) if name == "window_size" else tuple(slides))
    if name == "linear_attention_freq":
        return tuple(layers_but_full(mcore, name, unset=0))
    if name == "moe_layer_freq":
        return tuple(layers_of(mcore)) if mcore.get("num_moe_experts") else None
    if name == "no_rope_freq":
        return tuple(layers_without_rope(mcore))
    if isinstance(value, Rope):
        return dict(value.parameters)  # its sizes are fields of their own
    return _plain(value)


def _plain(value: object) -> object:
    """Equal for equal values: two partials of one call are not equal by themselves, and a list is no tuple."""
    if isinstance(value, functools.partial):
        return (value.func, value.args, tuple(value.keywords.items()))
    return tuple(value) if isinstance(value, list) else value


def _foreign(overrides: Mapping[str, object], decided: Set[str], given: Mcore) -> Iterator[str]:
    """Overrides of what other families' tables map, but for those that say megatron-core's default."""
    latent = bool(given.get("multi_latent_attention"))
    defaults = {each.name: each.default for each in dataclasses.fields(config_class(latent=latent))}
    for name in sorted(OF_SOME & overrides.keys() - decided):
        if not same(name, given, {**given, name: defaults[name]}):
            yield f"{name}={given[name]!r}, where it is {defaults[name]!r}"


class _Writing:
    """How an HF config comes to say what overrides say: which fields it takes, and what goes wrong."""

    def __init__(
        self, source: Hf, base: Mcore, given: Mcore, overrides: Mapping[str, object], wanted: Set[str]
    ) -> None:
        """Of an HF config: its fields, what they say without and with overrides, and the names to be found in it."""
        self.source, self.base, self.given, self.overrides, self.wanted = source, base, given, overrides, wanted
        self.problems: list[str] = []

    def fields(self, table: tuple[Field, ...], changed: Set[str]) -> dict[str, object]:
        """The HF fields that are to be others.

        What no override is about follows, as a scale does that is the root of a size. Where an entry cannot read what
        others have made of the config, it is written too: that is a list with an entry for each layer.
        """
        entries = [(entry, entry.to_mcore(self.source)) for entry in table if not isinstance(entry, Preset)]
        fields = self._cut_lists()
        first = [entry for entry, read in entries if read.keys() & changed]
        for entry in first:
            fields |= self._written(entry)
        later = {**self.source, **fields}
        for entry in [entry for entry, read in entries if not read.keys() & changed and not self._reads(entry, later)]:
            fields |= self._written(entry)
        return {name: each for name, each in fields.items() if name not in self.source or self.source[name] != each}

    def lost(self, table: tuple[Field, ...], hf: "PretrainedConfig", fields: Mapping[str, object]) -> list[str]:
        """What is not found again in ``hf`` with these fields, or in the file that transformers would write of it."""
        try:
            hf = with_fields(hf, fields)
            reread = type(hf).from_dict(json.loads(hf.to_json_string()))
            now, later = to_mcore(table, hf.to_dict()), to_mcore(table, reread.to_dict())
        except Exception as error:  # whatever a config class raises is its verdict
            return [f"{self._say(self.wanted)} ({_cause(error)})"]
        missed = {name for name in self.wanted if name not in now or not same(name, now, self.given)}
        other = {name for name in now if not same(name, now, later)}
        found = [f"{self._say([name])}, which reads back as {now.get(name)!r}" for name in sorted(missed)]
        unstable = [f"{name}={now[name]!r}, which transformers reads back as {later[name]!r}" for name in sorted(other)]
        return found + unstable

    def _cut_lists(self) -> dict[str, object]:
        kept, num_layers = self.given.get("num_layers"), self.source.get("num_hidden_layers")
        if not isinstance(kept, int) or not isinstance(num_layers, int) or kept >= num_layers:
            return {}
        lists = {name: self.source.get(name) for name in _BY_LAYER}
        return {name: each[:kept] for name, each in lists.items() if isinstance(each, list) and len(each) == num_layers}

    def _written(self, entry: Field) -> dict[str, object]:
        names = entry.to_mcore(self.source).keys() & self.wanted
        try:
            fields = entry.to_hf(self.given)
        except Exception as error:  # a value of another type is any kind of error
            reason = "" if isinstance(entry, Const) else f" ({_cause(error)})"
            self.problems.append(f"{self._say(names)}{reason}")
            return {}
        if isinstance(entry, Map):  # under the spelling that the config has
            own = next((name for name in entry.names if name in self.source), entry.hf)
            return {own: fields[entry.hf]}
        return fields

    def _reads(self, entry: Field, source: Hf) -> bool:
        """Whether an entry finds in ``source`` what is wanted of it."""
        try:
            read = entry.to_mcore(source)
        except ConfigError:
            return False
        return all(same(name, {**self.given, **read}, self.given) for name in read.keys() & self.wanted)

    def _say(self, names: Iterable[str]) -> str:
        asked = sorted(self.overrides.keys() & names) or sorted(names)
        said = (f"{name}={self.given[name]!r}, where it is {self.base[name]!r}" for name in asked)
        return " and ".join(said)


def _cause(error: Exception) -> str:
    return (
        " ".join(str(error).split())
        .removesuffix(" Remove the override.")
        .removesuffix(" Remove overrides.")
        .removesuffix(".")
    )
