"""Images on real GPUs: log-probs and gradients of the tower equal transformers', on every mesh, both backends.

In fp32 they must agree, and the gradients of a tower have equal bits on all replicas. In bf16 log-probs may have as
large an error as ``test_gpu_forward.py`` allows, in relation to the error of transformers in bf16.
"""

import importlib.util
import traceback

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.errors import BridgeError
from tests.support import composites, seeing
from tests.support.bounds import excess
from tests.support.gpus import chosen, spawn
from tests.support.stepping import leave_mesh

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif("qwen3_5" not in composites.NAMES, reason="the installed transformers lacks it"),
]
FAMILIES = [
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen2_5_vl",
    "glm4v",
    "internvl",
    "mistral3",
    "gemma3",
]
BOUND = 1e-4
BACKENDS = ["te", "torch"] if importlib.util.find_spec("transformer_engine") else ["torch"]
MESHES = {
    1: [{}],
    2: [{"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2}, {}, {"ep": 2}],
    4: [{"tp": 2, "pp": 2, "sp": True}, {"tp": 2, "cp": 2, "sp": True}],
}
"""Meshes of each number of ranks; an empty mesh has replicas only."""
WAYS = [(backend, dtype) for backend in BACKENDS for dtype in (torch.float32, torch.bfloat16)]


def reference(folder, batch, dtype):
    """transformers' log-probs and gradients, computed on the GPU."""
    torch.backends.cudnn.allow_tf32 = False  # patches go through a convolution
    model = seeing.reference(folder, dtype).cuda()
    images = [each and {name: _on_gpu(value, dtype) for name, value in each.items()} for each in batch[2]]
    log_probs, tower = seeing.expected(model, batch[0].cuda(), batch[1].cuda(), images)
    return log_probs.cpu(), {name: gradient.cpu().float() for name, gradient in tower.items()}


def _on_gpu(value, dtype):
    return value.to("cuda", dtype if value.is_floating_point() else None)


def rank_main(rank, world_size, folders, batches, known):
    """The results of a step of each family on every mesh of this size, in every way; or the reason of a refusal.

    The first rank prints results at once, so that an interrupted run has shown some.
    """
    mb.ParallelDims().initialize(device="cuda")
    leave_mesh()
    findings = {}
    for name, folder in folders.items():
        for sizes in MESHES[world_size]:
            if "ep" in sizes and "moe" not in name:
                continue
            for backend, dtype in WAYS:
                for packed in (True, False):
                    key = name, str(mb.ParallelDims(**sizes)), backend, dtype, packed
                    options = {"device": "cuda", "dtype": dtype, "backend": backend, "packed": packed}
                    try:
                        findings[key] = seeing.step(folder, sizes, batches[name], **options)
                    except BridgeError as error:
                        findings[key] = f"refused: {error}"
                    except Exception:
                        findings[key] = traceback.format_exc()
                    if rank == 0:
                        said = problems(key, [findings[key]], *known[name])
                        print(*key, str(said or "good")[-300:], flush=True)
    return findings


def problems(key, ranks, exact, rounded):
    """A text that describes the errors."""
    name, _, backend, dtype, _ = key
    if texts := [each for each in ranks if isinstance(each, str)]:
        words = ["refused"] if name == "gemma3" and backend == "te" else []  # bidirectional masks
        words += ["context parallel"] if name.startswith("qwen3_5") else []  # of gated delta nets
        return [text for text in texts if not (text.startswith("refused") and any(word in text for word in words))]
    if dtype is torch.float32:
        return seeing.problems(ranks, exact, BOUND)
    own = rounded[0] - exact[0]
    errors = [
        excess(each["log_probs"] - exact[0][each["rows"]], own[each["rows"]], routed="moe" in name) for each in ranks
    ]
    return [f"log-probs are {max(errors):.2f} of what is allowed"] if max(errors) >= 1 else []


@pytest.mark.parametrize("world_size", MESHES)
def test_images_are_seen_as_by_transformers(world_size, tmp_path, request):
    names = chosen(request.config, FAMILIES)
    folders = {name: seeing.written(name, tmp_path / name) for name in names}
    batches = {name: seeing.batch_of(seeing.reference(folder)) for name, folder in folders.items()}
    known = {
        name: [reference(folders[name], batches[name], dtype) for dtype in (torch.float32, torch.bfloat16)]
        for name in names
    }
    given = {name: (*batches[name], known[name][0][0]) for name in names}
    found = spawn(rank_main, tmp_path, world_size, folders, given, known)
    said = {key: problems(key, [each[key] for each in found], *known[key[0]]) for key in found[0]}
    assert not {key: wrong for key, wrong in said.items() if wrong}
