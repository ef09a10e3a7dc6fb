"""Images: transformers' log-probs and gradients of the tower, on every mesh, in rows and packed."""

import inspect
import re
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.config.hf import read_config
from mcore_bridge.errors import BatchError, ConfigError, MeshError
from mcore_bridge.factory.vision.check_features import MisfitError, misfit
from mcore_bridge.launch.fake_rank import rank_of
from tests.support import composites, pool, seeing
from tests.support.bounds import ONE
from tests.support.seeing import BOUND, case
from tests.support.written_weights import read

pytestmark = pytest.mark.skipif("qwen3_5" not in composites.NAMES, reason="the installed transformers lacks it")
SP, TP, CP, DP, EP, PP = {"tp": 2, "sp": True}, {"tp": 2}, {"cp": 2}, {}, {"ep": 2}, {"pp": 2}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROWS: dict[str, Any] = {"packed": False}
BARE: dict[str, Any] = {"bare": True}
ALIGNER: dict[str, Any] = {"vision": "frozen", "freeze": ["*", "!vision.visual.*merger*"]}
"""Only the connection of images to the text is trained."""
CASES: dict[str, list[Any]] = {
    "qwen3_5": [(SP, {}), (TP, ROWS), (DP, {"overlap": True}), ({**PP, "vp": 2}, {})],
    "qwen3_5_moe": [(EP, BARE)],
    "qwen3_vl": [(SP, {"overrides": RECOMPUTED}), (CP, {}), (DP, {"overlap": True, **ALIGNER}), (PP, ALIGNER)],
    "qwen3_vl_moe": [({**EP, "cp": 2}, ROWS)],
    "qwen2_5_vl": [(CP, {}), (CP, ROWS)],
    "qwen2_vl": [(SP, ROWS)],
    "qwen2_5_omni_thinker": [(CP, {})],
    "qwen3_omni_moe_thinker": [(EP, {}), (SP, ROWS)],
    "hunyuan_vl": [(CP, {}), (SP, ROWS)],
    "glm4v": [(CP, {})],
    "glm46v": [(PP, BARE)],
    "glm4v_moe": [(EP, {})],
    "internvl": [(CP, BARE)],
    "mistral3": [(SP, BARE)],
    "gemma3": [(CP, {}), (SP, {**ROWS, "overrides": RECOMPUTED})],
    "gemma4": [(CP, {}), (CP, ROWS), (SP, {**ROWS, "overrides": RECOMPUTED}), ({**PP, "vp": 2}, {})],
    "gemma4 gemma4-experts": [(EP, {}), ({**SP, "etp": 2}, ROWS)],
    "gemma4_unified": [(CP, {}), (SP, ROWS)],
    "llama4": [(EP, {}), ({**SP, "etp": 2}, ROWS), ({**CP, **EP}, {}), (CP, ROWS), (PP, {}), ({**PP, "vp": 2}, ROWS)],
    "llava": [(PP, {})],
    "llava_onevision": [(DP, {"overlap": True, "recompute": True})],
    "llava_next": [(CP, {})],
    "llava_next_video": [(SP, {})],
    "video_llava": [(PP, {})],
    "vipllava": [(SP, {})],
    "got_ocr2": [(PP, {})],
    "lighton_ocr": [(CP, {})],
    "exaone4_5": [(CP, {})],
    "minimax_m3_vl": [(CP, {}), (EP, ROWS)],
    "qwen3_vl dynamic": [(CP, {}), (CP, ROWS)],
    "internvl critic": [({**PP, "vp": 2}, {"head": "value"})],
    "internvl qwen3_moe": [(EP, {})],
    "mistral3 ministral3": [(SP, {})],
    "glm46v glm4v_moe_text": [(EP, {})],
}
"""For each family, meshes of two ranks, with options of a step. A name may end in another text, a rope, or critic."""
if not megatron.core.__version__.startswith("0.16"):  # which has no context parallelism for gated delta nets
    CASES["qwen3_5"] += [(CP, {}), (CP, ROWS)]
