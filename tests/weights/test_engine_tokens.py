"""After syncs by a map, an engine samples the tokens and log-probs (by bits) that it samples after its own loading.

The engine is transformers' model. Its parameters are not the HF tensors of the sync: release 5 stacks experts.
"""

import re
from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from tests.support import pool
from tests.support.fusions import smallest_buckets
from tests.support.mapped import forget
from tests.support.strategies import random_state, tiny
from tests.support.target_models import FAMILIES

GREEDY = 64
ROUNDS = 3
HF = {"dense": tiny("qwen3", tie_word_embeddings=True), **{name: FAMILIES[name] for name in ("sparse", "latent")}}
OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def loader(model):
    """An engine's loader: tensors are copied by name, and the three tensors of experts become two stacks."""
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}

    @torch.no_grad()
    def load(pairs):
        for name, tensor in pairs:
            if name in held:
                held[name].copy_(tensor)
                continue
            owner, number, which = OF_EXPERT.fullmatch(name).groups()
            stack = held[f"{owner}.{'down' if which == 'down' else 'gate_up'}_proj"][int(number)]
            (stack if which == "down" else stack.chunk(2)[which == "up"]).copy_(tensor)

    return load


@torch.no_grad()
def greedy(model, prompts):
    """Tokens [batch, 64], and fp32 log-probs [batch, 64, vocab]."""
    options = {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(prompts, max_new_tokens=GREEDY, min_new_tokens=GREEDY, do_sample=False, **options)
    return out.sequences[:, prompts.size(1) :], torch.stack(out.logits, 1).float().log_softmax(-1)


def sample(family, folder):
    """Runs in a worker, which trains and serves."""
    hf = HF[family]
    dims = ParallelDims()
    dims.initialize(device="cpu")
    models = mb.build_model(hf, dims=dims, device="cpu", dtype=torch.float32, load_weights=False)
    model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32).eval()
    plan = smallest_buckets(mb.manifest(models))
    engine = mb.map_engine(plan, model, loader(model))
    assert not engine.map.uncovered
    forget(model)
    prompts, seen = torch.arange(10).view(2, 5), []
    with closing(mb.BufferRing(plan, "cpu")) as ring, closing(mb.Receiver(plan, ring.handles())) as receiver:
        for number in range(ROUNDS):
            mb.load_hf_weights(models, random_state(hf, seed=number))
            for bucket in ring.fill(mb.iter_hf_weights(models), acknowledged=lambda: None, in_flight=1):
                receiver.copy_into(bucket.number, engine)
            receiver.finish()
            assert engine.require_whole() == number + 1
            mb.save_hf_checkpoint(models, f"{folder}/{number}")
            read = AutoModelForCausalLM.from_pretrained(f"{folder}/{number}", dtype=torch.float32).eval()
            tokens, logs = greedy(model, prompts)
            expected, log_probs = greedy(read, prompts)
            assert torch.equal(tokens, expected)
            assert torch.equal(logs, log_probs)
            seen.append(logs)
    assert not torch.equal(seen[0], seen[-1])
    return tokens.shape, len(set(tokens.flatten().tolist()))


@pytest.mark.parametrize("family", HF)
def test_an_engine_samples_by_a_map_as_after_loading(family, tmp_path):
    ((shape, num_tokens),) = pool.run(1, sample, family, str(tmp_path))
    assert (tuple(shape), num_tokens > 1) == ((2, GREEDY), True)
