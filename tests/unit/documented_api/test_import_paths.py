"""Every import path that README, docs, examples and the published library's documents use leads to its name."""

import importlib

import pytest

NAMES = {
    "strands_env.core": """
        Action Environment ModelFactory Observation RewardError RewardFunction RewardResult StepResult TaskContext
        TerminationReason TokenObservation
    """,
    "strands_env.core.models": "bedrock_model_factory build_model_factory openai_model_factory sglang_model_factory",
    "strands_env.environments": """
        AgentCoreCodeEnvironment ArithmeticExpressionError BackendError CalculatorEnvironment MCPEnvironment
        MCPServersEnvironment PythonEnvironment calculator evaluate python_tool
    """,
    "strands_env.eval": """
        AnswerFn CheckpointError DuplicateTaskError EvalSample EvaluationStoppedError Evaluator MetricFn Results
        answer_of read_results standard_metrics
    """,
    "strands_env.eval.benchmarks": "load_benchmark",
    "strands_env.eval.checkpoint": "CheckpointFile",
    "strands_env.rewards": """
        AllOf ExactMatchReward JudgeReward MathReward RegexReward RewardError WeightedSum WorkerLimits last_boxed
        value_key
    """,
    "strands_env.sandbox": """
        DEFAULT_LIMITS Ended Execution MODES Mode PythonSandbox SandboxError SandboxLimits SandboxUnavailableError
        available_modes
    """,
    "strands_env.slime": "make_generate",
    "strands_env.utils": "clear_clients get_cached_client get_cached_client_from_slime_args",
    "strands_sglang": """
        LoopLimitReachedError LoopLimiter MaxMessagesReachedError MaxToolCallsReachedError
        MaxToolIterationsReachedError OUTCOMES Outcome RewardRule Rollout SGLangAbortedError SGLangCancelledError
        SGLangClient SGLangClientError SGLangConnectionError SGLangContextLengthError SGLangDeadlineError
        SGLangDecodingError SGLangHTTPError SGLangModel SGLangThrottledError Segment TerminationReason Token
        TokenManager TokenizerMismatchError ToolIterationLimiter ToolLimiter ToolParseResult ToolParser Trajectory
        Turn TurnStatus clear_clients get_client get_client_from_slime_args get_tokenizer get_tool_parser
        limit_cause outcome_of register_tool_parser termination_reason
    """,
    "strands_sglang.client": "SGLangClient",
    "strands_sglang.drift": "Drift",
    "strands_sglang.exceptions": "SGLangClientError",
    "strands_sglang.families": "FAMILIES",
    "strands_sglang.local": """
        CHATML_TOOLS_TEMPLATE LocalServer LocalServerError ServerSettings UnsupportedPlatformError ensure_sglang
        ensure_smollm2 ensure_tiny_qwen2_5_vl ensure_tiny_qwen3 ensure_tiny_qwen3_moe home launch_server
        require_platform start_server
    """,
    "strands_sglang.messages": "fingerprint",
    "strands_sglang.model": "SGLangModel",
    "strands_sglang.outcomes": "OUTCOMES",
    "strands_sglang.request_fields": "REQUEST_FIELDS",
    "strands_sglang.testing": """
        Answer AnswerFunction ScriptedAnswer ScriptedExperts ScriptedFault ScriptedRefusal ScriptedRequest
        ScriptedResponse ScriptedSGLang ServedOnPort scripted_logprob
    """,
    "strands_sglang.tool_choice": "CALL_FORMATS GRAMMAR_PARAMETERS UNCONSTRAINED can_force force_call forced_call",
    "strands_sglang.tool_limiter": "ToolLimiter",
    "strands_sglang.tool_parsers": """
        AUTO DeepSeekV31ToolParser DeepSeekV32ToolParser DeepSeekV3ToolParser DeepSeekV4ToolParser GLMToolParser
        Gemma4ToolParser GraniteToolParser HarmonyToolParser HermesToolParser KimiK2ToolParser KimiK3ToolParser
        Llama3JSONToolParser Llama4PythonicToolParser MiniMaxM2ToolParser MiniMaxM3ToolParser MistralToolParser
        ParsedTurn Phi4ToolParser QwenXMLToolParser SeedOSSToolParser SmolLM3ToolParser TOOL_PARSER_REGISTRY
        ToolCallStatus ToolParseResult ToolParser UnknownToolParserError get_tool_parser register_tool_parser
    """,
    "strands_sglang.trainers.slime": """
        EpisodeEnd SlimeExportError check_reward_nonzero_std generate grpo_rewards_by_group make_generate
        make_reward to_slime_samples
    """,
    "strands_sglang.trajectory": "Trajectory",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_documented_path_leads_to_its_names(module):
    imported = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(imported, name)] == []
