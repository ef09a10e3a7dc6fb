"""The provenance of a model: everything that determines the HF names of its weights."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from mcore_bridge.architecture import (
    architecture_of,
    composite_of,
    is_draft,
    published_fields,
    published_type,
    read_hf,
)
from mcore_bridge.arguments import accepts_former_names
from mcore_bridge.composite import IN_MODEL, Whole, spelling_in, text_of
from mcore_bridge.config.class_names import CLASSIFIERS, class_in, model_class, set_class, stem_of
from mcore_bridge.config.hf import find_folder, read_fields, with_fields, write_fields
from mcore_bridge.config.layer_kinds import MTP_COUNTS
from mcore_bridge.config.mesh.alike import Content, digest_of
from mcore_bridge.config.quantization import DESCRIPTION
from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.dtypes import dtype_name
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import (
    ExpertFormat,
    Prefixes,
    Rule,
    Rules,
    WeightMapping,
    embedding_names,
    pattern_of,
    respelled,
    respelled_name,
    top_names,
)
from mcore_bridge.rules.names import EMBEDDING, TOWER, mtp_layer_of
from mcore_bridge.rules.spec import TowerSpec
from mcore_bridge.rules.variants import (
    LM_HEAD,
    expert_format_of,
    fused,
    lm_head_of,
    prefix_of,
    redundant_head,
    score_head,
    tied_lm_head,
)
from mcore_bridge.weights.files.hf_folder import names_in
from mcore_bridge.weights.source.tied_tensors import is_tied, ties_any_head

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

HF = Union[str, "os.PathLike[str]", "PretrainedConfig"]
"""A folder, a hub name in the local cache, or a config."""
_OF_RANK = ("_name_or_path", "transformers_version")
"""Fields of a config that do not change its model."""
_PLACES = "embeddings.position_embedding.weight"
logger = logging.getLogger("mcore_bridge")


@dataclass(frozen=True, slots=True)
class Provenance:
    """The HF config of a model, its head, its folder, and what its architecture has for HF names.

    ``rules``, ``ignored`` and ``optional`` come from the architecture.

    For a composite, ``hf`` is the config of its text, names are the composite's, and ``whole`` describes the composite.
    A folder may hold the text alone under names with other prefixes, for example if transformers read it from a
    composite. Then ``prefixes`` has these.

    ``expert_format`` is the format of the folder, or of the architecture if there is no folder. ``overridden`` has the
    fields of ``hf`` that overrides have changed. A config that replaces ``hf`` needs these values, too.

    ``vision`` is the argument of ``build_model``. ``tower`` has the tensors of the composite's tower, with their names
    in memory. It is empty if the tower is not built.
    """

    hf: PretrainedConfig
    rules: Rules
    ignored: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    head: str = "lm"
    folder: str | None = None
    expert_format: ExpertFormat = "split"
    overridden: Mapping[str, object] = field(default_factory=dict)
    whole: Whole | None = None
    vision: str = "text_only"
    tower: tuple[TowerSpec, ...] = ()
    prefixes: Prefixes = ()

    @property
    def swapped_in_peft(self) -> bool:
        """See ``Architecture``."""
        return architecture_of(self.hf).swapped_in_peft

    @property
    def renamed_in_memory(self) -> Prefixes:
        """See ``Architecture``."""
        return architecture_of(self.hf).renamed_in_memory

    def seeing(self, vision: str, tower: tuple[TowerSpec, ...]) -> Provenance:
        """A copy with this tower. HF names of the tower are the names in the folder."""
        if not tower:
            return self
        names = names_in(self.folder) if self.folder else ()
        return replace(self, vision=vision, tower=tower).spelled_as(names)

    def with_overridden(self, fields: Mapping[str, object]) -> Provenance:
        """The provenance with these fields in the HF config, and the rules that follow from it."""
        if not fields:
            return self
        hf = with_fields(self.hf, fields)
        return replace(self, hf=hf, rules=respelled(_plain_rules(hf, self.whole), self.spelling), overridden=fields)

    def with_config(self, config: PretrainedConfig) -> Provenance:
        """A copy with another config of the same kind. Overridden fields are overridden in it, too."""
        whole = None if self.whole is None else replace(self.whole, config=config)
        hf = config if whole is None else text_of(config, whole.composite)
        return replace(self, hf=with_fields(hf, self.overridden), whole=whole)

    def spelled_as(self, names: Iterable[str]) -> Provenance:
        """A copy whose rules spell the names of a text model, and of the tower of its composite, as ``names`` do."""
        names, plain = frozenset(names), _plain_rules(self.hf, self.whole)
        embedding = next(iter(embedding_names(plain)), "")
        if self.whole is None:
            prefixes = IN_MODEL if respelled_name(embedding, IN_MODEL) in names - {embedding} else ()
            bare = ((prefix_of(embedding), ""),)
            if self.head == "none" and embedding not in names and respelled_name(embedding, bare) in names:
                prefixes = bare  # the names of a base model, which is a model without a head
            if prefixes == self.prefixes:
                return self
            return replace(self, rules=respelled(plain, prefixes), prefixes=prefixes)
        spelling = spelling_in(names, self.whole.composite, embedding)
        tower = self.whole.tower_spelling_in(names, [spec.name for spec in self.tower]) if self.tower else ()
        return replace(
            self, rules=respelled(plain, spelling), whole=replace(self.whole, spelling=spelling, tower=tower)
        )

    def loaded_from(self, folder: str, names: Collection[str]) -> Provenance:
        """A copy with the folder of its weights, whose HF names and expert format follow ``names`` in that folder."""
        own = self.spelled_as(names)
        return replace(own, folder=folder, expert_format=expert_format_of(names, own.rules) or own.expert_format)

    @property
    def config(self) -> PretrainedConfig:
        """The config of a saved folder: for a composite, the config of the composite."""
        return self.hf if self.whole is None else self.whole.with_text(self.hf)

    @property
    def spelling(self) -> Prefixes:
        """The prefixes of HF names of a composite, which replace the prefixes of its text model."""
        return self.prefixes if self.whole is None else self.whole.spelling

    @property
    def has_other_parts(self) -> bool:
        """Whether a save copies tensors of parts of a composite that are not built."""
        return bool(self._parts())

    @property
    def lm_head(self) -> str:
        """The HF name of the weight of the LM head."""
        heads = lm_head_of(self.rules, self.spelling)
        return next(rule.hf[0] for rule in heads if rule.mcore == "output_layer.weight")

    def mapping(self, *, tied: bool, mtp: int = 0, expert_format: ExpertFormat | None = None) -> WeightMapping:
        """The weight mapping of the model: all rules, with the rules of the architecture's head, or ``LM_HEAD``.

        Args:
            tied: whether the output layer is the word embedding.
            mtp: how many MTP layers are built. With some, their copies of embedding and head are written; without, all
                tensors of these layers are not built.
            expert_format: the format of experts in the HF names; None is the model's own.

        Raises:
            ConfigError: there is no such format.
        """
        if expert_format not in (None, "split", "fused"):
            raise ConfigError(
                f"expert_format must be 'split' (a tensor for each expert), 'fused' or None, found {expert_format!r}: "
                "pass one of them"
            )
        rules = fused(self.rules) if (expert_format or self.expert_format) == "fused" else self.rules
        rules = (*rules, *self._tower_rules())
        lm_head = lm_head_of(rules, self.spelling)
        rules = tuple(rule for rule in rules if rule not in lm_head)
        ignored = (*self.ignored, *self._old_buffers())
        if tied:
            rules = tuple(replace(rule, mcore=EMBEDDING) if _is_written_again(rule) else rule for rule in rules)
        unbuilt = tuple(respelled_name(name, self.spelling) for name in architecture_of(self.hf).mtp(self.hf))
        repeated: tuple[tuple[str, str], ...] = ()
        if not mtp:
            repeated = tuple((name, rule.mcore) for rule in rules if _is_written_again(rule) for name in rule.hf)
            unbuilt = (*unbuilt, *(name for name, _ in repeated))
            rules = tuple(rule for rule in rules if not _is_written_again(rule))
        is_lm = self.head == "lm"
        parts: dict[str, Any] = {**self._parts(), "num_mtp_layers": mtp, "mtp": unbuilt, "copies_mtp": is_lm}
        parts["repeated"] = repeated
        if not is_lm:
            # A causal LM has no score: we skip its LM head, and our new head keeps its random values. In transformers,
            # too, ...ForSequenceClassification and ...ForTokenClassification have no lm_head.
            names = (name for rule in lm_head for name in rule.hf)
            if self.head == "none":
                return WeightMapping(rules, (*ignored, *names, "score.*"), self.optional, **parts)
            return WeightMapping(
                (*rules, *score_head(self.head)), (*ignored, *names), ("score.*", *self.optional), **parts
            )
        if tied and ties_any_head():
            return WeightMapping((*rules, *tied_lm_head(rules)), (*ignored, self.lm_head), self.optional, **parts)
        if tied:
            again = redundant_head(rules, self.lm_head)
            return WeightMapping((*rules, *tied_lm_head(rules), *again), ignored, self.optional, **parts)
        return WeightMapping((*rules, *lm_head), ignored, self.optional, **parts)

    def _tower_rules(self) -> Rules:
        """A rule for each kind of tensor in the tower, which every rank of its stage holds whole."""
        spelling = self.whole.tower if self.whole is not None else ()
        kinds = {pattern_of(spec.name): spec.is_linear for spec in self.tower}
        return tuple(
            Rule(f"{TOWER}{kind}", (respelled_name(kind, spelling),), REPLICATED, is_linear=is_linear)
            for kind, is_linear in kinds.items()
        )

    def _old_buffers(self) -> tuple[str, ...]:
        """Names of ``position_ids``, which older releases saved beside the embedding of a CLIP or SigLIP."""
        spelling = self.whole.tower if self.whole is not None else ()
        places = (spec.name for spec in self.tower if spec.name.endswith(_PLACES))
        return tuple(
            respelled_name(name.removesuffix(_PLACES), spelling) + "embeddings.position_ids" for name in places
        )

    def _parts(self) -> dict[str, tuple[str, ...]]:
        """Prefixes that separate the tensors of a composite's text model from tensors that are not built."""
        if self.whole is None:
            return {}
        not_built = self.whole.composite.not_built
        if self.tower:
            return {"text": ("",), "not_built": not_built} if not_built else {}
        names = top_names((*_plain_rules(self.hf, self.whole), *LM_HEAD, *score_head(self.head)))
        text = tuple(respelled_name(name, self.spelling) for name in names)
        return {"text": text, "not_built": not_built}


