"""DFlash and DSpark heads beside a policy: losses and gradients against plain torch, folders, refusals."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

import mcore_bridge as mb
from mcore_bridge.architecture import read_draft
from mcore_bridge.config.draft import BLOCK_DRAFT, MARKOV_DRAFT, BlockFields
from mcore_bridge.errors import BatchError, BridgeError, ConfigError
from mcore_bridge.factory.modules.dflash import planned
from tests.support import dflash, eagle3, pool, stepping, tiny
from tests.support.drafted_policy import BOUND, POLICY, batch, policy, reference

FIELDS, DSPARK = dflash.fields_of(POLICY), dflash.dspark_fields(POLICY)
HEADS = {
    "dflash": FIELDS,
    "dspark": DSPARK,
    "confident of states": {**DSPARK, "confidence_head_with_markov": False},
    "specforge": {
        **DSPARK,
        "architectures": ["DSparkDraftModel"],
        "enable_confidence_head": False,
        "attention_mode": "gqa",
        "projector_type": "dspark",
    },
}
MESHES = [
    *(("dflash", {}, True, 1), ("dflash", {}, False, 2), ("dflash", {"tp": 2, "sp": True}, True, 2)),
    *(("dflash", {"tp": 2}, False, 1), ("dflash", {"tp": 4, "sp": True}, True, 1), ("dspark", {}, False, 2)),
    *(("dspark", {"tp": 4, "sp": True}, True, 2), ("confident of states", {"tp": 2}, False, 2)),
    ("specforge", {}, True, 1),
]


def expected(fields, state, mistake=""):
    """The losses of the batch, and the gradient of half of their sum."""
    state = {name: value.clone().requires_grad_() for name, value in state.items()}
    ids, mask = batch()
    found = torch.zeros(ids.shape)
    for row in range(len(ids)):
        start = int(mask[row].argmax())
        found[row, start + 1 :] = dflash.losses(fields, state, reference(), ids[row, start:], mistake)
    (found.sum() / 2).backward()
    return found.detach(), {name: value.grad for name, value in state.items() if value.grad is not None}


def train(folder, sizes, packed, rows):
    """Runs in each worker: losses, weights and gradients under the names of the folder."""
    dims = mb.ParallelDims(**sizes)
    with stepping.mesh(dims):
        models = policy(dims)
        drafts = mb.build_draft(models, folder)
        options = {"packed": packed, "micro_batch_size": rows, "drafts": drafts}
        outputs = mb.forward(models, *batch(), loss=lambda out, _: out.draft_loss.sum() / rows, **options)
        assert not any(parameter.grad is not None and parameter.grad.any() for parameter in models[0].parameters())
        weights = mb.to_hf_state_dict(drafts)
        mb.save_checkpoint(drafts, f"{folder}/dist")
        mb.load_checkpoint(drafts, f"{folder}/dist")
        mb.save_hf_checkpoint(drafts, f"{folder}/saved")
        for parameter in drafts[0].parameters():
            parameter.data = parameter.grad
        return outputs.draft_loss, weights, mb.to_hf_state_dict(drafts)


@pytest.mark.parametrize(("kind", "sizes", "packed", "rows"), MESHES, ids=str)
def test_every_mesh_trains_a_head_as_plain_torch_does(kind, sizes, packed, rows, tmp_path):
    fields = HEADS[kind]
    state = dflash.random_head(fields)
    losses, grads = expected(fields, state)
    published = dflash.of_specforge(fields) if kind == "specforge" else fields
    whole = torch.zeros(POLICY.vocab_size, POLICY.hidden_size)
    copies = {name: whole.clone() for name in dflash.COPIES if kind != "dflash"}
    folder = eagle3.write(tmp_path, published, state | copies)
    num_ranks = mb.ParallelDims(**sizes).smallest_world
    for found, weights, ours in pool.run(num_ranks, train, folder, sizes, packed, rows):
        assert tiny.relative_error(found, losses) < BOUND
        assert weights.keys() == state.keys()
        assert all(torch.equal(weights[name], value) for name, value in state.items())
        for name, grad in grads.items():
            assert tiny.relative_error(ours[name], grad) < 10 * BOUND, name
    (file,) = Path(folder, "saved").glob("*.safetensors")
    saved = load_file(file)
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], value) for name, value in state.items())
    fields = json.loads(Path(folder, "saved", "config.json").read_text())
    kept = {name: value for name, value in fields.items() if name != "rope_theta"}
    assert {name: fields.get(name) for name in kept} == kept
    assert ("dflash_config" in fields) == (kind == "dflash")


@pytest.mark.parametrize("mistake", [*dflash.MISTAKES, *dflash.OF_DSPARK])
def test_the_batch_would_show_a_mistake(mistake):
    fields = DSPARK if mistake in dflash.OF_DSPARK else FIELDS
    right, wrong = (expected(fields, dflash.random_head(fields), each) for each in ("", mistake))
    if mistake == "attached":  # it changes gradients alone
        right, wrong = ([grads["norm.weight"]] for _, grads in (right, wrong))
    assert tiny.relative_error(wrong[0], right[0]) > 100 * BOUND


def test_a_long_sequence_has_some_of_its_blocks_and_padding_has_none():
    ids, has_next = torch.arange(20), torch.ones(20, dtype=torch.bool)
    has_next[[11, 17, 18, 19]] = False  # ends of sequences of 12 and 6 tokens, and two of padding
    draft = BlockFields(90, 48, (1, 3), 4, 89)
    with mock.patch("mcore_bridge.factory.modules.dflash.ANCHORS", 3):
        plan, again = (planned(ids, has_next, [12, 8], draft) for _ in range(2))
    assert torch.equal(plan.anchors, again.anchors)
    assert [int((plan.anchors < 12).sum()), len(plan.anchors)] == [3, 6]
    assert has_next[plan.anchors].all()
    assert torch.equal(plan.masked.view(-1, 4)[:, 0], plan.anchors)
    assert (plan.masked.view(-1, 4)[:, 1:] == 89).all()
    for anchor, targets, weights in zip(plan.anchors, plan.targets, plan.weights, strict=True):
        counted = min(3, (11 if anchor < 12 else 17) - int(anchor))
        assert int(weights.count_nonzero()) == counted
        assert torch.equal(targets[:counted], torch.arange(1, 1 + counted) + anchor)
    whole = planned(ids, torch.ones(20, dtype=torch.bool), [12, 8], draft)
    assert whole.anchors.tolist() == [*range(11), *range(12, 19)]  # the last token of a sequence has no next one
    nothing = planned(ids, has_next & False, [12, 8], draft)
    assert nothing.anchors.tolist() == [12]
    assert not nothing.weights.any()


def test_a_config_has_all_fields_that_engines_read():
    few = {name: value for name, value in DSPARK.items() if name not in ("markov_head_type", *MARKOV_DRAFT.names[-2:])}
    hf = read_draft(Qwen3Config(**few))
    assert (hf.markov_head_type, hf.enable_confidence_head, hf.confidence_head_with_markov) == ("vanilla", False, False)
    for fields, entry in ((FIELDS, BLOCK_DRAFT), (DSPARK, MARKOV_DRAFT)):
        written = entry.backward(entry.forward(read_draft(Qwen3Config(**fields)).to_dict()))
        assert written == {name: fields.get(name, POLICY.hidden_size) for name in entry.names}


INNER = FIELDS["dflash_config"]
WRONG = {
    "layers": (FIELDS, {"dflash_config": {**INNER, "target_layer_ids": [0, 7]}}, "rising order and below 8"),
    "a mask": (FIELDS, {"dflash_config": {**INNER, "mask_token_id": 90}}, "mask_token_id must be a token below 90"),
    "a flag as a mask": (FIELDS, {"dflash_config": {**INNER, "mask_token_id": True}}, "mask_token_id must be a token"),
    "a flag as a layer": (
        FIELDS,
        {"dflash_config": {**INNER, "target_layer_ids": [False, 2]}},
        "list of whole numbers",
    ),
    "one place": (FIELDS, {"block_size": 1}, "block_size must be at least 2, found 1"),
    "a dialect": (FIELDS, {"dflash_config": {**INNER, "projector_type": "domino"}}, "and nothing else.*nor Domino"),
    "a window": (FIELDS, {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}, "window"),
    "a field": (FIELDS, {"is_causal": True}, "is_causal.*nobody has written other values"),
    "sizes": (FIELDS, {"vocab_size": 96}, "vocab_size of the draft is 96"),
    "two values": (DSPARK, {"dflash_config": {"markov_rank": 7}}, "the same names.*engines read the field outside"),
    "no table": (DSPARK, {"markov_rank": 0}, "markov_rank"),
    "a gate": (DSPARK, {"markov_head_type": "gated"}, "markov_head_type must be 'vanilla'.*vLLM has no others"),
    "a flag": (DSPARK, {"enable_confidence_head": 1}, "enable_confidence_head must be true or false"),
    "a first place": (DSPARK, {"sample_from_anchor": False}, "blocks that draft nothing at their first place"),
}


def refused(cases):
    """Runs in each of two processes: the errors of heads that contradict themselves or their policy."""
    found = {}
    dims = mb.ParallelDims(cp=2)
    with stepping.mesh(dims):
        models = policy(dims)
        for name, folder in cases.items():
            try:
                drafts = mb.build_draft(models, folder)
            except BridgeError as error:
                found[name] = str(error)
        with pytest.raises(BatchError, match=r"steps=1, since it drafts a block at once; .*needs cp=1"):
            mb.forward(models, *batch(), drafts=drafts, draft_steps=2)
        with pytest.raises(BatchError, match="must be of a policy, found a draft head"):
            mb.forward(drafts, *batch())
        with pytest.raises(
            ConfigError, match=r"dtype of the draft is torch.bfloat16, and the policy has torch.float32"
        ):
            mb.build_draft(models, cases["right"], dtype=torch.bfloat16)
    return found


def test_a_head_that_does_not_fit_is_refused(tmp_path):
    state = dflash.random_head(FIELDS)
    wrong = {name: {**fields, **changes} for name, (fields, changes, _) in WRONG.items()}
    cases = {name: eagle3.write(tmp_path / name, fields, state) for name, fields in wrong.items()}
    cases["right"] = eagle3.write(tmp_path / "right", FIELDS, state)
    for found in pool.run(2, refused, cases):
        assert found.keys() == WRONG.keys()
        for name, (_, _, message) in WRONG.items():
            assert re.search(message, found[name], re.DOTALL), (name, found[name])
