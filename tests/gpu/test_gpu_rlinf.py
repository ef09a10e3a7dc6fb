"""RLinf's scheduler of an engine on the trainer's GPU gets CUDA handles, and replaces their device."""

import multiprocessing
from contextlib import contextmanager

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor

import mcore_bridge as mb
from mcore_bridge.trainers.rlinf import MegatronCoreWeightReshard
from mcore_bridge.weights.manifest import digest
from tests.support.rlinf_models import SPARSE, changed, config_a
from tests.support.strategies import random_state

pytestmark = pytest.mark.multigpu

DEVICE = 6
"""The argument of torch's ``rebuild_cuda_tensor`` that RLinf replaces with the engine's own device."""


def engine(pipe):
    """Rebuilds tensors from handles like RLinf's ``sync_hf_weight``, and answers with digests of copies."""
    torch.cuda.set_device(0)
    while handles := pipe.recv():
        found = {}
        for name, (rebuild, arguments) in handles.items():
            arguments = list(arguments)
            arguments[DEVICE] = torch.cuda.current_device()
            found[name] = digest(rebuild(*arguments).clone())
        pipe.send(found)


@contextmanager
def another_process():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=engine, args=(theirs,), daemon=True)
    process.start()
    yield ours
    ours.send({})
    process.join()


def sync(rank):
    """Two rounds; all buckets stay allocated until the engine has answered."""
    torch.cuda.set_device(0)
    mb.ParallelDims().initialize(device="cuda")
    models = mb.build_model(SPARSE, load_weights=random_state(SPARSE, dtype=torch.bfloat16))
    reshard = MegatronCoreWeightReshard(config_a())
    with another_process() as pipe:
        for _ in range(2):
            expected, found = {spec.name: spec.sha256 for spec in mb.manifest(models, digests=True)}, {}
            for bucket in reshard.divide_model_to_bucket(models):
                state = reshard.gather_and_reshard_model(bucket, 0)
                if state:
                    pipe.send({name: reduce_tensor(tensor) for name, tensor in state.items()})
                    found |= pipe.recv()
            assert found == expected
            changed(models)
    torch.distributed.destroy_process_group()


def test_an_engine_on_the_same_gpu_rebuilds_every_bit():
    if not torch.cuda.device_count():
        pytest.skip("needs a GPU")
    torch.multiprocessing.spawn(sync, nprocs=1)
