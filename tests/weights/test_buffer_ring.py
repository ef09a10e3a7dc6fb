"""Weights in flat buffers that another process reads: the plan, the ring, and two real processes over shared memory."""

import os
import pickle
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import rebuild_cuda_tensor

import mcore_bridge as mb
from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import ALIGNMENT, TensorSpec
from mcore_bridge.weights.ipc.buckets import BucketPlan, plan_buckets
from mcore_bridge.weights.ipc.receiver import Receiver
from mcore_bridge.weights.ipc.sender import BufferRing
from mcore_bridge.weights.ipc.shared_memory import Handle, _map_file, allocate, open_all, share
from mcore_bridge.weights.manifest import digest
from tests.support import pool
from tests.support.engine import FINISH, answer, engine, manifest_of, send_round
from tests.support.strategies import random_state, tiny

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


def random_tensors(sizes, seed=0):
    """Tensors of the given (dtype, shape)s, of random bytes."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(dtype, shape):
        limit = 2 if dtype == torch.bool else 256
        numbers = torch.randint(0, limit, (torch.Size(shape).numel() * dtype.itemsize,), generator=generator)
        return numbers.to(torch.uint8).view(dtype).view(shape)

    return {f"layers.{i}.weight": tensor(dtype, shape) for i, (dtype, shape) in enumerate(sizes)}


SHARED = Path("/dev/shm")

MIXED = [(DTYPES[i % len(DTYPES)], (i % 5 + 1, 3 * (i % 30) + 1)) for i in range(80)]
"""No size is a multiple of another: an fp32 tensor follows an odd number of bf16 elements."""

sizes = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3).map(tuple)), max_size=24)


@st.composite
def manifests_with_groups(draw):
    """A manifest, and names that must stay together, which may overlap and lie apart."""
    manifest = manifest_of(random_tensors(draw(sizes)))
    names = [spec.name for spec in manifest]
    groups = draw(st.lists(st.sets(st.sampled_from(names), max_size=3), max_size=4)) if names else []
    return manifest, groups


# plans ----------------------------------------------------------------------------------------------------------------


@given(manifests_with_groups(), st.integers(1, 4), st.none() | st.integers(1, 12))
def test_every_tensor_lies_once_aligned_and_beside_its_group(drawn, num_slots, slots_of):
    manifest, groups = drawn
    slot_bytes = None if slots_of is None else slots_of * ALIGNMENT
    try:
        plan = plan_buckets(manifest, num_slots=num_slots, slot_bytes=slot_bytes, together=groups)
    except TransferError as error:
        assert slot_bytes is not None
        needed = int(str(error).rpartition("slot_bytes=")[2].partition(" ")[0])
        assert needed > slot_bytes
        plan = plan_buckets(manifest, num_slots=num_slots, slot_bytes=needed, together=groups)
    pieces = [piece for bucket in plan.buckets for piece in bucket.pieces]
    assert [(p.name, p.dtype, p.shape) for p in pieces] == [(s.name, s.dtype, s.shape) for s in manifest]
    for bucket in plan.buckets:
        assert bucket.slot == bucket.number % num_slots
        taken = [byte for piece in bucket.pieces for byte in range(piece.offset, piece.offset + piece.num_bytes)]
        assert len(taken) == len(set(taken))
        assert max(taken, default=-1) < plan.slot_bytes
        assert all(piece.offset % 256 == 0 for piece in bucket.pieces)
    home = {piece.name: bucket.number for bucket in plan.buckets for piece in bucket.pieces}
    assert all(len({home[name] for name in group}) <= 1 for group in groups)


def test_slots_are_filled_up_and_as_large_as_they_must_be():
    manifest = manifest_of(random_tensors([(torch.uint8, (ALIGNMENT,))] * 7))
    sizes = [len(bucket.pieces) for bucket in plan_buckets(manifest, slot_bytes=3 * ALIGNMENT).buckets]
    assert sizes == [3, 3, 1]
    assert plan_buckets(manifest).slot_bytes == 7 * ALIGNMENT
    apart = plan_buckets(manifest, slot_bytes=3 * ALIGNMENT, together=[["layers.2.weight", "layers.4.weight"]])
    assert [len(bucket.pieces) for bucket in apart.buckets] == [2, 3, 2]
    assert plan_buckets(()).buckets == ()


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([{1, 4}, {2, 3}], [1, 4, 3]),
        ([{1, 4}, {1, 2}], [1, 4, 3]),
        ([{1, 3}, {2, 4}], [1, 4, 3]),
        ([{1, 2}, {3, 4}, set()], [3, 4, 1]),
    ],
    ids=["nested", "same start", "overlapping", "neighbours"],
)
def test_groups_that_share_tensors_are_one(groups, expected):
    manifest = manifest_of(random_tensors([(torch.uint8, (ALIGNMENT,))] * 8))
    together = [{f"layers.{i}.weight" for i in group} for group in groups]
    plan = plan_buckets(manifest, slot_bytes=4 * ALIGNMENT, together=together)
    assert [len(bucket.pieces) for bucket in plan.buckets] == expected


def test_codes_and_scales_share_a_slot():
    """Of a weight alone, and of all weights that engines fuse."""
    names = [f"a.{module}.weight{end}" for module in ("q_proj", "k_proj", "o_proj") for end in ("", "_scale_inv")]
    names += [f"b.o_proj.{end}" for end in ("weight_packed", "weight_scale", "weight_global_scale", "weight_shape")]
    names += ["c.experts.down_proj_blocks", "c.experts.down_proj_scales", "d.norm.weight"]
    manifest = [TensorSpec(name, (ALIGNMENT,), torch.uint8) for name in names]
    plan = plan_buckets(manifest, slot_bytes=4 * ALIGNMENT)
    assert [len(bucket.pieces) for bucket in plan.buckets] == [4, 2, 4, 3]


def test_what_cannot_be_planned_is_refused_before_anything_is_allocated():
    manifest = manifest_of(random_tensors([(torch.float32, (65,)), (torch.uint8, (1,))]))
    with pytest.raises(TransferError, match=r"layers.0.weight takes 512 bytes, .* slot_bytes=512 or more"):
        plan_buckets(manifest, slot_bytes=511)
    with pytest.raises(TransferError, match=r"layers.0.weight to layers.1.weight takes 768 bytes"):
        plan_buckets(manifest, slot_bytes=512, together=[{"layers.0.weight", "layers.1.weight"}])
    with pytest.raises(TransferError, match=r"names \['q.weight'\], which the manifest lacks"):
        plan_buckets(manifest, together=[{"layers.0.weight", "q.weight"}])
    with pytest.raises(TransferError, match=r"found \['layers.0.weight'\] more often"):
        plan_buckets([*manifest, *manifest][:3])
    with pytest.raises(TransferError, match="num_slots must be a whole number of at least 1"):
        plan_buckets(manifest, num_slots=0)


def test_the_index_as_plain_lists():
    plan = plan_buckets(manifest_of(random_tensors([(torch.bfloat16, (3,)), (torch.float32, (2, 5))])))
    assert plan.buckets[0].columns() == {
        "names": ["layers.0.weight", "layers.1.weight"],
        "dtypes": ["bfloat16", "float32"],
        "shapes": [[3], [2, 5]],
        "offsets": [0, 256],
        "num_bytes": [6, 40],
    }


# the ring, with a receiver in the same process ------------------------------------------------------------------------


def ring_and_receiver(tensors, **arguments):
    """A ring on the CPU and a receiver that has opened it."""
    ring = BufferRing(plan_buckets(manifest_of(tensors), **arguments), "cpu")
    return ring, Receiver(ring.plan, ring.handles())


@given(sizes, st.integers(1, 4), st.integers(1, 5), st.data())
def test_no_slot_is_touched_before_it_was_read(sizes, num_slots, in_flight, data):
    tensors = random_tensors(sizes)
    largest = max((tensor.nbytes for tensor in tensors.values()), default=0)
    slot_bytes = data.draw(st.integers(1, 6)) * ALIGNMENT + (largest + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ring, receiver = ring_and_receiver(tensors, num_slots=num_slots, slot_bytes=slot_bytes)
    for seed in range(2):
        sent, read, seen = [], [], {}

        def read_oldest(sent=sent, read=read, seen=seen):
            assert len(sent) - len(read) <= min(num_slots, in_flight)
            with receiver.open(sent[len(read)]) as pairs:
                seen.update((name, tensor.clone()) for name, tensor in pairs)
            read.append(sent[len(read)])

        tensors = random_tensors(sizes, seed)
        for bucket in ring.fill(tensors.items(), acknowledged=read_oldest, in_flight=in_flight):
            sent.append(bucket.number)
            assert len(sent) - len(read) <= min(num_slots, in_flight)
            assert all(digest(piece.view(ring.slot(bucket))) == digest(tensors[piece.name]) for piece in bucket.pieces)
        receiver.finish()
        assert sent == read == list(range(len(ring.plan.buckets)))
        assert list(seen) == list(tensors)
        assert all(digest(seen[name]) == digest(tensor) for name, tensor in tensors.items())
    ring.close()


def test_the_sender_waits_only_when_no_slot_is_free():
    tensors = random_tensors([(torch.uint8, (ALIGNMENT,))] * 5)
    ring = BufferRing(plan_buckets(manifest_of(tensors), num_slots=3, slot_bytes=ALIGNMENT), "cpu")
    events = []
    buckets = ring.fill(tensors.items(), acknowledged=lambda: events.append("wait"))
    events.extend(bucket.number for bucket in buckets)
    assert events == [0, 1, 2, "wait", 3, "wait", 4, "wait", "wait", "wait"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {**t, "layers.1.weight": t["layers.1.weight"].double()}, "torch.float64"),
        (lambda t: {**t, "layers.1.weight": t["layers.1.weight"][:2]}, r"\(2,\)"),
        (lambda t: dict(reversed(t.items())), "found .'layers.2.weight'"),
        (lambda t: dict(list(t.items())[:2]), "found no further tensor"),
        (lambda t: {**t, "extra": t["layers.0.weight"]}, "ends before extra"),
        (lambda t: {**t, "layers.1.weight": t["layers.1.weight"].to("meta")}, "on meta"),
    ],
    ids=["dtype", "shape", "order", "missing", "extra", "meta"],
)
def test_a_tensor_that_the_plan_does_not_have_next_is_refused(change, message):
    tensors = random_tensors([(torch.float32, (3,)), (torch.float32, (4,)), (torch.float32, (5,))])
    ring, _ = ring_and_receiver(tensors)
    with pytest.raises(TransferError, match=message):
        list(ring.fill(change(tensors).items(), acknowledged=lambda: None))
    ring.restart()
    with pytest.raises(TransferError, match="must have a name and a tensor each, found"):
        list(ring.fill(tensors, acknowledged=lambda: None))


def closed_pairs(tensors, closed):
    try:
        yield from tensors.items()
    finally:
        closed.append(True)


def test_a_round_that_breaks_off_closes_the_export_and_must_be_given_up():
    tensors = random_tensors(MIXED)
    ring, receiver = ring_and_receiver(tensors, slot_bytes=4096)
    closed = []
    pairs = closed_pairs(tensors, closed)  # kept in a variable, since dropping it would close it
    buckets = ring.fill(pairs, acknowledged=lambda: None)
    with closing(buckets), receiver.open(next(buckets).number):
        pass
    assert closed == [True]
    with pytest.raises(TransferError, match=r"\[0\] were never acknowledged; call restart"):
        next(ring.fill(closed_pairs(tensors, closed), acknowledged=lambda: None))
    assert closed == [True, True]  # the export began, since other ranks wait for this one
    with pytest.raises(TransferError, match="expected in_flight=1 or more, found 0"):
        next(ring.fill(tensors.items(), acknowledged=lambda: None, in_flight=0))
    with pytest.raises(TransferError, match="tensors never came"):
        receiver.finish()
    with pytest.raises(TransferError, match=r"expected bucket 1 of .*, found bucket 0"), receiver.open(0):
        pass
    ring.restart()
    receiver.restart()
    for bucket in ring.fill(tensors.items(), acknowledged=lambda: None):
        with receiver.open(bucket.number):
            pass
    receiver.finish()
    ring.close()
    with pytest.raises(TransferError, match="its memory was freed"):
        next(ring.fill(tensors.items(), acknowledged=lambda: None))


def test_parameters_that_require_gradients_leave_none_in_a_slot():
    tensors = {"weight": torch.randn(3, requires_grad=True)}
    ring, receiver = ring_and_receiver(tensors)
    for bucket in ring.fill(tensors.items(), acknowledged=lambda: None):
        with receiver.open(bucket.number) as ((_, tensor),):
            assert not tensor.requires_grad
            assert torch.equal(tensor, tensors["weight"])
    assert not ring._slots[0].requires_grad


# what a receiver refuses ----------------------------------------------------------------------------------------------


def test_a_plan_that_does_not_fit_its_slots_is_refused():
    ring, _ = ring_and_receiver(random_tensors([(torch.float32, (3,)), (torch.float32, (4,))]))
    plan, handles = ring.plan, ring.handles()
    (bucket,) = plan.buckets
    first, second = bucket.pieces

    def refused(message, *pieces, plan=plan, handles=handles):
        wrong = replace(plan, buckets=(replace(bucket, pieces=pieces or bucket.pieces),))
        with pytest.raises(TransferError, match=message):
            Receiver(wrong, handles)

    refused("an end within the slot", first, replace(second, shape=(65,)))
    refused("from byte 12 on", first, replace(second, offset=0))
    refused("a multiple of 256", first, replace(second, offset=260))
    refused("layers.0.weight is in the plan twice", first, replace(second, name=first.name))
    refused("found another one: send ring.plan", first, replace(second, name="other"))
    refused("expected 2 slots of 512 bytes, found slots of .512.", handles=handles[:1])
    refused("found another one: send ring.plan", first, plan=replace(plan, slot_bytes=256))
    with pytest.raises(TransferError, match="expected bucket 0 in slot 0, found number 1"):
        Receiver(replace(plan, buckets=(replace(bucket, number=1),)), handles)


def test_a_buffer_that_is_gone_is_not_made_again():
    ring, receiver = ring_and_receiver(random_tensors([(torch.float32, (3,))]))
    handles = ring.handles()
    receiver.close()
    with pytest.raises(TransferError, match="found one that was closed"), receiver.open(0):
        pass
    ring.close()
    with pytest.raises(TransferError, match="found None; the sender may have ended"):
        Receiver(ring.plan, handles)


def test_a_sender_that_is_killed_leaves_no_memory_behind(tmp_path):
    """The slots have no name, so the memory exists as long as an engine has opened them."""
    script = (
        "import sys, time, mcore_bridge as mb\n"
        "from mcore_bridge.weights.ipc.buckets import BucketPlan\n"
        "ring = mb.BufferRing(BucketPlan(2, 4096, ()), 'cpu')\n"
        "print(*(handle.args[0] for handle in ring.handles()), flush=True)\n"
        "time.sleep(60)\n"
    )
    before = {*SHARED.iterdir()}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as sender:
        paths = sender.stdout.readline().split()
        slot = torch.from_file(paths[1], shared=True, size=4096, dtype=torch.uint8)
        left = {path for path in SHARED.iterdir() if path not in before and path.name.startswith(("mcore", "tmp"))}
        sender.kill()
    assert len(paths) == 2
    assert not left
    assert not any(map(os.path.exists, paths))
    assert not slot.any()  # still mapped


def test_memory_that_cannot_be_shared_or_is_not_there_is_refused():
    with pytest.raises(TransferError, match="found meta, whose memory another process cannot open"):
        BufferRing(BucketPlan(1, 256, ()), "meta")
    with pytest.raises(TransferError, match="use smaller slots"):
        BufferRing(BucketPlan(1, 1 << 60, ()), "cpu")


def test_a_receiver_needs_torch_only():
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('megatron', 'transformers', 'einops', 'safetensors', 'accelerate'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import mcore_bridge\n"
        "mcore_bridge.Receiver\n"
    )
    finished = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.skipif(not hasattr(torch._C, "_cuda_memorySnapshot"), reason="torch was built without CUDA")
@pytest.mark.parametrize("expandable", [True, False])
def test_expandable_segments_are_off_for_a_while_and_no_other_setting_changes(expandable):
    script = (
        "import torch\n"
        "from mcore_bridge.weights.ipc.shared_memory import _without_expandable_segments as off\n"
        "def settings():\n"
        "    found = torch.cuda.memory._snapshot()['allocator_settings']\n"
        "    found.pop('PYTORCH_CUDA_ALLOC_CONF')\n"
        "    return found\n"
        "before = settings()\n"
        "for _ in range(2):\n"
        "    with off():\n"
        "        assert settings() == {**before, 'expandable_segments': False}, settings()\n"
        "    assert settings() == before, settings()\n"
        "assert before['max_split_size'] == 100 << 20\n"
        f"assert before['expandable_segments'] is {expandable}\n"
    )
    settings = f"roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:{expandable},max_split_size_mb:100"
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr


# two processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 0.01], ids=["fast", "slow"])
@pytest.mark.parametrize("in_flight", [None, 1], ids=["pipelined", "alternating"])
def test_another_process_reads_every_bit_round_after_round(seconds, in_flight):
    plan = plan_buckets(manifest_of(random_tensors(MIXED)), num_slots=3, slot_bytes=4096)
    assert len(plan.buckets) > 2 * plan.num_slots
    with closing(BufferRing(plan, "cpu")) as ring, engine(ring, seconds=seconds) as pipe:
        for seed in range(5):
            tensors = random_tensors(MIXED, seed)
            found = send_round(ring, tensors.items(), pipe, in_flight=in_flight)
            assert found == {name: digest(tensor) for name, tensor in tensors.items()}


def test_an_engine_that_dies_or_refuses_ends_the_round_and_another_may_follow():
    tensors = random_tensors(MIXED)
    expected = {name: digest(tensor) for name, tensor in tensors.items()}
    with closing(BufferRing(plan_buckets(manifest_of(tensors), slot_bytes=4096), "cpu")) as ring:
        closed = []
        with engine(ring, dies_at=4) as pipe, pytest.raises((EOFError, OSError)):
            send_round(ring, closed_pairs(tensors, closed), pipe)
        assert closed == [True]
        ring.restart()
        with engine(ring) as pipe:
            pipe.send(3)
            with pytest.raises(TransferError, match="expected bucket 0 of"):
                answer(pipe)
            pipe.send(FINISH)
            with pytest.raises(TransferError, match="tensors never came"):
                answer(pipe)
            assert send_round(ring, tensors.items(), pipe) == expected


def export_to_an_engine_that_fails_on_rank_0():
    """The tensors that each rank read, if the reader of rank 0's slots ends after the second bucket."""
    hf = tiny("qwen3", vocab_size=97)
    dims = mb.ParallelDims(tp=2, sp=True)
    dims.initialize(device="cpu")
    state = random_state(hf)
    models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
    manifest = mb.manifest(models)
    ring = BufferRing(mb.plan_buckets(manifest, slot_bytes=1 << 17), "cpu")
    receiver = Receiver(ring.plan, ring.handles())
    unread, seen = [], {}

    def read_oldest():
        if dist.get_rank() == 0 and len(unread) and unread[0] == 2:
            raise EOFError("nobody answers")
        with receiver.open(unread.pop(0)) as pairs:
            seen.update((name, tensor.clone()) for name, tensor in pairs)

    try:
        pairs = mb.iter_hf_weights(models, bucket_bytes=1 << 14)
        unread.extend(bucket.number for bucket in ring.fill(pairs, acknowledged=read_oldest))
    except EOFError:
        pass
    ring.close()
    assert mb.to_hf_state_dict(models).keys() == state.keys()  # nothing is left in the group
    assert all(torch.equal(tensor, state[name]) for name, tensor in seen.items())
    return len(seen), len(state)


