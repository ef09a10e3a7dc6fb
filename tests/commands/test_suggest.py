"""``plan --gpus``: meshes that fit, their memory, and what autograd keeps of a layer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.commands.options import Batch
from mcore_bridge.commands.plan.activations import kept_by_layers
from mcore_bridge.commands.plan.suggest import suggest
from mcore_bridge.commands.plan.suggest_report import Suggestion
from mcore_bridge.config import hf
from mcore_bridge.factory.blueprint import BuildOptions
from mcore_bridge.launch.fake_rank import rank_of
from tests import zoo
from tests.support import composites
from tests.support.bounds import ONE
from tests.support.command import refused, run

BATCH = Batch(sequence=128, micro_batch=2)


def found(folder: Path, num_gpus: int, gpu_bytes: float, gpus_per_node: int = 8, **given: int) -> Any:
    return suggest(
        folder,
        num_gpus,
        BuildOptions(),
        gpu_bytes=gpu_bytes,
        gpus_per_node=gpus_per_node,
        given=given,
        batch=BATCH,
        count=100,
    )


def test_suggestions_build_fit_and_come_in_order(tmp_path: Path) -> None:
    """Every mesh of the search is suggested, refused with a reason, or too large. megatron-core builds them."""
    zoo.cases()["qwen3_moe"].hf.save_pretrained(tmp_path)
    search = found(tmp_path, 4, 1e9)
    assert search.suggestions
    assert not search.too_large
    names = [str(suggestion.mesh) for suggestion in search.suggestions]
    assert {"TP1", "TP2 SP", "PP2", "EP2", "TP2 EP4 SP"} <= {*names}
    assert "TP2 EP2 ETP2 SP" not in names  # the twin of TP2 EP4 SP
    assert all(
        any(word in refused.reason for word in ("num_attention_heads", "num_key_value_heads", "layers"))
        for refused in search.refused
    )
    sizes = [suggestion.mesh.model_size for suggestion in search.suggestions if suggestion.mesh.etp == 1]
    assert sizes == sorted(sizes)
    narrow = found(tmp_path, 4, 1e9, gpus_per_node=2).suggestions
    assert [each.mesh.ep * each.mesh.etp > 2 for each in narrow if each.mesh.etp == 1] == sorted(
        each.mesh.ep > 2 for each in narrow if each.mesh.etp == 1
    )
    assert max(each.mesh.tp for each in narrow) == 2
    sizes = [suggestion.mesh.model_size for suggestion in search.suggestions]
    for suggestion in search.suggestions:
        assert_a_rank_holds_it(suggestion, tmp_path)
    limit = sorted(suggestion.memory.total for suggestion in search.suggestions)[len(sizes) // 2]
    fewer = found(tmp_path, 4, limit)
    assert all(suggestion.memory.total <= limit for suggestion in fewer.suggestions)
    assert len(fewer.suggestions) + len(fewer.too_large) == len(sizes)
    assert {suggestion.mesh.ep for suggestion in found(tmp_path, 4, 1e9, ep=2).suggestions} == {2}
    least = min(suggestion.memory.total for suggestion in search.suggestions)
    (enough, *with_recompute) = found(tmp_path, 1, least * 1.01).enough
    assert (enough.gpus, enough.recompute) == (4, False)
    assert all(each.gpus < 4 and each.recompute for each in with_recompute)


def test_a_folder_is_read_once_and_a_composite_is_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    read_fields = hf.read_fields

    def counted(path: Path, *hook: Any) -> Any:
        reads.append(path)
        return read_fields(path, *hook)

    monkeypatch.setattr(hf, "read_fields", counted)
    whole = composites.config("qwen3_vl_moe")
    whole.save_pretrained(tmp_path / "whole")
    whole.text_config.save_pretrained(tmp_path / "text")
    searches = [found(tmp_path / name, 4, 1e9) for name in ("whole", "text")]
    assert reads == [tmp_path / "whole" / "config.json", tmp_path / "text" / "config.json"]
    ours, text = [[(each.mesh, each.memory) for each in search.suggestions] for search in searches]
    assert ours == text
    assert len(ours) > 5


def assert_a_rank_holds_it(suggestion: Suggestion, folder: Path) -> None:
    """Parameters, gradients and Adam's state of the fullest rank, summed over the built model."""
    dims, totals = suggestion.mesh, []
    for pp_rank in range(dims.pp):
        with rank_of(dims, pp_rank * (4 // dims.pp), 4):
            (model,) = mb.build_model(folder, dims=dims, dtype=torch.bfloat16, device="meta", load_weights=False)
        routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        dense = sum(p.numel() for p in model.parameters()) - routed
        held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        optimizer = 12 * dense // (dims.dp(4) * dims.cp) + 12 * routed // dims.edp(4)
        totals.append((held, 4 * (dense + routed), optimizer))
    memory = suggestion.memory
    assert (memory.parameters, memory.gradients, memory.optimizer) in totals


def test_memory_grows_as_it_must(tmp_path: Path) -> None:
    """Activations grow with tokens, and shrink with recomputation and tensor parallelism; all microbatches of 1F1B
    count.
    """
    zoo.cases()["llama"].hf.save_pretrained(tmp_path)

    def memory(batch: Batch, **given: int) -> Any:
        sizes = {"tp": 1, "pp": 1, "cp": 1, **given}
        return suggest(tmp_path, 4, BuildOptions(), gpu_bytes=1e9, given=sizes, batch=batch).suggestions[0].memory

    one, four = memory(BATCH), memory(Batch(sequence=512, micro_batch=2))
    assert (four.activations, four.logits) == (4 * one.activations, 4 * one.logits)
    assert memory(Batch(128, 2, recompute=True)).activations < one.activations
    assert memory(BATCH, tp=2).activations == one.activations // 2
    assert memory(BATCH, cp=2).activations == one.activations // 2
    assert memory(BATCH, pp=2).activations == one.activations  # half of the layers, for two microbatches


PARTS = ("parameters", "gradients", "optimizer", "activations", "logits")
LAWS = {
    "tp": ({}, 2, "<</ //"),
    "pp": ({}, 2, "<<< <="),
    "cp": ({}, 2, "==/ //"),
    "dp": ({}, 2, "==/ =="),
    "ep": ({}, 1, "<<= =="),
    "etp": ({"tp": 2, "ep": 2}, 1, "<<= =="),
}
"""For each axis: a mesh, the factor of the number of GPUs if the axis is doubled, and the change of each of ``PARTS``:
it is halved (/), becomes smaller (<) or stays equal (=). Replicas share the optimizer's state, and their number stays
equal.
"""


@pytest.mark.parametrize("axis", LAWS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_each_part_of_the_memory_is_cut_by_the_axes_that_cut_it(name: str, axis: str, tmp_path: Path) -> None:
    """Logits are the largest part, so that the fullest rank is in the last stage."""
    if name == "llama" and axis in ("ep", "etp"):
        return
    given = copy.deepcopy(zoo.cases()[name].hf)
    given.vocab_size, given.tie_word_embeddings = 2048, False
    given.save_pretrained(tmp_path)

    def memory(num_gpus: int, **sizes: int) -> list[int]:
        whole = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1}
        batch = Batch(sequence=4096, micro_batch=2)
        (suggestion,) = suggest(
            tmp_path, num_gpus, BuildOptions(), gpu_bytes=1e12, given={**whole, **sizes}, batch=batch
        ).suggestions
        return [getattr(suggestion.memory, part) for part in PARTS]

    mesh, times, laws = LAWS[axis]
    one, two = memory(8, **mesh), memory(8 * times, **(mesh if axis == "dp" else {**mesh, axis: 2}))
    for part, before, after, law in zip(PARTS, one, two, laws.replace(" ", ""), strict=True):
        close = pytest.approx(before / (2 if law == "/" else 1), rel=0.05)
        assert before > after if law == "<" else after == close, (part, law, before, after)


KEEPING = ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next", "nemotron_h", "lfm2", "kimi_linear"]


@pytest.mark.parametrize("name", KEEPING)
def test_autograd_keeps_about_as_much(name: str) -> None:
    """Modules of torch keep other tensors than fused kernels, such as factors of a norm: 0.9 to 1.9 times as much."""
    if not zoo.here([name]):
        pytest.skip("the installed transformers does not have the family")
    kept: dict[int, float] = {}
    for num_layers in (4, 8):
        given = copy.deepcopy(zoo.cases()[name].hf)
        if given.model_type == "nemotron_h":
            given.layers_block_type = (given.layers_block_type * 8)[:num_layers]
        else:
            given.num_hidden_layers = num_layers
        if getattr(given, "layer_types", None):
            given.layer_types = (given.layer_types * 8)[:num_layers]
        if given.model_type == "kimi_linear":
            given.mlp_layer_types = (given.mlp_layer_types * 8)[:num_layers]
        kept[num_layers], config = kept_elements(given)
    estimate = sum(kept_by_layers(config)[4:])
    assert 0.9 < (kept[8] - kept[4]) / estimate < 1.9


def kept_elements(config: Any, length: int = 48) -> tuple[float, Any]:
    """Elements for a token in storages that autograd keeps of one forward pass, without parameters and scores.

    The decays between the tokens of a chunk, which Kimi delta attention has for each channel, are like scores.
    """
    with rank_of(ONE, 0, 1):
        (model,) = mb.build_model(config, dims=ONE, dtype=torch.float32, device="cpu", load_weights=False)
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            is_counted = tensor.is_floating_point() and tuple(tensor.shape[-2:]) != (length, length)
            is_counted = is_counted and not (tensor.dim() == 5 and tensor.size(-3) == tensor.size(-2))
            if is_counted and storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(torch.arange(length)[None], torch.arange(length)[None], None).sum()
        return sum(storage.nbytes() for storage in storages.values()) / 4 / length, model.config


def test_the_command_prints_and_refuses(tmp_path: Path) -> None:
    zoo.cases()["qwen3"].hf.save_pretrained(tmp_path)
    result = run("plan", tmp_path, "--gpus", 4, "--sequence", 64)
    assert result.exit_code == 0, result.output
    assert "5 meshes for 4 GPUs of 72 GB" in result.output
    header = next(line for line in result.output.splitlines() if "mesh " in line)
    assert header.split() == ["mesh", "DP", "params", "grads", "Adam", "activ.", "logits", "sum", "export"]
    assert max(map(len, result.output.splitlines())) <= 80
    assert "--layout, --picture, --vp would have no effect with --gpus" in refused(
        run("plan", tmp_path, "--gpus", 4, "--vp", 2, "--layout", "balanced", "--picture", tmp_path / "meshes.svg")
    )
    odd = run("plan", tmp_path, "--gpus", 4, "--tp", 3)
    assert odd.exit_code == 2
    assert "--tp 3 must divide 4 GPUs" in refused(odd)
    nothing = run("plan", tmp_path, "--gpus", 2, "--gpu-memory", 1, "--sequence", 100_000_000)
    assert nothing.exit_code == 1
    assert "--recompute keeps fewer" in nothing.output
    assert "no mesh fits 2 GPUs of 1 GB" in nothing.output
