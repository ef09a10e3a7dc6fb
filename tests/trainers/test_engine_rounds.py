"""SGLang under RLinf goes by a map from its second round on, as the diff of the page has it.

The diff is applied to the package that is installed, and its own code then runs on CPU.
"""

import importlib.util
import logging
import pickle
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from mcore_bridge.weights.engine.prove import drawn_values
from tests.support.stand_in import Sizes, StandIn, differing, loaded, specs
from tests.workers.rlinf_worker import Layout, Mailbox, diffs_of, scheduler_module, source_of

PAGES = Path(__file__).parent.parent.parent / "docs" / "trainers"
SCHEDULER = "rlinf/hybrid_engines/sglang/common/sgl_scheduler.py"


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
