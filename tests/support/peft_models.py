"""Models with adapters by ``peft``, under our names: the reference for a step with our adapters."""

import copy
import re
import zlib

import peft
import torch

from mcore_bridge.rules.adapters import is_adapter
from mcore_bridge.rules.mapping import axes_of
from mcore_bridge.rules.names import canonical_names, is_stacked
from mcore_bridge.rules.trace import trace
from mcore_bridge.weights.bound import bind
from mcore_bridge.weights.model_chunks import chunks_of, numbering_of
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support import tiny

RANK, ALPHA = 3, 5
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
NARROW = ("experts.up_proj", "experts.down_proj")
"""The experts of a family without gates."""


def of_peft(targets):
    """Targets in the form of ``peft``: modules, and parameters that stack experts."""
    stacks = [target for target in targets if target in EXPERTS + NARROW]
    return {
        "target_modules": [target for target in targets if target not in stacks],
        "target_parameters": stacks or None,
    }


def batch():
    return tiny.tokens(8, vocab_size=64)


SWAPPED = ("llama4_text",)
"""Families for which ``peft`` exchanges inputs and outputs of experts, so that its A is our B transposed."""


IN_FILES = {
    "bailing_hybrid": (("forget_gate.", ""), (".self_attn.", ".attention.")),
    "deepseek_v4": (
        *(("model.layers.", "layers."), (".self_attn.", ".attn.")),
        *((".q_b_proj", ".wq_b"), (".kv_proj", ".wkv"), (".o_b_proj", ".wo_b")),
    ),
    "glm5_next_text": (("forget_gate.", ""),),
    "granitemoe": (("experts.gate_up_proj", "input_linear"), ("experts.down_proj", "output_linear")),
    "kimi_linear": (("forget_gate.", ""), ("mlp.shared_experts", "block_sparse_moe.shared_experts")),
    "lfm3": (("self_attn.g_proj", "self_attn.gate_proj"),),
    "minimax_m3_vl_text": (("mlp.experts", "block_sparse_moe.experts"),),
    "mixtral": (("mlp.experts", "block_sparse_moe.experts"),),
    "step3p5": ((".mlp.shared_experts", ".share_expert"), (".mlp.experts", ".moe")),
    "nemotron_h": (("model.", "backbone."),),
}
"""Parts of the names in transformers' memory, each with its replacement in files."""


