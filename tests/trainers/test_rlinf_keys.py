"""Keys of RLinf's configs for Megatron: each is translated, or docs/trainers/rlinf.md has the reason why not."""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_bridge.trainers.rlinf import actor, convertor_settings, model_keys
from tests.workers.rlinf_worker import PAGE

OWN = Path(__file__).parent / "rlinf"
TRANSLATED = {
    *model_keys.MESH,
    *model_keys.SPELLED,
    *model_keys.FROM_HF,
    *model_keys.KERNELS,
    *model_keys.IGNORED,
    *actor._OWN,
} | {*("activation", "normalization", "position_embedding_type")}
READ = {"model", "mcore_gpt", "spec_name", "use_critic_model"}
"""Keys outside of the blocks, which ``read_actor`` and ``model_provider`` read."""


def rows_of(block: str) -> set[str]:
    """The keys in the table of the blocks around the model."""
    rows = re.findall(rf"^\| `{block}` \| (.*?) \|", PAGE, re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def unknown_in(role: Mapping[str, Any]) -> set[str]:
    """Keys of an ``actor`` or ``critic`` that are neither translated nor documented."""
    from megatron.core.transformer import TransformerConfig

    megatron = role.get("megatron") or {}
    known = {
        "": rows_of("actor") | READ | {"optim", "lr_sched", "tokenizer", "megatron"},
        "model": TRANSLATED | {field.name for field in fields(TransformerConfig)},
        **{name: rows_of(name) for name in ("optim", "lr_sched", "tokenizer", "megatron")},
        "ckpt_convertor": {*convertor_settings._ASKED, *convertor_settings._UNUSED},
    }
    blocks = {"": role, **role, "ckpt_convertor": megatron.get("ckpt_convertor") or {}}
    return {f"{name}.{key}" for name in known for key in (blocks.get(name) or {}) if key not in known[name]}


def roles_in(paths: Iterator[Path]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield blocks of actors and critics for Megatron. A config that extends another may have a single block."""
    for path in paths:
        config = yaml.safe_load(path.read_text()) or {}
        for role in (config.get(name) for name in ("actor", "critic") if isinstance(config, dict)):
            if role and (role.get("training_backend") == "megatron" or "megatron" in role):
                yield path, role


def test_every_key_of_our_examples_is_on_the_page() -> None:
    roles = list(roles_in(OWN.glob("*.yaml")))
    assert len(roles) == 4
    for path, role in roles:
        role["megatron"].pop("ckpt", None)  # the first name of the convertor's block
        assert not unknown_in(role), path
    known = roles[0][1]
    found = unknown_in({**known, "new": 1, "optim": {"new": 1}, "megatron": {"ckpt_convertor": {"new": 1}}})
    assert found == {".new", "optim.new", "ckpt_convertor.new"}


def test_every_key_of_the_examples_of_rlinf_is_on_the_page() -> None:
    found = importlib.util.find_spec("rlinf")
    if found is None or not found.submodule_search_locations:
        pytest.skip("rlinf is not installed")
    root = Path(next(iter(found.submodule_search_locations))).parent
    roles = list(roles_in(path for name in ("examples", "tests") for path in (root / name).rglob("*.yaml")))
    if not roles:
        pytest.skip("this rlinf is no checkout: its examples are not in its wheel")
    unknown = {(key, path.name) for path, role in roles for key in unknown_in(role)}
    assert not unknown, f"{len(roles)} blocks"
