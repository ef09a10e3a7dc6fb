"""What a trainer's LoRA config becomes, and what of it is refused; verl need not be installed."""

from types import SimpleNamespace

import pytest
import torch

from mcore_bridge import ParallelDims, build_model
from mcore_bridge.errors import ConfigError
from mcore_bridge.trainers.adapters import apply_peft_adapter_filter_to_state_dict, create_peft
from mcore_bridge.trainers.verl_peft import get_peft_cls
from tests import zoo
from tests.support import tiny
from tests.support.fake_mesh import rank_of

REFUSED = {
    "type": "dora",
    "dropout": 0.1,
    "exclude_modules": ["linear_qkv"],
    "lora_A_init_method": "gauss",
    "lora_B_init_method": "normal",
    "a2a_experimental": True,
    "dtype": "fp32",
    "target_modules": ["*.layers.0.*.linear_qkv"],
    "use_rslora": True,
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