def count_of(hf):
    """The number of routed experts."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((count for name in names if (count := getattr(hf, name, None))), 0)


def named(parameters, hf, expert_format):
    """The factors of ``peft`` by our names, as views. If ``peft`` has one tensor for experts: for each expert and
    projection.

    In the format "split", ``peft`` holds gate and up as one adapter with twice the rank. Only two blocks of B are not
    zero.
    """
    for name, tensor in _named(parameters, hf, expert_format):
        for old, new in IN_FILES.get(hf.model_type, ()):
            name = name.replace(old, new)
        if hf.model_type == "bailing_hybrid" and hf.layer_types[int(name.split(".")[2])] == "full_attention":
            name = name.replace(".o_proj.", ".dense.")
        yield name, tensor


def _named(parameters, hf, expert_format):
    num_experts, first = count_of(hf), "up_proj" if hf.model_type == "nemotron_h" else "gate_up_proj"
    for name, tensor in parameters.items():
        if ".lora_" not in name:
            continue
        name = name.removeprefix("base_model.model.").replace(".default.", ".").replace("vector.weight", "vector")
        if not name.partition(".experts.")[2].startswith(("base_layer.lora_", "lora_")):
            yield name, tensor
            continue
        kind = first if ".base_layer." in name else "down_proj"
        name = name.replace(".experts.base_layer.", ".experts.").replace(".experts.", f".experts.{kind}.")
        for number, entry in enumerate(_of_experts(name, tensor, num_experts)):
            if hf.model_type in SWAPPED:
                end = "B" if "lora_A" in name else "A"
                yield f"{re.sub('lora_.', f'lora_{end}', name)}[{number}]", entry.mT
                continue
            if expert_format == "fused":
                yield f"{name}[{number}]", entry
                continue
            name_of_one = name.replace(".experts.", f".experts.{number}.")
            if kind == "down_proj":
                yield name_of_one, entry
                continue
            for half, part in enumerate(("gate_proj", "up_proj")):
                block = entry.chunk(2, 0)[half] if "lora_A" in name else entry.chunk(2, 0)[half].chunk(2, 1)[half]
                yield name_of_one.replace("gate_up_proj", part), block


def _of_experts(name, tensor, num_experts):
    if "lora_A" in name:
        return tensor.unflatten(0, (num_experts, -1))
    return tensor.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


class Kept(torch.nn.Module):
    """Dropout that keeps given elements."""

    def __init__(self, kept, p):
        super().__init__()
        self.kept, self.p = kept, p

    def forward(self, hidden):
        return hidden * self.kept / (1 - self.p)


def expected(hf, targets, expert_format, *, kept=None, **options):
    """The factors of an adapter of ``peft``, its loss and its gradients, in our names.

    Args:
        kept: for a step with dropout, the elements of the input of each module that it keeps, by HF name.
    """
    own = copy.deepcopy(hf)
    own._attn_implementation = "eager"  # other attention of transformers 4 leaves out the cap of scores
    model = tiny.random_model(own)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, **of_peft(targets), **options)
    if expert_format == "fused":
        model.config.model_type = ""  # for some model types, peft would use a shared gate_proj for all experts
    model = peft.get_peft_model(model, config).eval()
    generator, parameters = torch.Generator().manual_seed(5), {n: p.detach() for n, p in model.named_parameters()}
    values = dict(named(parameters, hf, expert_format))
    for name, parameter in parameters.items():
        if ".lora_" in name and "magnitude" not in name:
            parameter.zero_()
    for value in values.values():
        noise = torch.randn(value.shape, generator=generator) * 0.1
        value.copy_(value * (1 + noise) if value.dim() == 1 else noise)
    if kept is not None:
        model.train()
        for name, module in model.named_modules():
            if hasattr(module, "lora_dropout"):
                module.lora_dropout["default"] = Kept(kept[name.removeprefix("base_model.model.")], config.lora_dropout)
    _, loss, grads = tiny.reference(model, batch())
    return values, loss, dict(named(grads, hf, expert_format))


@torch.no_grad()
def fill(chunks, made, values=None):
    """Write values to the adapters of this rank; by default values that are equal on every mesh.

    Return views of all other elements of the adapters.
    """
    bound, absent = bind(chunks, adapters=made), []
    for name, parameter in held(chunks).items():
        binding = made.mapping.bind(name)
        traced = trace(binding.layout, tuple(parameter.shape), axes_of(binding, bound.axes))
        rank = bound.ranks[binding.axis]
        absent += [parameter.narrow(*place) for place in traced.padding(rank)]
        named = zip(binding.hf, traced.part_shapes, strict=True)
        parts = [values[part] if values else _drawn(part, shape) for part, shape in named]
        parameter.copy_(traced.shard(rank, parts, torch.float32))
    return absent


def _drawn(name, shape):
    """Random values of about 0.1, which depend on the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * 0.1


def held(chunks):
    """The factors of adapters by canonical name: parameters, and for experts entries of them."""
    return {name: factor for name, factor in held_tensors(chunks).items() if is_adapter(name)}


def parameters(chunks):
    """The parameters of adapters. Parameters of experts have an entry for each."""
    named = (pair for chunk in chunks_of(chunks) for pair in chunk.named_parameters())
    return [parameter for name, parameter in named if is_adapter(name)]


def by_name(chunks, of):
    """``of(parameter)`` of adapters by canonical name: whole, or for experts an entry of it, or None."""
    found = {}
    for chunk in chunks_of(chunks):
        for name, parameter in chunk.named_parameters():
            if is_adapter(name):
                names, value = canonical_names(name, numbering_of(chunk)), of(parameter)
                is_one = value is None or not is_stacked(name)
                found |= zip(names, [value] * len(names) if is_one else value, strict=True)
    return found


def entries(tensors):
    """Exported adapters under the names of ``named``: one for each expert."""
    found = {}
    for name, tensor in tensors:
        each = enumerate(tensor.clone()) if tensor.dim() == 3 else ()
        found |= {f"{name}[{number}]": entry for number, entry in each} or {name: tensor.clone()}
    return found
