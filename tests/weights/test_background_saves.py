"""Saves that go on in a thread: what they write, the memory that they hold, and folders after errors and crashes."""

import contextlib
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import mcore_bridge as mb
from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.dist_checkpoint import dist_writer
from mcore_bridge.weights.files import background, safetensors
from mcore_bridge.weights.files.background import HostCopies
from mcore_bridge.weights.manifest import ManifestEntry, digest
from mcore_bridge.weights.peft.hf_adapters import iter_peft_adapters
from tests.support import fake_mesh, pool
from tests.support.peft_models import fill
from tests.support.strategies import random_state, tiny

HF = tiny("qwen3_moe", vocab_size=97, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=22)
SAVES: dict[str, Any] = {
    "hf": partial(mb.save_hf_checkpoint, max_shard_bytes=20_000),
    "dist": mb.save_checkpoint,
    "adapters": mb.save_hf_adapters,
}
HOMES = {
    "hf": "mcore_bridge.weights.save",
    "dist": "mcore_bridge.weights.dist_checkpoint.checkpoint",
    "adapters": "mcore_bridge.weights.peft.hf_adapters",
}
LAST = {"hf": 1, "dist": 1, "adapters": 0}
"""The last of two ranks that writes."""


def built(dims: mb.ParallelDims, kind: str, seed: int = 0) -> Any:
    dims.initialize(device="cpu")
    state = random_state(HF, seed=seed)
    models = mb.build_model(HF, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
    if kind == "adapters":
        fill(models, mb.add_adapters(models, rank=2, alpha=4, targets=["q_proj", "linear_fc2"]))
    return models


def now_in(models: Any, kind: str) -> mb.Manifest:
    """The digests of what a save writes."""
    if kind != "adapters":
        return mb.manifest(models, digests=True)
    return of_tensors(iter_peft_adapters(models))


def of_tensors(pairs: Any) -> mb.Manifest:
    entries = (ManifestEntry(name, tuple(own.shape), own.dtype, digest(own)) for name, own in pairs)
    return mb.Manifest(tuple(entries))


def trained(models: Any) -> None:
    """Change every tensor, as steps of training would while a save goes on."""
    for model in models:
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.fill_(7.0)


def content(folder: str, kind: str, dims: mb.ParallelDims) -> Any:
    """The digests of a folder's tensors."""
    if kind == "hf":
        return mb.Manifest.from_folder(folder, digests=True)
    if kind == "adapters":
        if not (file := Path(folder, "adapter_model.safetensors")).exists():
            raise CheckpointError("there are no adapters")
        return of_tensors(load_file(file).items())
    models = built(dims, kind, seed=5)
    mb.load_checkpoint(models, folder)
    return mb.manifest(models, digests=True)


@contextlib.contextmanager
def watched(held: list[int]) -> Any:
    """Note how many bytes of copies are held after each one."""
    put = HostCopies.put

    def noted(self: HostCopies, name: str, tensor: torch.Tensor, **options: Any) -> None:
        put(self, name, tensor, **options)
        held.append(self._held)

    with mock.patch.object(HostCopies, "put", noted):
        yield


def save_and_go_on(dims: mb.ParallelDims, folder: str, kind: str) -> dict[str, Any]:
    """Runs in a worker: saves with several bounds, each while the models change, and then one over another."""
    models = built(dims, kind)
    truth = now_in(models, kind)
    largest = max(tensor.nbytes for model in models for tensor in [*model.parameters(), *model.buffers()])
    found: dict[str, Any] = {"problems": []}
    for bound in (None, 100, 2 * largest):
        held: list[int] = []
        models, out = built(dims, kind), f"{folder}/{bound}"
        with watched(held):
            pending = SAVES[kind](models, out, wait=False, host_bytes=bound)
        trained(models)
        written = pending.wait()
        assert pending.wait(1.0) is written
        assert pending.is_done
        assert pending.folder == Path(out)
        if content(out, kind, dims).differences(truth):
            found["problems"].append(f"{bound}: other weights")
        if bound and max(held, default=0) > max(bound, largest * (1 if kind == "dist" else dims.tp)):
            found["problems"].append(f"{bound}: {max(held)} bytes were held")
    pending = SAVES[kind](models, f"{folder}/None", wait=False)  # the changed weights; nobody waits
    SAVES[kind](models, f"{folder}/other")
    assert pending.is_done
    assert not background._pending
    if not content(f"{folder}/None", kind, dims).differences(truth):
        found["problems"].append("the second save is not there")
    found["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("save to")]
    return found


@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize("dims", [mb.ParallelDims(tp=2, pp=2, ep=2, sp=True), mb.ParallelDims(ep=2)], ids=str)
def test_a_save_has_the_weights_at_its_call(dims, kind, tmp_path):
    for rank in pool.run(dims.pp * 2, save_and_go_on, dims, str(tmp_path), kind):
        assert rank["problems"] == []
        assert rank["threads"] == []
    for folder in tmp_path.iterdir():
        assert not [name for name in os.listdir(folder) if name.startswith(".mcore")]


@contextlib.contextmanager
def gated() -> Any:
    """The thread gets no copy before the event is set."""
    gate, following = threading.Event(), HostCopies._next

    def late(self: HostCopies) -> Any:
        assert gate.wait(60)
        return following(self)

    with mock.patch.object(HostCopies, "_next", late):
        yield gate


@pytest.mark.parametrize("mistake", [False, True], ids=["", "no copies are made"])
@pytest.mark.parametrize("kind", SAVES)
def test_a_thread_that_comes_late_finds_the_weights_of_the_call(kind, mistake, tmp_path):
    """In a folder of HF or ``peft`` come the tensors of an export, which are copies already."""
    put, dims = HostCopies.put, mb.ParallelDims()

    def uncopied(self: HostCopies, name: str, tensor: torch.Tensor, **_: Any) -> None:
        put(self, name, tensor, own=True)

    with fake_mesh.rank_of(dims, 0, 1), gated() as gate:
        models = built(dims, kind)
        truth = now_in(models, kind)
        with mock.patch.object(HostCopies, "put", uncopied if mistake else put):
            pending = SAVES[kind](models, tmp_path / "out", wait=False)
        trained(models)
        with pytest.raises(TimeoutError, match="still goes on"):
            pending.wait(0.01)
        gate.set()
        pending.wait()
        is_same = not content(str(tmp_path / "out"), kind, dims).differences(truth)
    assert is_same == (not mistake or kind != "dist")


# errors ---------------------------------------------------------------------------------------------------------------


def failing(kind: str) -> Any:
    """The disk of this rank is full."""
    home: Any = dist_writer._CopyWriter if kind == "dist" else safetensors.SafetensorsWriter
    return mock.patch.object(home, "write", side_effect=OSError(28, "No space left on device"))


def save_where_one_cannot(folder: str, kind: str) -> list[str]:
    """Runs in a worker: the errors of a save in the background, by each way to get them."""
    dims = mb.ParallelDims(tp=2, sp=True)
    models, said = built(dims, kind), []
    SAVES[kind](models, folder)
    trained(models)
    before = content(folder, kind, dims)
    for ask in ("wait", "the next save"):
        with failing(kind) if dist.get_rank() == LAST[kind] else contextlib.nullcontext():
            try:
                pending = SAVES[kind](models, folder, wait=False)
                pending._thread.join()
            except CheckpointError as error:  # a thread may fail before all copies are made
                said.append(f"{ask}: {error}")
                continue
        get = pending.wait if ask == "wait" else partial(SAVES[kind], models, f"{folder}-next")
        with pytest.raises(CheckpointError) as caught:
            get()
        said.append(f"{ask}: {caught.value}")
    assert not content(folder, kind, dims).differences(before)
    assert not os.path.exists(f"{folder}-next")
    pending = SAVES[kind](models, folder, wait=False)
    pending.wait()
    assert content(folder, kind, dims).differences(before)
    with failing_export(dist.get_rank() == LAST[kind]), pytest.raises(CheckpointError, match="out of memory"):
        SAVES[kind](models, folder, wait=False)
    assert not background._pending
    return said


def failing_export(fails: bool) -> Any:
    """A rank that fails while it copies."""
    put = HostCopies.put if not fails else mock.Mock(side_effect=MemoryError("out of memory"))
    return mock.patch.object(HostCopies, "put", put)


@pytest.mark.parametrize("kind", SAVES)
def test_errors_of_the_thread_are_raised_on_all_ranks_and_leave_the_folder(kind, tmp_path):
    for said in pool.run(2, save_where_one_cannot, str(tmp_path / "out"), kind):
        assert len(said) == 2
        assert all(f"rank {LAST[kind]}" in each and "No space left on device" in each for each in said), said


# crashes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize("exists", [True, False], ids=["over another", "new"])
def test_a_save_that_is_killed_leaves_the_old_folder_or_none(kind, exists, tmp_path):
    out = tmp_path / "out"
    with fake_mesh.rank_of(mb.ParallelDims(), 0, 1):
        models = built(mb.ParallelDims(), kind)
        if exists:
            SAVES[kind](models, out)
            before = content(str(out), kind, mb.ParallelDims())
        child = os.fork()
        if not child:
            stuck(kind, models, out)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert any(name.startswith(".mcore_bridge.") for name in os.listdir(out)), "the thread had not begun"
        if exists:
            assert not content(str(out), kind, mb.ParallelDims()).differences(before)
        else:
            with pytest.raises(CheckpointError):
                content(str(out), kind, mb.ParallelDims())
        SAVES[kind](models, out, wait=False).wait()
        assert not content(str(out), kind, mb.ParallelDims()).differences(now_in(models, kind))
    assert not [name for name in os.listdir(out) if name.startswith(".mcore")]


def stuck(kind: str, models: Any, out: Path) -> None:
    """In a child: save, and be killed when the thread has written all tensors and is about to commit."""
    try:
        trained(models)
        begun = threading.Event()

        def wait_for_ever(*arguments: object, **options: object) -> None:
            begun.set()
            threading.Event().wait()

        with mock.patch(f"{HOMES[kind]}.commit", wait_for_ever):
            SAVES[kind](models, out, wait=False)
            begun.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)


def leave(folder: str, kind: str) -> None:
    """Runs in a process of its own, which ends without waiting for its save."""
    store = dist.FileStore(f"{folder}.store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    models = built(mb.ParallelDims(), kind)
    SAVES[kind](models, folder, wait=False, **({"slot_bytes": 1000} if kind != "dist" else {}))


@pytest.mark.parametrize("kind", SAVES)
def test_a_process_that_ends_finishes_its_save(kind, tmp_path):
    (process,) = pool.started(leave, [(str(tmp_path / "out"), kind)])
    process.join()
    assert process.exitcode == 0
    with fake_mesh.rank_of(mb.ParallelDims(), 0, 1):
        truth = now_in(built(mb.ParallelDims(), kind), kind)
        assert not content(str(tmp_path / "out"), kind, mb.ParallelDims()).differences(truth)
