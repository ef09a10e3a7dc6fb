"""The layouts of mixers in the place of attention, of attention with an output gate, and of rotated halves."""

from mcore_bridge.rules.layout import COLUMN, GROUPS, REPLICATED, Concat, Leading, Rearrange, Split, Within

# The layouts of linear attention by the gated delta rule, and of full attention with an output gate.
#
# The rows of linear attention are dealt out equally to its key heads. An axis says how many rows belong to one key
# head:
#
# * ``key``: of queries, or of keys;
# * ``value``: of values, or of gates;
# * ``value_heads``: of beta or alpha, which have one number per value head;
# * ``qkv``, ``qkvz``, ``ba``: of what a checkpoint joins in one tensor.
#
# megatron-core joins queries, keys, values, gates, beta and alpha, after each of them is cut.
_SECTIONS = ("key", "key", "value", "value", "value_heads", "value_heads")
_CUT = COLUMN >> Concat(1, ratio=_SECTIONS)
_CONV = ("key", "key", "value")

# fmt: off
HEADS      = Rearrange("(groups heads_per_group n) ...", "groups heads_per_group n ...")
KEY_HEADS  = Rearrange("(key_heads n) ...", "key_heads n ...")
Q_AND_GATE = Leading(1, 2, HEADS >> Split(2, ratio=(1, 1)) >> ~HEADS)  # q_proj holds both, head by head
GATED_QKV  = Q_AND_GATE >> GROUPS >> Concat(1, ratio=("heads_per_group", "heads_per_group", 1, 1)) >> ~GROUPS >> COLUMN
DELTA      = Concat(0, ratio=("qkv", "value", "value_heads", "value_heads")) >> Split(0, ratio=_SECTIONS) >> _CUT
DELTA_HEAD = KEY_HEADS >> Concat(1, ratio=("qkvz", "ba")) >> Split(1, ratio=_SECTIONS) >> ~KEY_HEADS >> _CUT
IN_APART = _CUT  # a checkpoint has one tensor for each section
DELTA_CONV = Split(0, ratio=_CONV) >> COLUMN >> Concat(1, ratio=_CONV)
CONV_APART = COLUMN >> Concat(1, ratio=_CONV)
# fmt: on

# The layouts of a Mamba-2 mixer, whose heads share B and C in groups.
#
# The rows of its projections are dealt out equally to its groups, and with more ranks than groups to the ranks of each.
# An axis says how many rows belong to an equal part of a group:
#
# * ``mamba_inner``: of the gate z, or of the input x;
# * ``mamba_state``: of B, or of C;
# * ``mamba_heads``: of the time steps, which have one number per head.
#
# A checkpoint joins z, x, B, C and the time steps in this order; the convolution has x, B and C. So has megatron-core,
# after each of them is cut.
_MAMBA_IN = ("mamba_inner", "mamba_inner", "mamba_state", "mamba_state", "mamba_heads")
_MAMBA_CONV = ("mamba_inner", "mamba_state", "mamba_state")

MAMBA_IN = Split(0, ratio=_MAMBA_IN) >> COLUMN >> Concat(1, ratio=_MAMBA_IN)
MAMBA_CONV = Split(0, ratio=_MAMBA_CONV) >> COLUMN >> Concat(1, ratio=_MAMBA_CONV)

# A checkpoint joins B, C and x of a short convolution, which have a row for each channel. So does megatron-core, after
# each of them is cut.
SHORT_CONV_IN = Split(0, ratio=(1, 1, 1)) >> COLUMN >> Concat(1, ratio=(1, 1, 1))

# Kimi delta attention. A checkpoint has one tensor for each of queries, keys, values, beta, and decay and gate or the
# narrow inputs of these. megatron-core joins them, after each of them is cut. An axis says how many rows each has:
#
# * ``kda_inner``: of queries, keys or values, also of decay or gate;
# * ``kda_heads``: of beta, which has one number per head;
# * ``kda_dim``: of the narrow input of decay, or of the gate.
_KDA_QKV = ("kda_inner", "kda_inner", "kda_inner", "kda_heads")
KDA_IN = COLUMN >> Concat(1, ratio=(*_KDA_QKV, "kda_dim", "kda_dim"))
KDA_FULL_IN = COLUMN >> Concat(1, ratio=(*_KDA_QKV, "kda_inner", "kda_inner"))
KDA_CONV = COLUMN >> Concat(1, ratio=(1, 1, 1))
KDA_DECAY = Rearrange("one two (tp n) three", "tp one two n three")

# Latent attention of megatron-core rotates pairs of neighbours. A checkpoint may have the first dims of all pairs, then
# the second ones. An axis says how many rows of a part have which purpose:
#
# * ``plain``, ``rotated``: of the query of a head;
# * ``latent``, ``rotated``: of keys and values of all heads together.
HALVES_OF_QUERIES = (
    GROUPS
    >> Within(1, ("plain", "rotated"), 1, Rearrange("groups (halves n) ...", "groups (n halves) ..."))
    >> ~GROUPS
    >> COLUMN
)
HALVES_OF_KEYS = Within(0, ("latent", "rotated"), 1, Rearrange("(halves n) ...", "(n halves) ...")) >> REPLICATED
