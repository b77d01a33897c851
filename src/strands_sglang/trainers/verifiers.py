"""verifiers and prime-rl: episodes as message graphs, and back.

A graph has a node for each message, with the tokens that it adds; a branch is a path from a root to a leaf. Forks share
their trunk's nodes, so a consumer must train a shared node in one branch only, as prime-rl does. `from_record` does.
What a node has no field for is in the trace's `info["strands_sglang"]`: versions of the weights, agents, the outcome.
verifiers is imported by `to_episode` only; docs/guides/verifiers.md shows both directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..credit import Episode
from ..outcomes import TerminationReason
from ..protocol.generation import clip_spans
from ..trajectory.trajectory import Trajectory
from ..trajectory.turn import Turn
from .records import RecordedCall, RecordError, add_call, left_out_reason, name_in, spans_in, trained_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from verifiers.v1.episode import WireEpisode
    from verifiers.v1.trace import WireTrace

_INFO = "strands_sglang"
_FINISH_REASONS = ("stop", "length")  # verifiers has no word for an abort


def to_episode(
    episode: Episode,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    advantages: Mapping[int, float] | None = None,
    max_tokens: int | None = None,
) -> WireEpisode:
    """Return an episode in the form of verifiers, with one trace.

    An episode that cannot be trained has mask False everywhere and `agent.trainable` False; its trace has an error that
    says why, and the log does, too. So has one without a reward, which verifiers would count as 0.

    Args:
        episode: The episode.
        tokenizer: The tokenizer of the served model, for the messages' text. By default they have none.
        advantages: Advantages by turn, from
            [`TrainingRows.advantages`][strands_sglang.credit.TrainingRows], for `MessageNode.advantages`. By default
            the consumer computes them.
        max_tokens: Maximum length of a row in tokens, the trainer's budget.

    Raises:
        ValueError: The episode has images, or rewards of turns without `advantages`, which verifiers cannot express.
    """
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.episode import GroupInfo, WireEpisode
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import AgentInfo, Error, Reward, TraceTask, WireTrace

    if episode.turn_rewards and advantages is None:
        raise ValueError(
            "verifiers has one reward per episode: pass advantages=rows.advantages[episode.id] for rewards of turns"
        )
    reason = left_out_reason(episode, max_tokens)
    trace = WireTrace(
        id=episode.id,
        task=TraceTask(type="strands", data=WireTaskData(), key=str(episode.group)),
        agent=AgentInfo(config=WireAgentConfig(), trainable=reason is None),
        rewards={"reward": None if episode.reward is None else Reward(score=episode.reward)},
        is_completed=True,
        ok=reason is None,
        errors=[] if reason is None else [Error(type="LeftOut", message=reason)],
        info={_INFO: {"outcome": None if episode.outcome is None else episode.outcome.value}},
    )
    _add_turns(trace, episode, tokenizer, advantages if reason is None else None)
    return WireEpisode(
        id=episode.id, task=trace.task, group=GroupInfo(id=str(episode.group)), ok=reason is None, traces=[trace]
    )


def _add_turns(
    trace: WireTrace,
    episode: Episode,
    tokenizer: PreTrainedTokenizerBase | None,
    advantages: Mapping[int, float] | None,
) -> None:
    """Add the nodes and calls of an episode's turns to a trace."""
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import ModelCall
    from verifiers.v1.types import AssistantMessage, Usage, UserMessage

    shown = trained_turns(episode.trajectory)
    cuts: dict[int, set[int]] = {}  # where a turn's answer is cut, because a call forks there
    for turn, _ in shown:
        if turn.images is not None:
            raise ValueError(f"episode {episode.id} has images: this graph has token ids only; train it with slime")
        if turn.parent is not None and turn.parent_kept is not None:
            cuts.setdefault(turn.parent.index, set()).add(turn.parent_kept)
    ends: dict[int, dict[int, int]] = {}  # by turn: the node that ends after so many sampled tokens
    versions: dict[str, list[list[Any]]] = {}
    agents: dict[str, str] = {}
    text = (lambda ids: tokenizer.decode(list(ids))) if tokenizer is not None else (lambda ids: "")
    for turn, trained in shown:
        generation, parent, node = turn.generation, turn.parent, None
        assert generation is not None
        trained = trained if trace.agent.trainable else 0
        if parent is not None:
            node = ends[parent.index][len(parent.output_ids) if turn.parent_kept is None else turn.parent_kept]
        prompt = list(turn.prompt_ids)
        message = UserMessage(content=text(prompt))
        trace.nodes.append(MessageNode(parent=node, message=message, token_ids=prompt, mask=[False] * len(prompt)))
        count, start = len(generation.output_ids), 0
        turn_ends = ends[turn.index] = {}
        for stop in sorted({*cuts.get(turn.index, ()), count}):
            here = max(0, min(trained, stop) - start)
            ids = list(generation.output_ids[start:stop])
            trace.nodes.append(
                MessageNode(
                    parent=len(trace.nodes) - 1,
                    message=AssistantMessage(content=text(ids)),
                    sampled=True,
                    token_ids=ids,
                    mask=[True] * here + [False] * (len(ids) - here),
                    logprobs=[] if generation.logprobs is None else list(generation.logprobs[start : start + here]),
                    advantages=None if advantages is None else [advantages.get(turn.index, 0.0)] * here,
                )
            )
            turn_ends[stop] = len(trace.nodes) - 1
            if turn.agent is not None:
                agents[str(turn_ends[stop])] = turn.agent
            versions[str(turn_ends[stop])] = [
                [version, max(first, start) - start, min(last, stop) - start]
                for version, first, last in generation.weight_versions
                if first < stop and last > start
            ]
            start = stop
        cached = generation.cached_tokens
        usage = Usage(
            prompt_tokens=generation.prompt_tokens - cached, completion_tokens=count, cached_input_tokens=cached
        )
        reason = generation.finish_type if generation.finish_type in _FINISH_REASONS else None
        trace.calls.append(ModelCall(node=turn_ends[count], finish_reason=reason, usage=usage))
    trace.info[_INFO] |= {"weight_versions": versions, "agents": agents}


