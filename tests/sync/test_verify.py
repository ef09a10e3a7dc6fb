"""``WeightSync.verify`` shows how far an engine is from the trainer: which token, which weight, to the bit."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import mcore_bridge as mb
from mcore_bridge.engines import EngineWorker
from mcore_bridge.errors import BatchError, TransferError
from mcore_bridge.sync.log_probs import difference, prompts_of, rows_of
from mcore_bridge.weights.engine.comparison import Compared
from tests.support import pool
from tests.support.strategies import tiny

PROMPTS = [[5, 17, 3, 60, 44, 9], [8, 71, 71], [2, 33, 90, 12, 6, 28, 51, 40, 19]]
MESHES = {
    "TP2": mb.ParallelDims(tp=2, sp=True),
    "PP2": mb.ParallelDims(pp=2),
    "CP2": mb.ParallelDims(cp=2),
    "DP2": mb.ParallelDims(),
}


class Engine:
    """transformers' model with one worker, in the process of rank 0. Its embedding has rows of padding."""

    def __init__(self, hf, padding=3):
        self.model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32).eval()
        rows = torch.zeros(hf.vocab_size + padding, hf.hidden_size)
        self.model.model.embed_tokens.weight.data = rows
        self._worker = EngineWorker(self.model, self._load, name="transformers, worker 0 of 1")

    @torch.no_grad()
    def _load(self, pairs):
        parameters = dict(self.model.named_parameters())
        for name, tensor in pairs:
            parameters[name][: len(tensor)].copy_(tensor)
            parameters[name][len(tensor) :] = 0

    def __call__(self, info):
        self._worker.receive(info)

    @torch.no_grad()
    def log_probs(self, prompts):
        rows = [torch.tensor([prompt]) for prompt in prompts]
        logits = [self.model(row).logits.log_softmax(-1)[0, :-1] for row in rows]
        return [logs.gather(-1, row[0, 1:, None])[:, 0] for logs, row in zip(logits, rows, strict=True)]


def verified(dims, transport):
    dims.initialize(device="cpu")
    hf = tiny("qwen3", num_hidden_layers=2, vocab_size=96, tie_word_embeddings=False)
    models = mb.build_model(hf, dims=dims, device="cpu", dtype=torch.float32, load_weights=False)
    is_lead = dist.get_rank() == 0
    engine = Engine(hf) if is_lead else None
    held = dict(engine.model.named_parameters()) if is_lead else {}

    def change(name, at, by):
        if is_lead:
            held[name].data[at] += by

    with mb.WeightSync(models, engine if is_lead else (), transport=transport, timeout=60) as sync:
        with pytest.raises(TransferError, match="sync first"):
            sync.verify(weights=True)
        report = sync()
        assert report.workers[0].transport == transport
        models[0].train()
        right = sync.verify(PROMPTS if is_lead else (), weights=is_lead, atol=1e-4)
        assert models[0].training
        assert models[0].decoder.training
        (same,), (weights,) = right.log_probs, right.weights
        assert len(same.tokens) == sum(map(len, PROMPTS)) - len(PROMPTS)
        assert 0 < same.mean < same.worst.distance < 1e-5
        assert 0 <= same.kl < 1e-9
        all_of_them = len(mb.manifest(models))
        assert weights.compared == Compared(all_of_them)
        assert str(right).endswith(f"\nversion 1, worker 0 of engine 0: {all_of_them} tensors equal in every bit")

        change("lm_head.weight", 51, 0.5)  # token 51 alone is another one
        head = sync.verify(PROMPTS)
        (apart,) = head.log_probs
        assert (apart.worst.prompt, apart.worst.position, apart.worst.token) == (2, 6, 51)
        assert apart.worst.distance > 5 * apart.mean
        assert apart.kl > 1e-6
        assert f"at worst (prompt 2, position 6, token 51: engine {apart.worst.engine:.4f}" in str(head)
        sync()

        change("model.embed_tokens.weight", 60, 5.0)  # at position 3 of prompt 0: no token before it changes
        (apart,) = sync.verify(PROMPTS).log_probs
        wrong = {(token.prompt, token.position) for token in apart.tokens if token.distance > 1e-4}
        assert wrong == {(0, 4), (0, 5)}
        early, late = apart.by_position[range(2, 4)], apart.by_position[range(4, 8)]
        assert early.mean < 1e-5 < late.mean
        assert late.worst == apart.worst
        assert [len(part.tokens) for part in apart.by_position.values()] == [3, 5, 6, 1]

        change("model.layers.1.mlp.down_proj.weight", (3, slice(0, 2)), 1.0)
        if is_lead:
            held["model.embed_tokens.weight"].data[97] = -0.0  # a row of padding: only the sign of its zeros
        before = {name: tensor.clone() for name, tensor in held.items()}
        found = sync.verify(weights=True)
        rows, width, inner = hf.vocab_size, hf.hidden_size, hf.intermediate_size
        embedding, down = "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"

        assert list(map(str, found.weights[0].compared.wrong)) == [
            f"{embedding}: {width} of {rows * width} elements of {embedding}",
            f"{down}: 2 of {inner * width} elements of {down}",
            f"{embedding}: {width} of {3 * width} elements of constants",
        ]
        assert f"2 of {all_of_them} tensors differ ({embedding}: " in str(found)
        with pytest.raises(TransferError, match=rf"worker 0 of engine 0: 2 of {all_of_them} tensors differ"):
            sync.verify(PROMPTS, weights=True, atol=1e9)
        assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())  # it only looked
        with pytest.raises(TransferError, match=r"expected log-probs within 0.01 .*prompt 0, position"):
            sync.verify(PROMPTS, atol=0.01)
        sync()
        assert not sync.verify(weights=True, atol=0).weights[0].compared.wrong

        rollout = [row[-2:] for row in engine.log_probs(PROMPTS)] if is_lead else None
        (answers,) = sync.verify(PROMPTS, rollout).log_probs
        assert [token.position for token in answers.tokens] == [4, 5, 1, 2, 7, 8]
        warm = sync.verify(PROMPTS, lambda prompts: engine.log_probs(prompts), temperature=2.0)
        assert warm.log_probs[0].mean > 0.01
        for wrong, match in (
            (([[1]],), "prompts must be lists of at least two token ids"),
            ((), "expected prompts whose log-probs to compare, or weights=True"),
            ((PROMPTS, [[0.5]]), "expected log-probs of 3 prompts by engine 0"),
            ((PROMPTS, [[0.5], [0.5] * 4, [0.5]]), "the last tokens of prompt 1 by engine 0, at most 2 numbers"),
        ):
            with pytest.raises(TransferError, match=match):
                sync.verify(*wrong)
        with pytest.raises(BatchError, match="must be 0 to 95"):
            sync.verify([[1, 2000]], [[0.0]])
        with pytest.raises(TransferError, match="atol must be"):
            sync.verify(PROMPTS, atol="none" if is_lead else 1)
        if is_lead:
            sync.set_engines(lambda info: None)
        with pytest.raises(TransferError, match=r"the engines \[1\] do not: pass log_probs="):
            sync.verify(PROMPTS)
    return str(head)


