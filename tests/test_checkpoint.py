"""Checkpoints of megatron-core: written at one mesh and read at another, with the bits that they had."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.commands.fake import rank_of
from mcore_bridge.commands.options import smallest_world
from mcore_bridge.weights.dist_checkpoint import _leaves, sharded_states
from tests import pool, stepping, zoo
from tests.strategies import problems, random_state, save, tiny

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_key_value_heads": 2}
METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}


# what each rank says of itself ----------------------------------------------------------------------------------------


def whole(hf: Any, dims: ParallelDims, state: dict[str, torch.Tensor], **metadata: bool) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, put together from what every rank of a mesh says that it holds of them."""
    from megatron.core import parallel_state

    found: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    main: dict[str, torch.Tensor] = {}
    for rank in range(smallest_world(dims)):
        with rank_of(dims, rank, smallest_world(dims)):
            chunks = mb.build_model(
                hf, dims=dims, load_weights=state, device="cpu", backend="torch", dtype=torch.float32
            )
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            parts = sharded_states(chunks, {**METADATA, **metadata, "dp_cp_group": group})
            sharded = [each for part in parts.values() for each in part.values() if not hasattr(each, "unique_key")]
            for leaf in (leaf for each in sharded for leaf in _leaves(each)):
                place = leaf.global_slice()
                shape = leaf.global_shape
                held = found.setdefault(leaf.key, torch.full(shape, float("nan"), dtype=leaf.dtype))
                seen = written.setdefault(leaf.key, torch.zeros(shape, dtype=torch.bool))
                count = main.setdefault(leaf.key, torch.zeros(shape, dtype=torch.int32))
                assert not seen[place].any() or torch.equal(held[place], leaf.data), f"replicas of {leaf.key} differ"
                held[place], seen[place] = leaf.data.detach(), True
                count[place] += not any(leaf.replica_id)
    for key, count in main.items():
        assert (count == 1).all(), f"{key}: not written exactly once"
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], vocab: int) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        rows = vocab if key.startswith(("embedding.word", "output_layer.")) else len(tensor)
        assert torch.equal(tensor[:rows], expected[key][:rows]), key


@pytest.mark.parametrize("name", zoo.cases())
def test_every_family_says_the_same_of_itself_on_any_mesh(name):
    hf = zoo.cases()[name].hf
    state = random_state(hf)
    experts = bool(getattr(hf, "num_experts", 0) or getattr(hf, "n_routed_experts", 0) or "moe" in hf.model_type)
    dims = ParallelDims(tp=2, pp=2, ep=2 if experts else 1)
    assert_same(whole(hf, dims, state), whole(hf, ParallelDims(), state), hf.vocab_size)


@settings(max_examples=15)
@given(problems())
def test_any_model_says_the_same_of_itself_on_any_mesh(problem):
    hf, dims = problem
    state = random_state(hf)
    assert_same(whole(hf, dims, state), whole(hf, ParallelDims(), state), hf.vocab_size)


# real processes -------------------------------------------------------------------------------------------------------

MESHES = [{"tp": 2, "sp": True}, {"pp": 2, "vp": 2}, {"tp": 2, "etp": 1, "ep": 2}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with experts and an odd vocabulary, in bf16."""
    hf = tiny("qwen3_moe", vocab_size=97, **MOE)
    path = tmp_path_factory.mktemp("hf")
    save(random_state(hf, dtype=torch.bfloat16), hf, path)
    return path


def let_fork() -> None:
    """megatron-core writes in forked processes, which the pool's may not have."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def build(folder: Path, dims: ParallelDims, **arguments: Any) -> list[Any]:
    return mb.build_model(folder, dims=dims, device="cpu", **arguments)


def write_and_read_everywhere(folder: Path, target: Path) -> None:
    """Written once on each mesh, with other weights each time, and read on the next one."""
    from mcore_bridge.weights.checkpoint import Checkpoint

    let_fork()
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


def trained(folder: Path, dims: ParallelDims, batch: Any) -> tuple[Any, Any, Any]:
    """Chunks with megatron-core's distributed optimizer, and what takes a step and gives its loss."""
    chunks = build(folder, dims, dtype=torch.float32)
    wrapped = stepping.wrap(chunks, use_distributed_optimizer=True)
    optimizer = stepping.distributed_optimizer(wrapped, lr=1e-2)

    def step() -> float | None:
        for ddp in wrapped:
            ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = stepping.forward_backward(wrapped, dims, batch)
        assert not optimizer.prepare_grads()
        assert optimizer.step_with_ready_grads()  # step() takes a norm of gradients on CUDA between the two
        return None if loss is None else loss.item()

    return wrapped, optimizer, step


def train_and_go_on(folder: Path, target: Path, here: dict[str, Any], there: list[dict[str, Any]]) -> Any:
    """Losses of an unbroken run behind a save, and of those that go on from it on other meshes."""
    let_fork()
    batch = tiny_batch()
    with stepping.mesh(ParallelDims(**here)):
        models, optimizer, step = trained(folder, ParallelDims(**here), batch)
        for _ in range(2):
            step()
        mb.save_checkpoint(models, target, optimizer=optimizer, common={"iteration": 2})
        unbroken = [step() for _ in range(2)]
    found = []
    for sizes in there:
        with stepping.mesh(ParallelDims(**sizes)):
            models, optimizer, step = trained(folder, ParallelDims(**sizes), batch)
            assert mb.load_checkpoint(models, target, optimizer=optimizer).common == {"iteration": 2}
            found.append([step() for _ in range(2)])
    return unbroken, found


def tiny_batch() -> torch.Tensor:
    return torch.randint(0, 97, (4, 17), generator=torch.Generator().manual_seed(0))


def test_training_goes_on_at_another_mesh(folder, tmp_path):
    here, there = {"tp": 2, "sp": True, "ep": 2, "etp": 1}, [{"ep": 2}, {"pp": 2}, {}]
    ranks = pool.run(2, train_and_go_on, folder, tmp_path / "saved", here, there)
    unbroken = ranks[0][0]
    assert unbroken[1] < unbroken[0]
    for index, sizes in enumerate(there):
        found = next(rank[1][index] for rank in reversed(ranks))  # the last rank is of the last stage
        assert found == pytest.approx(unbroken, rel=1e-5), sizes
