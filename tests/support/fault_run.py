"""Many episodes under faults, and a judge that compares their records with the servers' logs."""

import asyncio
import random
from collections import namedtuple

from strands import tool

from strands_sglang import TerminationReason, ToolLimiter, outcome_of, termination_reason
from support.agents import make_agent

# What a server logged for one request, independent of the client.
Sampled = namedtuple("Sampled", ["rid", "input_ids", "output_ids", "logprobs", "version"])

# One episode: its trajectory, its `TerminationReason`, and its exception or None.
Episode = namedtuple("Episode", ["trajectory", "reason", "error"])


@tool
async def calculator(expression: str) -> str:
    """Compute something.

    Args:
        expression: What.
    """
    return f"= {expression}"


async def run_episodes(count, make_model, *, concurrency, seed=0, cancelled=0.0):
    """Run concurrent episodes and cancel some of them, half by their task, half by their agent."""
    slots = asyncio.Semaphore(concurrency)

    async def run(number):
        rng = random.Random(f"{seed}:{number}")
        async with slots:
            model = make_model(number)
            limiter = ToolLimiter(max_tool_iters=25)
            agent = make_agent(model, [calculator], hooks=[limiter])
            task = asyncio.ensure_future(agent.invoke_async(f"Question {number}"))
            if rng.random() < cancelled:
                end = task.cancel if rng.random() < 0.5 else agent.cancel
                asyncio.get_running_loop().call_later(rng.expovariate(10), end)
            error = None
            try:
                reason = termination_reason(await task)
            except (Exception, asyncio.CancelledError) as raised:
                error, reason = raised, termination_reason(raised)
            model.trajectory.settle(agent.messages)
            return Episode(model.trajectory, reason, error)

    return await asyncio.gather(*(run(number) for number in range(count)))


def assert_all_end_in_the_table(episodes):
    for episode in episodes:
        assert isinstance(episode.reason, TerminationReason)
        trained = sum(sum(sequence.loss_mask) for sequence in episode.trajectory.sequences())
        outcome = outcome_of(episode.reason, sampled_tokens=trained)
        assert outcome.slime_status in ("COMPLETED", "TRUNCATED", "ABORTED", "FAILED"), episode
        assert episode.reason is not TerminationReason.AGENT_ERROR, repr(episode.error)


def assert_recorded_as_sampled(episodes, log):
    """Check that a server sampled every recorded turn for exactly its prompt; return the ids of the requests."""
    seen = set()
    for episode in episodes:
        turns = [turn for turn in episode.trajectory.turns if turn.generation is not None]
        for turn in turns:
            generation, ids, logprobs, versions = turn.generation, turn.token_ids(), [], []
            rids = [*generation.resumed_ids, generation.request_id]
            assert not seen & set(rids), "a generation is recorded twice"
            assert [rid for rid in rids if rid not in log] == [], "recorded, and no server knows of it"
            expected = ids[: len(ids) - len(turn.output_ids)]
            for part in map(log.get, rids):
                assert part.input_ids == expected
                expected = expected + part.output_ids
                logprobs += part.logprobs
                versions += [part.version] * len(part.output_ids)
            assert expected == ids
            assert generation.logprobs is not None
            assert generation.logprobs.tolist() == logprobs
            recorded = [None] * len(versions)
            for version, start, end in generation.weight_versions:
                recorded[start:end] = [version] * (end - start)
            assert recorded == versions
            seen |= set(rids)
        trained = sum(sum(sequence.loss_mask) for sequence in episode.trajectory.sequences(discarded=True))
        assert trained == sum(len(turn.output_ids) for turn in turns)
    return seen
