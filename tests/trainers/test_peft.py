"""LoRA configs of trainers: their translation, and refused values; verl need not be installed."""

from types import SimpleNamespace

import pytest
import torch

from mcore_bridge import ParallelDims, build_model, iter_hf_weights
from mcore_bridge.errors import BridgeError, ConfigError
from mcore_bridge.trainers import mbridge
from mcore_bridge.trainers.peft_functions import apply_peft_adapter_filter_to_state_dict, create_peft
from mcore_bridge.trainers.rlinf import MegatronCoreWeightReshard
from mcore_bridge.trainers.rlinf.functions import ReshardFunctions
from mcore_bridge.trainers.verl.replacements import get_peft_cls
from tests import zoo
from tests.support import tiny
from tests.support.fake_mesh import rank_of
from tests.support.rlinf_models import config_a

REFUSED = {
    "type": "dora",
    "dropout": 1.0,
    "exclude_modules": ["linear_qkv"],
    "lora_A_init_method": "gauss",
    "lora_B_init_method": "normal",
    "a2a_experimental": True,
    "dtype": "fp32",
    "target_modules": ["*.layers.0.*.linear_qkv"],
    "use_rslora": True,
    "rank": 2.5,
    "alpha": "32",
    "dropout_position": "middle",
    "freeze_vision_model": False,
    "freeze_vision_projection": False,
    "freeze_language_model": False,
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_honoured_is_refused_by_its_key(key):
    with pytest.raises(ConfigError, match=key):
        create_peft({"rank": 4, key: REFUSED[key]}, torch.bfloat16)


def test_all_obstacles_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        create_peft({"rank": 4, **REFUSED}, torch.bfloat16)
    assert all(key in str(caught.value) for key in REFUSED)


def test_no_rank_is_no_adapter_and_mbridge_has_none():
    assert get_peft_cls(SimpleNamespace(lora={"rank": 0, "dropout": 0.5}), None, None) is None
    with pytest.raises(ConfigError, match="vanilla_mbridge=False"):
        get_peft_cls(SimpleNamespace(lora={"rank": 1}), object(), None)


def adapted(hf, **lora):
    """HF's names of the tensors of adapters that a model gets, and the model."""
    with rank_of(ParallelDims(), 0, 1):
        chunks = build_model(hf, load_weights=False, dtype=torch.float32)
        create_peft({"rank": 2, **lora}, torch.float32)(chunks)
        rules = chunks[0].bridge_adapters.mapping.rules
    return {name.removesuffix(".weight").partition(".*.")[2] for rule in rules for name in rule.hf}, chunks[0]


def test_names_of_projections_are_those_of_the_layer_that_joins_them():
    names, _ = adapted(tiny.config("qwen3"), type="canonical_lora", target_modules=["linear_k", "linear_fc1_gate"])
    assert names == {f"{module}.lora_{end}" for module in ("self_attn.k_proj", "mlp.gate_proj") for end in "AB"}
    with pytest.raises(ConfigError, match=r"linear_q is one of 3 projections that linear_qkv joins"):
        adapted(zoo.cases()["phi3"].hf, target_modules=["linear_q"])


def test_a_checkpoint_of_adapters_alone_has_what_is_trained():
    _, chunk = adapted(tiny.config("qwen3"))
    peft, state = create_peft({"rank": 2}), dict(chunk.named_parameters())
    found = apply_peft_adapter_filter_to_state_dict({"model": state, "rng_state": 1}, peft)
    assert found["model"].keys() == {name for name, parameter in state.items() if parameter.requires_grad}
    assert found["rng_state"] == 1


def resharded(models, merged=None):
    """The tensors that RLinf's resharder passes on, gathered in each of its ways."""
    reshard = MegatronCoreWeightReshard(config_a(), merged=merged)
    for bucket in reshard.divide_model_to_bucket(models):
        yield from reshard.gather_and_reshard_model(bucket, 0).items()


def resharded_whole(models, merged=None):
    reshard = MegatronCoreWeightReshard(config_a(), merged=merged)
    for bucket in reshard.divide_model_to_bucket(models):
        yield from reshard.narrow_to_target(reshard.gather_full_model(bucket), 0).items()


def exported(models, merged=None):
    return mbridge.AutoBridge.from_config(tiny.config("qwen3")).export_weights(models, merged=merged)


@pytest.mark.parametrize("export", [exported, resharded, resharded_whole])
def test_a_trainer_says_whether_it_wants_merged_weights(export, tmp_path):
    with rank_of(ParallelDims(), 0, 1):
        (chunk,) = build_model(tiny.config("qwen3"), load_weights=False, dtype=torch.float32)
        create_peft({"rank": 2, "target_modules": ["linear_proj"]}, torch.float32)([chunk])
        torch.nn.init.ones_(chunk.decoder.layers[0].self_attention.linear_proj.adapter.linear_out.weight)
        with pytest.raises(BridgeError, match=r"expected merged=True .* found merged=None"):
            list(export([chunk]))
        for merged in (True, False):
            wanted = dict(iter_hf_weights([chunk], merged=merged))
            found = dict(export([chunk], merged))
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
            mbridge.AutoBridge.from_config(tiny.config("qwen3")).save_weights([chunk], tmp_path / "out", merged=merged)
        with pytest.raises(BridgeError, match="found merged=None"):
            mbridge.AutoBridge.from_config(tiny.config("qwen3")).save_weights([chunk], tmp_path / "other")
        functions = ReshardFunctions(chunk.config, hf=tiny.config("qwen3"))
        factors = {name: tensor for name, tensor in chunk.state_dict().items() if "adapter" in name}
        with pytest.raises(ConfigError, match="belongs to an adapter"):
            functions.convert_fn(factors)
