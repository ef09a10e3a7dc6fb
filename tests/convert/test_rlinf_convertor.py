"""RLinf's offline convertor: its files against the state of real models, its stages, and one writer at a time."""

import json
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import mcore_bridge as mb
from mcore_bridge.convert.rank_files.file import NAME
from mcore_bridge.convert.rank_files.rank_folder import iter_mg_weights
from mcore_bridge.errors import CheckpointError, ConfigError, MeshError
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.rules.names import Numbering, canonical
from mcore_bridge.trainers.rlinf.__main__ import main as run_script
from mcore_bridge.trainers.rlinf.cached_folder import FINGERPRINT
from mcore_bridge.trainers.rlinf.convertor import convert_hf_to_mg, hf_to_middle_file, middle_file_to_mg
from mcore_bridge.trainers.rlinf.convertor_settings import ConvertorSettings, read_conversion
from tests.support.rlinf_files import PLAIN, asked, name_of_this_rank, source
from tests.support.rlinf_models import LATENT, SPARSE, TIED
from tests.support.strategies import tiny
from tests.support.target_models import EXPERTS, FAMILIES, assert_gets

THREES = tiny("qwen3_moe", num_experts=6, num_experts_per_tok=2)


def saved(folder, name):
    return torch.load(folder / "release" / name / "model_optim_rng.pt", weights_only=True)


