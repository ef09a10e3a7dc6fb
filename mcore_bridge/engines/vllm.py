"""vLLM's side of a weight sync. With our package installed, the name of a backend is all that a user writes there.

    LLM(model, weight_transfer_config={"backend": "mcore_bridge"})          # vLLM 0.25 or newer
    LLM(model, worker_extension_cls="mcore_bridge.engines.vllm.Extension")  # any release

This module imports nothing of vLLM before a worker uses it, since vLLM loads it as a plug-in in every process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mcore_bridge.engines.engine_worker import EngineWorker, worker_name
from mcore_bridge.errors import TransferError
from mcore_bridge.weights.engine.engine_tensors import all_tensors
from mcore_bridge.weights.engine.loader_thread import Loader

BACKEND = "mcore_bridge"
STARTS = {False: "start_weight_update", True: "start_draft_weight_update"}
"""vLLM's call before a round, of its model and of its draft model."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft model of an engine, as the only engine of a ``WeightSync``. vLLM needs our backend and release 0.26.

    ``WeightSync(models, llm, drafts=drafts)`` sends both models in one call. This class is for a policy that rests.

    >>> sync = mb.WeightSync(drafts, Draft(llm))
    """

    engine: Any
    """vLLM's ``LLM``, one of its clients, the address of a server, or a client with a method ``draft(info)``."""


def register() -> None:
    """Make the backend known to vLLM. vLLM calls this in each of its processes, as a plug-in."""
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # a release without weight transfer
        return
    if hasattr(WeightTransferEngine, "start_weight_update"):
        with suppress(ValueError):  # vLLM may load plug-ins twice in a process
            WeightTransferEngineFactory.register_engine(BACKEND, "mcore_bridge.engines.vllm_backend", "Backend")


def worker_of(
    model: nn.Module,
    config: Any,
    model_config: Any,
    device: torch.device,
    rank: int,
    *,
    load: Loader | None = None,
    hidden: str = "",
) -> EngineWorker:
    """The part of a weight sync that a worker of vLLM plays.

    Args:
        model: the model that gets weights: the worker's own, or a draft model.
        config: vLLM's whole config.
        model_config: the part of it that describes ``model``.
        device: the worker's device.
        rank: the worker's rank among those of its data parallel replica.
        load: the loader of ``model``; None is vLLM's own.
        hidden: why a map of ``load`` would miss weights, as for ``EngineWorker``.
    """
    import vllm

    parallel = config.parallel_config
    first, size = 0, parallel.world_size
    if _is_one_engine(parallel):
        first, size = parallel.data_parallel_index * size, parallel.data_parallel_size * size
    mesh = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, bool(parallel.enable_expert_parallel))
    place, settings = f"worker {first + rank} of {size}", f"{model_config.dtype} {model_config.quantization} {mesh}"
    name = worker_name(f"vllm {vllm.__version__}", model, model_config.hf_config, place, settings)
    loader = load or partial(reload, model, model_config, device)
    hidden = hidden or _hidden_weights(model, device)
    return EngineWorker(model, loader, name=name, rank=first + rank, size=size, hidden=hidden)


def _hidden_weights(model: nn.Module, device: torch.device) -> str:
    """Why vLLM's weights are not all in parameters; empty if they are."""
    if any(hasattr(module, "_fused_kv_weight") for module in model.modules()):
        return "vLLM's loader copies projections and norms of a DFlash or DSpark head to where no map reaches them"
    if device.type == "cpu":
        from vllm import _custom_ops

        if getattr(_custom_ops, "_supports_onednn", False):
            return "vLLM packs weights of linear layers for the kernels of oneDNN on CPUs, where no map reaches them"
    used = (tensor for _, held in chain(*_kernels(model)) for value in held.values() for tensor in _tensors(value))
    if not _addresses(used) <= _addresses(all_tensors(model).values()):
        return "kernels of vLLM's experts hold tensors that are not in parameters, where no map reaches them"
    return ""


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _tensors(value: object) -> list[Tensor]:
    """The tensors in a value and in the dataclasses that it is made of."""
    if isinstance(value, Tensor):
        return [value]
    if not is_dataclass(value) or isinstance(value, type):
        return []
    return [tensor for field in fields(value) for tensor in _tensors(getattr(value, field.name, None))]


_Held = list[tuple[object, dict[str, Any]]]
"""Objects, and some of their attributes."""


def _kernels(model: nn.Module) -> tuple[_Held, _Held]:
    """What kernels of experts are made of: weights that layers have wrapped for Triton, and all that methods hold."""
    methods = {module: getattr(module, "quant_method", None) for module in model.modules()}
    layers = [module for module, method in methods.items() if getattr(method, "moe_quant_config", None) is not None]
    wrapped: _Held = [
        (layer, {name: value for name, value in vars(layer).items() if is_dataclass(value) and _tensors(value)})
        for layer in layers
    ]
    unique = {id(methods[layer]): methods[layer] for layer in layers}.values()
    of_methods: _Held = [  # a kernel that is not there yet may be made
        (method, {name: value for name, value in vars(method).items() if value is not None}) for method in unique
    ]
    return wrapped, of_methods