ON_FOUR: dict[str, list[Any]] = {
    "qwen3_vl": [({**CP, **SP}, {})],
    "gemma4": [({**CP, **SP}, {}), ({**CP, **PP}, ROWS)],
    "llama4": [({**CP, **SP}, {"overrides": RECOMPUTED, "recompute": True}), ({**CP, **PP, "vp": 2}, ROWS)],
}


def test_replicas_gather_parameters_of_a_tower_in_one_order() -> None:
    """One replica has images while the other has text, and GLM reads a parameter of a module that does not run."""
    folder, batch, _ = case("glm4v")
    for at_once, late in pool.run(2, seeing.after_a_step, folder, batch):
        assert torch.equal(at_once, late)


@pytest.mark.parametrize("name", ["qwen3_vl", "hunyuan_vl", "llama4"])
def test_trainers_call_with_whole_rows_or_their_own_tokens(name: str) -> None:
    """A trainer passes the rows of both context-parallel ranks, or of this rank. Given positions are used, three or
    four for a token.

    Llama 4 has one position for a token, and counts places within chunks.
    """
    folder, batch, (wanted, _) = case(name)
    for found in pool.run(2, seeing.calls, folder, CP, batch):
        errors = {name: float(((each - wanted) * (wanted != 0)).abs().max()) for name, each in found.items()}
        if name != "llama4":
            assert errors.pop("swapped") > 10 * BOUND
            assert float(((found["swapped"] - found["forward, swapped"]) * (wanted != 0)).abs().max()) < BOUND
            assert errors.pop("forward, swapped") > 10 * BOUND
        assert all(error < BOUND for error in errors.values()), errors


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl", "llama4"])
def test_a_row_that_is_cut_inside_an_image_is_named_on_a_pipeline(name: str) -> None:
    """It is named even if the sums over rows fit. Qwen's last image of that row has one token, which is missing on all
    stages. For other families, only the tower on the first stage has the number of features.
    """
    folder, batch, _ = case(name)
    errors = pool.run(2, seeing.misfitting, folder, PP, batch)
    assert "found in row 2" in errors[0], errors
    assert ("found in row 2" if name == "qwen3_vl" else "on another rank") in errors[1], errors


def test_a_fault_in_the_padding_of_a_pack_names_the_last_row() -> None:
    """A sequence of padding may follow the sequences of the rows."""
    assert "found in row 4: a fault" in str(misfit(MisfitError(2, "a fault"), [3, 4]))


@pytest.mark.parametrize(
    ("name", "lengths"), [("qwen2_5_omni_thinker", "feature_attention_mask"), ("gemma4", "input_features_mask")]
)
def test_what_a_composite_would_hear_is_refused_by_name(name: str, lengths: str) -> None:
    if name not in composites.NAMES:
        pytest.skip("the installed transformers lacks it")
    folder, (ids, mask, images, _), _ = case(name)
    sound = {"input_features": torch.zeros(1, 8, 4), lengths: torch.ones(1, 4)}
    with rank_of(ONE, 0, 1):
        models = seeing.built(folder, ONE)
        with pytest.raises(BatchError, match=rf"{re.escape(str(sorted(sound)))} in row 0"):
            mb.forward(models, ids, mask, images=[{**images[0], **sound}, *images[1:]])
        with pytest.raises(BatchError, match=f"found input_features, {lengths}"):
            models[0](ids[:1], None, mask[:1], **images[0], **sound)