def _plain_rules(hf: PretrainedConfig, whole: Whole | None) -> Rules:
    """The rules of a text, before a composite respells its prefixes."""
    own = whole.composite.rules if whole is not None else None
    return own(hf) if own is not None else architecture_of(hf).rules(hf)


def identity(provenance: Provenance) -> Content:
    """A description of a model's HF config that ranks can compare, without the path of its folder."""
    fields = {name: value for name, value in provenance.config.to_dict().items() if name not in _OF_RANK}
    name = provenance.folder or f"a config of {provenance.hf.model_type}"
    return Content(name, digest_of(json.dumps(fields, sort_keys=True, default=str)))


def provenance_of(hf: HF, *, head: str | None = "lm") -> Provenance:
    """The provenance that follows from an HF config.

    If the config of a folder ties a head that differs from the embedding, the head is a separate tensor, as in
    transformers. The config of the result then has ``tie_word_embeddings=False``. A config without a folder is not
    checked.

    Args:
        hf: a folder, a hub name in the local cache, or a ``PretrainedConfig``.
        head: None means the head that ``head_of`` returns.

    Raises:
        ConfigError: when ``hf`` is no config, or no architecture is registered for it.
        CheckpointError: head and embedding must be compared, and their files cannot be read.
    """
    config = read_hf(hf)
    folder = os.fspath(find_folder(hf)) if isinstance(hf, str | os.PathLike) else None
    names = names_in(folder) if folder else ()
    whole = None
    if (composite := composite_of(config)) is not None:
        whole, config = Whole(composite, config, composite.spelling), text_of(config, composite)
    architecture = architecture_of(config)
    rules = respelled(_plain_rules(config, whole), whole.spelling if whole else ())
    provenance = Provenance(
        config,
        rules,
        ignored=architecture.ignored,
        optional=architecture.optional,
        head=head or "lm",
        folder=folder,
        whole=whole,
    ).spelled_as(names)
    if head is None:
        provenance = replace(provenance, head=_head_in(provenance, names)).spelled_as(names)
    if folder and provenance.head == "lm" and config.tie_word_embeddings:
        embeddings = embedding_names(provenance.rules)
        config.tie_word_embeddings = all(is_tied(folder, names, name, provenance.lm_head) for name in embeddings)
    return replace(provenance, expert_format=expert_format_of(names, provenance.rules) or architecture.expert_format)


