"""``model="hybrid"`` through the calls of trainers: a step and its export have the bits of ``model="gpt"``."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mcore_bridge import ParallelDims, to_transformer_config
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.hybrid_support import RELEASE
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.trainers import mbridge, megatron_bridge
from mcore_bridge.trainers.rlinf import ReshardFunctions, model_provider
from mcore_bridge.trainers.slime import convert_to_hf
from tests import zoo
from tests.support import pool, stepping, tiny
from tests.support.rlinf_blocks import block
from tests.support.trainer_calls import attention_switches, build_role

CASES = [("mbridge", "qwen3_moe", {"tp": 2, "sp": True}), ("megatron_bridge", "granitemoehybrid", {"pp": 2})]
needs_it = pytest.mark.skipif(not RELEASE.is_installed, reason="the installed megatron-core has no HybridModel")


def lives(folders: dict[str, str], out: str) -> list[str]:
    """Runs in a worker: the differences between an actor, or a critic, of the two classes."""
    differing = []
    for face, name, sizes in CASES:
        dims, is_critic, found = ParallelDims(**sizes), face == "megatron_bridge", []
        with attention_switches(), stepping.mesh(dims):
            for model in ("gpt", "hybrid"):
                build: dict[str, Any] = {"dtype": torch.float32, "model": model, "value": is_critic}
                saved = f"{out}/{face}-{model}"
                role = build_role(face, folders[name], dims, **build)
                role.load(folders[name])
                stepping.forward_backward(role.models, dims, tiny.tokens(2), head=is_critic)
                with torch.no_grad():
                    for parameter in stepping.trained(role.models):
                        parameter -= parameter.main_grad
                weights = {each: tensor.clone() for each, tensor in role.export()}
                role.save(saved)
                again = build_role(face, saved, dims, **build)
                again.load(saved, resume=True)
                same = all(torch.equal(tensor, weights[each]) for each, tensor in again.export())
                found.append((type(unwrapped(role.models[0])).__name__, same, weights))
        one, other = found
        assert (one[:2], other[:2]) == (("GPTModel", True), ("HybridModel", True))
        assert one[2].keys() == other[2].keys()
        differing += [f"{face}: {each}" for each in one[2] if not torch.equal(one[2][each], other[2][each])]
    return differing


def unwrapped(model: Any) -> nn.Module:
    while hasattr(model, "module"):
        model = model.module
    return model


@needs_it
def test_both_surfaces_train_a_hybrid_model(tmp_path: Any) -> None:
    folders = {name: str(tiny.random_checkpoint(zoo.cases()[name].hf, tmp_path / name)) for _, name, _ in CASES}
    assert pool.run(2, lives, folders, str(tmp_path)) == [[], []]


def test_a_megatron_core_without_it_is_refused_by_every_surface(tmp_path: Any) -> None:
    folder = tiny.random_checkpoint(zoo.cases()["qwen3"].hf, tmp_path)
    if RELEASE.is_installed:
        expected, model = "model must be one of gpt, hybrid, found 'mamba'", "mamba"
    else:
        expected, model = 'model="hybrid" needs megatron-core 0.19 or later, found', "hybrid"
    with rank_of(ParallelDims(), 0, 1):
        provider = megatron_bridge.AutoBridge.from_hf_pretrained(folder).to_megatron_provider()
        bridge = mbridge.AutoBridge.from_config(zoo.cases()["qwen3"].hf)
        actor = {**block("math_grpo"), "model": {"precision": 32}}
        rlinf = model_provider(actor, hf=folder, load_weights=False, device="cpu", model=model)
        for build in (
            lambda: provider.apply_overrides_and_finalize(overrides={"model": model}),
            lambda: bridge.set_extra_args(model=model),
            lambda: rlinf(True, True),
        ):
            with pytest.raises(ConfigError, match=re.escape(expected)):
                build()


def test_parameters_one_by_one_are_refused(tmp_path: Any) -> None:
    """slime's and RLinf's functions get only names, and names of halves equal the names of other layers."""
    hf = zoo.cases()["qwen3"].hf
    hf.save_pretrained(tmp_path)
    args, config = SimpleNamespace(hf_checkpoint=tmp_path), to_transformer_config(hf)
    for name in ("decoder.final_norm.weight", "decoder.layers.4.self_attention.linear_proj.weight"):
        with pytest.raises(ConfigError, match=r'HybridModel.* model="gpt", with 4 layers.*by iter_hf_weights'):
            convert_to_hf(args, "any", f"module.module.{name}", torch.zeros(48))
        with pytest.raises(ConfigError, match=r"HybridModel.*by MegatronCoreWeightReshard"):
            ReshardFunctions(config, hf=hf).convert_fn({name: torch.zeros(48)})
