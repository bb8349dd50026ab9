"""What we use of dependencies that they do not document, or promise nothing of: which of our files, and for what.

`test_private_apis` holds each entry against the installed dependency, so that an upgrade fails there first, and walks
our sources for uses that have no entry (`private_uses`).
"""

from __future__ import annotations

from dataclasses import dataclass

VLLM = "functions/generation/vllm"
CORE, READ_BACK, WEIGHT_ENGINE = f"{VLLM}/core.py", f"{VLLM}/read_back.py", f"{VLLM}/weight_engine.py"
KV_FILES, ARGUMENTS = (f"{VLLM}/{name}.py" for name in ("kv_files", "arguments"))
VERIFICATION, DRAFTING = (f"{VLLM}/{name}.py" for name in ("verification", "drafting"))
QUANTISED, SCHEDULER = f"{VLLM}/fp8.py", f"{VLLM}/scheduler.py"
ADAPTER, STARTS = f"{VLLM}/adapter.py", f"{VLLM}/start_times.py"
LOADING, REHEARSAL, LOOPBACK = "functions/loading.py", "functions/memory_dry_run.py", "functions/loopback.py"
ATTENTION, CHECK = "functions/prefix_attention.py", "functions/attention_check.py"
PUBLISHING, KERNELS = "functions/training/publishing.py", "functions/attention_kernels.py"
CLUSTER, SESSION, LEAVING = (
    "rlhfless/fleet/cluster.py",
    "rlhfless/fleet/ray_session.py",
    "rlhfless/fleet/leaving_watch.py",
)
TENSORBOARD, PODS = "rlhfless/telemetry/tensorboard.py", "rlhfless/control/pods.py"
RAY_FOLDER = "rlhfless/fleet/private_ray.py"
LEAVE_NODE, RAY_JOBS = "rlhfless/fleet/leave_node.py", "rlhfless/control/drivers.py"


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A class, function, module or attribute."""

    name: str
    """Dotted, as it can be imported."""
    users: tuple[str, ...]
    why: str
    takes: tuple[str, ...] = ()
    """Parameters by which it is called, or called by its dependency, in their order. No other one may be required."""
    has: tuple[str, ...] = ()
    """Attributes of it, or of its instances, that are used."""


@dataclass(frozen=True, slots=True)
class SourceText:
    """A text in a dependency's file: a message that we recognise, a variable that it reads, or code we rely on."""

    text: str
    file: str
    """Of the dependency, from its top package on."""
    users: tuple[str, ...]
    why: str


