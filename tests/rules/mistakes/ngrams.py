"""Planted mistakes in embeddings of n-grams."""

from dataclasses import replace

from mcore_bridge.factory.modules import convolved
from mcore_bridge.factory.modules.ngram_inputs import NGramConv, NGramInput
from mcore_bridge.rules.layout import REPLICATED, Rearrange
from tests import zoo
from tests.support.bounds import ONE, TWO
from tests.support.mutants import exchange, instead, of, parts

QWEN = "qwen4_exp_text"
OWN = "input_layernorm.ngrams"
TABLE = "layers.1.input_layernorm.ngrams.word_embeddings.weight"
DEALT = Rearrange("(n tp) ...", "tp n ...")


def dealt(rule):
    """Rows are dealt to ranks one by one, behind the shards of files."""
    return replace(rule, layout=rule.layout.steps[0] >> DEALT)


def whole(rule):
    return replace(rule, layout=rule.layout.steps[0] >> REPLICATED)


# fmt: off
RULES = {
    "shards exchanged":       ("logits",         QWEN, of("layers.0.input_layernorm.ngrams.word_embeddings.weight",
                                                          parts(1, 0, 2))),
    "rows dealt out":         ("logits at tp=2", QWEN, of(TABLE, dealt)),
    "a table on each rank":   ("shapes at tp=2", QWEN, of(TABLE, whole)),
    "norms exchanged":        ("logits",         QWEN, exchange(f"{OWN}.key_norm.weight", f"{OWN}.conv_norm.weight")),
    "factors forgotten":      ("no rule",        QWEN, of(f"{OWN}.multipliers", lambda rule: None)),
}
# fmt: on
_rows, _made = NGramInput._rows, NGramConv.__init__


def across_texts(self, tokens):
    """N-grams go on behind the end of a text."""
    ended, self.ngrams = self.ngrams, self.ngrams._replace(end=self.ngrams.end - 100)
    rows = _rows(self, tokens)
    self.ngrams = ended
    return rows


def of_later_tokens(self, tokens):
    return _rows(self, tokens.roll(-1, 0))


def turned_around(self, tokens):
    """The heads of the longest n-grams come first."""
    return _rows(self, tokens).unflatten(-1, (-1, self.ngrams.heads)).flip(-2).flatten(-2)


def next_to_each_other(self, config, channels, kernel, distance):
    _made(self, config, channels, kernel, 1)


def unmarked(self, config, channels, kernel, distance):
    _made(self, config, channels, kernel, distance)
    self.weight.sequence_parallel = False


def of_first_channels(self, tokens, first, text, *, copied):
    return _convolved(self, tokens, 0, text, copied=copied)


_convolved = convolved.CausalConv.convolved
HF = zoo.cases()[QWEN].hf if zoo.here([QWEN]) else None
GRADIENTS = {} if HF is None else {"convolution not summed": (HF, TWO, instead(NGramConv, "__init__", unmarked))}
MODULES = {
    "n-grams of several texts": (QWEN, ONE, instead(NGramInput, "_rows", across_texts)),
    "n-grams of later tokens": (QWEN, ONE, instead(NGramInput, "_rows", of_later_tokens)),
    "longest n-grams first": (QWEN, ONE, instead(NGramInput, "_rows", turned_around)),
    "neighbours convolved": (QWEN, ONE, instead(NGramConv, "__init__", next_to_each_other)),
    "channels of the first rank": (QWEN, TWO, instead(convolved.CausalConv, "convolved", of_first_channels)),
}
