"""Planted mistakes in sparse attention: in the indexer's rules, the selection of tokens or blocks, and sharing."""

from unittest import mock

import torch

from mcore_bridge import ParallelDims
from mcore_bridge.factory.modules import selection
from mcore_bridge.factory.modules.latent import LatentNorm
from mcore_bridge.rules.layout import COLUMN
from tests.support.bounds import ONE
from tests.support.mutants import exchange, instead, laid_out, of, with_epsilon_of_mcore

CASE, SHARED = "deepseek_v32", "glm_moe_dsa-shared"
M3, HEADS = "minimax_m3_vl_text", "minimax_m3_vl_text-heads"
# fmt: off
RULES = {
    "weight for bias":        ("logits",         CASE, exchange("k_norm.weight", "k_norm.bias")),
    "queries cut":            ("shapes at tp=2", CASE, of("linear_wq_b.weight", laid_out(COLUMN))),
    "indexer rule forgotten": ("no rule",        CASE, of("linear_wk.weight", lambda rule: None)),
    "queries of blocks cut":  ("shapes at tp=2", M3, of("linear_wq.weight", laid_out(COLUMN))),
    "query norm for key norm": ("logits",        M3, exchange("indexer.q_norm.weight", "indexer.k_norm.weight")),
    "norms of attention":     ("shapes", M3, exchange("indexer.q_norm.weight", "attention.q_layernorm.weight")),
    "block rule forgotten":   ("no rule",        M3, of("linear_wk.weight", lambda rule: None)),
}
# fmt: on
_blocks = selection.BlockIndexer.selected
_in_halves, _best = selection.in_halves, selection.best


def dsa():
    from megatron.core.transformer.experimental_attention_variant import dsa

    return dsa


def sees_all(select):
    return lambda q, k, weights, topk, *rest, **keywords: select(q, k, weights, k.size(0), *rest, **keywords)


def one_less(select):
    return lambda q, k, weights, topk, *rest, **keywords: select(q, k, weights, topk - 1, *rest, **keywords)


def without_relu(select):
    return lambda *rest, **keywords: select(*rest, **{**keywords, "use_relu": False})


def rotated_otherwise(rotate):
    def rotated(self, *arguments, **keywords):
        other = not self.config.dsa_indexer_rope_interleaved
        with mock.patch.object(self.config, "dsa_indexer_rope_interleaved", other):
            return rotate(self, *arguments, **keywords)

    return rotated


def selecting(change):
    return mock.patch.object(dsa(), "fused_qk_topk_naive", change(dsa().fused_qk_topk_naive))


def rotating(change):
    return mock.patch.object(dsa().DSAIndexer, "_apply_rope", change(dsa().DSAIndexer._apply_rope))


def of_first_head(self, query, *tensors):
    return _blocks(self, query[:, :, :1].expand_as(query), *tensors)


def of_first_rank(self, query, *tensors):
    """The heads of the first TP rank."""
    with mock.patch.object(self, "head_of", [head - self.head_of[0] for head in self.head_of]):
        return _blocks(self, query, *tensors)


def without_future(self, query, key, weights, hidden, places):
    """Later keys count for a block, too."""
    return _blocks(self, query, key, weights, torch.zeros_like(hidden), places)


def only_scored(self, *tensors):
    """No block is always visible."""
    with mock.patch.object(self, "num_local", 0):
        return _blocks(self, *tensors)


def one_block_less(scores, count):
    return _best(scores, count - 1)


def all_dims_rotated(heads, angles, *rest):
    return _in_halves(heads.flip(-1), angles, *rest).flip(-1)


def not_zero_centered(self, config, *sizes):
    _init(self, config, *sizes)
    self.q_norm.zero_centered = self.k_norm.zero_centered = False


_init, TP2 = selection.BlockIndexer.__init__, ParallelDims(tp=2, sp=True)
MODULES = {
    "all blocks": (M3, ONE, {"index_topk_blocks": 99}),
    "a block less": (M3, ONE, instead(selection, "best", one_block_less)),
    "a token more in a block": (M3, ONE, {"index_block_size": 4}),
    "selection of the first head": (M3, ONE, instead(selection.BlockIndexer, "selected", of_first_head)),
    "selection of the first rank": (HEADS, TP2, instead(selection.BlockIndexer, "selected", of_first_rank)),
    "later keys count": (M3, ONE, instead(selection.BlockIndexer, "selected", without_future)),
    "own block not always": (M3, ONE, instead(selection.BlockIndexer, "selected", only_scored)),
    "a local block less": (HEADS, ONE, {"index_local_blocks": 1}),
    "no rope of blocks": (M3, ONE, instead(selection, "in_halves", lambda heads, *rest: heads)),
    "last dims rotated": (M3, ONE, instead(selection, "in_halves", all_dims_rotated)),
    "norms of blocks not centered": (M3, ONE, instead(selection.BlockIndexer, "__init__", not_zero_centered)),
    "no limits of dense layers": (M3, ONE, {"swiglu_limit": 100.0}),
    "indexer forgotten": (CASE, ONE, lambda: selecting(sees_all)),
    "one token less": (CASE, ONE, lambda: selecting(one_less)),
    "negative scores count": (CASE, ONE, lambda: selecting(without_relu)),
    "indexer not rotated": (CASE, ONE, lambda: rotating(lambda rotate: lambda self, heads, *rest, **keywords: heads)),
    "neighbours rotated": (CASE, ONE, lambda: rotating(rotated_otherwise)),
    "halves rotated": (SHARED, ONE, lambda: rotating(rotated_otherwise)),
    "selection of the first layer": (
        *(SHARED, ONE),
        lambda: mock.patch.object(dsa(), "source_dsa_compute_layer", return_value=1),
    ),
    "epsilon of latents": (CASE, ONE, instead(LatentNorm, "__init__", with_epsilon_of_mcore)),
}
