"""A tensor that a checkpoint holds twice is compared with its copy before the copy is ignored.

For a head beside a tied embedding, the reference is the model that the installed transformers makes of the folder.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import mcore_bridge as mb
from mcore_bridge.architecture import architectures
from mcore_bridge.commands.plan.tables import plan
from mcore_bridge.commands.verify.logits import forward
from mcore_bridge.commands.verify.verify import verify
from mcore_bridge.convert.convert import convert
from mcore_bridge.convert.rank_files.rank_folder import iter_mg_weights
from mcore_bridge.errors import CheckpointError
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint
from mcore_bridge.rules.mapping import matches, pattern_of
from mcore_bridge.trainers.rlinf.convertor import convert_hf_to_mg
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.load import load_hf_weights
from mcore_bridge.weights.provenance import provenance_of
from mcore_bridge.weights.source.source import Source
from mcore_bridge.weights.source.tied_tensors import are_equal, ties_any_head
from tests import zoo
from tests.support import fake_mesh, mtp_checkpoints, pool
from tests.support.command import ranks_in_pool
from tests.support.conversions import quiet
from tests.support.strategies import on_disk, random_state, save, tiny
from tests.support.twins import TWINS

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HF = tiny("llama", tie_word_embeddings=True, vocab_size=97, num_hidden_layers=2)
ONE, MESH = mb.ParallelDims(), mb.ParallelDims(tp=2, pp=2)
OTHER = random_state(tiny("llama", vocab_size=97, num_hidden_layers=2), seed=1)[HEAD]
BATCH = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
KINDS = ("differs", "equal", "none", "alone")
"""The head in a file differs from the embedding, equals it, is missing, or comes without an embedding."""
LOADED = [kind for kind in KINDS if kind != "alone" or not ties_any_head()]
OWN_HEAD = not ties_any_head()


def files(kind: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint with a tied config."""
    state = random_state(HF)
    heads = {"differs": OTHER, "equal": state[EMBEDDING].clone(), "none": None, "alone": state[EMBEDDING]}
    if kind == "alone":
        del state[EMBEDDING]
    return state | ({} if heads[kind] is None else {HEAD: heads[kind]})


def exported(kind: str) -> dict[str, Tensor]:
    """The written tensors: the embedding and, if the model has a separate one, the head."""
    state = {EMBEDDING: random_state(HF)[EMBEDDING], **files(kind)}
    return state if kind == "differs" and OWN_HEAD else {name: each for name, each in state.items() if name != HEAD}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in found.items():
        save(files(kind), HF, folder)
    return found


def theirs(folder: Path) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(BATCH).logits


