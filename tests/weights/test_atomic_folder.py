"""Saves to a folder: no other file is lost, and readers find either all old files or all new ones.

Savers are processes forked from this one, which has imported torch. Tests kill, stop and start them.
"""

import ctypes
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import AutoConfig

import mcore_bridge as mb
from mcore_bridge.convert.convert import convert
from mcore_bridge.errors import BridgeError, CheckpointError
from mcore_bridge.machine import start_time
from mcore_bridge.weights.files import atomic_folder, folder_lock
from mcore_bridge.weights.files.atomic_folder import require_files
from mcore_bridge.weights.files.folder_lock import LOCK, STALE, Writer
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.sources import SourceFolders
from tests.support import fake_mesh, pool
from tests.support.strategies import random_state, tiny
from tests.support.strategies import save as save_state

ROUNDS = int(os.environ.get("STRESS_ROUNDS", "20"))
"""Rounds of several savers to one folder. Try ``STRESS_ROUNDS=200 pytest tests/weights/test_atomic_folder.py -k
stress``.
"""
HF = {name: tiny("qwen3", vocab_size=97 + number, num_hidden_layers=1) for number, name in enumerate("abc")}


def built(name):
    """A model with a different vocabulary and values for each name, so that its config fits no other weights."""
    return mb.build_model(
        HF[name], dims=mb.ParallelDims(), dtype=torch.float32, device="cpu", load_weights=state_of(name)
    )


def state_of(name):
    return {key: tensor + ord(name) for key, tensor in random_state(HF[name]).items()}


def save(models, folder, **options):
    """Save with a different size of files for each model, so that names of files differ, too."""
    size = 16_000 + 3000 * models[0].config.hidden_size % 7 + models[0].vocab_size * 100
    mb.save_hf_checkpoint(models, folder, max_shard_bytes=size, **options)


@pytest.fixture(scope="module")
def convertible(tmp_path_factory):
    """A checkpoint of megatron-core that becomes model "c"."""
    folder = tmp_path_factory.mktemp("dist")
    (folder / "hf").mkdir()
    save_state(state_of("c"), HF["c"], folder / "hf")
    convert(folder / "hf", folder / "dist", on_event=lambda *event: None)
    return folder / "dist"


def converting(source, target):
    """Convert in a child of a process that is a rank already."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    convert(source, target, file_bytes=20_000, on_event=lambda *event: None)


@pytest.fixture(scope="module")
def alone(convertible):
    with fake_mesh.rank_of(mb.ParallelDims(), 0, 1):
        yield


@pytest.fixture(scope="module")
def models(alone):
    return {name: built(name) for name in HF}


@pytest.fixture(scope="module")
def digests(models, tmp_path_factory):
    """The content of each model's folder."""
    found = {}
    for name, each in models.items():
        folder = tmp_path_factory.mktemp("sample") / "out"
        save(each, folder)
        found[name] = mb.Manifest.from_folder(folder, digests=True)
    return found


def whose(folder, digests):
    """The name of the model whose files a folder holds, all of them: weights, index and config."""
    manifest = mb.Manifest.from_folder(folder, digests=True)
    (name,) = (name for name, other in digests.items() if not manifest.differences(other))
    assert AutoConfig.from_pretrained(folder).vocab_size == HF[name].vocab_size
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {path.name for path in folder.glob("*.safetensors") if path.is_file()} == set(index.values())
    return name


