"""One rank of vLLM's CPU build in a worker of the pool: its model classes and loaders, with no engine around them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from tests.workers.rollout_families import ENGINE_FIELDS


class Rank(NamedTuple):
    """The config with which a worker of vLLM builds models."""

    config: Any

    def loaded(self, pairs: Iterable[tuple[str, Tensor]]) -> nn.Module:
        """A new model that has taken these as vLLM starts."""
        from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
        from vllm.utils.torch_utils import set_default_torch_dtype

        model_config = self.config.model_config
        self.config.compilation_config.static_forward_context.clear()  # names of the layers of another model
        with set_default_torch_dtype(model_config.dtype):
            model = initialize_model(self.config)
            model.load_weights(pairs)
            process_weights_after_loading(model, model_config, torch.device("cpu"))
        return model

    def reloader(self, model: nn.Module) -> Any:
        """The loader of weights that are not the first."""
        from mcore_bridge.engines.vllm import reload
        from tests.workers.rollout_worker import pack_experts_again

        def reloaded(pairs: Iterator[tuple[str, Tensor]]) -> None:
            pack_experts_again(model)
            reload(model, self.config.model_config, torch.device("cpu"), pairs)

        return reloaded


@contextlib.contextmanager
def rank(family: str, hf: Any, folder: Path, dtype: torch.dtype, mesh: Mapping[str, Any]) -> Iterator[Rank]:
    """One rank in the worker's process group, and nothing of it afterwards."""
    os.environ.update(VLLM_ALLOW_LONG_MAX_MODEL_LEN="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_MLA_DISABLE="1")
    os.environ["VLLM_DIST_IDENT"] = str(os.getppid())  # which the ranks of an engine share
    from vllm import _custom_ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs

    from tests.workers.rollout_worker import register_configs

    _custom_ops._supports_onednn = False  # its kernels keep weights in a special form, out of reach
    vars(_custom_ops).pop("causal_conv1d_weight_pack", None)  # kernels of convolutions in bf16 do this, too
    register_configs()
    fields = {**hf.to_dict(), "architectures": [CLASSES.get(hf.model_type)], **ENGINE_FIELDS.get(family, {})}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**fields, "dtype": str(dtype).removeprefix("torch.")}))
    arguments = EngineArgs(
        model=str(folder),
        dtype=dtype,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=128,
        enforce_eager=True,
        **mesh,
    )
    config = arguments.create_engine_config()
    config.parallel_config.rank = dist.get_rank()
    with set_current_vllm_config(config):
        try:
            parallel_state.init_distributed_environment(
                dist.get_world_size(), dist.get_rank(), local_rank=dist.get_rank(), backend="gloo"
            )
            sizes = config.parallel_config
            parallel_state.initialize_model_parallel(
                sizes.tensor_parallel_size, sizes.pipeline_parallel_size, backend="gloo"
            )
            yield Rank(config)
        finally:
            parallel_state.destroy_model_parallel()
            if parallel_state._WORLD is not None:
                parallel_state._WORLD.destroy()
            parallel_state._WORLD = None  # vLLM's own function would end the pool's group too
