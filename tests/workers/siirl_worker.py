"""siiRL's Megatron workers in workers of the pool, changed to run on a CPU and with the installed megatron-core."""

import contextlib
import functools
import importlib
import json
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_bridge import ParallelDims
from mcore_bridge.cpu import enable_cpu
from tests.support.trainer_calls import attention_switches
from tests.workers.verl_engine import CpuForCuda, own_processes
from tests.workers.verl_life import PROMPT, SEQUENCES, TEMPERATURE, padded

PAGE = (Path(__file__).parent.parent.parent / "docs" / "trainers" / "siirl.md").read_text()
LINES = re.search(r"^```sh\n(actor_rollout_ref.+?)```", PAGE, re.MULTILINE | re.DOTALL)[1].split()  # type: ignore[index]
"""The lines that users add to their command by docs/trainers/siirl.md."""
ABSENT = (
    *("flash_attn", "flash_attn.bert_padding"),
    *("vllm", "vllm.model_executor", "vllm.model_executor.models", "vllm.model_executor.models.mixtral"),
    *(f"vllm.lora{name}" for name in ("", ".models", ".request", ".utils", ".worker_manager")),
)
"""Made for CUDA. siiRL imports them with its Megatron workers, which do not call them with packed sequences."""


class _Nothing(types.ModuleType):
    """A module in which every name is a class without content."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def siirl_module(name: str) -> Any:
    """Import a module of siiRL without CUDA. It logs into a folder from then on, so another working folder is set."""
    os.environ.setdefault("SIIRL_LOG_DIRECTORY", str(Path(tempfile.gettempdir()) / "siirl_logs"))
    absent = [each for each in ABSENT if each not in sys.modules]
    sys.modules.update({each: _Nothing(each) for each in absent})
    try:
        return importlib.import_module(f"siirl.{name}")
    finally:
        for each in absent:
            del sys.modules[each]


# what stands in -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Replace functions of devices that siiRL and megatron-core call and a CPU lacks; reset siiRL's record of its
    mesh.
    """
    enable_cpu()
    answers: dict[str, Any] = dict.fromkeys(("memory_allocated", "memory_reserved", "empty_cache"), 0)
    answers |= {"max_memory_allocated": 0, "max_memory_reserved": 0, "mem_get_info": (0, 0), "get_device_name": "CPU"}
    stand_ins = {name: mock.Mock(return_value=answer) for name, answer in answers.items()}
    stand_ins |= {name: getattr(torch, name) for name in ("get_rng_state", "set_rng_state", "manual_seed")}
    workers = siirl_module("engine.megatron_workers")
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cpu, name, stand_in, create=True))
        stack.enter_context(mock.patch.object(workers, "IS_ACTOR_ROLLOUT_REF_INITIALIZED", False))
        stack.enter_context(mock.patch.dict(os.environ, MASTER_ADDR="localhost", MASTER_PORT="0"))
        for context in (own_processes(), attention_switches(), CpuForCuda()):
            stack.enter_context(context)
        yield


def split_rank() -> Any:
    """An argument of siiRL's that megatron-core no longer has."""
    mpu = siirl_module("engine.megatron_workers").mpu
    called = _without(mpu.initialize_model_parallel, pipeline_model_parallel_split_rank=None)
    return mock.patch.object(mpu, "initialize_model_parallel", called)


def optimizer_arguments() -> Any:
    """Three of them."""
    module = siirl_module("utils.megatron.optimizer")
    called = _without(module.get_megatron_optimizer_native, no_weight_decay_cond=None, scale_lr_cond=None, lr_mult=1.0)
    return mock.patch.object(module, "get_megatron_optimizer_native", called)


def optimizer_format() -> Any:
    """The format of the optimizer's checkpoint: megatron-core's default for siiRL's call does not work any more."""
    from megatron.core.optimizer import ChainedOptimizer

    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    called = functools.partialmethod(ChainedOptimizer.sharded_state_dict, metadata=metadata)
    return mock.patch.object(ChainedOptimizer, "sharded_state_dict", called)


def config_as_json() -> Any:
    """Convert an enum in megatron-core's config, which is missing in siiRL's list of values to convert."""
    module = siirl_module("utils.checkpoint.megatron_checkpoint_manager")
    return mock.patch.object(module, "json", types.SimpleNamespace(dump=functools.partial(json.dump, default=str)))


