"""RLinf's resharder: the tensors that each rank yields, against slices of the HF checkpoint, for each form of its
calls.
"""

import inspect
import re

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge import EngineRank, ParallelDims
from mcore_bridge.errors import ConfigError, ExportError, TargetError
from mcore_bridge.trainers.rlinf import MegatronCoreWeightReshard
from mcore_bridge.trainers.rlinf.engine import Destination, Engine
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support import pool
from tests.support.rlinf_models import LATENT, SPARSE, SPLIT, TIED, changed, config_a, negative
from tests.support.strategies import random_state
from tests.support.target_models import assert_gets, expected


def config_c(**fields):
    """A config of a newer generation, which has the sizes of data parallel attention."""
    sizes = {"rollout_moe_dense_tp_size": None, "rollout_full_tp_size": 1, "rollout_lm_head_tp_size": 1}
    return config_a(**{"enable_dp_attention": False, **sizes, **fields})


def built(hf, dims, state):
    dims.initialize(device="cpu")
    return mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)


def synced(reshard, models, gather):
    """One sync, with all buckets joined. All ranks must have equally many buckets, and no bucket most of the model."""
    buckets = reshard.divide_model_to_bucket(models)
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(buckets))
    assert len(set(counts)) == 1
    assert len(buckets) > 3
    found, sizes = {}, []
    for bucket in buckets:
        part = gather(bucket)
        assert not found.keys() & part.keys()
        found.update(part)
        sizes.append(sum(tensor.nbytes for tensor in part.values()))
    assert max(sizes) <= sum(sizes) / 2
    own = {tensor.untyped_storage().data_ptr() for tensor in held_tensors(models).values()}
    assert not own & {tensor.untyped_storage().data_ptr() for tensor in found.values() if tensor.numel()}
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values()), "views would change"
    return found


def where_rlinf_sends(dims, tp):
    """The rank map of RLinf: neighbours in the trainer's tensor parallelism feed one rank of the engine."""
    return dist.get_rank() % dims.tp // (dims.tp // tp)


def old_callers(hf, dims, rollouts):
    """Actors of this generation pass ``rank % rollout_tp``, even if they send to another rank."""
    state = random_state(hf)
    models = built(hf, dims, state)
    for tp, ep in rollouts:
        reshard = MegatronCoreWeightReshard(config_a(reshard_tp_size=tp, rollout_ep_size=ep))
        place = where_rlinf_sends(dims, tp)
        target = EngineRank(tp=tp, tp_rank=place, ep=ep, ep_rank=place if ep > 1 else 0)
        for wanted in (state, negative(state)):
            found = synced(
                reshard, models, lambda b, r=reshard, t=tp: r.gather_and_reshard_model(b, dist.get_rank() % t)
            )
            assert_gets(found, expected(hf, wanted, target))
            changed(models)
        changed(models)
        changed(models)


def new_callers(hf, dims, rollouts):
    """Actors of this generation pass the ranks of the engine to which they send: several, one or none."""
    state = random_state(hf)
    models = built(hf, dims, state)
    rank = dist.get_rank()
    for tp, ep in rollouts:
        reshard = MegatronCoreWeightReshard(config_c(reshard_tp_size=tp, rollout_ep_size=ep))
        reshard.set_tp_gather_is_identity(tp == dims.tp)
        places = [(rank + shift) % tp for shift in (0, 1)]
        targets = [EngineRank(tp=tp, tp_rank=p, ep=ep, ep_rank=p % ep) for p in places]
        found = synced(reshard, models, lambda b, r=reshard, p=places[0], e=ep: r.gather_and_reshard_model(b, p, p % e))
        assert_gets(found, expected(hf, state, targets[0]))
        found = synced(
            reshard, models, lambda b, r=reshard: r.gather_and_reshard_model(b, *((0, 0) if rank == 1 else ()))
        )
        assert_gets(found, expected(hf, state, EngineRank(tp=tp, ep=ep)) if rank == 1 else {})
        narrowed = [{}, {}]
        for bucket in reshard.divide_model_to_bucket(models):
            full = reshard.gather_full_model(bucket)
            for place, found in zip(places, narrowed, strict=True):
                if rank != 3:
                    found.update(reshard.narrow_to_target(full, place, place % ep))
        for target, found in zip(targets, narrowed, strict=True):
            assert_gets(found, expected(hf, state, target) if rank != 3 else {})


