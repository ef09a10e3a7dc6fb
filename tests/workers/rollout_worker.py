"""What the tests ask of vLLM's workers beside what the example asks: their weights' digests, a load from files, and to
share GPUs."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig, Qwen2Config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker
from vllm_engine import WeightReceiver

from mcore_bridge.weights.manifest import digest
from tests.support.gpus import join_from_afar, ranks_per_gpu


class MimoConfig(Qwen2Config):
    """What vLLM asks transformers for, which lacks it."""

    model_type = "mimo"


class BailingConfig(LlamaConfig):
    """The same of Ling."""

    model_type = "bailing_moe_v2"


def register_configs():
    """In an engine's process, before it reads a config."""
    for each in (MimoConfig, BailingConfig):
        AutoConfig.register(each.model_type, each)


class Examined(WeightReceiver):
    """``worker_extension_cls`` adds this class to vLLM's worker."""

    def load_bucket(self, number):
        """As the example does."""
        if number == 0:
            pack_experts_again(self.model_runner.model)
        super().load_bucket(number)

    def reload(self, pairs):
        """As the example does, for a map."""
        pack_experts_again(self.model_runner.model)
        super().reload(pairs)

    def digests(self):
        """Of all that this worker's model holds, by vLLM's names: fused, cut and in the form that its kernels take."""
        model = self.model_runner.model
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: digest(tensor) for name, tensor in held.items()}

    def by_map(self):
        """The version of the weights, why they did not come by the map, and what the loader alone writes."""
        return self._engine.require_whole(), self._engine.reason, self._engine.map.uncovered

    @torch.no_grad()
    def load_folder(self, folder):
        """Take all weights from the files of a checkpoint, and none from the trainer."""
        model = self.model_runner.model
        pack_experts_again(model)
        with torch.device(self.device):
            initialize_layerwise_reload(model)
            for path in sorted(Path(folder).glob("*.safetensors")):
                model.load_weights([(name, tensor.to(self.device)) for name, tensor in load_file(path).items()])
            finalize_layerwise_reload(model, self.model_config)


class Sharing(Worker):
    """``worker_cls``: one of several on a GPU."""

    def __init__(self, *, local_rank, rank, **rest):
        join_from_afar(rank)
        super().__init__(local_rank=local_rank // ranks_per_gpu(), rank=rank, **rest)


def pack_experts_again(model):
    """When they have been loaded: on CPU vLLM 0.32 does so only where it makes their kernel, which it keeps."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if current_platform.is_cpu() and hasattr(method, "moe_kernel"):
            method.moe_kernel = None
