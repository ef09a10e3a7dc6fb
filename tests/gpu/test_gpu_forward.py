"""``forward`` on real GPUs: log-probs of packed and padded batches on every mesh against transformers, both backends.

Every family that is built is here: some in sizes that kernels require, the others in the sizes of the zoo.

In fp32 the log-probs must agree. The reference is transformers in fp32. In bf16 (and in fp16, for one family) the error
of a row is the norm of its tokens' errors. In a dense model it may be twice the error of transformers in that dtype.
The two round equally often, but tensor ranks also round their parts of each sum. This gives three times the variance,
and norms of forty errors vary.

A router may choose other experts for some tokens, also in transformers' bf16, and the errors of such tokens are large.
With experts the 75 % quantile of the errors may therefore be three times the 75 % quantile of transformers' errors. (On
CPU, for four states of each family on TP1 and TP2, the ratio is at most 2.3. The 90 % quantile depends on the number of
tokens with other experts.)
"""

import importlib.util
import sys
import tempfile
import traceback
from contextlib import suppress
from unittest import mock

import pytest
import torch

import mcore_bridge as mb
from tests.support import forward_batches, records
from tests.support.bounds import excess
from tests.support.gpu_batches import FAMILIES, has_experts, is_refused
from tests.support.gpus import chosen, spawn, with_replicas
from tests.support.parity import BATCH, LONG, reference_model, tokens
from tests.support.strategies import random_state

pytestmark = pytest.mark.multigpu

for _name in ("nemotron_h", "falcon_h1", "granitemoehybrid"):  # transformers checks for kernels when it imports these
    with suppress(ImportError):
        _module = importlib.import_module(f"transformers.models.{_name}.modeling_{_name}")
        with mock.patch.dict(sys.modules, {"mamba_ssm": None, "causal_conv1d": None}):
            importlib.reload(_module)
"""So transformers computes mixers in torch, and only our model by the kernels, whose products are TF32 in fp32."""
with suppress(ImportError):  # flash-linear-attention solves systems in TF32, whatever Triton's default is
    from fla.ops.gated_delta_rule import chunk_fwd
    from triton.language import constexpr

    chunk_fwd.SOLVE_TRIL_DOT_PRECISION = constexpr("ieee")

WAYS = [("torch", torch.float32, True), ("torch", torch.bfloat16, False)]
if importlib.util.find_spec("transformer_engine"):
    WAYS = [
        ("te", torch.bfloat16, True),
        ("te", torch.bfloat16, False),
        ("te", torch.float32, True),
        ("torch", torch.bfloat16, True),
    ]
"""Backend, dtype, and whether sequences are packed."""
HALF = {"qwen3": [(WAYS[0][0], torch.float16, True)]}
"""Additional cases of single families."""
MESHES = {
    1: [mb.ParallelDims()],
    2: [
        mb.ParallelDims(tp=2, sp=True),
        mb.ParallelDims(tp=2),
        mb.ParallelDims(cp=2),
        mb.ParallelDims(pp=2),
        mb.ParallelDims(ep=2),
    ],
    4: [
        mb.ParallelDims(tp=2, cp=2, sp=True),
        mb.ParallelDims(cp=4),
        mb.ParallelDims(tp=2, pp=2, sp=True),
        mb.ParallelDims(tp=2, cp=2, ep=4, sp=True),
        mb.ParallelDims(cp=2, pp=2, vp=2),
    ],
    8: [
        mb.ParallelDims(tp=2, cp=4, sp=True),
        mb.ParallelDims(tp=2, pp=4, sp=True),
        mb.ParallelDims(tp=2, pp=2, vp=2, ep=2, sp=True),  # and two replicas
        mb.ParallelDims(tp=2, cp=2, pp=2, ep=4, sp=True),
    ],
}


def references(hf, state, dtypes):
    """transformers' logits in fp32, and the errors of its log-probs in each dtype of half precision."""

    def computed(dtype):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model = reference_model(hf, folder, state, dtype).cuda()
            if hasattr(model, "set_experts_implementation"):  # torch's grouped kernel takes no odd sizes
                model.set_experts_implementation("eager")
            return model(tokens(hf, LONG).cuda()).logits.cpu()

    exact = computed(torch.float32)
    known = forward_batches.expected_of(exact, hf)[0]
    return exact, {dtype: forward_batches.expected_of(computed(dtype), hf)[0] - known for dtype in dtypes}


def examine(hf, dims, backend, dtype, packed, state, reference):
    """The error of log-probs divided by the bound, for two microbatches with two rows each."""
    exact, rounded = reference
    models = mb.build_model(hf, dims=dims, backend=backend, dtype=dtype, load_weights=state)
    exported = mb.to_hf_state_dict(models, device="cpu")
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], tensor.to(exported[name].dtype)) for name, tensor in state.items())
    for model in models:
        model.eval()
    known = forward_batches.expected_of(exact, hf)[0]
    ids, mask, expected = (torch.cat([each, each.flip(0)]) for each in (*forward_batches.batch_of(hf), known))
    found = mb.forward(models, ids.cuda(), mask.cuda(), packed=packed, micro_batch_size=BATCH).log_probs.cpu()
    assert found.shape == (2 * BATCH, LONG)
    if dtype is torch.float32:
        return float((found - expected).abs().max() / exact.std()) / 1e-4
    own = torch.cat([rounded[dtype], rounded[dtype].flip(0)])
    return excess(found - expected, own, routed=has_experts(hf))


def ways_of(family):
    return [*WAYS, *HALF.get(family, [])]


def rank_main(rank, world_size, families, names):
    """Check each of these families in every way on every mesh of this size."""
    from megatron.core import parallel_state

    mb.ParallelDims().initialize(device="cuda")
    parallel_state.destroy_model_parallel()
    hfs = {family: FAMILIES[families][family] for family in names}
    states = {family: random_state(hf, dtype=torch.bfloat16) for family, hf in hfs.items()}
    dtypes = {family: {dtype for _, dtype, _ in ways_of(family)} - {torch.float32} for family in hfs}
    known = {family: references(hf, states[family], dtypes[family]) for family, hf in hfs.items()}
    findings = {}
    for dims in MESHES[world_size]:
        dims.initialize(device="cuda")
        assert world_size % dims.smallest_world == 0
        mesh = with_replicas(dims, world_size)
        for family, hf in hfs.items():
            if dims.ep > 1 and not has_experts(hf):
                continue
            for backend, dtype, packed in ways_of(family):
                key = mesh, family, backend, str(dtype).removeprefix("torch."), "packed" if packed else "rows"
                try:
                    findings[key] = examine(hf, dims, backend, dtype, packed, states[family], known[family])
                except Exception as error:
                    if is_refused(error, dims, hf):
                        continue
                    findings[key] = traceback.format_exc()
                if rank == 0:
                    print(*key, str(findings[key]).splitlines()[-1], flush=True)
        parallel_state.destroy_model_parallel()
    return findings


@pytest.mark.parametrize("families", FAMILIES)
@pytest.mark.parametrize("world_size", MESHES)
def test_log_probs_are_those_of_transformers(world_size, families, tmp_path, request):
    names = chosen(request.config, FAMILIES[families])
    found = spawn(rank_main, tmp_path, world_size, families, names)
    errors = [each for findings in found for each in findings.items()]
    wrong = {key: error for key, error in errors if not (isinstance(error, float) and error < 1)}
    passed = [(key[:2], key not in wrong) for key, _ in errors]
    records.append(request.config.getoption("--record"), "log-probs", world_size, passed)
    assert not wrong, "\n".join(f"{key}: {error}" for key, error in wrong.items())
