"""Planted mistakes in the rules and in the module of an activation with numbers of the checkpoint."""

import torch
from torch.nn.functional import softplus

from mcore_bridge import ParallelDims
from mcore_bridge.config.tables.derived import xielu
from mcore_bridge.factory.modules import learned_activation
from mcore_bridge.factory.modules.learned_activation import XIELU
from mcore_bridge.rules.layout import REPLICATED, Rearrange
from tests import zoo
from tests.support.bounds import ONE
from tests.support.mutants import DEALT_ROW, exchange, instead, itself, laid_out, of

HF = "apertus"
DEALT = Rearrange("(n tp) ...", "tp n ...")
NORMS = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
# fmt: off
RULES = {
    "alphas exchanged":         ("logits",         HF, exchange("activation_func.alpha_p", "activation_func.alpha_n")),
    "beta and eps exchanged":   ("logits",         HF, exchange("activation_func.beta", "activation_func.eps")),
    "norms exchanged":          ("logits",         HF, exchange(*NORMS)),
    "up dealt out":             ("logits at tp=2", HF, of("linear_fc1.weight", laid_out(DEALT))),
    "down dealt out":           ("logits at tp=2", HF, of("linear_fc2.weight", laid_out(DEALT_ROW))),
    "a number with a dim":      ("shapes",         HF, of("activation_func.beta", laid_out(REPLICATED))),
    "no rule of alphas":        ("no rule",        HF, of("activation_func.alpha_n", lambda rule: None)),
    "no rule of eps":           ("no rule",        HF, of("activation_func.eps", lambda rule: None)),
}
# fmt: on


def computed(wrong):
    """``wrong`` in the place of the activation, from the features and the four numbers."""
    return instead(
        XIELU, "forward", lambda self, hidden: wrong(hidden, self.alpha_p, self.alpha_n, self.beta, self.eps)
    )


def one_alpha(hidden, alpha_p, alpha_n, beta, eps):
    return xielu(hidden, alpha_p, alpha_p, beta, eps)


def raw_alphas(hidden, alpha_p, alpha_n, beta, eps):
    below = (torch.expm1(torch.min(hidden, eps)) - hidden) * (beta + alpha_n) + beta * hidden
    return torch.where(hidden > 0, alpha_p * hidden * hidden + beta * hidden, below)


def without_beta_below(hidden, alpha_p, alpha_n, beta, eps):
    above = xielu(hidden, alpha_p, alpha_n, beta, eps)
    below = (torch.expm1(torch.min(hidden, eps)) - hidden) * softplus(alpha_n) + beta * hidden
    return torch.where(hidden > 0, above, below)


def eps_of_zero(hidden, alpha_p, alpha_n, beta, eps):
    return xielu(hidden, alpha_p, alpha_n, beta, torch.zeros_like(eps))


def fixed_numbers(hidden, alpha_p, alpha_n, beta, eps):
    """Initial values in the place of the checkpoint's."""
    alphas = (torch.tensor([value]).expm1().log() for value in (0.8, 0.3))
    return xielu(hidden, *alphas, torch.tensor(0.5), torch.tensor(-1e-6))


MODULES = {
    "one alpha for both sides": (HF, ONE, computed(one_alpha)),
    "alphas as they are": (HF, ONE, computed(raw_alphas)),
    "no beta in the lower factor": (HF, ONE, computed(without_beta_below)),
    "no eps": (HF, ONE, computed(eps_of_zero)),
    "initial numbers": (HF, ONE, computed(fixed_numbers)),
}
TRUE_INIT = XIELU.__init__


def summed_again(self, *arguments):
    """finalize_model_grads sums what the backward pass has summed."""
    TRUE_INIT(self, *arguments)
    self.alpha_p.sequence_parallel = self.alpha_n.sequence_parallel = True


TRAINED = zoo.case("apertus", intermediate_size=128, attention_bias=True, pad_token_id=95, **zoo.rope("default")).hf
WHOLE = instead(learned_activation, "copy_to_tensor_model_parallel_region", itself)
GRADIENTS = {
    "not summed over ranks": (TRAINED, ParallelDims(tp=2), WHOLE),
    "not summed over ranks with sp": (TRAINED, ParallelDims(tp=2, sp=True), WHOLE),
    "summed twice with sp": (TRAINED, ParallelDims(tp=2, sp=True), instead(XIELU, "__init__", summed_again)),
}
