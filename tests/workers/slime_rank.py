"""slime's own modules in workers of the pool, with the diffs of docs/trainers/slime.md applied to a copy of its files.

slime's code runs. Two things are replaced: SGLang, whose three names slime imports, and CUDA, by slime's own interface
for devices. A CPU has no TransformerEngine, so parameters get the names that they have there.
"""

import contextlib
import importlib
import importlib.util
import re
import shutil
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.trainers.wrap import wrap
from tests.support import stepping
from tests.support.written_weights import read
from tests.workers.rlinf_worker import diffs_of
from tests.workers.siirl_worker import _Nothing
from tests.workers.trainer_modules import Absent

PAGE = (Path(__file__).parent.parent.parent / "docs" / "trainers" / "slime.md").read_text()
UTILS = "slime.backends.megatron_utils"
_SGLANG = ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.utils.patch_torch", "sglang.srt.weight_sync")
ABSENT = (
    *(*_SGLANG, "sglang.srt.weight_sync.tensor_bucket", "sglang.srt.layers", "sglang.srt.layers.quantization"),
    *("sglang.srt.layers.quantization.fp8_utils", "sglang.srt.model_loader", "sglang.srt.model_loader.utils"),
)
_EXPERT = re.compile(r"local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1",
    "q_layernorm.weight": "linear_q_up_proj",
    "kv_layernorm.weight": "linear_kv_up_proj",
}
"""Norms, and the layers that hold them in TransformerEngine, if a model has these layers."""
BUFFER = 1 << 15  # bytes: some parameters, so that a pass has many chunks


def copy_with_diffs(folder: Path) -> str:
    """Copy slime, and the tools beside its package, into ``folder``, and change it as the page says."""
    (package,) = importlib.util.find_spec("slime").submodule_search_locations  # type: ignore[union-attr]
    shutil.copytree(package, folder / "slime")
    shutil.copytree(Path(package).parent / "tools", folder / "tools")
    for diff in diffs_of(PAGE, "slime"):
        file = folder / diff.file
        file.write_text(diff.applied(file.read_text()))
        compile(file.read_text(), diff.file, "exec")
    return str(folder)


class _AsInTE(nn.Module):
    """A wrapper that names parameters as models of TransformerEngine do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.config = module, module.config

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        for name, tensor in self.module.named_parameters():
            yield f"module.{self._renamed(name)}", tensor

    def _renamed(self, name: str) -> str:
        for norm, layer in _NORMS.items():
            before, found, _ = name.partition(norm)
            if found and any(each.endswith(f"{before}{layer}.weight") for each, _ in self.module.named_parameters()):
                return f"{before}{layer}.layer_norm_weight"
        return _EXPERT.sub(r"\2.\3\1", name)


@contextlib.contextmanager
def in_slime(copy: str, dims: ParallelDims) -> Iterator[Any]:
    """Import the copy in ``copy`` on a mesh of a CPU; yields a function that imports one of its modules."""
    absent = [name for name in ABSENT if name not in sys.modules]
    with (
        stepping.mesh(dims),
        mock.patch.dict(sys.modules, {name: _Nothing(name) for name in absent}),
        mock.patch.object(sys, "path", [copy, f"{copy}/tools", *sys.path]),
    ):
        devices = importlib.import_module("slime.utils.accelerator")
        devices.set_accelerator(_cpu(importlib.import_module("slime.utils.accelerator.base").Accelerator))
        importlib.import_module("slime.utils.distributed_utils").set_gloo_group(dist.group.WORLD)
        yield lambda name: importlib.import_module(f"{UTILS}.{name}")
        for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
            del sys.modules[name]


def _cpu(base: type) -> Any:
    answers: dict[str, Any] = {name: mock.Mock(return_value=0) for name in base.__abstractmethods__}  # type: ignore[attr-defined]
    answers |= {"is_available": lambda self: True, "device": lambda self, index=None: torch.device("cpu")}
    return type("Cpu", (base,), {**answers, "current_device": lambda self: "cpu", "name": "cpu"})()


def chunks_of(folder: str, dims: ParallelDims, values: str | None) -> list[Any]:
    """This rank's chunks as slime has them: of another builder, in bf16 and wrapped; loaded from ``values``."""
    chunks = mb.build_model(folder, dims=dims, device="cpu", load_weights=values or False)
    for chunk in chunks:
        for name in [name for name in vars(chunk) if name.startswith("bridge")]:
            delattr(chunk, name)
    return [_AsInTE(chunk) for chunk in wrap(chunks, None)]