def forked(act):
    """Run ``act`` in a child, which writes its error to a pipe. Return the id of the child, and the pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reading)
            act()
            code = 0
        except CheckpointError as error:
            os.write(writing, str(error).encode()[:4000])
            code = 3
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def outcome(child, reading):
    """The end of a child: "saved", "killed", or its error."""
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    if os.WIFSIGNALED(status):
        return "killed"
    assert os.WEXITSTATUS(status) in (0, 3), "a saver ended with an error that is not ours"
    return said or "saved"


# a crash --------------------------------------------------------------------------------------------------------------


def crash_at(event, act, folder):
    """Run ``act`` in a child that kills itself at its n-th operation on the file system; whether it died."""

    def doomed():
        seen = itertools.count()

        def hook(name, arguments):
            on_disk = name.split(".")[0] in ("os", "shutil", "open") and str(folder.parent) in repr(arguments)
            if on_disk and next(seen) == event:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        act()

    return outcome(*forked(doomed)) == "killed"


def without(*names):
    """A file system that lacks these operations."""

    def refuse(*paths, **options):
        raise PermissionError(1, "not supported")

    for name in names:
        setattr(os, name, refuse)


@pytest.mark.parametrize(
    ("exists", "lacks"),
    [(True, ()), (False, ()), (True, ("link",)), (True, ("symlink", "link"))],
    ids=["replaced", "new", "no hard links", "no links"],
)
def test_a_crash_at_any_moment_leaves_the_old_files_or_the_new_ones(
    tmp_path, models, digests, exists, lacks, monkeypatch
):
    """Without links, neither may be there: then no reader accepts the folder as a checkpoint."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # the machine stays alive
    outcomes, step = set(), 7 if exists and not lacks else 13
    for event in itertools.count(0, step):
        target = tmp_path / f"crash-{event}" / "out"
        (target / "logs").mkdir(parents=True)
        (target / "logs" / "log").write_text("kept")
        if exists:
            save(models["a"], target)
            (target / "tokenizer.json").write_text("kept")

        def act(target=target):
            without(*lacks)
            save(models["b"], target)

        died = crash_at(event, act, target)
        if (target / "config.json").is_file() or "symlink" not in lacks:
            outcomes.add(whose(target, digests) if exists or (target / "config.json").is_file() else "nothing")
        else:
            outcomes.add("neither")
            with pytest.raises(BridgeError):
                mb.build_model(target, dims=mb.ParallelDims(), device="cpu")
        save(models["b"], target)
        assert whose(target, digests) == "b", "a later save ends what a crash left"
        assert not list(target.glob(".mcore_bridge*"))
        assert (target / "logs" / "log").read_text() == "kept"
        assert not exists or (target / "tokenizer.json").read_text() == "kept"
        shutil.rmtree(target.parent)
        if not died:
            break
    assert event > 5 * step, "the save was never interrupted"
    assert outcomes == {"a" if exists else "nothing", "b", *(["neither"] if "symlink" in lacks else [])}


def test_what_takes_the_place_of_files_is_on_disk_before(tmp_path, models, monkeypatch):
    flushed, at_commit, flush, point = set(), [], os.fsync, atomic_folder._point
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.add(os.fstat(file).st_ino), flush(file)))
    monkeypatch.setattr(
        atomic_folder, "_point", lambda *rest: (at_commit.append((rest[1], {*flushed})), point(*rest))[1]
    )
    for name in ("a", "b"):
        save(models[name], tmp_path / "out")
    found = [inodes for side, inodes in at_commit if side == "new"]
    assert found[0] == set(), "there was nothing to lose at first"
    assert {path.stat().st_ino for path in (tmp_path / "out").iterdir()} <= found[1]


# several savers -------------------------------------------------------------------------------------------------------


