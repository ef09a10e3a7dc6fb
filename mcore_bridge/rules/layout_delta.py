"""The layouts of linear attention by the gated delta rule, and of full attention with an output gate.

The rows of linear attention are divided equally among its key heads. An axis has the number of rows of one key head:

* ``key``: of queries, or of keys;
* ``value``: of values, or of gates;
* ``value_heads``: of beta or alpha, which have one number per value head;
* ``qkv``, ``qkvz``, ``ba``: of tensors that a checkpoint joins.

megatron-core joins queries, keys, values, gates, beta and alpha, after each of them is cut.
"""

from mcore_bridge.rules.layout import COLUMN, GROUPS, Concat, Leading, Rearrange, Split

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
DELTA_CONV = Split(0, ratio=_CONV) >> COLUMN >> Concat(1, ratio=_CONV)
# fmt: on
