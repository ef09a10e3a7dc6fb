"""Reads HF configs from a folder, from the local hub cache, or from a config object.

Code inside a checkpoint is never run, and nothing is downloaded. transformers 4.57 does not read the rope fields of
transformers 5, and would use defaults. So a config with these fields is translated.
"""

import copy
import functools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mcore_bridge.arguments import given_path
from mcore_bridge.config.rope_spelling import is_by_kind, respelled, speaks_rope_parameters
from mcore_bridge.errors import ConfigError, shown
from mcore_bridge.foreign_files import Hook, read_json
from mcore_bridge.installed import plugins

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG = "config.json"
TEXT = "text_config"
"""The field of a composite that holds its text config."""
_NESTED = (TEXT, "thinker_config")
_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
)
_MOST_LAYERS = 10_000
_LABELS = "num_labels"
_MOST_LABELS = 1_000_000
_NOTE = "quantization_config"
_OF_TRANSFORMERS = "Give the release for transformers, which has safetensors files"
_OTHER_FORMATS = {
    "adapter_config.json": (
        "an adapter is no model by itself",
        "Give the folder of its base model",
    ),
    "*.gguf": ("GGUF files are not read", _OF_TRANSFORMERS),
    "params.json": ("the original format of Llama and Mistral is not read", _OF_TRANSFORMERS),
}
"""Files of folders without a config.json, as patterns, with their format and a file to pass instead."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Short names of dtypes in configs, each with its name in torch."""
_KINDS = ("type", "rope_type")
_ROPES = {"su": "longrope", "deepseek_yarn": "yarn"}
"""Names of rope types that Phi-3 had at first, and that Sarvam has, each with its name in transformers."""
_OF_4 = ("rope_scaling", "rope_theta")
_ROPE = ("rope_parameters", *_OF_4, "rope_local_base_freq")


def read_config(
    source: "str | os.PathLike[str] | PretrainedConfig",
    *,
    reads_as: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
    known: Mapping[str, str] | None = None,
    renamed: Mapping[str, Mapping[str, str]] | None = None,
    remote: Collection[str] = (),
) -> "PretrainedConfig":
    """The HF config of ``source``, in the spelling of the installed transformers.

    Args:
        source: a folder with a config.json, the name of a repository in the local hub cache, or a config, which is
            copied.
        reads_as: for a ``model_type`` that transformers may lack, another one whose config class reads it.
        refused: for a ``model_type`` that transformers may lack and we refuse, the text of the error.
        known: every ``model_type`` that can be built, for suggestions in an error. The value is a release of
            transformers with this type, or "" if none is recorded.
        renamed: for a ``model_type``, fields of published files with other names, each with its name in transformers.
        remote: composites that transformers lacks. Only their text config has a class of transformers.

    Raises:
        ConfigError: there is no config, it is not valid JSON, or transformers lacks its model_type.
    """
    from transformers import PretrainedConfig

    if isinstance(source, PretrainedConfig):
        return _completed(_translated(copy.deepcopy(source)))
    folder = _folder(source)
    fields = read_fields(folder / CONFIG, special_float)
    _require_short_lists(fields)
    kind = fields.get("model_type")
    names = (renamed or {}).get(kind, {}) if isinstance(kind, str) else {}
    fields = {_free(names.get(name, name), name, fields): value for name, value in fields.items()}
    class_of = functools.partial(
        _config_class, folder=folder, reads_as=reads_as or {}, refused=refused or {}, known=known or {}
    )
    hf = _remote(str(kind)) if kind in remote else class_of(fields)
    fields = _spell(fields)
    try:
        config = hf.from_dict(fields)
        if kind in remote and isinstance(text := fields.get(TEXT), dict):
            config.text_config = class_of(text).from_dict(text)
    except ConfigError:
        raise
    except Exception as error:  # a config class may raise any type
        raise ConfigError(f"transformers must accept {folder / CONFIG}, but refuses it: {error}") from error
    config._name_or_path = str(source)
    return _completed(config)


def read_as(
    source: "str | os.PathLike[str] | PretrainedConfig",
    change: Callable[[dict[str, object]], dict[str, object]],
    owners: Mapping[str, str],
) -> "PretrainedConfig":
    """Like ``read_config``, for fields that ``change`` makes from the published ones, read by the class of an owner.

    Args:
        source: as for ``read_config``.
        change: its result has another ``model_type``, of a family that transformers lacks.
        owners: for each such ``model_type`` the one whose config class reads the result.

    Raises:
        ConfigError: as for ``read_config``.
    """
    from transformers import PretrainedConfig

    if isinstance(source, PretrainedConfig):
        fields = source.to_dict()
    else:
        fields = read_fields(_folder(source) / CONFIG, special_float)
    fields = _spell(change(fields))
    kind = str(fields["model_type"])
    try:
        return _completed(_borrowed(kind, owners[kind]).from_dict(fields))
    except Exception as error:  # a config class may raise any type
        raise ConfigError(f"transformers must accept the config of {source}, but refuses it: {error}") from error


