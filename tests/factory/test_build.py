"""Results and refusals of ``build_model``: on one process or, if several ranks are needed, on the pool."""

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_bridge import (
    ParallelDims,
    add_adapters,
    build_model,
    iter_hf_adapters,
    load_checkpoint,
    load_hf_weights,
    save_checkpoint,
    save_hf_checkpoint,
    to_gpt_arguments,
    to_hf_state_dict,
    to_layer_spec,
    to_transformer_config,
)
from mcore_bridge.errors import ConfigError, MeshError
from mcore_bridge.factory.modules.torch_modules import AlwaysBiased, CoreAttention, Norm
from mcore_bridge.factory.param_count import count_params, resolve_layout
from mcore_bridge.weights.model_tensors import held_tensors
from tests import zoo
from tests.support import pool, stepping, tiny
from tests.support.fake_mesh import rank_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.random_checkpoint(tiny.config("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return tiny.random_checkpoint(tiny.config("qwen2"), tmp_path_factory.mktemp("qwen2"))


def on_one_rank(function: Callable[..., Any], *args: Any) -> Any:
    return pool.run(1, single, function, args)[0]


def single(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs in a worker: ``function`` on a mesh of one rank."""
    with stepping.mesh(ParallelDims()):
        return function(*args)


def say(folder: str, inputs: torch.Tensor, **build: Any) -> torch.Tensor:
    """Runs in a worker: the logits of a model on one rank."""
    (chunk,) = build_model(folder, device="cpu", **build)
    with torch.no_grad():
        return chunk(inputs, torch.arange(inputs.size(1)).expand_as(inputs), None)


# -- dtypes ------------------------------------------------------------------------------------------------------------


def in_named_dtypes(folder: str, target: str) -> list[torch.dtype]:
    """Runs in a worker: the dtypes of a model, of exports, of a saved folder, of adapters and of a checkpoint."""
    auto, half = (build_model(folder, device="cpu", dtype=dtype) for dtype in ("auto", "bfloat16"))
    state = to_hf_state_dict(auto, dtype={"*.norm.weight": "float32", "*": "float16"})
    load_hf_weights(half, to_hf_state_dict(auto, dtype="auto"), dtype="bfloat16")
    save_checkpoint(auto, f"{target}/dist")
    load_checkpoint(half, f"{target}/dist", dtype="bfloat16")
    saved = save_hf_checkpoint(half, f"{target}/hf", dtype="float32")
    add_adapters(half, rank=1, alpha=1, targets=["q_proj"], dtype="float32")
    adapter = next(iter_hf_adapters(half, dtype="float16"))[1]
    parameter = next(auto[0].parameters())
    kinds = parameter, state["model.norm.weight"], state["lm_head.weight"], saved.tensors[0], adapter
    return [kind.dtype for kind in kinds]


def test_a_dtype_may_be_a_name(folder, tmp_path):
    assert on_one_rank(in_named_dtypes, folder, str(tmp_path)) == [
        *(torch.float32, torch.float32, torch.float16, torch.float32, torch.float16)
    ]


@pytest.mark.parametrize("model_type", ["qwen3", "mistral"])
def test_bf16_logits_are_transformers_bits(model_type, tmp_path):
    """One rank, no bias (mcore adds a bias after rounding): the modules keep transformers' order of operations."""
    folder = tiny.random_checkpoint(tiny.config(model_type), tmp_path, dtype=torch.bfloat16)
    inputs = tiny.tokens(3)[:, :-1]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()(inputs).logits
    assert torch.equal(on_one_rank(say_in_bf16, str(folder), inputs), expected)


def say_in_bf16(folder: str, inputs: torch.Tensor) -> torch.Tensor:
    return say(folder, inputs, dtype=torch.bfloat16)


def dtypes_of(folder: str, dtype: torch.dtype) -> Any:
    (chunk,) = build_model(folder, dtype=dtype, device="cpu")
    inputs = tiny.tokens(2)[:, :-1]
    output = chunk(inputs, torch.arange(inputs.size(1)).expand_as(inputs), None)
    return {parameter.dtype for parameter in chunk.parameters()}, output.dtype, bool(output.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_parameter_has_the_dtype_that_was_asked_for(folder, dtype):
    assert on_one_rank(dtypes_of, str(folder), dtype) == ({dtype}, dtype, True)


# -- each chunk exactly once -------------------------------------------------------------------------------------------


def construct(folder: str) -> Any:
    """Runs in each worker: the chunks that were constructed, that ``on_chunk`` got, and that were returned."""
    dims, constructed, seen = ParallelDims(pp=2, vp=2), [], []
    original = GPTModel.__init__

    @functools.wraps(original)
    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        constructed.append(id(self))
        original(self, *args, **kwargs)

    def on_chunk(chunk: Any, index: int) -> None:
        seen.append((id(chunk), index, all(bool(p.isfinite().all()) and bool(p.any()) for p in chunk.parameters())))

    with stepping.mesh(dims):
        GPTModel.__init__ = counted
        try:
            chunks = build_model(folder, dims=dims, dtype=torch.float32, device="cpu", on_chunk=on_chunk)
        finally:
            GPTModel.__init__ = original
        return constructed, seen, list(map(id, chunks)), [type(chunk) is GPTModel for chunk in chunks]


def test_each_chunk_is_constructed_once_in_order_and_handed_over_loaded(folder):
    for constructed, seen, returned, types in pool.run(2, construct, str(folder)):
        assert constructed == returned
        assert seen == [(returned[0], 0, True), (returned[1], 1, True)]
        assert types == [True, True]


# -- meta, initial values, freezing ------------------------------------------------------------------------------------


def meta(folder: str, hf: Any) -> Any:
    """Runs in each worker: devices and numbers of a meta build, tied over the pipeline, with every head."""
    dims, found = ParallelDims(pp=2), []
    with stepping.mesh(dims):
        for source, head in ((folder, "lm"), (hf, "lm"), (hf, "value"), (hf, "classification")):
            chunks = build_model(source, dims=dims, device="meta", head=head, load_weights=False)
            tensors = [*chunks[0].parameters(), *chunks[0].buffers()]
            found.append(({t.device.type for t in tensors}, sum(p.numel() for p in chunks[0].parameters())))
        assert chunks[0].rotary_pos_emb(8).device.type == "cpu"
        with pytest.raises(ConfigError, match="load_weights=False"):
            build_model(folder, dims=dims, device="meta")
        with pytest.raises(ConfigError, match="load_weights=FOLDER"):
            build_model(hf, dims=dims, device="cpu")
    return found


def test_meta_builds_have_the_sizes_of_the_model_and_no_storage(tied):
    hf = tiny.config("qwen2", num_labels=3)
    first, last = pool.run(2, meta, str(tied), hf)
    assert {device for rank in (first, last) for devices, _ in rank for device in devices} == {"meta"}
    counted = count_params(hf)
    copies = [counted.embedding, counted.embedding, hf.hidden_size, 3 * hf.hidden_size]
    assert [a + b for (_, a), (_, b) in zip(first, last, strict=True)] == [counted.total + copy for copy in copies]


def initial(hf: Any, seeds: list[int]) -> Any:
    """Runs in each worker: a matrix of the first layer here, and the copy of the tied embedding, by seed."""
    dims, found = ParallelDims(pp=4), []
    with stepping.mesh(dims):
        for seed in seeds:
            (chunk,) = build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=False, seed=seed)
            matrix = chunk.decoder.layers[0].self_attention.linear_qkv.weight
            embedding = chunk.shared_embedding_or_output_weight()
            found.append((matrix.detach(), None if embedding is None else embedding.detach()))
    return found


def test_initial_values_come_from_the_seed_and_tie_the_embeddings():
    hf = tiny.config("qwen2", initializer_range=0.05)
    first, second, third, last = pool.run(4, initial, hf, [1, 1, 2])
    for (matrix, embedding), (other, _), (another, _), (_, copy) in zip(first, second, third, last, strict=True):
        assert torch.equal(embedding, copy)
        assert not torch.equal(other, another)
        assert 0.045 < float(matrix.std()) < 0.055
        assert 0.045 < float(embedding.std()) < 0.055
    assert torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], first[2][0])


def frozen(folder: str, patterns: list[str]) -> set[str]:
    chunks = build_model(folder, device="cpu", freeze=patterns)
    return {name for name, tensor in held_tensors(chunks).items() if not tensor.requires_grad}


FROZEN = {
    "llama4": {"pp": 2, "ep": 2},
    "nemotron_h": {"pp": 2, "ep": 2},
    "granitemoehybrid": {"pp": 2, "ep": 2},
    "falcon_h1": {"pp": 2, "vp": 2},
    "qwen3_next": {"pp": 4},
}


def test_freeze_takes_canonical_names_and_refuses_what_matches_nothing(folder):
    patterns = ["embedding.*", "decoder.layers.2.*layernorm*"]
    layer = "decoder.layers.2."
    norms = {"input_layernorm", "pre_mlp_layernorm", "self_attention.q_layernorm", "self_attention.k_layernorm"}
    expected = {"embedding.word_embeddings.weight", *(f"{layer}{norm}.weight" for norm in norms)}
    assert on_one_rank(frozen, str(folder), patterns) == expected
    with pytest.raises(ConfigError, match=r"nearest names: .*decoder\.layers\.9"):
        on_one_rank(frozen, str(folder), ["decoder.layers.9.*"])


def freezing(hf: Any, sizes: dict[str, int]) -> tuple[int, set[str], set[str], str]:
    """Runs in each worker: the number of parameters, the frozen names, and the error for names that no rank has."""
    dims = ParallelDims(**sizes)
    with stepping.mesh(dims):

        def held(**options: Any) -> dict[str, torch.Tensor]:
            chunks = build_model(hf, dims=dims, device="meta", load_weights=False, **options)
            return {name: each for name, each in held_tensors(chunks).items() if isinstance(each, torch.nn.Parameter)}

        of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(of_ranks, [*held()])
        names = {name for own in of_ranks for name in own}
        layers = range(hf.num_hidden_layers)
        moved = {re.sub(r"layers\.\d+", f"layers.{layer}", name) for layer in layers for name in names} - names
        moved.add("decoder.layers.99.*")
        mine = held(freeze=sorted(names))
        with pytest.raises(ConfigError, match="each pattern of freeze must match a parameter") as error:
            held(freeze=[*names, *moved])
        return len(mine), {name for name, each in mine.items() if not each.requires_grad}, moved, str(error.value)


@pytest.mark.parametrize("name", zoo.params(FROZEN))
def test_freeze_takes_the_names_of_all_stages_and_experts_and_no_other(name):
    """``freeze`` refuses names that no rank has, such as a name of a mixer with the number of an attention layer."""
    hf = zoo.cases()[name].hf
    for size, frozen, moved, error in pool.run(4, freezing, hf, FROZEN[name]):
        assert len(frozen) == size
        assert all(repr(each) in error for each in moved)
        assert len(moved) > 1 or name == "falcon_h1"  # whose layers are alike


def test_freeze_accepts_every_pattern_where_other_ranks_do_not_answer():
    dims, freeze = ParallelDims(pp=2), ["decoder.layers.99.*", "embedding.*"]
    with rank_of(dims, 0, 2):
        chunks = build_model(tiny.config("qwen3"), dims=dims, device="meta", load_weights=False, freeze=freeze)
    frozen = [name for name, tensor in held_tensors(chunks).items() if not tensor.requires_grad]
    assert frozen == ["embedding.word_embeddings.weight"]


# -- heads -------------------------------------------------------------------------------------------------------------


def new_head(folder: str, seeds: list[int]) -> Any:
    """Runs in each worker: the weight of a head on a causal LM's checkpoint, by seed."""
    dims, found = ParallelDims(tp=2), []
    with stepping.mesh(dims):
        for seed in seeds:
            (chunk,) = build_model(folder, dims=dims, dtype=torch.float32, device="cpu", head="value", seed=seed)
            assert not chunk.share_embeddings_and_output_weights
            found.append(chunk.output_layer.weight.detach())
        (chunk,) = build_model(folder, dims=dims, dtype=torch.bfloat16, device="cpu", head="value")
        inputs = tiny.tokens(1)[:, :-1]
        assert chunk(inputs, torch.arange(inputs.size(1))[None], None).dtype == torch.float32
    return found


def test_a_new_head_is_drawn_from_the_seed_alike_on_every_rank(tied):
    here, there = pool.run(2, new_head, str(tied), [1, 1, 2])
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    assert here[0].shape == (1, tiny.DISTINCT["hidden_size"])
    assert torch.equal(here[0], here[1])
    assert not torch.equal(here[0], here[2])


def test_an_unknown_head_backend_or_mesh_is_refused_before_anything_is_built(folder):
    with pytest.raises(ConfigError, match=r"head must be one of lm, value, .*process_reward, none, found 'reward'"):
        on_one_rank(refused, str(folder), {"head": "reward"})
    with pytest.raises(ConfigError, match="backend must be"):
        on_one_rank(refused, str(folder), {"backend": "cuda"})
    with pytest.raises(ConfigError, match="not installed"):
        on_one_rank(refused, str(folder), {"backend": "te"})
    again = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}
    with pytest.raises(ConfigError, match=r"\['layernorm'\] without TransformerEngine"):
        on_one_rank(refused, str(folder), {"overrides": again})
    with pytest.raises(MeshError, match=r"dims\): {'tp': \(1, 2\)}"):
        on_one_rank(refused, str(folder), {"dims": ParallelDims(tp=2)})
    with pytest.raises(ConfigError, match=r"freeze must be a list of patterns, found '\*norm\*': write freeze=\['"):
        on_one_rank(refused, str(folder), {"freeze": "*norm*"})
    for wrong in ([("num_layers", 2)], "num_layers", {2: "num_layers"}):
        with pytest.raises(ConfigError, match="overrides must be a mapping of names to values"):
            to_transformer_config(folder, overrides=wrong)
    with pytest.raises(ConfigError, match=r"dims must be a ParallelDims, found \{'tp': 2\}: write dims=ParallelDims"):
        to_transformer_config(folder, dims={"tp": 2})
    overrides = {"overlap_p2p_comm": False}
    with pytest.raises(MeshError, match="overlap_p2p_comm"):
        to_transformer_config(folder, dims=ParallelDims(pp=2, vp=2), overrides=overrides)
    with pytest.raises(MeshError, match="initialize"):
        pool.run(1, refused, str(folder), {})


