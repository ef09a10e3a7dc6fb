"""Every family is tested with vLLM on GPUs, or has a reason why not."""

import pytest
from transformers import CONFIG_MAPPING

from mcore_bridge.architecture import architectures
from tests.workers.rollout_families import LEFT_OUT, ON_GPUS, configs


@pytest.mark.skipif("ministral3" not in CONFIG_MAPPING, reason="transformers 4.57 lacks some of the families")
def test_every_family_is_fed_to_an_engine_or_left_out_with_a_reason() -> None:
    fed = {hf.model_type for hf in configs().values()} | {*ON_GPUS}
    assert fed.isdisjoint(LEFT_OUT)
    assert fed | LEFT_OUT.keys() == set(architectures())