def head_of(hf: HF, names: Iterable[str] = ()) -> str:
    """The head with which a checkpoint loads: "lm", or "none" if it has no head, as of embedding models.

    Args:
        hf: the folder or config of the model.
        names: HF names, or canonical names. If empty, the names in the folder ``hf`` are used, if it has weights.
    """
    provenance = provenance_of(hf)
    return _head_in(provenance, tuple(names) or (names_in(provenance.folder) if provenance.folder else ()))


def _head_in(provenance: Provenance, names: Collection[str]) -> str:
    heads = {name for rule in lm_head_of(provenance.rules, provenance.spelling) for name in rule.hf}
    has_head = any(name in heads or name.startswith("output_layer.") for name in names)
    return "lm" if has_head or not names or provenance.hf.tie_word_embeddings else "none"


@accepts_former_names
def mapping(hf: HF, *, head: str = "lm", expert_format: ExpertFormat | None = None) -> WeightMapping:
    """The weight mapping of a model: its rules, and HF names that a checkpoint may have in addition, or may lack.

    Args:
        hf: a folder, a hub name in the local cache, or a ``PretrainedConfig``.
        head: ``"lm"``, ``"value"``, ``"classification"``, ``"process_reward"`` or ``"none"``.
        expert_format: how HF names the experts; None is the format of the folder, or of the architecture.

    Returns:
        The rules; ``bind`` finds the rule of a megatron-core parameter.

    Raises:
        ConfigError: no architecture is registered for the config, or it refuses the config.

    Example:
        >>> mb.mapping("path/of/Qwen3-8B").bind("decoder.final_layernorm.weight").hf
        ('model.norm.weight',)
    """
    provenance = provenance_of(hf, head=head)
    return provenance.mapping(tied=bool(provenance.hf.tie_word_embeddings), expert_format=expert_format)


