"""Checkpoints of megatron-core that are written on one mesh and read on another keep all bits."""

import zlib
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.convert.convert import convert
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.factory.add_adapters import add_adapters
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.rules.adapters import LINEAR
from mcore_bridge.weights.bound import bind
from mcore_bridge.weights.dist_checkpoint.compare import leaves_of, sharded_states
from mcore_bridge.weights.dist_checkpoint.fit_state import fit_chain
from mcore_bridge.weights.dist_checkpoint.folder import TorchDistFolder, by_plain_key
from mcore_bridge.weights.files.hf_folder import Checkpoint
from tests import zoo
from tests.support import fake_mesh, pool, stepping
from tests.support.logs import messages_of
from tests.support.strategies import problems, random_state, save, tiny

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_key_value_heads": 2}
WITHOUT_ADAPTERS = {"falcon_h1"}
"""Families without adapters: a multiplier follows a projection of the MLP."""
METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}


# the parts of each rank ----------------------------------------------------------------------------------------


def whole(hf: Any, dims: ParallelDims, state: dict[str, torch.Tensor], **metadata: bool) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, put together from the parts of every rank of a mesh."""
    from megatron.core import parallel_state

    found: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    main: dict[str, torch.Tensor] = {}
    for rank in range(dims.smallest_world):
        with rank_of(dims, rank, dims.smallest_world):
            chunks = mb.build_model(
                hf, dims=dims, load_weights=state, device="cpu", backend="torch", dtype=torch.float32
            )
            with suppress(ConfigError):
                adapt(chunks)
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            parts = sharded_states(chunks, {**METADATA, **metadata, "dp_cp_group": group})
            sharded = [each for part in parts.values() for each in part.values() if not hasattr(each, "unique_key")]
            for leaf in (leaf for each in sharded for leaf in leaves_of(each)):
                place = leaf.global_slice()
                shape = leaf.global_shape
                held = found.setdefault(leaf.key, fake_mesh.blank(torch.empty(shape, dtype=leaf.dtype)))
                seen = written.setdefault(leaf.key, torch.zeros(shape, dtype=torch.bool))
                count = main.setdefault(leaf.key, torch.zeros(shape, dtype=torch.int32))
                assert not seen[place].any() or torch.equal(held[place], leaf.data), f"replicas of {leaf.key} differ"
                held[place], seen[place] = leaf.data.detach(), True
                count[place] += not any(leaf.replica_id)
    for key, count in main.items():
        assert (count == 1).all(), f"{key}: not written exactly once"
    return found


@torch.no_grad()
def adapt(chunks: list[Any]) -> None:
    """Add adapters to all linear layers, with values that follow from the HF names of their tensors."""
    modules = {path.rpartition(".")[2] for chunk in chunks for path, _ in chunk.named_modules()}
    refused = {"out_proj"} if hasattr(chunks[0].config, "layer_kinds") else set()  # of Mamba-2, like peft
    made = add_adapters(chunks, rank=2, alpha=1, targets=sorted((modules & LINEAR) - refused))
    bound = bind(chunks, adapters=made)
    for name, parameter in bound.tensors.items():
        binding = made.mapping.bind(name)
        traced = bound.trace(binding)
        seeds = [torch.Generator().manual_seed(zlib.crc32(part.encode())) for part in binding.hf]
        parts = [torch.randn(shape, generator=seed) for shape, seed in zip(traced.part_shapes, seeds, strict=True)]
        parameter.copy_(traced.shard(bound.ranks[binding.axis], parts, parameter.dtype))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], vocab: int) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        is_padded = key.startswith(("embedding.word", "embedding.layer_inputs.word", "output_layer."))
        rows = vocab if is_padded else len(tensor)
        assert torch.equal(tensor[:rows], expected[key][:rows]), key


ONE_STAGE = ("gemma4-shared",)
"""Families whose layers all stand in one stage."""


@pytest.mark.parametrize("name", [name for name in zoo.cases() if "-" not in name or name in ONE_STAGE])
def test_every_family_says_the_same_of_itself_on_any_mesh(name):
    hf = zoo.cases()[name].hf
    state = random_state(hf)
    experts = bool(getattr(hf, "num_experts", 0) or getattr(hf, "n_routed_experts", 0) or "moe" in hf.model_type)
    dims = ParallelDims(tp=2, pp=1 if name in ONE_STAGE else 2, sp=True, ep=2 if experts else 1)
    found = whole(hf, dims, state)
    assert hf.model_type in WITHOUT_ADAPTERS or any(".adapter.linear_out." in key for key in found)
    assert_same(found, whole(hf, ParallelDims(), state), hf.vocab_size)


@settings(max_examples=4)
@given(problems())
def test_any_model_says_the_same_of_itself_on_any_mesh(problem):
    hf, dims = problem[0], replace(problem[1], cp=1)  # whose ranks are replicas
    state = random_state(hf)
    assert_same(whole(hf, dims, state), whole(hf, ParallelDims(), state), hf.vocab_size)


# real processes -------------------------------------------------------------------------------------------------------

MESHES = [{"tp": 2, "sp": True, "etp": 1, "ep": 2}, {"pp": 2, "vp": 2, "layout": "Ett||tt|L"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with experts and an odd vocabulary, in bf16."""
    hf = tiny("qwen3_moe", vocab_size=97, **MOE)
    path = tmp_path_factory.mktemp("hf")
    save(random_state(hf, dtype=torch.bfloat16), hf, path)
    return path


