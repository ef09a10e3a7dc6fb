"""Loads: a missing or unexpected tensor raises, any kind of source works, and a rank reads only its part."""

import json
import os
import re
import shutil
import threading
from collections import Counter, UserDict
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import mcore_bridge as mb
from mcore_bridge.errors import CheckpointError, ConfigError, MappingError
from mcore_bridge.rules.layout import ROW
from mcore_bridge.weights.bound import bind
from mcore_bridge.weights.files.hf_folder import Checkpoint, names_in
from mcore_bridge.weights.load import load_hf_weights
from mcore_bridge.weights.manifest import Manifest
from mcore_bridge.weights.model_tensors import held_tensors
from mcore_bridge.weights.provenance import provenance_of
from mcore_bridge.weights.source.source import open_source
from tests.support import fake_mesh, memory, pool, stepping
from tests.support.failing_ranks import only_on_1
from tests.support.logs import messages_of
from tests.support.strategies import random_state, tiny

HF = tiny("qwen3", vocab_size=97, num_hidden_layers=2)
ONE = mb.ParallelDims()
NORM = "model.norm.weight"


@pytest.fixture
def state():
    return random_state(HF)


@pytest.fixture
def folder(tmp_path, state):
    """A folder of three files with an index, as transformers writes it."""
    names = list(state)
    weight_map = {}
    for index in range(3):
        file = f"model-0000{index + 1}-of-00003.safetensors"
        part = {name: state[name] for name in names[index::3]}
        save_file(part, tmp_path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    HF.save_pretrained(tmp_path)
    return tmp_path


def loaded(source, dims=ONE, hf=HF, *, dtype=torch.float32, crossing=None, **arguments):
    """The exported state, and the report of rank 0."""
    reports = []

    def load(chunks):
        reports.append(load_hf_weights(chunks, source, dtype=crossing, **arguments))

    held = fake_mesh.build_everywhere(hf, dims, load, dtype=dtype)
    return fake_mesh.export(held), reports[0]


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_from_a_folder_with_an_index(folder, state):
    assert same(loaded(folder, mb.ParallelDims(tp=2, pp=2))[0], state)


def test_from_a_folder_without_an_index(folder, state):
    (folder / "model.safetensors.index.json").unlink()
    assert same(loaded(str(folder))[0], state)


def test_from_one_file(tmp_path, state):
    assert names_in(tmp_path) == ()
    save_file(state, tmp_path / "model.safetensors")
    assert set(names_in(tmp_path)) == state.keys()
    assert same(loaded(tmp_path)[0], state)


def test_from_a_mapping_and_from_pairs_in_any_order(state):
    assert same(loaded(state)[0], state)
    bound, report = loaded(iter(reversed(state.items())))
    assert same(bound, state)
    assert report.num_tensors == len(state)


@pytest.mark.parametrize("case", ["qwen3", "gemma2"])
def test_a_base_model_without_its_head_loads(case, tmp_path):
    """Embedding models are published in this way. transformers adds the prefix of names, and so do we, also in
    exports.
    """
    hf = tiny(case, tie_word_embeddings=True, num_hidden_layers=2)
    base = AutoModel.from_config(hf, dtype=torch.float32)
    base.save_pretrained(tmp_path)
    names = names_in(tmp_path)
    assert not any(name.startswith("model.") for name in names)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    held = load_file(tmp_path / "model.safetensors")
    for source in (tmp_path, held, [*reversed(held.items())]):
        exported, report = loaded(source, mb.ParallelDims(tp=2), hf)
        assert len(exported) == report.num_tensors == len(names)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.items())


def test_pairs_that_come_twice_raise(state):
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight came twice"):
        loaded([*state.items(), ("model.norm.weight", state["model.norm.weight"])])


