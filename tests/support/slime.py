"""slime for tests: as much of it as `generate` touches, episodes that make samples, and whether slime can use those.

Source: slime's `utils/types.py` and `rollout/sglang_rollout.py`, names and types only. The checks are written from a
description of slime (its `ray/rollout.py`, `rollout_data_utils.py`, `data.py`, `cp_utils.py`, `ppo_utils.py`,
`sglang_rollout.py`) and from nothing of the code that makes the samples:

- `check_rollouts`: the samples of a batch, by themselves: shapes, values, statuses, rewards, and the steps that slime
  takes with them.
- `check_against_server`: the samples against the log of the server that answered: every token to train was sampled
  there after exactly the tokens before it, with that logprob and those experts, and is trained once.
"""

import base64
import math
import pickle
import sys
from array import array
from dataclasses import asdict, dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as functional

from strands_sglang import SGLangModel, ToolLimiter, termination_reason
from strands_sglang.testing import ScriptedAnswer, ScriptedExperts, ScriptedSGLang, bodies
from strands_sglang.trainers import slime

from .agents import build_chatml_tokenizer, call, make_agent, make_tools

# --- slime ---


@dataclass
class SpecInfo:
    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info):
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)


@dataclass
class PrefixCacheInfo:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info):
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


@dataclass
class Sample:
    """One rollout, as slime passes it to `generate` and reads it afterwards."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict] = ""
    label: str | None = None
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict | None = None
    multimodal_train_inputs: dict | None = None
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: object = None
    rollout_top_p_token_offsets: object = None
    rollout_routed_experts: object = None
    teacher_log_probs: list[float] | None = None
    reward: float | dict | None = None
    status: Status = Status.PENDING
    remove_sample: bool = False
    metadata: dict = field(default_factory=dict)
    train_metadata: dict | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def get_reward_value(self, args):
        return self.reward[args.reward_key] if getattr(args, "reward_key", None) else self.reward

    def to_dict(self):
        return {
            **self.__dict__,
            "status": self.status.value,
            "spec_info": asdict(self.spec_info),
            "prefix_cache_info": asdict(self.prefix_cache_info),
        }

    @staticmethod
    def from_dict(data):
        sample = Sample()
        vars(sample).update(data)
        sample.status = Sample.Status(data["status"])
        sample.spec_info = SpecInfo(**data["spec_info"])
        sample.prefix_cache_info = PrefixCacheInfo(**data["prefix_cache_info"])
        return sample


def slime_args(base_url="http://127.0.0.1:30000", **overrides):
    """The parsed arguments that name a router, and what else the documented functions read."""
    ip, _, port = base_url.removeprefix("http://").rpartition(":")
    return SimpleNamespace(
        **{
            "sglang_router_ip": ip,
            "sglang_router_port": int(port),
            "sglang_server_concurrency": 512,
            "rollout_num_gpus": 8,
            "rollout_num_gpus_per_engine": 1,
            "hf_checkpoint": "/models/Qwen3-8B",
            "partial_rollout": False,
            **overrides,
        }
    )


def slime_sampling_params(**overrides):
    """The sampling parameters that slime gives to `generate` in training."""
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 256,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        **overrides,
    }


def install_slime(monkeypatch, tokenizer):
    """Make `slime.utils.types.Sample` and `slime.rollout.sglang_rollout.GenerateState` importable for one test."""
    modules = {
        "slime": {},
        "slime.utils": {},
        "slime.utils.types": {"Sample": Sample},
        "slime.rollout": {},
        "slime.rollout.sglang_rollout": {"GenerateState": lambda args: SlimeState(tokenizer)},
    }
    for name, names in modules.items():
        module = ModuleType(name)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)


# --- episodes ---

QUESTION = "What is 25 * 17?"
CALL = call("calculator", expression="25 * 17")
ANSWER = "25 * 17 = 425."
CUT = ScriptedAnswer("25 * 17 is", finish_reason="abort")
LONG = ScriptedAnswer("25 * 17 is", finish_reason="length")
LONG_TEXT = "one two three four five six seven eight nine ten " * 40
EXPERTS = ScriptedExperts()


class SlimeState:
    """slime's `GenerateState` as far as `generate` reads it; `aborted` may be set at any time."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.aborted = False


