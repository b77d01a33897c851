"""Episodes for tests of the slime adapter: a real agent on a scripted server, through `generate` or by hand."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import torch

from strands_sglang import SGLangModel, ToolLimiter, termination_reason
from strands_sglang.testing import ScriptedAnswer, ScriptedExperts, ScriptedSGLang
from strands_sglang.trainers import slime

from .agents import call, make_agent, make_tools
from .slime_checker import check_against_server, check_rollouts
from .slime_stub import PrefixCacheInfo, Sample, SpecInfo, slime_args, slime_sampling_params

QUESTION = "What is 25 * 17?"
CALL = call("calculator", expression="25 * 17")
ANSWER = "25 * 17 = 425."
CUT = ScriptedAnswer("25 * 17 is", finish_reason="abort")
LONG = ScriptedAnswer("25 * 17 is", finish_reason="length")
LONG_TEXT = "one two three four five six seven eight nine ten " * 40
EXPERTS = ScriptedExperts()


class SlimeState:
    """slime's `GenerateState` as far as `generate` reads it; `aborted` may be set at any time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.aborted = False


class Rollouts:
    """A scripted server behind a `generate` function of slime's."""

    def __init__(self, tokenizer: Any, answers: Any, *, server: dict[str, Any] | None = None, **settings: Any) -> None:
        self.tokenizer = tokenizer
        self.state = SlimeState(tokenizer)
        self.server = ScriptedSGLang(tokenizer, answers, **(server or {}))
        self.tools, self.ran = make_tools()
        client = {"max_retries": 0, **settings.pop("client_settings", {}), "transport": self.server.transport()}
        settings["client_settings"] = client
        if "agent_factory" not in settings:
            settings = {"tools": self.tools, "system_prompt": "Be brief.", **settings}
        self.generate: Callable[..., Awaitable[Any]] = slime.make_generate(
            generate_state=lambda args: self.state, **settings
        )

    async def __call__(
        self,
        sample: Sample | None = None,
        *,
        params: dict[str, Any] | None = None,
        evaluation: bool = False,
        **args: Any,
    ) -> Any:
        """One sample; further arguments are slime's."""
        sample = Sample(index=3, group_index=1, prompt=QUESTION) if sample is None else sample
        given = slime_sampling_params() if params is None else params
        return await self.generate(slime_args(**args), sample, given, evaluation=evaluation)

    def aborts_with(self, answer: Any) -> Callable[[Any], Any]:
        """An answer in whose middle slime aborts its rollouts."""

        def answer_and_abort(request: Any) -> Any:
            self.state.aborted = True
            return answer

        return answer_and_abort


def checked(result: Any, rollouts: Rollouts, *, replayed: bool = True, log: bool = True, **args: Any) -> Any:
    """The result, after both checks."""
    samples = [result] if isinstance(result, list) else result
    check_rollouts(samples, slime_args(**args), rollouts.tokenizer, replayed=replayed)
    if log:
        check_against_server(result, rollouts.server, experts=EXPERTS if args.get("num_layers") else None)
    return result


def moe_args(**more: Any) -> dict[str, Any]:
    """slime's arguments for routing replay of the scripted model's experts."""
    return {
        "use_rollout_routing_replay": True,
        "num_layers": EXPERTS.layers,
        "moe_router_topk": EXPERTS.top_k,
        **more,
    }


async def play(tokenizer: Any, answers: Any, *, server: dict[str, Any] | None = None, **config: Any) -> SimpleNamespace:
    """An agent's episode: its `trajectory`, `reason` and `server`."""
    scripted = ScriptedSGLang(tokenizer, answers, **(server or {}))
    model = SGLangModel(tokenizer=tokenizer, client=scripted.client(max_retries=0), **config)
    limiter = ToolLimiter(max_tool_iters=3, on_limit="stop")
    agent = make_agent(model, make_tools()[0], hooks=[limiter])
    try:
        end: Any = await agent.invoke_async(QUESTION)
    except Exception as error:
        end = error
    reason = termination_reason(end, trajectory=model.trajectory, limiter=limiter)
    return SimpleNamespace(trajectory=model.trajectory, reason=reason, server=scripted, agent=agent, model=model)