@pytest.mark.parametrize("kind", ["mapping", "pairs", "folder"])
@pytest.mark.parametrize("dims", [ONE, mb.ParallelDims(tp=2, pp=2)], ids=str)
def test_missing_and_unexpected_tensors_raise_with_their_names(state, tmp_path, kind, dims):
    def source(changed):
        if kind == "folder":
            save_file(changed, tmp_path / "model.safetensors")
            return tmp_path
        return changed if kind == "mapping" else list(changed.items())

    missing = dict(state)
    del missing["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(CheckpointError, match=r"1 tensor missing \['model\.layers\.0\.self_attn\.k_proj\.weight'\]"):
        loaded(source(missing), dims)
    for surplus in ("model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "visual.weight"):
        with pytest.raises(CheckpointError, match=rf"unexpected \['{re.escape(surplus)}'\]"):
            loaded(source({**state, surplus: torch.ones(4)}), dims)
    wrapped = source({f"module.{name}": tensor for name, tensor in state.items()})
    with pytest.raises(CheckpointError, match=r"All names of the source begin with 'module\.': remove this prefix"):
        loaded(wrapped, dims)


def test_not_strict_reports_what_strict_raises(state):
    surplus = {**state, "visual.weight": torch.ones(4)}
    del surplus["model.norm.weight"]
    report = []
    with fake_mesh.rank_of(ONE, 0, 1):
        chunks = mb.build_model(HF, dims=ONE, load_weights=False, device="cpu", dtype=torch.float32)
        report = load_hf_weights(chunks, surplus, strict=False)
        with pytest.raises(CheckpointError, match=r"1 tensor missing .*, 1 unexpected ") as error:
            load_hf_weights(chunks, surplus)
    assert "strict" not in str(error.value)  # a command shows the message, and has no such option
    assert error.value.__notes__ == ["load_hf_weights(strict=False) reports them instead"]
    assert report.missing == ("model.norm.weight",)
    assert report.unexpected == ("visual.weight",)


def test_nothing_is_written_when_a_folder_or_mapping_does_not_fit(state):
    state["lm_head.weight"] = torch.ones(98, 48)
    with fake_mesh.rank_of(ONE, 0, 1):
        chunks = mb.build_model(HF, dims=ONE, load_weights=False, device="cpu", dtype=torch.float32)
        before = [parameter.clone() for parameter in chunks[0].parameters()]
        with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \(98, 48\).*takes \(97, 48\)"):
            load_hf_weights(chunks, state)
        assert all(torch.equal(a, b) for a, b in zip(before, chunks[0].parameters(), strict=True))


def test_casts_only_on_request(state):
    with pytest.raises(CheckpointError, match=r"is float32 and .* bfloat16.*pass dtype=torch\.bfloat16"):
        loaded(state, dtype=torch.bfloat16)
    exported, report = loaded(state, dtype=torch.bfloat16, crossing={"*": torch.bfloat16})
    assert all(torch.equal(exported[name], state[name].to(torch.bfloat16)) for name in state)
    assert report.cast["lm_head.weight"] == "float32 -> bfloat16"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_that_a_cast_makes_infinite_are_named(state, dtype):
    with messages_of() as messages:
        loaded({**state, NORM: torch.full_like(state[NORM], 1e6)}, dtype=dtype, crossing=dtype)
    named = ["infinite in 1 tensors, such as ['decoder.final_layernorm.weight']" in message for message in messages]
    assert named == [True] * (dtype == torch.float16)


def test_a_wider_parameter_holds_every_value(state):
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    exported, report = loaded(narrow)
    assert all(torch.equal(exported[name], narrow[name].float()) for name in state)
    assert report.cast["lm_head.weight"] == "bfloat16 -> float32"


class MadeAnew(UserDict):
    """A mapping that returns another tensor when a name is read again."""

    def __init__(self, state, change):
        super().__init__(state)
        self.change, self.asked = change, Counter()

    def __getitem__(self, name):
        self.asked[name] += 1
        tensor = super().__getitem__(name)
        return self.change(tensor) if name == NORM and self.asked[name] > 1 else tensor


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda state: MadeAnew(state, lambda tensor: tensor[:1]), r"model\.norm\.weight has shape \(1,\)"),
        (lambda state: MadeAnew(state, torch.Tensor.double), r"model\.norm\.weight is float64 and .* float32"),
        (lambda state: {**state, None: state[NORM]}, "must have HF names as keys, found None"),
        (lambda state: f"/tmp/{'n' * 300}", "must be an existing folder or a repository"),
        (lambda state: 7, "expected a folder, a mapping of HF names to tensors, or an iterable of such pairs, found 7"),
        (lambda state: {**state, NORM: 7}, "model.norm.weight must be a dense torch.Tensor .*, found int: convert it"),
        (lambda state: {**state, NORM: state[NORM].to("meta")}, "found torch.strided on meta: convert it"),
        (lambda state: {**state, NORM: state[NORM].to_sparse()}, "found torch.sparse_coo on cpu: convert it"),
        (lambda state: [*{**state, NORM: None}.items()], "found NoneType: convert it"),
    ],
)
def test_what_holds_no_values_is_no_source(state, source, message):
    with pytest.raises((CheckpointError, ConfigError), match=message):
        loaded(source(state))


