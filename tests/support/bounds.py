"""How near logits are to those of transformers, and on which meshes."""

import mcore_bridge as mb

BOUND = 2e-5


ONE, TWO, FOUR = mb.ParallelDims(), mb.ParallelDims(tp=2, sp=True), mb.ParallelDims(tp=4, sp=True)


EXPERT_MESHES = [
    mb.ParallelDims(ep=2),
    mb.ParallelDims(tp=2, ep=2, sp=True),
    mb.ParallelDims(tp=2, etp=2, sp=True),
    mb.ParallelDims(tp=2, ep=2, etp=2, sp=True),
]
