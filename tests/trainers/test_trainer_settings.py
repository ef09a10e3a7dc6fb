"""Each row of the table of settings in docs/trainers/verl.md holds for the installed megatron-core."""

from typing import Any

import pytest
import torch

from mcore_bridge import BridgeError, ParallelDims
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint
from mcore_bridge.trainers.settings import require_same_model, split
from tests import zoo
from tests.support.settings_of_trainers import BECOMES, ENGINE, SIIRL
from tests.support.strategies import tiny

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
VALUES: dict[str, Any] = {
    **FULL,
    "recompute_modules": ["mlp"],
    "attention_backend": "flash",
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_dtype": "fp64",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.5,
    "moe_router_load_balancing_type": "none",
    "moe_router_bias_update_rate": 0.5,
    "moe_enable_deepep": True,
    "moe_grouped_gemm": True,
    "num_layers_in_first_pipeline_stage": 1,
    "num_layers_in_last_pipeline_stage": 1,
    "pipeline_model_parallel_layout": "Et|tttL",
    "context_parallel_size": 2,
    "mtp_num_layers": None,
    "mtp_loss_scaling_factor": 0.25,
    "max_seqlen_per_dp_cp_rank": 4096,
    "moe_expert_capacity_factor": 1.5,
    "dsa_indexer_loss_coeff": 0.5,
    "normalization": "RMSNorm",
    "tensor_model_parallel_size": 2,
    "fp8": "e4m3",
    "fp8_recipe": "tensorwise",
}
"""The tested values; True for all other settings."""
BESIDE: dict[str, dict[str, Any]] = {
    "moe_enable_deepep": {"moe_token_dispatcher_type": "flex"},
    **dict.fromkeys(FULL, FULL),
    "sequence_parallel": {"tensor_model_parallel_size": 2},
    "account_for_embedding_in_pipeline_split": {"account_for_loss_in_pipeline_split": True},
    "account_for_loss_in_pipeline_split": {"account_for_embedding_in_pipeline_split": True},
}
NEEDS_TE = {"apply_rope_fusion", "moe_permute_fusion"}
ITS_OWN = {"multi_latent_attention", "moe_router_enable_expert_bias"}
"""Settings of deepseek_v3 that qwen3_moe does not have."""
MESH = ParallelDims(pp=2)


@pytest.mark.parametrize("key", sorted(BECOMES))
def test_a_setting_becomes_what_the_page_says(key: str) -> None:
    family = "deepseek_v3" if key in ITS_OWN else "qwen3_moe"
    hf = tiny("llama") if key == "fp8" else zoo.cases()[family].hf
    value = VALUES.get(key, True)
    settings = {**BESIDE.get(key, {}), key: value}
    dims, overrides = split(settings, MESH)
    if key in NEEDS_TE:
        with pytest.raises(BridgeError, match="megatron-core refuses this configuration"):
            make_blueprint(hf, BuildOptions(dims=dims, dtype=torch.bfloat16, overrides=overrides))
        return
    if BECOMES[key] == "refused":
        with pytest.raises(BridgeError, match=f"found {key!r}"):
            make_blueprint(hf, BuildOptions(dims=dims, dtype=torch.bfloat16, overrides=overrides))
        return
    config = make_blueprint(hf, BuildOptions(dims=dims, dtype=torch.bfloat16, overrides=overrides)).config
    found = getattr(config, key)
    assert getattr(found, "name", found) == value or str(found) == str(value)
    if BECOMES[key] == "has":  # of the mesh, which build_model compares with parallel_state
        assert dims != MESH


@pytest.mark.parametrize("key", sorted(ITS_OWN))
def test_another_model_is_refused(key: str) -> None:
    with pytest.raises(BridgeError, match=f"{key} must be False|{key}=True, expected False"):
        make_blueprint(
            zoo.cases()["qwen3_moe"].hf, BuildOptions(dims=MESH, dtype=torch.bfloat16, overrides={key: True})
        )


def test_the_page_has_what_was_seen_in_the_wild() -> None:
    assert SIIRL <= ENGINE
    assert VALUES.keys() <= BECOMES.keys()
    assert {"use_flash_attn", "gradient_accumulation_fusion", "deallocate_pipeline_outputs"} <= BECOMES.keys()
    assert {*BECOMES.values()} == {"honoured", "has", "refused"}


def test_a_window_may_come_as_a_list() -> None:
    hf = tiny("mistral", sliding_window=8)
    with pytest.raises(BridgeError, match=r"window_size=\[8, 0\], expected \(7, 0\)"):
        require_same_model(hf, {"window_size": [8, 0]}, dtype=torch.bfloat16)
    assert require_same_model(hf, {"window_size": [7, 0]}, dtype=torch.bfloat16) == {"window_size": [7, 0]}


def test_sizes_that_are_none_mean_what_megatron_core_means() -> None:
    names = ("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size")
    dims, overrides = split({"tensor_model_parallel_size": 4, **dict.fromkeys(names)}, ParallelDims(cp=2))
    assert (dims, overrides) == (ParallelDims(tp=4, etp=4), {})
    assert MESH.with_config_fields(ParallelDims(tp=2, pp=2, vp=2, sp=True).to_config_fields()) == ParallelDims(
        tp=2, pp=2, vp=2, sp=True
    )
