"""Config fields of the families of ``zoo/plain.py``: rope, biases, dropout, and a family that transformers lacks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

import mcore_bridge as mb
from mcore_bridge.architecture import architecture_of, read_hf
from mcore_bridge.config.rope_spelling import read_parameters
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config, to_transformer_config
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.rotary import HFRotaryEmbedding
from mcore_bridge.factory.modules.temperature import temperature_of, tempered
from mcore_bridge.factory.param_count import count_params
from mcore_bridge.weights.provenance import provenance_of
from tests import zoo
from tests.support import pool
from tests.support.families import built, rope_of
from tests.support.parity import reference_logits, tokens
from tests.support.strategies import random_state, tiny
from tests.zoo import plain

CASES = zoo.params(sorted(plain.CASES))

# -- config tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_configs_come_back(name: str) -> None:
    hf = read_hf(zoo.cases()[name].hf)
    table = architecture_of(hf).fields
    back = to_hf_config(to_transformer_config(hf, table), to_gpt_arguments(hf, table), table)
    again = CONFIG_MAPPING[hf.model_type].from_dict(hf.to_dict() | back)
    assert built(read_hf(again)) == built(hf)
    assert all(back[field] == getattr(hf, field) for field in back if "rope" not in field and hasattr(hf, field))
    assert read_parameters(back | {"max_position_embeddings": 64}) == read_parameters(hf.to_dict())


PHI_4_MINI = {
    "model_type": "phi3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoTokenizer": "other/tokenizer"},
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "mlp_bias": False,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + i for i in range(48)]},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}
STARCODER2_3B = {
    "model_type": "starcoder2",
    "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True,
    "vocab_size": 49152,
    "embedding_dropout": 0.1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "norm_epsilon": 1e-5,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "sliding_window": 4096,
    "use_bias": True,
}
MIMO_7B = {
    "model_type": "mimo",
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "vocab_size": 151680,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000,
    "use_mrope": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("fields", [PHI_4_MINI, STARCODER2_3B, MIMO_7B], ids=lambda fields: str(fields["model_type"]))
def test_configs_as_they_are_published_are_read(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config, arguments = mb.to_transformer_config(tmp_path), mb.to_gpt_arguments(tmp_path)
    assert config.num_layers == fields["num_hidden_layers"]
    assert arguments["rotary_base"] == fields["rope_theta"]
    assert arguments["rotary_percent"] == fields.get("partial_rotary_factor", 1.0)


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("helium", {"attention_bias": True, "mlp_bias": True}, "mlp_bias=True must come with a bias of its output"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias=True must come with attention_out_bias=True"),
        ("phi3", {**plain.PHI, "lm_head_bias": True}, "lm_head_bias must be False"),
        ("phi3", {**plain.PHI, **plain.partial(0.2)}, "an even number of the 16 dims of a head"),
        ("nemotron", zoo.rope("linear", factor=2.0), "rope type must be one of .'default'. in this family"),
        ("arcee", plain.partial(0.5), "must not have .*partial_rotary_factor"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 5}, "use_sliding_window must be True"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers must have a 1"),
        ("smollm3", {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 4}, r"4 layers, found \[1, 0\]"),
    ],
)
def test_what_is_not_reproduced_is_refused(model_type: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(read_hf(zoo.case(model_type, **fields).hf))


def test_what_the_embedding_drops_is_a_field_of_its_own() -> None:
    for name, dropped in (("starcoder2", 0.3), ("seed_oss", 0.0)):
        assert pool.run(1, dropouts, zoo.cases()[name].hf) == [(dropped, 0.2)]


def dropouts(hf: Any) -> tuple[float, float]:
    """Runs in a worker: the fraction of dropped values after the embedding, and after the attention of a layer."""
    mb.ParallelDims().initialize(device="cpu")
    (model,) = mb.build_model(hf, dtype=torch.float32, device="cpu", load_weights=False)
    return model.embedding.embedding_dropout.p, model.decoder.layers[0].hidden_dropout


# -- longrope ----------------------------------------------------------------------------------------------------------


def longrope(spelling: int, **fields: Any) -> dict[str, Any]:
    """Phi-3 with longrope, as the JSON of a checkpoint in the spelling of transformers 4 or 5."""
    found = plain.longrope(6, original=16)
    theta, scaling = found.pop("rope_theta"), found.pop("rope_scaling")
    if spelling == 4:
        rope = {"rope_theta": theta, "rope_scaling": scaling, "partial_rotary_factor": 0.75}
    else:
        factors = {name: value for name, value in scaling.items() if name != "type"}
        rope = {"rope_parameters": {"rope_type": "longrope", "rope_theta": theta, **factors}}
        rope["rope_parameters"] |= {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 16}
    return {"model_type": "phi3", **plain.PHI, "num_attention_heads": 8, **found, **rope, **fields}


@pytest.mark.parametrize("spelling", [4, 5])
@pytest.mark.parametrize("seq_len", [7, 16, 17, 100])
def test_longrope_is_that_of_transformers(spelling: int, seq_len: int, tmp_path: Path) -> None:
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    (tmp_path / "config.json").write_text(json.dumps(longrope(spelling)))
    hf = read_hf(tmp_path)
    truth = Phi3RotaryEmbedding(hf)
    cosines, _ = truth(torch.zeros(1), torch.arange(seq_len)[None])
    rope = rope_of(hf)
    assert torch.equal(rope.frequencies(seq_len), truth.inv_freq)
    assert rope.attention_factor == truth.attention_scaling > 1.2
    angles = HFRotaryEmbedding(rope, rotary_interleaved=False, cp_group=None)(seq_len)[:, 0, 0]
    torch.testing.assert_close(angles.cos() * rope.attention_factor, cosines[0])


def test_longrope_forgets_a_long_text() -> None:
    embedding = HFRotaryEmbedding(
        rope_of(zoo.cases()["phi3-longrope-beyond"].hf), rotary_interleaved=False, cp_group=None
    )
    short, long = embedding(16), embedding(17)
    assert not torch.equal(long[:16], short)
    assert torch.equal(embedding(16), short)


def test_factors_that_do_not_fit_the_rotated_dims_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(longrope(4, partial_rotary_factor=1.0)))
    with pytest.raises(ConfigError, match="short_factor"):
        read_hf(tmp_path)
    rope = rope_of(zoo.cases()["phi3-longrope-beyond"].hf)
    with pytest.raises(ConfigError, match="a number for each of the 12 pairs of rotated dims, found 6"):
        rope.overridden({"kv_channels": 32})


# -- temperature -------------------------------------------------------------------------------------------------------


class Attention:
    """Replaces a core attention: it returns its query."""

    def __init__(self, config: Any, layer_number: int, *, pg_collection: Any = None) -> None:
        pass

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, packed_seq_params: Any = None) -> Any:
        return query


def core(num_ranks: int = 1, rank: int = 0, config: Any = None) -> Any:
    group = SimpleNamespace(size=lambda: num_ranks, rank=lambda: rank)
    config = config or SimpleNamespace(hf_rope=SimpleNamespace(query_temperature=(0.5, 4)))
    return tempered(Attention)(config, 2, pg_collection=SimpleNamespace(cp=group))


def test_queries_are_as_warm_as_their_place_in_the_text() -> None:
    ones = torch.ones(8, 2, 3, 5)
    warm = core().forward(ones, ones, ones)
    expected = 1 + 0.5 * torch.tensor([1.0] * 4 + [2.0] * 4).log()
    assert torch.equal(warm[:, 1, 2, 3], expected)
    assert torch.equal(core().forward(ones[:2], ones, ones)[:, 0, 0, 0], expected[6:])
    halves = [core(2, rank).forward(ones[:4], ones[:4], ones[:4])[:, 0, 0, 0] for rank in range(2)]
    assert torch.equal(torch.cat(halves), expected[[0, 1, 6, 7, 2, 3, 4, 5]])


def test_packed_sequences_are_as_warm_as_they_are_alone() -> None:
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 6, 8]), cu_seqlens_q_padded=None)
    ones = torch.ones(8, 3, 5)
    warm = core().forward(ones, ones, ones, packed_seq_params=packed)
    assert (warm[:, 0, 0] > 1).tolist() == [False] * 4 + [True] * 2 + [False] * 2
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 8, 12]), cu_seqlens_q_padded=None)
    for rank, late in ((0, [2, 3]), (1, [2, 3])):  # places 0, 1, 6, 7, and 0, 3; 2, 3, 4, 5, and 1, 2
        warm = core(2, rank).forward(ones[:6], ones[:6], ones[:6], packed_seq_params=packed)
        assert (warm[:, 0, 0] > 1).nonzero().flatten().tolist() == late


def test_layers_without_a_rope_count_from_the_first_token_of_a_row() -> None:
    """In the second row, three places are padding. transformers counts them too, and engines do not."""
    config = SimpleNamespace(nope_temperature=(0.5, 4), no_rope_freq=[0, 1])
    mask = torch.tensor([[1] * 8, [0] * 3 + [1] * 5])
    warm = core(config=config).forward(*[torch.ones(8, 2, 3, 5).bfloat16()] * 3, mask)
    assert (warm[:, :, 0, 0] > 1).int().T.tolist() == [[0] * 3 + [1] * 5, [0] * 6 + [1] * 2]
    assert temperature_of(config, 0) is None


# -- a family that transformers lacks ----------------------------------------------------------------------------------

TWIN = tiny("qwen2", num_key_value_heads=2, hidden_size=192, vocab_size=97)
MIMO = {
    "model_type": "mimo",
    "architectures": ["MiMoForCausalLM"],
    "num_nextn_predict_layers": 1,
    "attention_bias": True,
}


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of MiMo: a qwen2 and a layer for multi-token prediction."""
    folder = tmp_path_factory.mktemp("mimo")
    (folder / "config.json").write_text(json.dumps({**TWIN.to_dict(), **MIMO, "auto_map": {"AutoConfig": "a.B"}}))
    state = random_state(TWIN) | {"model.mtp_layers.0.input_proj.weight": torch.ones(3, 6)}
    save_file(state, folder / "model.safetensors")
    (folder / "configuration_mimo.py").write_text("raise AssertionError('code of a checkpoint is not run')")
    return folder


