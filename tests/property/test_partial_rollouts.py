"""Partial rollouts of slime's that are aborted at random, again and again, and go on from what they had."""

import copy
import random
from collections import Counter

from strands_sglang.testing import ScriptedAnswer, ScriptedFault
from support.slime import (
    ANSWER,
    CALL,
    EXPERTS,
    QUESTION,
    Rollouts,
    Sample,
    check_against_server,
    check_rollouts,
    moe_args,
    slime_args,
    slime_sampling_params,
)


class Aborting:
    """Answers at random, and has slime abort in the middle of some answers."""

    def __init__(self, rng):
        self.rng = rng
        self.state = None

    def __call__(self, request):
        rng = self.rng
        self.state.aborted = self.state.aborted or rng.random() < 0.35
        draw = rng.random()
        if draw < 0.05:
            return ScriptedFault("drop")
        if draw < 0.10:
            return ScriptedAnswer("half an", finish_reason="abort")  # a weight update
        if self.state.aborted and draw < 0.5:
            return ScriptedAnswer(CALL[: rng.randrange(len(CALL))], finish_reason="abort")  # of none in the queue
        return CALL if draw < 0.55 else ANSWER


async def test_partial_rollouts_keep_their_tokens_whenever_they_are_aborted(chatml_tokenizer):
    rollout_count = 200
    most_parts = 12
    ends = Counter()
    for seed in range(rollout_count):
        rng = random.Random(seed)
        answers = Aborting(rng)
        rollouts = Rollouts(
            chatml_tokenizer,
            answers,
            max_tool_iters=4,
            server={"experts": EXPERTS},
            model_config={"on_abort": rng.choice(["raise", "resume"])},
            client_settings={"max_retries": 4, "retry_delay": 0.0},
        )
        answers.state = rollouts.state
        params = slime_sampling_params(max_new_tokens=rng.choice([60, 200, 1000]))
        masked = rng.random() < 0.3
        args = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": masked, **moe_args()}
        sample = Sample(index=3, group_index=1, prompt=QUESTION)
        for part in range(most_parts):
            rollouts.state.aborted = rng.random() < 0.1
            kept = sample.tokens if any(sample.loss_mask or ()) else []
            sample = await rollouts(Sample.from_dict(copy.deepcopy(sample.to_dict())), params=params, **args)
            assert sample.tokens[: len(kept)] == kept, seed
            if sample.tokens:  # else slime aborted before the first request
                check_rollouts(sample, slime_args(**args), chatml_tokenizer)
                check_against_server(sample, rollouts.server, experts=EXPERTS)
                assert sample.response_length <= params["max_new_tokens"], seed
            if sample.status.name != "ABORTED":
                ends[sample.status.name, part > 0] += 1
                break
    assert set(ends) >= {("COMPLETED", True), ("COMPLETED", False), ("TRUNCATED", True), ("TRUNCATED", False)}, ends
