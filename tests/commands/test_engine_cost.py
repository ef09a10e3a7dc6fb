"""``plan`` predicts exactly which transfers to engines all ranks make, and how many bytes they send."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mcore_bridge import EngineRank, ParallelDims, engine_ranks
from mcore_bridge.commands.app import app
from mcore_bridge.commands.plan.cost import feed
from mcore_bridge.commands.plan.mesh_plan import MeshPlan, plan_mesh
from mcore_bridge.errors import TargetError
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint
from mcore_bridge.weights.plan.export_plan import MESSAGES_IN_FLIGHT
from mcore_bridge.weights.plan.stream import HEADER
from tests.support import fake_mesh
from tests.support.sparse_models import sparse

CASES = [
    (ParallelDims(tp=2, pp=2, sp=True), engine_ranks(tp=4)),
    (ParallelDims(tp=2, pp=2, sp=True), engine_ranks(tp=2, pp=2)),
    (ParallelDims(pp=2, ep=4), engine_ranks(tp=4, ep=4)),
    (ParallelDims(tp=2, ep=2, etp=2, sp=True), engine_ranks(tp=2)),
    (ParallelDims(pp=4), engine_ranks()),
]


def trainer(dims: ParallelDims, world_size: int | None = None) -> MeshPlan:
    blueprint = make_blueprint(sparse(4), BuildOptions(dims=dims, dtype=torch.bfloat16, device="meta"))
    return plan_mesh(blueprint, world_size=world_size or dims.smallest_world)


@pytest.mark.parametrize(("dims", "engine"), CASES, ids=str)
def test_it_is_what_the_programs_of_all_ranks_do(dims: ParallelDims, engine: tuple[EngineRank, ...]) -> None:
    found = feed(trainer(dims), engine, bandwidth=2.0)
    held = fake_mesh.build_everywhere(sparse(4), dims, lambda chunks: None, dtype=torch.bfloat16)
    ranks = range(len(held))
    programs = fake_mesh.programs_for(held, [engine[rank % len(engine)] for rank in ranks], bucket_bytes=None)
    assert {len(program.plan.messages) for program in programs} == {found.messages}
    messages = range(found.messages)
    headers = HEADER * found.messages * (len(held) - 1)
    received = [sum(sum(program.received(number)) for number in messages) - headers for program in programs]
    sent = [sum(sum(program.sent(number)) for number in messages) - headers for program in programs]
    for each, known in ((found.received, max(received)), (found.sent, max(sent)), (found.total, sum(sent))):
        assert abs(each - known) < 0.03 * known  # all windows of a lane are as wide as its widest
    most = max(ranks, key=received.__getitem__)
    taken = [
        max(each.plan.open_bytes_by_message) + min(MESSAGES_IN_FLIGHT, found.messages) * sum(each.room(0))
        for each in programs
    ]
    assert found.memory == taken[most]
    assert found.seconds == max(found.received, found.sent) / 2e9


def test_nothing_travels_where_engines_are_cut_as_the_trainer_is() -> None:
    found = feed(trainer(ParallelDims(pp=2)), engine_ranks(pp=2))
    assert (found.received, found.sent, found.total, found.seconds) == (0, 0, 0, 0)


def test_ranks_of_a_replica_feed_by_their_places_in_the_job() -> None:
    """Engines have four ranks, and a replica feeds ranks 0 and 1, or 2 and 3: other slices than for engines of two."""
    dims, engine = ParallelDims(tp=2, pp=2, sp=True), engine_ranks(tp=4)
    once, twice = (feed(trainer(dims, world_size), engine) for world_size in (4, 8))
    assert once != twice
    assert twice == feed(trainer(dims, 4), [engine[0], engine[1], engine[0], engine[1]])


def test_engines_fill_the_job() -> None:
    with pytest.raises(TargetError, match="engines of 3 ranks do not fill a job of 4"):
        feed(trainer(ParallelDims(tp=2, pp=2, sp=True)), engine_ranks(pp=3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], None),
        (["--engine-pp", "2"], "To engines of TP1 PP2 EP1, where rank r of the job feeds rank r % 2 of one, "),
        (
            ["--engine-tp", "4", "--engine-ep", "2"],
            "To engines of TP4 PP1 EP2, where rank r of the job feeds rank r % 4",
        ),
    ],
)
def test_the_command_says_what_feeding_moves(options: list[str], said: str | None, tmp_path: Path) -> None:
    result = run(tmp_path, *options)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert ("To engines" in text) == (said is not None)
    assert said is None or said in text
    assert text.count("Predicted: ") == 1 + (said is not None)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--engine-tp", "3"], 1, "engines of 3 ranks do not fill a job of 4"),
        (["--engine-ep", "2"], 2, "expected --engine-ep to divide --engine-tp 1, found 2"),
        (["--engine-tp", "2", "--engine-pp", "8"], 1, "engines of 16 ranks do not fill a job of 4"),
    ],
)
def test_the_command_refuses_engines_that_do_not_fit(options: list[str], code: int, said: str, tmp_path: Path) -> None:
    result = run(tmp_path, *options)
    assert result.exit_code == code
    assert said in result.stderr


def run(folder: Path, *options: str) -> Any:
    sparse(4).save_pretrained(folder)
    return CliRunner().invoke(app, ["plan", str(folder), "--tp", "2", "--pp", "2", "--sp", *options])