def config_in(
    provenance: Provenance, dtype: torch.dtype, *, tied: bool, names: Collection[str] | None = None
) -> PretrainedConfig:
    """A copy of the HF config with ``dtype`` as the dtype of most weights.

    A config without a class gets transformers' class, since vLLM takes it for an embedding model otherwise. A class
    whose head is not in the folder becomes the class without a head.

    Args:
        tied: whether the LM head is tied to the embedding; the config is set accordingly. For another head the field is
            not changed.
        names: all HF tensors of the folder, which determine the number of MTP layers in the config, and the class. None
            leaves both unchanged.
    """
    hf = copy.deepcopy(provenance.hf)
    if provenance.head == "lm":
        hf.tie_word_embeddings = tied
    if names is not None:
        _count_mtp(hf, provenance, names)
    config = replace(provenance, hf=hf).config
    if not class_in(config) and (name := model_class(config.model_type)):
        set_class(config, name)
    if names is not None and (own := class_in(config)) and _loses_head(provenance, own[0], names):
        set_class(config, f"{stem_of(own[0])}Model")
    for name in DESCRIPTION:  # they describe the source's encoding; written weights are plain
        if hasattr(config, name):
            delattr(config, name)
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype_name(dtype))
    return config


def _loses_head(provenance: Provenance, name: str, names: Collection[str]) -> bool:
    """Whether a folder with these HF names lacks the head of the class ``name``, which transformers would draw then.

    Files of embedding models may name the class of a causal LM. They keep it.
    """
    if name.endswith(CLASSIFIERS):
        return not any(own.startswith("score.") for own in names)
    if provenance.head != "none" or is_draft(provenance.hf) or provenance.hf.tie_word_embeddings:
        return False
    return provenance.folder is None or head_of(provenance.folder) == "lm"


def _is_written_again(rule: Rule) -> bool:
    """Whether a rule is about a copy of embedding or head in an MTP layer, which a save writes."""
    return rule.copy and rule.exported


def write_config(config: PretrainedConfig, folder: Path) -> None:
    """Write the config.json of a checkpoint, with the published names of its fields, which engines read."""
    config.save_pretrained(folder)
    names, kind = dict(published_fields(config.model_type)), published_type(config.model_type)
    if names or kind != config.model_type:
        path = folder / "config.json"
        fields = {names.get(name, name): value for name, value in read_fields(path).items()}
        write_fields(path, {**fields, "model_type": kind})


def _count_mtp(hf: PretrainedConfig, provenance: Provenance, names: Collection[str]) -> None:
    """Set the number of MTP layers in ``hf`` by ``names``, since engines load as many as their config says.

    If the family has no rules for MTP layers, their number is unknown, and the config counts all or none.
    """
    fields = [name for name in MTP_COUNTS if getattr(hf, name, None) is not None]
    if not fields:
        return
    mapping = provenance.mapping(tied=False)
    held = [name for name in names if mapping.is_unbuilt_mtp(name)]
    layers = {mtp_layer_of(mcore) for name in held for mcore in mapping.consumers(name)} - {None}
    for name in fields:
        if (count := getattr(hf, name)) != len(layers) and (layers or (count and not held)):
            logger.warning(
                "the written config has %s=%d instead of %d, since the files have %s MTP layers. A save copies MTP "
                "layers that are not built from the folder of the model, if the folder has them for this depth",
                *(name, len(layers), count, len(layers) or "no"),
            )
            setattr(hf, name, len(layers))