class Logger(threading.Thread):
    """Another process that writes to the target all the time: new files, and through an open file."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.stop, self.count = folder, threading.Event(), 0
        folder.mkdir(parents=True)
        self.open = (folder / "open").open("w")

    def run(self):
        while not self.stop.wait(0.001):
            self.open.write(f"{self.count}\n")
            (self.folder / str(self.count)).write_text(str(self.count))
            self.count += 1

    def check(self):
        self.stop.set()
        self.join()
        self.open.close()
        assert self.count > 0
        assert (self.folder / "open").read_text() == "".join(f"{number}\n" for number in range(self.count))
        assert all((self.folder / str(number)).read_text() == str(number) for number in range(self.count))


def test_stress_of_savers_that_are_killed(tmp_path, models, digests, convertible):
    """Each save becomes the whole target, or raises and names the other saver. Foreign files in the target stay."""
    draw, target, seen = random.Random(5), tmp_path / "out", {"saved": 0, "killed": 0, "refused": 0}
    logger = Logger(target / "logs")
    logger.start()
    save(models["a"], target)
    for number in range(ROUNDS):
        acts = [lambda name=name: save(models[name], target) for name in draw.sample("ab", draw.choice((1, 2)))]
        acts.append(lambda: converting(convertible, target))
        before = whose(target, digests)
        children = [forked(act) for act in draw.sample(acts, len(acts))]
        if number % 4:
            time.sleep(draw.uniform(0, 0.15) if number % 4 > 1 else 0)  # a fast save is killed, too
            os.kill(draw.choice(children)[0], signal.SIGKILL)
        outcomes = [outcome(*child) for child in children]
        after = whose(target, digests)
        assert after == before or {"saved", "killed"} & {*outcomes}
        for each in outcomes:
            seen[each if each in seen else "refused"] += 1
            assert each in seen or "process " in each or "was lost while" in each, each
    logger.check()
    assert all(seen.values()), seen
    save(models["b"], target)
    assert outcome(*forked(lambda: converting(convertible, target))) == "saved"
    assert whose(target, digests) == "c"
    assert not list(target.glob(".mcore_bridge*"))


def lock_of(folder, **changes):
    """The lock of another writer."""
    known = {"token": "0123abcd", "host": "far", "pid": 77, "machine": "another", "started": "1", "since": "yesterday"}
    (folder / LOCK).write_text(json.dumps(known | changes))
    return folder / LOCK


def test_another_writer_is_judged_by_its_process_or_by_its_last_sign_of_life(tmp_path, models, digests):
    def taken_over(lock):
        save(models["b"], tmp_path)
        assert not lock.exists()

    def refused(lock, message):
        with pytest.raises(CheckpointError, match=message):
            save(models["b"], tmp_path)
        lock.unlink()

    save(models["a"], tmp_path)
    here = {"machine": Writer().machine, "host": "here"}
    alive = {**here, "pid": os.getppid(), "started": start_time(os.getppid())}
    refused(lock_of(tmp_path, **alive), f"process {os.getppid()} on here .since yesterday. writes to .*remove .*{LOCK}")
    refused(lock_of(tmp_path), r"process 77 on far .*renewed its lock \d+ s ago.*remove .*try again when")
    (tmp_path / LOCK).write_text("{")
    refused(tmp_path / LOCK, f"{LOCK} does not name the writer of .*: remove it if no process writes there")
    (tmp_path / LOCK).write_text("{")
    threading.Timer(0.2, lock_of, (tmp_path,), alive).start()  # the writer is only slow
    refused(tmp_path / LOCK, f"process {os.getppid()} on here .since yesterday. writes to")
    assert whose(tmp_path, digests) == "a"
    taken_over(lock_of(tmp_path, **{**alive, "started": "1"}))  # another process has its id now
    taken_over(lock_of(tmp_path, **here, pid=1 << 22))
    os.utime(old := lock_of(tmp_path), (time.time() - STALE - 5,) * 2)
    taken_over(old)
    assert not list(tmp_path.glob(".mcore_bridge*"))


def test_a_writer_renews_its_lock_and_commits_nothing_without_it(tmp_path, models, digests, monkeypatch):
    """Like a writer that was suspended until another machine considered it dead."""
    save(models["a"], tmp_path)
    monkeypatch.setattr(folder_lock, "BEAT", 0.01)

    def taken(*of_rest):
        os.utime(tmp_path / LOCK, (1, 1))
        end = time.monotonic() + 60
        while (tmp_path / LOCK).stat().st_mtime == 1:
            assert time.monotonic() < end, "it was not renewed"
            time.sleep(0.01)
        lock_of(tmp_path)

    with monkeypatch.context() as patched:
        patched.setattr("mcore_bridge.weights.save._write_rest", taken)
        with pytest.raises(CheckpointError, match=r"lock .* was lost while process .*: process 77 on far .*save again"):
            save(models["b"], tmp_path)
    assert (tmp_path / LOCK).exists(), "it is the other's"
    assert whose(tmp_path, digests) == "a"


# where it is saved ----------------------------------------------------------------------------------------------------


def test_a_working_folder_stays_under_those_who_stand_in_it(tmp_path, models, digests, monkeypatch):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    for place, folder in (("run", "."), ("run/logs", ".."), ("run", os.path.join("..", "run"))):
        monkeypatch.chdir(tmp_path / place)
        before = os.stat(".").st_ino
        save(models["a"], folder)
        assert os.stat(".").st_ino == before
        assert os.getcwd() == str(tmp_path / place)
        assert whose(tmp_path / "run", digests) == "a"
    for act in (lambda: save(models["a"], ""), lambda: convert(tmp_path / "run", Path(), on_event=print)):
        with pytest.raises(CheckpointError, match=r"empty string|both source and target"):
            act()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="found the file"):
        save(models["a"], tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"cannot write to .*/file/in: .*Not a directory.*; it was not changed"):
        save(models["a"], tmp_path / "file" / "in")
    assert (tmp_path / "file").read_text() == "mine"


@contextmanager
def own_mounts(*, threads=False):
    """Mounts that only this process has, and that end with it; with ``threads``, only this thread has them."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, mounts = 0x10000000, 0x20000
    ids = os.getuid(), os.getgid()
    if libc.unshare(mounts) and (threads or libc.unshare(user | mounts)):
        raise PermissionError(ctypes.get_errno(), "user namespaces are forbidden")
    if ids[0] and not threads:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {ids[0]} 1")
        Path("/proc/self/gid_map").write_text(f"0 {ids[1]} 1")
    private = 1 << 18 | 1 << 14
    assert not libc.mount(b"none", b"/", None, private, None)
    bind = 1 << 12
    yield (
        lambda path, size=b"1g": libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, b"size=" + size),
        lambda source, path: libc.mount(os.fsencode(source), os.fsencode(path), None, bind, None),
    )


