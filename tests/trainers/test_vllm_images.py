"""vLLM gets a model with its tower and images; its log-probs equal transformers' and the trainer's.

Its engine starts from NaN and is fed twice, with the same prompts: what it keeps of images has to be forgotten. Runs
where a vLLM is installed that was built for CPUs, with torchvision: docs/trainers/vllm.md.
"""

import importlib.util

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.batches.images import token_types
from tests.support import composites, processors, seeing
from tests.support.stepping import leave_mesh
from tests.workers.vllm_images import engine_of
from tests.workers.vllm_rollout import feed

if torch.cuda.is_available() or not all(map(importlib.util.find_spec, ("vllm", "torchvision"))):
    pytest.skip("needs vLLM, built for CPUs, and torchvision", allow_module_level=True)

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4, "vocab_size": 515}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
PARTIAL = {**MROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
LINEAR = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
ALL = {"moe_intermediate_size": 128, "num_experts_per_tok": 4}
"""Experts are all selected, or bf16 would now and then select others."""
FAMILIES = {
    "qwen2_5_vl": {"rope_parameters": MROPE, "use_sliding_window": False, "sliding_window": None, "layer_types": None},
    "qwen3_vl": {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "attention_bias": False},
    "qwen3_5": {"rope_parameters": PARTIAL, **LINEAR},
    "qwen3_5_moe": {"rope_parameters": PARTIAL, **LINEAR, **ALL},
}
TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 0.5}
"""Bounds of log-probs. On CPU vLLM computes gated delta nets only in bf16, in which transformers has errors of 0.42,
too. Features of older weights change log-probs by 0.5 in fp32, and by 3.6 in bf16.
"""


@pytest.fixture(autouse=True, scope="module")
def alone():
    """The trainer is this process."""
    mb.ParallelDims().initialize(device="cpu")
    yield
    leave_mesh()


@pytest.mark.parametrize("family", FAMILIES)
def test_says_of_images_what_transformers_says(family, tmp_path):
    dtype = torch.bfloat16 if family.startswith("qwen3_5") else torch.float32
    hf = config(family)
    folder = processors.folder_of(hf, tmp_path)
    reference = composites.model_class(family)(hf).eval()
    models = mb.build_model(
        folder, dims=mb.ParallelDims(), vision="train", device="cpu", dtype=torch.float32, load_weights=False
    )
    engine = engine_of(folder, dtype)
    prompts = processors.prompts(hf.text_config.vocab_size)
    try:
        for number in range(2):
            state = scatter(reference, number, dtype)
            mb.load_hf_weights(models, state)
            ring = feed(engine, models, None, 1)
            compare(engine, models, reference, prompts, TOLERANCE[dtype])
            ring.close()
    finally:
        engine.close()


def config(family):
    """A small one, in sizes that vLLM's kernels take."""
    hf = seeing.config(family, **SIZES, **FAMILIES[family], max_position_embeddings=256, tie_word_embeddings=False)
    hf.vision_config.hidden_size = 64
    hf.architectures = [composites.model_class(family).__name__]
    return hf


def scatter(model, seed, dtype):
    """Give it other weights, which ``dtype`` holds."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((noise * 0.06 if parameter.dim() > 1 else 1 + noise * 0.1).to(dtype))
    return model.state_dict()


def compare(engine, models, reference, prompts, tolerance):
    """Compare sampled tokens, and log-probs of the text."""
    ours = processors.processor(reference.config)
    asked = [(ours.tokenizer(text).input_ids, images) for text, images in prompts]
    for (text, images), (tokens, said) in zip(prompts, engine("log_probs", asked), strict=True):
        inputs = dict(ours(text=text, images=images or None, return_tensors="pt"))
        ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
        assert ids[0].tolist() == tokens
        of_text = token_types(reference.config, ids)[0] == 0
        of_text[0] = False
        with torch.no_grad():
            logits = reference(input_ids=ids, attention_mask=mask, **inputs).logits[0, :-1]
            exact = torch.cat((torch.zeros(1), logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]))
            inputs.pop("mm_token_type_ids", None)
            trained = mb.forward(models, ids, mask, images=[inputs or None]).log_probs[0]
        for expected in exact, trained:
            torch.testing.assert_close(said[of_text], expected[of_text], rtol=0, atol=tolerance)