def build(folder: Path, dims: ParallelDims, **arguments: Any) -> list[Any]:
    return mb.build_model(folder, dims=dims, device="cpu", **arguments)


def write_and_read_everywhere(folder: Path, target: Path) -> None:
    """Written once on each mesh, with other weights each time, and read on the next one."""
    expected = {name: tensor.clone() for name, tensor in Checkpoint(folder).items()}
    for turn, (here, there) in enumerate(zip(MESHES, [*MESHES[1:], MESHES[0]], strict=True)):
        with stepping.mesh(ParallelDims(**here)):
            models = build(folder, ParallelDims(**here), load_weights=expected)
            mb.save_checkpoint(models, target, common={"iteration": turn})
        with stepping.mesh(ParallelDims(**there)):
            models = build(target, ParallelDims(**there), load_weights=False)
            report = mb.load_checkpoint(models, target)
            assert report.common == {"iteration": turn}
            assert not report.cast
            found = mb.to_hf_state_dict(models)
            assert found.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        expected = {name: -tensor for name, tensor in expected.items()}


def test_what_one_mesh_writes_another_reads(folder, tmp_path):
    pool.run(2, write_and_read_everywhere, folder, tmp_path / "saved")
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "saved" / "config.json").is_file()


def save_in_stacks(models: Any, target: Path, *, optimizer: Any, common: dict[str, Any]) -> None:
    """Save by megatron-core alone, with all layers in one tensor, as its trainers wrote models with equal layers."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    stepping.let_megatron_save()
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    (ddp,) = models
    model = ddp.module
    model.config.moe_layer_freq = 1  # for any list, megatron-core numbers the layers
    metadata["dp_cp_group"] = model.pg_collection.dp_cp
    state = model.sharded_state_dict(metadata=metadata)
    whole = {"model": state, "optimizer": optimizer.sharded_state_dict(state, metadata=metadata), **common}
    target.mkdir(exist_ok=True)
    torch.distributed.barrier()
    del metadata["dp_cp_group"]
    dist_checkpointing.save(whole, str(target), get_default_save_sharded_strategy(), content_metadata=metadata)


def train_and_go_on(
    folder: Path, target: Path, here: dict[str, Any], there: list[dict[str, Any]], save: Any = mb.save_checkpoint
) -> Any:
    """Losses of an unbroken run after a save, and of runs that continue from the save on other meshes."""
    batch = tiny_batch()
    dims = ParallelDims(**here)
    with stepping.mesh(dims):
        chunks = build(folder, dims, dtype=torch.float32)
        models, optimizer, step = stepping.optimized(chunks, dims, batch)
        if save is mb.save_checkpoint:
            with pytest.raises(CheckpointError, match="as before the first step: save after a step"):
                save(models, target, optimizer=optimizer)
        for _ in range(2):
            step()
        pending = save(models, target, optimizer=optimizer, common={"iteration": 2})
        exported = {name: tensor.clone() for name, tensor in mb.to_hf_state_dict(models).items()}
        unbroken = [step() for _ in range(2)]
        if pending is not None:
            pending.wait()
    found = []
    for dims in (ParallelDims(**sizes) for sizes in there):
        with stepping.mesh(dims):
            chunks = build(folder, dims, dtype=torch.float32)
            models, optimizer, step = stepping.optimized(chunks, dims, batch)
            assert mb.load_checkpoint(models, target, optimizer=optimizer).common["iteration"] == 2
            found.append([step() for _ in range(2)])
    return unbroken, found, exported


def tiny_batch() -> torch.Tensor:
    return torch.randint(0, 97, (4, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("save", [mb.save_checkpoint, partial(mb.save_checkpoint, wait=False)], ids=["wait", "go on"])
def test_training_goes_on_at_another_mesh(save, folder, tmp_path):
    """With ``wait=False``, steps are made while the thread writes."""
    here, there = {"ep": 2}, [{"tp": 2, "sp": True, "ep": 2, "etp": 1}, {"pp": 2}, {}]
    there = there if save is mb.save_checkpoint else there[:1]
    ranks = pool.run(2, train_and_go_on, folder, tmp_path / "saved", here, there, save)
    unbroken = ranks[0][0]
    assert unbroken[1] < unbroken[0]
    for index, sizes in enumerate(there):
        found = next(rank[1][index] for rank in reversed(ranks))  # the last rank is of the last stage
        assert found == pytest.approx(unbroken, rel=1e-5), sizes
    keys = TorchDistFolder.open(tmp_path / "saved").metadata.state_dict_metadata
    assert any(key.startswith("optimizer.state.exp_avg.decoder.") for key in keys)
    convert(tmp_path / "saved", tmp_path / "back", on_event=lambda *event: None)
    exported = Checkpoint(tmp_path / "back")
    assert set(exported) == set(ranks[0][2])
    assert all(torch.equal(tensor, exported[name]) for name, tensor in ranks[0][2].items())


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama"])
def test_training_goes_on_from_layers_that_lie_in_one_tensor(kind, tmp_path):
    hf = tiny(kind, vocab_size=97, **(MOE if kind == "qwen3_moe" else {}))
    folder, saved = tmp_path / "hf", tmp_path / "saved"
    folder.mkdir()
    save(random_state(hf, dtype=torch.bfloat16), hf, folder)
    there = [{"tp": 2, "sp": True, **({"ep": 2, "etp": 1} if kind == "qwen3_moe" else {})}, {"pp": 2, "vp": 2}, {}]
    ranks = pool.run(2, train_and_go_on, folder, saved, {"tp": 2, "sp": True}, there, save_in_stacks)
    found = TorchDistFolder.open(saved)
    assert found.is_stacked
    assert not any(key.startswith("decoder.layers.0.") for key in found.metadata.state_dict_metadata)
    if kind == "qwen3_moe":
        assert tuple(found.tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"].size) == (4, 4, 80, 48)
    unbroken = ranks[0][0]
    assert unbroken[1] < unbroken[0]
    for index, sizes in enumerate(there):
        losses = next(rank[1][index] for rank in reversed(ranks) if rank[1][index][0] is not None)
        assert losses == pytest.approx(unbroken, rel=1e-5), sizes
    convert(saved, tmp_path / "back", hf=folder, on_event=lambda *event: None)
    exported = Checkpoint(tmp_path / "back")
    assert set(exported) == set(ranks[0][2])
    assert all(torch.equal(tensor, exported[name]) for name, tensor in ranks[0][2].items())


STATE = {
    "get_extra_state": lambda norm: torch.empty(0, dtype=torch.uint8),
    "set_extra_state": lambda norm, state: None,
}


def load_with_states(source: Path, folder: Path, saved: Path) -> int:
    """megatron-core loads, without this library, into modules with an extra state like TransformerEngine's."""
    from megatron.core import dist_checkpointing

    expected = Checkpoint(source)
    with stepping.mesh(ParallelDims(tp=2, sp=True)):
        mb.save_checkpoint(build(source, ParallelDims(tp=2, sp=True)), saved)
    count = 0
    for dims in (ParallelDims(tp=2, sp=True), ParallelDims(pp=2)):
        for path in (folder, saved):
            with stepping.mesh(dims):
                (model,) = build(source, dims, load_weights=False)
                norms = {name: each for name, each in model.named_modules() if name.endswith("norm")}
                for name, norm in norms.items():
                    if hasattr(norm, "weight") and not name.endswith("input_layernorm"):  # it is in a linear there
                        norm.__class__ = type("Norm", (type(norm),), STATE)
                metadata = dist_checkpointing.load_content_metadata(str(path))
                asked = {"model": model.sharded_state_dict(metadata=metadata)}
                count += sum(name.endswith("norm._extra_state") for name in asked["model"])
                model.load_state_dict(dist_checkpointing.load(asked, str(path))["model"])
                found = mb.to_hf_state_dict(model)
                assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    return count


