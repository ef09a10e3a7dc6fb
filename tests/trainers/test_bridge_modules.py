"""Megatron-Bridge's modules in the form in which miles, SkyRL and AReaL import them; none of the three is needed."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from mcore_bridge import ParallelDims, to_hf_state_dict
from mcore_bridge.errors import ConfigError, MeshError
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.trainers.wrap import wrap
from tests import zoo
from tests.support import tiny
from tests.support.strategies import random_state, save
from tests.support.target_models import assert_gets
from tests.support.trainer_calls import attention_switches
from tests.support.written_weights import read
from tests.workers.trainer_modules import switched_on


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen2 with files beside its weights."""
    path = tiny.random_checkpoint(tiny.config("qwen2"), tmp_path_factory.mktemp("qwen2"), dtype=torch.bfloat16)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(params=["in_miles", "skyrl", "areal"])
def bridge(request, folder):
    """The bridge that a trainer gets from Megatron-Bridge's module, on one rank."""
    with attention_switches(), rank_of(ParallelDims(), 0, 1), switched_on(f"mcore_bridge.trainers.{request.param}", ()):
        yield importlib.import_module("megatron.bridge").AutoBridge.from_hf_pretrained(
            str(folder), trust_remote_code=True, dtype="float32"
        )


def test_a_bridge_has_what_the_trainers_read(bridge, folder, tmp_path):
    assert bridge.hf_pretrained.config.model_type == "qwen2"
    assert bridge.hf_pretrained.name_or_path == str(folder)
    bridge.hf_pretrained.save_artifacts(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "generation_config.json", "tokenizer.json"}
    (tmp_path / "config.json").write_text("own")
    bridge.hf_pretrained.save_artifacts(tmp_path)
    assert (tmp_path / "config.json").read_text() == "own"
    config = bridge.transformer_config
    config.num_layers = 99
    assert (bridge.transformer_config.num_layers, config.params_dtype) == (4, torch.float32)


def test_a_provider_gives_a_stage_and_its_adapters_pass_peft(bridge, folder):
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.finalize()
    chunk = provider.provide(pre_process=True, post_process=True)
    assert_gets(to_hf_state_dict([chunk]), {name: tensor.float() for name, tensor in read(folder).items()})
    with pytest.raises(MeshError, match="split the pipeline in the same way"):
        provider.provide(pre_process=True, post_process=False)
    lora = importlib.import_module("megatron.bridge.peft.canonical_lora").CanonicalLoRA
    adapters = lora(target_modules=["linear_q", "linear_fc2"], dim=4, alpha=8, exclude_modules=[], lora_dtype=None)
    assert adapters([chunk], training=True) == [chunk]
    adapters.set_params_to_save([chunk])
    names = [given[0] for given in bridge.export_adapter_weights([chunk])]
    functions = importlib.import_module("megatron.bridge.models.conversion.peft_bridge")
    assert functions.infer_target_modules_from_adapter_weights(names) == ["down_proj", "q_proj"]
    config = functions.build_adapter_config_dict(adapters, ["q_proj"], base_model_name_or_path="base")
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, "base")


def test_adapters_that_differ_from_megatron_bridges_are_refused(bridge):
    lora = importlib.import_module("megatron.bridge.peft.lora").LoRA
    with pytest.raises(ConfigError, match=r"exclude_modules.*experts_shared_outer_loras"):
        lora(dim=4, exclude_modules=["linear_qkv"], experts_shared_outer_loras=True)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.finalize()
    chunk = provider.provide()
    with pytest.raises(ConfigError, match=r"lora_dtype must be None or the model's torch\.float32"):
        lora(dim=4, lora_dtype=torch.bfloat16)([chunk])
    settings = importlib.import_module("megatron.bridge.training.config")
    ddp = settings.DistributedDataParallelConfig(use_distributed_optimizer=False)
    ddp.finalize()
    with pytest.raises(ConfigError, match="wrapped"):
        lora(dim=4)(wrap([chunk], ddp))
    with pytest.raises(ConfigError, match="overlap_param_gather_with_optimizer_step must be False"):
        provider.provide_distributed_model(ddp, overlap_param_gather_with_optimizer_step=True)


def test_areals_converter_is_slimes(tmp_path):
    hf = zoo.cases()["qwen3"].hf
    save(state := random_state(hf), hf, tmp_path)
    with switched_on("mcore_bridge.trainers.areal", ()):
        convert = importlib.import_module("mcore_bridge.trainers.areal").convert_to_hf
        given = (SimpleNamespace(mtp_num_layers=None), "qwen3", "module.module.decoder.final_layernorm.weight")
        norm = state["model.norm.weight"]
        hf.name_or_path = str(tmp_path)
        assert_gets(dict(convert(*given, norm, hf_config=hf)), {"model.norm.weight": norm})
        for wrong in ({"hf_config": hf, "fp8_direct_convert": True}, {"hf_config": SimpleNamespace()}):
            with pytest.raises(ConfigError, match="expected fp8_direct_convert=False and an hf_config with a path"):
                convert(*given, norm, **wrong)
