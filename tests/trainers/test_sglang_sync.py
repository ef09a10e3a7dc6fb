"""A ``WeightSync`` into SGLang's engine on CPU: weights and log-probs are the trainer's after every round.

SGLang must be installed, as in docs/trainers/sglang.md.
"""

import importlib.util
import multiprocessing
import re

import pytest
import torch
from transformers import AutoConfig

import mcore_bridge as mb
from mcore_bridge.errors import TransferError
from tests.support import pool
from tests.support.stand_in import connected
from tests.workers.sglang_sync import SETTINGS, serve
from tests.workers.vllm_sync import CONFIG, Client

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.usefixtures("own_workers"),
]


def built(config, dims):
    """A model with these fields."""
    kind = "qwen3_moe" if "num_experts" in config else "qwen3"
    hf = AutoConfig.for_model(kind, tie_word_embeddings=False, **config)
    return mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=False)


def step(models, seed):
    """Change all weights."""
    for parameter in models[0].parameters():
        generator = torch.Generator().manual_seed(seed)
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def trained(address, setting):
    """What ``verify`` finds after each round, after a step of which SGLang has not heard, and after a failed round."""
    dims = mb.ParallelDims(tp=2)
    dims.initialize(device="cpu")
    config, _ = SETTINGS[setting]
    models = built(config, dims)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, CONFIG["vocab_size"], (size,), generator=generator).tolist() for size in (20, 3, 50)]
    is_lead, found = torch.distributed.get_rank() == 0, []
    engine = Client(connected(address)) if is_lead else ()
    version = (lambda: engine.version()) if is_lead else (lambda: None)

    def verified(sync):
        # On CPUs SGLang's code in torch cannot compute with expert parallelism: it marks absent experts by -1
        report = sync.verify([] if setting == "experts" else prompts, weights=True)
        wrong = [len(worker.compared.wrong) for worker in report.weights]
        found.append(([each.worst.distance for each in report.log_probs], wrong))

    with mb.WeightSync(models, engine) as sync:
        for number in range(4):
            step(models, number)
            if number < 3:
                report = sync()
                versions = version()
            verified(sync)
    narrow = built({**config, "hidden_size": CONFIG["hidden_size"] // 2}, dims)
    with mb.WeightSync(narrow, engine) as sync, pytest.raises(TransferError) as failed:
        sync()
    with mb.WeightSync(models, engine) as sync:
        sync()
        verified(sync)
    return found, [(worker.transport, worker.reason) for worker in report.workers], versions, str(failed.value)


@pytest.mark.parametrize(("setting", "workers"), [("one", 1), ("two", 2), ("experts", 2)])
def test_the_engine_has_the_trainers_weights_and_log_probs(setting, workers, tmp_path):
    address = str(tmp_path / "engine")
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(address, setting))
    process.start()
    (found, ways, version, failed), (of_other, *_) = pool.run(2, trained, address, setting, timeout=500.0)
    assert of_other == found
    assert [way for way, _ in ways] == ["ring"] * workers
    assert version == "7"
    for number, (distances, wrong) in enumerate(found):
        if number == 3:  # a step of the trainer alone
            assert min(wrong) > 2
            assert min(distances, default=1) > 0.1
        else:
            assert wrong == [0] * workers
            assert all(distance < 1e-5 for distance in distances), found
        assert len(distances) == (0 if setting == "experts" else 1)
    kind = "Qwen3MoeForCausalLM" if setting == "experts" else "Qwen3ForCausalLM"
    assert f"have version 1, found {workers} failure" in failed
    assert re.search(rf"sglang \S+, {kind} \w+, tp 0 of {workers} of engine 0: ", failed)
    assert "may be half old and half new" in failed
    process.join(60)
    process.kill()


def refused(address):
    """What the error of a round says, and of another one: the engine has not ended."""
    dims = mb.ParallelDims()
    dims.initialize(device="cpu")
    with mb.WeightSync(built(CONFIG, dims), Client(connected(address))) as sync:
        for _ in range(2):
            with pytest.raises(TransferError) as failed:
                sync()
    return str(failed.value)


def test_an_engine_with_pipeline_stages_is_refused_in_words(tmp_path):
    address = str(tmp_path / "engine")
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(address, "stages"))
    process.start()
    (failed,) = pool.run(1, refused, address, timeout=500.0)
    assert "expected SGLang to take the weights" in failed
    assert "expected SGLang without pipeline stages, found 2" in failed
    process.join(60)
    process.kill()
