"""Whether slime can use samples: what its conversion to training data, its loss and its data buffer rely on.

Written from a description of slime (its `ray/rollout.py`, `rollout_data_utils.py`, `data.py`, `cp_utils.py`,
`ppo_utils.py`, `sglang_rollout.py`) and from nothing of the code that makes the samples. Two checks:

- `check_rollouts`: the samples of a batch, by themselves: shapes, values, statuses, rewards, and the steps that slime
  takes with them.
- `check_against_server`: the samples against the log of the server that answered: every token to train was sampled
  there after exactly the tokens before it, with that logprob and those experts, and is trained once.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from strands_sglang.testing import ScriptedExperts, ScriptedSGLang

LOGGED_STATUSES = ("COMPLETED", "TRUNCATED", "ABORTED", "FAILED")
OWNED_LISTS = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions", "metadata", "prefix_cache_info")


class SlimeViolationError(AssertionError):
    """slime could not use a sample, or would train on something wrong."""


def demand(holds: Any, promise: str) -> None:
    if not holds:
        raise SlimeViolationError(promise)


def flat(rollouts: Sequence[Any]) -> list[Any]:
    """The samples of rollouts, as slime takes lists apart: by the look of the first one."""
    if isinstance(rollouts[0], list):
        demand(all(isinstance(one, list) for one in rollouts), "a batch holds lists only, or samples only")
        return [sample for rollout in rollouts for sample in rollout]
    demand(not any(isinstance(one, list) for one in rollouts), "a batch holds lists only, or samples only")
    return list(rollouts)


def check_rollouts(rollouts: Any, args: Any, tokenizer: Any, *, replayed: bool = True) -> None:
    """Check what `generate` or `to_slime_samples` returned, one result or a list of results of one kind.

    Args:
        rollouts: A sample, or a list of samples or of lists of samples.
        args: slime's arguments.
        tokenizer: The model's.
        replayed: Whether the samples are to be trained on, and so hold what training replays.
    """
    rollouts = rollouts if isinstance(rollouts, list) else [rollouts]
    demand(rollouts, "there is a sample")
    samples = flat(rollouts)
    for sample in samples:
        check_tokens(sample, tokenizer)
        check_end(sample, args, replayed)
        check_replay(sample, args, replayed)
        check_facts(sample)
    if isinstance(rollouts[0], list):
        for rollout in rollouts:
            check_fan_out(rollout)
    check_nothing_shared(samples)
    if replayed:
        convert([sample for sample in samples if sample.status.name != "ABORTED"], args)


def check_tokens(sample: Any, tokenizer: Any) -> None:
    length, tokens = sample.response_length, sample.tokens
    demand(type(length) is int and length >= 1, "the response has a token")
    demand(type(tokens) is list and len(tokens) > length, "the prompt has a token")
    demand(all(type(token) is int and token >= 0 for token in tokens), "tokens are ints")
    demand(type(sample.loss_mask) is list and len(sample.loss_mask) == length, "one mask entry per response token")
    demand(all(type(mask) is int and mask in (0, 1) for mask in sample.loss_mask), "a mask is 0 or 1")
    logprobs = sample.rollout_log_probs
    demand(type(logprobs) is list and len(logprobs) == length, "one logprob per response token")
    demand(all(type(one) is float and math.isfinite(one) for one in logprobs), "logprobs are finite floats")
    unmasked = [one for one, mask in zip(logprobs, sample.loss_mask, strict=True) if not mask]
    demand(not any(unmasked), "a logprob is 0.0 where the mask is 0")
    text = tokenizer.decode(tokens[-length:], skip_special_tokens=False)
    demand(sample.response == text, "the response's text is that of its tokens")


def check_end(sample: Any, args: Any, trained: bool) -> None:
    status, reward = sample.status.name, sample.reward
    demand(status in LOGGED_STATUSES, "a sample that comes back has a status")
    demand(type(sample.remove_sample) is bool, "remove_sample is a bool")
    if status == "ABORTED":
        demand(reward is None and not sample.remove_sample, "an aborted sample has no reward and is not removed")
        return
    if status == "FAILED":
        demand(sample.remove_sample, "a failed sample is removed: slime trains on it otherwise")
    if sample.remove_sample:
        demand(reward is not None, "a removed sample has a reward: slime asks for one otherwise")
        demand(not any(sample.loss_mask), "a removed sample has no token to train")
    if reward is not None:
        key = (None if trained else getattr(args, "eval_reward_key", None)) or getattr(args, "reward_key", None)
        value = reward[key] if key else reward
        demand(math.isfinite(float(value)), "a reward is a finite number")


def check_replay(sample: Any, args: Any, replayed: bool) -> None:
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if replayed and getattr(args, "rollout_top_p", 1.0) != 1.0:
        demand(ids is not None and offsets is not None, "top-p ids and offsets are there")
        ids, offsets = _int32(ids, "top-p ids"), _int32(offsets, "top-p offsets")
        demand(offsets.shape == (sample.response_length + 1,), "one offset more than response tokens")
        demand(int(offsets[0]) == 0 and int(offsets[-1]) == ids.numel(), "the offsets are those of the ids")
        widths = offsets.diff()
        demand(bool((widths >= 0).all()), "offsets do not go back")
        response = sample.tokens[-sample.response_length :]
        for number, mask in enumerate(sample.loss_mask):
            span = ids[int(offsets[number]) : int(offsets[number + 1])].tolist()
            demand(not mask or response[number] in span, "top-p kept every token that is trained")
            demand(mask or not span, "tokens that are not trained have an empty span")
    else:
        demand(ids is None and offsets is None, "no top-p ids where none are replayed")
    experts = sample.rollout_routed_experts
    if replayed and getattr(args, "use_rollout_routing_replay", False):
        demand(experts is not None, "routed experts are there")
        experts = _int32(experts, "routed experts")
        shape = (len(sample.tokens) - 1, args.num_layers, args.moe_router_topk)
        demand(tuple(experts.shape) == shape, f"routed experts of shape {shape}, not {tuple(experts.shape)}")
        demand(args.moe_router_topk == 1 or bool((experts != 0).any(dim=2).any(dim=0).all()), "no layer of zeros")
    else:
        demand(experts is None, "no routed experts where none are replayed")


def _int32(value: Any, name: str) -> torch.Tensor:
    tensor = torch.as_tensor(value)
    demand(tensor.dtype == torch.int32, f"{name} are int32")
    return tensor


def check_facts(sample: Any) -> None:
    """What is logged, kept and sent on."""
    demand(type(sample.weight_versions) is list, "weight versions are a list")
    demand(all(type(version) is str for version in sample.weight_versions), "weight versions are strings")
    cache = sample.prefix_cache_info
    demand(0 <= cache.cached_tokens <= cache.total_prompt_tokens, "no more tokens were cached than there were")
    demand(sample.teacher_log_probs is None, "no logprobs of a teacher that read another response")
    demand(type(sample.non_generation_time) is float and sample.non_generation_time >= 0, "seconds are at least 0.0")
    demand(type(sample.metadata) is dict, "metadata are a dictionary")
    again = type(sample).from_dict(pickle.loads(pickle.dumps(sample.to_dict())))
    demand(set(vars(again)) == set(vars(sample)), "a dictionary of the sample holds all of it")
    demand(again.tokens == sample.tokens and again.status is sample.status, "and gives it back")
    for value in (sample.multimodal_train_inputs or {}).values():
        demand(torch.is_tensor(value), "inputs of images are tensors")


def check_fan_out(rollout: list[Any]) -> None:
    demand(rollout, "a rollout has a sample")
    ids = {sample.rollout_id for sample in rollout}
    demand(len(ids) == 1 and None not in ids, "samples of one rollout share a rollout_id")
    demand(len({sample.group_index for sample in rollout}) == 1, "and a group")
    aborted = [sample.status.name == "ABORTED" for sample in rollout]
    demand(all(aborted) or not any(aborted), "slime rewards no list that holds an aborted sample")


def check_nothing_shared(samples: list[Any]) -> None:
    owners: dict[int, Any] = {}
    for sample in samples:
        for name in OWNED_LISTS:
            value = getattr(sample, name)
            other = owners.setdefault(id(value), sample)
            demand(other is sample, f"samples do not share their {name}")


def convert(samples: list[Any], args: Any) -> None:
    """The steps from samples to the tensors of a training batch; a reward that slime is to ask for is 1.0."""
    if not samples:
        return
    data: dict[str, list[Any]] = {"tokens": [], "loss_masks": [], "rollout_log_probs": [], "rewards": []}
    first = samples[0]
    for sample in samples:
        mask = [0] * sample.response_length if sample.remove_sample else sample.loss_mask
        demand(len(mask) == sample.response_length, "conversion: a mask of the response's length")
        demand((first.rollout_log_probs is None) == (sample.rollout_log_probs is None), "all have logprobs, or none")
        demand((first.train_metadata is None) == (sample.train_metadata is None), "all have train metadata, or none")
        demand(("round_number" in first.metadata) == ("round_number" in sample.metadata), "all have a round, or none")
        data["tokens"].append(torch.tensor(sample.tokens, dtype=torch.long))
        data["loss_masks"].append(torch.tensor(mask, dtype=torch.int))
        data["rollout_log_probs"].append(torch.tensor(sample.rollout_log_probs, dtype=torch.float32))
        key = getattr(args, "reward_key", None)
        asked = {key: 1.0} if key else 1.0
        reward = asked if sample.reward is None else sample.reward
        data["rewards"].append(reward[key] if key else reward)
    torch.tensor(data["rewards"], dtype=torch.float)
    limit = getattr(args, "max_tokens_per_gpu", None) if getattr(args, "use_dynamic_batch_size", False) else None
    for tokens, mask, logprobs in zip(data["tokens"], data["loss_masks"], data["rollout_log_probs"], strict=True):
        prompt_length = len(tokens) - len(mask)
        padded = functional.pad(mask, (prompt_length - 1, 1))
        demand(padded.shape == tokens.shape, "data: the mask is padded to all tokens")
        demand(len(logprobs) == len(mask), "cp_utils: a logprob per response token")
        demand(bool(torch.isfinite(logprobs).all()), "loss: logprobs are finite, masked ones too")
        demand(limit is None or len(tokens) <= limit * getattr(args, "context_parallel_size", 1), "it fits a batch")


# --- against the server's log ---


def check_against_server(
    samples: Any,
    server: ScriptedSGLang,
    *,
    experts: ScriptedExperts | None = None,
    all_trained: bool = False,
) -> None:
    """Check the samples of one rollout against what the server was asked and answered.

    Args:
        samples: One sample or several.
        server: It answered no other rollout.
        experts: Its experts, if they are replayed.
        all_trained: Whether every token that it sampled is to be trained.
    """
    samples = samples if isinstance(samples, list) else [samples]
    answered: list[tuple[list[int], list[int], list[float]]] = []
    for request, response in zip(server.requests, server.responses, strict=True):
        try:
            body = response.body if response is not None and response.status == 200 else {}
        except ValueError:
            continue  # a fault was scripted
        if "output_ids" not in body:
            continue
        logprobs = [entry[0] for entry in body["meta_info"].get("output_token_logprobs") or ()]
        answered.append((request.input_ids, body["output_ids"], logprobs))
    trained: set[tuple[int, int]] = set()
    for sample in samples:
        start = len(sample.tokens) - sample.response_length
        for number, mask in enumerate(sample.loss_mask):
            if not mask:
                continue
            places = _sampled_at(answered, sample.tokens, start + number)
            demand(places, "a token that is trained was sampled after the tokens before it")
            places = [place for place in places if place not in trained]  # several may have sampled the same
            demand(places, "a token is trained once")
            trained.add(places[0])
            logprob = answered[places[0][0]][2][places[0][1]]
            demand(sample.rollout_log_probs[number] == logprob, "and has the logprob that the server gave it")
        if experts is not None and sample.rollout_routed_experts is not None and any(sample.loss_mask):
            rows = torch.as_tensor(sample.rollout_routed_experts).reshape(len(sample.tokens) - 1, -1).tolist()
            for position, row in enumerate(rows):
                demand(row == experts.chosen(position, sample.tokens[position]), "a row has its token's experts")
    if all_trained:
        count = sum(len(output) for _, output, _ in answered)
        demand(len(trained) == count, f"all of {count} sampled tokens are trained, not {len(trained)}")


def _sampled_at(
    answered: list[tuple[list[int], list[int], list[float]]], tokens: list[int], position: int
) -> list[tuple[int, int]]:
    """Which answers' which token stands at a position of a sequence."""
    found = []
    for number, (prompt, output, _) in enumerate(answered):
        offset = position - len(prompt)
        if 0 <= offset < len(output) and [*prompt, *output[: offset + 1]] == tokens[: position + 1]:
            found.append((number, offset))
    return found