def refused(folder: str, arguments: dict[str, Any]) -> None:
    """Runs in a worker: a build that must not reach a constructor."""
    original = GPTModel.__init__

    @functools.wraps(original)
    def reached(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("the constructor was reached")

    GPTModel.__init__ = reached
    try:
        build_model(folder, device="cpu", **arguments)
    finally:
        GPTModel.__init__ = original


# -- overrides, specs, the log -----------------------------------------------------------------------------------------


def overridden(folder: str) -> Any:
    """Runs in each worker: GPTModel arguments and config fields, overridden alike."""
    dims = ParallelDims(tp=2)
    overrides = {"vocab_size": 128, "parallel_output": False, "max_sequence_length": 999, "attention_dropout": 0.25}
    with stepping.mesh(dims):
        (chunk,) = build_model(folder, dims=dims, dtype=torch.float32, device="cpu", overrides=overrides)
        inputs = tiny.tokens(2)[:, :-1]
        chunk.eval()
        with torch.no_grad():
            output = chunk(inputs, torch.arange(inputs.size(1)).expand_as(inputs), None)
        sizes = chunk.max_sequence_length, chunk.config.attention_dropout, chunk.output_layer.weight.size(0)
        return sizes, output


def test_overrides_reach_config_and_model_and_padding_is_hidden(folder):
    inputs = tiny.tokens(2)[:, :-1]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(inputs).logits
    for sizes, output in pool.run(2, overridden, str(folder)):
        assert sizes == (999, 0.25, 64)
        assert output.size(-1) == 128
        assert tiny.relative_error(output[..., :90], expected) < 1e-5
        assert (output[..., 90:] == -1e30).all()


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_layer_specs_are_values_of_their_own(model_type):
    hf = tiny.config(model_type)
    dims = ParallelDims(pp=2, vp=2, layout="E|ttt||tL")
    sizes = {
        (pp_rank, vp_stage): len(to_layer_spec(hf, dims=dims, pp_rank=pp_rank, vp_stage=vp_stage).layer_specs)
        for pp_rank in range(2)
        for vp_stage in range(2)
    }
    assert sizes == {(0, 0): 0, (1, 0): 3, (0, 1): 0, (1, 1): 1}
    one, another = to_layer_spec(hf), to_layer_spec(hf)
    layer = one.layer_specs[0].submodules
    attention = layer.self_attention.submodules
    assert (one.layer_norm, layer.input_layernorm, layer.pre_mlp_layernorm) == (Norm, Norm, Norm)
    assert attention.core_attention is CoreAttention
    assert issubclass(attention.linear_proj, AlwaysBiased) == (model_type == "llama")
    assert (attention.q_layernorm is Norm) == (model_type == "qwen3")
    layer.input_layernorm = None
    assert another.layer_specs[0].submodules.input_layernorm is Norm
    assert one.layer_specs[1].submodules.input_layernorm is Norm
    with pytest.raises(MeshError, match="must name one of the 4 stages"):
        to_layer_spec(hf, dims=dims, pp_rank=2)
    with pytest.raises(MeshError, match=r"vp_stage must be a whole number, or None, found \[\]"):
        to_layer_spec(hf, dims=dims, vp_stage=[])


def test_balanced_layouts_are_resolved_everywhere(folder):
    hf = tiny.config("qwen3", num_hidden_layers=5)
    dims = ParallelDims(pp=2, vp=2, layout="balanced")
    resolved = resolve_layout(dims, hf, dtype=torch.bfloat16)
    config = to_transformer_config(hf, dims=dims)
    assert config.pipeline_model_parallel_layout.input_data is not None
    assert sum(len(stage.layers) for stage in resolved.stages(5)) == 5
    assert to_gpt_arguments(hf, dims=dims)["vocab_size"] == 90
    assert resolve_layout(ParallelDims(pp=2), hf, dtype=torch.bfloat16) == ParallelDims(pp=2)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_balanced_layout_counts_the_matrix_of_the_vocabulary_where_it_is(model_type):
    """The tensors are at both ends for an LM, and at the first stage for other heads, so the last has room for
    layers.
    """
    hf = tiny.config(model_type, vocab_size=2000, num_hidden_layers=10)
    dims = ParallelDims(pp=2, layout="balanced")
    sizes = {
        head: [len(stage.layers) for stage in resolve_layout(dims, hf, dtype=torch.float32, head=head).stages(10)]
        for head in ("lm", "value")
    }
    assert sizes["lm"] == [5, 5]
    assert sizes["value"][0] < sizes["value"][1]


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def logged(folder: str) -> list[str]:
    """Run in each worker: return the error of a build."""
    logger, records, dims = logging.getLogger("mcore_bridge"), Records(), ParallelDims(tp=2)
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    try:
        with stepping.mesh(dims):
            build_model(folder, dims=dims, device="cpu")
    finally:
        logger.removeHandler(records)
        logger.setLevel(logging.NOTSET)
    return records.messages


def test_one_line_from_rank_0_says_what_was_built(folder):
    first, other = pool.run(2, logged, str(folder))
    assert other == []
    (line,) = first
    total = f"{count_params(tiny.config('qwen3')).total:,}"
    for word in ("qwen3", total, "TP2", "bfloat16", "cpu", "backend torch", "head lm", "layers per stage: E4L"):
        assert word in line, word


def mesh_of_parallel_state(folder: str) -> int:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)  # a trainer's groups, with etp = tp
    (chunk,) = build_model(folder, device="cpu")
    return chunk.config.tensor_model_parallel_size


def test_without_dims_the_mesh_is_the_trainers(folder):
    assert pool.run(2, mesh_of_parallel_state, str(folder)) == [2, 2]


def test_what_megatron_core_cannot_build_is_an_error_of_ours():
    dims, hf = ParallelDims(tp=2, sp=True), zoo.cases()["deepseek_v3"].hf.to_dict()
    with rank_of(dims, 0, 2), pytest.raises(ConfigError, match=r"megatron-core must be able to build .*division"):
        build_model(AutoConfig.for_model(**{**hf, "hidden_size": 2}), dims=dims, load_weights=False, device="meta")
