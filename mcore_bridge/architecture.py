"""The registry: an architecture is a config table and rules for its weights, found by the ``model_type`` of HF.

Ours are the files of ``models/`` that define ``ARCHITECTURE``, so that a new one is one new file. Those of other
packages come by ``register`` or, once a ``model_type`` is unknown, by entry points (``plugins.py``).

A file of ``models/`` may define ``REFUSALS`` too: names that stay unknown, with the reason. Who can express one of them
registers it.
"""

import functools
import importlib
import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from mcore_bridge import plugins
from mcore_bridge.config.fields import Field
from mcore_bridge.config.hf import read_config
from mcore_bridge.config.megatron_release import Release
from mcore_bridge.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from mcore_bridge.rules.mapping import Dialect, Rule


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How the models of one ``model_type`` become ``GPTModel``s and back.

    Args:
        model_type: as HF spells it.
        fields: the config table, total over the HF config.
        rules: the weight rules of a config.
        ignored: patterns (fnmatch) of HF tensor names that a checkpoint may hold and that no logits of transformers
            depend on; by default the frequencies of rotary embeddings, which old files hold. transformers has them in
            buffers with ``persistent=False``, computes them from the config, and passes over those in files. Each other
            pattern stands with its reason.
        dialect: how published checkpoints hold routed experts: "split", one tensor for each, or "fused", one for all.
        aliases: further ``model_type`` values that mean the same.
        reads_as: the ``model_type`` whose config class of transformers reads these configs where transformers has none
            for them. None is a family of transformers, or one whose package registers a class of its own.
        megatron_core: the release that it needs; None is any that we support.
        layer_spec: an own layer spec: a function like ``factory.layer_specs.block_spec``, which it may call, from the
            config, the layers of a stage and the backend to its ``TransformerBlockSubmodules``. None is that function.
        model: an own subclass of ``GPTModel``; None is mcore's.
    """

    model_type: str
    fields: tuple[Field, ...]
    rules: "Callable[[PretrainedConfig], tuple[Rule, ...]]"
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    dialect: "Dialect" = "split"
    aliases: tuple[str, ...] = ()
    reads_as: str | None = None
    megatron_core: Release | None = None
    layer_spec: Callable[..., Any] | None = None
    model: type | None = None


@dataclass(frozen=True)
class Refusal:
    """Families that are refused by name.

    Args:
        model_types: as HF spells them.
        reason: what of them megatron-core's ``GPTModel`` cannot express.
        checked: where this was found in the code of transformers and of megatron-core, as dotted names.
    """

    model_types: tuple[str, ...]
    reason: str
    checked: tuple[str, ...]


_REGISTRY: dict[str, Architecture] = {}
_REFUSED: dict[str, Refusal] = {}


def register(architecture: Architecture) -> Architecture:
    """Adds ``architecture`` under its ``model_type`` and aliases; registering the same one again does nothing.

    Raises:
        ConfigError: another architecture has one of these names.
    """
    _load_ours()
    return _add(architecture)


def architectures() -> Mapping[str, Architecture]:
    """Every registered architecture by ``model_type``, aliases included. Entry points are not looked up."""
    _load_ours()
    return dict(_REGISTRY)


def refusals() -> tuple[Refusal, ...]:
    """Every refusal, in the order of the names."""
    _load_ours()
    return tuple(dict.fromkeys(_REFUSED[name] for name in sorted(_REFUSED)))


def architecture_of(hf: "PretrainedConfig | str") -> Architecture:
    """The architecture of an HF config, or of a ``model_type``.

    Raises:
        ConfigError: none is registered, nor offered by an entry point; with the reason where we refuse the name.
    """
    model_type = hf if isinstance(hf, str) else hf.model_type
    _load_ours()
    if model_type not in _REGISTRY:
        _load_theirs()
    if model_type not in _REGISTRY and model_type in _REFUSED:
        raise ConfigError(f"{_refused(model_type)}{_text_inside(hf)}")
    if model_type not in _REGISTRY:
        near = get_close_matches(model_type, list(_REGISTRY), n=3) or sorted(_REGISTRY)
        raise ConfigError(
            f"The model_type must be a registered architecture, found {model_type!r}; nearest names: "
            f"{', '.join(near)}. Register one, or install a package with an entry point of the group {plugins.GROUP!r}."
            f"{_text_inside(hf)}"
        )
    return _REGISTRY[model_type]


def read_hf(source: "str | os.PathLike[str] | PretrainedConfig") -> "PretrainedConfig":
    """``read_config``, for the families that transformers lacks too. Arguments and errors are the same."""
    known = architectures()
    reads_as = {name: each.reads_as for name, each in known.items() if each.reads_as is not None}
    refused = {name: _refused(name) for name in _REFUSED if name not in known}
    return read_config(source, reads_as=reads_as, refused=refused)


def _refused(model_type: str) -> str:
    refusal = _REFUSED[model_type]
    return (
        f"The model_type must be one that megatron-core's GPTModel can express exactly, found {model_type!r}: "
        f"{refusal.reason} (see {' and '.join(refusal.checked)}). A package with layers of its own can register it."
    )


def _text_inside(hf: "PretrainedConfig | str") -> str:
    """What to do with a model of images and text, whose other half no export of ours could give back."""
    text = getattr(hf, "text_config", None)
    if text is None or text.model_type not in _REGISTRY:
        return ""
    return (
        f" To train its model of text ({text.model_type!r}) alone, pass the text_config, and as load_weights the pairs "
        "of names and tensors of the text, named as in a checkpoint of it alone."
    )


@functools.cache
def _load_ours() -> None:
    package = importlib.import_module("mcore_bridge.models")
    for name in (module.name for module in pkgutil.iter_modules(package.__path__)):
        module = importlib.import_module(f"{package.__name__}.{name}")
        if isinstance(found := getattr(module, "ARCHITECTURE", None), Architecture):
            _add(found)
        for refusal in getattr(module, "REFUSALS", ()):
            _REFUSED.update(dict.fromkeys(refusal.model_types, refusal))


def _load_theirs() -> None:
    for name, offer in plugins.load():
        for architecture in (offer,) if isinstance(offer, Architecture) else offer:
            if not isinstance(architecture, Architecture):
                raise ConfigError(f"The entry point {name!r} must give an Architecture, found {architecture!r}.")
            _add(architecture)


def _add(architecture: Architecture) -> Architecture:
    for name in (architecture.model_type, *architecture.aliases):
        if (known := _REGISTRY.get(name)) is not None and known != architecture:
            raise ConfigError(f"Each model_type must have one architecture; {name!r} is registered already: {known}.")
    _REGISTRY.update(dict.fromkeys((architecture.model_type, *architecture.aliases), architecture))
    return architecture
