"""RLinf's actor and engine worker in workers of the pool, with the diffs of docs/trainers/rlinf.md applied.

RLinf's code runs. Three things are replaced: Ray (a worker's start and its messages), CUDA, and SGLang itself.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import pickle
import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

PAGE = (Path(__file__).parent.parent.parent / "docs" / "trainers" / "rlinf.md").read_text()
ACTOR = "rlinf/workers/actor/megatron_actor_worker.py"
SKIPS = "if len(self._weight_dst_rank_in_rollout) > 0:"
"""The line of actors up to 0.4.0 that leaves the loop out on ranks without a receiver."""
Place = tuple[int, int]
"""A rank of the rollout in RLinf's form: the engine, and the rank within the engine."""


# the diffs of the page ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diff:
    """One diff of the page: blocks of lines of a file, each with its replacement."""

    file: str
    changes: tuple[tuple[str, str], ...]

    def applied(self, text: str) -> str:
        """``text`` with every change made; each must fit at one place."""
        for old, new in self.changes:
            assert text.count(old) == 1, f"{self.file} must have this once, found {text.count(old)} times:\n{old}"
            text = text.replace(old, new)
        return text


def diffs_of(page: str, package: str = "rlinf") -> list[Diff]:
    """All diffs of a page; each is of the file of ``package`` that was last named before it."""
    found = []
    for block in re.finditer(r"^( *)```diff\n(.*?)```", page, re.DOTALL | re.MULTILINE):
        *_, file = re.findall(rf"`({package}/[\w/]+\.py)`", page[: block.start()])
        lines = re.sub(rf"^{block[1]}", "", block[2], flags=re.MULTILINE)
        hunks = re.split(r"^\.\.\.\n", lines, flags=re.MULTILINE)
        found.append(Diff(file, tuple((_marked(" -", hunk), _marked(" +", hunk)) for hunk in hunks)))
    return found


def _marked(marks: str, hunk: str) -> str:
    """The lines with one of ``marks``, without it."""
    return "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in marks)


def source_of(file: str) -> str:
    """A file of RLinf as it is installed."""
    (package,) = importlib.util.find_spec("rlinf").submodule_search_locations
    return (Path(package).parent / file).read_text()


def is_newest() -> bool:
    """Whether RLinf is of the generation after 0.4.0, whose actor gathers once for any number of receivers."""
    return "gather_full_model" in source_of(ACTOR)


def passes_expert_parallelism() -> bool:
    """Whether RLinf's actor passes the engine's expert parallelism to the resharder, as since 0.4.0."""
    return "rollout_ep_size" in source_of(ACTOR)


@functools.cache
def actor_module() -> types.ModuleType:
    """The module of RLinf's actor as a user has it who follows the page."""
    text = source_of(ACTOR)
    for diff in (diff for diff in diffs_of(PAGE) if diff.file == ACTOR):
        if not (is_newest() and SKIPS in diff.changes[0][0]):
            text = diff.applied(text)
    module = types.ModuleType("rlinf_actor_with_the_diff")
    exec(compile(text, ACTOR, "exec"), module.__dict__)
    return module


# the side that sends --------------------------------------------------------------------------------------------------


@dataclass
class Letter:
    """The handle that a worker of RLinf gets for a message in flight. Waiting for it reads the message."""

    content: Any
    sent: bytes = b""

    def wait(self) -> None:
        self.sent, self.content = pickle.dumps(self.content), None


