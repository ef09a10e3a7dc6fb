"""vLLM takes our stream, family by family: what it samples and says of it is what transformers says.

Its engines start without weights, each in a process of its own, and are fed five times through buffers of two sizes.
Half of its log-probs may be three times as far from transformers' fp32 as half of those of transformers' own bf16 are,
as in ``test_gpu_forward``; and as far from those of the trainer's model. In the end its own weights are, bit for bit,
what they are when it reads a checkpoint's files by itself.
"""

import importlib.util
import os
import sys
import traceback
from collections import deque
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

import mcore_bridge as mb
from tests import records
from tests.fusions import smallest_buckets
from tests.gpus import chosen
from tests.parity import reference_model
from tests.rollout_families import ENGINE_FIELDS, UNLOADABLE, configs
from tests.strategies import random_state

pytestmark = pytest.mark.multigpu

EXAMPLES = str(Path(__file__).parent.parent / "examples")
ROUNDS = 5
AT_ONCE = (os.cpu_count() or 2) // 2
"""Engines on one GPU that start or run; a start takes most of a core for a minute."""
PROMPTS, PROMPT, SAMPLED, GREEDY = 4, 8, 24, 64


def engine_of(family, hf, tensor_parallel):
    """A process with vLLM in it; it never sleeps, since it measures the memory of a GPU that others use as well."""
    sys.path[:0] = [EXAMPLES] if EXAMPLES not in sys.path else []
    from rollout_engine import RemoteEngine

    fields = {
        **hf.to_dict(),
        "architectures": [CLASSES.get(hf.model_type)],
        "dtype": "bfloat16",
        **ENGINE_FIELDS.get(family, {}),
    }
    return RemoteEngine(make_engine, fields, torch.bfloat16, "cuda:0", tensor_parallel)


class Absent:
    """In place of an engine that could not be made: whatever it is asked, it says why."""

    def __init__(self, error):
        self._error = error

    def __getattr__(self, name):
        raise self._error


def make_engine(fields, *arguments):
    """In the engine's process."""
    os.environ.update(VLLM_ALLOW_LONG_MAX_MODEL_LEN="1", VLLM_USE_DEEP_GEMM="0")
    from vllm import ModelRegistry
    from vllm_engine import VllmEngine

    from tests.rollout_worker import register_configs

    register_configs()

    class Awake(VllmEngine):
        def sleep(self):
            pass

        def wake(self):
            self._llm.collective_rpc("forget_weights")

        def digests(self):
            """Of the weights of each worker, by vLLM's names."""
            return self._llm.collective_rpc("digests")

        def load_folder(self, folder):
            """Take all weights from a checkpoint's files."""
            self._llm.collective_rpc("load_folder", args=(folder,))

        def prompt_log_probs(self, tokens):
            """Of ``tokens`` ``[batch, seq]`` as a prompt: fp32 ``[batch, seq - 1]``."""
            from vllm import SamplingParams

            asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
            answers = self._llm.generate([{"prompt_token_ids": row} for row in tokens.tolist()], asked, use_tqdm=False)
            rows = zip(tokens.tolist(), answers, strict=True)
            return torch.tensor(
                [
                    [found[token].logprob for token, found in zip(row[1:], answer.prompt_logprobs[1:], strict=True)]
                    for row, answer in rows
                ]
            )

    (name,) = fields["architectures"]
    if name not in ModelRegistry.get_supported_archs():
        return Absent(NotImplementedError(f"vLLM has no {name}"))
    try:
        worker = "tests.rollout_worker.Examined"
        return Awake(fields, *arguments, gdn_prefill_backend="triton", worker_extension_cls=worker)
    except Exception:
        return Absent(RuntimeError(traceback.format_exc()))


def feed(engine, models, slot_bytes, consumers):
    """One round through buffers of this size."""
    ring = mb.BufferRing(mb.plan_buckets(mb.manifest(models), slot_bytes=slot_bytes))
    engine("connect", ring.plan, *(ring.handles() for _ in range(consumers)))
    engine("wake")
    engine.sync(ring, mb.iter_hf_weights(models))
    return ring


def log_probs(model, tokens):
    """Of all next tokens, fp32 [batch, seq - 1, vocab]."""
    with torch.no_grad():
        return model(tokens.cuda()).logits[:, :-1].float().log_softmax(-1)


def examine(hf, engine, folder, tensor_parallel):
    """What vLLM says otherwise than others, relative to what is allowed, after the first round and after the last.

    Of what it samples, and of the same as a prompt: than transformers, and than the trainer's model; and of what it
    thinks likeliest.
    """
    models = mb.build_model(hf, dims=mb.ParallelDims(), dtype=torch.bfloat16, load_weights=False)
    models[0].eval()
    smallest = smallest_buckets(mb.manifest(models)).slot_bytes
    (files := folder / "files").mkdir()
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
        allowed = 2 * (exact[1] - rounded[1]).abs().max()  # the likeliest of two that rounding may change the order of
        found.append(float(passed_over[:, PROMPT - 1 :].max() / allowed))
    fed = engine("digests")
    engine("wake")
    assert all(before != digests for before, digests in zip(fed, engine("digests"), strict=True))
    save_file(state, files / "model.safetensors")
    engine("load_folder", str(files))
    read = engine("digests")
    differing = [name for one, other in zip(fed, read, strict=True) for name in one if one[name] != other.get(name)]
    assert not differing, f"vLLM holds otherwise than from files: {differing}"
    return found


def attempt(hf, engine, folder, tensor_parallel):
    """The findings, or why there are none."""
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
    if torch.cuda.device_count() < tensor_parallel:
        pytest.skip(f"needs {tensor_parallel} GPUs, found {torch.cuda.device_count()}")
    mb.ParallelDims().initialize(device="cuda")
    every = configs()
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