VLLM_NAMES = (
    PrivateName("vllm.LLMEngine", (CORE,), "drive vLLM iteration by iteration",
                has=("engine_core", "output_processor", "collective_rpc", "reset_prefix_cache", "set_weight_version",
                     "has_unfinished_requests", "step", "get_tokenizer", "sleep", "wake_up")),
    PrivateName("vllm.LLMEngine.sleep", (CORE,), "give a GPU's memory up", takes=("level", "mode")),
    PrivateName("vllm.LLMEngine.wake_up", (CORE,), "get it back in parts", takes=("tags",)),
    PrivateName("vllm.LLMEngine.from_vllm_config", (CORE,), "make it", takes=("vllm_config", "disable_log_stats")),
    PrivateName("vllm.LLMEngine.add_request", (CORE,), "submit a sample", takes=("request_id", "prompt", "params")),
    *(PrivateName(f"vllm.distributed.destroy_{what}", (CORE,), "close an engine of one process")
      for what in ("distributed_environment", "model_parallel")),
    PrivateName("vllm.inputs.engine.tokens_input", (CORE,), "prompts as tokens, with the weights' salt",
                takes=("prompt_token_ids", "cache_salt")),
    PrivateName("vllm.sampling_params.RequestOutputKind", (CORE,), "one output for each request", has=("FINAL_ONLY",)),
    PrivateName("vllm.v1.engine.output_processor.OutputProcessor", (CORE,), "progress, and whether a request has ended",
                has=("request_states",)),
    PrivateName("vllm.v1.engine.output_processor.RequestState", (CORE,), "progress by request",
                has=("external_req_id", "detokenizer", "logprobs_processor")),
    PrivateName("vllm.v1.engine.detokenizer.IncrementalDetokenizer", (CORE,), "tokens drawn so far",
                has=("num_output_tokens",)),
    PrivateName("vllm.v1.engine.core.EngineCore", (CORE,), "wait until no aborted request lingers, before weights load",
                has=("scheduler", "batch_queue", "resume_scheduler")),
    PrivateName("vllm.v1.engine.core.EngineCore.pause_scheduler", (CORE,), "the same, of a core in another process",
                takes=("mode", "clear_cache")),
    PrivateName("vllm.v1.engine.core_client.InprocClient", (CORE,), "whether the core is in this process",
                has=("engine_core",)),
    PrivateName("vllm.v1.engine.core_client.EngineCoreClient.abort_requests", (CORE,), "abort by vLLM's own ids",
                takes=("request_ids",)),
    PrivateName("vllm.config.get_layers_from_vllm_config", (WEIGHT_ENGINE,), "which attention an engine uses",
                takes=("vllm_config", "layer_type")),
    PrivateName("vllm.model_executor.layers.attention_layer_base.AttentionLayerBase", (WEIGHT_ENGINE,),
                "which attention an engine uses", has=("get_attn_backend",)),
    PrivateName("vllm.v1.sample.sampler.Sampler", (WEIGHT_ENGINE,), "its sampler", has=("topk_topp_sampler",)),
    PrivateName("vllm.utils.flashinfer.has_flashinfer", (WEIGHT_ENGINE,), "whether an engine uses FlashInfer"),
    PrivateName("vllm.config.SchedulerConfig", (CORE, SCHEDULER), "our scheduler in place of vLLM's",
                has=("async_scheduling", "scheduler_cls")),
    *(PrivateName(f"vllm.v1.core.sched.{name}", (SCHEDULER,), "tokens are sent every 16 iterations",
                  has=("add_request", "finish_requests", "has_finished_requests", "update_from_output", "pause_state"))
      for name in ("scheduler.Scheduler", "async_scheduler.AsyncScheduler")),
    *(PrivateName(f"vllm.v1.core.sched.scheduler.Scheduler.{name}", (SCHEDULER,), "overridden", takes=takes)
      for name, takes in {"add_request": ("request",), "finish_requests": ("request_ids", "finished_status"),
                          "update_from_output": ("scheduler_output", "model_runner_output")}.items()),
    PrivateName("vllm.v1.core.sched.interface.PauseState", (SCHEDULER,), "send all before a pause is complete",
                has=("PAUSED_ALL",)),
    PrivateName("vllm.v1.engine.EngineCoreOutput", (SCHEDULER,), "several tokens of a request in a message",
                has=("request_id", "new_token_ids", "new_logprobs", "prefill_stats", "finish_reason")),
    PrivateName("vllm.v1.engine.EngineCoreOutputs", (SCHEDULER,), "the same", has=("outputs",)),
    PrivateName("vllm.v1.engine.logprobs.LogprobsProcessor", (SCHEDULER,), "the front end's logprobs as a plain list",
                takes=("tokenizer", "logprobs", "prompt_logprobs", "cumulative_logprob", "num_logprobs",
                       "num_prompt_logprobs"), has=("update_from_output",)),
    PrivateName("vllm.v1.metrics.stats.PrefillStats", (SCHEDULER,), "the first output's, which is sent later"),
    PrivateName("vllm.v1.outputs.LogprobsLists", (SCHEDULER,), "the logprobs of an iteration",
                takes=("logprob_token_ids", "logprobs", "sampled_token_ranks"),
                has=("logprobs", "cu_num_generated_tokens")),
    PrivateName("vllm.v1.request.RequestStatus", (SCHEDULER,), "tell aborts from other ends",
                has=("FINISHED_ABORTED",)),
    PrivateName("vllm.v1.request.Request", (SCHEDULER,), "what a request asks for",
                has=("request_id", "client_index", "get_finished_reason")),
    PrivateName("vllm.v1.engine.core_client.SyncMPClient", (CORE,), "whether the core is another process",
                has=("resources", "call_utility")),
    PrivateName("vllm.v1.engine.core_client.SyncMPClient.shutdown", (CORE,), "end an idle core at once",
                takes=("timeout",)),
    PrivateName("vllm.v1.engine.core_client.BackgroundResources", (CORE,), "hear that the core's process has ended",
                has=("engine_manager",)),
    PrivateName("vllm.v1.engine.utils.CoreEngineProcManager", (CORE,), "hear that the core's process has ended",
                has=("processes",)),
    PrivateName("vllm.ModelRegistry", (CORE,), "import a model's class without a second Python",
                has=("models", "register_model")),
    PrivateName("vllm.model_executor.models.registry._LazyRegisteredModel", (CORE,),
                "import a model's class without a second Python", has=("load_model_cls",)),
    PrivateName("vllm.outputs.CompletionOutput", (CORE,), "weight versions of spans of a response",
                has=("weight_versions",)),
    PrivateName("vllm.platforms.current_platform", (VERIFICATION, WEIGHT_ENGINE, WEIGHT_ENGINE, VERIFICATION,
                QUANTISED), "whether this is a CPU, and its codes for fp8", has=("is_cpu", "fp8_dtype")),
    PrivateName("vllm.v1.worker.gpu_model_runner", (VERIFICATION,), "its request states are replaced by ours",
                has=("CachedRequestState",)),
    PrivateName("vllm.v1.worker.gpu_model_runner.GPUModelRunner", (WEIGHT_ENGINE, DRAFTING), "what a pass verifies",
                has=("execute_model", "sample_tokens", "propose_draft_token_ids", "speculative_config",
                     "model_config", "drafter", "use_async_scheduling", "_draft_token_ids", "_draft_token_req_ids")),
    PrivateName("vllm.v1.worker.gpu_model_runner.GPUModelRunner.sample_tokens", (DRAFTING,),
                "the second half of a pass", takes=("grammar_output",)),
    PrivateName("vllm.v1.worker.gpu_model_runner.GPUModelRunner.execute_model", (DRAFTING,),
                "the first half of a pass", takes=("scheduler_output",)),
    PrivateName("vllm.v1.core.sched.output.SchedulerOutput", (DRAFTING, SCHEDULER),
                "the drafts of a pass, and how many come next",
                has=("scheduled_spec_decode_tokens", "finished_req_ids", "num_spec_tokens_to_schedule")),
    PrivateName("vllm.v1.outputs.ModelRunnerOutput", (DRAFTING, SCHEDULER), "what a pass has drawn",
                has=("logprobs", "req_ids", "req_id_to_index", "sampled_token_ids")),
    PrivateName("vllm.v1.worker.gpu_input_batch.CachedRequestState", (VERIFICATION,),
                "continue a request's random numbers", has=("sampling_params", "generator", "output_token_ids")),
    PrivateName("vllm.v1.sample.rejection_sampler.RejectionSampler", (VERIFICATION,), "drafts are verified by drawing",
                has=("forward", "sampler")),
    PrivateName("vllm.v1.sample.rejection_sampler.RejectionSampler.forward", (VERIFICATION,), "the method that ours "
                "replaces", takes=("metadata", "draft_probs", "logits", "sampling_metadata")),
    PrivateName("vllm.v1.sample.rejection_sampler.PLACEHOLDER_TOKEN_ID", (VERIFICATION,), "marks rejected places"),
    PrivateName("vllm.v1.sample.sampler.Sampler.forward", (VERIFICATION,), "draws a token at each position",
                takes=("logits", "sampling_metadata")),
    PrivateName("vllm.v1.sample.metadata.SamplingMetadata", (VERIFICATION,), "an entry for each position",
                has=("temperature", "top_p", "top_k", "generators")),
    PrivateName("vllm.v1.outputs.SamplerOutput", (VERIFICATION,), "what a pass has drawn",
                has=("sampled_token_ids", "logprobs_tensors")),
    PrivateName("vllm.v1.outputs.LogprobsTensors", (VERIFICATION,), "logprobs of the positions that count",
                has=("logprob_token_ids", "logprobs", "selected_token_ranks")),
    PrivateName("vllm.v1.spec_decode.metadata.SpecDecodeMetadata", (VERIFICATION,), "the drafts of a pass",
                has=("num_draft_tokens", "draft_token_ids", "target_logits_indices")),
    PrivateName("vllm.v1.worker.gpu.spec_decode.rejection_sampler.rejection_sample", (VERIFICATION,),
                "the function that ours replaces in the newer runner for GPUs",
                takes=("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping",
                       "expanded_idx_mapping", "expanded_local_pos", "temperature", "seed", "num_speculative_steps",
                       "synthetic_conditional_rates", "use_fp64")),
    PrivateName("vllm.v1.worker.gpu.sample.gumbel.gumbel_sample", (VERIFICATION,), "the noise of that runner",
                takes=("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature",
                       "is_drafting", "use_fp64")),
    PrivateName("vllm.v1.metrics.stats.RequestSpecDecodeMetrics", (CORE,), "drafts of a response, and how many were "
                "accepted", has=("per_step_drafted", "per_step_accepted", "num_spec_tokens")),
    PrivateName("vllm.config.SpeculativeConfig", (DRAFTING,), "most drafts of a pass", has=("num_speculative_tokens",)),
    PrivateName("vllm.distributed.get_tensor_model_parallel_rank", (KV_FILES, WEIGHT_ENGINE), "the worker's own part"),
    PrivateName("vllm.distributed.get_tensor_model_parallel_world_size", (WEIGHT_ENGINE,), "its share of the hashing"),
    PrivateName("vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1", (KV_FILES,),
                "move KV between engines by files", takes=("vllm_config", "role", "kv_cache_config"),
                has=("_kv_transfer_config", "_get_connector_metadata", "request_finished", "register_kv_caches")),
    PrivateName("vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorMetadata", (KV_FILES,), "the same"),
    PrivateName("vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorRole", (KV_FILES,), "the same"),
    PrivateName("vllm.config.VllmConfig", (KV_FILES, CORE, DRAFTING),
                "its parts",
                has=("cache_config", "model_config")),
    PrivateName("vllm.config.CompilationConfig", (STARTS,), "a start's phases",
                has=("compilation_time", "encoder_compilation_time")),
    PrivateName("vllm.config.CacheConfig", (CORE, KV_FILES), "the size of the KV cache and of its blocks",
                has=("block_size", "kv_cache_size_tokens")),
    PrivateName("vllm.v1.core.kv_cache_manager.KVCacheBlocks", (KV_FILES,), "blocks of a request",
                has=("get_block_ids",)),
    PrivateName("vllm.v1.core.sched.output.SchedulerOutput", (KV_FILES,), "what an iteration computes",
                has=("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens")),
    PrivateName("vllm.v1.core.sched.output.NewRequestData", (KV_FILES,), "blocks of a request",
                has=("req_id", "block_ids", "num_computed_tokens")),
    PrivateName("vllm.v1.core.sched.output.CachedRequestData", (KV_FILES,), "blocks that a request has got",
                has=("req_ids", "new_block_ids", "num_computed_tokens", "resumed_req_ids")),
    PrivateName("vllm.v1.kv_cache_interface.KVCacheConfig", (KV_FILES,), "which dimension of a cache is its blocks",
                has=("num_blocks",)),
    PrivateName("vllm.v1.request.Request", (KV_FILES,), "what a request asks of the connector",
                has=("request_id", "kv_transfer_params", "cache_salt", "num_tokens", "num_prompt_tokens")),
    *(PrivateName(f"vllm.model_executor.layers.{name}", (READ_BACK,), "read back by a layer's product", has=("apply",))
      for name in ("linear.UnquantizedLinearMethod", "vocab_parallel_embedding.UnquantizedEmbeddingMethod")),
    PrivateName("vllm.model_executor.layers.fused_moe.oracle.unquantized.UnquantizedMoeBackend", (READ_BACK,),
                "which kernels compute with experts as they lie there", has=("TRITON", "BATCHED_TRITON",
                "FLASHINFER_CUTLASS", "CPU")),
    PrivateName("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod",
                (READ_BACK,), "read fused experts back, and pack them again on CPUs"),
    PrivateName("vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts", (READ_BACK,),
                "the place of an expert on its worker", has=("_map_global_expert_id_to_local_expert_id",)),
    PrivateName("vllm.model_executor.model_loader.reload.layerwise._get_original_loader", (READ_BACK,),
                "load codes instead of weights, to see where elements go", takes=("tensor",)),
    PrivateName("vllm.model_executor.model_loader.reload.utils.get_layer_tensors", (READ_BACK,),
                "load codes instead of weights, to see where elements go", takes=("layer",)),
    PrivateName("vllm.model_executor.model_loader.reload.initialize_layerwise_reload", (WEIGHT_ENGINE,),
                "load weights into a running engine", takes=("model",)),
    PrivateName("vllm.model_executor.model_loader.reload.finalize_layerwise_reload", (WEIGHT_ENGINE,),
                "load weights into a running engine"),
    PrivateName("vllm.model_executor.layers.quantization.base_config.QuantizeMethodBase", (WEIGHT_ENGINE,),
                "repack a tied head on CPUs", has=("process_weights_after_loading",)),
    *(PrivateName(f"vllm.config.quantization.{name}", (QUANTISED,), "a format for all linear layers and experts")
      for name in ("QuantSpec", "QuantizationConfigArgs")),
    PrivateName("vllm.model_executor.layers.quantization.register_quantization_config", (QUANTISED,),
                "formats of ours", takes=("quantization",)),
    PrivateName("vllm.model_executor.layers.quantization.online.base.OnlineQuantizationConfig", (QUANTISED,),
                "weights are quantised as they are loaded", takes=("args",), has=("get_supported_act_dtypes",)),
    PrivateName("vllm.model_executor.layers.quantization.online.fp8.Fp8PtpcOnlineLinearMethod", (QUANTISED,),
                "layers in fp8 are read back"),
    *(PrivateName(f"vllm.model_executor.layers.quantization.utils.quant_utils.{name}", (QUANTISED,),
                  "codes and scales as vLLM has them")
      for name in ("get_fp8_min_max", "kFp8StaticChannelSym")),
    PrivateName("vllm.distributed.weight_transfer.base.WeightTransferEngine", (WEIGHT_ENGINE,),
                "pull weights from our store",
                has=("model", "model_config", "vllm_config", "device", "init_info_cls", "update_info_cls",
                     "supports_draft_weight_update", "init_transfer_engine", "start_weight_update", "receive_weights",
                     "finish_weight_update", "shutdown")),
    PrivateName("vllm.distributed.weight_transfer.base.WeightTransferInitInfo", (WEIGHT_ENGINE,), "the same"),
    PrivateName("vllm.distributed.weight_transfer.base.WeightTransferUpdateInfo", (WEIGHT_ENGINE,), "the same"),
    PrivateName("vllm.distributed.weight_transfer.factory.WeightTransferEngineFactory", (WEIGHT_ENGINE,), "the same",
                has=("register_engine",)),
    PrivateName("vllm.v1.worker.gpu_worker.Worker", (CORE, WEIGHT_ENGINE), "the phases of a weight load, by name",
                has=("weight_transfer_engine", "init_weight_transfer_engine", "start_weight_update", "update_weights",
                     "finish_weight_update")),
)  # fmt: skip

