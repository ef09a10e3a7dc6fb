"""Planted mistakes in residual streams, and in latent attention to selected keys: with sinks and gates, or in pools."""

import torch

from mcore_bridge.factory.modules import attention_gate, gate_limits, latent, scores, selection, streams
from mcore_bridge.rules.layout import COLUMN, REPLICATED, Rearrange
from tests.support.bounds import ONE
from tests.support.mutants import exchange, instead, laid_out, of

HY, OWN, GLM, QWEN = "hy_v4", "hy_v4-indexers", "glm5_next_text", "qwen4_exp_text-no-ngrams"
DEALT = Rearrange("(n tp) ...", "tp n ...")
READ, OF_MLP, MERGED = "input_layernorm.connection", "pre_mlp_layernorm.connection", "final_layernorm.merge"
UP = "linear_up.weight"
# fmt: off
RULES = {
    "attention and MLP exchanged": ("logits",         HY, exchange(f"{READ}.fn", f"{OF_MLP}.fn")),
    "other bases":                 ("logits",         HY, exchange(f"{READ}.base", f"{OF_MLP}.base")),
    "other scales":                ("logits",         HY, exchange(f"{READ}.scale", f"{OF_MLP}.scale")),
    "gates of streams cut":        ("shapes at tp=2", HY, of(f"{READ}.fn", laid_out(COLUMN))),
    "merge forgotten":             ("no rule",        HY, of(f"{MERGED}.fn", lambda rule: None)),
    "neighbours in queries":       ("logits",         HY, of("linear_q_up_proj.weight", laid_out(COLUMN))),
    "neighbours in keys":          ("logits",         HY, of("linear_kv_down_proj.weight", laid_out(REPLICATED))),
    "gates dealt out":             ("logits at tp=2", HY, of("linear_gate.weight", laid_out(DEALT))),
    "sinks dealt out":             ("logits at tp=2", HY, of("softmax_offset", laid_out(DEALT))),
    "weight for bias":             ("logits",         HY, exchange("k_norm.weight", "k_norm.bias")),
    "queries of indexers cut":     ("shapes at tp=2", HY, of("linear_wq_b.weight", laid_out(COLUMN))),
    "mixes exchanged":             ("logits",         GLM, exchange(f"{READ}.base", f"{OF_MLP}.base")),
    "gates of pools cut":          ("shapes at tp=2", GLM, of("linear_pool_gate.weight", laid_out(COLUMN))),
    "gates for keys":              ("logits",         GLM, exchange("linear_pool_gate.weight", "linear_wk.weight")),
    "places in pools forgotten":   ("no rule",        GLM, of("pool_places", lambda rule: None)),
    "decay rates dealt out":       ("logits at tp=2", GLM, of("A_log", laid_out(DEALT))),
    "gates of low rank exchanged": ("logits",         QWEN, exchange(f"{READ}.{UP}", f"{OF_MLP}.{UP}")),
    "norms of streams exchanged":  ("logits",         QWEN, exchange(f"{READ}.norm.weight", f"{OF_MLP}.norm.weight")),
    "gates of low rank cut":       ("shapes at tp=2", QWEN, of(f"{MERGED}.linear_down.weight", laid_out(COLUMN))),
    "keys for queries":            ("logits",         QWEN, exchange("indexer.q_norm.weight", "indexer.k_norm.weight")),
}
# fmt: on
_balanced, _weights = streams.Connection._balanced, streams.Connection.forward
_selected, _complete = selection.PooledIndexer.selected, selection.PooledIndexer._complete
_pooled = selection.PooledIndexer._pooled
_rotation, _write, _logits = selection.SelectingAttention._rotation, streams.Weights._write, streams._Gates.logits


def of_first_dims(self, hidden, packed):
    """Rotates the first dims of each head, as in deepseek_v32."""
    rotate = _rotation(self, hidden, packed)
    return lambda heads: rotate(heads.flip(-1)).flip(-1)


def signed(query, key, weights):
    """Scores in which negative parts count."""
    return torch.einsum("sbnd,tbd,sbn->bst", query.float(), key.float(), weights)


def of_one_head(query, key, weights):
    return torch.relu(torch.einsum("sbd,tbd->bst", query[:, :, 0].float(), key.float()))


def without_sinks(self, values):
    return values.softmax(-1)


def opened(self, proj, inputs):
    return inputs


def to_one_stream(self, output, residual):
    written = _write(self, output, residual)
    return torch.cat((written[..., : output.size(-1)], residual[..., output.size(-1) :]), -1)


def mean(self, residual, *weights):
    return streams.apart(residual, self.count).mean(-2)


def apart_normed(self, residual):
    """Each stream has a norm of its own."""
    split = streams.apart(residual, self.count)
    own = split.square().mean(-1, keepdim=True).sqrt()
    return _logits(self, (split / own).flatten(-2))


def unmixed(self, logits):
    return torch.eye(self.count).expand(*logits.shape)


def transposed(self, logits):
    return _balanced(self, logits).mT


def rows_first(self, logits):
    return _balanced(self, logits.mT).mT


def added_to(self, residual):
    read, weights, mixes = _weights(self, residual)
    return read, weights + self.added, mixes


def only_first(self, residual):
    return streams.apart(residual, self.count)[..., 0, :]