@dataclass(frozen=True)
class Layout:
    """One case: the sizes of trainer and engine, and whether they share GPUs.

    Attributes:
        model_type: RLinf's name of the family. tp, pp, ep, etp: sizes of the trainer.
        rollout_tp, rollout_world: the tp of one engine, and the ranks of all engines.
        sglang: the block ``rollout.sglang``.
        collocated: whether trainer and engines share GPUs, and get handles; otherwise they get tensors.
    """

    model_type: str
    tp: int
    pp: int
    ep: int
    etp: int
    rollout_tp: int
    rollout_world: int
    collocated: bool = True
    sglang: Mapping[str, Any] = field(default_factory=dict)

    def config(self, folder: str) -> Any:
        """RLinf's config, as far as weights depend on it."""
        from omegaconf import OmegaConf

        sizes = {"tensor_model_parallel_size": self.tp, "pipeline_model_parallel_size": self.pp}
        sizes |= {"expert_model_parallel_size": self.ep, "expert_tensor_parallel_size": self.etp}
        algorithm = {"kl_beta": 0.0, "calculate_entropy": False, "entropy_bonus": 0.0}
        rollout = {"group_name": "rollout", "tensor_parallel_size": self.rollout_tp, "pipeline_parallel_size": 1}
        rollout |= {"enforce_eager": False, "sglang": dict(self.sglang)}
        return OmegaConf.create(
            {
                "algorithm": algorithm | {"ratio_clip_eps": 0.2, "clip_ratio_c": 3.0},
                "actor": {"group_name": "actor", "training_backend": "megatron", "model": sizes},
                "rollout": rollout | {"model": {"model_type": self.model_type, "model_path": folder}},
                "runner": {"resume_dir": None},
            }
        )

    def placement(self, folder: str) -> Any:
        """RLinf's placement, with a given list of GPUs instead of Ray's."""
        from rlinf.utils.placement import ModelParallelComponentPlacement, PlacementMode, RolloutSyncMode

        placement: Any = object.__new__(ModelParallelComponentPlacement)
        name = "COLLOCATED" if self.collocated else "DISAGGREGATED"
        placement._config = self.config(folder)
        placement._placement_mode, placement._rollout_sync_mode = PlacementMode[name], RolloutSyncMode[name]
        placement._actor_num_gpus, placement._rollout_num_gpus = dist.get_world_size(), self.rollout_world
        return placement


def actor_of(models: Sequence[Any], layout: Layout, folder: str, bucket_bytes: int, *, ours: bool = True) -> Any:
    """RLinf's actor, started, with our resharder or with RLinf's."""
    module = actor_module() if ours else importlib.import_module("rlinf.workers.actor.megatron_actor_worker")
    config = importlib.import_module("rlinf.utils.resharding.reshard_config").ReshardConfig

    class Actor(module.MegatronActor):
        def send(self, message: Any, dst_group_name: str, dst_rank: Place, async_op: bool = False) -> Letter:
            assert dst_group_name == "rollout"
            assert async_op
            self.letters.append((tuple(dst_rank), Letter(message)))
            return self.letters[-1][1]

        def log_info(self, msg: str) -> None:
            pass

    with mock.patch.object(module.MegatronWorker, "__init__", _start):
        actor = Actor(layout.config(folder), layout.placement(folder))
    actor.model, actor.transformer_config = models, models[0].config
    small = functools.partial(config, bucket_capacity=bucket_bytes)
    with cpu_as_device(), gloo_for_nccl(), mock.patch.object(module, "ReshardConfig", small):
        actor.init_worker_customize()
    return actor


@dataclass(frozen=True)
class AsRlinfBuilds:
    """A chunk with the parameter names that RLinf's own resharder supports: TransformerEngine's."""

    chunk: nn.Module

    @property
    def config(self) -> Any:
        return self.chunk.config

    def state_dict(self) -> dict[str, Tensor]:
        state = self.chunk.state_dict()
        fused = "self_attention.linear_qkv.layer_norm_weight"
        return {name.replace("input_layernorm.weight", fused): tensor for name, tensor in state.items()}


def _start(self: Any, cfg: Any, placement: Any, role: str) -> None:
    """Set the attributes of a worker that Ray starts, as far as ``MegatronActor`` needs them."""
    self._rank, self.letters = dist.get_rank(), []
    self._device_lock = contextlib.nullcontext()
    self.cfg, self.role_cfg, self.component_placement = cfg, cfg[role], placement
    self.placement_mode, self.rollout_sync_mode = placement._placement_mode, placement._rollout_sync_mode
    self.is_running, self.recreate_nccl_groups, self.use_pre_process_policy = True, False, False
    self.is_weight_offloaded = self.is_grad_offloaded = self.is_optimizer_offloaded = False
    self.offload_weight = self.offload_grad = self.offload_optimizer = False