def test_what_no_model_could_see_is_refused_by_name() -> None:
    folder, (ids, mask, images, _), _ = case("qwen3_vl")
    hf = read_config(folder)
    with rank_of(ONE, 0, 1):
        blind = mb.build_model(folder, dims=ONE, dtype=torch.float32, device="cpu")
        with pytest.raises(BatchError, match=r"row 0 .*vision='text_only'"):
            mb.forward(blind, ids, mask, images=images)
        models = seeing.built(folder, ONE)
        with pytest.raises(BatchError, match="an entry for each of 4 rows, found 3"):
            mb.forward(models, ids, mask, images=images[:3])
        with pytest.raises(BatchError, match=r"\['audio'\] in row 2"):
            mb.forward(models, ids, mask, images=[*images[:2], {**images[2], "audio": ids}, None])
        with pytest.raises(BatchError, match="mm_token_type_ids must have 27 numbers"):
            mb.forward(models, ids, mask, images=[{**images[0], "mm_token_type_ids": ids[0, :3]}, *images[1:]])
        told = [each and {**each, "position_ids": ids[:3, : 27 - row % 2 * 2]} for row, each in enumerate(images)]
        with pytest.raises(BatchError, match=r"position_ids must be \[3, 27\] .*found \(3, 25\) in row 3"):
            mb.forward(models, ids, mask, images=told)
        with pytest.raises(BatchError, match="one token for each feature of its images, found in row 0"):
            models[0](ids[:2], None, mask[:2], **images[2])
        with pytest.raises(BatchError, match=r"found in a row: StopIteration.*Do not cut rows inside an image"):
            models[0](ids[:1], None, mask[:1], image_grid_thw=images[0]["image_grid_thw"][:1])
        models = seeing.built(hf, ONE, load_weights=False, overrides={"num_layers": 2})
        models[0].config.mtp_num_layers = 1
        with pytest.raises(BatchError, match="mtp_num_layers must be 0 or None for images"):
            models[0](ids[:1], None, mask[:1], **images[0])
        with pytest.raises(MeshError, match="at least 2 layers"):
            seeing.built(hf, ONE, load_weights=False, overrides={"num_layers": 1})
        folder, (ids, mask, images, _), _ = case("mistral3")
        with pytest.raises(
            BatchError, match=r"found in a row: TypeError.* Pass everything that the processor .* returns$"
        ):
            seeing.built(folder, ONE)[0](ids[:1], None, mask[:1], pixel_values=images[0]["pixel_values"])
        models = seeing.built(folder, ONE)
        models[0].vision.multi_modal_projector.linear_1.weight.data = ids.float()
        with pytest.raises(BatchError, match=r"found in one of the rows \[0, 1, 2, 3\]: RuntimeError: .* shapes .*\)$"):
            mb.forward(models, ids, mask, images=images)


@pytest.mark.parametrize("name", ["qwen3_vl", "llava_onevision"])
def test_arrays_lists_and_inputs_of_no_image_are_taken_as_processors_make_them(name: str) -> None:
    folder, (ids, mask, images, _), _ = case(name)
    changes: list[Any] = [Tensor.numpy, lambda each: each.double().tolist() if each.is_floating_point() else each.int()]
    forms = [[{key: change(value) for key, value in (each or {}).items()} for each in images] for change in changes]
    forms.append([each or {"pixel_values": [], "pixel_values_videos": ids[:0]} for each in images])
    with rank_of(ONE, 0, 1):
        models = seeing.built(folder, ONE)
        wanted = mb.forward(models, ids, mask, images=images).log_probs
        for form in forms:
            assert torch.equal(mb.forward(models, ids, mask, images=form).log_probs, wanted)
        assert torch.equal(models[0](ids, None, mask, pixel_values=ids[:0]), models[0](ids, None, mask))
        unequal = {**images[2], "pixel_values": [[[0.5]], [[0.5, 0.5]]]}
        with pytest.raises(BatchError, match=r"must be a tensor, found a list in row 2.*return_tensors='pt'"):
            mb.forward(models, ids, mask, images=[*images[:2], unequal, images[3]])
        if name == "llava_onevision":
            longer = {**images[2], "pixel_values_videos": images[2]["pixel_values_videos"].repeat(1, 2, 1, 1, 1)}
            rows = [0, 1, 2, 2]
            with pytest.raises(BatchError, match=r"_videos .*\(1, 2, .* row 2 and \(1, 4, .* row 3: pass micro_batch"):
                mb.forward(models, ids[rows], mask[rows], images=[*images[:3], longer])


