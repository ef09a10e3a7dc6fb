"""RLinf's runner and model manager, with Megatron-LM's trainer, use the library: the source of a run's weights.

The code of RLinf and Megatron-LM runs: the runner's call of the convertor, validated configs, the manager with the
diffs of docs/trainers/rlinf.md, DDP, the optimizer, and the loading of checkpoints. Three things are replaced: CUDA
(kernels that the manager compiles, "cuda" as a device), Ray (the runner's workers), and a tokenizer. Some arguments of
Megatron-LM 0.16.1 are unknown to RLinf 0.3.0, and have Megatron-LM's defaults.
"""

import functools
import os
import shutil
import sys
import types
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support import pool
from tests.support.rlinf_blocks import block, filled_in
from tests.support.rlinf_files import PLAIN, source
from tests.support.rlinf_runs import TIMEOUT, _missing
from tests.support.strategies import tiny
from tests.support.target_models import assert_gets
from tests.workers.rlinf_worker import PAGE, diffs_of, source_of
from tests.workers.verl_engine import CpuForCuda

pytestmark = pytest.mark.skipif(bool(_missing()), reason=f"not installed: {_missing()}")

MANAGER = "rlinf/hybrid_engines/megatron/megatron_model_manager.py"
RUNNER = "rlinf/runners/reasoning_runner.py"
NOT_NEEDED = ("pandas", "torchdata", "torchdata.stateful_dataloader", "rlinf.utils.metric_logger")
"""The modules that the runner imports for data and logs."""
HF = tiny("qwen2", vocab_size=96)
DIMS = ParallelDims(tp=2, pp=2, etp=2, sp=True)
WORLD = 4


@functools.cache
def module_of(file: str) -> types.ModuleType:
    """A module of RLinf with the diff of docs/trainers/rlinf.md, for models without Megatron-Bridge."""
    text = source_of(file)
    for diff in (diff for diff in diffs_of(PAGE) if diff.file == file):
        if "megatron.bridge" not in diff.changes[0][0]:
            text = diff.applied(text)
    name = file.removesuffix(".py").replace("/", ".")
    module = types.ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in NOT_NEEDED}):
        exec(compile(text, file, "exec"), module.__dict__)
    return module


def config_of(folder: str | None, save_path: Path, *, checkpoint: Path | None = None) -> Any:
    """A complete actor block, with the values that RLinf fills in; ``checkpoint`` is ``megatron_checkpoint``."""
    from omegaconf import OmegaConf
    from rlinf.config import validate_megatron_cfg

    on_cpu = {"apply_rope_fusion": False, "recompute_granularity": None, "recompute_method": None}
    actor = block("math_grpo", **on_cpu, recompute_num_layers=None, precision="bf16")
    actor["model"] |= {"megatron_checkpoint": checkpoint and str(checkpoint), "pipeline_model_parallel_size": DIMS.pp}
    actor["model"] = filled_in(HF) | actor["model"]
    actor["optim"] |= {"bf16": True, "fp16": False}
    actor |= {"global_batch_size": 4, "micro_batch_size": 1}
    convertor = {"hf_model_path": folder, "save_path": str(save_path), "pipeline_model_parallel_size": DIMS.pp, **PLAIN}
    actor["megatron"]["ckpt_convertor"] |= convertor
    actor["megatron"]["use_hf_ckpt"] = checkpoint is None
    return validate_megatron_cfg(OmegaConf.create(actor))


def prepare(actor: Any) -> None:
    """The work of RLinf's runner in one process before workers start: a conversion, if the block requests one."""
    from omegaconf import OmegaConf

    runner = object.__new__(module_of(RUNNER).ReasoningRunner)
    runner.cfg = OmegaConf.create({"runner": {"resume_dir": None}, "actor": actor, "critic": None})
    runner.actor, runner.rollout, runner.use_pre_process_policy = object(), mock.MagicMock(), False
    runner.init_rollout_workers()


