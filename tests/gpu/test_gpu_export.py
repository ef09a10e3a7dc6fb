"""Exports on real GPUs over NCCL: from every trainer to every engine bit for bit, and all memory is freed in every
case.
"""

import gc
from copy import deepcopy

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.errors import ExportError
from mcore_bridge.weights.agreement import agree_on_plan
from mcore_bridge.weights.plan.export_plan import MEMORY, peak_bytes
from mcore_bridge.weights.transfer import collectives
from tests.support import mtp_checkpoints
from tests.support.gpu_models import BACKENDS, SPARSE
from tests.support.gpus import spawn
from tests.support.strategies import random_state, tiny
from tests.support.target_models import GRID, assert_gets, assignments, expected

pytestmark = pytest.mark.multigpu

HF = SPARSE["qwen3_moe"]
MTP = ("deepseek_v3", "glm4_moe")
MTP_MESHES = {
    1: [mb.ParallelDims()],
    2: [mb.ParallelDims(tp=2, sp=True), mb.ParallelDims(pp=2), mb.ParallelDims(ep=2)],
}
BUCKET = 1 << 19
TABLES = 1 << 18
"""Bytes on a GPU that plans may keep: less than a message. The tables of moves that these exports make take 182 KB."""
ENDINGS = ("ended", "abandoned", "raised in the consumer", "failed on a rank")


def grid(rank, world_size, flat):
    """Every mesh of the grid that fits, to every engine; windows of more than ``flat`` ranks travel by stages."""
    from megatron.core import parallel_state

    collectives.FLAT = flat
    state = random_state(HF, dtype=torch.bfloat16)
    tried = 0
    for dims in GRID:
        if world_size % dims.smallest_world:
            continue
        dims.initialize(device="cuda")
        models = mb.build_model(HF, dims=dims, load_weights=state)
        for ranks in assignments():
            target = ranks[rank % len(ranks)]
            found = mb.to_hf_state_dict(models, target=target, bucket_bytes=BUCKET, device="cpu")
            assert_gets(found, expected(HF, state, target))
            lent = mb.iter_hf_weights(models, target=target, bucket_bytes=BUCKET, copy=False)
            assert_gets({name: tensor.cpu() for name, tensor in lent}, expected(HF, state, target))
            tried += 1
        target = "everything" if rank == 0 else "nothing"
        assert_gets(mb.to_hf_state_dict(models, target=target, device="cpu"), expected(HF, state, target))
        assert_gets(mb.to_hf_state_dict(models, bucket_bytes=BUCKET, device="cpu"), state)
        lent = mb.iter_hf_weights(models, bucket_bytes=BUCKET, copy=False)
        assert_gets({name: tensor.cpu() for name, tensor in lent}, state)
        parallel_state.destroy_model_parallel()
        if rank == 0:
            print(dims, tried, "right", flush=True)
    return tried


@pytest.mark.parametrize(
    ("world_size", "flat"), [(2, collectives.FLAT), (4, collectives.FLAT), (4, 0)], ids=["2", "4", "4 by stages"]
)
def test_the_grid_of_trainers_and_engines(world_size, flat, tmp_path):
    assert min(spawn(grid, tmp_path, world_size, flat)) > 0


def predicted(rank, world_size):
    """For each backend and family with an MTP layer: tensors that an export changed, and on one rank the layer's logits
    in fp32.

    The weights are bf16 values, so that fp32 holds them exactly.
    """
    from megatron.core import parallel_state

    wrong, logits = {}, {}
    for dims in MTP_MESHES[world_size]:
        dims.initialize(device="cuda")
        for family in MTP:
            hf = deepcopy(SPARSE[family])
            hf.num_nextn_predict_layers = 1
            drawn = mtp_checkpoints.published(hf)
            state = {name: tensor.bfloat16() for name, tensor in drawn.items()}
            state |= {name: drawn[name] for name in drawn if name.endswith("e_score_correction_bias")}
            for backend in BACKENDS:
                for dtype in (torch.bfloat16, torch.float32):
                    options = {"backend": backend, "dtype": dtype, "overrides": {"mtp_num_layers": 1}}
                    models = mb.build_model(hf, dims=dims, load_weights=state, **options)
                    found = mb.to_hf_state_dict(models, device="cpu")
                    pairs = {name: (found[name], state[name]) for name in state.keys() & found.keys()}
                    names = [name for name, (own, known) in pairs.items() if not torch.equal(own, known.to(own.dtype))]
                    wrong[str(dims), family, backend, str(dtype)] = sorted(found.keys() ^ state.keys()) + names
                if world_size == 1:
                    logits[family, backend] = mtp_checkpoints.predicted(models[0].eval(), hf).cpu()
        parallel_state.destroy_model_parallel()
    return wrong, logits