async def forked(tokenizer: Any, **settings: Any) -> Any:
    """An episode whose history was rewritten, so that it has two sequences with a common beginning."""
    episode = await play(tokenizer, [CALL, ANSWER, "Other words."], **settings)
    agent = episode.agent
    agent.messages[2]["content"][0]["toolResult"]["content"] = [{"text": "(shortened)"}]
    await agent.invoke_async("And now?")
    return episode


def int32_text(values: list[int]) -> str:
    """An int32 array as slime's SGLang puts it into JSON."""
    return base64.b64encode(array("i", values).tobytes()).decode("ascii")


def tell_top_p(monkeypatch: Any) -> None:
    """Have scripted servers tell the ids that top-p kept, as slime's SGLang does: the sampled one and some others."""
    from strands_sglang.testing import bodies

    body_of = bodies.generation

    def generation(request: Any, sampled: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        body = body_of(request, sampled, *args, **kwargs)
        if (request.sampling_params.get("custom_params") or {}).get("return_top_p_token_ids"):
            ids, offsets = [], [0]
            for token in sampled.output_ids:
                ids += [token, *range(token % 3)]
                offsets.append(len(ids))
            body["meta_info"]["top_p_token_ids"] = int32_text(ids)
            body["meta_info"]["top_p_token_offsets"] = int32_text(offsets)
        return body

    monkeypatch.setattr(bodies, "generation", generation)


def stale_sample(**overrides: Any) -> Sample:
    """A sample that an earlier run has filled with what is wrong now."""
    fields = {
        "index": 3,
        "group_index": 1,
        "prompt": QUESTION,
        "tokens": [9] * 50,
        "response": "stale",
        "response_length": 40,
        "loss_mask": [1] * 7,
        "rollout_log_probs": [math.nan] * 3,
        "weight_versions": ["stale"],
        "reward": 7.0,
        "remove_sample": True,
        "teacher_log_probs": [0.5],
        "rollout_top_p_token_ids": [1],
        "rollout_top_p_token_offsets": [0, 1],
        "rollout_routed_experts": [[1]],
        "multimodal_train_inputs": {"pixel_values": torch.zeros(1)},
        "prefix_cache_info": PrefixCacheInfo(5, 6),
        "spec_info": SpecInfo(1, 2, 3, 4),
        "non_generation_time": 99.0,
        "metadata": {"own": 1},
    }
    return Sample(**{**fields, **overrides})


def export(episode: Any, tokenizer: Any, outcome: Any = None, *, args: Any = None, **kwargs: Any) -> Any:
    """The samples of an episode, checked against slime's needs and against the server's log."""
    args = slime_args() if args is None else args
    outcome = episode.reason if outcome is None else outcome
    samples = slime.to_slime_samples(
        episode.trajectory, stale_sample(), outcome, tokenizer=tokenizer, args=args, **kwargs
    )
    rollouts = [samples] if isinstance(samples, list) else samples
    check_rollouts(rollouts, args, tokenizer, replayed=not kwargs.get("evaluation"))
    check_against_server(samples, episode.server, experts=EXPERTS)
    return samples


ENDS: dict[str, tuple[list[Any], dict[str, Any], str, bool, Any]] = {
    "an answer": ([CALL, ANSWER], {}, "COMPLETED", False, None),
    "a limit on tokens": ([CALL, LONG], {}, "TRUNCATED", False, None),
    "a limit on tools": ([CALL] * 3, {}, "TRUNCATED", False, None),
    "a full context": ([CALL, LONG], {"server": {"context_length": 330}}, "TRUNCATED", False, None),
    "an abort nobody asked for": ([CALL, CUT], {}, "TRUNCATED", True, 0.0),
    "a first call that was aborted": ([CUT], {}, "TRUNCATED", True, 0.0),
    "an error of the server": ([CALL], {}, "FAILED", True, 0.0),
    "an error in the first call": ([], {}, "FAILED", True, 0.0),
    "a prompt that does not fit": ([], {"server": {"context_length": 20}}, "FAILED", True, 0.0),
    "an abort in the queue": ([ScriptedAnswer("", finish_reason="abort")], {}, "FAILED", True, 0.0),
}