def mimo_logits(folder: str, saved: str) -> Any:
    """Runs in each worker: logits, and the export of a model that is saved as well."""
    dims = mb.ParallelDims(pp=1)
    dims.initialize(device="cpu")
    (model,) = mb.build_model(folder, dims=dims, dtype=torch.float32, device="cpu")
    model.eval()
    with torch.no_grad():
        logits = model(tokens(TWIN), torch.arange(24).expand(2, 24), None)
    mb.save_hf_checkpoint([model], saved)
    return logits, mb.to_hf_state_dict([model])


def test_mimo_is_a_qwen2_that_keeps_its_name(mimo: Path, tmp_path: Path) -> None:
    ((logits, exported),) = pool.run(1, mimo_logits, str(mimo), str(tmp_path / "saved"))
    reference = reference_logits(TWIN)
    assert float((logits - reference).abs().max() / reference.std()) < 2e-5
    state = random_state(TWIN)
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], state[name]) for name in state)
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (written["model_type"], written["num_nextn_predict_layers"]) == ("mimo", 1)
    assert (tmp_path / "saved" / "configuration_mimo.py").exists()
    assert built(read_hf(tmp_path / "saved")) == built(read_hf(mimo))


def test_mimo_is_counted_as_a_qwen2(mimo: Path) -> None:
    hf = provenance_of(mimo).hf
    assert hf.model_type == "mimo"
    assert count_params(hf) == count_params(TWIN)
    assert mb.to_layer_spec(mimo, dims=mb.ParallelDims(pp=2, layout="balanced"))


def test_a_model_type_that_nobody_declares_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MIMO, "model_type": "mimimo"}))
    with pytest.raises(ConfigError, match="mimimo"):
        read_hf(tmp_path)