def _folder(source: object) -> Path:
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"A model must be given as its HF folder or as a config of transformers, found an object of type "
            f"{type(source).__name__}. Pass the path of the folder."
        )
    return find_folder(source)


def _free(name: str, published: str, fields: Collection[str]) -> str:
    """The name of a field in transformers, or its published name if a file has both."""
    return published if name in fields else name


def _completed(hf: "PretrainedConfig") -> "PretrainedConfig":
    """``hf`` with ``tie_word_embeddings``. The text config of a composite may lack it: the composite decides ties.

    A class with ``rope_theta`` beside ``rope_parameters`` has its default there, which transformers does not read.
    """
    if not hasattr(hf, "tie_word_embeddings"):
        hf.tie_word_embeddings = False
    rope = getattr(hf, "rope_parameters", None)
    if isinstance(rope, dict) and hf.__dict__.get("rope_theta", hf) == getattr(type(hf), "rope_theta", None):
        hf.rope_theta = rope.get("rope_theta", hf.rope_theta)
    return hf


def find_folder(
    source: str | os.PathLike[str], *, head: str = CONFIG, fetch: str = "download it first: hf download NAME"
) -> Path:
    """The folder of a checkpoint: ``source`` itself, or its snapshot in the local hub cache.

    The path is absolute, because models remember it, and a trainer may change its working folder.

    Args:
        head: a file that the repository has.
        fetch: how the caller may fetch a repository, for the error.

    Raises:
        ConfigError: ``source`` is empty, or neither a folder nor a repository in that cache.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = given_path(source, ConfigError).expanduser()
    if os.path.isdir(folder):  # unlike pathlib, these functions accept names that are too long
        return folder.absolute()
    if os.path.exists(folder):
        raise ConfigError(f"A checkpoint must be a folder with a {CONFIG}, found the file {folder}. Give its folder.")
    try:
        cached = try_to_load_from_cache(str(source), head)
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return Path(cached).parent
    raise ConfigError(
        f"{str(source)!r} must be an existing folder or a repository in the local hub cache, found neither. Check the "
        f"path{fetch and f', or {fetch}'}."
    )


def with_fields(hf: "PretrainedConfig", fields: Mapping[str, object]) -> "PretrainedConfig":
    """A copy of ``hf`` with these fields."""
    hf = copy.deepcopy(hf)
    for name, value in fields.items():
        setattr(hf, name, value)
    return hf


def read_fields(path: Path, hook: Hook | None = None) -> dict[str, object]:
    """The fields of a config.json, or of another file of one JSON object.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    if not os.path.lexists(path):
        raise ConfigError(
            f"{path.parent} must hold a {CONFIG}, {_found_instead(path.parent)}",
            in_python="load_adapters reads the folder of an adapter",
        )
    fields = read_json(path, ConfigError, finite=False, hook=hook)
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} must hold a JSON object, found a {type(fields).__name__}. Copy the file again.")
    return fields


def dtype_in(folder: Path) -> torch.dtype | None:
    """The dtype in the config.json of a folder, or else in the config of its text; None without one.

    Raises:
        ConfigError: there is no such file, or torch has no such dtype.
    """
    return _dtype_of(_spell(read_fields(folder / CONFIG)))


def _dtype_of(fields: object) -> torch.dtype | None:
    if not isinstance(fields, dict):
        return None
    if isinstance(name := fields.get("dtype"), str):
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return next(filter(None, map(_dtype_of, map(fields.get, _NESTED))), None)


def write_fields(path: Path, fields: Mapping[str, object]) -> None:
    """Write the fields of a config.json, or of another file of one JSON object. ``read_fields`` reads them."""
    path.write_text(json.dumps(fields, indent=2) + "\n")


def _found_instead(folder: Path) -> str:
    """The format of a folder without a config.json, and what to pass instead."""
    for pattern, (what, instead) in _OTHER_FORMATS.items():
        if files := sorted(path.name for path in folder.glob(pattern)):
            return f"found {files[0]}: {what}. {instead}."
    return "found none. Give the folder of a checkpoint."


def _require_short_lists(fields: Mapping[str, object]) -> None:
    """Refuse numbers of layers and labels for which transformers would make lists that exhaust the memory."""
    for name, most in (*((name, _MOST_LAYERS) for name in _LAYERS), (_LABELS, _MOST_LABELS)):
        number = fields.get(name)
        if number is not None and (not isinstance(number, int) or number > most):
            raise ConfigError(f"{name} must be a whole number of at most {most}, found {shown(number)}. Correct it.")
    for name, part in fields.items():
        if name.endswith("_config") and isinstance(part, dict):  # of a composite
            _require_short_lists(part)


def special_float(fields: dict[str, object]) -> object:
    """Read infinity or NaN, for which JSON has no number: transformers 5 writes ``{"__float__": "Infinity"}``."""
    match fields:
        case {"__float__": str(value)} if len(fields) == 1:
            return float(value)
    return fields