class Rollouts:
    """A scripted server behind a `generate` function of slime's; a list of answers may grow until it is used up."""

    def __init__(self, answers, *, server=None, **settings):
        self.tokenizer = tokenizer = build_chatml_tokenizer()
        self.state = SlimeState(tokenizer)
        self.answers = answers
        self.server = ScriptedSGLang(tokenizer, answers, **(server or {}))
        self.tools, self.ran = make_tools()
        client = {"max_retries": 0, **settings.pop("client_settings", {}), "transport": self.server.transport()}
        settings["client_settings"] = client
        if not settings.keys() & {"agent_factory", "episode"}:
            settings = {"tools": self.tools, "system_prompt": "Be brief.", **settings}
        self.generate = slime.make_generate(generate_state=lambda args: self.state, **settings)

    async def __call__(
        self,
        sample=None,
        *,
        params=None,
        evaluation=False,
        **args,
    ):
        """One sample; further arguments are slime's."""
        sample = Sample(index=3, group_index=1, prompt=QUESTION) if sample is None else sample
        given = slime_sampling_params() if params is None else params
        return await self.generate(slime_args(**args), sample, given, evaluation=evaluation)

    async def checked(self, *given, params=None, evaluation=False, **args):
        """One sample, after both checks."""
        return checked(await self(*given, params=params, evaluation=evaluation, **args), self, **args)

    def aborts_with(self, answer):
        """An answer in whose middle slime aborts its rollouts."""

        def answer_and_abort(request):
            self.state.aborted = True
            return answer

        return answer_and_abort


def checked(result, rollouts, **args):
    """The result, after both checks."""
    samples = [result] if isinstance(result, list) else result
    check_rollouts(samples, slime_args(**args), rollouts.tokenizer)
    check_against_server(result, rollouts.server, experts=EXPERTS if args.get("num_layers") else None)
    return result


def moe_args(**more):
    """slime's arguments for routing replay of the scripted model's experts."""
    return {
        "use_rollout_routing_replay": True,
        "num_layers": EXPERTS.layers,
        "moe_router_topk": EXPERTS.top_k,
        **more,
    }


async def play(answers, *, server=None, **config):
    """An agent's episode: its `trajectory`, `reason` and `server`."""
    tokenizer = build_chatml_tokenizer()
    scripted = ScriptedSGLang(tokenizer, answers, **(server or {}))
    model = SGLangModel(tokenizer=tokenizer, client=scripted.client(max_retries=0), **config)
    limiter = ToolLimiter(max_tool_iters=3, on_limit="stop")
    agent = make_agent(model, make_tools()[0], hooks=[limiter])
    try:
        end = await agent.invoke_async(QUESTION)
    except Exception as error:
        end = error
    reason = termination_reason(end, trajectory=model.trajectory, limiter=limiter)
    return SimpleNamespace(trajectory=model.trajectory, reason=reason, server=scripted, agent=agent, model=model)


async def forked(**settings):
    """An episode whose history was rewritten, so that it has two sequences with a common beginning."""
    episode = await play([CALL, ANSWER, "Other words."], **settings)
    agent = episode.agent
    agent.messages[2]["content"][0]["toolResult"]["content"] = [{"text": "(shortened)"}]
    await agent.invoke_async("And now?")
    return episode


def int32_text(values):
    """An int32 array as slime's SGLang puts it into JSON."""
    return base64.b64encode(array("i", values).tobytes()).decode("ascii")


def tell_top_p(monkeypatch):
    """Have scripted servers tell the ids that top-p kept, as slime's SGLang does: the sampled one and some others."""
    body_of = bodies.generation

    def generation(request, sampled, *args, **kwargs):
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


def stale_sample(**overrides):
    """A sample that an earlier run has filled with what is wrong now."""
    return Sample(
        **{
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
            **overrides,
        }
    )