def can_mount():
    def act():
        with own_mounts():
            pass

    try:
        return outcome(*forked(act)) == "saved"
    except AssertionError:
        return False


needs_mounts = pytest.mark.skipif(not can_mount(), reason="user namespaces are forbidden here")


@needs_mounts
def test_mounts_stay_where_they_are(tmp_path, models, digests):
    """The mount is in a folder of the target, or on the target. If a file would be replaced, its mount raises
    before.
    """
    target, mine = tmp_path / "an output", tmp_path / "mine.json"  # the system writes the blank as an octal number
    (target / "logs").mkdir(parents=True)
    (tmp_path / "mounted").mkdir()
    save(models["a"], target)
    mine.write_text((target / "config.json").read_text())

    def act():
        with own_mounts() as (tmpfs, bind):
            assert not tmpfs(target / "logs")
            (target / "logs" / "log").write_text("kept")
            save(models["b"], target)
            assert whose(target, digests) == "b"
            assert (target / "logs" / "log").read_text() == "kept"
            assert os.path.ismount(target / "logs")
            assert not tmpfs(tmp_path / "mounted")
            for name in "ab":
                save(models[name], tmp_path / "mounted")
                assert whose(tmp_path / "mounted", digests) == name
            assert not bind(mine, target / "config.json")
            mine.write_text("mine")
            save(models["a"], target)

    assert "config.json is a mount point: move it away, or name another folder" in outcome(*forked(act))
    assert whose(target, digests) == "b"
    assert not list(target.glob(".mcore_bridge*"))
    assert mine.read_text() == "mine"


@needs_mounts
def test_a_conversion_to_a_disk_that_is_full_says_what_to_do(tmp_path, convertible, alone):
    target = tmp_path / "out"
    target.mkdir()

    def act():
        with own_mounts() as (tmpfs, _):
            assert not tmpfs(target, b"120k")
            converting(convertible, target)

    message = outcome(*forked(act))
    assert re.search("cannot write to .*No space left on device; solve this and run the command again", message)


# several ranks --------------------------------------------------------------------------------------------------------


def lost(folder, names):
    """A file that a rank has written is missing when all files are checked."""
    names = [*names]
    (folder / names[0]).unlink()
    require_files(folder, names)