def near(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def life(folders: dict[str, Path], dims: mb.ParallelDims) -> dict[str, tuple[Any, ...]]:
    """Runs in a worker: logits on the last stage, the export, the names of the manifest; and a folder is saved."""
    dims.initialize(device="cpu")
    found = {}
    for kind, folder in folders.items():
        chunks = mb.build_model(folder, dims=dims, dtype=torch.float32, device="cpu")
        state = mb.to_hf_state_dict(chunks)
        specs = mb.save_hf_checkpoint(chunks, folder / f"saved-{dims.tp}")
        found[kind] = forward(chunks, dims, BATCH), state, [spec.name for spec in specs]
    return found


@pytest.mark.parametrize("dims", [ONE, MESH], ids=str)
def test_a_model_has_the_head_that_transformers_gives_it_and_so_has_what_is_saved(folders, dims):
    chosen = {kind: folders[kind] for kind in LOADED}
    ranks = pool.run(dims.tp * dims.pp, life, chosen, dims)
    for kind, folder in chosen.items():
        logits, state, names = ranks[-1][kind]
        saved = folder / f"saved-{dims.tp}"
        assert near(logits, theirs(folder)), kind
        assert near(logits, theirs(saved)), kind
        for found in (state, load_file(next(saved.glob("*.safetensors"))), *(rank[kind][1] for rank in ranks)):
            assert found.keys() == exported(kind).keys() == set(names), kind
            assert all(torch.equal(found[name], each) for name, each in exported(kind).items()), kind
        assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is (HEAD not in names)


def on_every_rank(source: Any, **arguments: Any) -> list[Any]:
    """The report or error of a load, on each rank of a mesh that was built from a tied config without weights."""
    said = []

    def load(chunks: list[Any]) -> None:
        try:
            said.append(load_hf_weights(chunks, source(), **arguments))
        except CheckpointError as error:
            said.append(str(error))

    held = fake_mesh.build_everywhere(HF, MESH, load, dtype=torch.float32)
    if all(not isinstance(each, str) for each in said):
        state = fake_mesh.export(held)
        assert state.keys() == {EMBEDDING, *files("none")}
        assert torch.equal(state[EMBEDDING], random_state(HF)[EMBEDDING])
    return said


def sources(kind: str, folder: Path) -> dict[str, Any]:
    state = files(kind)
    pairs = {"pairs": list(state.items()), "pairs, backwards": [*state.items()][::-1]}
    whole = {"folder": folder, "mapping": state, "another config": folder}
    return {name: (lambda each=each: each) for name, each in (whole | pairs).items()}


@pytest.mark.skipif(ties_any_head(), reason="transformers 4 takes no head of a tied model")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_was_built_tied_takes_an_equal_head_and_refuses_another(kind, folders):
    for name, source in sources(kind, folders[kind]).items():
        said = on_every_rank(source, hf=folders["none"] if name == "another config" else None)
        if kind == "differs":
            refused = [each for each in said if isinstance(each, str)]
            assert len(refused) == 4, name
            assert all("lm_head.weight differs from model.embed_tokens.weight" in each for each in refused)
            assert all("set tie_word_embeddings=False" in each for each in refused)
        else:
            assert [each.ignored for each in said] == [(HEAD,) if kind == "equal" else ()] * 4, name


@pytest.mark.skipif(ties_any_head(), reason="transformers 4 takes no head of a tied model")
def test_a_head_alone_is_there_once_and_compared_with_nothing():
    """A NaN in the head equals no value, not even NaN."""
    state = files("alone")
    state[HEAD][0, 0] = torch.nan
    found = Source(state).for_model(provenance_of(HF).mapping(tied=True))
    assert HEAD not in found
    assert len([*found]) == len(found) == len(state)
    with fake_mesh.rank_of(ONE, 0, 1):
        mb.build_model(HF, dims=ONE, dtype=torch.float32, device="cpu", load_weights=state)


@pytest.mark.skipif(not ties_any_head(), reason="transformers 5 looks at the head")
def test_with_transformers_4_a_tied_model_leaves_out_any_head(folders, caplog):
    with caplog.at_level(logging.WARNING, logger="mcore_bridge"):
        assert make_blueprint(folders["differs"], BuildOptions(dims=ONE, dtype=torch.float32)).hf.tie_word_embeddings
    assert [each.ignored for each in on_every_rank(lambda: folders["differs"])] == [(HEAD,)] * 4
    assert all("1 tensor missing" in each for each in on_every_rank(lambda: folders["alone"])[::3])


def counts(folder: Path) -> tuple[Any, ...]:
    """The plan for a folder of many layers: parameters, tensors of an export, and cuts of the pipeline."""
    found = plan(folder, BuildOptions(dims=mb.ParallelDims(pp=2, layout="balanced")))
    return found.blueprint.dims.layout, [(spec.name, spec.shape) for spec in found.export.tensors()]


def test_a_plan_counts_the_head_and_cuts_the_pipeline_beside_it(tmp_path):
    sizes = {"vocab_size": 97 * 8, "num_hidden_layers": 8}
    told = {}
    for name, tied, head in (("tied", True, None), ("differs", True, 1), ("equal", True, 0), ("untied", False, 1)):
        hf = tiny("llama", **sizes, tie_word_embeddings=tied)
        state = random_state(tiny("llama", **sizes, tie_word_embeddings=True))
        if head is not None:
            state[HEAD] = state[EMBEDDING] + head
        (tmp_path / name).mkdir()
        save(state, hf, tmp_path / name)
        told[name] = counts(tmp_path / name)
    assert told["equal"] == told["tied"] != told["untied"]
    assert told["differs"] == told["untied" if OWN_HEAD else "tied"]


@pytest.mark.parametrize("kind", LOADED)
def test_conversions_take_the_head_along_and_say_so_in_the_config(kind, folders, tmp_path):
    convert(folders[kind], tmp_path / "dist", on_event=quiet)
    convert(tmp_path / "dist", tmp_path / "back", on_event=quiet)
    convert_hf_to_mg(str(folders[kind]), {"save_path": str(tmp_path / "files"), "pipeline_model_parallel_size": 2})
    for found in (Checkpoint(tmp_path / "back"), dict(iter_mg_weights(tmp_path / "files"))):
        assert found.keys() == exported(kind).keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in exported(kind).items())
    for folder in ("dist", "back", "files"):
        said = json.loads((tmp_path / folder / "config.json").read_text())["tie_word_embeddings"]
        assert said is (HEAD not in exported(kind)), folder


@pytest.mark.skipif(ties_any_head(), reason="transformers 4 takes no head of a tied model")
def test_conversions_by_another_config_refuse_a_head_that_it_ties(folders, tmp_path):
    with pytest.raises(CheckpointError, match=r"differs from .*set tie_word_embeddings=False"):
        convert(folders["differs"], tmp_path / "dist", hf=folders["none"], on_event=quiet)
    for pp in (1, 2):
        made = tmp_path / f"files-{pp}"
        convert_hf_to_mg(str(folders["differs"]), {"save_path": str(made), "pipeline_model_parallel_size": pp})
        with pytest.raises(CheckpointError, match=r"output_layer\.weight of .* differs from the embedding"):
            dict(iter_mg_weights(made, folders["none"]))


