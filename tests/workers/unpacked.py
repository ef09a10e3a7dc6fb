"""Imported in every process of vLLM: its build for CPUs then keeps weights where a map can write them."""

from vllm import _custom_ops

_custom_ops._supports_onednn = False


class Unpacked:
    """A ``worker_extension_cls`` without anything: workers of vLLM import this module for it."""
