"""The layouts of a Mamba-2 mixer, whose heads share B and C in groups.

The rows of its projections are divided equally among its groups; with more ranks than groups, among the ranks of a
group. An axis has the number of rows of such a part:

* ``mamba_inner``: of the gate z, or of the input x;
* ``mamba_state``: of B, or of C;
* ``mamba_heads``: of the time steps, which have one number per head.

A checkpoint joins z, x, B, C and the time steps in this order; the convolution has x, B and C. megatron-core uses this
order, too, after each of them is cut.
"""

from mcore_bridge.rules.layout import COLUMN, Concat, Split

_IN = ("mamba_inner", "mamba_inner", "mamba_state", "mamba_state", "mamba_heads")
_CONV = ("mamba_inner", "mamba_state", "mamba_state")

MAMBA_IN = Split(0, ratio=_IN) >> COLUMN >> Concat(1, ratio=_IN)
MAMBA_CONV = Split(0, ratio=_CONV) >> COLUMN >> Concat(1, ratio=_CONV)
