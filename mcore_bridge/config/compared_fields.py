"""Compares what transformers computes with and without a field of an HF config, where its source cannot decide.

Shared modules of transformers serve all families, so text in them says little about one. For a field that only they
may read, a small model of the family is built with random weights. Equal bits, with any value of the field, mean that
it changes nothing. A field that the family's own code may read is never compared: a small model would hide its effect
beyond some length or size.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.config.fields import Field, Mcore, to_mcore, written

_LAYERS, _TOKENS = "num_hidden_layers", 12
_MOST_LAYERS = 8
_TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_VOCAB = {"vocab_size": 96, "hf_vocab_size": 96}
_MLPS = ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
Outcome = tuple[Tensor, ...] | None
"""Logits in evaluation and in training; None if transformers cannot compute them."""


def changes_nothing(config_class: Any, fields: Mapping[str, Any], table: tuple[Field, ...], name: str) -> bool:
    """Whether transformers computes the same bits for every value of a field. If that cannot be tried, it may not.

    Args:
        config_class: the class of transformers that reads the config.
        fields: the fields of the config: fields that ``table`` claims, and ``name``.
        table: the fields of the architecture.
        name: the field. Its value is also replaced by others of its kind.
    """
    key = (config_class, name, json.dumps(fields, sort_keys=True, default=str))
    if key not in _COMPARED:
        _COMPARED[key] = _compare(config_class, dict(copy.deepcopy(fields)), table, name)
    return _COMPARED[key]


_COMPARED: dict[tuple[object, ...], bool] = {}
"""Results of this process, by the class of the config, the field and all fields."""


def _compare(config_class: Any, source: dict[str, Any], table: tuple[Field, ...], name: str) -> bool:
    value = source.pop(name)
    small, plain = _plain(config_class, source, table)
    if small is None or plain is None:
        return False
    return all(_equal(plain, _outcome(config_class, {**small, name: other})) for other in _like(value))


def _plain(
    config_class: Any, source: dict[str, Any], table: tuple[Field, ...]
) -> tuple[dict[str, Any] | None, Outcome]:
    """The fields of the small model without the field, and what transformers computes with them."""
    key = (config_class, json.dumps(source, sort_keys=True, default=str))
    if key not in _PLAIN:
        small = _small(source, table)
        _PLAIN[key] = (small, None if small is None else _outcome(config_class, small))
    return _PLAIN[key]


_PLAIN: dict[tuple[object, ...], tuple[dict[str, Any] | None, Outcome]] = {}
"""Results of ``_plain`` in this process, which all fields of a config share."""


def _like(value: object) -> Iterator[object]:
    """``value`` itself, and others of its kind, small ones too, which a short sequence shows."""
    yield value
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (1, 2, 3, value + 1)
    elif isinstance(value, float):
        yield from (0.25, 2 * value + 1)
    elif isinstance(value, str):
        yield "another"
    elif isinstance(value, list):
        yield []
    elif isinstance(value, dict):
        yield {}


def _small(source: dict[str, Any], table: tuple[Field, ...]) -> dict[str, Any] | None:
    """The fields of a small model with all kinds of layers; None if the table does not give one."""
    try:
        source |= {name: number for name, number in _TOKEN_IDS.items() if source.get(name) is not None}
        source.pop("quantization_config", None)
        lists = {name: value for name, value in source.items() if _is_by_layer(value, source[_LAYERS])}
        by_layer = [*lists.values(), *(value for value in to_mcore(table, source).values() if isinstance(value, list))]
        depth = _depth(by_layer, source[_LAYERS])
        source |= {_LAYERS: depth, **{name: value[:depth] for name, value in lists.items()}}
        mcore = to_mcore(table, source)
        sizes = _sizes(mcore)
        entries = [entry for entry in table if entry.to_mcore(source).keys() & sizes.keys()]
        for entry in entries:
            source |= written(entry, source, {**mcore, **sizes})
        now = to_mcore(table, source)
    except Exception:  # a table may not express these sizes, or a config of another kind raises
        return None
    return source if all(now[name] == size for name, size in sizes.items()) else None


def _is_by_layer(value: object, num_layers: int) -> bool:
    return isinstance(value, list) and len(value) == num_layers


def _depth(lists: list[list[Any]], num_layers: int) -> int:
    """The smallest number of layers, at least two, in which every kind of layer of these lists appears."""
    by_layer = [list(map(str, value)) for value in lists if _is_by_layer(value, num_layers)]
    depths = (depth for depth in range(2, num_layers) if all(set(kinds[:depth]) == set(kinds) for kinds in by_layer))
    return min(next(depths, num_layers), _MOST_LAYERS)


def _sizes(mcore: Mcore) -> dict[str, Any]:
    """Small sizes, with heads of the same width. Their relations stay: groups of queries, and shared experts."""
    heads, groups = mcore["num_attention_heads"], mcore.get("num_query_groups") or mcore["num_attention_heads"]
    assert isinstance(heads, int)
    assert isinstance(groups, int)
    few = min(groups, 2)
    some = few * min(heads // groups, 2)
    width = mcore.get("kv_channels")
    hidden = some * width if isinstance(width, int) else 128
    sizes = {"num_attention_heads": some, "num_query_groups": few, "hidden_size": hidden, **_VOCAB, **_widths(mcore)}
    sizes |= {"output_groups": some}
    return {name: size for name, size in sizes.items() if mcore.get(name) is not None}


def _widths(mcore: Mcore) -> dict[str, int]:
    """Small sizes of MLPs. Equal ones stay equal, and so does the number of shared experts of one size."""
    given = {name: size for name in _MLPS if isinstance(size := mcore.get(name), int)}
    experts = [size for name, size in given.items() if name != "ffn_hidden_size"]
    unit = math.gcd(*experts)
    widths = {name: 16 * size // unit for name, size in given.items() if size in experts}
    return {name: widths.get(name, 48) for name in given}


def _outcome(config_class: Any, fields: dict[str, Any]) -> Outcome:
    """What transformers computes with random weights, which do not depend on the field."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.auto_factory import _get_model_class

    try:
        hf = config_class.from_dict({**copy.deepcopy(fields), "dtype": "float32", "_experts_implementation": "eager"})
        hf._attn_implementation = "eager"
        known = next(
            auto._model_mapping for auto in (AutoModelForCausalLM, AutoModel) if type(hf) in auto._model_mapping
        )
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            model = _get_model_class(hf, known)(hf)
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) * 0.2 - 0.05)
                return tuple(_logits(model.train(training)) for training in (False, True))
    except Exception:  # a config class and a model may raise any type
        return None


def _logits(model: Any) -> Tensor:
    torch.manual_seed(2)  # of dropout
    logits: Tensor = model(torch.arange(_TOKENS)[None] + 3, use_cache=False)[0]
    return logits


def _equal(one: Outcome, other: Outcome) -> bool:
    return one is not None and other is not None and all(map(torch.equal, one, other))
