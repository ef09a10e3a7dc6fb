"""vLLM loads our stream, family by family; its log-probs of its samples equal transformers' log-probs.

Its engines start without weights, each in a separate process, and get weights five times through buffers of two sizes.
The median error of its log-probs, against transformers in fp32, may be three times the median error of transformers in
bf16, as in ``test_gpu_forward.py``. The bound against the trainer's model is equal. In the end vLLM's weights have the
bits that vLLM reads from a checkpoint's files.
"""

import importlib.util
import os
import traceback
from collections import deque
from threading import Thread

import pytest
import torch

import mcore_bridge as mb
from tests.support import records
from tests.support.fusions import smallest_buckets
from tests.support.gpus import ask_for, chosen
from tests.support.parity import reference_model
from tests.support.quantized_rollouts import EXPERTS, FP8, follow
from tests.support.strategies import random_state
from tests.workers.rollout_families import ON_GPUS, UNLOADABLE, configs, newer_configs
from tests.workers.vllm_rollout import engine_of, feed, held_as_from_files
from tests.workers.vllm_sync import Client, serve

pytestmark = pytest.mark.multigpu

ROUNDS = 5
AT_ONCE = (os.cpu_count() or 2) // 2
"""Engines on one GPU that start or run; a start takes most of a core for a minute."""
PROMPTS, PROMPT, SAMPLED, GREEDY = 4, 8, 24, 64


def log_probs(model, tokens):
    """Log-probs of all next tokens, fp32 [batch, seq - 1, vocab]."""
    with torch.no_grad():
        return model(tokens.cuda()).logits[:, :-1].float().log_softmax(-1)


def examine(hf, engine, folder, tensor_parallel):
    """The errors of vLLM's log-probs, divided by the allowed errors, after the first and after the last round.

    They are log-probs of sampled tokens, of these tokens as a prompt, and of the likeliest tokens. The references are
    transformers and the trainer's model.
    """
    models = mb.build_model(hf, dims=mb.ParallelDims(), dtype=torch.bfloat16, load_weights=False)
    models[0].eval()
    smallest = smallest_buckets(mb.manifest(models)).slot_bytes
    prompts = torch.randint(0, hf.vocab_size, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(7))
    found, rings = [], []
    for number in range(ROUNDS):
        state = random_state(hf, dtype=torch.bfloat16, seed=number)
        mb.load_hf_weights(models, state)
        rings.append(feed(engine, models, None if number % 2 else smallest, tensor_parallel))
        if number not in (0, ROUNDS - 1):
            continue
        reference = reference_model(hf, str(folder), state).cuda()
        tokens, said = engine("generate", prompts, SAMPLED, number)
        greedy, _ = engine("generate", prompts, GREEDY, 0, 0.0)
        exact = [log_probs(reference, each) for each in (tokens, greedy)]
        reference = reference_model(hf, str(folder), state, torch.bfloat16).cuda()
        rounded = [log_probs(reference, each) for each in (tokens, greedy)]
        answers = tokens[:, 1:, None].cuda()
        own, theirs = (each.gather(-1, answers)[..., 0].cpu() for each in (exact[0], rounded[0]))
        trained = mb.forward(models, tokens.cuda()).log_probs[:, 1:].cpu()
        for answer, since in ((said, PROMPT - 1), (engine("prompt_log_probs", tokens), 0)):
            allowed = 3 * (own - theirs)[:, since:].abs().median()
            found += [float((answer - other[:, since:]).abs().median() / allowed) for other in (own, trained)]
        passed_over = exact[1].max(-1).values - exact[1].gather(-1, greedy[:, 1:, None].cuda())[..., 0]
        allowed = 2 * (exact[1] - rounded[1]).abs().max()  # rounding may exchange the two likeliest
        found.append(float(passed_over[:, PROMPT - 1 :].max() / allowed))
    held_as_from_files(engine, state, folder / "files")
    return found


def attempt(hf, engine, folder, tensor_parallel):
    """The results, or the reason why there are none."""
    folder.mkdir()
    try:
        return examine(hf, engine, folder, tensor_parallel)
    except NotImplementedError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()
    finally:
        Thread(target=engine.close).start()  # vLLM takes its time


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_family_that_vllm_has(tensor_parallel, tmp_path, request):
    ask_for(tensor_parallel)
    mb.ParallelDims().initialize(device="cuda")
    every = {**configs(), **newer_configs(ON_GPUS)}
    names = chosen(request.config, every)
    waiting, started, findings = deque((name, every[name]) for name in names), deque(), {}
    at_once = AT_ONCE // tensor_parallel
    while waiting or started:
        while waiting and len(started) < at_once:
            family, hf = waiting.popleft()
            started.append((family, hf, engine_of(family, hf, tensor_parallel)))
        family, hf, engine = started.popleft()
        findings[family] = attempt(hf, engine, tmp_path / family, tensor_parallel)
        print(f"TP{tensor_parallel}", family, str(findings[family]).strip().splitlines()[-1], flush=True)
    for family in findings.keys() & UNLOADABLE:
        assert isinstance(findings.pop(family), str)
    there = {family: found for family, found in findings.items() if "vLLM has no" not in str(found)}
    passed = {family: isinstance(found, list) and max(found) < 1 for family, found in there.items()}
    mesh = f"TP{tensor_parallel}"
    records.append(
        request.config.getoption("--record"), "vllm", tensor_parallel, [((mesh, name), passed[name]) for name in there]
    )
    assert len(names) < len(every) or len(there) >= 33
    assert all(passed.values()), "\n".join(f"{family}: {there[family]}" for family in there if not passed[family])


ROLLOUTS = {
    "fp8-dense": ("qwen3", {}, FP8, "shards", 3),
    "fp8-experts": ("qwen3_moe", EXPERTS, FP8, "shards", 3),
    "fp8-experts-pulled": ("qwen3_moe", EXPERTS, FP8, "pull", 3),
    "nvfp4-experts": ("qwen3_moe", EXPERTS, {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "ring", 1.5),
    "mxfp4-experts": ("gpt_oss", {"num_local_experts": 16}, {"quant_method": "mxfp4"}, "ring", 1.5),
}
"""The family, its sizes, the format, the way to vLLM, and how many times the error of rounded weights is allowed.

vLLM also rounds activations in FP8. Its kernels for 4 bits repack weights, so that a map cannot be made of its loader.
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("case", ROLLOUTS)
def test_rollouts_of_quantized_engines_follow_the_trainer_for_five_steps(case, tmp_path):
    """vLLM's weights are those of the published folder, bit for bit, when the trainer has sent what it has read there.

    After each step vLLM is as near to the trainer as its format allows. An engine that has missed a step is further
    away.
    """
    follow(ROLLOUTS[case], tmp_path, serve, "extension", 1, True, held=Client.held)
