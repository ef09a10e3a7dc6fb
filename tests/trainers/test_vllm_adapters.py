"""vLLM serves our adapters in turn; its log-probs equal the log-probs of peft and of the trainer's model.

Its base never changes: one adapter replaces another, as after a step. They come from folders, or from memory by verl's
sender and worker. Runs where a vLLM is installed that was built for CPUs: docs/trainers/vllm.md.
"""

import importlib.util
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

import mcore_bridge as mb
from mcore_bridge.trainers.megatron_bridge import AutoBridge
from tests.support import tiny
from tests.support.stepping import leave_mesh
from tests.workers.rollout_families import configs
from tests.workers.vllm_adapters import engine_of

peft = pytest.importorskip("peft")
if importlib.util.find_spec("vllm") is None or torch.cuda.is_available():
    pytest.skip("needs vLLM, built for CPUs", allow_module_level=True)

RANK, ALPHA = 8, 12
CASES = {
    "all linear layers": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "q and v": ["q_proj", "v_proj"],
}
"""No case has experts: vLLM 0.32 has only Triton kernels for adapters of experts."""
NUM_TOKENS = 12


@pytest.fixture(autouse=True, scope="module")
def alone():
    """The trainer is this process."""
    mb.ParallelDims().initialize(device="cpu")
    yield
    leave_mesh()


class FromFolders:
    """vLLM's own way."""

    environment, options = {}, {}

    def put(self, engine, models, folder):
        return {"lora_name": "trained", "lora_int_id": 1, "lora_path": folder, "load_inplace": True}


class ByVerl:
    """verl's call of an export, verl's sender, and a ``TensorLoRARequest`` in vLLM's worker."""

    def __init__(self, base):
        pytest.importorskip("verl")
        from vllm.model_executor.models.utils import WeightsMapper

        if not hasattr(WeightsMapper, "get_unstacked_mapper"):
            pytest.skip("verl 0.9.1 asks for get_unstacked_mapper, which vLLM 0.29 and later lack")
        from tests.workers import verl_adapters

        self.verl, self.bridge = verl_adapters, AutoBridge.from_hf_pretrained(base)
        self.environment = {"VERL_RAY_JOB_ID": f"test-{os.getpid()}"}
        self.options = {"worker_extension_cls": verl_adapters.EXTENSION}

    def put(self, engine, models, folder):
        pairs = self.bridge.export_adapter_weights(models)
        print(self.verl.send(engine, pairs, RANK, ALPHA, self.environment["VERL_RAY_JOB_ID"]), "bytes", end=" ")
        return self.verl.REQUEST


@pytest.mark.parametrize("way", ["from folders", "by verl"])
@pytest.mark.parametrize("case", CASES)
def test_says_with_each_adapter_what_peft_says(case, way, tmp_path):
    folder = tmp_path / "base"
    tiny.random_checkpoint(configs()["qwen3"], folder)
    models = mb.build_model(folder, dims=mb.ParallelDims(), device="cpu", dtype=torch.float32)
    mb.add_adapters(models, rank=RANK, alpha=ALPHA, targets=CASES[case], expert_format="fused")
    prompts = tiny.tokens(3, vocab_size=64)
    serving = ByVerl(folder) if way == "by verl" else FromFolders()
    engine = engine_of(folder, RANK, serving.environment, **serving.options)
    try:
        tokens, logs = engine("generate", prompts.tolist(), NUM_TOKENS, None)
        compare(logs, log_probs(reference(folder), prompts, tokens))
        for number in range(2):
            scatter(models, number)
            adapter = str(tmp_path / f"adapter{number}")
            mb.save_hf_adapters(models, adapter)
            request = serving.put(engine, models, adapter)
            tokens, logs = engine("generate", prompts.tolist(), NUM_TOKENS, request)
            adapted = peft.PeftModel.from_pretrained(reference(folder), adapter)
            compare(logs, log_probs(adapted, prompts, tokens))
            rows = torch.cat((prompts, tokens), 1)
            compare(logs, mb.forward(models, rows, torch.ones_like(rows)).log_probs[:, -NUM_TOKENS:].detach())
            with adapted.disable_adapter():
                assert (logs - log_probs(adapted, prompts, tokens)).abs().max() > 0.05
    finally:
        engine.close()


def reference(folder):
    """transformers' model of the base."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def scatter(models, seed):
    """Other adapters than before."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (parameter for chunk in models for parameter in chunk.parameters() if parameter.requires_grad):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


@torch.no_grad()
def log_probs(model, prompts, tokens):
    """Log-probs of the tokens that follow the prompts."""
    logits = model(input_ids=torch.cat((prompts, tokens), 1)).logits[:, prompts.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def compare(found, expected):
    """Both compute in fp32."""
    print(f"{(found - expected).abs().max():.1e}", end=" ")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
