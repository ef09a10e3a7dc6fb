"""Planted mistakes in sparse attention: in the indexer's rules, the selection, and the sharing between layers."""

from unittest import mock

from mcore_bridge.factory.modules.latent import LatentNorm
from mcore_bridge.rules.layout import COLUMN
from tests.support.bounds import ONE
from tests.support.mutants import exchange, instead, laid_out, of, with_epsilon_of_mcore

CASE, SHARED = "deepseek_v32", "glm_moe_dsa-shared"
# fmt: off
RULES = {
    "weight for bias":        ("logits",         CASE, exchange("k_norm.weight", "k_norm.bias")),
    "queries cut":            ("shapes at tp=2", CASE, of("linear_wq_b.weight", laid_out(COLUMN))),
    "indexer rule forgotten": ("no rule",        CASE, of("linear_wk.weight", lambda rule: None)),
}
# fmt: on
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


MODULES = {
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