def test_megatron_core_loads_it_into_modules_that_ask_for_a_state(folder, tmp_path):
    convert(folder, tmp_path / "dist", on_event=lambda *event: None)
    keys = TorchDistFolder.open(tmp_path / "dist").metadata.state_dict_metadata
    assert "decoder.layers.0.self_attention.core_attention._extra_state/shard_0_1" in keys
    assert pool.run(2, load_with_states, folder, tmp_path / "dist", tmp_path / "saved")[0] > 8


# refusals -------------------------------------------------------------------------------------------------------------


def refuse(folder: Path) -> None:
    """Tensors that do not fit are named before anything is written to the model."""
    with stepping.mesh(ParallelDims()):
        for change, match in (
            ({"num_hidden_layers": 3}, r"0 tensors missing .*unexpected .*decoder\.layers\.3\."),
            ({"num_hidden_layers": 5}, r"missing .*decoder\.layers\.4\..*, 0 unexpected"),
            (
                {"moe_intermediate_size": 48},
                r"linear_fc1\.weight has shape \(4, 80, 48\), the model takes \(4, 96, 48\)",
            ),
            ({"vocab_size": 98}, r"word_embeddings\.weight has shape \(97, 48\), the model takes \(98, 48\)"),
        ):
            hf = tiny("qwen3_moe", **{"vocab_size": 97, **MOE, **change})
            (model,) = mb.build_model(hf, device="cpu", load_weights=False)
            before = {name: tensor.clone() for name, tensor in mb.to_hf_state_dict(model).items()}
            with pytest.raises(CheckpointError, match=match):
                mb.load_checkpoint(model, folder)
            assert all(torch.equal(tensor, before[name]) for name, tensor in mb.to_hf_state_dict(model).items())
        hf = tiny("qwen3_moe", vocab_size=97, **MOE)
        (model,) = mb.build_model(hf, device="cpu", load_weights=False)
        del model.bridge, model.bridge_built, model.decoder.layers[3]  # like a model of another builder
        with pytest.raises(CheckpointError, match="call adopt"):
            mb.load_checkpoint(model, folder)
        report = mb.load_checkpoint(model, folder, hf=hf, strict=False)
        assert report.unexpected
        assert all(key.startswith("decoder.layers.3.") for key in report.unexpected)
        model.decoder.layers[0].self_attention.sharded_state_dict = lambda *given, **options: {}
        with pytest.raises(CheckpointError, match=r"omits .*decoder\.layers\.0\.self_attention"):
            mb.save_checkpoint(model, folder, hf=hf)


