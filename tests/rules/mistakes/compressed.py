"""Planted mistakes in attention to compressed keys, and in routers by tables or with roots of softplus."""

import torch

from mcore_bridge.factory.modules import compressed, gate_limits, root_router, scores
from mcore_bridge.rules.layout import COLUMN, REPLICATED, Rearrange
from tests import zoo
from tests.rules.mistakes.streams import behind, without_sinks
from tests.support.bounds import ONE, TWO
from tests.support.mutants import exchange, instead, laid_out, of

V4 = "deepseek_v4"
DEALT = Rearrange("(n tp) ...", "tp n ...")
OWN, INDEXED = "self_attention.compressor", "self_attention.indexer.compressor"
GATES = {name: (f"{name}.linear_kv.weight", f"{name}.linear_gate.weight") for name in (OWN, INDEXED)}
# fmt: off
RULES = {
    "gates for keys":              ("logits",         V4, exchange(*GATES[OWN])),
    "gates for keys of indexers":  ("logits",         V4, exchange(*GATES[INDEXED])),
    "places forgotten":            ("no rule",        V4, of(f"{OWN}.places", lambda rule: None)),
    "table forgotten":             ("no rule",        V4, of("router.experts_of_tokens", lambda rule: None)),
    "keys cut":                    ("shapes at tp=2", V4, of("linear_kv_down_proj.weight", laid_out(COLUMN))),
    "queries of indexers cut":     ("shapes at tp=2", V4, of("indexer.linear_wq_b.weight", laid_out(COLUMN))),
    "groups whole":                ("shapes at tp=2", V4, of("linear_o_down_proj.weight", laid_out(REPLICATED))),
    "rows of groups dealt out":    ("logits at tp=2", V4, of("linear_o_down_proj.weight", laid_out(DEALT))),
    "sinks dealt out":             ("logits at tp=2", V4, of("softmax_offset", laid_out(DEALT))),
}
# fmt: on
_rotated, _unseen = compressed.CompressedAttention._rotated, compressed.CompressedAttention._unseen
_compress, _selected = compressed.Compressor.forward, compressed.CompressedIndexer.selected
_ranked = root_router.TableRouter._ranked


def not_back(self, heads, angles):
    """The output of core attention keeps its rotation."""
    return heads if bool((angles < 0).any()) else _rotated(self, heads, angles)


def of_first_dims(self, heads, angles):
    return _rotated(self, heads.flip(-1), angles).flip(-1)


def one_more(self, behind, angles, *indexed):
    """A query reads the compressed key of its own window, also before the last token of the window."""
    unseen = _unseen(self, behind, angles, *indexed)
    windows = torch.arange(unseen.size(1))[:, None] // self.compressor.ratio
    return unseen & (windows != torch.arange(unseen.size(2)))


def like_last_token(self, tokens, angles, rotate):
    return _compress(self, tokens, angles.roll(1 - self.ratio, 0), rotate)


def like_next_window(self, tokens, angles, rotate):
    return _compress(self, tokens.roll(-1, 0), angles, rotate)


def own_window(self, windows, fill):
    return windows.split(self.dim, -1)[1]


def of_both(self, windows, fill):
    """The window before gives the dims of the own window."""
    before, own = windows.split(self.dim, -1)
    return torch.cat((torch.nn.functional.pad(own, (*(0, 0) * 3, 1, 0), value=fill)[:-1], before), 1)


def unrotated(self, tokens, later, angles, rotate, places):
    return _selected(self, tokens, later, angles, lambda heads, by: heads, places)


def by_logits(self, ask, scores, topk, *more):
    _, experts = ask(scores + self.expert_bias * (not hasattr(self, "experts_of_tokens")), topk, *more)
    return scores.gather(1, experts), experts


def without_bias(self, scores):
    return scores


def of_first_rank(self, scores):
    """Each rank takes the tokens of the first rank."""
    if not self.config.sequence_parallel:
        return _ranked(self, scores)
    self.tokens = self.tokens.t().chunk(2)[0].repeat(2, 1).t()
    return _ranked(self, scores)


def of_next_token(self, scores):
    self.tokens = self.tokens.roll(1, 1)
    return _ranked(self, scores)


def unnormed(self, hidden):
    return hidden


def unsummed(shared, tp_group):
    return shared


def summed_again(self, config, dim):
    """A norm of keys that every rank has, marked as a norm of some tokens."""
    _made(self, config, dim)
    self.norm.weight.sequence_parallel = True


_made = compressed.Compressor.__init__
HF = zoo.cases()[V4].hf if zoo.here([V4]) else None
GRADIENTS = (
    {}
    if HF is None
    else {
        "keys not summed": (HF, TWO, instead(compressed, "read_by_heads", unsummed)),
        "norm summed twice": (HF, TWO, instead(compressed.Compressor, "__init__", summed_again)),
    }
)
MODULES = {
    "all compressed keys": (V4, ONE, {"index_topk": 100}),
    "one compressed key less": (V4, ONE, {"index_topk": 1}),
    "a window of one more": (V4, ONE, {"sliding_window": 6}),
    "one iteration less": (V4, ONE, {"hc_sinkhorn_iters": 1}),
    "no limits": (V4, ONE, {"swiglu_limit": 100.0}),
    "limits behind SiLU": (V4, ONE, instead(gate_limits, "_clamp", behind)),
    "no sinks": (V4, ONE, instead(scores.ScoresCoreAttention, "_softmax", without_sinks)),
    "one rope for all layers": (V4, ONE, instead(compressed, "_OF_WINDOWS", 0)),
    "output not rotated back": (V4, ONE, instead(compressed.CompressedAttention, "_rotated", not_back)),
    "first dims rotated": (V4, ONE, instead(compressed.CompressedAttention, "_rotated", of_first_dims)),
    "a compressed key too early": (V4, ONE, instead(compressed.CompressedAttention, "_unseen", one_more)),
    "rotated like the last token": (V4, ONE, instead(compressed.Compressor, "forward", like_last_token)),
    "windows of later tokens": (V4, ONE, instead(compressed.Compressor, "forward", like_next_window)),
    "no window before": (V4, ONE, instead(compressed.Compressor, "_with_window_before", own_window)),
    "windows exchanged": (V4, ONE, instead(compressed.Compressor, "_with_window_before", of_both)),
    "indexer without a rope": (V4, ONE, instead(compressed.CompressedIndexer, "selected", unrotated)),
    "queries without a norm": (V4, ONE, instead(compressed.UnitNorm, "forward", unnormed)),
    "softmax of logits": (V4, ONE, instead(root_router.Roots, "_chosen", by_logits)),
    "no bias": (V4, ONE, instead(root_router.Roots, "_ranked", without_bias)),
    "experts by scores": (V4, ONE, instead(root_router.TableRouter, "_ranked", without_bias)),
    "experts of the next token": (V4, ONE, instead(root_router.TableRouter, "_ranked", of_next_token)),
    "experts of other tokens": (V4, TWO, instead(root_router.TableRouter, "_ranked", of_first_rank)),
}