def from_record(record: Any) -> list[Episode]:
    """Return the episodes of a record: their trajectories give rows, and can be saved and shown.

    Each trace is an episode. Nodes that several branches share are trained once. A trace that failed, or whose agent is
    not trainable, has no reward. A branch that verifiers does not train is discarded.

    Args:
        record: An `Episode` or a `Trace` of verifiers, or the JSON content that its `to_record` returns; verifiers need
            not be installed for the latter. Note that `to_record()` rounds logprobs to 4 decimals by default.

    Raises:
        ValueError: The record is neither, or a node's columns do not fit each other, or a token is trained that the
            model did not sample. The message names the node.
    """
    content = record if isinstance(record, Mapping) else record.model_dump()
    traces = content.get("traces") if "nodes" not in content else [content]
    if not isinstance(traces, Sequence) or not all(isinstance(trace, Mapping) for trace in traces):
        raise ValueError("not a record of verifiers: an episode has traces, and a trace has nodes")
    episodes = []
    for trace in traces:
        try:
            episodes.append(_episode(content, trace))
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"trace {trace.get('id')!r} is malformed: {error!r}") from error
    return episodes


def _episode(record: Mapping[str, Any], trace: Mapping[str, Any]) -> Episode:
    info = (trace.get("info") or {}).get(_INFO) or {}
    rewards = [reward for reward in (trace.get("rewards") or {}).values() if reward is not None]
    is_trained = trace.get("ok") and trace["agent"].get("trainable", True) and rewards
    group = (record.get("group") or {}).get("id") or trace["task"].get("key") or trace["task"].get("hash")
    reward = math.fsum(reward["score"] * reward.get("weight", 1.0) for reward in rewards) if is_trained else None
    outcome = TerminationReason(info["outcome"]) if info.get("outcome") else None
    trajectory = Trajectory.of_turns(_turns(trace, info))
    errors = [f"{error['type']}: {error['message']}" for error in trace.get("errors") or ()]
    trajectory.note_end(outcome=outcome, reward=reward, error=errors[-1] if errors else None)
    return Episode(
        trajectory,
        reward,
        name_in(group, "the group of the episode"),
        name_in(trace["id"], "the id of the trace", str),
        outcome=outcome,
    )


