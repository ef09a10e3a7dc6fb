"""Megatron-LM itself loads the checkpoints. Its code must be installed, as in docs/guide/checkpoints.md."""

import importlib.util
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.commands.app import app
from mcore_bridge.trainers.rlinf import convert_hf_to_mg
from mcore_bridge.weights.dist_checkpoint.folder import TRACKER
from tests.support import pool
from tests.support.rlinf_models import LATENT, SPARSE, SPLIT, TIED
from tests.support.strategies import random_state, save

State = dict[str, torch.Tensor]
COMMON = {"iteration": 200, "learning_rate": 0.5}


def built(hf: Any, dims: ParallelDims, state: State) -> Any:
    dims.initialize(device="cpu")
    return mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)


def write(hf: Any, dims: ParallelDims, state: State, folder: Path) -> None:
    mb.save_checkpoint(built(hf, dims, state), folder, common=COMMON)


# what it asks for -----------------------------------------------------------------------------------------------------


def written(root: Path) -> None:
    """Runs in a worker: writes three folders, and the files that Megatron-LM expects in and beside them."""
    from megatron.core import dist_checkpointing

    models = built(TIED, ParallelDims(), random_state(TIED))
    for name, tracked in (("step_100", None), ("iter_0000200", "200"), ("release", "release")):
        mb.save_checkpoint(models, root / name, common=COMMON)
        common = dist_checkpointing.load_common_state_dict(str(root / name))
        assert common["checkpoint_version"] == 3.0
        assert common["iteration"] == 200
        assert (root / TRACKER).exists() == (tracked is not None)
        if tracked is not None:
            assert (root / TRACKER).read_text() == tracked
            report = mb.load_checkpoint(models, root)
            assert (report.folder, report.common) == (root / name, COMMON)
    assert {path.name for path in root.iterdir()} == {"step_100", "iter_0000200", "release", TRACKER}


def test_what_megatron_lm_asks_for_stands_where_it_looks(tmp_path: Path) -> None:
    pool.run(1, written, tmp_path)


# its own load ---------------------------------------------------------------------------------------------------------


def is_installed() -> bool:
    try:
        return importlib.util.find_spec("megatron.training") is not None
    except ModuleNotFoundError:
        return False


needs_megatron_lm = pytest.mark.skipif(not is_installed(), reason="Megatron-LM's megatron.training is not installed")


def loaded(hf: Any, dims: ParallelDims, state: State, root: Path, options: list[str]) -> tuple[int, list[str]]:
    """Runs in a worker: the iteration that Megatron-LM finds, and the HF tensors that differ from ``state``."""
    from megatron.training import checkpointing, global_vars
    from megatron.training.arguments import add_megatron_arguments

    from tests.workers.verl_engine import CpuForCuda

    models = built(hf, dims, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    args = add_megatron_arguments(ArgumentParser()).parse_args(["--load", str(root), *options])
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = dims.tp, dims.pp
    global_vars._GLOBAL_ARGS, checkpointing._CHECKPOINT_VERSION = args, None
    with CpuForCuda():
        iteration, _ = checkpointing.load_checkpoint(models, None, None)
    assert checkpointing.get_checkpoint_version() == 3.0
    found = mb.to_hf_state_dict(models)
    return iteration, [name for name, tensor in state.items() if not torch.equal(found[name], tensor)]


FAMILIES = {"qwen2": TIED, "qwen3_moe": SPARSE, "deepseek_v3": LATENT}
MESHES = [
    ("qwen2", ParallelDims(tp=4, sp=True)),
    ("qwen2", ParallelDims(tp=2, pp=2, sp=True, **SPLIT)),
    ("qwen3_moe", ParallelDims(tp=2, pp=2, ep=2, sp=True)),
    ("qwen3_moe", ParallelDims(tp=2, pp=2, vp=2, sp=True)),
    ("qwen3_moe", ParallelDims(tp=4, ep=2, etp=2, sp=True)),
    ("deepseek_v3", ParallelDims(pp=2, ep=2, **SPLIT)),
]
each_mesh = pytest.mark.parametrize(("name", "dims"), MESHES, ids=str)


@needs_megatron_lm
@each_mesh
def test_it_loads_what_we_save(name: str, dims: ParallelDims, tmp_path: Path) -> None:
    hf, state = FAMILIES[name], random_state(FAMILIES[name])
    pool.run(2, write, hf, ParallelDims(tp=2, sp=True), state, tmp_path / "iter_0000200")
    model_only = ["--no-load-optim", "--no-load-rng"]
    assert pool.run(4, loaded, hf, dims, state, tmp_path, model_only) == [(200, [])] * 4


@needs_megatron_lm
@each_mesh
def test_it_loads_what_we_convert(name: str, dims: ParallelDims, tmp_path: Path) -> None:
    hf, state = FAMILIES[name], random_state(FAMILIES[name])
    source, root = tmp_path / "hf", tmp_path / "megatron"
    source.mkdir()
    save(state, hf, source)
    assert CliRunner().invoke(app, ["convert", str(source), str(root / "release")]).exit_code == 0
    assert pool.run(4, loaded, hf, dims, state, root, []) == [(0, [])] * 4


@needs_megatron_lm
@each_mesh
def test_it_loads_the_files_of_its_torch_format(name: str, dims: ParallelDims, tmp_path: Path) -> None:
    if dims.vp > 1:
        pytest.skip("RLinf's convertor has no virtual stages")
    hf, state = FAMILIES[name], random_state(FAMILIES[name])
    source, root = tmp_path / "hf", tmp_path / "megatron"
    source.mkdir()
    save(state, hf, source)
    block: dict[str, Any] = {
        "save_path": str(root),
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
        "expert_model_parallel_size": dims.ep,
        "expert_tensor_parallel_size": dims.etp,
        "pp_stages": [len(stage.layers) for stage in dims.stages(hf.num_hidden_layers)],
    }
    plain = {"te_ln_linear_qkv": False, "te_ln_linear_mlp_fc1": False, "te_ln_add_extra_state": None}
    convert_hf_to_mg(str(source), block | plain)
    assert pool.run(4, loaded, hf, dims, state, root, ["--ckpt-format", "torch"]) == [(0, [])] * 4
