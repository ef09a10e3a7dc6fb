"""Checks the class that an HF config names first in ``architectures``: whether it is a whole model of the family.

A draft head for speculative decoding, a reward model or a file with a wrong ``model_type`` may have all fields of a
causal LM. Its class tells it apart, before anything is built.
"""

import functools
import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from mcore_bridge.errors import ConfigError, shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForProcessRewardModel")
HEADS = ("ForCausalLM", *CLASSIFIERS, "Model")
"""Endings of the classes that we write. transformers has not all of them for each family."""
_FIELD = "architectures"
_DRAFT = re.compile("eagle|dflash|dspark|domino|draft|medusa|mtp|nextn|speculator", re.IGNORECASE)
_OF_DRAFTS = ("draft_vocab_size", "eagle_config", "dflash_config", "dspark_config", "markov_rank", "speculators_config")
"""Fields that only draft heads have, whatever their class is."""
_REWARD = re.compile("reward", re.IGNORECASE)


def stem_of(name: str) -> str:
    """The prefix of the class names of a family.

    >>> stem_of("Qwen2ForCausalLM"), stem_of("Qwen2Model")
    ('Qwen2', 'Qwen2')
    """
    return name.split("For")[0].removesuffix("Model")


@functools.cache
def classes_in_transformers(model_type: str) -> frozenset[str]:
    """The classes that the auto classes of the installed transformers have for a ``model_type``."""
    from transformers.models.auto import modeling_auto

    tables = (table for name, table in vars(modeling_auto).items() if re.match("MODEL_.*_NAMES$", name))
    named = [table[model_type] for table in tables if model_type in table]
    return frozenset(name for names in named for name in ([names] if isinstance(names, str) else names))


def model_class(model_type: str) -> str | None:
    """The class with an LM head that the installed transformers has for a ``model_type``."""
    from transformers.models.auto import modeling_auto as auto

    texts, seeing = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return texts.get(model_type) or seeing.get(model_type)


def class_in(config: "PretrainedConfig") -> list[str] | None:
    """The ``architectures`` of a config itself, since Qwen2-VL's of transformers 4 answer with their text's."""
    names: list[str] | None = vars(config).get(_FIELD)
    return names


def set_class(config: "PretrainedConfig", name: str) -> None:
    """Set the ``architectures`` of a config itself: the inverse of ``class_in``."""
    vars(config)[_FIELD] = [name]


def require_class(hf: "PretrainedConfig", known: Collection[str], also: Collection[str] = ()) -> None:
    """Raise unless the first name in the ``architectures`` of ``hf`` is a whole model of its family.

    A config without ``architectures`` passes.

    Args:
        hf: the config.
        known: the class names of the family. If it is empty, nobody has listed them, and all names pass except names
            of draft heads.
        also: classes of composites, after which transformers may name a text.

    Raises:
        ConfigError: the config is of a draft head or a reward model, or the class is of another family.
    """
    names = getattr(hf, _FIELD, None)
    name = names[0] if isinstance(names, list | tuple) and names else None
    if fields := [field for field in _OF_DRAFTS if getattr(hf, field, None) is not None]:
        raise ConfigError(_draft(f"{fields[0]}={shown(getattr(hf, fields[0]))}"))
    if not isinstance(name, str) or _plain(name) in set(map(_plain, _with_heads({*known, *also}))):
        return
    if _DRAFT.search(name):
        raise ConfigError(_draft(f"{_FIELD}={[name]}"))
    if not known:
        return
    expected = f"{_FIELD} must name a class of {hf.model_type!r} first ({', '.join(sorted(known))}), found {name!r}"
    if _REWARD.search(name):
        raise ConfigError(
            f"{expected}: a reward model. If its head is two linear layers, score.0 and score.2, write "
            f"{stem_of(name)}ForProcessRewardModel there, and pass head='process_reward'. To train the model below it "
            f"with a new linear head, write {stem_of(name)}ForSequenceClassification there, and pass head='value' or "
            "head='classification'."
        )
    raise ConfigError(
        f"{expected}, which contradicts the model_type. Correct the field that is wrong: weights of another family do "
        "not load."
    )


def _draft(sign: str) -> str:
    return (
        f"The config must be of a whole model, found {sign}, which is of a draft head for speculative decoding. "
        "A draft head reads hidden states of its target model. Pass the folder of the target model; build_draft builds "
        "an EAGLE3, DFlash or DSpark head beside it."
    )


def _with_heads(known: Iterable[str]) -> Iterator[str]:
    """``known``, and the classes of our own heads. A config without ``architectures`` gives them no prefix."""
    yield from HEADS
    for name in known:
        yield name
        yield from (f"{stem_of(name)}{head}" for head in HEADS)


def _plain(name: str) -> str:
    """A class name as publishers and transformers both spell it: ``KimiK25`` is ``Kimi_K25`` there."""
    return name.removeprefix("FSDP").replace("_", "").lower()
