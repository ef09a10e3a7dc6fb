"""The registry of architectures: an architecture is a config table and weight rules, found by the ``model_type`` of HF.

Our architectures are the files of ``models/`` that define ``ARCHITECTURE``, so a new architecture is one new file.
Other packages call ``register``, or declare entry points, which are read if a ``model_type`` is unknown
(``installed.py``).

A file of ``models/`` may also define ``COMPOSITES``, models of images and text whose text is one of the architectures,
and ``REFUSALS``: families that we refuse, with the reason. Another package may register a refused family. ``DRAFTS``
are draft heads, which are built beside a policy and are no family by themselves.
"""

import copy
import functools
import importlib
import os
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from mcore_bridge.arguments import FormerName, accepts_former_names, instance_of, require
from mcore_bridge.composite import TRANSFORMERS, Composite, text_of
from mcore_bridge.config.class_names import classes_in_transformers, require_class
from mcore_bridge.config.draft import in_memory
from mcore_bridge.config.fields import Field
from mcore_bridge.config.hf import TEXT, nearest, read_as, read_config
from mcore_bridge.errors import ConfigError, shown
from mcore_bridge.installed import GROUP, Release, plugins

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from mcore_bridge.rules.mapping import ExpertFormat, Prefixes, Rule


@accepts_former_names
@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The translation of models of one ``model_type`` to ``GPTModel``s and back.

    Args:
        model_type: as HF spells it.
        fields: the config table, total over the HF config.
        rules: the weight rules of a config. They include an LM head only if it has another name than
            ``lm_head.weight``, or a bias. The table must refuse a config that ties such a head.
        ignored: patterns (fnmatch) of HF tensor names that a checkpoint may hold and that no logits of transformers
            depend on. The default names the frequencies of rotary embeddings, which old files hold: transformers
            computes them from the config, and skips those in files. A family that adds a pattern states the reason.
        mtp: patterns (fnmatch) of HF tensors of MTP layers that have no rules. These layers are not built, and a save
            copies them. The patterns follow from the config.
        optional: patterns (fnmatch) of HF tensor names that a checkpoint may lack. These parameters then keep their
            initial values, as in transformers. A family with such names states the reason.
        expert_format: how published checkpoints hold routed experts: "split", one tensor for each, or "fused", one
            tensor for all.
        aliases: other ``model_type`` values for this architecture.
        classes: names that published configs have in ``architectures``, besides names of transformers' auto classes.
        reads_as: another ``model_type``, whose config class reads these configs. It is for families that have no config
            class in transformers. None: transformers or another package has one.
        published_fields: fields of the config whose names in published files differ from the names in ``fields``, each
            with its published name. A save writes published names, since engines read them.
        megatron_core: the first release that can build the family. None: every release that we support can.
        layer_spec: a function that makes the layer spec. It takes the arguments of ``factory.layer_specs.block_spec``
            (the config, the layers of a stage, the backend) and returns ``TransformerBlockSubmodules``; it may call
            ``block_spec`` itself. None: ``block_spec``.
        model: a subclass of ``GPTModel``. None: ``GPTModel`` itself.
        renamed_in_memory: parts of HF names in files, each with its name in transformers 5's memory, which ``peft``
            uses. They are parts of names of linear layers, and of experts in one tensor.
        swapped_in_peft: whether ``peft`` swaps inputs and outputs of stacked experts. It does so if transformers holds
            them as [in, out] without a mark (``is_transposed``).

    Example:
        >>> from mcore_bridge.models.qwen3 import ARCHITECTURE
        >>> ARCHITECTURE.model_type, ARCHITECTURE.expert_format
        ('qwen3', 'split')
    """

    model_type: str
    fields: tuple[Field, ...]
    rules: "Callable[[PretrainedConfig], tuple[Rule, ...]]"
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    mtp: "Callable[[PretrainedConfig], tuple[str, ...]]" = lambda hf: ()
    optional: tuple[str, ...] = ()
    expert_format: "ExpertFormat" = "split"
    aliases: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    reads_as: str | None = None
    published_fields: "Prefixes" = ()
    megatron_core: Release | None = None
    layer_spec: Callable[..., Any] | None = None
    model: type | None = None
    renamed_in_memory: "Prefixes" = ()
    swapped_in_peft: bool = False

    dialect = FormerName("expert_format")


@dataclass(frozen=True)
class Refusal:
    """Families that are refused by name.

    Args:
        model_types: as HF spells them.
        reason: what megatron-core's ``GPTModel`` cannot express, or which submodule nobody has written.
        checked: dotted names of the code in transformers and megatron-core that shows the reason.
    """

    model_types: tuple[str, ...]
    reason: str
    checked: tuple[str, ...]


_REGISTRY: dict[str, Architecture] = {}
_COMPOSITES: dict[str, Composite] = {}
_DRAFTS: dict[str, Architecture] = {}
_REFUSED: dict[str, Refusal] = {}


def register(architecture: Architecture) -> Architecture:
    """Add ``architecture`` under its ``model_type`` and aliases. To register it again does nothing.

    Returns:
        ``architecture`` itself.

    Raises:
        ConfigError: another architecture has one of these names.

    Example:
        >>> from dataclasses import replace
        >>> from mcore_bridge.models.qwen3 import ARCHITECTURE
        >>> mb.register(replace(ARCHITECTURE, model_type="my_qwen3", reads_as="qwen3")).model_type
        'my_qwen3'
    """
    require(
        ConfigError,
        architecture=(
            architecture,
            instance_of("an Architecture", Architecture, advice="make one by Architecture(...)"),
        ),
    )
    _load_ours()
    return _add(architecture)


def architectures(*, of_packages: bool = False) -> Mapping[str, Architecture]:
    """Every registered architecture by ``model_type``, aliases included.

    Args:
        of_packages: first load the architectures of packages with an entry point.
    """
    _load_ours()
    if of_packages:
        _load_theirs()
    return dict(_REGISTRY)


def composites() -> Mapping[str, Composite]:
    """Every composite by ``model_type``."""
    _load_ours()
    return dict(_COMPOSITES)


def composite_of(hf: "PretrainedConfig") -> Composite | None:
    """The composite of an HF config; None for a config of text."""
    _load_ours()
    return _COMPOSITES.get(hf.model_type)


def text_config(hf: "PretrainedConfig") -> "PretrainedConfig":
    """The config of the model of text: the text config of a composite, or ``hf`` itself."""
    composite = composite_of(hf)
    return hf if composite is None else text_of(hf, composite)


def refusals() -> tuple[Refusal, ...]:
    """Every refusal, in the order of the names."""
    _load_ours()
    return tuple(dict.fromkeys(_REFUSED[name] for name in sorted(_REFUSED)))


def architecture_of(hf: "PretrainedConfig | str") -> Architecture:
    """The architecture of an HF config, or of a ``model_type``.

    Raises:
        ConfigError: no architecture of this name is registered or comes from an entry point. If we refuse the family,
            the message gives the reason.
    """
    model_type = hf if isinstance(hf, str) else hf.model_type
    if not isinstance(model_type, str):
        raise ConfigError(f"The model_type must be a name, found {shown(model_type)}. Correct the HF config.")
    _load_ours()
    if model_type in _DRAFTS:
        return _DRAFTS[model_type]
    if model_type not in _REGISTRY:
        _load_theirs()
    if model_type not in _REGISTRY and model_type in _REFUSED:
        raise ConfigError(_refused(model_type), in_python=_other_ways(hf))
    if model_type in _COMPOSITES:
        raise ConfigError(
            f"The model_type must be that of a text here, found {model_type!r}, which joins a text to models of images "
            "or sound. Pass its whole config, whose text_config has another model_type."
        )
    if model_type not in _REGISTRY:
        raise ConfigError(
            f"The model_type must be a registered architecture, found {model_type!r}."
            f"{nearest(model_type, {*_REGISTRY, *_COMPOSITES})} Register an architecture for it, or install a package "
            f"with an entry point of the group {GROUP!r}.",
            in_python=_other_ways(hf),
        )
    return _REGISTRY[model_type]


def read_hf(source: "str | os.PathLike[str] | PretrainedConfig") -> "PretrainedConfig":
    """Like ``read_config``, with its argument and errors, but it also reads families that transformers lacks.

    Raises:
        ConfigError: also if ``architectures`` names a draft head, a reward model, or a class of another family.
    """
    if is_draft(source):
        return copy.deepcopy(source)
    known = architectures()
    reads_as = {name: architecture.reads_as for name, architecture in known.items() if architecture.reads_as}
    refused = {name: _refused(name) for name in _REFUSED if name not in known}
    releases = dict.fromkeys(known, "") | dict.fromkeys(_COMPOSITES, TRANSFORMERS)
    renamed = {name: {old: new for new, old in published_fields(name)} for name in (*known, *_COMPOSITES)}
    remote = [name for name, composite in _COMPOSITES.items() if composite.is_remote]
    config = read_config(source, reads_as=reads_as, refused=refused, known=releases, renamed=renamed, remote=remote)
    require_class(config, _classes_of(config), _classes_around(config))
    if config.model_type in _COMPOSITES and hasattr(text := getattr(config, TEXT, None), "model_type"):
        require_class(text, ())  # publishers name classes of their own there, as SmolVLM does
    return config


def read_draft(
    source: "str | os.PathLike[str] | PretrainedConfig", names: Collection[str] | None = None
) -> "PretrainedConfig":
    """The config of a draft head, with its fields in memory (``config/draft.py``).

    Args:
        source: a published folder or config of a draft head; or a config from this function, which is copied.
        names: the HF names of its tensors. None: they are not known.

    Raises:
        ConfigError: there is no config, or its first class is no draft head that we build.
    """
    _load_ours()
    if is_draft(source):
        return copy.deepcopy(source)

    def in_fields_of_ours(published: dict[str, object]) -> dict[str, object]:
        classes = published.get("architectures")
        own = classes[0] if isinstance(classes, list | tuple) and classes else None
        if own not in known:
            raise ConfigError(
                f"architectures must name a draft head first ({', '.join(sorted(known))}), found {shown(classes)}. "
                "Pass the folder or the config of an EAGLE3, DFlash or DSpark head."
            )
        return in_memory(known[own], published, names)

    known = {name: draft.model_type for draft in _DRAFTS.values() for name in draft.classes}
    return read_as(source, in_fields_of_ours, {kind: str(draft.reads_as) for kind, draft in _DRAFTS.items()})


def is_draft(hf: object) -> "TypeGuard[PretrainedConfig]":
    """Whether ``hf`` is a config that ``read_draft`` has made."""
    _load_ours()
    return getattr(hf, "model_type", None) in _DRAFTS


def _classes_of(hf: "PretrainedConfig") -> frozenset[str]:
    """The classes of a whole model with this config. Nobody lists them for a family that only another package has."""
    family = _family(hf.model_type)
    return frozenset() if family is None else classes_in_transformers(hf.model_type).union(family.classes)


def _classes_around(hf: "PretrainedConfig") -> frozenset[str]:
    """The classes of composites that may have a text with this config."""
    around = _COMPOSITES if hf.model_type in _REGISTRY else ()
    return frozenset().union(*map(classes_in_transformers, around))


def published_fields(model_type: str) -> "Prefixes":
    """Fields of a family's config with other names in published files, each with its published name."""
    family = _family(model_type)
    return family.published_fields if family else ()