def padded(vocab_size: int) -> int:
    """The rows of an embedding at TP2."""
    return vocab_size + vocab_size % 2


def arguments_of(folder: str) -> Any:
    """slime's arguments, as far as these modules read them."""
    config = mb.to_transformer_config(folder)
    return SimpleNamespace(
        hf_checkpoint=folder,
        num_experts=config.num_moe_experts,
        num_layers=config.num_layers,
        padded_vocab_size=padded(AutoConfig.from_pretrained(folder).vocab_size),
        model_name=None,
        update_weight_buffer_size=BUFFER,
        actor_num_gpus_per_node=2,
    )


def loads(copy: str, dims: ParallelDims, folder: str) -> list[str]:
    """Run in a worker: the parameters that our ``load_hf_weights`` and slime's own loader fill differently."""
    with in_slime(copy, dims) as module:
        package, args = module("hf_to_megatron"), arguments_of(folder)
        assert package.supports_hf_weight_loading(folder)
        named = module("update_weight.common").named_params_and_buffers
        ours, theirs = (chunks_of(folder, dims, None) for _ in range(2))
        package.load_hf_weights(args, ours, folder)
        config = AutoConfig.from_pretrained(folder)
        own = package._LOADERS[config.model_type]
        module("hf_to_megatron.common").load_model_hf_weights(args, theirs, folder, config, own)
        pairs = list(zip(named(args, ours), named(args, theirs), strict=True))
        assert pairs
        return [name for (name, mine), (_, other) in pairs if not torch.equal(mine, other)]


def critic(copy: str, dims: ParallelDims, folder: str) -> bool:
    """Run in a worker: slime's own builder with our function, for a critic; whether its body has the folder's bits."""
    from megatron.core import parallel_state

    arguments = arguments_of(folder)
    vars(arguments).update(dims.to_config_fields(), params_dtype=torch.bfloat16, only_train_params_name_list=None)
    arguments.custom_model_provider_path = "mcore_bridge.trainers.slime.model_provider"
    absent = Absent(["megatron.training"])
    with in_slime(copy, dims) as module, mock.patch.object(sys, "meta_path", [*sys.meta_path, absent]):
        importlib.import_module("megatron.training.global_vars").get_args = lambda: arguments
        provider = module("model_provider").get_model_provider_func(arguments, role="critic")
        last = parallel_state.is_pipeline_last_stage()
        chunk = provider(pre_process=parallel_state.is_pipeline_first_stage(), post_process=last)
        module("hf_to_megatron").load_hf_weights(arguments, wrap([chunk], None), folder)
        for name in [name for name in sys.modules if name.startswith("megatron.training")]:
            del sys.modules[name]
        (other,) = mb.build_model(folder, dims=dims, device="cpu", head="value")
        assert (type(getattr(chunk, "output_layer", None)).__name__ == "LinearForLastLayer") == last
        mine, own = (
            [each for name, each in model.named_parameters() if not name.startswith("output_layer.")]
            for model in (chunk, other)
        )
        return all(torch.equal(*pair) for pair in zip(mine, own, strict=True))


def sent(copy: str, dims: ParallelDims, folder: str, out: str) -> dict[str, dict[str, Tensor]]:
    """Run in a worker: what each caller of ``convert_to_hf`` gives on this rank."""
    with in_slime(copy, dims) as module:
        args, chunks = arguments_of(folder), chunks_of(folder, dims, folder)
        return {
            "iterator": _iterated(module, args, chunks),
            "saver": _saved(module, args, chunks, out),
            "distributed": _distributed(module, args, chunks),
            **_tensors(module, args, chunks),
        }


