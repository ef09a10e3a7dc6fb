"""Functions of miles, SkyRL and AReaL that call Megatron-Bridge, in workers of the pool: they build, load, save, adapt.

The lines of the trainers' pages put our modules in the place of Megatron-Bridge's. Optimizers and engines are not run.
"""

import asyncio
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.trainers.wrap import wrap
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support import stepping
from tests.support.trainer_calls import attention_switches
from tests.support.written_weights import read
from tests.workers.trainer_modules import switched_on

ABSENT = {
    "miles": ("megatron.training", "sglang"),
    "skyrl": ("megatron.core.dist_checkpointing.strategies.base", "skyrl_gym", "datasets", "pybase64"),
    "areal": ("flask", "torchdata", "werkzeug", "lark", "numba", "PIL", "openai", "mbridge"),
}
"""Packages that modules of a trainer import for other work."""
RANK, ALPHA = 4, 8


@contextmanager
def _in_trainer(name: str, ours: str, dims: ParallelDims) -> Iterator[None]:
    with attention_switches(), stepping.mesh(dims), switched_on(ours, ABSENT[name]):
        yield


def _exported(models: Any, **options: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in mb.iter_hf_weights(models, **options)}


def _randomised(models: Any) -> dict[str, Tensor]:
    """Give adapters values, and return what PEFT's folder must hold of them."""
    for name, tensor in held_tensors(models).items():
        if "adapter" in name:
            tensor.data.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
    return {name: tensor.clone() for name, tensor in mb.iter_hf_adapters(models)}


# miles ----------------------------------------------------------------------------------------------------------------


def miles(dims: ParallelDims, folder: str, out: str) -> dict[str, Any]:
    """Run in a worker: bridge mode without and with LoRA."""
    with _in_trainer("miles", "mcore_bridge.trainers.in_miles", dims):
        module = functools.partial(_module, "miles.backends.megatron_utils")
        args, found = _miles_arguments(dims, folder), {}
        models = _miles_models(module, args)
        load = module("checkpoint")._load_checkpoint_hf
        load(models, None, args, folder)
        found["loaded"] = _exported(models)
        with _miles_state(module):
            module("hf_export").save_hf_model(args, 0, models, path=f"{out}/plain", raise_on_error=True)
            found["saved"] = read(f"{out}/plain")
            adapted = module("bridge_lora_helpers")._setup_lora_model_via_bridge(args)
            load(adapted, None, args, folder)
            found["adapters"], found["merged"] = _randomised(adapted), _exported(adapted, merged=True)
            module("lora_utils").save_lora_checkpoint(adapted, args, f"{out}/adapter")
            module("hf_export").save_hf_model(args, 0, adapted, path=f"{out}/merged", raise_on_error=True)
        bridge = module("hf_export")._get_hf_bridge(folder)
        found["triples"] = [(name, third) for name, _, third in bridge.export_adapter_weights(adapted)]
        found["merged saved"] = read(f"{out}/merged")
        return found


def _module(package: str, name: str) -> Any:
    return importlib.import_module(f"{package}.{name}")


def _miles_models(module: Callable[[str], Any], args: Any) -> list[Any]:
    """This rank's chunk, as Megatron-LM's ``get_model`` makes it from miles's function."""
    from megatron.core import parallel_state

    provider = module("model_provider").get_model_provider_func(args)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    return wrap([provider(pre_process=first, post_process=last)], None)


@contextmanager
def _miles_state(module: Callable[[str], Any]) -> Iterator[None]:
    """miles's record of the mesh, as far as these functions read it."""
    from megatron.core import parallel_state as mpu

    tp, pp, dp = (
        SimpleNamespace(rank=rank)
        for rank in (
            mpu.get_tensor_model_parallel_rank(),
            mpu.get_pipeline_model_parallel_rank(),
            mpu.get_data_parallel_rank(),
        )
    )
    state = SimpleNamespace(tp=tp, pp=pp, effective_dp=dp, effective_dp_cp=dp, cp=SimpleNamespace(rank=0))
    with (
        mock.patch.object(module("hf_export"), "get_parallel_state", return_value=state),
        mock.patch.object(module("lora_utils"), "get_parallel_state", return_value=state),
    ):
        yield


def _miles_arguments(dims: ParallelDims, folder: str) -> Any:
    unset = (
        *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "fp8"),
        *("virtual_pipeline_model_parallel_size", "decoder_first_pipeline_num_layers", "model_name", "optimizer"),
    )
    off = (
        *("calculate_per_token_loss", "fp32_residual_connection", "deterministic_mode", "tp_comm_overlap", "fp16"),
        *("gradient_accumulation_fusion", "distribute_saved_activations", "offload_train"),
    )
    from megatron.core.transformer.enums import AttnBackend

    return SimpleNamespace(
        **{name: size for name, size in dims.to_config_fields().items() if name not in unset and "layout" not in name},
        **dict.fromkeys(unset),
        **dict.fromkeys(off, False),
        hf_checkpoint=folder,
        megatron_to_hf_mode="bridge",
        custom_model_provider_path=None,
        attention_backend=AttnBackend.auto,
        variable_seq_lengths=True,
        attention_softmax_in_fp32=True,
        cpu_offloading_num_layers=0,
        fp8_recipe="delayed",
        moe_token_dispatcher_type="alltoall",
        bf16=True,
        accumulate_allreduce_grads_in_fp32=True,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        lora_rank=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
    )


# SkyRL ----------------------------------------------------------------------------------------------------------------