RAY_NAMES = (
    PrivateName("ray._private.state.available_resources_per_node", (CLUSTER,), "what is free on each node; the public "
                "list of nodes has no such figure without the dashboard"),
    PrivateName("ray._private.state.state", (CLUSTER, LEAVING), "nodes that are being drained",
                has=("get_draining_nodes",)),
    PrivateName("ray._private.worker", (SESSION,), "whether a private Ray has ended, and what Ray prints of workers",
                has=("_global_node", "listen_error_messages")),
    PrivateName("ray._private.node.Node", (SESSION,), "whether a private Ray has ended", has=("dead_processes",)),
    PrivateName("ray._private.worker.print_to_stdstream", (SESSION,), "Ray's messages of dead workers go to the log",
                takes=("data", "ignore_prefix")),
    PrivateName("ray._private.ray_constants", (SESSION,), "a private Ray listens on loopback",
                has=("ENABLE_RAY_CLUSTER", "ENABLE_RAY_CLUSTERS_ENV_VAR")),
    PrivateName("ray.init", (SESSION,), "a private Ray's folder; refused once the run has its Ray",
                takes=("address",)),
    PrivateName("ray.serve.delete", ("functions/base.py",), "a replica deletes its own application",
                takes=("name", "_blocking")),
    PrivateName("ray._raylet.GcsClient", (LEAVE_NODE, LEAVING), "drain a node"),
    PrivateName("ray._raylet.InnerGcsClient", (LEAVE_NODE,), "drain a node", has=("drain_node",)),
    PrivateName("ray.core.generated.autoscaler_pb2", (LEAVE_NODE,), "the reason of a drain", has=("DrainNodeReason",)),
    PrivateName("ray.serve.config.RequestRouterConfig._serialize_request_router_cls", (CLUSTER,),
                "one at a time, because two at once fail", takes=("self",)),
    PrivateName("ray.serve._private.replica.add_port_to_grpc_server", (LOOPBACK,), "listen on loopback",
                takes=("server", "address")),
    PrivateName("ray.serve.handle.DeploymentResponse._to_object_ref", ("rlhfless/fleet/serve_handles.py",),
                "know that a call is on its way", takes=("self",)),
)  # fmt: skip

