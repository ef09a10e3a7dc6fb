"""A comparison by a map sees every bit of an engine's tensors that differs, and writes none."""

from contextlib import closing

import pytest
import torch

from mcore_bridge.errors import TransferError
from mcore_bridge.weights.engine.comparison import MapComparison
from mcore_bridge.weights.engine.map_engine import map_engine
from mcore_bridge.weights.engine.prove import drawn_values
from mcore_bridge.weights.ipc.buckets import plan_buckets
from mcore_bridge.weights.ipc.receiver import Receiver
from mcore_bridge.weights.ipc.sender import BufferRing
from tests.support.stand_in import Sizes, StandIn, differing, specs

SPECS = specs(Sizes())


def sent(pairs, *takers):
    """Send a round to each of these, through slots."""
    with closing(BufferRing(plan_buckets(SPECS, slot_bytes=1024), "cpu")) as ring:
        receiver = Receiver(ring.plan, ring.handles())
        for taker in takers:
            for bucket in ring.fill(pairs.items(), acknowledged=lambda: None):
                receiver.copy_into(bucket.number, taker)
            receiver.finish()


@pytest.mark.parametrize("computes", [False, True])
def test_every_bit_is_compared_and_none_is_written(computes):
    """At TP2, whose second rank has a padded vocabulary, a router that is cast, and a transposed copy of a weight."""
    model = StandIn(2, 1, adds=computes)
    engine = map_engine(SPECS, model, model.load)
    comparison = MapComparison(engine.map, model)
    pairs = dict(drawn_values(SPECS, 5, torch.device("cpu")))
    sent(pairs, engine, comparison)
    left_out = {f"layers.{i}.norm" for i in range(2)} if computes else set()
    assert {entry.tensor for entry in comparison.result.left_out} == left_out
    assert comparison.result.num_tensors == len(engine.map.tensors) - len(left_out)
    assert comparison.result.wrong == ()

    held = dict(model.named_parameters())
    held["layers.0.norm"].data[0] += 1  # which the loader alone makes if it computes
    held["layers.1.router"].data[2, 3] += 1
    held["layers.1.w13"].data[3, 0, 5] = -held["layers.1.w13"].data[3, 0, 5]
    held["embed"].data[-1, 0] = -0.0
    held["layers.0.constant"].data[1] = torch.nan
    model.layers[0].prepared[1, 2] += 1
    before = model.held()
    sent(pairs, comparison)
    lines = {str(entry) for entry in comparison.result.wrong}
    of_norm = "layers.0.norm: 1 of 8 elements of model.layers.0.input_layernorm.weight"
    assert (of_norm in lines) != computes
    assert lines - {of_norm} == {
        "layers.1.router: 1 of 32 elements of model.layers.1.mlp.gate.weight",
        "layers.1.w13: 1 of 24 elements of model.layers.1.mlp.experts.3.gate_proj.weight",
        "embed: 1 of 88 elements of constants",
        "layers.0.constant: 1 of 3 elements of constants",
        "layers.0.prepared: 1 of 64 elements of model.layers.0.self_attn.o_proj.weight",
    }
    assert differing(model.held(), before) == []
    assert engine.state.weights == "new"
    sent(pairs, engine, comparison)
    assert comparison.result.wrong == ()


def test_an_engine_that_has_changed_is_refused():
    model = StandIn()
    engine = map_engine(SPECS, model, model.load)
    model.norm = torch.nn.Parameter(torch.zeros(9), requires_grad=False)
    with pytest.raises(TransferError, match="is not the one that its map was made for"):
        sent(dict(drawn_values(SPECS, 5, torch.device("cpu"))), MapComparison(engine.map, model))
