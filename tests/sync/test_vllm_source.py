"""A model as vLLM's ``WeightSource``: what each rank yields is what its metadata says, of the whole HF tensors."""

import math

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from tests.support import pool
from tests.support.strategies import tiny

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CASES = {
    "TP4, 2 KV heads": (4, mb.ParallelDims(tp=4), "qwen3", {"num_key_value_heads": 2}),
    "TP2 DP2, odd vocabulary": (4, mb.ParallelDims(tp=2), "qwen2", {"vocab_size": 91}),
    "TP2 PP2": (4, mb.ParallelDims(tp=2, pp=2), "llama", {}),
    "PP2 EP2": (4, mb.ParallelDims(pp=2, ep=2), "qwen3_moe", EXPERTS),
    "TP2 EP2 DP2": (4, mb.ParallelDims(tp=2, ep=2, sp=True), "qwen3_moe", {**EXPERTS, "tie_word_embeddings": True}),
}
BACKENDS = ("nccl", "ipc", "sharded_rdt", "nccl_m2n")


def local(whole, meta, rank):
    """The part of a rank, as vLLM's documentation has it."""
    if not meta.placements:
        return whole
    place = meta.owners.index(rank)
    for axis, (size, placement) in enumerate(zip(meta.mesh_shape, meta.placements, strict=True)):
        if type(placement).__name__ == "Shard":
            at = place // math.prod(meta.mesh_shape[axis + 1 :]) % size
            whole = whole.chunk(size, placement.dim)[at]
    return whole


def groups(names):
    """The numbers of layers, in the order of their first names."""
    return list(dict.fromkeys(int(name.split(".")[2]) for name in names if ".layers." in name))


def sources(dims, family, fields, quantize=None):
    """For each backend the owners, and the names that are cut; each pair was checked."""
    dims.initialize(device="cpu")
    hf = tiny(family, num_attention_heads=4, num_hidden_layers=4, **fields)
    models = mb.build_model(hf, dims=dims, dtype=torch.bfloat16, device="cpu", load_weights=False)
    whole, rank, found = mb.to_hf_state_dict(models, quantize=quantize), dist.get_rank(), {}
    for backend in BACKENDS:
        source = mb.vllm_source(models, backend, quantize=quantize)
        metas = {meta.name: meta for meta in source.metadata}
        assert metas.keys() == whole.keys()
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, [repr(meta) for meta in source.metadata])
        assert all(each == everywhere[0] for each in everywhere)
        for number in range(2):
            for parameter in models[0].parameters():
                parameter.data.add_(0.125)
            whole = mb.to_hf_state_dict(models, quantize=quantize)
            for is_local, pairs in ((False, source.iter_full()), (True, source.iter_local())):
                names = []
                for name, tensor in pairs:
                    meta = metas[name]
                    assert (tuple(meta.shape), meta.dtype) == (whole[name].shape, whole[name].dtype)
                    expected = local(whole[name], meta, rank) if is_local else whole[name]
                    assert torch.equal(tensor, expected), (backend, name)
                    assert tensor.is_contiguous()
                    names.append(name)
                assert names == source.owned_names(rank), (backend, number)
        owners = [meta.owners for meta in source.metadata]
        found[backend] = owners, {name for name, meta in metas.items() if meta.placements}, groups(metas)
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_backend_finds_what_it_wants_where_it_wants_it(case):
    world, dims, family, fields = CASES[case]
    found, *others = pool.run(world, sources, dims, family, fields)
    assert all(each == found for each in others)
    everyone = tuple(range(world))
    assert set(found["nccl"][0]) == {(0,)}
    assert set(found["ipc"][0]) == {None}
    num_replicas = 2 if "DP2" in case else 1
    assert {len(owners) for owners in found["sharded_rdt"][0]} == {num_replicas}
    assert {owner for owners in found["sharded_rdt"][0] for owner in owners} == set(everyone)  # dealt to all ranks
    assert found["sharded_rdt"][2] == [0, 1, 2, 3]
    assert set(found["nccl_m2n"][0]) <= {None, everyone}
    cut = {name.split(".")[-2] for name in found["nccl_m2n"][1]}
    dense, heads = {"o_proj", "gate_proj", "up_proj", "down_proj"}, {"q_proj", "k_proj", "v_proj"}
    expected = {  # with more ranks than KV heads, megatron-core cuts within a group of heads
        "TP4, 2 KV heads": {*dense, "embed_tokens", "lm_head"},
        "TP2 DP2, odd vocabulary": {*dense, *heads},
        "TP2 EP2 DP2": {*heads, "o_proj", "embed_tokens"},
    }
    assert cut == expected.get(case, set())


def test_codes_and_scales_leave_whole():
    """No rank has codes before an export makes them, so no backend gets cut ones."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    found, *_ = pool.run(4, sources, mb.ParallelDims(tp=2, pp=2), "llama", {}, fp8)
    assert {backend: cut for backend, (_, cut, _) in found.items()} == {backend: set() for backend in BACKENDS}
    assert set(found["nccl_m2n"][0]) == {None}