@pytest.mark.parametrize(("mesh", "transport"), [("TP2", "ring"), ("PP2", "network"), ("CP2", "ring"), ("DP2", "ring")])
def test_a_planted_wrong_weight_shows_at_its_place(mesh, transport):
    first, second = pool.run(2, verified, MESHES[mesh], transport)
    assert first == second


def of_adapters(merged):
    """How far log-probs are apart, of an engine that has merged weights or the base; and of the other policy."""
    mb.ParallelDims().initialize(device="cpu")
    hf = tiny("qwen3", num_hidden_layers=2, vocab_size=96, tie_word_embeddings=False)
    models = mb.build_model(hf, device="cpu", dtype=torch.float32, load_weights=False)
    mb.add_adapters(models, rank=4, alpha=8, targets=["q_proj", "down_proj"])
    for name, parameter in models[0].named_parameters():
        if "adapter" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    engine = Engine(hf)
    with mb.WeightSync(models, engine, merged=merged, timeout=60) as sync:
        sync()
        report = sync.verify(PROMPTS, weights=True, atol=1e-4)
    rows = [torch.tensor([prompt]) for prompt in PROMPTS]
    with nullcontext() if not merged else mb.without_adapters(models):
        other = [mb.forward(models, row).log_probs[0] for row in rows]
    pairs = zip(engine.log_probs(PROMPTS), other, strict=True)
    return report.log_probs[0].mean, max((ours - theirs[1:]).abs().max().item() for ours, theirs in pairs)


@pytest.mark.parametrize("merged", [True, False])
def test_the_policy_that_the_engine_has_is_compared(merged):
    ((apart, from_other),) = pool.run(1, of_adapters, merged)
    assert apart < 1e-5
    assert from_other > 1e-2


def test_values_that_are_no_numbers_are_the_worst():
    prompts, own = [[7, 8, 9, 10]], [[-1.0, -2.0, -3.0]]
    found = difference(0, prompts, rows_of(0, prompts, torch.tensor([[-1.5, math.nan, -3.0]])), own)
    assert found.worst.token == 9
    assert math.isinf(found.mean)
    assert difference(0, prompts, rows_of(0, prompts, [[None, -1.0, -2.0, -3.0]]), own).mean == 0
    numbers = np.array([[7, 8, 9, 10]]), np.array([[-1.0, -2.0, -3.0]], dtype=np.float32)
    assert prompts_of(numbers[0]) == prompts_of(torch.tensor(prompts)) == prompts
    assert rows_of(0, prompts, numbers[1]) == own
    assert math.isclose(difference(0, [[7, 8]], [[-1.0]], [[-1.0 + math.log(2)]]).kl, 2 - 1 - math.log(2))