CASES = {
    "tied": (TIED, {"tp": 2, "pp": 2, "pp_stages": [3, 2]}, {"mp_rank_00_000", "mp_rank_01_001"}),
    "one rank": (TIED, {}, {"mp_rank_00"}),
    "experts": (SPARSE, {"tp": 2, "pp": 2, "ep": 2}, {"mp_rank_00_000_000", "mp_rank_01_001_001"}),
    "experts wider than all else": (SPARSE, {"tp": 2, "ep": 4}, {"mp_rank_00_000", "mp_rank_01_003"}),
    "experts in threes": (THREES, {"tp": 2, "ep": 3}, {"mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_002"}),
    "experts that are cut": (SPARSE, {"tp": 4, "ep": 2, "etp": 2}, {"mp_rank_00_000", "mp_rank_03_001"}),
    "latent": (LATENT, {"tp": 4, "pp": 3}, {"mp_rank_00_000", "mp_rank_03_002"}),
    "experts in one tensor": (FAMILIES["stacked"], {"tp": 2, "ep": 2}, {"mp_rank_00_000", "mp_rank_01_001"}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_file_is_the_state_of_its_rank_and_all_are_the_source(case, tmp_path):
    hf, sizes, some = CASES[case]
    folder, state = source(hf, tmp_path / "hf")
    block = asked(tmp_path / "mg", **sizes, **PLAIN)
    convert_hf_to_mg(folder, block)
    found = {path.name for path in (tmp_path / "mg" / "release").iterdir()}
    assert some <= found
    dims = read_conversion(folder, block).dims
    seen = set()
    for rank in range(dims.smallest_world):
        with rank_of(dims, rank, dims.smallest_world):
            models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=folder)
            own = {name: t for name, t in models[0].state_dict().items() if isinstance(t, torch.Tensor)}
            seen.add(name_of_this_rank(dims))
            held = saved(tmp_path / "mg", name_of_this_rank(dims))
            assert (held.pop("iteration"), held.pop("checkpoint_version")) == (-1, 3.0)
            assert held.keys() == {"model"}
            assert_gets(dict(held["model"]), own)
    assert seen == found
    assert (tmp_path / "mg" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert all((tmp_path / "mg" / name).exists() for name in ("tokenizer.json", "tokenizer.model", "merges.txt"))
    assert_gets(dict(iter_mg_weights(tmp_path / "mg", folder)), state)


@pytest.mark.parametrize("hf", [SPARSE, LATENT, TIED], ids=["gqa", "latent", "dense"])
def test_names_are_those_of_transformer_engine(hf, tmp_path):
    folder, state = source(hf, tmp_path / "hf", torch.bfloat16)
    ep = 1 if hf is TIED else 2
    block = asked(tmp_path / "mg", ep=ep, grouped_gemm="te")
    convert_hf_to_mg(folder, block)
    for rank in range(ep):
        model = saved(tmp_path / "mg", "mp_rank_00" + (f"_{rank:03d}" if ep > 1 else ""))["model"]
        names = [name for name in model if not name.endswith("._extra_state")]
        experts = range(4 * rank, 4 * rank + 4)
        numbering = Numbering(tuple(range(hf.num_hidden_layers)), tuple(experts))
        found = {canonical(name, numbering) for name in names}
        assert len(found) == len(names)
        fused = "self_attention.linear_kv_up_proj" if hf is LATENT else "self_attention.linear_qkv"
        assert f"decoder.layers.0.{fused}.layer_norm_weight" in model
        assert f"decoder.layers.0.{fused}._extra_state" in model
        assert "decoder.final_layernorm._extra_state" in model
        assert not any(name.endswith("router._extra_state") for name in model)
        if ep > 1:
            assert "decoder.layers.1.mlp.experts.linear_fc1.weight3" in model
            assert "decoder.layers.1.mlp.experts.linear_fc1._extra_state" in model
            assert "decoder.layers.1.pre_mlp_layernorm.weight" in model
        assert model["decoder.final_layernorm.weight"].dtype == torch.bfloat16
        filler = model["decoder.final_layernorm._extra_state"]
        assert filler.dtype == torch.uint8
    assert_gets(dict(iter_mg_weights(tmp_path / "mg", folder)), state)


@pytest.mark.parametrize(("asks", "wanted"), [("none", None), ("tensor_0_dim", torch.tensor([]))])
def test_what_stands_for_an_extra_state(asks, wanted, tmp_path):
    folder, _ = source(TIED, tmp_path / "hf")
    convert_hf_to_mg(folder, asked(tmp_path / "mg", te_ln_add_extra_state=asks))
    found = saved(tmp_path / "mg", "mp_rank_00")["model"]["decoder.final_layernorm._extra_state"]
    assert found is None if wanted is None else torch.equal(found, wanted)


@pytest.mark.parametrize("case", ["experts", "tied", "experts in one tensor"])
def test_the_two_stages_write_what_both_at_once_do(case, tmp_path):
    hf, sizes, _ = CASES[case]
    folder, _ = source(hf, tmp_path / "hf")
    block = asked(tmp_path / "once", **sizes)
    convert_hf_to_mg(folder, block)
    second = replace(read_conversion(folder, block), load_path=str(tmp_path / "middle"), save_path=str(tmp_path / "mg"))
    hf_to_middle_file(replace(second, load_path=folder, save_path=str(tmp_path / "middle")))
    middle = {path.stem for path in (tmp_path / "middle").glob("*.safetensors")}
    assert middle == {"pre", "post", *map(str, range(hf.num_hidden_layers))}
    assert load_file(tmp_path / "middle" / "pre.safetensors").keys() == {"embedding.word_embeddings.weight"}
    middle_file_to_mg(second)
    for path in (tmp_path / "once" / "release").iterdir():
        one, other = saved(tmp_path / "once", path.name)["model"], saved(tmp_path / "mg", path.name)["model"]
        assert_gets(dict(one), dict(other))
    with pytest.raises(CheckpointError, match="both source and target"):
        middle_file_to_mg(replace(second, save_path=second.load_path))


def test_a_config_of_rlinf_serves_as_well(tmp_path):
    folder, _ = source(TIED, tmp_path / "hf")
    theirs = SimpleNamespace(load_path=folder, save_path=str(tmp_path / "middle"), schedular="1f1b", pp_stages=None)
    hf_to_middle_file(theirs)
    theirs = SimpleNamespace(
        load_path=str(tmp_path / "middle"), save_path=str(tmp_path / "mg"), tp_size=2, pp_stages=[5]
    )
    middle_file_to_mg(theirs)
    assert len(list((tmp_path / "mg" / "release").iterdir())) == 2
    with pytest.raises(ConfigError, match="schedular must be '1f1b'"):
        hf_to_middle_file(SimpleNamespace(schedular="dualpipev"))


OF_RLINF = {  # RLinf reads some sizes from the model's name: it requires the layers, and takes the number of experts
    "dense": (tiny("qwen2", vocab_size=96), "Qwen2.5-7B", {"pp": 2}),
    "experts": (tiny("qwen3_moe", **EXPERTS | {"num_experts": 128}, vocab_size=96), "Qwen3-2.5B-A1B", {"ep": 2}),
}


@pytest.mark.parametrize("grouped_gemm", [None, "te"])
@pytest.mark.parametrize("case", OF_RLINF)
def test_the_files_are_those_of_the_installed_rlinf(case, grouped_gemm, tmp_path):
    name = "rlinf.utils.ckpt_convertor.megatron_convertor.convert_hf_to_mg"
    theirs = pytest.importorskip(name, reason="rlinf is not installed: it needs ray and more")
    omegaconf = pytest.importorskip("omegaconf")
    hf, model, sizes = OF_RLINF[case]
    folder, _ = source(hf, tmp_path / "hf")
    more = {"model": model, "num_hidden_layers": 4, "grouped_gemm": grouped_gemm, "te_ln_linear_qkv": True, **sizes}
    more |= {"te_ln_linear_mlp_fc1": True, "te_ln_add_extra_state": "tensor_pickle_none", "process_num": 2}
    convert_hf_to_mg(folder, asked(tmp_path / "ours", tp=2, **more))
    theirs.convert_hf_to_mg(folder, omegaconf.OmegaConf.create(asked(tmp_path / "theirs", tp=2, **more)))
    names = {path.name for path in (tmp_path / "theirs" / "release").iterdir()}
    assert {path.name for path in (tmp_path / "ours" / "release").iterdir()} == names
    for name in names:
        one, other = saved(tmp_path / "ours", name), saved(tmp_path / "theirs", name)
        assert_gets(dict(one.pop("model")), dict(other.pop("model")))
        assert one == other


# who may write what when ----------------------------------------------------------------------------------------------


def test_what_was_made_of_something_else_is_not_taken(tmp_path):
    folder, state = source(TIED, tmp_path / "hf")
    block = asked(tmp_path / "mg", tp=2)
    convert_hf_to_mg(folder, block)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "mg").rglob("*")}
    convert_hf_to_mg(folder, block)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "mg").rglob("*")} == before
    with pytest.raises(CheckpointError, match=r"made from something else: asked was .*'tp_size': 2"):
        convert_hf_to_mg(folder, asked(tmp_path / "mg"))
    save_file(state, tmp_path / "hf" / "model-a.safetensors")
    with pytest.raises(CheckpointError, match="made from something else: files was"):
        convert_hf_to_mg(folder, block)
    (tmp_path / "mg" / FINGERPRINT).unlink()
    with pytest.raises(CheckpointError, match="must be empty or made by this convertor"):
        convert_hf_to_mg(folder, block)


