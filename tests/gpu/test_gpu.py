"""On real GPUs over NCCL: both backends build, load and export exactly, and have the logits of transformers."""

import traceback

import pytest
import torch

import mcore_bridge as mb
from tests.support.gpu_models import BACKENDS, FAMILIES, SPARSE
from tests.support.gpus import spawn
from tests.support.parity import BATCH, SEQ, reference_logits, tokens
from tests.support.strategies import random_state

pytestmark = pytest.mark.multigpu

DIMS = [
    mb.ParallelDims(),
    mb.ParallelDims(tp=2, sp=True),
    mb.ParallelDims(pp=2, vp=2),
    mb.ParallelDims(ep=2),
    mb.ParallelDims(tp=2, ep=2, sp=True),
    mb.ParallelDims(tp=2, pp=2, ep=2, sp=True),
    mb.ParallelDims(tp=2, ep=2, etp=2, sp=True),
    mb.ParallelDims(tp=4, sp=True),
]


def rank_main(rank, world_size, dims):
    """Every family and backend on this mesh."""
    dims.initialize(device="cuda")
    findings = {}
    for family, hf in (SPARSE if dims.ep > 1 else FAMILIES).items():
        if hf.model_type == "gpt_oss" and dims.etp > 1:  # megatron-core cannot cut experts with biases
            continue
        for backend in BACKENDS:
            try:
                findings[family, backend] = examine(hf, dims, backend)
            except Exception:  # the other families still run
                findings[family, backend] = traceback.format_exc(), None
    return findings


def examine(hf, dims, backend):
    """Tensors that changed in a bf16 round trip; and on one stage the fp32 logits."""
    state = random_state(hf, dtype=torch.bfloat16)
    models = mb.build_model(hf, dims=dims, backend=backend, load_weights=state)
    exported = mb.to_hf_state_dict(models, bucket_bytes=1 << 20, device="cpu")
    wrong = sorted(state.keys() ^ exported.keys())
    wrong += [name for name in exported.keys() & state.keys() if not torch.equal(exported[name], state[name])]
    if dims.pp > 1:
        return str(wrong) if wrong else "", None
    (model,) = mb.build_model(hf, dims=dims, backend=backend, dtype=torch.float32, load_weights=random_state(hf))
    model.eval()
    with torch.no_grad():
        positions = torch.arange(SEQ, device="cuda").expand(BATCH, SEQ)
        logits = model(tokens(hf).cuda(), positions, None)
    parts = [torch.empty_like(logits) for _ in range(dims.tp)]
    torch.distributed.all_gather(parts, logits.contiguous(), group=model.pg_collection.tp)
    return str(wrong) if wrong else "", torch.cat(parts, -1)[..., : hf.vocab_size].float().cpu()


@pytest.fixture(scope="module")
def references():
    return {family: reference_logits(hf) for family, hf in FAMILIES.items()}


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_family_and_backend(dims, tmp_path, references):
    failures = []
    for rank, findings in enumerate(spawn(rank_main, tmp_path, dims.smallest_world, dims)):
        for (family, backend), (wrong, logits) in findings.items():
            if wrong:
                failures.append(f"{family} {backend} on rank {rank}: {wrong}")
            elif logits is not None:
                worst = float((logits - references[family]).abs().max() / references[family].std())
                print(f"{dims}: {family} {backend}: fp32 logits differ by {worst:.2e} of their spread")
                if not worst < 1e-4:
                    failures.append(f"{family} {backend} on rank {rank}: logits differ by {worst}")
    assert not failures, "\n".join(failures)
