"""What the tests ask of vLLM's workers: weights out of slots, digests, a load from files, and to share GPUs."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig, Qwen2Config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

import mcore_bridge as mb
from mcore_bridge.engines.vllm import name_loaders, reload
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


class Examined:
    """``worker_extension_cls`` adds this class to vLLM's worker."""

    def connect_trainer(self, plan, handles, by_map):
        """Open the slots of the trainer, by the handles of this worker."""
        self._receiver = mb.Receiver(plan, handles[self.rank])
        self._by_map, self._engine = by_map, None
        name_loaders(self.model_runner.model)

    @torch.no_grad()
    def forget_weights(self):
        """Leave nothing in memory that anybody could mistake for weights."""
        for parameter in self.model_runner.model.parameters():
            parameter.fill_(torch.nan)

    def reload(self, pairs):
        """As the package does."""
        model = self.model_runner.model
        pack_experts_again(model)
        reload(model, self.model_config, self.device, pairs)

    def load_bucket(self, number):
        """Take the weights of a bucket out of its slot: by a map, or by vLLM's loader."""
        if not self._by_map:
            self.load_by_loader(number)
            return
        if self._engine is None:
            model = self.model_runner.model
            self._engine = mb.map_engine(self._receiver.plan, model, self.reload, engine=f"vllm, worker {self.rank}")
        self._receiver.copy_into(number, self._engine)

    def load_by_loader(self, number):
        """vLLM keeps tensors until a layer is complete, so it gets copies; on its GPU, as its memory may sleep."""
        model = self.model_runner.model
        with self._receiver.open(number) as pairs, torch.device(self.device):
            if number == 0:
                pack_experts_again(model)
                initialize_layerwise_reload(model)
            model.load_weights([(name, tensor.to(self.device, copy=True)) for name, tensor in pairs])

    def finish_round(self):
        """Every weight has come, or this raises."""
        self._receiver.finish()
        if not self._by_map:
            with torch.device(self.device):
                finalize_layerwise_reload(self.model_runner.model, self.model_config)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

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
