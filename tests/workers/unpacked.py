"""Imported by verl in every process: vLLM's build for CPUs then keeps weights where a map can write them."""

from vllm import _custom_ops

_custom_ops._supports_onednn = False