def _collected(chunks: Any) -> dict[str, Tensor]:
    """The tensors of chunks; a tensor may not come twice."""
    found: dict[str, Tensor] = {}
    for chunk in chunks:
        assert not found.keys() & dict(chunk).keys()
        found |= {name: tensor.clone() for name, tensor in chunk}
    return found


def _iterator(module: Any, args: Any, chunks: Sequence[Any]) -> Any:
    kind = module("update_weight.hf_weight_iterator_direct").HfWeightIteratorDirect
    return kind(args=args, model=chunks, model_name="any", quantization_config=None)


def _local(module: Any, args: Any, chunks: Sequence[Any]) -> dict[str, Tensor]:
    return dict(module("update_weight.common").named_params_and_buffers(args, chunks))


def _iterated(module: Any, args: Any, chunks: Sequence[Any]) -> dict[str, Tensor]:
    iterator = _iterator(module, args, chunks)
    return _collected(iterator.get_hf_weight_chunks(_local(module, args, chunks)))


def _saved(module: Any, args: Any, chunks: Sequence[Any], out: str) -> dict[str, Tensor]:
    """slime's save of an HF folder, by two writers."""
    module("hf_checkpoint_saver").save_hf_model_to_path(args, out, chunks, model_name="any")
    dist.barrier()
    return read(out)


def _distributed(module: Any, args: Any, chunks: Sequence[Any]) -> dict[str, Tensor]:
    """What a source of a pipeline stage broadcasts to engines on other GPUs."""
    from megatron.core import mpu

    update = module("update_weight.update_weight_from_distributed")
    update = update.UpdateWeightFromDistributed.__new__(update.UpdateWeightFromDistributed)
    update.args, update.model, update.model_name, update.quantization_config = args, chunks, "any", None
    update._is_pp_src_rank = mpu.get_tensor_model_parallel_rank() == 0
    return _collected([*map(list, update._iter_non_expert_chunks()), *map(list, update._iter_expert_chunks())])


def _tensors(module: Any, args: Any, chunks: Sequence[Any]) -> dict[str, Any]:
    """What this rank gives to its engine's rank, with experts sent point to point if slime does so."""
    size = dist.get_world_size()
    args.sglang_ep_size, args.sglang_pp_size = size, 1
    update = module("update_weight.update_weight_from_tensor").UpdateWeightFromTensor
    update = update(args, chunks, lambda: None, model_name="any", quantization_config=None)
    local = _local(module, args, chunks)
    dense, plan = module("update_weight.expert_routing").configure_expert_routing(
        args=args,
        full_param_info_buckets=update._full_param_info_buckets,
        get_local_weight_names=lambda: local,
        engine_gpu_counts=[size],
        engine_gpu_offsets=[0],
        engine_parallel_configs=None,
        use_distribute=False,
    )
    found = _collected(update._hf_weight_iterator.get_hf_weight_chunks(local, param_info_buckets=dense))
    buffers: dict[Any, Any] = {}
    experts = _collected(
        update._prepare_expert_weight_batch(batch, local, buffers) for group in plan for batch in group
    )
    return {"tensor": found | experts, "experts": experts}


def tool(copy: str, dims: ParallelDims, folder: str, out: str) -> list[dict[str, Tensor]]:
    """Run in a worker: a checkpoint of ``torch_dist``, converted by slime's two tools for such folders."""
    with in_slime(copy, dims):
        args = arguments_of(folder)
        checkpoint = f"{out}/torch_dist"
        models = mb.build_model(folder, dims=dims, device="cpu")
        mb.save_checkpoint(models, checkpoint)
        if dist.get_rank() != 0:
            return []
        found = []
        for name in ("convert_torch_dist_to_hf", "convert_torch_dist_to_hf_parallel"):
            module = _tool(copy, name)
            state: dict[str, Any] = {}
            module.dist_cp.state_dict_loader._load_state_dict(
                state,
                storage_reader=module.WrappedStorageReader(checkpoint),
                planner=module.EmptyStateDictLoadPlanner(),
                no_dist=True,
            )
            module.save_tensors(args, "any", state, f"{out}/{name}", BUFFER)
            found.append(read(f"{out}/{name}"))
        return found


def _tool(copy: str, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, f"{copy}/tools/{name}.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module
