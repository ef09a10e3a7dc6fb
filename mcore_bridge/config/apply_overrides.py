"""The effective HF config: the given config, changed so that it expresses the overrides.

Rules, names of weights and saved folders all follow the HF config. If an override were not in the HF config, a saved
folder would not load, or would compute other values. So an override of a value that the table maps is written into the
HF config, or raises. Other overrides are free: no HF config has such values.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_bridge.config.fields import Const, Field, Hf, Mcore, Preset, count, to_mcore, written
from mcore_bridge.config.hf import special_float, with_fields
from mcore_bridge.config.layer_kinds import layers_but_full, layers_of, layers_without_rope, sizes_by_layer
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.overrides import config_class
from mcore_bridge.config.rope import Rope
from mcore_bridge.config.tables.derived import comparable
from mcore_bridge.config.transformer import settings_of
from mcore_bridge.errors import ConfigError
from mcore_bridge.foreign_files import parse

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OF_SOME = frozenset(
    (
        *("activation_func_clamp_value", "glu_linear_offset", "softmax_scale", "softmax_type", "no_rope_freq"),
        *("attention_output_gate", "experimental_attention_variant", "apply_residual_connection_post_layernorm"),
        *("moe_layer_freq", "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"),
    )
)
"""Values that only some families have in their HF config. The other families need megatron-core's default."""
_PADDED = frozenset({"vocab_size"})
"""Values that megatron-core may pad; ``hf_vocab_size`` keeps HF's value."""
_BY_LAYER = (
    *("layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers", "attn_type_list"),
    *("num_attention_heads_per_layer", "layer_rope_theta"),
)
"""HF fields with one entry per layer. transformers checks the length of some of them that no table reads."""


@dataclass(frozen=True, slots=True)
class Effective:
    """The effect of overrides on an HF config.

    Attributes:
        fields: the HF fields that change, with their new values.
        free: the overrides that no HF field can express; they still have to be applied.
    """

    fields: Mapping[str, object]
    free: Mapping[str, object]


def effective(
    hf: "PretrainedConfig", table: tuple[Field, ...], *, tp: int, overrides: Mapping[str, object]
) -> Effective:
    """The changes of an HF config that express ``overrides``.

    Args:
        hf: the config, as ``read_config`` gives it.
        table: the fields of its architecture.
        tp: the tensor parallel size; the vocabulary is padded to a multiple of it.
        overrides: as for ``to_transformer_config``.

    Raises:
        ConfigError: the HF config of this architecture cannot express some overrides; the message names all of them.
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
            f"Each override must be a value that the HF config of a {hf.model_type} can express, because saved folders "
            f"follow it; found {'; '.join(dict.fromkeys(problems))}. Remove these overrides, or change the HF config "
            "that you pass."
        )
    return Effective(fields, {name: value for name, value in overrides.items() if name not in decided})


def decided_by(table: tuple[Field, ...], source: Hf) -> frozenset[str]:
    """The mcore names whose values the HF config decides through this table."""
    entries = (entry for entry in table if not isinstance(entry, Preset))
    return frozenset(name for entry in entries for name in entry.to_mcore(source)) - _PADDED


def same(name: str, one: Mcore, other: Mcore) -> bool:
    """Whether two models have equal values under an mcore name, even if megatron-core has several ways to write it."""
    return _meant(name, one) == _meant(name, other)


def _meant(name: str, mcore: Mcore) -> object:
    value = mcore[name]
    if name in ("window_size", "window_attn_skip_freq") and "num_layers" in mcore:
        slides = layers_but_full(mcore, "window_attn_skip_freq", unset=1) if mcore["window_size"] else []
        return any(slides) and (comparable(value) if name == "window_size" else tuple(slides))
    if name == "linear_attention_freq":
        return tuple(layers_but_full(mcore, name, unset=0))
    if name == "moe_layer_freq":
        return tuple(layers_of(mcore)) if mcore.get("num_moe_experts") else None
    if name == "no_rope_freq":
        return tuple(layers_without_rope(mcore))
    if name == "per_layer_config" and isinstance(value, tuple):
        return sizes_by_layer(value[: count(mcore, "num_layers")], mcore)
    if isinstance(value, Rope):
        return dict(value.parameters)  # the sizes of a rope are other fields
    return comparable(value)


def _foreign(overrides: Mapping[str, object], decided: Set[str], given: Mcore) -> Iterator[str]:
    """Overrides of values that only other families can have, unless they equal megatron-core's default."""
    latent = bool(given.get("multi_latent_attention"))
    defaults = {field.name: field.default for field in dataclasses.fields(config_class(latent=latent))}
    for name in sorted(OF_SOME & overrides.keys() - decided):
        if not same(name, given, {**given, name: defaults[name]}):
            yield f"{name}={given[name]!r}, expected {defaults[name]!r}"