def without_tail(self, *tensors):
    *_, hidden, places = tensors
    complete = _complete(self, places.queries[:, None])
    return _selected(self, *tensors) & (torch.arange(hidden.size(-1)) // self.pool < complete)


def one_more(self, places):
    """A query sees a pool whole from its first token on."""
    return _complete(self, places + self.pool - 1)


def of_equal_parts(self, key, first, count):
    keys, gates = key.split(self.dim, -1)
    return _pooled(self, torch.cat((keys, torch.zeros_like(gates)), -1), first, count)


def from_next(self, key, first, count):
    return _pooled(self, key, first + 1, count)


def of_latents(self, config, hidden_size, eps=1e-5):
    """The epsilon of the latents of other families."""
    latent.Norm.__init__(self, config, hidden_size, 1e-6)


def behind(module, inputs, outputs):
    """Gates are limited behind their activation."""
    gates, values = outputs[0].chunk(2, -1)
    limit = gate_limits.silu_inverse(module.limit)
    return torch.cat((gates.clamp(max=limit), values.clamp(-module.limit, module.limit)), -1), outputs[1]


def normed_together(self, hidden):
    exact = hidden.float()
    return self.scaled(hidden, exact.square().mean(-1, keepdim=True), self.weight)


def summed(self, residual):
    return self.count * _merged(self, residual)


def undivided(self, residual):
    """The logits of additions are a sum over streams, not a mean."""
    read, weights, mixes = _low_rank(self, residual)
    return read, self.magnitude * (self.count * (weights / self.magnitude).logit()).sigmoid(), mixes


def turned_like_last(self, keys):
    """The key of a pool has the rope of its last token."""
    keys = torch.cat((keys[..., : self.dim], keys[:, -1:, :, self.dim :].expand(-1, keys.size(1), -1, -1)), -1)
    return _joined(self, keys)


def unturned(self, keys):
    return self.k_norm(keys[..., : self.dim].mean(1))


def normed_first(self, hidden, latent):
    """Keys have their norm before their mean."""
    query, key, weights = _parts(self, hidden, latent)
    return query, self.k_norm(key), weights


_merged, _low_rank = streams.LowRankMerge.read, streams.LowRankConnection.forward
_joined, _parts = selection.MeanPoolIndexer._joined, selection.MeanPoolIndexer._parts
MODULES = {
    "streams normed together": (QWEN, ONE, instead(streams.StreamNorm, "forward", normed_together)),
    "streams summed": (QWEN, ONE, instead(streams.LowRankMerge, "read", summed)),
    "logits of additions summed": (QWEN, ONE, instead(streams.LowRankConnection, "forward", undivided)),
    "pools turned like their last token": (QWEN, ONE, instead(selection.MeanPoolIndexer, "_joined", turned_like_last)),
    "pools without a rope": (QWEN, ONE, instead(selection.MeanPoolIndexer, "_joined", unturned)),
    "keys normed before their mean": (QWEN, ONE, instead(selection.MeanPoolIndexer, "_parts", normed_first)),
    "a pool less selected": (QWEN, ONE, {"indexer_budget": 3}),
    "another gate of linear attention": (QWEN, ONE, {"output_gate_type": "silu"}),
    "all keys": (OWN, ONE, {"index_topk": 100}),
    "one key less": (HY, ONE, {"index_topk": 6}),
    "negative scores count": (HY, ONE, instead(selection, "scores_of", signed)),
    "one head of the indexer": (HY, ONE, instead(selection, "scores_of", of_one_head)),
    "indexer not rotated": (
        *(HY, ONE),
        instead(selection.SelectingAttention, "_rotation", lambda self, *tokens: lambda heads: heads),
    ),
    "first dims rotated": (HY, ONE, instead(selection.SelectingAttention, "_rotation", of_first_dims)),
    "no sinks": (HY, ONE, instead(scores.ScoresCoreAttention, "_softmax", without_sinks)),
    "no gates": (HY, ONE, instead(attention_gate.GatedOutput, "_multiply", opened)),
    "written to one stream": (HY, ONE, instead(streams.Weights, "_write", to_one_stream)),
    "streams read alike": (HY, ONE, instead(streams.Connection, "read", mean)),
    "streams merged alike": (HY, ONE, instead(streams.Merge, "forward", mean)),
    "streams normed apart": (HY, ONE, instead(streams._Gates, "logits", apart_normed)),
    "another magnitude": (HY, ONE, {"hc_magnitude": 2.0}),
    "nothing added to weights": (HY, ONE, {"hc_eps": 0.0}),
    "limits behind SiLU": (HY, ONE, instead(gate_limits, "_clamp", behind)),
    "no limits": (HY, ONE, {"swiglu_limit": 100.0}),
    "streams not mixed": (GLM, ONE, instead(streams.Connection, "_balanced", unmixed)),
    "streams mixed the other way": (GLM, ONE, instead(streams.Connection, "_balanced", transposed)),
    "rows balanced first": (GLM, ONE, instead(streams.Connection, "_balanced", rows_first)),
    "an iteration less": (GLM, ONE, {"hc_sinkhorn_iters": 1}),
    "added to weights of additions": (GLM, ONE, instead(streams.Connection, "forward", added_to)),
    "one stream at the end": (GLM, ONE, instead(streams.Mean, "forward", only_first)),
    "all pools": (GLM, ONE, {"index_topk": 99}),
    "a pool less": (GLM, ONE, {"index_topk": 6}),
    "no tail": (GLM, ONE, instead(selection.PooledIndexer, "selected", without_tail)),
    "a pool too early": (GLM, ONE, instead(selection.PooledIndexer, "_complete", one_more)),
    "keys of a pool count alike": (GLM, ONE, instead(selection.PooledIndexer, "_pooled", of_equal_parts)),
    "pools of later keys": (GLM, ONE, instead(selection.PooledIndexer, "_pooled", from_next)),
    "epsilon of other latents": (GLM, ONE, instead(latent.LatentNorm, "__init__", of_latents)),
    "no bound of decays": (GLM, ONE, {"linear_lower_bound": None}),
    "no limits of MLPs": (GLM, ONE, {"swiglu_limit": 100.0}),
}
