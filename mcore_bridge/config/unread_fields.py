"""Finds unread fields of an HF config: no entry of a table claims them, and no code of transformers reads them.

A checkpoint means what transformers computes from it. If transformers does not read a field for a family, the field
cannot change the result, so it is accepted. A field that is read but not claimed raises (``fields.require_total``).
"""

from collections.abc import Iterable
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

from mcore_bridge.config.fields import Field, claimed_by
from mcore_bridge.config.fields_read import fields_read
from mcore_bridge.config.hf import is_borrowed
from mcore_bridge.errors import ConfigError, shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

READ_BY_OTHERS = {
    "dual_chunk_attention_config": "vLLM and SGLang, for prompts longer than original_max_position_embeddings",
}
"""Fields that other programs read and transformers does not, with these programs and the case that matters."""


def unread_fields(hf: "PretrainedConfig", table: tuple[Field, ...]) -> tuple[str, ...]:
    """The fields of ``hf`` that change nothing, because neither ``table`` nor transformers' code uses them.

    If the config class is borrowed from a twin family, only fields that the class declares count as unread, since
    other code may read the rest.

    Example::

        >>> unread_fields(hf, architecture_of(hf).fields)  # of Qwen/Qwen3-Coder-480B-A35B-Instruct
        ('qkv_bias', 'shared_expert_intermediate_size', 'use_qk_norm')
    """
    unclaimed = hf.to_dict().keys() - claimed_by(table)
    if not unclaimed:
        return ()
    config_class: Any = type(hf)
    if is_borrowed(config_class):
        config_class = config_class.__base__
        unclaimed &= config_class().to_dict().keys()
    return tuple(sorted(unclaimed - fields_read(config_class, unclaimed)))


def without_unread(hf: "PretrainedConfig", table: tuple[Field, ...]) -> dict[str, object]:
    """The fields of ``hf`` without the fields in ``unread_fields``."""
    unread = unread_fields(hf, table)
    return {name: value for name, value in hf.to_dict().items() if name not in unread}


def require_no_unread(read_by: Iterable[tuple["PretrainedConfig", tuple[Field, ...]]]) -> None:
    """The check of ``strict_config=True``, for configs with their tables.

    Raises:
        ConfigError: there are unread fields; the message names all of them.
    """
    listing = ", ".join(
        f"{name}={shown(getattr(hf, name))}" for hf, table in read_by for name in unread_fields(hf, table)
    )
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
