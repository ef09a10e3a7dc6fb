"""The imports of ranks on CPU. A server process imports them once, and ranks are forked from it, since imports take
long.
"""

import contextlib

with contextlib.suppress(ImportError):  # if a module is missing, the rank that needs it raises
    import transformers.models.auto.modeling_auto  # noqa: F401

    import mcore_bridge.factory.build
    import mcore_bridge.weights.save  # noqa: F401
