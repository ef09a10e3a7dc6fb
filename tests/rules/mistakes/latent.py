"""Planted mistakes in latent attention: in rules, norms, the scale, and code that affects only gradients."""

from mcore_bridge import ParallelDims
from mcore_bridge.config.rope import Rope
from mcore_bridge.factory.modules.latent import LatentAttention, LatentNorm
from mcore_bridge.factory.modules.rotary import LatentRotaryEmbedding
from mcore_bridge.rules.layout import COLUMN, REPLICATED, Rearrange
from tests.support.bounds import ONE
from tests.support.mutants import DEALT_ROW, exchange, instead, laid_out, of, with_epsilon_of_mcore
from tests.zoo.latent import DENSE, latent

HF = latent("deepseek_v3", **DENSE, num_hidden_layers=2, q_lora_rank=20).hf
YARN = "deepseek_v3-yarn"

DEALT = Rearrange("(n tp) ...", "tp n ...")
# fmt: off
RULES = {
    "q norm for kv norm":       ("logits",         HF, exchange("q_layernorm.weight", "kv_layernorm.weight")),
    "k and v up dealt out":     ("logits at tp=2", HF, of("kv_up_proj.weight", laid_out(DEALT))),
    "o_proj dealt out":         ("logits at tp=2", HF, of("linear_proj.weight", laid_out(DEALT_ROW))),
    "down projection cut":      ("shapes at tp=2", HF, of("kv_down_proj.weight", laid_out(COLUMN))),
    "up projection replicated": ("shapes at tp=2", HF, of("q_up_proj.weight", laid_out(REPLICATED))),
}
# fmt: on


def without_attention_factor(self, *arguments, **keywords):
    return super(LatentRotaryEmbedding, self).forward(*arguments, **keywords), 1.0


def plain_scale(self):
    return {**TO_LATENT(self), "mscale_all_dim": 0.0}


def unsummed(self, linear, inputs, outputs):
    return outputs


TO_LATENT = Rope.to_latent
MODULES = {
    "epsilon": (YARN, ONE, instead(LatentNorm, "__init__", with_epsilon_of_mcore)),
    "attention factor": (YARN, ONE, instead(LatentRotaryEmbedding, "forward", without_attention_factor)),
    "softmax scale": (YARN, ONE, instead(Rope, "to_latent", plain_scale)),
}
GRADIENTS = {
    "rotated keys not summed": (
        *(HF, ParallelDims(tp=2)),
        instead(LatentAttention, "_sum_gradient_of_rotated", unsummed),
    )
}
