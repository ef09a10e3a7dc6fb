"""Short convolutions: loss and gradients on every mesh against transformers', keys in checkpoints, initial values."""

import pytest
import torch
from megatron.core import tensor_parallel

from mcore_bridge import ParallelDims, build_model, to_transformer_config
from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.mesh.divisibility import check_model
from mcore_bridge.errors import ConfigError, MeshError
from mcore_bridge.factory.hybrid_support import require_hybrid
from tests import zoo
from tests.support import pool, stepping
from tests.support.training import Kind

CASES = {name: case.hf for name, case in zoo.cases().items() if case.model_type in ("lfm2", "lfm2_moe", "lfm3")}
SPARSE = {name for name, hf in CASES.items() if to_transformer_config(hf).num_moe_experts}
MESHES = {
    1: [{}],
    2: [{"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2, "layout": "balanced"}, {"tp": 2}, {"ep": 2}],
    4: [
        {"tp": 4, "sp": True},
        {"tp": 2, "cp": 2, "sp": True},
        {"tp": 2, "sp": True, "pp": 2, "vp": 2},
        {"tp": 2, "etp": 2, "ep": 2, "sp": True},
    ],
}


def fits(name, dims):
    return name in SPARSE if dims.ep > 1 or dims.etp > 1 else dims.sp or dims.tp == 1 or name not in SPARSE


KIND = Kind(CASES, MESHES, every=2, fits=fits)


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(world_size, tmp_path):
    KIND.check(world_size, tmp_path)


def built():
    """Runs in each worker: the entries of a mixer in mcore's distributed checkpoint, and its initial values."""
    with stepping.mesh(ParallelDims(tp=2)):
        tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        hf, how = CASES["lfm2"], {"dtype": torch.float32, "device": "cpu", "load_weights": False}
        mixer = build_model(hf, dims=ParallelDims(tp=2), **how)[0].decoder.layers[0].self_attention
        saved = mixer.sharded_state_dict(prefix="x.")
        parts = [part for entry in saved.values() for part in (entry.build() if hasattr(entry, "build") else [entry])]
        shapes = {part.key: tuple(part.global_shape) for part in parts if hasattr(part, "global_shape")}
        return shapes, mixer.conv1d.weight.detach()


def test_saved_part_by_part_and_drawn_on_each_rank():
    (shapes, first), (_, second) = pool.run(2, built)
    assert {name: shapes[f"x.in_proj.weight.{name}"][-2:] for name in "BCx"} == dict.fromkeys("BCx", (48, 48))
    assert shapes["x.conv1d.weight"] == (48, 1, 4)
    assert shapes["x.out_proj.weight"] == (48, 48)
    assert first.abs().max() <= 0.5  # torch's initial range of a convolution over 4 tokens
    assert not torch.equal(first, second)


def test_refused():
    with pytest.raises(MeshError, match="tp=3 must divide hidden_size=8"):
        check_model(ParallelDims(tp=3, sp=True), {"num_layers": 1, "layer_kinds": ("C-",), "hidden_size": 8})
    with pytest.raises(ConfigError, match=r"at most 4, the number of kinds .* Change layer_types"):
        to_transformer_config(CASES["lfm2"], overrides={"num_layers": 5})
    config = to_transformer_config(CASES["lfm2"])
    with pytest.raises(ConfigError, match="short convolutions, and HybridModel has no layer for them"):
        require_hybrid(architecture_of("lfm2"), config, positions="rope", vision="text_only")
    config = to_transformer_config(CASES["lfm2"], overrides={"num_layers": 2, "ffn_hidden_size": 40})
    assert config.layer_kinds[:2] == ("C-", "*-")
    assert config.ffn_hidden_size == 40