NEEDED: dict[str, Callable[[], Any]] = {
    each.__name__: each for each in (split_rank, optimizer_arguments, optimizer_format, config_as_json)
}
"""All that siiRL's workers need of a user, or of us here, to run with a bridge on megatron-core 0.16.1 to 0.19.2."""


@contextlib.contextmanager
def in_siirl(*, but: str = "") -> Iterator[None]:
    """All of it, or all but one."""
    with on_cpu(), contextlib.ExitStack() as stack:
        for name, stand_in in NEEDED.items():
            if name != but:
                stack.enter_context(stand_in())
        yield


def _without(function: Callable[..., Any], **arguments: object) -> Callable[..., Any]:
    """The function for a caller that passes these arguments, which have no effect."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        assert {name: kwargs.pop(name) for name in arguments} == arguments
        return function(*args, **kwargs)

    return call


# what is asked of it --------------------------------------------------------------------------------------------------


def arguments_of(folder: str, dims: ParallelDims) -> Any:
    """siiRL's arguments, parsed from a command line of the settings of its guide and of what the page adds."""
    megatron = {
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
        "expert_model_parallel_size": dims.ep,
        "sequence_parallel": dims.sp,
        "use_distributed_optimizer": True,
        "param_dtype": "bfloat16",
        "param_offload": True,
        "grad_offload": True,
        "optimizer_offload": True,
    }
    optim = {"lr": 1e-2, "total_training_steps": 10}
    lines = [*LINES, "critic.ppo_micro_batch_size_per_gpu=2", f"actor_rollout_ref.rollout.temperature={TEMPERATURE}"]
    lines += [f"{role}.model.path={folder}" for role in ("actor_rollout_ref", "critic")]
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        lines += [f"{role}.strategy=megatron", *(f"{role}.megatron.{name}={value}" for name, value in megatron.items())]
        lines += [f"{role}.optim.{name}={value}" for name, value in optim.items()]
    with mock.patch.object(sys, "argv", ["main_dag", *lines]):
        return siirl_module("params.parser").parse_config()


def batch_of(vocab_size: int, **fields: Tensor) -> Any:
    """The batch of ``padded`` as siiRL's dataflow hands it to a worker; other fields are of its responses."""
    from tensordict import NonTensorData, TensorDict

    ids, mask = padded(vocab_size)
    own = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    own |= {"responses": ids[:, PROMPT:], "response_mask": mask[:, PROMPT:], "global_token_num": mask.sum(-1)}
    data = TensorDict({**own, **fields}, batch_size=[SEQUENCES])
    data["temperature"] = NonTensorData(TEMPERATURE)
    return data


@dataclass
class Engine:
    """vLLM's engine, as far as siiRL's sharding manager calls it. It records the tensors that its model must load."""

    found: list[tuple[str, Tensor]] = field(default_factory=list)

    @property
    def llm_engine(self) -> Any:
        worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=self))
        driver = types.SimpleNamespace(worker=worker)
        return types.SimpleNamespace(model_executor=types.SimpleNamespace(driver_worker=driver))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        self.found = list(weights)
        return [name for name, _ in self.found]

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass

    def sleep(self, level: int) -> None:
        pass


def synced(actor: Any, arguments: Any) -> list[tuple[str, Tensor]]:
    """The tensors that a rollout gets from siiRL's sharding manager, set up as by siiRL between its workers."""
    utils = siirl_module("dag_worker.dag_utils")
    siirl_module("engine.sharding_manager.megatron_vllm")
    engine, managers = Engine(), []
    rollout = types.SimpleNamespace(
        config=arguments.actor_rollout_ref,
        rollout=types.SimpleNamespace(inference_engine=engine),
        device_mesh=dist.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "infer_tp")),
        set_rollout_sharding_manager=managers.append,
    )
    roles = utils.NodeRole
    both = {roles.ACTOR: actor, roles.ROLLOUT: rollout}
    utils.setup_sharding_manager(arguments, {0: {roles.ROLLOUT: dist.group.WORLD}}, 0, both)
    with managers[0]:
        return engine.found