def _turns(trace: Mapping[str, Any], info: Mapping[str, Any]) -> list[Turn]:
    """Return the turns of a trace: one for each node that a model call produced."""
    nodes = trace["nodes"]
    kept = set(_kept_nodes(nodes))
    finish = {call.get("node"): call.get("finish_reason") for call in trace.get("calls") or ()}
    # Where each node ends: a turn, and the tokens after it that no call has had in its prompt yet.
    places: list[tuple[Turn | None, list[int]]] = []
    turns: list[Turn] = []
    for number, node in enumerate(nodes):
        name, ids, mask = f"node {number}", node.get("token_ids") or [], node.get("mask") or []
        parent = node.get("parent")
        if parent is not None and not 0 <= parent < number:
            raise ValueError(f"{name}: its parent {parent} is not an earlier node")
        before, pending = (None, []) if parent is None else places[parent]
        if len(mask) != len(ids):
            raise ValueError(f"{name}: {len(ids)} tokens with {len(mask)} masks")
        if any(value not in (0, 1) for value in mask):
            raise ValueError(f"{name}: its mask has a value that is not 0 or 1")
        if not node.get("sampled"):
            if any(mask):
                message = f"{name}: token {mask.index(True)} is trained, but the model did not sample it"
                raise RecordError(message, "mask-not-sampled")
            places.append((before, [*pending, *ids]))
            continue
        if not ids:  # verifiers records calls without tokens, too
            places.append((before, pending))
            continue
        # The prompt of a generation is on its node, and perhaps what the template writes after it.
        first, last = 0, len(mask)
        if any(mask):
            first = mask.index(True)
            last -= mask[::-1].index(True)
        logprobs = node.get("logprobs") or ()
        if sum(mask) != len(logprobs):
            raise RecordError(f"{name}: {sum(mask)} trained tokens with {len(logprobs)} logprobs", "logprobs")
        known = iter(logprobs)
        call = RecordedCall(
            name=name,
            prompt_ids=[*pending, *ids[:first]],
            output_ids=ids[first:last],
            mask=mask[first:last],
            logprobs=[next(known) if is_trained else math.nan for is_trained in mask[first:last]],
            versions=clip_spans(
                spans_in((info.get("weight_versions") or {}).get(str(number)), len(ids), name), first, last
            ),
            finish_type=finish.get(number) or "stop",
            agent=(info.get("agents") or {}).get(str(number)),
            discarded=number not in kept,
        )
        place = None if before is None else (before, None)
        added = add_call(turns, call, place, f"node {parent}")
        places.append((added[-1], list(ids[last:])))
    return turns


def _kept_nodes(nodes: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """Yield the nodes of the branches that verifiers trains.

    A compaction that was attempted and that no later node resumes from is none of them.
    """
    links = [node.get("semantic_parents") or () for node in nodes]
    resumed = {link["node"] for link in chain.from_iterable(links) if link["type"] == "compaction"}
    inner = {node.get("parent") for node in nodes}
    seen: set[int] = set()
    for leaf in (number for number in range(len(nodes)) if number not in inner):
        if leaf not in resumed and any(link["type"] == "compaction_attempt" for link in links[leaf]):
            continue
        number: int | None = leaf
        while number is not None and number not in seen:
            seen.add(number)
            yield number
            number = nodes[number].get("parent")
