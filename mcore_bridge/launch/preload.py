"""Imports for ranks on CPU. The server from which they are forked does them once: they take longer than most checks."""

import contextlib

with contextlib.suppress(ImportError):  # a rank that needs a missing module raises by itself
    import transformers.models.auto.modeling_auto  # noqa: F401

    import mcore_bridge.factory.build
    import mcore_bridge.weights.save  # noqa: F401