@contextmanager
def kernels_kept(model: nn.Module) -> Iterator[None]:
    """Have kernels of experts read, after a reload inside, the tensors that they read before the reload.

    vLLM's reload puts parameters where they were, but it makes kernels anew of its temporary tensors. These kernels
    would miss what is written into the parameters later. Also, the reload wants parameters in place of wrapped weights.
    """
    wrapped, of_methods = _kernels(model)
    for layer, held in wrapped:
        for name in held:
            delattr(layer, name)
    yield
    written = _addresses(all_tensors(model).values())
    for owner, held in (*wrapped, *of_methods):
        made = {**held, **vars(owner)}
        before = [tensor for value in held.values() for tensor in _tensors(value)]
        after = [tensor for name in held for tensor in _tensors(made[name])]
        if [(tensor.shape, tensor.dtype) for tensor in before] == [(tensor.shape, tensor.dtype) for tensor in after]:
            with torch.inference_mode():  # vLLM loads in this mode, and only in it can such tensors be changed
                for old, new in zip(before, after, strict=True):
                    if old.untyped_storage().data_ptr() not in written:
                        old.copy_(new)
            vars(owner).update(held)


def _is_one_engine(parallel: Any) -> bool:
    """Whether one call reaches all data parallel replicas: not if each of them is an ``LLM`` or a server of its own."""
    return not (getattr(parallel, "local_engines_only", False) or "VLLM_DP_RANK" in os.environ)


def name_loaders(model: nn.Module) -> None:
    """Give each loader of a parameter a name, for which vLLM's reload asks."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial):
            loader.__name__ = "partial"  # type: ignore[attr-defined]


def reload(model: nn.Module, model_config: Any, device: torch.device, pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Load by vLLM's own loader, and bring each layer into the form that its kernels take."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    name_loaders(model)
    with ExitStack() as stack:
        stack.enter_context(kernels_kept(model))
        stack.enter_context(torch.device(device))
        try:
            from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        except ImportError:
            pass
        else:
            stack.enter_context(disable_mtp_completeness_check())
        initialize_layerwise_reload(model)
        model.load_weights(pairs)  # type: ignore[operator]
        finalize_layerwise_reload(model, model_config)


class Extension:
    """What vLLM's worker can do besides, as a ``worker_extension_cls``: for releases without our backend."""

    model_runner: Any
    vllm_config: Any
    model_config: Any
    device: torch.device
    rank: int

    @cached_property
    def worker_of_trainer(self) -> EngineWorker:
        """The part of this worker in weight syncs."""
        return worker_of(self.model_runner.model, self.vllm_config, self.model_config, self.device, self.rank)

    def receive_from_trainer(self, info: Mapping[str, Any]) -> None:
        """Take part in a round of a ``WeightSync``."""
        self.worker_of_trainer.receive(info)


def receive(llm: Any, info: Mapping[str, Any], version: int = 0, *, draft: bool = False) -> None:
    """Have an ``LLM`` take part in a round of a ``WeightSync``, in whichever process it is.

    Args:
        llm: vLLM's ``LLM``, with our backend or our extension.
        info: what the trainer's call carries.
        version: what the ``LLM`` calls its new weights, except those of its draft model.
        draft: whether its draft model takes part, and not its model.

    Raises:
        TransferError: when the draft model cannot be reached, since the ``LLM`` has no backend or is too old.
    """
    has_backend = getattr(llm.llm_engine.vllm_config, "weight_transfer_config", None) is not None
    if draft and not (has_backend and hasattr(llm, STARTS[True])):
        raise TransferError(
            f'expected vLLM 0.26 or newer with weight_transfer_config={{"backend": "{BACKEND}"}} for a draft model, '
            f"found {'an older release' if has_backend else 'no weight_transfer_config'}"
        )
    if not has_backend:
        llm.collective_rpc(Extension.receive_from_trainer.__name__, args=(dict(info),))
    else:
        getattr(llm, STARTS[draft])()
        llm.update_weights({"update_info": dict(info)})
        llm.finish_weight_update()
    llm.reset_prefix_cache()
    for name in ("reset_mm_cache", "reset_encoder_cache"):  # what towers made of images with older weights
        getattr(llm.llm_engine, name, lambda: None)()
    if not draft:
        getattr(llm.llm_engine, "set_weight_version", lambda text: None)(str(version))


def log_probs(llm: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """The log-probability of each token of each prompt but its first, by an ``LLM``."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], asked, use_tqdm=False)
    return [
        [ranked[token].logprob for token, ranked in zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