OLD = [
    (SPARSE, ParallelDims(tp=4, ep=2, etp=2, sp=True), [(2, 1), (2, 2), (1, 1), (4, 4)]),  # 2 of 4: not rank % 2
    (SPARSE, ParallelDims(tp=2, pp=2, vp=2, ep=2, sp=True), [(2, 1), (1, 1)]),
    (TIED, ParallelDims(tp=2, pp=2, sp=True, **SPLIT), [(2, 1), (1, 1)]),
    (TIED, ParallelDims(tp=2, sp=True), [(2, 1)]),  # nothing travels, and buckets still have equal sizes
]
NEW = [
    (SPARSE, ParallelDims(tp=2, pp=2, ep=2, sp=True), [(4, 1), (4, 4), (8, 2), (1, 1)]),
    (SPARSE, ParallelDims(ep=4), [(2, 1), (2, 2)]),
    (TIED, ParallelDims(pp=4, num_layers_in_last_pipeline_stage=2), [(2, 1), (1, 1)]),
    (LATENT, ParallelDims(tp=4, ep=2, sp=True), [(2, 1), (4, 2)]),
]


@pytest.mark.parametrize(("hf", "dims", "rollouts"), OLD, ids=lambda each: str(each)[:20])
def test_every_destination_gets_its_slices_from_callers_up_to_0_4_0(hf, dims, rollouts):
    pool.run(4, old_callers, hf, dims, rollouts)


@pytest.mark.parametrize(("hf", "dims", "rollouts"), NEW, ids=lambda each: str(each)[:20])
def test_every_destination_gets_its_slices_from_callers_since(hf, dims, rollouts):
    pool.run(4, new_callers, hf, dims, rollouts)


