"""Models, engines, and the slices that each rank of an engine must get."""

import re

import numpy as np
import torch

import mcore_bridge as mb
from mcore_bridge import EngineRank, ParallelDims, engine_ranks
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.ipc.shared_memory import allocate
from tests import zoo
from tests.support import fake_mesh
from tests.support.strategies import tiny

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


SPARSE = tiny("qwen3_moe", **EXPERTS, num_hidden_layers=4, mlp_only_layers=[0], vocab_size=200, num_key_value_heads=2)


LINEAR = {
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


FAMILIES = {
    "sparse": SPARSE,
    "tied": tiny("qwen2", num_hidden_layers=6, tie_word_embeddings=True, vocab_size=97),
    "latent": tiny(
        "deepseek_v3",
        num_hidden_layers=3,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=8,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=16,
    ),
    "fused": tiny("phi3", num_hidden_layers=3, num_key_value_heads=2, pad_token_id=0),
    "linear": tiny("qwen3_next", **EXPERTS, **LINEAR, num_hidden_layers=4, num_key_value_heads=2),
    "stacked": tiny("gpt_oss", num_hidden_layers=3, num_local_experts=8, num_experts_per_tok=2, num_key_value_heads=2),
}
if "laguna" in zoo.cases():
    FAMILIES["sized"] = tiny("laguna", **zoo.cases()["laguna"].fields | {"num_experts": 8})


COLUMNS = re.compile(r"\.(o_proj|out_proj|down_proj)\.weight$")


ROWS = re.compile(
    r"\.(q_proj|g_proj|gate_proj|up_proj|q_b_proj|kv_b_proj|in_proj_qkvz|in_proj_ba)\.(weight|bias)$|\.(A_log|dt_bias|sinks)$"
)


STACKED_UP, STACKED_DOWN = re.compile(r"\.experts\.gate_up_proj(_bias)?$"), re.compile(r"\.experts\.down_proj$")


def shared(tensor, dim, size, rank):
    assert tensor.shape[dim] % size == 0
    return tensor.chunk(size, dim)[rank]


def joined(tensor, lengths, cut):
    """Cut each section of a fused tensor."""
    return torch.cat([cut(number, section) for number, section in enumerate(tensor.split(lengths))])


def heads_of(hf, tensor, target):
    """The heads of keys or values of a rank. If there are more ranks than heads, several ranks have one head."""
    groups = hf.num_key_value_heads
    if target.tp <= groups:
        return shared(tensor, 0, target.tp, target.tp_rank)
    return tensor.chunk(groups)[target.tp_rank * groups // target.tp]


def slice_of(hf, name, tensor, target):
    """The part of an HF tensor on an engine's rank, by the name of the tensor."""
    size, rank = target.tp, target.tp_rank
    if ".experts." in name:
        size, rank = target.experts_cut
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        each = -(-len(tensor) // target.vocab_multiple) * target.vocab_multiple // target.tp
        return tensor[each * target.tp_rank : each * (target.tp_rank + 1)]
    if re.search(r"\.(k_proj|v_proj)\.(weight|bias)$", name):
        return heads_of(hf, tensor, target)
    if name.endswith(".qkv_proj.weight"):
        head, groups = len(tensor) // (hf.num_attention_heads + 2 * hf.num_key_value_heads), hf.num_key_value_heads
        lengths = [hf.num_attention_heads * head, groups * head, groups * head]
        return joined(tensor, lengths, lambda i, t: heads_of(hf, t, target) if i else shared(t, 0, size, rank))
    if name.endswith(".gate_up_proj.weight"):
        return joined(tensor, [len(tensor) // 2] * 2, lambda _, t: shared(t, 0, size, rank))
    if name.endswith(".conv1d.weight"):
        keys = hf.linear_num_key_heads * hf.linear_key_head_dim
        return joined(tensor, [keys, keys, len(tensor) - 2 * keys], lambda _, t: shared(t, 0, size, rank))
    if ".experts." in name and tensor.ndim > 1 and "proj" in name and not re.search(r"\.\d+\.\w+\.weight$", name):
        tensor = tensor[experts_of(target, len(tensor))]
        if STACKED_UP.search(name):  # gate and up alternate in its last dim
            return shared(tensor, tensor.ndim - 1, size, rank)
        return shared(tensor, 1, size, rank) if STACKED_DOWN.search(name) else tensor
    if COLUMNS.search(name):
        return shared(tensor, 1, size, rank)
    return shared(tensor, 0, size, rank) if ROWS.search(name) else tensor


def experts_of(target, num_experts):
    """Each rank has neighbouring experts. If they do not divide evenly, the first ranks have one more."""
    return np.array_split(np.arange(num_experts), target.ep)[target.ep_rank]


def is_on(hf, name, target, num_experts):
    """Whether the tensor is in the rank's stage, and of its experts."""
    layer, expert = re.search(r"model\.layers\.(\d+)\.", name), re.search(r"\.experts\.(\d+)\.", name)
    if expert and int(expert[1]) not in experts_of(target, num_experts):
        return False
    if layer:
        return int(layer[1]) in target.stage(hf.num_hidden_layers)
    if name == "model.embed_tokens.weight":
        return target.is_first_stage or (target.is_last_stage and hf.tie_word_embeddings)
    return target.is_last_stage


def expected(hf, state, target):
    if target in ("everything", "nothing"):
        return state if target == "everything" else {}
    num_experts = next((n for k in ("num_experts", "n_routed_experts") if (n := getattr(hf, k, None))), 0)
    return {
        name: tensor if target.is_whole(name) else slice_of(hf, name, tensor, target)
        for name, tensor in state.items()
        if is_on(hf, name, target, num_experts)
    }


def assert_gets(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.shape == wanted[name].shape, name
        assert torch.equal(tensor, wanted[name]), name
        assert tensor.is_contiguous()


def held_by(hf, dims, state):
    return fake_mesh.build_everywhere(hf, dims, lambda chunks: mb.load_hf_weights(chunks, state), dtype=torch.float32)


ENGINES = {
    "TP1": {},
    "TP2": {"tp": 2},
    "TP4": {"tp": 4},
    "TP4 EP4": {"tp": 4, "ep": 4},
    "TP4 EP2": {"tp": 4, "ep": 2},
    "TP2 PP2": {"tp": 2, "pp": 2},
    "TP2 PP2 EP2": {"tp": 2, "pp": 2, "ep": 2},
    "PP3": {"pp": 3},
    "EP3": {"ep": 3},  # over ranks that each have attention; the first two have one expert more
}


def ranks_of(sizes):
    ep = sizes.get("ep", 1)
    return engine_ranks(**sizes) if sizes.get("tp", 1) % ep == 0 else [EngineRank(ep=ep, ep_rank=r) for r in range(ep)]


def assignments():
    """The ranks of each engine in the order of the trainer ranks that feed them. One engine has another order."""
    yield from map(ranks_of, ENGINES.values())
    ranks = engine_ranks(tp=2, pp=2, ep=2)
    yield [ranks[place] for place in (2, 0, 3, 1)]


GRID = [
    ParallelDims(tp=2, pp=2, sp=True),
    ParallelDims(tp=2, pp=2, vp=2, sp=True),
    ParallelDims(pp=2, vp=2, ep=2),
    ParallelDims(tp=4, sp=True),
    ParallelDims(pp=4),
    ParallelDims(ep=4),
    ParallelDims(tp=2, ep=4, sp=True),
    ParallelDims(tp=2, ep=2, etp=2, sp=True),
    ParallelDims(tp=2, pp=2, etp=2, sp=True),
    ParallelDims(tp=2, pp=2, ep=2, sp=True),
    ParallelDims(tp=2, sp=True),
]


class Slices:
    """A rank of an engine with slices of HF tensors. Every second matrix is stored column by column."""

    def __init__(self, hf, state, target):
        self.hf, self.target = hf, target
        self.tensors = {name: torch.zeros_like(tensor) for name, tensor in expected(hf, state, target).items()}
        for name in [name for name in self.tensors if self.tensors[name].ndim == 2][::2]:
            self.tensors[name] = self.tensors[name].t().contiguous().t()

    def share(self):
        """Move every tensor into memory that another process can open, at odd addresses; returns that memory."""
        starts = np.cumsum([8, *(tensor.nbytes // 8 * 8 + 8 for tensor in self.tensors.values())]).tolist()
        memory = allocate(starts[-1], torch.device("cpu"))
        for start, (name, tensor) in zip(starts, list(self.tensors.items()), strict=False):
            flat = memory[start : start + tensor.nbytes].view(tensor.dtype)
            self.tensors[name] = flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset()).zero_()
        return memory

    def load(self, pairs):
        experts = next((n for k in ("num_experts", "n_routed_experts") if (n := getattr(self.hf, k, None))), 0)
        for name, tensor in pairs:
            if is_on(self.hf, name, self.target, experts):
                whole = self.target.is_whole(name)
                self.tensors[name].copy_(tensor if whole else slice_of(self.hf, name, tensor, self.target))


def specs_of(tensors):
    return [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
