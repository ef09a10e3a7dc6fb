"""Adapters as PEFT folders: what ``peft`` writes and what we write are the same bits, on each mesh."""

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from mcore_bridge import ParallelDims, build_model
from mcore_bridge.factory.adapters import add_adapters
from mcore_bridge.weights.adapters import save_hf_adapters
from tests import zoo
from tests.support import experts, pool, stepping, tiny
from tests.support.peft_models import ALPHA, EXPERTS, RANK, batch, fill, named

TP2 = {"tp": 2, "sp": True}
CASES = {
    "qwen3": (lambda: tiny.config("qwen3"), ("q_proj", "v_proj", "down_proj"), (TP2, {"pp": 2})),
    "qwen3_moe": (lambda: experts.HF, ("o_proj", *EXPERTS), ({"ep": 2}, {**TP2, "etp": 2})),
}


def adapted(hf, targets, **options):
    """A model with an adapter of random values, by ``peft``."""
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=[target for target in targets if target not in EXPERTS],
        target_parameters=[f"mlp.{target}" for target in targets if target in EXPERTS] or None,
        **options,
    )
    model = peft.get_peft_model(tiny.random_model(hf), config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def saved(folder, meshes, targets, values):
    """Runs in each worker: writes the adapters of each mesh to a folder of its own."""
    for number, sizes in enumerate(meshes):
        dims = ParallelDims(**sizes)
        with stepping.mesh(dims):
            chunks = build_model(folder, dims=dims, dtype=torch.float32, device="cpu")
            fill(chunks, add_adapters(chunks, rank=RANK, alpha=ALPHA, targets=targets, dialect="fused"), values)
            written = save_hf_adapters(stepping.wrap(chunks), Path(folder) / f"adapter{number}")
            assert not written.differences(type(written).from_folder(Path(folder) / f"adapter{number}"))


@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_that_of_peft(case, tmp_path):
    make, targets, meshes = CASES[case]
    if EXPERTS[0] in targets and not zoo.NEWEST:
        pytest.skip("transformers 4 has a module for each expert")
    tiny.random_checkpoint(make(), tmp_path)
    model = adapted(make(), targets)
    model.save_pretrained(tmp_path / "peft")
    values = named(dict(model.named_parameters()), getattr(make(), "num_experts", 0), "fused")
    pool.run(2, saved, str(tmp_path), meshes, targets, {name: value.detach() for name, value in values})
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for number in range(len(meshes)):
        ours = load_file(tmp_path / f"adapter{number}" / "adapter_model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    loaded = peft.PeftModel.from_pretrained(tiny.random_model(make()), tmp_path / "adapter0").eval()
    with torch.no_grad():
        assert torch.equal(loaded(batch()).logits, model(batch()).logits)
