"""Planted mistakes in the rules of a dense model, with sizes that differ and with sizes that are equal."""

from dataclasses import dataclass, replace

from mcore_bridge.rules.layout import COLUMN, QKV, REPLICATED, VOCAB, Concat, Layout, Rearrange
from tests.support.mutants import DEALT_ROW, exchange, laid_out, of, parts
from tests.support.strategies import tiny

HF = tiny("qwen3", vocab_size=97, num_hidden_layers=2, attention_bias=True)
SQUARE = tiny("qwen3", vocab_size=97, num_hidden_layers=2, hidden_size=64, head_dim=8, attention_bias=True)
Q_NORM = ("model.layers.*.self_attn.q_norm.weight",)


@dataclass(frozen=True)
class FrontPadded(Layout):
    """VOCAB with its padding before the rows."""

    def __call__(self, parts, axes):
        (whole,) = VOCAB(tuple(part.flip(0) for part in parts), axes)
        return (whole.flatten(0, 1).flip(0).unflatten(0, (axes["tp"], -1)),)

    def __invert__(self):
        return FrontPaddedInverse()


class FrontPaddedInverse(Layout):
    def __call__(self, parts, axes):
        (whole,) = parts
        flipped = whole.flatten(0, 1).flip(0).unflatten(0, (axes["tp"], -1))
        return tuple(part.flip(0) for part in (~VOCAB)((flipped,), axes))

    def __invert__(self):
        return FrontPadded()


DEALT_GROUPS = (
    Rearrange("(n groups) ...", "groups n ...")
    >> Concat(1, ("heads_per_group", 1, 1))
    >> Rearrange("groups n ...", "(groups n) ...")
    >> COLUMN
)


ONE_TO_ONE = replace(QKV, steps=(QKV.steps[0], Concat(1, (1, 1, 1)), *QKV.steps[2:]))


DEALT_VOCAB = VOCAB.steps[0] >> Rearrange("(n tp) ...", "tp n ...")


# fmt: off
OF_EACH = {
    # name                               killed by           mutation of the rules
    "gate_up fused then cut":            ("logits at tp=2", of("fc1.weight", laid_out(Concat(0, (1, 1)) >> COLUMN))),
    "up before gate":                    ("logits",         of("fc1.weight", parts(1, 0))),
    "v before k":                        ("logits",         of("qkv.weight", parts(0, 2, 1))),
    "v before k in the bias":            ("logits",         of("qkv.bias", parts(0, 2, 1))),
    "qkv not interleaved by group":      ("logits",         of("qkv.weight", laid_out(Concat(0, (8, 4, 4)) >> COLUMN))),
    "qkv cut before it is fused":        ("logits",         of("qkv.weight", laid_out(COLUMN >> Concat(1, (2, 1, 1))))),
    "q heads dealt out over the groups": ("logits",         of("qkv.weight", laid_out(DEALT_GROUPS))),
    "q_norm for k_norm":                 ("logits",         exchange("q_layernorm.weight", "k_layernorm.weight")),
    "input norm for post-attention":     ("logits",         exchange("input_layernorm.weight", "mlp_layernorm.weight")),
    "embedding for head":                ("logits",         exchange("embeddings.weight", "output_layer.weight")),
    "o_proj dealt out by columns":       ("logits at tp=2", of("proj.weight", laid_out(DEALT_ROW))),
    "down_proj dealt out by columns":    ("logits at tp=2", of("fc2.weight", laid_out(DEALT_ROW))),
    "vocabulary dealt out":              ("logits at tp=2", of("embeddings.weight", laid_out(DEALT_VOCAB))),
    "vocabulary padded in front":        ("logits at tp=2", of("embeddings.weight", laid_out(FrontPadded()))),
    "k before q":                        ("shapes",         of("qkv.weight", parts(1, 0, 2))),
    "o_proj cut by rows":                ("shapes at tp=2", of("proj.weight", laid_out(COLUMN))),
    "o_proj replicated":                 ("shapes at tp=2", of("proj.weight", laid_out(REPLICATED))),
    "o_proj bias cut":                   ("shapes at tp=2", of("proj.bias", laid_out(COLUMN))),
    "norm cut":                          ("shapes at tp=2", of("q_layernorm.weight", laid_out(COLUMN))),
    "qkv in the wrong ratio":            ("shapes",         of("qkv.weight", laid_out(ONE_TO_ONE))),
    "norm rule forgotten":               ("no rule",        of("mlp_layernorm.weight", lambda rule: None)),
    "bias rule forgotten":               ("no rule",        of("qkv.bias", lambda rule: None)),
    "norm of the layer after":           ("names",          of("mlp_layernorm.weight", lambda r: replace(r, offset=1))),
    "one HF tensor for two parameters":  ("names",          of("k_layernorm.weight", lambda r: replace(r, hf=Q_NORM))),
}
# fmt: on
RULES = {
    f"{name}{ending}": (tier, hf, mutation)
    for name, (tier, mutation) in OF_EACH.items()
    for hf, ending in ((HF, ""), (SQUARE, ", square"))
}
