"""Models and configs for RLinf."""

from types import SimpleNamespace

import torch

from mcore_bridge.weights.model_tensors import held_tensors
from tests.support.strategies import tiny
from tests.support.target_models import EXPERTS, FAMILIES

CAPACITY = 1 << 14


SPARSE = tiny("qwen3_moe", **EXPERTS, num_hidden_layers=4, vocab_size=256, num_key_value_heads=2)


TIED = tiny("qwen2", num_hidden_layers=5, tie_word_embeddings=True, vocab_size=192, num_key_value_heads=2)


LATENT = FAMILIES["latent"]


def config_a(**fields):
    """A ReshardConfig with the fields of RLinf 0.4.0, which has no data parallel attention."""
    known = {"model_type": "qwen3_moe", "reshard_tp_size": 1, "reshard_pp_size": 1, "rollout_ep_size": 1}
    return SimpleNamespace(**{**known, "bucket_capacity": CAPACITY, **fields})


def changed(models):
    """Change every parameter, so that a sync of old values would show."""
    with torch.no_grad():
        for tensor in held_tensors(models).values():
            tensor.neg_()


def negative(state):
    return {name: -tensor for name, tensor in state.items()}


SPLIT = {"num_layers_in_first_pipeline_stage": 2}
