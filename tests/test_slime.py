"""slime's ``convert_to_hf``: the parameters of a real model, one by one, give every HF tensor."""

from types import SimpleNamespace

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.commands.fake import rank_of
from mcore_bridge.errors import ConfigError, MappingError
from mcore_bridge.trainers.slime import convert_to_hf
from mcore_bridge.weights.names import held_tensors
from tests import zoo
from tests.strategies import random_state, tiny
from tests.test_rlinf_reshard import LATENT, SPARSE
from tests.test_targets import assert_gets


@pytest.mark.parametrize(
    "hf",
    [SPARSE, tiny("qwen2", tie_word_embeddings=True), tiny("phi3", pad_token_id=0)],
    ids=["experts", "tied", "fused"],
)
def test_all_parameters_give_all_tensors(hf, tmp_path):
    hf.save_pretrained(tmp_path)
    args = SimpleNamespace(hf_checkpoint=tmp_path)
    state = random_state(hf)
    with rank_of(ParallelDims(), 0, 1):
        (model,) = mb.build_model(hf, dtype=torch.float32, device="cpu", load_weights=state)
    found = {}
    for name, param in model.named_parameters():
        if name.endswith("word_embeddings.weight"):
            param = torch.cat((param, torch.zeros(32, param.shape[1])))  # as megatron pads it
        for hf_name, tensor in convert_to_hf(args, "any", f"module.module.{name}", param):
            assert hf_name not in found
            found[hf_name] = tensor
    own = {tensor.untyped_storage().data_ptr() for tensor in held_tensors([model]).values()}
    assert not own & {tensor.untyped_storage().data_ptr() for tensor in found.values()}
    assert_gets(found, state)


def test_grouped_experts_by_their_numbers(tmp_path):
    SPARSE.save_pretrained(tmp_path)
    args = SimpleNamespace(hf_checkpoint=tmp_path)
    state = random_state(SPARSE)
    expert = "model.layers.1.mlp.experts.5"
    fc1 = torch.cat([state[f"{expert}.gate_proj.weight"], state[f"{expert}.up_proj.weight"]])
    found = convert_to_hf(args, "any", "module.decoder.layers.1.mlp.experts.linear_fc1.weight5", fc1)
    assert_gets(dict(found), {name: state[name] for name in (f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight")})


def test_what_it_cannot_do_is_refused(tmp_path):
    SPARSE.save_pretrained(tmp_path / "sparse")
    LATENT.save_pretrained(tmp_path / "latent")
    zoo.cases()["gpt_oss"].hf.save_pretrained(tmp_path / "fused")
    args, latent, fused = (SimpleNamespace(hf_checkpoint=tmp_path / name) for name in ("sparse", "latent", "fused"))
    with pytest.raises(ConfigError, match="quantization_config must be None"):
        convert_to_hf(args, "any", "module.decoder.final_layernorm.weight", torch.zeros(48), {"bits": 8})
    with pytest.raises(ConfigError, match="has latent queries"):
        convert_to_hf(latent, "any", "module.decoder.final_layernorm.weight", torch.zeros(48))
    with pytest.raises(ConfigError, match="gpt_oss has one tensor for all experts"):
        convert_to_hf(fused, "any", "module.decoder.final_layernorm.weight", torch.zeros(48))
    with pytest.raises(MappingError, match="no rule"):
        convert_to_hf(args, "any", "module.decoder.layers.0.nothing.weight", torch.zeros(48))