def test_the_next_run_opens_no_file_of_weights(tmp_path):
    folder, _ = source(TIED, tmp_path / "hf")
    convert_hf_to_mg(folder, asked(tmp_path / "mg", tp=2))
    for path in (tmp_path / "hf").glob("*.safetensors"):  # unreadable now, with unchanged size and time
        seen = path.stat()
        path.write_bytes(bytes(seen.st_size))
        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    convert_hf_to_mg(folder, asked(tmp_path / "mg", tp=2))
    with pytest.raises(CheckpointError):
        convert_hf_to_mg(folder, asked(tmp_path / "other", tp=2))


def test_several_that_ask_at_once_get_one_folder(tmp_path, monkeypatch):
    folder, _ = source(TIED, tmp_path / "hf")
    writes, failures = [], []
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda *arguments: (writes.append(arguments[1]), save(*arguments)))

    def convert():
        try:
            convert_hf_to_mg(folder, asked(tmp_path / "mg", tp=2))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(writes) == 2


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    folder, _ = source(TIED, tmp_path / "hf")
    files, save = [], torch.save

    def full(held, path):
        files.append(path)
        if len(files) == 2:
            raise OSError("no space left on device")
        save(held, path)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(CheckpointError, match=r"cannot write to .*no space left.*it was not changed"):
            convert_hf_to_mg(folder, asked(tmp_path / "mg", tp=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mg.lock", "hf"]
    convert_hf_to_mg(folder, asked(tmp_path / "mg", tp=2))
    assert json.loads((tmp_path / "mg" / FINGERPRINT).read_text())["asked"]["tp_size"] == 2


def test_a_source_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    folder, state = source(TIED, tmp_path / "hf")
    (tmp_path / "hf" / "model-b.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing tensors"):
        convert_hf_to_mg(folder, asked(tmp_path / "mg"))
    save_file({**state, "model.other.weight": torch.zeros(1)}, tmp_path / "hf" / "model-a.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensors \['model.other.weight'\]"):
        convert_hf_to_mg(folder, asked(tmp_path / "mg"))
    assert not (tmp_path / "mg").exists()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"unknown": 1}, ConfigError, r"unknown keys \['unknown'\]"),
        ({"save_path": None}, ConfigError, "must have a save_path"),
        ({"grouped_gemm": "legacy"}, ConfigError, "grouped_gemm must be None or 'te'"),
        ({"te_ln_add_extra_state": "zeros"}, ConfigError, "te_ln_add_extra_state must be one of"),
        ({"te_ln_linear_qkv": False}, ConfigError, "must be the same"),
        ({"pipeline_model_parallel_size": 2, "pp_stages": []}, ConfigError, r"each of 2 stages, found \(\)"),
        ({"expert_tensor_parallel_size": 2}, MeshError, "to divide tp=1, found 2"),
        ({"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 3}, MeshError, "to divide tp=4, found 3"),
    ],
)
def test_what_cannot_be_written_is_refused(change, error, message, tmp_path):
    folder, _ = source(SPARSE, tmp_path / "hf")
    with pytest.raises(error, match=message):
        convert_hf_to_mg(folder, {**asked(tmp_path / "mg"), **change})


