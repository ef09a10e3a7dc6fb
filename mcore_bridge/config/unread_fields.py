"""Finds unread fields of an HF config: no entry of a table claims them, and no code of transformers reads them.

A checkpoint means what transformers computes from it. If transformers does not read a field for a family, the field
cannot change the result, so it is accepted. A field that is read but not claimed raises (``fields.require_total``).
"""

import functools
from collections.abc import Collection, Iterable, Mapping
from logging import INFO, WARNING
from operator import getitem
from typing import TYPE_CHECKING, Any

from mcore_bridge.config.compared_fields import changes_nothing
from mcore_bridge.config.fields import Field, claimed_by
from mcore_bridge.config.fields_read import quoted_by_family, readers_of
from mcore_bridge.config.hf import is_borrowed
from mcore_bridge.config.rope import rope_from
from mcore_bridge.config.rope_spelling import unknown_keys
from mcore_bridge.errors import ConfigError, shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPES = ("rope_parameters", "rope_scaling")
_ONE_ROPE = dict.fromkeys(ROPES)
READ_BY_OTHERS = {
    "dual_chunk_attention_config": "vLLM and SGLang, for prompts longer than original_max_position_embeddings",
}
"""Fields that other programs read and transformers does not, with these programs and the case that matters."""


def unread_fields(hf: "PretrainedConfig", table: tuple[Field, ...]) -> tuple[str, ...]:
    """The fields of ``hf`` that change nothing, because neither ``table`` nor transformers' code uses them.

    A key of the rope parameters is one of them if frequencies and the attention factor do not depend on it. Its name
    is then ``rope_parameters.key``.

    If the config class is borrowed from a twin family, only fields that the class declares count as unread, since
    other code may read the rest.

    Example::

        >>> unread_fields(hf, architecture_of(hf).fields)  # of Qwen/Qwen3-Coder-480B-A35B-Instruct
        ('qkv_bias', 'shared_expert_intermediate_size', 'use_qk_norm')
    """
    fields = hf.to_dict()
    config_class, is_own = _class_of(hf)
    unclaimed = fields.keys() - claimed_by(table)
    tried = unclaimed if is_own else unclaimed & config_class().to_dict().keys()
    of_family, of_shared = readers_of(config_class, tried)
    keys = _unread_keys(fields, config_class)
    plain = _without(fields, keys | unclaimed)
    neutral = {  # None is the absence of a field that only shared modules may read
        name
        for name in of_shared
        if fields[name] is None or changes_nothing(config_class, {**plain, name: fields[name]}, table, name)
    }
    return tuple(sorted(tried - of_family - of_shared | neutral | keys))


def _class_of(hf: "PretrainedConfig") -> tuple[Any, bool]:
    """The class of transformers that reads ``hf``, and whether it is of this family."""
    borrowed = is_borrowed(type(hf))
    return (type(hf).__base__ if borrowed else type(hf)), not borrowed


def _unread_keys(fields: Mapping[str, Any], config_class: Any) -> set[str]:
    unread = set()
    for path, parameters in _ropes_of(fields).items():
        keys = unknown_keys(parameters)
        for key in keys - quoted_by_family(config_class, keys):
            if _is_neutral_key({**fields, **_ONE_ROPE, "rope_parameters": parameters}, keys, key):
                unread.add(f"{path}.{key}")
    return unread


def _ropes_of(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Every rope of a config by its place: there may be one for each kind of layer."""
    ropes = {name: rope for name in ROPES if isinstance(rope := fields.get(name), dict)}
    by_layer = {
        f"{name}.{kind}": rope
        for name, ropes_of_layers in ropes.items()
        for kind, rope in ropes_of_layers.items()
        if isinstance(rope, dict)
    }
    return by_layer or ropes


def _is_neutral_key(fields: Mapping[str, Any], unknown: Collection[str], key: str) -> bool:
    rope = fields["rope_parameters"]
    known = {name: value for name, value in rope.items() if name not in unknown}
    try:
        return not rope_from({**fields, "rope_parameters": known}).is_changed_by(key, rope[key])
    except ConfigError:  # a rope with another fault, which the table reports
        return False


def without_unread(hf: "PretrainedConfig", table: tuple[Field, ...]) -> dict[str, Any]:
    """The fields of ``hf`` without the fields in ``unread_fields``."""
    return _without(hf.to_dict(), unread_fields(hf, table))


def _without(fields: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    paths = set(paths)
    inner = {name: [path.removeprefix(f"{name}.") for path in paths if path.startswith(f"{name}.")] for name in ROPES}
    return {
        name: _without(value, inner[name]) if inner.get(name) and isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in paths
    }


def require_no_unread(read_by: Iterable[tuple["PretrainedConfig", tuple[Field, ...]]]) -> None:
    """The check of ``strict_config=True``, for configs with their tables.

    Raises:
        ConfigError: there are unread fields; the message names all of them.
    """
    values: list[tuple[str, Any]] = []
    for hf, table in read_by:
        fields = hf.to_dict()
        values += [(name, functools.reduce(getitem, name.split("."), fields)) for name in unread_fields(hf, table)]
    listing = ", ".join(f"{name}={shown(value)}" for name, value in values)
    if listing:
        raise ConfigError(
            f"strict_config=True accepts only fields that our tables contain, found {listing}. The installed "
            "transformers "
            "reads none of them: pass strict_config=False, or delete them from the config."
        )


def notes_on(unread: Iterable[str]) -> list[tuple[int, str]]:
    """Lines about unread fields for a log or a report, each with its level of ``logging``.

    One line names all of them. A field that other programs read also gets a warning.
    """
    unread = list(unread)
    if not unread:
        return []
    line = f"no code of transformers reads these fields of the HF config, so they change nothing: {', '.join(unread)}"
    readers = [name for name in unread if name in READ_BY_OTHERS]
    return [(INFO, line), *((WARNING, f"{name} is read by {READ_BY_OTHERS[name]}") for name in readers)]