def cpu_as_device() -> Any:
    """Replace the current device of CUDA, on which RLinf makes tensors."""
    return mock.patch.object(torch.cuda, "current_device", return_value="cpu")


def gloo_for_nccl() -> Any:
    """RLinf's own resharder makes groups of NCCL."""
    from megatron.core import parallel_state

    return mock.patch.object(parallel_state, "create_group", lambda ranks, backend: dist.new_group(ranks))


# the side that receives -----------------------------------------------------------------------------------------------


class Recorder(nn.Module):
    """The model of an engine, which records the tensors that it must load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}

    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            assert name not in self.found
            self.found[name] = tensor.clone()


@dataclass
class Mailbox:
    """A worker of RLinf within an engine, as far as weights need it: the letters for it, by who sent them."""

    parent_address: int
    world_size: int
    rank: int
    letters: dict[int, list[bytes]] = field(default_factory=dict)

    @property
    def _rank(self) -> int:
        return self.rank

    def get_parent_rank(self) -> int:
        return self.parent_address

    def log_info(self, msg: str) -> None:
        pass

    def recv(self, src_group_name: str, src_rank: int, async_op: bool = False) -> Any:
        assert src_group_name == "actor"
        content = {name: _padded(each) for name, each in pickle.loads(self.letters[src_rank].pop(0)).items()}
        return types.SimpleNamespace(wait=lambda: content) if async_op else content


def _padded(each: Any) -> Any:
    """Pad a handle of ``reduce_tensor``: for a CPU tensor it has three arguments, for CUDA the device is number 6."""
    if not isinstance(each, tuple):
        return each
    rebuild, args = each
    return lambda *given: rebuild(*given[: len(args)]), (*args, *[None] * (7 - len(args)))


@functools.cache
def scheduler_module() -> types.ModuleType:
    """The module of RLinf's scheduler, with placeholders for the names of SGLang."""

    class Nothing(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return logging.getLogger(name) if name == "logger" else type(name, (), {})

    names = ("", ".srt", ".srt.managers", *(f".srt.managers.{each}" for each in ("io_struct", "scheduler")))
    names = (*names, ".srt.managers.schedule_batch")
    with mock.patch.dict(sys.modules, {f"sglang{name}": Nothing(f"sglang{name}") for name in names}):
        return importlib.import_module("rlinf.hybrid_engines.sglang.common.sgl_scheduler")


def received(place: Place, letters: dict[int, list[bytes]], layout: Layout, folder: str) -> dict[str, Tensor]:
    """The tensors that the model of the engine's rank at ``place`` must load, by RLinf's scheduler of that rank."""
    module = scheduler_module()
    scheduler = object.__new__(module.Scheduler)
    model = Recorder()
    runner = types.SimpleNamespace(model=model)
    scheduler.tp_worker = types.SimpleNamespace(worker=types.SimpleNamespace(model_runner=runner))
    scheduler.tp_size, scheduler.tp_rank = layout.rollout_tp, place[1]
    scheduler.is_weight_offloaded, scheduler.weight_norm_dict = False, None
    scheduler.flush_cache = lambda: None
    with mock.patch.object(module, "Worker", Mailbox), cpu_as_device():
        scheduler.init_rlinf_worker(place[0], "sync", layout.placement(folder), layout.config(folder))
        scheduler._rlinf_worker.letters = letters
        scheduler.sync_hf_weight(None)
    left = [source for source, unread in letters.items() if unread]
    assert not left, f"letters to {place} from actors {left} were not read"
    return model.found


def synced(actor: Any, layout: Layout, folder: str) -> dict[Place, dict[str, Tensor]]:
    """One sync: the tensors that each engine rank in this process gets."""
    actor.letters.clear()
    with cpu_as_device():
        actor.sync_model_to_rollout()
    posted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(posted, [(place, letter.sent) for place, letter in actor.letters])
    found = {}
    for number in range(dist.get_rank(), layout.rollout_world, dist.get_world_size()):
        place = divmod(number, layout.rollout_tp)
        letters = {source: [sent for to, sent in sacks if to == place] for source, sacks in enumerate(posted)}
        found[place] = received(place, letters, layout, folder)
    return found
