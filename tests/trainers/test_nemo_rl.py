"""NeMo-RL's map: each rank returns its shard of the HF tensor, with the values at the time of the call."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.errors import ConfigError, ExportError, MappingError
from mcore_bridge.factory.add_adapters import add_adapters
from mcore_bridge.trainers.nemo_rl import local_params
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support import fake_mesh
from tests.support.fp8_stand_in import quantize_linears
from tests.support.strategies import random_state, tiny

HF = tiny(
    "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, mlp_only_layers=[1], vocab_size=97
)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
NAMES = {
    f"model.layers.{layer}": [
        f"model.layers.{layer}.mlp.{'experts.' if layer != 1 else ''}{projection}.weight" for projection in PROJECTIONS
    ]
    for layer in range(4)
}


@dataclass
class Context:
    """NeMo-RL's ``RefitCtx``, with the fields that a sender reads."""

    buf: torch.Tensor


@dataclass
class Spec:
    """NeMo-RL's ``LocalParamSpec``."""

    base: Any
    pre: Any = None
    post: Any = None


def refit_info(names):
    return {"layer_names": list(names), "per_layer_params": {key: [{"name": n} for n in names[key]] for key in names}}


def expected(state, name):
    """The shard of this rank by NeMo-RL's placements: experts by number, all other tensors along the tp dim."""
    from megatron.core import parallel_state

    if ".experts." in name:
        prefix, _, rest = name.partition(".experts.")
        whole = torch.stack([state[f"{prefix}.experts.{number}.{rest}"] for number in range(HF.num_experts)])
        sizes = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
        return whole.chunk(sizes[0])[sizes[1]]
    tp, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return state[name].chunk(tp, dim=int("down_proj" in name))[rank]


@pytest.mark.parametrize("dims", [ParallelDims(tp=2, pp=2, ep=2, sp=True), ParallelDims(tp=2, sp=True)], ids=str)
def test_every_rank_gives_its_shards(dims):
    state, seen = random_state(HF), set()

    def load(chunks):
        found = local_params(chunks, refit_info(NAMES), spec=Spec, context=Context)
        for chunk in chunks:  # moved to other memory after the map was made
            for parameter in chunk.parameters():
                parameter.data = torch.empty_like(parameter)
        mb.load_hf_weights(chunks, state)
        for name, spec in found.items():
            sent = spec.pre(spec.base).buf
            assert sent.is_contiguous()
            assert torch.equal(sent, expected(state, name)), name
        seen.update(found)

    fake_mesh.build_everywhere(HF, dims, load, dtype=torch.float32)
    assert seen == {name for names in NAMES.values() for name in names}


def sent_pieces(chunks, **options):
    """A function from NeMo-RL's name to this rank's part, as ``iter_hf_shards`` has it."""
    pieces = {piece.name: piece.tensor for piece in mb.iter_hf_shards(chunks, expert_format="split", **options)}

    def of(name):
        if ".experts." not in name:
            return pieces[name]
        return torch.stack([pieces[name.replace(".experts.", f".experts.{each}.")] for each in range(HF.num_experts)])

    return of


def test_adapters_are_merged_when_a_part_is_sent():
    def load(chunks):
        mb.load_hf_weights(chunks, random_state(HF))
        made = add_adapters(chunks, rank=2, alpha=3, targets=["gate_proj", "down_proj"])
        found = local_params(chunks, refit_info(NAMES), spec=Spec, context=Context, merged=True)
        base = local_params(chunks, refit_info(NAMES), spec=Spec, context=Context, merged=False)
        for name in made.names:  # changed after the map was made
            torch.nn.init.normal_(held_tensors(chunks)[name])
        part_of = sent_pieces(chunks, merged=True)
        for name, spec in found.items():
            sent = spec.pre(spec.base).buf
            assert torch.equal(sent, part_of(name)), name
            assert torch.equal(sent, base[name].pre(base[name].base).buf) == ("up_proj" in name), name
        with pytest.raises(ConfigError, match="expected merged=True"):
            local_params(chunks, refit_info(NAMES), spec=Spec, context=Context)

    fake_mesh.build_everywhere(HF, ParallelDims(), load, dtype=torch.float32)


def test_parameters_in_fp8_are_sent_by_their_values():
    def load(chunks):
        held = {id(each): each for each in quantize_linears(chunks)}
        found = local_params(chunks, refit_info(NAMES), spec=Spec, context=Context)
        mb.load_hf_weights(chunks, random_state(HF, dtype=torch.bfloat16))  # after the map was made
        part_of = sent_pieces(chunks)
        for name, spec in found.items():
            assert {*map(id, spec.base)} <= held.keys()
            sent = spec.pre(spec.base).buf
            assert type(sent) is torch.Tensor
            assert torch.equal(sent, part_of(name)), name
        held[id(spec.base[0])]._codes.untyped_storage().resize_(0)
        with pytest.raises(ExportError, match="storage"):
            spec.pre(spec.base)

    fake_mesh.build_everywhere(HF, ParallelDims(tp=2, sp=True), load, dtype=torch.bfloat16)


def test_what_is_not_one_block_is_named():
    def load(chunks):
        mb.load_hf_weights(chunks, random_state(HF))
        with pytest.raises(
            MappingError, match=r"this rank has 4 blocks of model\.layers\.0\.self_attn\.q_proj\.weight"
        ):
            local_params(
                chunks,
                refit_info({"model.layers.0": ["model.layers.0.self_attn.q_proj.weight"]}),
                spec=Spec,
                context=Context,
            )

    fake_mesh.build_everywhere(HF, ParallelDims(), load, dtype=torch.float32)


def test_what_no_rule_knows_is_named():
    unknown = ["model.layers.0.mlp.experts.gate_up_proj", "no.such.tensor"]

    def load(chunks):
        with pytest.raises(
            MappingError, match=r"found 2 others: \['model\.layers\.0\.mlp\.experts\.gate_up_proj', 'no"
        ):
            local_params(chunks, refit_info({**NAMES, "others": unknown}), spec=Spec, context=Context)

    fake_mesh.build_everywhere(HF, ParallelDims(pp=2), load, dtype=torch.float32)


def test_parameters_without_storage_are_no_shards():
    def load(chunks):
        found = local_params(chunks, refit_info(NAMES), spec=Spec, context=Context)
        spec = next(iter(found.values()))
        mb.load_hf_weights(chunks, random_state(HF))
        spec.base[0].untyped_storage().resize_(0)
        with pytest.raises(ExportError, match="storage"):
            spec.pre(spec.base)
        spec.base[0].data = torch.zeros(spec.base[0].shape)

    fake_mesh.build_everywhere(HF, ParallelDims(), load, dtype=torch.float32)
