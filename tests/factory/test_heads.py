"""Models without a head, such as embedding models: hidden states as in transformers, and files with equal names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

import mcore_bridge as mb
from mcore_bridge.convert.convert import convert
from mcore_bridge.errors import CheckpointError
from tests.support import fake_mesh, pool, stepping
from tests.support.command import run
from tests.support.conversions import assert_exact, quiet, written
from tests.support.strategies import random_state, tiny

MESHES = [mb.ParallelDims(tp=2, sp=True), mb.ParallelDims(pp=2), mb.ParallelDims(cp=2), mb.ParallelDims(pp=2, vp=2)]
MASK = torch.tensor([[1] * 12, [0] * 5 + [1] * 7])
HEAD = "lm_head.weight"


def config(tied: bool) -> Any:
    return tiny("qwen3", vocab_size=97, tie_word_embeddings=tied, architectures=["Qwen3ForCausalLM"])


def without_head(hf: Any, *, bare: bool) -> dict[str, Tensor]:
    state = {name: tensor for name, tensor in random_state(hf).items() if name != HEAD}
    return {name.removeprefix("model.") if bare else name: tensor for name, tensor in state.items()}


def token_ids() -> Tensor:
    return torch.randint(0, 97, MASK.shape, generator=torch.Generator().manual_seed(1))


def hidden_on(folder: str, saved: str) -> list[tuple[Tensor, Tensor]]:
    """The hidden states of this rank on each mesh, packed and in rows; and the saved files of the last mesh."""
    found = []
    for dims in MESHES:
        with stepping.mesh(dims):
            models = mb.build_model(folder, dims=dims, dtype=torch.float32, device="cpu", head="none")
            outputs = [mb.forward(models, token_ids(), MASK, packed=packed).hidden for packed in (True, False)]
            loss = lambda out, rows: out.hidden.square().mean()  # noqa: E731
            learnt = mb.forward(models, token_ids(), MASK, loss=loss, micro_batch_size=1).hidden
            assert all(parameter.grad is not None for model in models for parameter in model.parameters())
            assert torch.equal(learnt, outputs[0]) or (learnt - outputs[0]).abs().max() < 1e-5
            mb.save_hf_checkpoint(models, saved)
            found.append(tuple(outputs))
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_hidden_states_are_those_of_transformers_and_the_files_come_back(tied: bool, tmp_path: Path) -> None:
    hf = config(tied)
    state = without_head(hf, bare=True)
    source = written({name: tensor.clone() for name, tensor in state.items()}, hf, tmp_path / "source")
    model = AutoModel.from_pretrained(source, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        rows = [model(ids[mask == 1][None]).last_hidden_state[0] for ids, mask in zip(token_ids(), MASK, strict=True)]
    for found in pool.run(2, hidden_on, str(source), str(tmp_path / "saved")):
        for ours in (each for outputs in found for each in outputs):
            assert not ours[MASK == 0].any()
            for own, theirs, mask in zip(ours, rows, MASK, strict=True):
                assert (own[mask == 1] - theirs).abs().max() < 2e-5 * theirs.std() * 10
    assert_exact(tmp_path / "saved", state)
    kept, made = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "saved"))
    assert all(made[name] == kept[name] for name in ("architectures", "tie_word_embeddings", "num_hidden_layers"))


def test_files_without_a_head_pass_through_every_command(tmp_path: Path) -> None:
    """The default head is refused, with advice that can be followed."""
    hf = config(tied=False)
    for bare in (True, False):
        state = without_head(hf, bare=bare)
        source = written({name: each.clone() for name, each in state.items()}, hf, tmp_path / f"hf{bare}")
        for rank_files, name in ((None, "dist"), ("torch", "torch")):
            to = [] if rank_files is None else ["--to", "torch", "--tp", 2, "--backend", "torch"]
            result = run("convert", source, tmp_path / f"{name}{bare}", *to)
            assert result.exit_code == 0, result.output
            convert(tmp_path / f"{name}{bare}", tmp_path / f"{name}{bare}-back", hf=source, on_event=quiet)
            assert_exact(tmp_path / f"{name}{bare}-back", state)
    result = run("verify", source, "--tp", 2, "--save", tmp_path / "saved")
    assert result.exit_code == 0, result.output
    assert_exact(tmp_path / "saved", state)
    result = run("plan", source, "--pp", 2, "--layout", "balanced", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["parameters"] == sum(tensor.numel() for tensor in state.values())
    with fake_mesh.rank_of(mb.ParallelDims(), 0, 1), pytest.raises(CheckpointError, match='with head="none"'):
        mb.build_model(source, dims=mb.ParallelDims(), device="cpu")


def test_a_causal_lm_without_its_head_is_saved_as_the_class_without_one(tmp_path: Path) -> None:
    hf = config(tied=False)
    source = written({name: each.clone() for name, each in random_state(hf).items()}, hf, tmp_path / "hf")
    with fake_mesh.rank_of(mb.ParallelDims(), 0, 1):
        models = mb.build_model(source, dims=mb.ParallelDims(), dtype=torch.float32, device="cpu", head="none")
        mb.save_hf_checkpoint(models, tmp_path / "saved")
        mb.save_checkpoint(models, tmp_path / "dist")
        mb.add_adapters(models, rank=2, alpha=4, targets=["q_proj"])
        mb.save_checkpoint(models, tmp_path / "adapted")
        before = {name: tensor.clone() for name, tensor in models[0].named_parameters()}
        for parameter in models[0].parameters():
            parameter.data.zero_()
        mb.load_checkpoint(models, tmp_path / "adapted")
        assert all(torch.equal(tensor, before[name]) for name, tensor in models[0].named_parameters())
    convert(tmp_path / "dist", tmp_path / "back", on_event=quiet)
    for folder in (tmp_path / "saved", tmp_path / "back"):
        assert_exact(folder, without_head(hf, bare=False))
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3Model"]


def test_a_classifier_without_its_head_is_saved_as_the_class_without_one(tmp_path: Path) -> None:
    """transformers would draw the head that the folder lacks. Without ``head=`` the load says what to pass."""
    hf = tiny("qwen3", num_labels=3, architectures=["Qwen3ForSequenceClassification"])
    state = without_head(hf, bare=False)
    whole = {name: tensor.clone() for name, tensor in state.items()} | {"score.weight": torch.randn(3, hf.hidden_size)}
    source = written(whole, hf, tmp_path / "hf")
    with fake_mesh.rank_of(mb.ParallelDims(), 0, 1):
        options: Any = {"dims": mb.ParallelDims(), "dtype": torch.float32, "device": "cpu"}
        with pytest.raises(CheckpointError, match='with head="classification", the head that the source has'):
            mb.build_model(source, **options)
        with pytest.raises(CheckpointError, match=r"shape \(3, 48\).*takes \(1, 48\); build with the head= of this"):
            mb.build_model(source, head="value", **options)
        mb.save_hf_checkpoint(mb.build_model(source, head="none", **options), tmp_path / "saved")
    convert(source, tmp_path / "dist", on_event=quiet)
    convert(tmp_path / "dist", tmp_path / "back", hf=source, on_event=quiet)
    for folder in (tmp_path / "saved", tmp_path / "back"):
        assert_exact(folder, state)
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3Model"]


def products_of_head(tied: bool, packed: bool, trains: bool) -> set[str]:
    """The kinds of products with the whole vocabulary in the backward of a step."""
    dims = mb.ParallelDims()
    with stepping.mesh(dims):
        (model,) = mb.build_model(config(tied), dims=dims, device="cpu", dtype=torch.float32, load_weights=False)
        model.requires_grad_(trains)
        model.decoder.layers[0].requires_grad_(True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            mb.forward(model, token_ids(), MASK, packed=packed, loss=lambda outputs, _: outputs.log_probs.sum())
    vocab = model.vocab_size
    events = profile.key_averages(group_by_input_shape=True)
    return {event.key for event in events if any(vocab in shape for shape in event.input_shapes)} & {
        "aten::mm",
        "aten::bmm",
    }


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_goes_back_through_a_head_as_one_product(tied: bool, packed: bool, trains: bool) -> None:
    """A product for each token would read the whole weight for each token."""
    assert pool.run(1, products_of_head, tied, packed, trains) == [{"aten::mm"}]
