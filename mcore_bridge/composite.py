"""Composites: checkpoints that join a text model to models of images, video or sound.

A composite refers to a text architecture. It has the prefixes of the text model's tensors, and a table for its own
config fields. All other tensors in its files belong to its tower, which transformers builds. If the tower is not built,
these tensors are not built: no parameter uses them, and a save copies their bytes.
"""

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_bridge.config.class_names import class_in
from mcore_bridge.config.fields import Field, Hf, to_mcore
from mcore_bridge.config.rope import head_dim
from mcore_bridge.config.rope_spelling import speaks_rope_parameters
from mcore_bridge.config.unread_fields import without_unread
from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.mapping import Prefixes, Rules, respelled_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# fmt: off
IN_MODEL = (("model.", "model.language_model."),)
INSIDE   = (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
            ("backbone.", "language_model.backbone."), ("mtp.", "language_model.mtp."))
BESIDE   = (("model.", "model."),)
TWICE    = (("model.", "language_model.model.model."), ("lm_head.", "language_model.lm_head."))
BASE     = (("model.", "language_model."),)
IN_TEXT  = (("model.", "model.text_model."),)
THINKER  = (("model.", "thinker.model."), ("lm_head.", "thinker.lm_head."))
IN_THINKER = (("model.", "thinker.model.language_model."), ("lm_head.", "thinker.lm_head."))
# fmt: on
"""Prefixes of the text model's names: within ``model``, as a whole model inside, as without a composite, or within a
base model, whose names have no ``model.``. ``IN_TEXT`` is ``IN_MODEL`` by another name, as Idefics has it. ``THINKER``
and ``IN_THINKER`` are for a composite beside models of speech: in files, and in transformers' memory.

``TWICE`` is what transformers 5.17 writes of models of sound; later ones write ``INSIDE``.
"""
SPELLINGS: tuple[Prefixes, ...] = (IN_MODEL, INSIDE, BESIDE, TWICE, BASE, THINKER, IN_THINKER)
TRANSFORMERS = "5.17"
"""The first release whose composites compute positions and masks before they call their language model. Some
composites are in later releases alone."""
_TOWERS = ("vision_tower.", "image_tower.", "video_tower.")
_INNER = tuple((name, f"{name}vision_model.") for name in _TOWERS)
"""Prefixes of a CLIP or SigLIP in files. transformers 5.8 and later have no ``vision_model`` there."""
_WITH_INNER = ("clip_vision_model", "siglip_vision_model")


@dataclass(frozen=True, kw_only=True)
class Composite:
    """Describes a composite: the place of its text model in its config and in its files, and its tower.

    Args:
        model_type: as HF spells it.
        spelling: prefixes of the text model in published files. A folder may have another one of ``SPELLINGS``.
        in_memory: prefixes of the text model in the memory of transformers 5. None: as in files, or releases differ.
        fields: the table of the fields that are in the composite's config, and not in its text config.
        classes: names that published configs have in ``architectures``, besides names of transformers' auto classes.
        text: the ``model_type`` of the text model. None: the one in the text config.
        inside: the field with the config of the composite itself, if its checkpoint has more models, such as a talker.
            Empty: the whole config.
        not_built: prefixes of tensors that are not built, whether or not the tower is built.
        tower: prefixes of the tower's names in memory, as patterns, with their prefixes in published files. None: they
            follow from ``spelling``.
        joined_qkv: the name of a layer that joins queries, keys and values in the tower of published files.
        rules: the weight rules of the text in published files, from its config, if they differ from the rules of the
            text alone in more than prefixes. ``spelling`` has the prefixes of their names. None: the rules of the text.
        published_fields: fields of the config whose names in published files differ from the names in transformers,
            each with its published name.
        is_remote: whether its code is published beside the weights, and transformers has none.
        without_tower: why its tower is not built; empty if it is.
        broken_in: releases of transformers whose own class of this composite fails in every forward.
        without_reference: why logits are not compared with transformers' composite; empty if they are.

    Example:
        >>> Composite(model_type="qwen3_5", spelling=IN_MODEL, fields=SEEN)  # doctest: +SKIP
    """

    model_type: str
    spelling: Prefixes
    fields: tuple[Field, ...]
    in_memory: Prefixes | None = IN_MODEL
    classes: tuple[str, ...] = ()
    text: str | None = None
    inside: str = ""
    not_built: tuple[str, ...] = ()
    tower: Prefixes | None = None
    joined_qkv: str = ""
    rules: "Callable[[PretrainedConfig], Rules] | None" = None
    published_fields: Prefixes = ()
    is_remote: bool = False
    without_tower: str = ""
    broken_in: tuple[str, ...] = ()
    without_reference: str = ""


