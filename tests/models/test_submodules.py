"""Configs and files of the families of ``zoo/tables.py``, ``zoo/submodules.py`` and ``zoo/texts.py``."""

import pytest
import torch
from transformers import CONFIG_MAPPING

import mcore_bridge as mb
from mcore_bridge.architecture import architecture_of, read_hf
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config, to_transformer_config
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import LayerContext
from mcore_bridge.factory.modules.parallel_blocks import adapt_parallel
from tests import zoo
from tests.support import pool
from tests.support.families import built
from tests.support.module_settings import settings
from tests.support.strategies import random_state
from tests.zoo import layer_sizes, submodules, tables, texts

SPELLED = {
    *("attention_value_scale", "hidden_act", "gating", "prefix_dense_intermediate_size"),
    "shared_expert_combination_strategy",
}
"""Fields with several spellings of one meaning: a function with two names, None for a size or for 1, a sum of one."""
CASES = zoo.params(sorted({**submodules.CASES, **tables.CASES, **texts.CASES, **layer_sizes.CASES}))


@pytest.mark.parametrize("name", CASES)
def test_configs_come_back(name: str) -> None:
    hf = read_hf(zoo.cases()[name].hf)
    table = architecture_of(hf).fields
    back = to_hf_config(to_transformer_config(hf, table), to_gpt_arguments(hf, table), table)
    again = CONFIG_MAPPING[zoo.cases()[name].model_type].from_dict(hf.to_dict() | back)
    assert built(read_hf(again)) == built(hf)
    given = hf.to_dict()
    others = {field for field in (back.keys() & given.keys()) - SPELLED if back[field] != given[field]}
    assert {field for field in others if "rope" not in field} == set()


@pytest.mark.skipif("axk1" not in zoo.cases(), reason="the installed transformers lacks it")
def test_published_files_of_axk1_lack_biases_of_routers_and_have_norms_too_many() -> None:
    assert pool.run(1, zeros_of_routers) == [[True] * 3]


def zeros_of_routers() -> list[bool]:
    """Runs in a worker: whether biases that a file lacks are zero, in each layer with experts."""
    hf, dims = zoo.cases()["axk1"].hf, mb.ParallelDims()
    state = {name: tensor for name, tensor in random_state(hf).items() if "e_score_correction" not in name}
    state["model.layers.0.post_mlp_layernorm.weight"] = torch.ones(hf.hidden_size)
    dims.initialize(device="cpu")
    (model,) = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
    return [not buffer.any() for name, buffer in model.named_buffers() if name.endswith("expert_bias")]


def test_what_throws_the_first_norm_away_is_refused_where_the_mlp_reads_it() -> None:
    config = settings(parallel_norms=1, recompute_granularity="selective", recompute_modules=["layernorm"])
    with pytest.raises(ConfigError, match="recompute_modules must be without 'layernorm'"):
        adapt_parallel(None, LayerContext(config, 0, "torch"))