def refuse_dtypes(folder: Path) -> None:
    """A load loses bits only on request."""
    with stepping.mesh(ParallelDims()):
        (model,) = mb.build_model(folder, device="cpu", load_weights=False)
        with pytest.raises(
            CheckpointError, match=r"is float32 and the parameter bfloat16, .*pass dtype=torch\.bfloat16"
        ):
            mb.load_checkpoint(model, folder)
        report = mb.load_checkpoint(model, folder, dtype=torch.bfloat16)
        assert report.cast["decoder.final_layernorm.weight"] == "float32 -> bfloat16"
        (model,) = mb.build_model(folder, device="cpu", load_weights=False, dtype=torch.float32)
        assert not mb.load_checkpoint(model, folder).cast
        model.decoder.final_layernorm.weight.data.fill_(1e6)
        mb.save_checkpoint(model, folder / "large")
        (model,) = mb.build_model(folder, device="cpu", load_weights=False, dtype=torch.float16)
        with messages_of() as messages:
            mb.load_checkpoint(model, folder / "large", dtype=torch.float16)
        assert "infinite in 1 tensors, such as ['decoder.final_layernorm.weight']" in messages[-1]


def test_what_does_not_fit_is_named(folder, tmp_path):
    convert(folder, tmp_path / "dist", on_event=lambda *event: None)
    pool.run(1, refuse, tmp_path / "dist")


def test_bits_are_lost_only_where_that_is_asked_for(folder, tmp_path):
    convert(folder, tmp_path / "dist", dtype=torch.float32, on_event=lambda *event: None)
    pool.run(1, refuse_dtypes, tmp_path / "dist")


def test_a_folder_with_two_spellings_of_a_parameter_is_refused():
    """Backends either fuse norms into linear layers or not, and without a check one kind of names would be skipped."""
    norms = ("decoder.layers.0.input_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight")
    assert [*by_plain_key(norms[:1])] == [*by_plain_key(norms[1:])]
    with pytest.raises(
        CheckpointError, match=r"input_layernorm.* are the same parameter; the checkpoint must have one"
    ):
        by_plain_key(norms)


def test_a_chain_of_optimizers_takes_what_one_of_another_length_has_saved():
    def saved(lr: float, experts: bool) -> dict[str, Any]:
        group = {"lr": lr, "is_expert_parallel": experts, "step": 3}
        return {"optimizer": {"param_groups": [group]}, "param_state_sharding_type": "fully_reshardable"}

    def groups(state: Any) -> dict[bool, float]:
        return {group["is_expert_parallel"]: group["lr"] for group in state["optimizer"]["param_groups"]}

    chain = {0: saved(0.1, False), 1: saved(0.2, True)}
    assert fit_chain(chain, 2) is chain
    alone = fit_chain({**chain, "param_state": "mine"}, 1)
    assert groups(alone) == {False: 0.1, True: 0.2}
    assert alone["param_state"] == "mine"
    both = fit_chain({**saved(0.1, False), 0: {"param_state": "dense"}, 1: {"param_state": "experts"}}, 2)
    assert [each["param_state"] for each in both.values()] == ["dense", "experts"]
    assert groups(both[0]) == groups(both[1]) == {False: 0.1, True: 0.1}
    assert both[1]["param_state_sharding_type"] == "fully_reshardable"