class _Writing:
    """Writes overrides into an HF config, and collects the problems."""

    def __init__(
        self, source: Hf, base: Mcore, given: Mcore, overrides: Mapping[str, object], wanted: Set[str]
    ) -> None:
        """Take the HF fields, their mcore values without and with overrides, and the names that HF must express."""
        self.source, self.base, self.given, self.overrides, self.wanted = source, base, given, overrides, wanted
        self.problems: list[str] = []

    def fields(self, table: tuple[Field, ...], changed: Set[str]) -> dict[str, object]:
        """The HF fields that change, with their new values.

        A value may also change with another override: a scale that is the root of a size follows the size. Entries that
        cannot read the changed config are written too, such as a list with one entry per layer.
        """
        entries = [(entry, entry.to_mcore(self.source)) for entry in table if not isinstance(entry, Preset)]
        fields = self._cut_lists()
        first = [entry for entry, read in entries if read.keys() & changed]
        for entry in first:
            fields |= self._written(entry)
        later = {**self.source, **fields}
        for entry in [entry for entry, read in entries if not read.keys() & changed and not self._reads(entry, later)]:
            fields |= self._written(entry)
        return {name: value for name, value in fields.items() if name not in self.source or self.source[name] != value}

    def lost(self, table: tuple[Field, ...], hf: "PretrainedConfig", fields: Mapping[str, object]) -> list[str]:
        """Values that are lost: in ``hf`` with these fields, or in the file that transformers writes."""
        try:
            hf = with_fields(hf, fields)
            reread = type(hf).from_dict(parse(hf.to_json_string().encode(), finite=False, hook=special_float))
            now, later = to_mcore(table, hf.to_dict()), to_mcore(table, reread.to_dict())
        except Exception as error:  # a config class may raise any type
            return [f"{self._say(self.wanted)} ({_cause(error)})"]
        missed = {name for name in self.wanted if name not in now or not same(name, now, self.given)}
        other = {name for name in now if not same(name, now, later)}
        lost = [f"{self._say([name])}, which reads back as {now.get(name)!r}" for name in sorted(missed)]
        unstable = [f"{name}={now[name]!r}, which transformers reads back as {later[name]!r}" for name in sorted(other)]
        return lost + unstable

    def _cut_lists(self) -> dict[str, object]:
        kept, num_layers = self.given.get("num_layers"), self.source.get("num_hidden_layers")
        if not isinstance(kept, int) or not isinstance(num_layers, int) or kept >= num_layers:
            return {}
        lists = {name: self.source.get(name) for name in _BY_LAYER}
        layers = {name: value for name, value in lists.items() if isinstance(value, list) and len(value) == num_layers}
        return {name: value[:kept] for name, value in layers.items()}

    def _written(self, entry: Field) -> dict[str, object]:
        names = entry.to_mcore(self.source).keys() & self.wanted
        try:
            return written(entry, self.source, self.given)
        except Exception as error:  # a value of a wrong type may raise any type
            reason = "" if isinstance(entry, Const) else f" ({_cause(error)})"
            self.problems.append(f"{self._say(names or self.wanted)}{reason}")
            return {}

    def _reads(self, entry: Field, source: Hf) -> bool:
        """Whether an entry reads the wanted values from ``source``."""
        try:
            read = entry.to_mcore(source)
        except ConfigError:
            return False
        return all(same(name, {**self.given, **read}, self.given) for name in read.keys() & self.wanted)

    def _say(self, names: Iterable[str]) -> str:
        asked = sorted(self.overrides.keys() & names) or sorted(names)
        said = (f"{name}={self.given[name]!r}, expected {self.base[name]!r}" for name in asked)
        return " and ".join(said)


def _cause(error: Exception) -> str:
    return (
        " ".join(str(error).split())
        .removesuffix(" Remove the override.")
        .removesuffix(" Remove overrides.")
        .removesuffix(".")
    )