def test_a_checkpoint_that_lacks_a_file_is_named(tmp_path):
    folder, _ = source(TIED, tmp_path / "hf")
    block = asked(tmp_path / "mg", tp=2)
    convert_hf_to_mg(folder, block)
    path = tmp_path / "mg" / "release" / "mp_rank_01" / NAME
    held = torch.load(path, weights_only=True)
    del held["model"]["decoder.layers.2.mlp.linear_fc2.weight"]
    torch.save(held, path)
    with pytest.raises(
        CheckpointError, match=r"not whole.*the shards \[1\] of decoder\.layers\.2\.mlp\.linear_fc2\.weight"
    ):
        list(iter_mg_weights(tmp_path / "mg", folder))
    path.unlink()
    with pytest.raises(CheckpointError, match=r"not whole.*its files hold 96 rows of a vocabulary of 192"):
        list(iter_mg_weights(tmp_path / "mg", folder))
    assert ConvertorSettings(load_path="", save_path="").te_ln_add_extra_state == "tensor_pickle_none"


def test_its_scripts_write_the_same_files(tmp_path):
    """The scripts of the documented example: DeepSeek-R1-Distill-Qwen-1.5B at TP1 PP2, in two stages."""
    folder, _ = source(TIED, tmp_path / "hf")
    unused = ("--model", "DeepSeek-R1-Distill-Qwen-1.5B", "--use-gpu-num", "0", "--process-num", "16")
    middle = ("--load-path", folder, "--save-path", str(tmp_path / "middle"), *unused)
    run_script(("convert_hf_to_middle_file", *middle))
    paths = ("--load-path", str(tmp_path / "middle"), "--save-path", str(tmp_path / "mg"))
    sizes = ("--tp-size", "1", "--tpe-size", "1", "--ep-size", "1", "--pp-size", "2", "--pp-stages", "3", "2")
    run_script(("convert_middle_file_to_mg", *paths, *sizes, *unused))
    plain = {"te_ln_linear_qkv": False, "te_ln_linear_mlp_fc1": False, "te_ln_add_extra_state": None}
    convert_hf_to_mg(folder, asked(tmp_path / "once", pp=2, pp_stages=[3, 2], **plain))
    files = sorted(path.name for path in (tmp_path / "once" / "release").iterdir())
    assert files == ["mp_rank_00_000", "mp_rank_00_001"]
    for name in files:
        assert_gets(dict(saved(tmp_path / "mg", name)["model"]), dict(saved(tmp_path / "once", name)["model"]))
    with pytest.raises(SystemExit):
        run_script(("convert_middle_file_to_mg", *paths, "--te-ln-linear-qkv", "perhaps"))
