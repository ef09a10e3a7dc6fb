"""Checkpoints and TransformerEngine: megatron-core's modules load our files, and we load the files of these modules."""

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.convert.convert import convert
from mcore_bridge.weights.files.hf_folder import Checkpoint
from tests.support.conversions import assert_exact, quiet
from tests.support.strategies import random_state, save, tiny

pytestmark = pytest.mark.multigpu

WIDE = {"vocab_size": 97, "hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 128}
CONFIGS = {
    "dense": tiny("llama", **WIDE, intermediate_size=128),
    "norms of queries": tiny("qwen3", **WIDE, intermediate_size=128),
    "experts": tiny("qwen3_moe", **WIDE, **EXPERTS),
}


def build(source, backend, **arguments):
    (model,) = mb.build_model(source, dims=ParallelDims(), backend=backend, device="cuda", **arguments)
    return model


def assert_holds(model, source):
    expected, found = Checkpoint(source), mb.to_hf_state_dict(model, device="cpu")
    assert set(found) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def check(rank, source, folder):
    """Runs in a separate process, which megatron-core may fork to write."""
    from megatron.core import dist_checkpointing

    ParallelDims().initialize(device="cuda")
    mb.save_checkpoint(build(source, "torch"), folder / "saved")
    for name in ("converted", "saved"):
        for strict in ("assume_ok_unexpected", "raise_unexpected"):
            path, model = str(folder / name), build(source, "te", load_weights=False)
            metadata = dist_checkpointing.load_content_metadata(path)
            asked = {"model": model.sharded_state_dict(metadata=metadata)}
            assert "decoder.final_layernorm._extra_state" in asked["model"]
            model.load_state_dict(dist_checkpointing.load(asked, path, strict=strict)["model"])
            assert_holds(model, source)
        mb.load_checkpoint(model, path)
    (folder / "theirs").mkdir()
    dist_checkpointing.save({"model": model.sharded_state_dict(metadata={})}, str(folder / "theirs"))
    for backend in ("te", "torch"):
        other = build(source, backend, load_weights=False)
        mb.load_checkpoint(other, folder / "theirs")
        assert_holds(other, source)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", CONFIGS)
def test_transformer_engine_loads_ours_and_we_load_what_it_saves(name, tmp_path):
    pytest.importorskip("transformer_engine.pytorch")
    source = tmp_path / "hf"
    source.mkdir()
    save(random_state(CONFIGS[name], dtype=torch.bfloat16), CONFIGS[name], source)
    convert(source, tmp_path / "converted", on_event=quiet)
    torch.multiprocessing.spawn(check, (source, tmp_path), nprocs=1)
    convert(tmp_path / "theirs", tmp_path / "back", hf=source, on_event=quiet)
    assert_exact(tmp_path / "back", Checkpoint(source))
