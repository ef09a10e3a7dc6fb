"""Composites: checkpoints that join a model of text to models of images, video or sound.

A composite is a text architecture by reference, the prefixes of its tensors, and a table for its own config fields.
All else in its files is carried: no parameter takes it, and a save copies its bytes.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_bridge.config.fields import Field, Hf, to_mcore
from mcore_bridge.config.rope_spelling import speaks_rope_parameters
from mcore_bridge.config.unread import without_unread
from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.mapping import Prefixes, respelled_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# fmt: off
IN_MODEL = (("model.", "model.language_model."),)
INSIDE   = (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
BESIDE   = (("model.", "model."),)
# fmt: on
"""How composites spell the names of their text: in ``model``, as a whole model inside, or as it is by itself."""
SPELLINGS: tuple[Prefixes, ...] = (IN_MODEL, INSIDE, BESIDE)


@dataclass(frozen=True, kw_only=True)
class Composite:
    """How the text of a composite is found in its config and in its files.

    Args:
        model_type: as HF spells it.
        spelling: prefixes of its text in published files. A folder may have another one of ``SPELLINGS``.
        fields: the table of its own fields, which are those that its text config does not repeat.
        text: the ``model_type`` of its text; None is what the text config says.
        carried: prefixes of tensors that begin like the text's, and are of other parts.

    Example:
        >>> Composite(model_type="qwen3_5", spelling=IN_MODEL, fields=SEEN)  # doctest: +SKIP
    """

    model_type: str
    spelling: Prefixes
    fields: tuple[Field, ...]
    text: str | None = None
    carried: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Whole:
    """The composite that a text config was taken from: its declaration, its config, and how its files spell names."""

    composite: Composite
    config: "PretrainedConfig"
    spelling: Prefixes

    def with_text(self, text: "PretrainedConfig") -> "PretrainedConfig":
        """The config of the composite with this text in it: the inverse of ``text_of``.

        Ties and dtype are the composite's; they are set in both places, as releases of transformers read either.
        """
        whole, inner = copy.deepcopy(self.config), copy.deepcopy(text)
        whole.tie_word_embeddings = text.tie_word_embeddings
        for name in {"architectures", *_DTYPES} & vars(inner).keys():
            setattr(inner, name, getattr(whole.text_config, name, None))
        if hasattr(inner, "quantization_config"):
            del inner.quantization_config
        whole.text_config = inner
        return whole


def text_of(hf: "PretrainedConfig", composite: Composite) -> "PretrainedConfig":
    """The config of the text of a composite, with what the composite decides for it.

    Raises:
        ConfigError: there is no text config, or a field of the composite itself is not accounted for.
    """
    inner = getattr(hf, "text_config", None)
    if inner is None or isinstance(inner, dict):
        raise ConfigError(f"The config of a {hf.model_type} must have a text_config, found {inner!r}.")
    to_mcore(composite.fields, own_fields(hf, composite))
    text = copy.deepcopy(inner)
    if composite.text is not None:
        text.model_type = composite.text
    text.tie_word_embeddings = _ties(hf, inner)
    text.architectures = hf.architectures
    for name in (*_DTYPES, "quantization_config"):
        if getattr(hf, name, None) is not None:
            setattr(text, name, getattr(hf, name))
    return text


def own_fields(hf: "PretrainedConfig", composite: Composite) -> Hf:
    """The fields of a composite itself: neither repeated by its text config, nor unread by transformers."""
    repeated = hf.text_config.to_dict()
    absent = object()
    return {
        name: value
        for name, value in without_unread(hf, composite.fields).items()
        if name in _DECIDED_BY_WHOLE or repeated.get(name, absent) != value
    }


_DTYPES = ("dtype", "torch_dtype")
_DECIDED_BY_WHOLE = frozenset({"model_type", "architectures"})


def _ties(hf: "PretrainedConfig", text: "PretrainedConfig") -> bool:
    """Whether the head is the embedding: transformers 5 asks the composite, 4.57 its text."""
    return bool((hf if speaks_rope_parameters() else text).tie_word_embeddings)


def spelling_in(names: Iterable[str], composite: Composite, embedding: str) -> Prefixes:
    """How a folder spells the names of its text: by where it has the embedding.

    Args:
        names: of its tensors; without any, the spelling is that of published files.
        embedding: the name of the embedding in a checkpoint of the text alone.
    """
    names = set(names)
    for spelling in (composite.spelling, *SPELLINGS):
        if respelled_name(embedding, spelling) in names:
            return spelling
    return composite.spelling