def export(episode, outcome=None, *, args=None, **kwargs):
    """The samples of an episode, checked against slime's needs and against the server's log."""
    args = slime_args() if args is None else args
    outcome = episode.reason if outcome is None else outcome
    tokenizer = episode.model.tokenizer
    samples = slime.to_slime_samples(
        episode.trajectory, stale_sample(), outcome, tokenizer=tokenizer, args=args, **kwargs
    )
    rollouts = [samples] if isinstance(samples, list) else samples
    check_rollouts(rollouts, args, tokenizer, replayed=not kwargs.get("evaluation"))
    check_against_server(samples, episode.server, experts=EXPERTS)
    return samples


ENDS = {
    "an answer": ([CALL, ANSWER], {}, "COMPLETED", False, None),
    "a limit on tokens": ([CALL, LONG], {}, "TRUNCATED", False, None),
    "a limit on tools": ([CALL] * 3, {}, "TRUNCATED", False, None),
    "a full context": ([CALL, LONG], {"server": {"context_length": 330}}, "TRUNCATED", False, None),
    "an unrequested abort": ([CALL, CUT], {}, "TRUNCATED", True, 0.0),
    "a first call that was aborted": ([CUT], {}, "TRUNCATED", True, 0.0),
    "an error of the server": ([CALL], {}, "FAILED", True, 0.0),
    "an error in the first call": ([], {}, "FAILED", True, 0.0),
    "a prompt that does not fit": ([], {"server": {"context_length": 20}}, "FAILED", True, 0.0),
    "an abort in the queue": ([ScriptedAnswer("", finish_reason="abort")], {}, "FAILED", True, 0.0),
}


# --- Judge of samples ---


def demand(promises):
    """Fail at the first broken promise: slime could not use the sample, or would train on wrong data."""
    broken = [promise for promise, holds in promises.items() if not holds]
    assert not broken, broken[0]


def check_rollouts(rollouts, args, tokenizer, *, replayed=True):
    """Check what `generate` or `to_slime_samples` returned, one result or a list of results of one kind.

    Args:
        rollouts: A sample, or a list of samples or of lists of samples.
        args: slime's arguments.
        tokenizer: The model's.
        replayed: Whether the samples are to be trained on, and so hold what training replays.
    """
    rollouts = rollouts if isinstance(rollouts, list) else [rollouts]
    lists = [rollout for rollout in rollouts if isinstance(rollout, list)]
    demand(
        {"there is a sample": rollouts, "a batch holds lists only, or samples only": len(lists) in (0, len(rollouts))}
    )
    for rollout in lists:
        ids = {sample.rollout_id for sample in rollout}
        demand(
            {
                "a rollout has a sample": rollout,
                "samples of one rollout share a rollout_id": len(ids) == 1 and None not in ids,
                "and a group": len({sample.group_index for sample in rollout}) == 1,
                "slime rewards no list that holds an aborted sample": len(
                    {sample.status.name == "ABORTED" for sample in rollout}
                )
                == 1,
            }
        )
    samples = [sample for rollout in lists for sample in rollout] if lists else rollouts
    owners = {}
    for sample in samples:
        check_tokens(sample, tokenizer)
        check_facts(sample, args, replayed)
        check_replay(sample, args, replayed)
        for name in ("tokens", "loss_mask", "rollout_log_probs", "weight_versions", "metadata", "prefix_cache_info"):
            other = owners.setdefault(id(getattr(sample, name)), sample)
            demand({f"samples do not share their {name}": other is sample})
    if replayed:
        convert([sample for sample in samples if sample.status.name != "ABORTED"], args)


def check_tokens(sample, tokenizer):
    length, tokens, mask, logprobs = (
        sample.response_length,
        sample.tokens,
        sample.loss_mask,
        sample.rollout_log_probs,
    )
    demand(
        {
            "the response has a token": type(length) is int and length >= 1,
            "the prompt has a token": type(tokens) is list and len(tokens) > length,
            "tokens are ints": all(type(token) is int and token >= 0 for token in tokens),
            "one mask entry per response token": type(mask) is list and len(mask) == length,
            "a mask is 0 or 1": all(type(one) is int and one in (0, 1) for one in mask),
            "one logprob per response token": type(logprobs) is list and len(logprobs) == length,
            "logprobs are finite floats": all(type(one) is float and math.isfinite(one) for one in logprobs),
            "a logprob is 0.0 where the mask is 0": not any(
                one for one, trained in zip(logprobs, mask, strict=True) if not trained
            ),
            "the response's text is that of its tokens": sample.response
            == tokenizer.decode(tokens[-length:], skip_special_tokens=False),
        }
    )