def test_the_layout_in_which_rlinf_sends_wrong_experts_is_among_these():
    """RLinf's actor passes ``rank % tp``, but half of the ranks send to another rank of the engine."""
    _, dims, rollouts = OLD[0]
    wrong = [rank for rank in range(4) if rank % 2 != rank % dims.tp // (dims.tp // 2)]
    assert (2, 1) in rollouts
    assert wrong == [1, 2]


# data parallel attention ----------------------------------------------------------------------------------------------


def attention_in_parallel(hf, dims):
    state = random_state(hf)
    models = built(hf, dims, state)
    rank = dist.get_rank()
    sizes = {"rollout_full_tp_size": 4, "rollout_lm_head_tp_size": 4, "rollout_moe_dense_tp_size": 1}
    config = config_c(reshard_tp_size=2, rollout_ep_size=4, enable_dp_attention=True, **sizes)
    reshard = MegatronCoreWeightReshard(config)
    places = {"dst_lm_head_rank": rank, "dst_shared_rank": rank}
    found = synced(reshard, models, lambda b: reshard.gather_and_reshard_model(b, rank % 2, rank, **places))
    whole = re.compile(r"layers\.\d+\.mlp\.(gate|up|down)_proj")
    whole_engine = expected(hf, state, EngineRank(tp=4, tp_rank=rank, ep=4, ep_rank=rank))
    wanted = expected(hf, state, EngineRank(tp=2, tp_rank=rank % 2, ep=4, ep_rank=rank))
    for name in wanted:
        if "shared_experts" in name or name == "lm_head.weight":
            wanted[name] = whole_engine[name]
        elif whole.search(name):
            wanted[name] = state[name]
    assert_gets(found, wanted)


def test_data_parallel_attention_cuts_head_and_shared_experts_otherwise():
    pool.run(4, attention_in_parallel, LATENT, ParallelDims(tp=2, pp=2, ep=2, sp=True, **SPLIT))


# handles --------------------------------------------------------------------------------------------------------------


def test_a_handle_of_cuda_has_its_device_where_rlinf_replaces_it():
    """RLinf's receivers set argument 6 of a handle to their device. torch defines the arguments of a handle."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[6] == "storage_device"


# what goes wrong ------------------------------------------------------------------------------------------------------


def mistakes():
    state = random_state(TIED)
    models = built(TIED, ParallelDims(tp=2, sp=True), state)
    rank = dist.get_rank()
    reshard = MegatronCoreWeightReshard(config_c(reshard_tp_size=2))
    first, second, *_ = reshard.divide_model_to_bucket(models)
    with pytest.raises(ExportError, match="expected bucket 0, found 1"):
        reshard.gather_and_reshard_model(second, rank)
    reshard.gather_and_reshard_model(first, rank)
    with pytest.raises(ExportError, match="expected the destination of the first bucket"):
        reshard.gather_and_reshard_model(second, 1 - rank)
    reshard.divide_model_to_bucket(models)
    with pytest.raises(ExportError, match="of an earlier sync"):
        reshard.gather_and_reshard_model(second, rank)
    bucket, *_ = reshard.divide_model_to_bucket(models)
    with pytest.raises(
        ExportError, match=r"rank 1 of the group: expected tp of at least 1 .* found 2 and 5"
    ):  # on both
        reshard.gather_and_reshard_model(bucket, 0 if rank == 0 else 5)
    found = reshard.gather_and_reshard_model(models, rank)  # RLinf's call before it had buckets
    assert_gets(found, expected(TIED, state, EngineRank(tp=2, tp_rank=rank)))


def test_mistakes_are_named_and_leave_no_rank_waiting():
    pool.run(2, mistakes, timeout=60)


def of_a_trainers_own(folder):
    """A model that this library did not build: without ``hf`` its family is unknown."""
    state = random_state(TIED)
    models = built(TIED, ParallelDims(pp=2, **SPLIT), state)
    for chunk in models:
        del chunk.bridge
    with pytest.raises(ExportError, match="call adopt"):
        MegatronCoreWeightReshard(config_a()).gather_and_reshard_model(models)
    found = MegatronCoreWeightReshard(config_a(), hf=folder).gather_and_reshard_model(models)
    assert_gets(found, state)


def test_a_model_that_the_trainer_built_takes_the_folder_of_its_config(tmp_path):
    TIED.save_pretrained(tmp_path)
    pool.run(2, of_a_trainers_own, str(tmp_path), timeout=60)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Engine.of(object()), ConfigError, "expected RLinf's ReshardConfig"),
        (lambda: Engine.of(config_a(reshard_weights_format="mcore")), ConfigError, "keep RLinf's own"),
        (lambda: place(config_a(reshard_tp_size=4), tp=(2, 0)), TargetError, "must divide the trainer's tp=2, found 4"),
        (lambda: place(config_c(reshard_pp_size=2), tp=(2, 0)), TargetError, "reshard_pp_size must be 1, or both"),
        (
            lambda: place(config_c(rollout_ep_size=2), tp=(2, 0), dst_tp_rank=0),
            TargetError,
            "dst_ep_rank must be given",
        ),
        (
            lambda: place(config_c(enable_dp_attention=True), tp=(2, 0), dst_tp_rank=0),
            TargetError,
            "dst_shared_rank must be given",
        ),
    ],
)
def test_what_an_engine_cannot_be_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def place(config, *, tp, pp=(2, 1), **destination):
    return Engine.of(config).rank_at(Destination(**destination), tp=tp, pp=pp)


def test_where_nothing_is_resharded_a_stage_goes_to_that_of_the_same_number():
    target = place(config_c(reshard_tp_size=2, reshard_pp_size=2), tp=(2, 1), dst_tp_rank=1)
    assert target == EngineRank(tp=2, tp_rank=1, pp=2, pp_rank=1)
