"""Files to GPUs and back, through pinned slots: many slots, few slots, and tensors larger than a slot."""

import threading

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.weights.files.background import HostCopies
from mcore_bridge.weights.files.staging import SLOT_BYTES
from tests.support.gpu_models import WITH_EXPERTS as HF
from tests.support.gpus import spawn
from tests.support.strategies import random_state, save

pytestmark = pytest.mark.multigpu

DIMS = [mb.ParallelDims(), mb.ParallelDims(tp=2, ep=2, sp=True), mb.ParallelDims(pp=2)]


def rank_main(rank, world_size, dims, folder):
    """Load, export, save; in the checkpoint's dtype and in another, with slots of every size."""
    dims.initialize(device="cuda")
    state = random_state(HF)
    for dtype in (torch.float32, torch.bfloat16):
        expected = {name: tensor.to(dtype) for name, tensor in state.items()}
        for slot_bytes in (1000, 100_000, SLOT_BYTES):
            models = mb.build_model(HF, dims=dims, dtype=dtype, device="cuda", load_weights=False)
            mb.load_hf_weights(models, f"{folder}/source", dtype=dtype, slot_bytes=slot_bytes)
            exported = mb.to_hf_state_dict(models, device="cpu")
            assert exported.keys() == expected.keys()
            assert not [name for name in expected if not torch.equal(exported[name], expected[name])]
            target = f"{folder}/saved-{dtype}-{slot_bytes}"
            specs = mb.save_hf_checkpoint(models, target, max_shard_bytes=1 << 20, slot_bytes=slot_bytes)
            found = mb.Manifest.from_folder(target, digests=True)
            assert found.differences(mb.manifest(models, digests=True)) == ()
            assert len(specs) == len(found)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_what_is_loaded_is_saved(dims, tmp_path):
    (tmp_path / "source").mkdir()
    save(random_state(HF), HF, tmp_path / "source")
    spawn(rank_main, tmp_path, dims.smallest_world, dims, str(tmp_path))


@pytest.mark.parametrize("most_bytes", [None, 6 << 20])
def test_copies_are_those_of_the_call_although_the_tensors_change(most_bytes):
    """A save in the background: each tensor is overwritten as soon as it was put."""
    truth = [torch.randn(1 << 20) for _ in range(16)]
    copies, wrong, held = HostCopies(most_bytes), [], []

    def take():
        for name, tensor in copies.taken():
            held.append(copies._held)
            wrong.extend([name] * (not tensor.is_pinned() or not torch.equal(tensor, truth[int(name)])))

    thread = threading.Thread(target=take)
    thread.start()
    for number, tensor in enumerate([tensor.cuda() for tensor in truth]):
        copies.put(str(number), tensor)
        tensor.fill_(7.0)
    copies.end()
    thread.join()
    assert (wrong, len(held)) == ([], 16)
    assert most_bytes is None or max(held) <= most_bytes