def test_ranks_whose_engine_lives_get_everything():
    (broken, total), (whole, _) = pool.run(2, export_to_an_engine_that_fails_on_rank_0, timeout=60)
    assert 0 < broken < total
    assert whole == total


def test_a_handle_of_a_gpu_leaves_a_process_whose_functions_an_engine_has_replaced():
    """SGLang replaces torch's functions in its processes. A trainer cannot call these, or has no SGLang at all."""
    args = (torch.Tensor, (8,), (1,), 0, torch.UntypedStorage, torch.uint8, "GPU-1", b"handle")
    received = pickle.loads(pickle.dumps(Handle(lambda *args: None, args, "GPU-1", "digest")))
    assert received == Handle(rebuild_cuda_tensor, args, "GPU-1", "digest")
    shared = share(allocate(8, torch.device("cpu")), "digest")
    assert pickle.loads(pickle.dumps(shared)) == shared


def test_handles_beside_one_that_cannot_be_opened_are_opened_too():
    opened = []
    handles = [Handle(lambda number=number: opened.append(number), (), None, "digest") for number in range(3)]
    handles[1] = Handle(_map_file, ("/nowhere", 8), None, "digest")
    with pytest.raises(TransferError, match="expected a buffer of 8 bytes at /nowhere, found None"):
        open_all(handles, "digest", "other")
    assert opened == [0, 2]