@dataclass(frozen=True, slots=True)
class Whole:
    """The composite (model of images and text) that a text config was taken from.

    It has the composite's own config, and the prefixes that its files put before names of the text and of the tower.

    ``tower`` has prefixes of names in memory, each with its prefix in files. The first match counts.
    """

    composite: Composite
    config: "PretrainedConfig"
    spelling: Prefixes
    tower: Prefixes = ()

    @property
    def core(self) -> "PretrainedConfig":
        """The config that has the text config, and the configs of the tower."""
        return core_of(self.config, self.composite)

    def tower_spelling_in(self, names: Collection[str], tower: Collection[str]) -> Prefixes:
        """The prefixes of the tower in a folder: the set of prefixes under which most of its tensors are there.

        Args:
            names: the names of the tensors in the folder. Without names, the result is for published files.
            tower: the names of the tower's tensors in memory.
        """
        if self.composite.tower is not None:
            return self.composite.tower
        has_inner = getattr(self.core.vision_config, "model_type", None) in _WITH_INNER
        candidates = [
            tuple((old, f"{before}{new}") for old, new in (*inner, ("", "")))
            for before in (("model.", "") if self.composite.spelling == IN_MODEL else ("", "model."))
            for inner in ((_INNER, ()) if has_inner else ((), _INNER))
        ]
        return max(candidates, key=lambda spelling: sum(respelled_name(name, spelling) in names for name in tower))

    def with_text(self, text: "PretrainedConfig") -> "PretrainedConfig":
        """The config of the composite with this text config: the inverse of ``text_of``.

        The composite decides ties and dtype. They are set in both configs, since different releases of transformers
        read different ones.
        """
        whole, inner = copy.deepcopy(self.config), copy.deepcopy(text)
        core = core_of(whole, self.composite)
        core.tie_word_embeddings = text.tie_word_embeddings
        for name in {"architectures", *_DTYPES} & vars(inner).keys():
            setattr(inner, name, getattr(core.text_config, name, None))
        if hasattr(inner, "quantization_config"):
            del inner.quantization_config
        core.text_config = inner
        return whole


def levels_of(hf: "PretrainedConfig", composite: Composite) -> tuple["PretrainedConfig", ...]:
    """The config of a checkpoint; and the config of the composite itself, if that is another one."""
    return (hf, core_of(hf, composite)) if composite.inside else (hf,)


def core_of(hf: "PretrainedConfig", composite: Composite) -> "PretrainedConfig":
    """The config of a composite itself, within the config of a checkpoint that may have more models."""
    core: PretrainedConfig = getattr(hf, composite.inside) if composite.inside else hf
    return core


def text_of(hf: "PretrainedConfig", composite: Composite) -> "PretrainedConfig":
    """The text config of a composite, with the values that the composite decides.

    Raises:
        ConfigError: there is no text config, or the table does not claim a field of the composite itself.
    """
    core = core_of(hf, composite)
    inner = getattr(core, "text_config", None)
    if inner is None or isinstance(inner, dict):
        raise ConfigError(f"The config of a {hf.model_type} must have a text_config, found {inner!r}.")
    for level in levels_of(hf, composite):
        to_mcore(composite.fields, own_fields(level, inner, composite))
    text = copy.deepcopy(inner)
    if composite.text is not None:
        text.model_type = composite.text
    # transformers 5 reads this field from the composite; 4.57 and remote code read it from the text config
    decides = core if speaks_rope_parameters() and not composite.is_remote else inner
    text.tie_word_embeddings = bool(decides.tie_word_embeddings)
    text.architectures = class_in(hf)
    for name in (*_DTYPES, "quantization_config"):
        if getattr(hf, name, None) is not None:
            setattr(text, name, getattr(hf, name))
    return text


def own_fields(hf: "PretrainedConfig", inner: "PretrainedConfig", composite: Composite) -> Hf:
    """The fields of a composite itself: its text config ``inner`` does not repeat them, and transformers reads them.

    verl writes the ``rope_theta`` of a text into the composite, too. A flat config may have the ``head_dim`` that its
    text computes.
    """
    text, absent = inner.to_dict(), object()
    rope = text.get("rope_parameters") or {}
    computed = {"head_dim": head_dim(text)} if getattr(hf, "head_dim", None) is not None else {}
    repeated = [text, computed, rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    return {
        name: value
        for name, value in without_unread(hf, composite.fields).items()
        if name in _DECIDED_BY_WHOLE or all(fields.get(name, absent) != value for fields in repeated)
        if not (name in _DECIDED_BY_TEXT and name in text)
    }


_DTYPES = ("dtype", "torch_dtype")
_DECIDED_BY_WHOLE = frozenset({"model_type", "architectures"})
_DECIDED_BY_TEXT = frozenset({"vocab_size"})
"""Fields that yield to those of the text: ``resize_token_embeddings`` of transformers changes the text's alone."""


def spelling_in(names: Iterable[str], composite: Composite, embedding: str) -> Prefixes:
    """The prefixes of the text model in a folder, found by the name of its embedding.

    Args:
        names: the names of the tensors in the folder. Without names, the result is for published files.
        composite: the declaration of the composite.
        embedding: the name of the embedding in a checkpoint of the text model alone.
    """
    names = set(names)
    for spelling in (composite.spelling, *SPELLINGS):
        if respelled_name(embedding, spelling) in names:
            return spelling
    return composite.spelling
