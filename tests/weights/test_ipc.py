"""Weights in flat buffers on a GPU, which another process reads through CUDA IPC, with any setting of torch's
allocator.
"""

import os
from contextlib import closing

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.weights.manifest import digest
from tests.support.engine import engine, manifest_of, pause, run_example, send_round
from tests.support.strategies import random_state, tiny

pytestmark = pytest.mark.multigpu

SETTINGS = {"segments": "max_split_size_mb:512", "expandable": "max_split_size_mb:512,expandable_segments:True"}
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]
SHAPES = [(DTYPES[i % 3], (1 + i % 4, 100_003 + 7 * i)) for i in range(60)]
"""Some 35 MB. No size is a multiple of another."""
SLOT_BYTES = 4 << 20
ROUNDS = 20


def random_pairs(seed, seconds=0.0):
    """Tensors whose bytes the GPU's stream writes only ``seconds`` after they are yielded."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for index, (dtype, shape) in enumerate(SHAPES):
        pause(seconds, on_gpu=True)
        size = torch.Size(shape).numel() * dtype.itemsize
        numbers = torch.randint(0, 256, (size,), generator=generator, device="cuda", dtype=torch.uint8)
        yield f"layers.{index}.weight", numbers.view(dtype).view(shape)


def is_expandable(tensor):
    """Whether the memory of ``tensor`` lies in one of torch's expandable segments."""
    (segment,) = (
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
    )
    return segment["is_expandable"]


def settings():
    return {
        name: torch.cuda.memory._snapshot()["allocator_settings"][name]
        for name in ("expandable_segments", "max_split_size")
    }


def send_rounds(plan, rounds):
    """All rounds to one engine through one ring, and one more to a second engine."""
    with closing(mb.BufferRing(plan)) as ring:
        assert not any(map(is_expandable, ring._slots))
        with engine(ring, seconds=0.002) as pipe:
            for seed in range(rounds):
                expected = {name: digest(tensor) for name, tensor in random_pairs(seed)}
                found = send_round(ring, random_pairs(seed, seconds=0.0002), pipe, in_flight=1 + seed % 2)
                wrong = [name for name in expected if found.get(name) != expected[name]]
                assert not wrong, f"round {seed}: {wrong}"
                assert len(found) == len(expected)
        with engine(ring) as pipe:
            assert send_round(ring, random_pairs(seed), pipe) == expected


def memory():
    """Bytes that torch has allocated, and bytes of the GPU that are free."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]


def sender(rank, expandable):
    """Many rounds with both settings of torch's allocator for segments. The setting must be unchanged afterwards."""
    torch.cuda.set_device(0)
    plan = mb.plan_buckets(manifest_of(dict(random_pairs(0))), num_slots=2, slot_bytes=SLOT_BYTES)
    assert len(plan.buckets) > 3 * plan.num_slots
    before = settings()
    assert before == {"expandable_segments": expandable, "max_split_size": 512 << 20}
    send_rounds(plan, 1)  # loads every kernel
    allocated, free = memory()
    send_rounds(plan, ROUNDS)
    allocated_now, free_now = memory()
    assert allocated_now == allocated
    assert free_now > free - SLOT_BYTES, f"{free - free_now} bytes were not given back"
    assert settings() == before
    assert is_expandable(torch.empty(32 << 20, dtype=torch.uint8, device="cuda")) == expandable


@pytest.mark.parametrize("name", SETTINGS)
def test_another_process_reads_every_bit_on_the_same_gpu(name, monkeypatch):
    if not torch.cuda.device_count():
        pytest.skip("needs a GPU")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", SETTINGS[name])
    torch.multiprocessing.spawn(sender, (name == "expandable",), nprocs=1)


def send_model(rank, environment):
    """Send a model's export to an engine with another environment, in which our GPU is visible or not."""
    torch.cuda.set_device(0)
    hf = tiny("qwen3", vocab_size=97)
    dims = mb.ParallelDims()
    dims.initialize(device="cuda")
    models = mb.build_model(hf, dims=dims, backend="torch", load_weights=random_state(hf, dtype=torch.bfloat16))
    manifest = mb.manifest(models, digests=True)
    with closing(mb.BufferRing(mb.plan_buckets(manifest, slot_bytes=1 << 17))) as ring:
        with engine(ring, environment=environment) as pipe:
            found = send_round(ring, mb.iter_hf_weights(models), pipe)
        assert found == {spec.name: spec.sha256 for spec in manifest}
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("order", ["same", "reversed", "hidden"])
def test_an_engine_reads_the_gpu_of_a_model_whatever_its_index_is_and_from_another_gpu(order):
    count = torch.cuda.device_count()
    if count < (1 if order == "same" else 2):
        pytest.skip(f"needs GPUs, found {count}")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    visible = {"same": seen, "reversed": seen[::-1], "hidden": seen[1:]}[order]
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(visible)}
    torch.multiprocessing.spawn(send_model, (environment,), nprocs=1)


def test_the_example_of_the_docs_runs_on_a_gpu(tmp_path):
    if not torch.cuda.device_count():
        pytest.skip("needs a GPU")
    run_example(tmp_path)