def builds_that_fail(folder):
    """The errors of builds in which rank 1 cannot load, and the common operations of all ranks until then."""
    dims, said = mb.ParallelDims(tp=2), []
    with stepping.mesh(dims):
        for name in ("mcore_bridge.factory.build.load_hf_weights", "mcore_bridge.weights.load.read"):
            with only_on_1(name), pytest.raises((CheckpointError, RuntimeError)) as caught:
                mb.build_model(folder, dims=dims, device="cpu", dtype=torch.float32)
            said.append(str(caught.value))
    return said


def test_all_ranks_raise_where_one_cannot_load_what_it_builds(folder):
    for found in pool.run(2, builds_that_fail, str(folder), timeout=60):
        assert all("out of memory" in text for text in found)


def test_a_model_holds_what_it_saves_as_it_is_now():
    """Names are cached between calls, until the modules have other names."""
    with fake_mesh.rank_of(ONE, 0, 1):
        (chunk,) = mb.build_model(HF, dims=ONE, load_weights=False, device="cpu", dtype=torch.float32)
    built, inner = held_tensors([chunk]).keys(), chunk.decoder.layers[0].mlp
    inner.register_buffer("scratch", torch.zeros(1), persistent=False)
    inner.register_buffer("kept", torch.zeros(1))
    for kept in (inner.kept, torch.ones(2)):
        inner.kept = kept
        held = held_tensors([chunk])
        assert held.keys() - built == {"decoder.layers.0.mlp.kept"}
        assert held["decoder.layers.0.mlp.kept"] is kept
    inner.kept = None
    assert held_tensors([chunk]).keys() == built


def test_models_are_chunks_that_are_given_once(state):
    """All functions check this."""
    with fake_mesh.rank_of(ONE, 0, 1):
        (chunk,) = mb.build_model(HF, dims=ONE, load_weights=False, device="cpu", dtype=torch.float32)
        wrapped = torch.nn.Sequential()
        wrapped.module = torch.nn.Linear(2, 2)
        for models, message in (
            ([], "no models given; expected this rank's chunks"),
            ([chunk, chunk], r"decoder\.final_layernorm\.weight is in two of the 2 chunks given"),
            (torch.nn.Linear(2, 2), "a wrapper with one at .module, found Linear: pass"),
            (wrapped, "a wrapper with one at .module, found Sequential around Linear: pass"),
        ):
            with pytest.raises(MappingError, match=message):
                load_hf_weights(models, state, hf=HF)
            with pytest.raises(MappingError, match=message):
                bind(models, provenance_of(HF))
        with pytest.raises(ConfigError, match=r"expert_format must be 'split' .*, 'fused' or None, found 'both'"):
            bind([chunk], expert_format="both")
        own = provenance_of(HF)
        norm = "decoder.final_layernorm.weight"
        rules = tuple(replace(rule, hf=(*rule.hf, "b")) if rule.mcore == norm else rule for rule in own.rules)
        bound = bind([chunk], replace(own, rules=rules))
        with pytest.raises(MappingError, match=rf"{norm}: the layout has 1 parts, and the rule names .*, 'b'\]; make"):
            bound.trace(bound.mapping.bind(norm))
        rules = tuple(replace(rule, layout=ROW) if rule.mcore == norm else rule for rule in own.rules)
        bound = bind([chunk], replace(own, rules=rules))
        with pytest.raises(
            MappingError, match=rf"{norm} does not fit its rule for \['model\.norm\.weight'\]: shards of"
        ):
            bound.trace(bound.mapping.bind(norm))


def test_meta_models_cannot_be_loaded():
    with fake_mesh.rank_of(ONE, 0, 1):
        chunks = mb.build_model(HF, dims=ONE, load_weights=False, device="meta")
        with pytest.raises(CheckpointError, match="meta device"):
            load_hf_weights(chunks, random_state(HF))


def truncate(folder):
    path = folder / "model-00002-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def truncate_header(folder):
    os.truncate(folder / "model-00002-of-00003.safetensors", 20)


def remove(folder):
    (folder / "model-00003-of-00003.safetensors").unlink()


def scramble(folder):
    path = folder / "model-00001-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"\xff" * 64 + path.read_bytes()[72:])