def check_facts(sample, args, trained):
    """How it ended, and what is logged, kept and sent on."""
    status, reward, removed = sample.status.name, sample.reward, sample.remove_sample
    versions, cache, waited = sample.weight_versions, sample.prefix_cache_info, sample.non_generation_time
    again = type(sample).from_dict(pickle.loads(pickle.dumps(sample.to_dict())))
    key = (None if trained else getattr(args, "eval_reward_key", None)) or getattr(args, "reward_key", None)
    demand(
        {
            "a sample that comes back has a status": status != "PENDING",
            "remove_sample is a bool": type(removed) is bool,
            "an aborted sample has no reward and is not removed": status != "ABORTED"
            or (reward is None and not removed),
            "a failed sample is removed: slime trains on it otherwise": status != "FAILED" or removed,
            "a removed sample has a reward: slime asks for one otherwise": not removed or reward is not None,
            "a removed sample has no token to train": not removed or not any(sample.loss_mask),
            "a reward is a finite number": reward is None or math.isfinite(float(reward[key] if key else reward)),
            "weight versions are a list of strings": type(versions) is list
            and all(type(one) is str for one in versions),
            "no more tokens were cached than there were": 0 <= cache.cached_tokens <= cache.total_prompt_tokens,
            "no logprobs of a teacher that read another response": sample.teacher_log_probs is None,
            "seconds are at least 0.0": type(waited) is float and waited >= 0,
            "metadata are a dictionary": type(sample.metadata) is dict,
            "a dictionary of the sample holds all of it": set(vars(again)) == set(vars(sample)),
            "and gives it back": again.tokens == sample.tokens and again.status is sample.status,
            "inputs of images are tensors": all(map(torch.is_tensor, (sample.multimodal_train_inputs or {}).values())),
        }
    )


def check_replay(sample, args, replayed):
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if replayed and getattr(args, "rollout_top_p", 1.0) != 1.0:
        demand({"top-p ids and offsets are there": ids is not None and offsets is not None})
        ids, offsets = torch.as_tensor(ids), torch.as_tensor(offsets)
        demand(
            {
                "top-p ids and offsets are int32": ids.dtype == offsets.dtype == torch.int32,
                "one offset more than response tokens": offsets.shape == (sample.response_length + 1,),
                "the offsets are those of the ids": int(offsets[0]) == 0 and int(offsets[-1]) == ids.numel(),
                "offsets do not go back": bool((offsets.diff() >= 0).all()),
            }
        )
        spans = [span.tolist() for span in ids.tensor_split(offsets[1:-1].long())]
        response = zip(sample.tokens[-sample.response_length :], sample.loss_mask, spans, strict=True)
        for token, mask, span in response:
            demand(
                {
                    "top-p kept every token that is trained, and tokens that are not have no ids": (token in span)
                    if mask
                    else not span
                }
            )
    else:
        demand({"no top-p ids where none are replayed": ids is None and offsets is None})
    experts = sample.rollout_routed_experts
    if replayed and getattr(args, "use_rollout_routing_replay", False):
        demand({"routed experts are there": experts is not None})
        experts = torch.as_tensor(experts)
        shape = (len(sample.tokens) - 1, args.num_layers, args.moe_router_topk)
        demand(
            {
                "routed experts are int32": experts.dtype == torch.int32,
                f"routed experts of shape {shape}, not {tuple(experts.shape)}": tuple(experts.shape) == shape,
                "no layer of zeros": args.moe_router_topk == 1 or bool((experts != 0).any(dim=2).any(dim=0).all()),
            }
        )
    else:
        demand({"no routed experts where none are replayed": experts is None})