TORCH_NAMES = (
    PrivateName("torch.distributed.rendezvous._create_c10d_store", (LOOPBACK,), "listen on loopback",
                takes=("hostname", "port", "rank", "world_size", "timeout", "use_libuv")),
    PrivateName("torch.distributed.tensor.DTensor", (LOADING,), "leave parts of tensors in the host's memory",
                has=("_spec",)),
    PrivateName("torch.nn.Module", (PUBLISHING,), "buffers that a checkpoint leaves out",
                has=("_non_persistent_buffers_set",)),
    PrivateName("torch._C._host_emptyCache", (WEIGHT_ENGINE,), "unpin what an engine slept in", takes=()),
    PrivateName("torch._subclasses.fake_tensor.FakeTensorMode", (REHEARSAL,), "a step without data",
                takes=("allow_non_fake_inputs",)),
    PrivateName("torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker", (REHEARSAL,), "the memory of a step",
                takes=("mod",), has=("get_tracker_snapshot", "reset_mod_stats")),
    PrivateName("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", (KERNELS,), "attention with logsumexp",
                takes=("query", "key", "value", "is_causal", "scale")),
    PrivateName("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", (KERNELS,), "its gradients",
                takes=("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "scale")),
    PrivateName("torch.nn.attention.varlen._varlen_attn_backward", (KERNELS,), "gradients of FlashAttention on GPUs",
                takes=("grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k", "max_q", "max_k",
                       "is_causal", "rng_state", "scale", "window_size")),
)  # fmt: skip

TRANSFORMERS_NAMES = (
    PrivateName("transformers.PreTrainedModel._load_pretrained_model", (LOADING,), "split a model before it is read",
                takes=("model", "state_dict", "checkpoint_files", "load_config")),
    PrivateName("transformers.core_model_loading", (LOADING,), "leave parts of tensors in the host's memory",
                has=("_dtensor_from_local_like",)),
    PrivateName("transformers.modeling_utils._dtensor_from_local_like", (LOADING,), "the function that ours replaces",
                takes=("local_tensor", "ref")),
    PrivateName("transformers.core_model_loading.revert_weight_conversion", (LOADING, PUBLISHING),
                "names and layout of a checkpoint", takes=("model", "state_dict")),
    PrivateName("transformers.dynamic_module_utils.custom_object_save", ("functions/training/publishing.py",),
                "a model's own code goes into its checkpoints", takes=("obj", "folder", "config")),
    PrivateName("transformers.integrations.sdpa_attention.repeat_kv", (ATTENTION,), "KV heads",
                takes=("hidden_states", "n_rep")),
    PrivateName("transformers.integrations.sdpa_attention.sdpa_attention_forward", (ATTENTION, CHECK),
                "attention of rows without shared prefixes",
                takes=("module", "query", "key", "value", "attention_mask")),
    PrivateName("transformers.masking_utils.sdpa_mask", (ATTENTION, CHECK), "its mask"),
    PrivateName("torch.nn.Module", (CHECK,), "a module with its own numbers", has=("_parameters",)),
    PrivateName("transformers.PreTrainedConfig", ("functions/training/publishing.py", CHECK),
                "whether its code is its own; the attention of a model", has=("_auto_class", "_attn_implementation")),
    PrivateName("transformers.PreTrainedModel", ("rlhfless/scaling/latency/attention.py",),
                "tell a model without fused attention",
                has=("_supports_sdpa",)),
    PrivateName("transformers.PreTrainedModel", ("functions/sharding.py",), "the layers of a model",
                has=("_no_split_modules",)),
)  # fmt: skip

OTHER_NAMES = (
    PrivateName("fastapi.dependencies.utils.get_flat_dependant", ("rlhfless/control/api/routes.py",),
                "the query parameters that a route takes", takes=("dependant",)),
    PrivateName("kubernetes.client.CoreV1Api.list_namespaced_pod", (PODS,),
                "no call waits for ever", takes=("namespace", "label_selector", "_request_timeout")),
    PrivateName("kubernetes.client.CoreV1Api.list_node", (PODS,), "the same", takes=("_request_timeout",)),
    PrivateName("numba.core.options.DefaultOptions", ("sim/compiled.py",), "no counting of references",
                has=("_nrt",)),
    PrivateName("pydantic.BaseModel", ("rlhfless/spec/extension.py",), "the schema of a part that a user may replace",
                has=("__pydantic_core_schema__",)),
    *(PrivateName(f"tensorboard.compat.proto.{name}", (TENSORBOARD,), "event files")
      for name in ("event_pb2.Event", "summary_pb2.HistogramProto", "summary_pb2.Summary")),
    PrivateName("tensorboard.summary.writer.event_file_writer.EventFileWriter", (TENSORBOARD,), "event files",
                takes=("logdir",)),
    PrivateName("tensorboard.backend.event_processing.event_file_loader.EventFileLoader", (TENSORBOARD,),
                "what a resumed run has written"),
)  # fmt: skip

NAMES = (*RAY_NAMES, *TORCH_NAMES, *TRANSFORMERS_NAMES, *OTHER_NAMES)
"""Those that are imported here; VLLM_NAMES are imported in a process of their own."""

TEXTS = (
    SourceText("self.kv_caches", "vllm/v1/worker/gpu_model_runner.py", (WEIGHT_ENGINE,), "the memory of the KV cache"),
    SourceText("layer.cpu_linear = ", "vllm/model_executor/layers/utils.py", (WEIGHT_ENGINE,),
               "packed weights of a CPU"),
    SourceText('"Loading weights took %.2f seconds"', "vllm/model_executor/model_loader/default_loader.py",
               (STARTS,), "the log says how long reading the weights took"),
    SourceText('"Graph capturing finished in %.0f secs', "vllm/v1/worker/gpu/model_runner.py", (STARTS,),
               "the log says how long the capture of graphs took"),
    SourceText("gen.set_offset(gen.get_offset() - 4)", "vllm/v1/worker/gpu_model_runner.py", (VERIFICATION,),
               "a prefill in several iterations sets a generator back by an offset"),
    SourceText("req_state = CachedRequestState(", "vllm/v1/worker/gpu_model_runner.py", (VERIFICATION,),
               "the runner makes request states by the name that we replace"),
    SourceText('"Graph capturing finished in %.0f', "vllm/v1/worker/gpu_model_runner.py", (STARTS,), "a start"),
    SourceText("Loading weights took", "vllm/model_executor/model_loader/default_loader.py", (STARTS,), "the same"),
    SourceText("use_spec_decode = self.speculative_config is not None\n        if not use_spec_decode:",
               "vllm/v1/worker/gpu_model_runner.py", (DRAFTING,), "a runner without this setting takes the plain path"),
    SourceText("self._draft_token_req_ids = self.input_batch.req_ids.copy()", "vllm/v1/worker/gpu_model_runner.py",
               (DRAFTING,), "whose drafts the scheduler gets"),
    SourceText("if self.num_speculative_tokens == 0:", "vllm/v1/spec_decode/llm_base_proposer.py", (DRAFTING,),
               "a draft model that is asked for no drafts reads what was drawn"),
    SourceText("cast(Any, self.drafter).propose(\n                sampled_token_ids,\n                "
               "self.input_batch.num_tokens_no_spec,", "vllm/v1/worker/gpu_model_runner.py", (DRAFTING,),
               "how a drafter of our own is asked, once the tokens are in the request's state"),
    SourceText("sampled = gumbel_sample(\n                processed_logits,\n                expanded_idx_mapping,",
               "vllm/v1/worker/gpu/sample/sampler.py", (VERIFICATION,), "draws without drafts in the newer runner"),
    SourceText("seeds[i] = torch.randint(", "vllm/v1/sample/ops/topk_topp_sampler.py", (VERIFICATION,),
               "draws on a CPU"),
    SourceText("q[i].exponential_(generator=generator)", "vllm/v1/sample/ops/topk_topp_sampler.py", (VERIFICATION,),
               "draws on a GPU"),
    SourceText('raise Exception(\n                        "The current node timed out', "ray/_private/node.py",
               (SESSION,), "a Ray that is not up in time is told by a bare Exception"),
    SourceText('add_port_to_grpc_server(self._server, "[::]:0")', "ray/serve/_private/replica.py", (LOOPBACK,),
               "a replica's server binds to all interfaces by this call"),
    SourceText('f"--node_id={node_id}"', "ray/_private/services.py", (LEAVE_NODE,), "the node of a raylet"),
    SourceText('f"session_{date_str}_{os.getpid()}"', "ray/_private/node.py", (RAY_FOLDER,), "paths of sockets"),
    SourceText('default_prefix="plasma_store"', "ray/_private/node.py", (RAY_FOLDER,), "the same"),
    SourceText("automatic conversion of the weights", "transformers/utils/loading_report.py", (LOADING,),
               "tell weights that cannot be converted from other errors of a load"),
    SourceText("does not support an attention implementation through torch.nn.functional.scaled_dot_product_attention",
               "transformers/modeling_utils.py", (CHECK,), "tell a model without `sdpa`, which gets `eager`"),
    SourceText("`trust_remote_code=True` to allow custom code", "transformers/dynamic_module_utils.py",
               ("rlhfless/prepare/model.py",), "tell a model that needs code of its own"),
    SourceText('getattr(model, "_weight_conversions", None)', "transformers/core_model_loading.py", (LOADING,),
               "conversions of the model's class, not the ones that a load happened to use"),
    SourceText("local_tensor: torch.Tensor,\n        spec: DTensorSpec,\n        *,\n        requires_grad: bool,",
               "torch/distributed/tensor/_api.py", (LOADING,), "make a DTensor of a part that is in the host's memory"),
    SourceText('kwargs.pop("_temp_dir", None)', "ray/_private/worker.py", (SESSION,), "a private Ray's folder"),
    SourceText("@functools.wraps(orig_method)", "torch/distributed/fsdp/_fully_shard/_fully_shard.py", (REHEARSAL,),
               "the method that FSDP wraps is found in `__wrapped__`"),
)  # fmt: skip

VARIABLES = (
    *(SourceText(name, "vllm/envs.py", users, why) for name, users, why in (
        ("VLLM_RPC_BASE_PATH", (ADAPTER,), "sockets in a folder that is removed"),
        ("VLLM_LOGGING_LEVEL", (ARGUMENTS,), "the engine's log"),
        ("VLLM_NO_USAGE_STATS", (ARGUMENTS,), "nothing is reported to others"),
        ("VLLM_HOST_IP", (ARGUMENTS,), "listen on loopback"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", (ARGUMENTS,), "vLLM's limit must not end what the run waits for"),
        ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", (ARGUMENTS,), "vLLM's limit must not end what the run waits for"),
        ("VLLM_CPU_OMP_THREADS_BIND", (ARGUMENTS,), "keep the cores that the function was given"),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", (ARGUMENTS,), "one process on a CPU core"),
        ("VLLM_WORKER_MULTIPROC_METHOD", (ARGUMENTS,), "workers end with the engine"),
        ("VLLM_BATCH_INVARIANT", (ARGUMENTS,), "logprobs that do not depend on the batch"),
        ("VLLM_USE_FLASHINFER_SAMPLER", (ARGUMENTS,), "no sampler that takes no seeds"),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", (ARGUMENTS,), "offers of KV are told at the node's address"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", (ARGUMENTS,), "several engines on a node"),
        ("VLLM_CACHE_ROOT", ("rlhfless/selftest/machine.py",), "where its cache is"),
    )),
    SourceText("TORCHDYNAMO_DISABLE", "torch/_dynamo/eval_frame.py", (ARGUMENTS,), "an eager engine compiles nothing"),
    SourceText("TORCHINDUCTOR_CACHE_DIR", "torch/_inductor/runtime/cache_dir_utils.py",
               (SESSION, "rlhfless/cli/service.py"), "compiled code in a folder of the user's own"),
    SourceText("PYTORCH_ALLOC_CONF", "torch/include/c10/core/AllocatorConfig.h", ("functions/devices.py",), "pinning"),
    SourceText("pinned_max_round_threshold_mb", "torch/lib/libc10.so", ("functions/devices.py",),
               "pinned blocks are not rounded up to powers of two"),
    SourceText("expandable_segments", "torch/lib/libc10.so", ("functions/devices.py",), "less fragmentation"),
    SourceText("_fixture_function_marker", "_pytest/fixtures.py", ("rlhfless/rewards/tested.py",), "fixtures of tests"),
    SourceText("_fixture_function", "_pytest/fixtures.py", ("rlhfless/rewards/tested.py",), "fixtures of tests"),
    SourceText("GLOO_SOCKET_IFNAME", "torch/lib/libtorch_cpu.so", (LOOPBACK,), "listen on loopback"),
    SourceText("_timeout", "torch/distributed/distributed_c10d.py", ("rlhfless/weights/broadcast.py",),
               "the time-out of an NCCL group is an option without a public name"),
    SourceText("TORCH_NCCL_BLOCKING_WAIT", "torch/include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp",
               ("rlhfless/weights/broadcast.py",), "a wait for a lost member raises"),
    SourceText("RAY_AUTH_MODE", "ray/_raylet.so", (SESSION, "rlhfless/control/drivers.py"), "Ray asks for a token"),
    SourceText("RAY_AUTH_TOKEN", "ray/_raylet.so", (SESSION, RAY_JOBS), "the token"),
    SourceText("RAY_AUTH_TOKEN_PATH", "ray/_raylet.so", (SESSION, RAY_JOBS), "the token's file"),
    SourceText("RAY_worker_niceness", "ray/core/src/ray/raylet/raylet", (SESSION,), "workers are the run itself"),
    SourceText("RAY_USAGE_STATS_ENABLED", "ray/_common/usage/usage_constants.py", (SESSION,), "no reports"),
    SourceText("RAY_ADDRESS", "ray/_private/ray_constants.py", (LEAVE_NODE,), "the cluster of a pod"),
    SourceText("RAY_CLOUD_INSTANCE_ID", "ray/_private/services.py", (LEAVE_NODE,), "the pod's own raylet"),
    SourceText("RAY_JOB_STOP_WAIT_TIME_S", "ray/dashboard/modules/job/job_supervisor.py", (RAY_JOBS,), "time to end"),
)  # fmt: skip