def test_a_sampled_token_with_the_id_of_an_image_is_text_if_the_row_says_so() -> None:
    """The embedding of the token is set to another token's embedding, and both tokens must then give equal results."""
    folder, (ids, mask, images, _), _ = case("qwen3_5")
    token, other = 5, 20
    types = (ids == token) * 1 + (ids == 6) * 2
    ids = ids.clone()
    ids[0, 1], ids[1, 5] = other, other
    sampled = ids.clone()
    sampled[0, 1], sampled[1, 5] = token, token
    of_text = torch.arange(4)[:, None] == 1
    told = [images[row] and {**images[row], "mm_token_type_ids": types[row]} for row in range(4)]
    with rank_of(ONE, 0, 1):
        models = seeing.built(folder, ONE)
        words = models[0].embedding.word_embeddings.weight
        words.data[token] = words.data[other]
        wanted = mb.forward(models, ids, mask, images=images).entropy
        assert torch.equal(mb.forward(models, sampled, mask, images=told).entropy, wanted)
        with pytest.raises(BatchError, match=r"found in row 0.*pass mm_token_type_ids"):
            mb.forward(models, torch.where(of_text, ids, sampled), mask, images=images)
        with pytest.raises(BatchError, match=r"found in row 1: 1 tokens that stand for images, .* give the row its"):
            mb.forward(models, torch.where(of_text, sampled, ids), mask, images=images, micro_batch_size=1)


def test_a_tower_may_have_another_dtype_than_the_text_and_recompute_its_layers(tmp_path: Path) -> None:
    """A saved folder has both dtypes. The error of rows is at most the error of a text and a tower in bf16."""
    folder, (ids, mask, images, wanted), (_, gradients) = case("qwen3_vl")
    shown, runs = wanted != 0, []
    with rank_of(ONE, 0, 1):
        models = seeing.built(folder, ONE, dtype=torch.bfloat16)
        models[0].vision.float()
        with pytest.raises(ConfigError, match="use_reentrant must be False for a tower, found True"):
            models[0].vision.gradient_checkpointing_enable({"use_reentrant": True})
        models[0].vision.gradient_checkpointing_enable()
        models[0].train()
        models[0].vision.visual.blocks[0].mlp.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
        learn = {"loss": lambda out, rows: seeing.loss(out.log_probs * shown[rows], range(4)[rows])}
        outputs = mb.forward(models, ids, mask, images=images, **learn)
        assert float(((outputs.log_probs - wanted) * shown).abs().max() / wanted.std()) < 0.02
        for name, parameter in models[0].vision.named_parameters():
            assert parameter.grad.dtype == torch.float32
            assert float((parameter.grad - gradients[name]).norm() / gradients[name].norm()) < 0.05, name
        assert len(runs) == 4  # of images and of a video, and again in the backward
        mb.save_hf_checkpoint(models, tmp_path)
        assert {str(tensor.dtype)[6:] for tensor in read(tmp_path).values()} == {"float32", "bfloat16"}
        mb.load_hf_weights(models, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_the_tower_learns_as_in_transformers_on_two_ranks(name: str) -> None:
    """Replicas have equal bits, although no mean over replicas is taken here. A row of text does not affect a tower."""
    model_type = name.partition(" ")[0]
    if "pixel_values" not in inspect.signature(composites.model_class(model_type).forward).parameters:
        pytest.skip("5.17 has another name for the pixels of video_llava")
    require_parity(name, 2, CASES[name])


@pytest.mark.parametrize("name", ON_FOUR)
def test_the_tower_learns_as_in_transformers_on_four_ranks(name: str) -> None:
    """Two axes at once, each of which moves tokens of an image to other ranks, or leaves them without a tower."""
    require_parity(name, 4, ON_FOUR[name])


def require_parity(name: str, world_size: int, cases: list[Any]) -> None:
    folder, batch, (log_probs, tower) = case(name)
    found = pool.run(world_size, seeing.steps, folder, cases, batch)
    for (sizes, options), ranks in zip(cases, zip(*found, strict=True), strict=True):
        trained = {key: gradient for key, gradient in tower.items() if "freeze" not in options or "merger" in key}
        assert seeing.problems(list(ranks), (log_probs, trained), BOUND) == [], (sizes, options)