def convert(samples, args):
    """The steps from samples to the tensors of a training batch; a reward that slime is to ask for is 1.0."""
    limit = getattr(args, "max_tokens_per_gpu", None) if getattr(args, "use_dynamic_batch_size", False) else None
    key = getattr(args, "reward_key", None)
    rewards = []
    for sample in samples:
        first = samples[0]
        mask = [0] * sample.response_length if sample.remove_sample else sample.loss_mask
        demand(
            {
                "conversion: a mask of the response's length": len(mask) == sample.response_length,
                "all have logprobs, or none": (first.rollout_log_probs is None) == (sample.rollout_log_probs is None),
                "all have train metadata, or none": (first.train_metadata is None) == (sample.train_metadata is None),
                "all have a round, or none": ("round_number" in first.metadata) == ("round_number" in sample.metadata),
            }
        )
        tokens = torch.tensor(sample.tokens, dtype=torch.long)
        logprobs = torch.tensor(sample.rollout_log_probs, dtype=torch.float32)
        padded = functional.pad(torch.tensor(mask, dtype=torch.int), (len(tokens) - len(mask) - 1, 1))
        demand(
            {
                "data: the mask is padded to all tokens": padded.shape == tokens.shape,
                "cp_utils: a logprob per response token": len(logprobs) == len(mask),
                "loss: logprobs are finite, masked ones too": bool(torch.isfinite(logprobs).all()),
                "it fits a batch": limit is None or len(tokens) <= limit * getattr(args, "context_parallel_size", 1),
            }
        )
        rewards.append(1.0 if sample.reward is None else sample.reward[key] if key else sample.reward)
    torch.tensor(rewards, dtype=torch.float)


# --- against the server's log ---


def check_against_server(
    samples,
    server,
    *,
    experts=None,
    all_trained=False,
):
    """Check the samples of one rollout against what the server was asked and answered.

    Args:
        samples: One sample or several.
        server: It answered no other rollout.
        experts: Its experts, if they are replayed.
        all_trained: Whether every token that it sampled is to be trained.
    """
    samples = samples if isinstance(samples, list) else [samples]
    answered = []
    for request, response in zip(server.requests, server.responses, strict=True):
        try:
            body = response.body if response is not None and response.status == 200 else {}
        except ValueError:
            continue  # a fault was scripted
        if "output_ids" not in body:
            continue
        meta = body["meta_info"]
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
        if samples[0].rollout_top_p_token_ids is not None:  # then training renormalizes over the kept ids
            logprobs = meta.get("output_token_sampling_logprobs") or logprobs
        answered.append((request.input_ids, body["output_ids"], logprobs))
    trained = set()
    for sample in samples:
        start = len(sample.tokens) - sample.response_length
        for number, mask in enumerate(sample.loss_mask):
            if not mask:
                continue
            tokens = sample.tokens[: start + number + 1]
            places = [  # the answer and position of the token
                (i, len(tokens) - len(prompt) - 1)
                for i, (prompt, output, _) in enumerate(answered)
                if len(prompt) < len(tokens) <= len(prompt) + len(output)
                and [*prompt, *output][: len(tokens)] == tokens
            ]
            new = [place for place in places if place not in trained]  # several may have sampled the same
            demand(
                {"a token that is trained was sampled after the tokens before it": places, "it is trained once": new}
            )
            trained.add(new[0])
            logprob = answered[new[0][0]][2][new[0][1]]
            demand({"and has the logprob that the server gave it": sample.rollout_log_probs[number] == logprob})
        if experts is not None and sample.rollout_routed_experts is not None and any(sample.loss_mask):
            rows = torch.as_tensor(sample.rollout_routed_experts).reshape(len(sample.tokens) - 1, -1).tolist()
            chosen = [experts.chosen(position, sample.tokens[position]) for position in range(len(rows))]
            demand({"a row has its token's experts": rows == chosen})
    count = sum(len(output) for _, output, _ in answered)
    promise = f"all of {count} sampled tokens are trained, not {len(trained)}"
    demand({promise: not all_trained or len(trained) == count})