def set_args_with_defaults(args: Any) -> None:
    """Megatron-LM's ``set_args``, with default values for arguments that this RLinf does not have."""
    from megatron.training.arguments import add_megatron_arguments
    from megatron.training.global_vars import set_args

    for name, value in vars(add_megatron_arguments(ArgumentParser()).parse_args([])).items():
        if name not in args and isinstance(value, str | int | float | bool | None):
            args[name] = "${torch.dtype:float32}" if value == "fp32" else value
    set_args(args)


def found_in(actor: Any, direct: bool) -> tuple[Mapping[str, torch.Tensor], bool]:
    """Runs in a worker: the weights that RLinf's manager has loaded, and whether the optimizer has equal ones.

    Args:
        direct: whether HF weights are loaded without a conversion, as described in docs/trainers/rlinf.md.
    """
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import checkpointing, global_vars
    from rlinf.utils import initialize

    global_vars.unset_global_variables()  # from the run before, which was another process
    unset_num_microbatches_calculator()
    destroy_rerun_state_machine()
    checkpointing._CHECKPOINT_VERSION = None
    DIMS.initialize(device="cpu")
    module = module_of(MANAGER)
    ours = functools.partial(module.model_provider, load_weights=True) if direct else module.model_provider
    with (
        mock.patch.object(module, "hf_tokenizer"),
        mock.patch.object(module, "model_provider", ours),
        mock.patch.object(initialize, "_compile_dependencies"),
        mock.patch.object(initialize, "set_args", set_args_with_defaults),
        mock.patch.object(initialize.Worker, "torch_platform", types.SimpleNamespace(device_count=lambda: 0)),
        CpuForCuda(),
    ):
        manager = module.MegatronModelManager(actor)
        if direct:
            manager._cfg.megatron.load = None
        manager.setup_model_and_optimizer()
    groups = manager.optimizer.param_groups
    main = sum(param.double().sum() for group in groups for param in group["params"])
    own = sum(tensor.double().sum() for tensor in held_tensors(manager.model).values())
    return mb.to_hf_state_dict(manager.model), torch.allclose(torch.as_tensor(main), torch.as_tensor(own))


def assert_loads(actor: Any, state: Mapping[str, torch.Tensor], *, direct: bool = False) -> None:
    """Assert that every rank of the mesh loads ``state``."""
    for found, optimizer_has_it in pool.run(WORLD, found_in, actor, direct, timeout=TIMEOUT):
        assert_gets(found, state)
        assert optimizer_has_it


def test_the_first_run_converts_the_next_opens_no_weights_and_a_stale_conversion_raises(tmp_path: Path) -> None:
    folder, state = source(HF, tmp_path / "hf", torch.bfloat16)
    actor = config_of(folder, tmp_path / "mg")
    prepare(actor)
    assert_loads(actor, state)
    for path in (tmp_path / "hf").glob("*.safetensors"):  # unreadable now, with unchanged size and time
        seen = path.stat()
        path.write_bytes(bytes(seen.st_size))
        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    prepare(actor)
    assert_loads(actor, state)
    path.touch()
    with pytest.raises(CheckpointError, match="made from something else: files was"):
        prepare(actor)


def test_a_checkpoint_that_is_named_needs_no_hf_folder(tmp_path: Path) -> None:
    folder, state = source(HF, tmp_path / "hf", torch.bfloat16)
    prepare(config_of(folder, tmp_path / "mg"))
    shutil.rmtree(folder)
    actor = config_of(None, tmp_path / "unused", checkpoint=tmp_path / "mg")
    prepare(actor)
    assert_loads(actor, state)
    assert not (tmp_path / "unused").exists()


def test_without_a_conversion_hf_weights_are_loaded_directly(tmp_path: Path) -> None:
    folder, state = source(HF, tmp_path / "hf", torch.bfloat16)
    assert_loads(config_of(folder, tmp_path / "mg"), state, direct=True)


def test_a_run_without_the_conversion_that_it_asks_for_raises(tmp_path: Path) -> None:
    """Otherwise Megatron-LM would end the process without an error."""
    folder, _ = source(HF, tmp_path / "hf", torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"found no latest_checkpointed_iteration\.txt"):
        pool.run(WORLD, found_in, config_of(folder, tmp_path / "mg"), False, timeout=TIMEOUT)