def promise(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.7.extra"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))


def empty(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def change_index(**changes):
    """Damage: the index says that these tensors are in those files."""

    def harm(folder):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"].update({f"model.{name}.weight": value for name, value in changes.items()})
        path.write_text(json.dumps(index))

    return harm


def write(name, data):
    """Damage: this file has these bytes."""
    return lambda folder: (folder / name).write_bytes(data)


def put(name, make):
    """Damage: this name is not a file."""

    def harm(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return harm


INDEX, SECOND = "model.safetensors.index.json", "model-00002-of-00003.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            truncate,
            rf"{SECOND} has \d+ bytes and is no complete safetensors file.*not fully covered\): it is damaged",
        ),
        (truncate_header, rf"{SECOND} has 20 bytes and is no complete safetensors file.*invalid header length\)"),
        (
            scramble,
            r"model-00001-of-00003\.safetensors has \d+ bytes and is no complete safetensors file.*invalid UTF-8",
        ),
        (write(SECOND, b""), rf"{SECOND} has 0 bytes and is no complete safetensors file.*header too small"),
        (write(SECOND, POINTER), rf"{SECOND} is a pointer of git-lfs, .* run `git lfs pull`"),
        (write(INDEX, POINTER), rf"{INDEX} is a pointer of git-lfs"),
        (put(SECOND, os.mkfifo), rf"{SECOND} is a FIFO, expected a file"),
        (put(SECOND, os.mkdir), rf"{SECOND} is a folder, expected a file"),
        (put(SECOND, lambda path: path.symlink_to("/dev/null")), rf"{SECOND} is a device, expected a file"),
        (put(SECOND, lambda path: path.symlink_to("nowhere")), rf"cannot open .*{SECOND}: No such file"),
        (put("model.safetensors", os.mkfifo), r"model\.safetensors is a FIFO, expected a file"),
        (put(INDEX, os.mkfifo), rf"{INDEX} is a FIFO, expected a file"),
        (remove, r"names files that are missing: \['model-00003-of-00003\.safetensors'\]"),
        (change_index(norm="\0.safetensors"), r"names files that are missing: \['\\x00\.safetensors'\]"),
        (write(INDEX, b"{"), rf"{INDEX} must be valid JSON, but is not"),
        (write(INDEX, b"[]"), rf"{INDEX} is damaged: expected an object with an object weight_map"),
        (write(INDEX, b'{"weight_map": []}'), rf"{INDEX} is damaged: expected an object with an object weight_map"),
        (write(INDEX, b'{"weight_map": {"\xff": "a"}}'), rf"{INDEX} must be valid JSON, .*byte 17 is not of UTF-8"),
        (write(INDEX, b"[" * 100_000), rf"{INDEX} must be valid JSON, .*nested too deep"),
        (
            write(INDEX, b'{"weight_map": {"a": "b", "a": "b"}}'),
            rf"{INDEX} must be .*found 1 twice: \['a'\]",
        ),
        (
            lambda folder: os.truncate(folder / INDEX, 1 << 30),
            rf"{INDEX} must have at most 100000000 bytes",
        ),
        (
            change_index(norm=3, a="../b.safetensors", b="/b.safetensors", c="c/b.safetensors", d="b.bin"),
            rf"{INDEX} is damaged: expected a .* for each tensor, found 5 other values \(.*norm.*: 3, .*'\.\./b\.",
        ),
        (promise, r"lists 1 tensor that the files named there lack: \['model\.layers\.7\.extra'\]"),
        (empty, r"expected \*\.safetensors files in"),
        (shutil.rmtree, r"no folder"),
    ],
)
def test_broken_folders_say_what_is_broken(folder, harm, message):
    harm(folder)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder)


def test_a_tensor_in_two_files_is_refused_unless_the_index_leaves_one_of_them_out(folder, state):
    """For example, files of two saves lie in one folder, with equal or different tensor names."""
    name, path = "model.norm.weight", folder / INDEX
    save_file({name: -state[name]}, folder / "stale.safetensors")
    assert torch.equal(Checkpoint(folder)[name], state[name])
    index = path.read_bytes()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"found 1 in two: model\.norm\.weight is in .*; remove the files"):
        Checkpoint(folder)
    path.write_bytes(index)
    listed = json.loads(index)["weight_map"]
    other = min(set(listed.values()) - {listed[name]})
    save_file({**load_file(folder / other), name: -state[name]}, folder / other)
    with pytest.raises(CheckpointError, match=r"found 1 in two: model\.norm\.weight is in .*; remove the files"):
        Checkpoint(folder)


