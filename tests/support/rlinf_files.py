"""The settings for RLinf's convertor."""

import torch
from safetensors.torch import save_file

from tests.support.strategies import random_state

PLAIN = {"te_ln_linear_qkv": False, "te_ln_linear_mlp_fc1": False, "te_ln_add_extra_state": None}


def source(hf, folder, dtype=torch.float32):
    """A folder of HF, in two files."""
    folder.mkdir()
    state = {name: tensor.to(dtype) for name, tensor in random_state(hf).items()}
    names = list(state)
    for part, held in (("a", names[::2]), ("b", names[1::2])):
        save_file({name: state[name] for name in held}, folder / f"model-{part}.safetensors")
    hf.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer.model", "merges.txt"):
        (folder / name).write_text("{}")
    return str(folder), state


def asked(folder, *, tp=1, pp=1, ep=1, etp=1, **more):
    return {
        "model": "any",
        "model_type": None,
        "save_path": str(folder),
        "use_gpu_num": 0,
        "use_gpu_index": None,
        "process_num": 16,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        **more,
    }


def name_of_this_rank(dims):
    """The name that megatron's ``get_checkpoint_name`` returns."""
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if dims.pp > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    return name + (f"_{parallel_state.get_expert_model_parallel_rank():03d}" if dims.ep > 1 else "")