def differing(folder, rank, what):
    """The errors of a save of two ranks that differ from each other."""
    mb.ParallelDims(tp=2).initialize(device="cpu")
    models = mb.build_model(HF["a"], dims=mb.ParallelDims(tp=2), dtype=torch.float32, device="cpu", load_weights=False)
    options, save = {}, mb.save_hf_checkpoint
    if dist.get_rank() == rank:
        folder = "" if what == "empty" else f"{folder}-of-another" if "folder" in what else folder
        changes = {"dtype": {"dtype": torch.bfloat16}, "size": {"max_shard_bytes": 0}, "wrong": {"dtype": "bf16"}}
        options = changes.get(what, {})
    if "dist" in what:
        save = mb.save_checkpoint
        options = {"common": {"iteration": 1} if dist.get_rank() == rank else None} if what == "dist" else {}

    def act():
        try:
            if what == "mount" and dist.get_rank() == rank:
                with own_mounts(threads=True) as (tmpfs, _):
                    assert not tmpfs(folder)
                    save(models, folder, **options)
            elif "lost" in what:
                with mock.patch(f"{save.__module__}.require_files", lost):  # rank 0 alone calls it
                    save(models, folder, **options)
            else:
                save(models, folder, **options)
        except CheckpointError as error:
            said.append(str(error))

    said = []
    thread = threading.Thread(target=act)  # its mounts end with it
    thread.start()
    thread.join()
    return said[0]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("empty", "^nothing was written: rank RANK of the group: .*found an empty string"),
        ("size", "rank RANK of the group: max_shard_bytes must be a whole number of at least 1, found 0"),
        ("dtype", r"expected the same dtype on every rank, found .*dtype=torch\.bfloat16"),
        ("wrong", "expected the same dtype on every rank, found .*dtype='bf16'"),
        ("folder", "rank OTHER of the group: expected the folder .* that rank 0 has made"),
        ("dist", "expected the same common on every rank"),
        ("dist folder", "rank OTHER of the group: expected the folder .* that rank 0 has made"),
        ("lost", "rank 0 of the group: 1 files that other ranks wrote are not in .*, such as model-"),
        ("dist lost", "rank 0 of the group: 1 files that other ranks wrote are not in .*, such as __"),
        pytest.param("mount", "rank OTHER of the group: expected the folder .* that rank 0", marks=needs_mounts),
    ],
)
def test_ranks_that_differ_raise_on_all_and_leave_nothing(tmp_path, what, message):
    for rank in (0, 1):
        (tmp_path / "out").mkdir(exist_ok=True)
        found = pool.run(2, differing, str(tmp_path / "out"), rank, what, timeout=60)
        assert len({each.rpartition("was not changed")[2] for each in found}) == 1
        expected = message.replace("RANK", str(rank)).replace("OTHER", "1")
        assert re.search(expected, found[0]), found[0]
        assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def test_a_reader_is_not_disturbed_by_what_a_save_has_put_there(tmp_path, models, digests):
    """While another process saves again and again, a reader that opens the folder by its index gets a complete
    folder.
    """
    target = tmp_path / "out"
    save(models["a"], target)
    child = forked(lambda: [save(models[name], target) for name in "ba" * 4])
    seen = set()
    while not os.waitid(os.P_PID, child[0], os.WEXITED | os.WNOHANG | os.WNOWAIT):
        try:
            checkpoint = Checkpoint(target)
        except CheckpointError as error:
            assert "was changed 5 times while it was opened" in str(error)  # noqa: PT017
            continue
        rows = {len(checkpoint["model.embed_tokens.weight"]), len(checkpoint["lm_head.weight"])}
        seen |= rows
        assert len(rows) == 1, "weights of two models"
    assert outcome(*child) == "saved"
    assert seen <= {HF["a"].vocab_size, HF["b"].vocab_size}


def test_a_stale_lock_that_another_process_took_first_is_no_problem(tmp_path, monkeypatch):
    """The file disappears between the check and the move."""
    dead = Writer(pid=0, started="never")
    monkeypatch.setattr(folder_lock, "_holder", lambda *_, **__: dead)
    folder_lock._take_over(tmp_path, Writer())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("fits", "inode"), [(True, "new"), (False, "new"), (False, "same")])
def test_a_folder_that_changes_while_it_is_opened_is_opened_again(fits, inode, tmp_path, monkeypatch):
    """Whether the files of two saves fit together or not, and also if the new file gets the inode of the old one."""
    hf = tiny("llama")
    save_state(random_state(hf), hf, tmp_path)
    opened, attempts = Checkpoint._open, []

    def open_while_another_saves(checkpoint):
        attempts.append(checkpoint)
        if len(attempts) == 1:
            if inode == "same":
                os.utime(tmp_path / "model.safetensors")
            else:
                shutil.copy(tmp_path / "model.safetensors", tmp_path / "new")
                (tmp_path / "new").replace(tmp_path / "model.safetensors")
            if not fits:
                raise CheckpointError("half of it is new")
        opened(checkpoint)

    monkeypatch.setattr(Checkpoint, "_open", open_while_another_saves)
    assert len(Checkpoint(tmp_path)) > 0
    assert len(attempts) == 2


def test_a_folder_that_changes_all_the_time_is_not_opened(tmp_path, monkeypatch):
    hf = tiny("llama")
    save_state(random_state(hf), hf, tmp_path)
    monkeypatch.setattr(Checkpoint, "_open", lambda checkpoint: os.utime(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match="was changed 5 times while it was opened: wait for the process that"):
        Checkpoint(tmp_path)


def test_a_working_folder_that_somebody_else_removes_is_no_problem(tmp_path, monkeypatch):
    """All is in place by then."""
    settle = atomic_folder._settle

    def settle_and_remove(update, *last):
        settle(update, *last)
        shutil.rmtree(update.home)

    monkeypatch.setattr(atomic_folder, "_settle", settle_and_remove)
    with atomic_folder.updating(tmp_path) as update:
        (update.new / "weights").write_text("new")
        atomic_folder.commit(update, SourceFolders())
    assert (tmp_path / "weights").read_text() == "new"