def test_a_checkpoint_is_what_was_saved(folder, state):
    checkpoint = Checkpoint(folder)
    assert checkpoint.keys() == state.keys()
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in state.items())
    by_name = {spec.name: spec for spec in Manifest.from_folder(folder)}
    assert all(by_name[name].shape == tuple(tensor.shape) for name, tensor in state.items())


def test_a_rank_copies_only_its_own_slices(folder, state):
    total = sum(tensor.nbytes for tensor in state.values())
    shares = []
    fake_mesh.build_everywhere(
        HF,
        mb.ParallelDims(tp=2, pp=2),
        lambda chunks: shares.append((load_hf_weights(chunks, folder), chunks)),
        dtype=torch.float32,
    )
    replicated = sum(tensor.nbytes for name, tensor in state.items() if "norm" in name)
    assert sum(report.num_bytes for report, _ in shares) == total + replicated


@pytest.mark.parametrize("has_index", [True, False])
def test_a_file_is_opened_once(folder, state, monkeypatch, has_index):
    """Opening is slow on a network file system."""
    opened, open_file = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *more: (opened.append(os.fspath(path)), open_file(path, *more))[1])
    if not has_index:
        (folder / "model.safetensors.index.json").unlink()
    assert same(loaded(folder)[0], state)
    assert sorted(name for name in opened if name.endswith(".safetensors")) == [
        str(path) for path in sorted(folder.glob("*.safetensors"))
    ]


def hungry(folder, hf):
    """Bytes that a load reads from disk, and adds to resident memory, relative to this rank's share."""
    mb.ParallelDims(tp=2).initialize(device="cpu")
    models = mb.build_model(hf, dims=mb.ParallelDims(tp=2), dtype=torch.float32, device="cpu", load_weights=False)
    for parameter in models[0].parameters():
        parameter.data.fill_(1.0)  # the parameters are resident before we measure, so any growth is overhead
    before, read = memory.begin(), memory.read_from_disk()
    dist.barrier()
    mb.load_hf_weights(models, folder)
    return memory.peak() - before, memory.resident() - before, memory.read_from_disk() - read


def test_memory_and_disk_are_used_once(tmp_path):
    """A checkpoint of 92 MB, its largest tensor 12 MB, not in the page cache: pages are read once and given back."""
    hf = tiny("llama", vocab_size=8000, hidden_size=384, intermediate_size=1536, num_hidden_layers=7, head_dim=48)
    state = random_state(hf)
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    largest, total = max(tensor.nbytes for tensor in state.values()), sum(tensor.nbytes for tensor in state.values())
    assert total > 5 * largest
    costs = pool.run(2, hungry, str(tmp_path), hf)
    for peak, after, _ in costs:
        assert peak <= 2 * largest
        assert after <= largest
    read = sum(read for _, _, read in costs)
    if read:  # 0 on a file system in memory, which no disk serves
        assert 0.9 * total <= read <= 1.1 * total


def storages_stay_resizable(folder):
    """A trainer that moves its parameters away frees their memory by resizing it."""
    ONE.initialize(device="cpu")
    (model,) = mb.build_model(folder, dims=ONE, dtype=torch.float32, device="cpu", load_weights=True)
    mb.manifest(model, digests=True)
    mb.save_hf_checkpoint(model, folder / "saved")
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)


def test_no_parameter_loses_that_its_memory_can_be_given_back(folder):
    pool.run(1, storages_stay_resizable, folder)


@pytest.mark.parametrize("dims", [ONE, mb.ParallelDims(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("slot_bytes", [60, 5000])
def test_tensors_larger_than_a_slot_come_in_pieces(folder, state, dims, slot_bytes):
    assert same(loaded(folder, dims, slot_bytes=slot_bytes)[0], state)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    exported, _ = loaded(folder, dims, dtype=torch.bfloat16, slot_bytes=slot_bytes, crossing=torch.bfloat16)
    assert same(exported, half)


@pytest.mark.parametrize("slot_bytes", [100, 1 << 20])
def test_a_file_that_became_shorter_raises_and_leaves_no_thread(folder, slot_bytes):
    source = open_source(folder)
    path = folder / "model-00002-of-00003.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors has \d+ bytes, and had"):
        loaded(source, slot_bytes=slot_bytes)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging")]


def test_unknown_folders_and_names_are_config_errors():
    with pytest.raises((ConfigError, CheckpointError), match=r"nowhere"):
        mb.mapping("/nowhere/at/all")
