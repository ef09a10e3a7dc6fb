"""Rounds into one engine in any order: complete, stopped, short, with other buckets, and while the engine changes."""

from contextlib import closing

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import mcore_bridge as mb
from mcore_bridge.errors import TransferError
from mcore_bridge.weights.engine.prove import drawn_values
from mcore_bridge.weights.ipc.buckets import plan_buckets
from tests.support.stand_in import Sizes, StandIn, differing, in_shared_memory, loaded, specs

SPECS = specs(Sizes(layers=1, experts=2))
CPU = torch.device("cpu")
SEEDS = st.integers(0, 5)
BREAKS = st.none() | st.integers(0, 2)
"""The number of buckets after which a round stops."""


def weights(seed):
    return dict(drawn_values(SPECS, seed, CPU))


EXPECTED = {seed: loaded(weights(seed), sizes=Sizes(layers=1, experts=2)) for seed in range(6)}


class Rounds(RuleBasedStateMachine):
    """The engine reports the round of its weights, which are compared with a new model of this round."""

    @initialize()
    def begin(self):
        self.model = StandIn(sizes=Sizes(layers=1, experts=2))
        self.memory = [in_shared_memory(self.model)]
        self.engine = mb.map_engine(SPECS, self.model, self.model.load)
        self.memory.append(in_shared_memory(self.model))
        rings = [mb.BufferRing(plan_buckets(SPECS, slot_bytes=size), "cpu") for size in (1024, 3072)]
        self.rings = [(ring, mb.Receiver(ring.plan, ring.handles())) for ring in rings]
        self.writer, self.seeds = None, {}

    def teardown(self):
        for ring, receiver in getattr(self, "rings", ()):
            receiver.close()
            ring.close()

    def ended(self, seed, end):
        """A whole round ends well."""
        end()
        self.seeds[self.engine.require_whole()] = seed
        assert self.engine.state.weights == "new"

    @staticmethod
    def refused(end):
        """A round that lacks a tensor raises."""
        try:
            end()
        except TransferError:
            return
        raise AssertionError("a round that is not whole was completed")

    @rule(seed=SEEDS, number=st.integers(0, 1), breaks_at=BREAKS, asks=st.booleans())
    def by_a_ring(self, seed, number, breaks_at, asks):
        ring, receiver = self.rings[number]
        with closing(ring.fill(weights(seed).items(), acknowledged=lambda: None)) as buckets:
            for bucket in buckets:
                if bucket.number == breaks_at:
                    break
                receiver.copy_into(bucket.number, self.engine)
            else:
                self.ended(seed, receiver.finish)
                return
        if asks:
            self.refused(receiver.finish)
            self.refused(self.engine.complete)
        ring.restart()
        receiver.restart()
        self.refused(self.engine.complete)

    @rule(seed=SEEDS, size=st.sampled_from([3, 5, 100]), breaks_at=BREAKS)
    def by_groups(self, seed, size, breaks_at):
        pairs = list(weights(seed).items())
        self.engine.begin(SPECS)
        for number, first in enumerate(range(0, len(pairs), size)):
            if number == breaks_at:
                self.refused(self.engine.complete)
                return
            self.engine.write([(name, tensor.clone()) for name, tensor in pairs[first : first + size]])
        self.ended(seed, self.engine.complete)

    @rule(seed=SEEDS, ends=st.booleans(), moves=st.booleans())
    def directly(self, seed, ends, moves):
        try:
            handles = self.engine.share()
        except TransferError:  # its loader has made a new tensor, which other processes cannot open
            self.memory.append(in_shared_memory(self.model))
            handles = self.engine.share()
        if handles is not None:
            self.writer = mb.EngineWriter(self.engine.map, handles)
        if moves:
            self.memory.append(in_shared_memory(self.model))
        if ends:
            self.writer.write(weights(seed).items())
        if ends and not moves:
            self.ended(seed, self.engine.complete)
        else:
            self.refused(self.engine.complete)

    @rule()
    def breaks_off(self):
        self.engine.break_off()
        self.refused(self.engine.complete)
        self.writer = None  # its trainer died: the next trainer needs new handles

    @rule()
    def moves(self):
        self.memory.append(in_shared_memory(self.model))

    @rule(seed=SEEDS)
    def loses_a_tensor(self, seed):
        """Its loader takes the next round, and makes the tensor anew."""
        del self.model.layers[0].prepared
        ring, receiver = self.rings[0]
        for bucket in ring.fill(weights(seed).items(), acknowledged=lambda: None):
            receiver.copy_into(bucket.number, self.engine)
        assert "prepared is missing" in self.engine.reason
        self.ended(seed, receiver.finish)

    @invariant()
    def holds_what_it_says(self):
        if not hasattr(self, "engine"):
            return
        try:
            version = self.engine.require_whole()
        except TransferError:
            return
        assert differing(self.model.held(), EXPECTED[self.seeds[version]]) == []


class TestRounds(Rounds.TestCase):
    settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