@pytest.mark.parametrize("world_size", MTP_MESHES)
def test_layers_that_predict_further_go_round_on_either_backend(world_size, tmp_path):
    for wrong, logits in spawn(predicted, tmp_path, world_size):
        assert wrong
        assert not any(wrong.values()), wrong
        for (family, _), found in logits.items():
            known = logits[family, "torch"]
            assert (found - known).abs().max() < 1e-4 * known.std(), family


def run(models, ending, target, rank, *, copy):
    """One export that ends in this way."""
    pairs = mb.iter_hf_weights(models, target=target, bucket_bytes=BUCKET, copy=copy)
    if ending == "ended":
        for _ in pairs:
            pass
    elif ending == "abandoned":
        next(pairs)
        pairs.close()
    elif ending == "raised in the consumer":
        failed = False
        try:
            for number, _ in enumerate(pairs):
                if number == 3 and rank == 1:
                    raise RuntimeError("the consumer failed")
        except RuntimeError:
            failed = True
        assert failed == (rank == 1)
    else:
        parameter = models[0].decoder.layers[-1].self_attention.linear_proj.weight
        data, empty = parameter.data, torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        failed = False
        try:
            for number, _ in enumerate(pairs):
                if number == 2 and rank == 0:
                    size = data.untyped_storage().nbytes()
                    data.untyped_storage().resize_(0)
        except ExportError:
            failed = True
        assert failed
        if rank == 0:
            data.untyped_storage().resize_(size)
        del data, empty
    del pairs


def memory(rank, world_size):
    """For meshes, targets and ways to end, the bytes that are allocated after one such export and after 20 more, beyond
    the bytes before any export of the model."""
    from megatron.core import parallel_state

    left = {}
    for dims in (mb.ParallelDims(tp=2, sp=True), mb.ParallelDims(ep=2)):
        dims.initialize(device="cuda")
        models = mb.build_model(HF, dims=dims, load_weights=random_state(HF, dtype=torch.bfloat16))
        torch.cuda.synchronize()
        gc.collect()  # temporary memory of the build, and the model before
        before = torch.cuda.memory_allocated()
        for target, copy in (("everything", True), ("everything", False), (mb.engine_ranks(tp=2)[1 - rank], True)):
            for ending in ENDINGS:
                found = []
                for times in (1, 20):
                    for _ in range(times):
                        run(models, ending, target, rank, copy=copy)
                    torch.cuda.synchronize()
                    found.append(torch.cuda.memory_allocated() - before)
                left[str(dims), str(target)[:10], copy, ending] = found
        del models
        parallel_state.destroy_model_parallel()
    return left


def peaks(rank, world_size):
    """For models, meshes and buckets, the bytes that an export took at most, what was expected, and the bound.

    The exported tensors are equal in all cases.
    """
    from megatron.core import parallel_state

    found = {}
    tensor, pipeline = mb.ParallelDims(tp=2), mb.ParallelDims(pp=2)
    small, large = (32_000, 24), (600_000, 64)  # rows of the vocabulary, of which the second have 1.2 GB; and layers
    for dims, tied, sizes in (
        (tensor, False, small),
        (pipeline, False, small),
        (pipeline, True, small),
        (tensor, True, large),
    ):
        fields = {"vocab_size": sizes[0], "num_hidden_layers": sizes[1], "hidden_size": 1024, "intermediate_size": 6144}
        hf = tiny("qwen3", tie_word_embeddings=tied, **fields)  # tied, the first stage sends its embedding alone
        dims.initialize(device="cuda")
        models = mb.build_model(hf, dims=dims, dtype=torch.bfloat16, load_weights=False)
        known = mb.manifest(models, bucket_bytes=32 << 20, digests=True)
        largest = max(spec.num_bytes for spec in known)
        for bucket_bytes in (64 << 20, 128 << 20, 256 << 20, None):
            plan = agree_on_plan(models, None, "lm", bucket_bytes=bucket_bytes).program.plan
            for _ in range(2):  # the first export makes tables, which are kept
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                for _ in mb.iter_hf_weights(models, bucket_bytes=bucket_bytes):
                    pass
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before
            assert not mb.manifest(models, bucket_bytes=bucket_bytes, digests=True).differences(known)
            assert len({message.room for message in plan.messages}) == 1 + (sizes == large and not bucket_bytes)
            bound = 3 * bucket_bytes + largest if bucket_bytes else MEMORY
            found[str(dims), tied, sizes, bucket_bytes] = peak, peak_bytes(plan), bound
        del models
        parallel_state.destroy_model_parallel()
    return found


def test_an_export_takes_no_more_than_was_counted(tmp_path):
    for found in spawn(peaks, tmp_path, 2):
        for peak, counted, bound in found.values():
            assert counted <= bound, found
            assert 0.5 * counted <= peak <= 1.02 * counted + (1 << 20), found


def test_all_memory_comes_back_but_for_small_tables(tmp_path):
    for found in spawn(memory, tmp_path, 2):
        for first, last in found.values():
            assert 0 <= last <= TABLES, found
            assert abs(last - first) <= 1 << 16, found
