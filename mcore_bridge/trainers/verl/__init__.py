"""Import this to make verl build, load, export and save with mcore_bridge in this process, with either of its bridges.

Weights then go into vLLM by a ``WeightSync``: into rollouts on the same GPUs by itself, and into rollouts on other GPUs
with ``checkpoint_engine.backend=mcore_bridge``.

verl imports this module in every process before it imports a bridge, if the environment variable
``VERL_USE_EXTERNAL_MODULES`` names it. Installing both packages has no effect. There is no entry point on purpose: verl
would always load it, and hide its failure.
"""

from mcore_bridge.trainers.module_patch import replace_modules

_ADAPTERS = "mcore_bridge.trainers.peft_functions"
_BRIDGE = "mcore_bridge.trainers.megatron_bridge"
_PROVIDER = "mcore_bridge.trainers.provider"
_OURS = "mcore_bridge.trainers.verl.replacements"
_CHECKPOINT_ENGINE = "mcore_bridge.trainers.verl.checkpoint_engine"
_ADAPTER_OF_VLLM = "mcore_bridge.trainers.verl.server_adapter"
_DELTA_EXPORT = "mcore_bridge.trainers.verl.delta_export"
_EXTENSION = "mcore_bridge.trainers.verl.worker_extension"

replace_modules(
    {
        "verl.models.mcore.mbridge": "mcore_bridge.trainers.mbridge",
        "verl.models.mcore.bridge": _BRIDGE,
        "verl.models.mcore.registry": dict.fromkeys(
            ("hf_to_mcore_config", "init_mcore_model", "get_mcore_weight_converter"), _OURS
        ),
        "verl.workers.config.megatron_peft": {"get_peft_cls": _OURS},
        "verl.checkpoint_engine.base": {"CheckpointEngineRegistry": _CHECKPOINT_ENGINE},
        "verl.workers.rollout.vllm_rollout.vllm_rollout": {"ServerAdapter": _ADAPTER_OF_VLLM},
        "verl.workers.rollout.vllm_rollout.utils": {"vLLMColocateWorkerExtension": _EXTENSION},
        "verl.workers.engine.megatron.delta_export": dict.fromkeys(
            ("build_export_index", "mcore_hf_delta_entry"), _DELTA_EXPORT
        ),
        "verl.utils.kernel.linear_cross_entropy": {"linear_cross_entropy": _OURS},
        "verl.utils.modelopt.qat_utils": {"export_qat_weights": _OURS},
        "megatron.bridge.models.gpt_provider": {"modelopt_transformer_layer_spec": _PROVIDER},
        "megatron.bridge.training.utils.config_utils": {"create_ddp_config": _BRIDGE},
        "megatron.bridge.training.checkpointing": {"apply_peft_adapter_filter_to_state_dict": _ADAPTERS},
        "megatron.bridge.peft.utils": dict.fromkeys(
            ("create_peft", "create_peft_hook", "load_peft_adapter_checkpoint"), _ADAPTERS
        ),
    }
)
