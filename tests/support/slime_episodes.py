"""Episodes for tests of the slime adapter: a real agent on a scripted server, through `generate` or by hand."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from strands_sglang import SGLangModel, ToolLimiter, termination_reason
from strands_sglang.testing import ScriptedExperts, ScriptedSGLang
from strands_sglang.trainers import slime

from .agents import call, make_agent, make_tools
from .slime_stub import Sample, slime_args, slime_sampling_params

QUESTION = "What is 25 * 17?"
CALL = call("calculator", expression="25 * 17")
ANSWER = "25 * 17 = 425."
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


def int32_text(values: list[int]) -> str:
    """An int32 array as slime's SGLang puts it into JSON."""
    return base64.b64encode(array("i", values).tobytes()).decode("ascii")


def tell_top_p(server: ScriptedSGLang, monkeypatch: Any, *, width: int = 3) -> None:
    """Have a server tell the ids that top-p kept, as slime's SGLang does: the sampled one and some others."""
    from strands_sglang.testing import bodies

    body_of = bodies.generation

    def generation(request: Any, sampled: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        body = body_of(request, sampled, *args, **kwargs)
        if (request.sampling_params.get("custom_params") or {}).get("return_top_p_token_ids"):
            ids, offsets = [], [0]
            for token in sampled.output_ids:
                ids += [token, *range(token % width)]
                offsets.append(len(ids))
            body["meta_info"]["top_p_token_ids"] = int32_text(ids)
            body["meta_info"]["top_p_token_offsets"] = int32_text(offsets)
        return body

    monkeypatch.setattr(bodies, "generation", generation)
