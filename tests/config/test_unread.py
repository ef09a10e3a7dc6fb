"""Fields that no code of transformers reads are accepted and named; a recorder finds the fields that are read."""

import copy
import json
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto import modeling_auto

import mcore_bridge as mb
import tests.support.text_halves  # noqa: F401  # registers the text halves of composites
from mcore_bridge.architecture import architecture_of
from mcore_bridge.commands.plan.tables import Planned, plan, render
from mcore_bridge.config import compared_fields, family_code
from mcore_bridge.config import fields_read as static
from mcore_bridge.config.fields import claimed_by
from mcore_bridge.config.fields_read import readers_of
from mcore_bridge.config.hf import read_config
from mcore_bridge.config.tables import BASE
from mcore_bridge.config.unread_fields import notes_on, unread_fields, without_unread
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.blueprint import BuildOptions
from mcore_bridge.launch.fake_rank import rank_of
from tests import zoo
from tests.support.bounds import ONE
from tests.support.families import family, write

CASES = {case.model_type: case.hf for case in zoo.cases().values()}


def recorded(hf: PretrainedConfig) -> set[str]:
    """The fields that transformers reads while it builds a model of ``hf`` and computes logits."""
    names = set[str]()

    class Recorder(type(hf)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            names.add(name)
            return super().__getattribute__(name)

    config = Recorder.from_dict({**hf.to_dict(), "dtype": "float32", "_experts_implementation": "eager"})
    config._attn_implementation = "eager"
    fields = config.to_dict().keys()
    names.clear()
    model = AutoModelForCausalLM._model_mapping[type(hf)](config)
    model(torch.zeros(1, 4, dtype=torch.long))
    return names & fields


def fields_read(config: type, names: Iterable[str]) -> frozenset[str]:
    """The ``names`` that the installed transformers may read from a config of this class."""
    return frozenset().union(*readers_of(config, names))


@pytest.mark.parametrize("model_type", CASES)
def test_what_transformers_reads_counts_as_read(model_type: str) -> None:
    hf = CASES[model_type]
    names = recorded(hf)
    assert {"hidden_size", "vocab_size"} <= names
    of_generation = claimed_by(BASE)  # a model's __init__ also makes a GenerationConfig
    assert names - fields_read(type(hf), names) - of_generation == set()


def test_a_reader_that_looks_into_fewer_places_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistakes: the reader skips shared modules, modules of the family, or attributes of configs."""
    hf = CASES["llama"]
    names = recorded(hf)
    monkeypatch.setattr(static, "_read_by_family", static._read_by_family.__wrapped__)  # nothing is kept
    for name in ("_is_in_shared", "_is_in_family", "_is_attribute"):
        with monkeypatch.context() as patch:
            patch.setattr(static, name, lambda *_: False)
            assert names - fields_read(type(hf), names) - claimed_by(BASE)


def test_each_way_to_read_a_field_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On made-up code: a field that is only kept or passed on is unread, any other use reads it; unknown names
    count.
    """
    package = tmp_path / "models" / "toy"
    package.mkdir(parents=True)
    (tmp_path / "shared.py").write_text(
        "from .trainer import Trainer\n"
        "def rope(config): return config.from_shared, other_config.of_another\n"
        "class GenericForTokenClassification:\n"
        "    def __init__(self, config): self.dropout = config.of_head\n"
    )
    (tmp_path / "trainer.py").write_text("def train(config): return config.of_trainer\n")
    (tmp_path / "other.py").write_text("class OtherConfig: ...\n")
    (tmp_path / "base.py").write_text(
        "class BaseConfig:\n"
        "    def __init__(self, of_base): self.size = of_base // 2\n"
        "    def heads(self): return self.of_method\n"
        "class StrangerConfig:\n"
        "    def __init__(self, of_stranger): self.size = of_stranger // 2\n"
    )
    (tmp_path / "deep").mkdir()
    init = "from .inner import mask\nfrom .given import sized\nfrom .unused import other\n"
    (tmp_path / "deep" / "__init__.py").write_text(init)
    (tmp_path / "deep" / "unused.py").write_text("def other(config): return config.of_unused\n")
    (tmp_path / "deep" / "inner.py").write_text(
        "def mask(config): return config.get('got'), config.pop('dropped'), hasattr(config, 'asked')\n"
    )
    (tmp_path / "deep" / "given.py").write_text(
        "def sized(config, kind): return getattr(config, f'{kind}_width'), 'by_name'\n"
    )
    (package / "configuration_toy.py").write_text(
        "from ...base import BaseConfig\n"
        "class ToyConfig(BaseConfig):\n"
        "    attribute_map = {'mapped': 'kept'}\n"
        "    def __init__(self, kept, passed, renamed, halved, **kwargs):\n"
        "        self.kept = kept\n"
        "        self.other = renamed\n"
        "        self.size = halved // 2\n"
        "        self.popped = kwargs.pop('popped')\n"
        "        super().__init__(passed=passed)\n"
        "    def __getattribute__(self, name): return getattr(self.text_config, name)\n"
    )
    modeling = package / "modeling_toy.py"
    modeling.write_text(
        "from ...shared import rope\n"
        "from ...deep import mask, sized\n"
        "class Toy:\n"
        "    def __init__(self, config):\n"
        "        self.in_module = getattr(config, 'quoted')\n"
        "        self.width = config.plain\n"
        "        self.kind = config.rope_parameters['key_of_rope']\n"
        "        return self.in_module\n"
    )
    monkeypatch.setattr(static, "_read_by_family", static._read_by_family.__wrapped__)
    for module in (static, family_code):
        monkeypatch.setattr(module, "root", lambda: tmp_path)
    base = type("BaseConfig", (), {})
    toy = type("ToyConfig", (base,), {"__module__": "transformers.models.toy.configuration_toy", "model_type": "toy"})
    read = {"mapped", "renamed", "halved", "popped", "quoted", "plain", "from_shared", "of_base", "of_method"}
    read |= {"got", "dropped", "asked", "of_experts_width", "by_name"}
    unread = {"kept_back", "passed", "in_module", "of_another", "of_head", "of_trainer", "nowhere", "width_of_experts"}
    unread |= {"of_stranger", "of_unused", "of_experts_width_more", "key_of_rope"}
    for cached in (family_code.code_of, static._shared_config_classes, static._is_of_another_class):
        cached.cache_clear()
    try:
        assert fields_read(toy, read | unread) == read
        modeling.write_text(modeling.read_text() + "        self.any = getattr(config, config.name_of_field)\n")
        for cached in (family_code.text, static._nodes, static._reads_unnamed_fields):
            cached.cache_clear()
        assert fields_read(toy, read | unread) == read | unread
        other = tmp_path / "models" / "other" / "modeling_other.py"
        other.parent.mkdir()
        other.write_text("class OtherForCausalLM(Base):\n    def __init__(self, config): self.a = config.of_other\n")
        modeling.unlink()
        for cached in (family_code.code_of, family_code.modules_in):
            cached.cache_clear()
        assert fields_read(toy, unread) == unread, "no class is known for it"
        monkeypatch.setitem(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "toy", "OtherForCausalLM")
        monkeypatch.setitem(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "other", "OtherForCausalLM")
        family_code._folders_of_model.cache_clear()
        assert fields_read(toy, {"of_other", "plain"}) == {"of_other"}, "its model is a class of another family"
    finally:
        family_code._folders_of_model.cache_clear()
        for cached in (family_code.code_of, static._shared_config_classes, static._is_of_another_class):
            cached.cache_clear()
    assert fields_read(type("Own", (), {"__module__": "a_package.of_theirs"}), unread) == unread


def test_unread_fields_are_accepted_named_and_refused_when_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For every function that builds: the model does not change, one line names them, and strict_config refuses all."""
    extra = {"unk_token_id": 0, "use_qk_norm": True, "dual_chunk_attention_config": {"chunk_size": 8}}
    folder = write(tmp_path / "published", {**family("qwen3"), **extra, "auto_map": {"AutoModel": "m.X"}})
    plain = mb.to_transformer_config(write(tmp_path / "plain", family("qwen3")))
    assert vars(mb.to_transformer_config(folder)).keys() == vars(plain).keys()
    hf = read_config(folder)
    names = ("dual_chunk_attention_config", "unk_token_id", "use_qk_norm")
    assert unread_fields(hf, architecture_of(hf).fields) == names
    (level, line), (warned, engines) = notes_on(names)
    assert (level, warned) == (logging.INFO, logging.WARNING)
    assert all(name in line for name in names)
    assert "vLLM" in engines
    planned = Planned.of(plan(folder, BuildOptions()))
    assert line in render(planned).renderables
    build = partial(mb.build_model, folder, load_weights=False, device="meta")
    with rank_of(ONE, 0, 1):
        assert build()
        with pytest.raises(ConfigError, match=r"dual_chunk_attention_config=.*unk_token_id=0, use_qk_norm=True"):
            build(strict_config=True)
    for call in (
        lambda: mb.to_transformer_config(folder, strict_config=True),
        lambda: plan(folder, BuildOptions(strict_config=True)),
    ):
        with pytest.raises(ConfigError, match=r"dual_chunk_attention_config=.*unk_token_id=0, use_qk_norm=True"):
            call()


STRAY = [
    ("cohere2", {"rms_norm_eps": 1e-6}, ("rms_norm_eps",)),  # of MTP layers in a shared module
    ("granite", {"rope_type": "default"}, ("rope_type",)),  # transformers reads it inside of the rope alone
    ("hunyuan_v1_moe", {"qk_rope_head_dim": None}, ("qk_rope_head_dim",)),
    ("internlm3", {"max_window_layers": 28}, ("max_window_layers",)),  # whose model is llama's
    ("qwen3", {"attention_chunk_size": 8192, "tp_plan": {}}, ("attention_chunk_size", "tp_plan")),
    ("qwen3", {"per_layer_config": {"0": {"hidden_size": 8}}}, ()),
]
"""Fields that a table does not know, and which of them change nothing."""


@pytest.mark.parametrize(("model_type", "fields", "unread"), STRAY, ids=lambda value: str(value)[:40])
def test_a_field_that_only_shared_code_names_is_tried(model_type: str, fields: Any, unread: Any) -> None:
    if model_type not in CASES or not zoo.NEWEST:
        pytest.skip("the installed transformers is too old")
    hf = copy.deepcopy(CASES[model_type])
    for name, value in fields.items():
        setattr(hf, name, value)
    assert unread_fields(hf, architecture_of(hf).fields) == unread


@pytest.mark.parametrize("name", CASES)
def test_a_small_model_of_each_family_shows_what_a_field_does(name: str) -> None:
    """It can be made and computes numbers, so that the comparison is one. Other mixers than attention are not tried."""
    hf = CASES[name]
    table = architecture_of(hf).fields
    fields = without_unread(hf, table)
    small = compared_fields._small(dict(fields), table)
    outcome = compared_fields._outcome(type(hf), small) if small else None
    if outcome is None:
        assert name in ("nemotron_h", "granitemoehybrid") or not zoo.NEWEST
        return
    assert all(logits.isfinite().all() and logits.std() > 0 for logits in outcome)
    assert compared_fields.changes_nothing(type(hf), {**fields, "an_extra": 3}, table, "an_extra")


def test_a_field_that_acts_beyond_a_length_is_no_unread_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sequence of the comparison is longer than the window, so smaller windows are tried, too."""
    hf = CASES["mistral"]
    fields = {**hf.to_dict(), "sliding_window": 4096}
    table = tuple(entry for entry in architecture_of(hf).fields if "sliding_window" not in entry.names)
    assert not compared_fields.changes_nothing(type(hf), fields, table, "sliding_window")
    monkeypatch.setattr(compared_fields, "_COMPARED", {})
    monkeypatch.setattr(compared_fields, "_like", lambda value: [value])
    assert compared_fields.changes_nothing(type(hf), fields, table, "sliding_window"), "the planted mistake"


def test_a_key_of_the_rope_that_changes_no_angle_is_unread(tmp_path: Path) -> None:
    fields = {name: value for name, value in family("llama").items() if not name.startswith("rope")}
    for kind, keys, unread in (
        ("linear", {"factor": 2.0, "alpha": 3, "finetuned": False}, ["alpha", "finetuned"]),
        ("default", {"factor": 2.0}, ["factor"]),
        ("yarn", {"factor": 4.0, "attn_factor": 0.8782488562869419, "attention_factor": 1.0}, []),
    ):
        rope = {"rope_type": kind, "rope_theta": 1e4, **keys}
        for spelling in ("rope_scaling", "rope_parameters"):
            hf = read_config(write(tmp_path, {**fields, spelling: rope}))
            (place,) = {"rope_scaling", "rope_parameters"} & {
                name for name, value in hf.to_dict().items() if isinstance(value, dict)
            }
            assert unread_fields(hf, architecture_of(hf).fields) == tuple(f"{place}.{key}" for key in unread)
            assert mb.to_transformer_config(hf).hf_rope.attention_factor == 1.0
            if unread:
                with pytest.raises(ConfigError, match=f"found {place}.{unread[0]}={keys[unread[0]]}"):
                    mb.to_transformer_config(hf, strict_config=True)


def test_a_borrowed_class_answers_for_its_own_fields_only(tmp_path: Path) -> None:
    """deepseek_v3's config class reads kimi_k2. The code in its folders may read fields that this class lacks."""
    hf = CASES["deepseek_v3"].to_dict()
    fields = {**hf, "model_type": "kimi_k2", "a_field_of_kimi": 1}
    folder = write(tmp_path, json.loads(json.dumps(fields, default=str)))
    with pytest.raises(ConfigError, match="does not know a_field_of_kimi=1"):
        mb.to_transformer_config(folder)


def test_all_obstacles_are_said_at_once_and_no_value_at_length(tmp_path: Path) -> None:
    fields = {**family("llama"), "is_decoder": True, "vocab_size": -3, "rope_interleaved": [*range(1000)]}
    with pytest.raises(ConfigError) as raised:
        mb.to_transformer_config(write(tmp_path, fields))
    text = str(raised.value)
    assert all(name in text for name in ("is_decoder must be", "vocab_size must be", "rope_interleaved must be"))
    assert "500, 501" not in text


def test_infinities_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    folder = write(tmp_path, {**family("llama"), "a_limit": [0.0, {"__float__": "Infinity"}]})
    assert read_config(folder).a_limit == [0.0, float("inf")]
