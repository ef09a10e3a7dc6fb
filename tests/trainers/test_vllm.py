"""vLLM loads our stream on CPU, family by family; its fp32 log-probs equal transformers' and the trainer's.

Its engine starts without weights, in separate processes, and gets weights five times through buffers of two sizes. Runs
where a vLLM is installed that was built for CPUs: docs/trainers/vllm.md. ``test_gpu_vllm`` does the same in bf16.
"""

import importlib.util

import pytest
import torch

import mcore_bridge as mb
from tests.support.fusions import smallest_buckets
from tests.support.parity import reference_model
from tests.support.stepping import leave_mesh
from tests.support.strategies import random_state
from tests.workers.rollout_families import (
    ENGINE_FIELDS,
    HELD_ON_CPU,
    NOT_ON_CPU,
    UNBIASED_ON_CPU,
    UNTIED_ON_CPU,
    configs,
    newer_configs,
)
from tests.workers.vllm_rollout import engine_of, feed, held_as_from_files

if importlib.util.find_spec("vllm") is None or torch.cuda.is_available():
    pytest.skip("needs vLLM, built for CPUs", allow_module_level=True)

ROUNDS = 5
PROMPTS, PROMPT, SAMPLED, GREEDY = 4, 8, 24, 64
TOLERANCE = 5e-4
"""The bound for log-probs in fp32. If weights are rounded to bf16, log-probs differ by 0.014 or more."""


@pytest.fixture(autouse=True, scope="module")
def alone():
    """The trainer is this process."""
    mb.ParallelDims().initialize(device="cpu")
    yield
    leave_mesh()


FAMILIES = sorted(configs().keys() - NOT_ON_CPU.keys())
FAULTY = {("nemotron_h-dense", "PP2"): "vLLM 0.32 loses a request of mixers in a pipeline on CPUs: KeyError"}
MESHES = {
    "TP1": {"tensor_parallel": 1},
    "TP2": {"tensor_parallel": 2},
    "PP2": {"tensor_parallel": 1, "pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_says_what_transformers_says(family, mesh, tmp_path):
    if (family, mesh) in FAULTY:
        pytest.skip(FAULTY[family, mesh])
    hf = configs()[family]
    hf.tie_word_embeddings &= family not in UNTIED_ON_CPU
    engine = engine_of(family, hf, device="cpu", dtype=torch.float32, **MESHES[mesh])
    try:
        examine(family, hf, engine, tmp_path, 1 if mesh == "TP1" else 2)
    finally:
        engine.close()


@pytest.mark.parametrize("tensor_parallel", [1, 2], ids="TP{}".format)
@pytest.mark.parametrize("family", ["minimax_m2", *HELD_ON_CPU])
def test_holds_what_it_cannot_compute(family, tensor_parallel, tmp_path, monkeypatch):
    """The newer families by a map. Experts of minimax_m2 are not selected by a sigmoid, which vLLM lacks on CPU."""
    monkeypatch.setitem(ENGINE_FIELDS, "minimax_m2", {**ENGINE_FIELDS["minimax_m2"], "scoring_func": "softmax"})
    hf = {**configs(), **newer_configs(HELD_ON_CPU)}[family]
    state = weights(family, hf, 0)
    models = mb.build_model(hf, dims=mb.ParallelDims(), device="cpu", dtype=torch.float32, load_weights=state)
    engine = engine_of(family, hf, tensor_parallel, "cpu", torch.float32, by_map=family in HELD_ON_CPU)
    try:
        ring = feed(engine, models, None, tensor_parallel)
        if family in HELD_ON_CPU:
            assert engine("by_map") == [(1, "", ())] * tensor_parallel
        held_as_from_files(engine, state, tmp_path / "files")
    finally:
        engine.close()
    ring.close()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_samples_by_a_map_as_after_loading(family, tmp_path):
    """Greedy tokens and their log-probs are equal, bit for bit. The map reaches all weights without oneDNN."""
    hf = configs()[family]
    models = mb.build_model(hf, dims=mb.ParallelDims(), device="cpu", dtype=torch.float32, load_weights=False)
    prompts = torch.arange(PROMPTS * PROMPT).view(PROMPTS, PROMPT)
    engine, said = engine_of(family, hf, 1, "cpu", torch.float32, by_map=True), []
    try:
        for number in range(2):
            state = weights(family, hf, number)
            mb.load_hf_weights(models, state)
            ring = feed(engine, models, None, 1)
            assert engine("by_map") == [(1, "", ())]
            said.append(engine("generate", prompts, GREEDY, 0, 0.0))
            held_as_from_files(engine, state, tmp_path / str(number))
            for ours, loaded in zip(said[-1], engine("generate", prompts, GREEDY, 0, 0.0), strict=True):
                assert torch.equal(ours, loaded)
            ring.close()
    finally:
        engine.close()
    assert not torch.equal(said[0][1], said[1][1])


def examine(family, hf, engine, folder, workers):
    """After the first round and after the last."""
    models = mb.build_model(hf, dims=mb.ParallelDims(), device="cpu", dtype=torch.float32, load_weights=False)
    models[0].eval()
    smallest = smallest_buckets(mb.manifest(models)).slot_bytes
    rings = []
    for number in range(ROUNDS):
        state = weights(family, hf, number)
        mb.load_hf_weights(models, state)
        rings.append(feed(engine, models, None if number % 2 else smallest, workers))
        if number in (0, ROUNDS - 1):
            compare(engine, models, reference_model(hf, str(folder), state), number)
    held_as_from_files(engine, state, folder / "files")


def weights(family, hf, seed):
    """Random ones, but for what vLLM passes over."""
    state = random_state(hf, seed=seed)
    for name in state if family in UNBIASED_ON_CPU else ():
        if name.endswith("e_score_correction_bias"):
            state[name].zero_()
    return state


def compare(engine, models, reference, seed):
    """Compare vLLM's log-probs of sampled tokens, of these tokens as a prompt, and of the likeliest tokens."""
    prompts = torch.randint(
        0, reference.config.vocab_size, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(7)
    )
    tokens, said = engine("generate", prompts, SAMPLED, seed)
    exact = log_probs(reference, tokens).gather(-1, tokens[:, 1:, None])[..., 0]
    trained = mb.forward(models, tokens).log_probs[:, 1:]
    for answer, since in ((said, PROMPT - 1), (engine("prompt_log_probs", tokens), 0)):
        for expected in exact, trained:
            torch.testing.assert_close(answer, expected[:, since:], rtol=0, atol=TOLERANCE)
    greedy, _ = engine("generate", prompts, GREEDY, 0, 0.0)
    exact = log_probs(reference, greedy)
    passed_over = exact.max(-1).values - exact.gather(-1, greedy[:, 1:, None])[..., 0]
    assert float(passed_over[:, PROMPT - 1 :].max()) < 2 * TOLERANCE  # the likeliest, or one of two as likely


def log_probs(model, tokens):
    """Log-probs of all next tokens, fp32 [batch, seq - 1, vocab]."""
    with torch.no_grad():
        return model(tokens).logits[:, :-1].log_softmax(-1)
