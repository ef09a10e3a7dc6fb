"""What ranks on CPU need, imported once by the server that they are forked from: it costs more than most checks."""

import contextlib

with contextlib.suppress(ImportError):  # a rank that really needs what is missing will say so
    import transformers.models.auto.modeling_auto  # noqa: F401

    import mcore_bridge.factory.build
    import mcore_bridge.weights.save  # noqa: F401