def _config_class(
    fields: Mapping[str, object],
    *,
    folder: Path,
    reads_as: Mapping[str, str],
    refused: Mapping[str, str],
    known: Mapping[str, str],
) -> "type[PretrainedConfig]":
    from transformers import CONFIG_MAPPING

    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(f"{folder / CONFIG} must name a model_type, found {model_type!r}. Add it, as HF spells it.")
    if model_type not in CONFIG_MAPPING:
        list(plugins())  # loading an entry point may register a config class with transformers
    if model_type not in CONFIG_MAPPING and reads_as.get(model_type) in CONFIG_MAPPING:
        return _borrowed(model_type, reads_as[model_type])
    if model_type not in CONFIG_MAPPING and model_type in refused:
        raise ConfigError(refused[model_type])
    if model_type not in CONFIG_MAPPING and model_type in known:
        release = known[model_type]
        raise ConfigError(
            f"The model_type of {folder / CONFIG} must be one that the installed transformers knows, found "
            f"{model_type!r}, which is in later releases. "
            + (f"Install transformers>={release}." if release else "Update transformers.")
        )
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"The model_type of {folder / CONFIG} must be one that the installed transformers knows, found "
            f"{model_type!r}.{nearest(model_type, known)} Code inside a checkpoint is never run: update transformers.",
            in_python="or pass a config in place of the folder; mb.list_families() lists all families",
        )
    return CONFIG_MAPPING[model_type]


def nearest(model_type: str, known: Iterable[str]) -> str:
    """A sentence with the names nearest to ``model_type``, if there are any."""
    near = get_close_matches(model_type.lower(), sorted(known), n=3)
    return f" Nearest names: {', '.join(near)}." if near else ""


def is_borrowed(config_class: "type[PretrainedConfig]") -> bool:
    """Whether ``config_class`` was derived from another family, for a ``model_type`` that transformers lacks."""
    return config_class.__module__ == __name__


@functools.cache
def _remote(model_type: str) -> "type[PretrainedConfig]":
    """A config class without fields, for a composite that transformers lacks."""
    from transformers import PretrainedConfig

    return type(model_type, (PretrainedConfig,), {"model_type": model_type, "__module__": __name__})


@functools.cache
def _borrowed(model_type: str, owner: str) -> "type[PretrainedConfig]":
    """A subclass of the config class of ``owner``, with another ``model_type``."""
    from transformers import CONFIG_MAPPING

    reduce = lambda self: (_blank, (model_type, owner), vars(self))  # noqa: E731
    members = {"model_type": model_type, "__module__": __name__, "__reduce__": reduce}
    return type(f"{model_type}_as_{owner}", (CONFIG_MAPPING[owner],), members)


def _blank(model_type: str, owner: str) -> "PretrainedConfig":
    """A config of such a class without fields: pickle finds no class that has no name in a module."""
    return object.__new__(_borrowed(model_type, owner))


def _spell(fields: dict[str, object]) -> dict[str, object]:
    """The ``fields`` of a config.json, with the names of the installed transformers for rope, dtype and a flag."""
    fields = {
        name: _spell(value) if name in _NESTED and isinstance(value, dict) else value for name, value in fields.items()
    }
    if fields.get(_NOTE, _NOTE) is None:  # which transformers 4.57 does not take
        del fields[_NOTE]
    if "torch_dtype" in fields:
        old = fields.pop("torch_dtype")
        fields["dtype"] = old if fields.get("dtype") is None else fields["dtype"]
    if isinstance(name := fields.get("dtype"), str):
        fields["dtype"] = name = _DTYPES.get(name, name.removeprefix("torch."))
        if name == "auto":  # for which transformers raises
            del fields["dtype"]
        elif not isinstance(getattr(torch, name, None), torch.dtype):
            raise ConfigError(
                f"dtype must name a dtype of torch, such as 'bfloat16', found {name!r}: correct it in the config"
            )
    if isinstance(rope := fields.get("rope_scaling"), dict):
        kinds = {key: _ROPES.get(str(rope[key]), rope[key]) for key in _KINDS if key in rope}
        fields["rope_scaling"] = {**rope, **kinds}
    if isinstance(tuned := fields.get("attn_temperature_tuning"), int):  # 4 in Llama 4 of transformers 4.51
        fields["attn_temperature_tuning"] = bool(tuned)
    if isinstance(bound := fields.get("kda_lower_bound"), int):  # which transformers refuses
        fields["kda_lower_bound"] = float(bound)
    own, both = fields.get("rope_parameters"), any(fields.get(name) is not None for name in _OF_4)
    if not own or (speaks_rope_parameters() and (is_by_kind(own) or not both)):
        return fields
    return {name: value for name, value in fields.items() if name not in _ROPE} | respelled(fields)


def _translated(hf: "PretrainedConfig") -> "PretrainedConfig":
    """``hf`` with the names of transformers 4.57 for rope, if it is installed: it does not read names of release 5."""
    if speaks_rope_parameters() or not getattr(hf, "rope_parameters", None):
        return hf
    fields = respelled(hf.to_dict())
    del hf.rope_parameters
    for name, value in fields.items():
        setattr(hf, name, value)
    return hf
