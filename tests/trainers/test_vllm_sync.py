"""A ``WeightSync`` into vLLM, whose user has named our backend: log-probs are the trainer's after every round.

Runs where vLLM's build for CPUs is installed, with our package and its entry points: docs/trainers/vllm.md says how.
"""

import importlib.util
import multiprocessing

import pytest
import torch
from transformers import AutoConfig

import mcore_bridge as mb
from tests.support import pool
from tests.support.stand_in import connected
from tests.workers.vllm_sync import CONFIG, serve

if importlib.util.find_spec("vllm") is None or torch.cuda.is_available():
    pytest.skip("needs vLLM, built for CPUs", allow_module_level=True)


def trained(address):
    """How far apart log-probs are after each round, on rank 0; and the ways that were taken."""
    dims = mb.ParallelDims(tp=2)
    dims.initialize(device="cpu")
    hf = AutoConfig.for_model("qwen3", tie_word_embeddings=False, **CONFIG)
    models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=False)
    tokens = torch.randint(0, CONFIG["vocab_size"], (3, 20), generator=torch.Generator().manual_seed(1))
    is_lead, apart = torch.distributed.get_rank() == 0, []
    engine = connected(address) if is_lead else ()
    with mb.WeightSync(models, engine) as sync:
        for step in range(3):
            for parameter in models[0].parameters():
                generator = torch.Generator().manual_seed(step)
                parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
            report = sync()
            logs = mb.forward(models, tokens).log_probs
            if is_lead:
                engine.send(tokens.tolist())
                apart.append((torch.tensor(engine.recv()) - logs[:, -19:]).abs().max().item())
        if is_lead:
            engine.send("version")
            assert engine.recv() == "7"
    return apart, [(worker.transport, "no map" in worker.reason) for worker in report.workers]


@pytest.mark.parametrize(
    ("setting", "tensor_parallel", "packs", "ways"),
    [
        ("backend", 1, False, [("ring", False)]),
        ("backend", 2, True, [("ring", True)] * 2),
        ("extension", 1, False, [("ring", False)]),
    ],
)
def test_one_setting_gives_the_trainers_log_probs(setting, tensor_parallel, packs, ways, tmp_path):
    address = str(tmp_path / "engine")
    arguments = (address, setting, tensor_parallel, packs)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
    process.start()
    (apart, found), (_, on_other) = pool.run(2, trained, address)
    assert found == on_other == ways
    assert all(0 < distance < 1e-5 for distance in apart), apart
    process.join(60)
    process.kill()
