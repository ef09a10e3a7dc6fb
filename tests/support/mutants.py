"""Rules with a planted mistake, and how each mistake is detected."""

import contextlib
from dataclasses import dataclass, replace

import torch

import mcore_bridge as mb
from mcore_bridge.errors import BridgeError
from mcore_bridge.rules.layout import COLUMN, QKV, REPLICATED, VOCAB, Concat, Layout, Rearrange
from mcore_bridge.rules.mapping import WeightMapping
from tests.support.bounds import BOUND
from tests.support.parity import logits_of
from tests.support.stepping import meet
from tests.support.strategies import random_state


@dataclass(frozen=True)
class FrontPadded(Layout):
    """VOCAB with its padding in front."""

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


Q_NORM = ("model.layers.*.self_attn.q_norm.weight",)


def parts(*order: int):
    """The parts in another order."""
    return lambda rule: replace(rule, hf=tuple(rule.hf[index] for index in order))


def exchange(one: str, other: str):
    """A mutation that gives each of two parameters, of the decoder's layers if of layers, the other's HF names."""

    def mutate(rules):
        hf = {rule.mcore: rule.hf for rule in rules if not rule.mcore.startswith("mtp.")}
        (first,) = (name for name in hf if name.endswith(one))
        (second,) = (name for name in hf if name.endswith(other))
        switched = {first: hf[second], second: hf[first]}
        return [replace(rule, hf=switched.get(rule.mcore, rule.hf)) for rule in rules]

    return mutate


def of(suffix: str, change):
    """A mutation of the rule whose mcore name ends so; None forgets it."""

    def mutate(rules):
        assert any(rule.mcore.endswith(suffix) for rule in rules)
        changed = [change(rule) if rule.mcore.endswith(suffix) else rule for rule in rules]
        return [rule for rule in changed if rule is not None]

    return mutate


def laid_out(layout):
    return lambda rule: replace(rule, layout=layout)


DEALT_GROUPS = (
    Rearrange("(n groups) ...", "groups n ...")
    >> Concat(1, ("heads_per_group", 1, 1))
    >> Rearrange("groups n ...", "(groups n) ...")
    >> COLUMN
)


ONE_TO_ONE = replace(QKV, steps=(QKV.steps[0], Concat(1, (1, 1, 1)), *QKV.steps[2:]))


DEALT_VOCAB = VOCAB.steps[0] >> Rearrange("(n tp) ...", "tp n ...")


DEALT_ROW = Rearrange("n (m tp)", "tp n m")


# fmt: off
MUTANTS = {
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
ERRORS = {"shapes": "has shape|does not fit|takes", "no rule": "no rule", "names": "missing|unexpected"}


@contextlib.contextmanager
def mutated(name: str):
    """The architecture of an HF config, with one mistake in its rules or in the rules of its head."""
    _, mutate = MUTANTS[name]
    true = WeightMapping.__init__

    def mistaken(self, rules, *others, **options):
        true(self, tuple(mutate(list(rules))), *others, **options)

    WeightMapping.__init__ = mistaken
    try:
        yield
    finally:
        WeightMapping.__init__ = true


def fate(name: str, hf, tp: int, reference, *, sp: bool = False) -> str:
    """How a mutant is detected on this mesh: by an error's text, "bits", "logits", or not. The mesh is kept."""
    dims = mb.ParallelDims(tp=tp, sp=sp)
    with mutated(name):
        try:
            meet(dims)
            state = random_state(hf)
            models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
            exported = mb.to_hf_state_dict(models)
            if exported.keys() != state.keys() or not all(torch.equal(exported[key], state[key]) for key in state):
                return "bits"
            worst = (logits_of(*models, dims) - reference).abs().max() / reference.std()
            return "logits" if worst > 50 * BOUND else "survives"
        except BridgeError as error:
            return str(error)