def published_type(model_type: str) -> str:
    """The ``model_type`` in published files. For a draft head it is the one of a family."""
    return str(_DRAFTS[model_type].reads_as) if model_type in _DRAFTS else model_type


def _family(model_type: str) -> "Architecture | Composite | None":
    _load_ours()
    return _REGISTRY.get(model_type) or _COMPOSITES.get(model_type) or _DRAFTS.get(model_type)


def _refused(model_type: str) -> str:
    refusal = _REFUSED[model_type]
    return (
        f"The model_type must be of a family that is written here, found {model_type!r}: "
        f"{refusal.reason} (see {' and '.join(refusal.checked)}). A package with other layers can register it."
    )


_LISTED = "mb.list_families() lists all families, and docs/reference/families.md describes them"


def _other_ways(hf: "PretrainedConfig | str") -> str:
    """Where all families are listed. For a model of images and text also: train its text model alone."""
    text = getattr(getattr(hf, "text_config", None), "model_type", None)  # a dict, if the family keeps it elsewhere
    if text not in _REGISTRY:
        return _LISTED
    return (
        f"{_LISTED}. To train its text model ({text!r}) alone, pass its text_config as the HF config. Pass its "
        "tensors as load_weights: pairs of name and tensor, with the names of a checkpoint of the text model alone."
    )


