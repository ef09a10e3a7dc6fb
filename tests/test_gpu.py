"""On real GPUs over NCCL: build, load and export exactly with either backend, and logits against transformers."""

import importlib.util
import os

import pytest
import torch

import mcore_bridge as mb
from tests.parity import BATCH, SEQ, reference_logits, tokens
from tests.strategies import random_state, tiny

pytestmark = pytest.mark.multigpu

BACKENDS = ["torch", *(["te"] if importlib.util.find_spec("transformer_engine") else [])]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 8, "vocab_size": 515}
FAMILIES = {
    "llama": tiny("llama", **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": tiny("qwen2", **{**SIZES, "hidden_size": 512}),
    "qwen3": tiny("qwen3", **SIZES),
    "mistral": tiny("mistral", **SIZES, sliding_window=8),
}
DIMS = [
    mb.ParallelDims(),
    mb.ParallelDims(tp=2, sp=True),
    mb.ParallelDims(pp=2, vp=2),
    mb.ParallelDims(tp=2, pp=2, sp=True),
    mb.ParallelDims(tp=4),
]


def rank_main(rank, dims, folder):
    """One rank: every family and backend on this mesh; the findings go to a file."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dims.model_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    dims.initialize(device="cuda")
    findings = {}
    for family, hf in FAMILIES.items():
        for backend in BACKENDS:
            findings[family, backend] = examine(hf, dims, backend)
    torch.save(findings, f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


def examine(hf, dims, backend):
    """Names that come back other than they went, in bf16; and on one stage the fp32 logits."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in random_state(hf).items()}
    models = mb.build_model(hf, dims=dims, backend=backend, load_weights=state)
    exported = mb.to_hf_state_dict(models, bucket_bytes=1 << 20, device="cpu")
    wrong = sorted(state.keys() ^ exported.keys())
    wrong += [name for name in exported.keys() & state.keys() if not torch.equal(exported[name], state[name])]
    if dims.pp > 1:
        return wrong, None
    (model,) = mb.build_model(hf, dims=dims, backend=backend, dtype=torch.float32, load_weights=random_state(hf))
    model.eval()
    with torch.no_grad():
        positions = torch.arange(SEQ, device="cuda").expand(BATCH, SEQ)
        logits = model(tokens(hf).cuda(), positions, None)
    parts = [torch.empty_like(logits) for _ in range(dims.tp)]
    torch.distributed.all_gather(parts, logits.contiguous(), group=model.pg_collection.tp)
    return wrong, torch.cat(parts, -1)[..., : hf.vocab_size].float().cpu()


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_family_and_backend(dims, tmp_path):
    if torch.cuda.device_count() < dims.model_size:
        pytest.skip(f"needs {dims.model_size} GPUs, found {torch.cuda.device_count()}")
    torch.multiprocessing.spawn(rank_main, (dims, str(tmp_path)), nprocs=dims.model_size)
    for rank in range(dims.model_size):
        for (family, backend), (wrong, logits) in torch.load(tmp_path / str(rank)).items():
            assert not wrong, (family, backend, rank, wrong[:5])
            if logits is not None:
                reference = reference_logits(FAMILIES[family])
                worst = float((logits - reference).abs().max() / reference.std())
                print(f"{dims}: {family} {backend}: fp32 logits differ by {worst:.2e} of their spread")
                # TransformerEngine multiplies fp32 matrices in TF32, whose mantissa has 10 bits.
                assert worst < (1e-2 if backend == "te" else 1e-4), (family, backend, rank, worst)