def test_a_save_that_keeps_a_config_says_in_it_what_the_head_is(folders, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "config.json").write_text((folders["none"] / "config.json").read_text())
    with fake_mesh.rank_of(ONE, 0, 1):
        chunks = mb.build_model(folders["differs"], dims=ONE, dtype=torch.float32, device="cpu")
        mb.save_hf_checkpoint(chunks, kept, keep=True)
    assert json.loads((kept / "config.json").read_text())["tie_word_embeddings"] is not OWN_HEAD
    assert near(theirs(kept), theirs(folders["differs"]))


@pytest.mark.parametrize("kind", LOADED)
def test_verify_holds_a_folder_against_itself(kind, folders, tmp_path, monkeypatch):
    monkeypatch.setattr("mcore_bridge.commands.verify.verify.run_ranks", ranks_in_pool)
    found = verify(
        folders[kind], BuildOptions(dims=ONE, device="cpu"), num_tokens=4, save=tmp_path / "saved", on_event=quiet
    )
    assert found.good
    assert len(found.exported) == len(exported(kind))
    assert found.unused == ((HEAD,) if HEAD in {*files(kind)} - {*exported(kind)} and kind != "alone" else ())


def test_tensors_are_compared_in_pieces_up_to_the_first_that_differs(tmp_path, monkeypatch):
    monkeypatch.setattr("mcore_bridge.weights.source.tied_tensors._PIECE_BYTES", 64)
    whole = torch.arange(40.0).view(10, 4)
    last, first = whole.clone(), whole.clone()
    last[-1, -1], first[0, 0] = -1, -1
    state = {"whole": whole, "same": whole.to(torch.bfloat16), "last": last, "first": first, "short": whole[:9]}
    state = {name: tensor.clone() for name, tensor in state.items()}
    save_file(state, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    file, read = checkpoint.files["whole"], []
    monkeypatch.setattr(file, "read", lambda *each: (read.append(each), type(file).read(file, *each))[1])
    for other, num_reads in (("same", 10), ("last", 10), ("first", 2), ("short", 0)):
        for tensors in (state, checkpoint, checkpoint):
            assert are_equal(Source(tensors), "whole", other) == (other == "same")
        assert len(read) == num_reads, "a process compares the tensors of files once"
        read.clear()


# layers for multi-token prediction ------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_what_mtp_layers_repeat_must_be_the_same(copy, tmp_path):
    hf = mtp_checkpoints.config("glm4_moe")
    state = mtp_checkpoints.published(hf)
    name = f"model.layers.{hf.num_hidden_layers}.{copy}.weight"
    state[name][3, 5] += 1
    save(state, hf, tmp_path)
    (tmp_path / "out").mkdir()
    with fake_mesh.rank_of(ONE, 0, 1):
        for number in (1, 0):
            arguments = {"dims": ONE, "dtype": torch.float32, "device": "cpu", "overrides": {"mtp_num_layers": number}}
            for source in (True, state, [*state.items()], [*state.items()][::-1]):
                if number == 0:
                    mb.build_model(tmp_path, load_weights=source, **arguments)
                    continue
                with pytest.raises(CheckpointError, match=f"{name} differs from .*build without MTP layers"):
                    mb.build_model(tmp_path, load_weights=source, **arguments)
    with pytest.raises(CheckpointError, match=f"{name} differs from"):
        convert(tmp_path, tmp_path / "out" / "dist", num_mtp_layers=1, on_event=quiet)


def test_a_tied_model_writes_what_its_mtp_layers_repeat():
    hf = mtp_checkpoints.config("glm4_moe")
    state = mtp_checkpoints.published(hf)
    del state[HEAD]
    hf.tie_word_embeddings = True
    state[f"model.layers.{hf.num_hidden_layers}.shared_head.head.weight"] = state[EMBEDDING].clone()
    overrides = {"mtp_num_layers": 1}
    held = fake_mesh.build_everywhere(
        *(hf, MESH, lambda chunks: load_hf_weights(chunks, state)), dtype=torch.float32, overrides=overrides
    )
    found = fake_mesh.export(held)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


# what is on a list of things to ignore --------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", sorted({case.model_type for case in zoo.cases().values()}))
def test_nothing_is_ignored_that_transformers_would_load(model_type):
    """Each ignored name either follows from the config, or is also on transformers' list of ignored names."""
    hf = next(case.hf for case in zoo.cases().values() if case.model_type == model_type)
    hf = TWINS[model_type].config(hf) if model_type in TWINS else hf
    with init_empty_weights(include_buffers=model_type != "apertus"):  # it reads numbers of its buffers
        model = AutoModelForCausalLM.from_config(hf)
    ignored = architectures()[model_type].ignored
    ruled = {name for rule in architectures()[model_type].rules(hf) for name in rule.hf}  # used if a layer has it
    held = (name for name in on_disk(model, model.state_dict()) if pattern_of(name) not in ruled)
    assert not [name for name in held if matches(name, ignored)]
    for pattern in {*ignored} - {"*.rotary_emb.inv_freq"} - ruled if model_type not in TWINS else ():
        listed = model._keys_to_ignore_on_load_unexpected or model.model._keys_to_ignore_on_load_unexpected
        assert any(re.search(each, pattern.replace("*", "0.x")) for each in listed), pattern