@functools.cache
def _load_ours() -> None:
    package = importlib.import_module("mcore_bridge.models")
    for name in (module.name for module in pkgutil.iter_modules(package.__path__)):
        module = importlib.import_module(f"{package.__name__}.{name}")
        if isinstance(architecture := getattr(module, "ARCHITECTURE", None), Architecture):
            _add(architecture)
        for composite in getattr(module, "COMPOSITES", ()):
            _COMPOSITES[composite.model_type] = composite
        for draft in getattr(module, "DRAFTS", ()):
            _DRAFTS[draft.model_type] = draft
        for refusal in getattr(module, "REFUSALS", ()):
            _REFUSED.update(dict.fromkeys(refusal.model_types, refusal))


def _load_theirs() -> None:
    for name, offer in plugins():
        for architecture in (offer,) if isinstance(offer, Architecture) else offer:
            if not isinstance(architecture, Architecture):
                raise ConfigError(
                    f"The entry point {name!r} must give an Architecture, found {architecture!r}. Update its package."
                )
            _add(architecture)


def _add(architecture: Architecture) -> Architecture:
    for name in (architecture.model_type, *architecture.aliases):
        if (known := _REGISTRY.get(name)) is not None and known != architecture:
            raise ConfigError(
                f"A model_type must have one architecture, but {name!r} is registered already: {known}. Choose another "
                "model_type or alias."
            )
    _REGISTRY.update(dict.fromkeys((architecture.model_type, *architecture.aliases), architecture))
    return architecture