def skyrl(dims: ParallelDims, folder: str, out: str) -> dict[str, Any]:
    """Run in a worker: the policy's model without and with LoRA."""
    with _in_trainer("skyrl", "mcore_bridge.trainers.skyrl", dims):
        package = "skyrl.backends.skyrl_train"
        worker = _module(f"{package}.workers.megatron", "megatron_worker")
        strategy = _module(f"{package}.distributed.megatron", "megatron_strategy").MegatronStrategy
        found = {}
        plain, models = _skyrl_model(worker, dims, folder, None)
        found["loaded"] = _exported(models)
        extractor = worker.MegatronWeightExtractor(plain.bridge, models)
        with mock.patch.object(torch.cuda, "current_device", return_value="cpu"):
            chunks = list(extractor.extract_weights(torch.bfloat16))
        found["sent"] = {chunk.names[0]: chunk.tensors[0].clone() for chunk in chunks}
        found["metadata"] = extractor.get_weight_metadata(torch.bfloat16)["names"]
        saver = SimpleNamespace(is_rank_0=lambda: dist.get_rank() == 0, print=lambda *_: None)
        saver.hf_config = AutoConfig.from_pretrained(folder)
        saver.save_hf_configs = lambda config, path, _: config.save_pretrained(path)
        wrapper = SimpleNamespace(actor_module=models)
        strategy.save_hf_model(saver, plain.bridge, wrapper, f"{out}/plain", distributed_save=True)
        found["saved"] = read(f"{out}/plain")
        adapted, models = _skyrl_model(worker, dims, folder, "lora")
        found["adapters"], found["merged"] = _randomised(models), _exported(models, merged=True)
        adapted.actor_module = models
        client = SimpleNamespace(update_named_weights=_nothing)
        asyncio.run(worker.MegatronPolicyWorkerBase._save_lora_adapters_and_sync(adapted, f"{out}/adapter", client))
        return found


async def _nothing(*_: Any) -> None:
    pass


def _skyrl_model(worker: Any, dims: ParallelDims, folder: str, lora: str | None) -> tuple[Any, list[Any]]:
    """SkyRL's worker without the actor of Ray around it, and its chunks."""
    config = importlib.import_module("skyrl.train.config.config")
    sizes = dims.to_config_fields()
    names = [f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context", "expert_model")]
    megatron = config.MegatronConfig(**{name: sizes[name] for name in names})
    adapters = SimpleNamespace(
        target_modules="all-linear", rank=RANK, alpha=ALPHA, dropout=0.0, init_method="xavier", exclude_modules=None
    )
    cfg = SimpleNamespace(gradient_checkpointing=False, bf16=True, mtp=None)
    self = SimpleNamespace(cfg=cfg, strategy=SimpleNamespace())
    self.configure_lora = functools.partial(worker.MegatronWorker.configure_lora, self)
    tokenizer = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=3)
    with mock.patch.object(worker, "get_tokenizer", return_value=tokenizer):
        worker.MegatronWorker.init_configs(self, folder, megatron, {}, megatron.transformer_config_kwargs)
    models = worker.MegatronWorker.make_megatron_module(
        self, ddp_config=megatron.ddp_config, lora_config=adapters if lora else None, lora_type=lora
    )
    return self, models


# AReaL ----------------------------------------------------------------------------------------------------------------


def areal(dims: ParallelDims, folder: str, out: str) -> dict[str, Any]:
    """Run in a worker: AReaL's engine with ``bridge_type="megatron-bridge"``."""
    with _in_trainer("areal", "mcore_bridge.trainers.areal", dims):
        engine = importlib.import_module("areal.engine.megatron_engine")
        registry = importlib.import_module("areal.models.mcore.registry")
        api, found = importlib.import_module("areal.api.cli_args"), {}
        self = SimpleNamespace(
            bridge_cls="megatron-bridge",
            enable_tree_training=False,
            dtype=torch.bfloat16,
            config=SimpleNamespace(path=folder, dtype="bfloat16", is_critic=False, use_lora=False),
            mcore_config=api.MegatronEngineConfig(bridge_type="megatron-bridge", recompute_granularity=None),
            logger=mock.Mock(),
            cpu_group=None,
        )
        bridge = engine.MegatronEngine._build_hf_mcore_bridge(self)
        hf, config = registry.make_hf_and_mcore_config(folder, torch.bfloat16, bridge, "megatron-bridge")
        found["dtype"] = str(config.params_dtype)
        self.model = engine._MegatronModelList(
            registry.make_mcore_model(hf, config, self.mcore_config, bridge, "megatron-bridge")
        )
        engine.MegatronEngine._load_model_from_hf(self, folder)
        found["loaded"] = _exported(self.model)
        platform = SimpleNamespace(synchronize=lambda: None, current_device=lambda: "cpu")
        with mock.patch.object(engine, "current_platform", platform):
            engine.MegatronEngine._save_model_to_hf(self, f"{out}/plain")
            dist.barrier()
            found["saved"] = read(f"{out}/plain")
        convert = importlib.import_module("mcore_bridge.trainers.areal").convert_to_hf
        functions = importlib.import_module("areal.engine.megatron_utils.megatron")
        found["sent"] = {}
        for name, parameter in functions.get_named_parameters(self.model, None):
            with mock.patch.object(functions, "current_platform", platform, create=True):
                whole = functions.all_gather_param(name, parameter, fp8_direct_convert=False)
            pairs = convert(config, hf.model_type, name, whole, hf_config=hf)
            found["sent"] |= {name: tensor.clone() for name, tensor in pairs}
        return found
