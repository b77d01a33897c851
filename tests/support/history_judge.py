"""Judges a random episode from outside: by plain comparison of the conversations, and by the server's own log.

What a call must extend is decided here by comparing messages as text; what was sent and sampled is taken from the
server's requests and responses; what stands in a prompt is found by the marks of the messages in the decoded ids. The
library is asked for nothing but what is judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from strands_sglang import TokenManager, Trajectory, TurnStatus

from .history_log import Call, Message, Notebook, ViolationError, as_line, require, require_equal

_MARK = re.compile(r"m\d+x")
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
_GENERATION_PROMPT = "<|im_start|>assistant\n"
_CONTROL = re.compile(r"<\|(?:im_start|im_end|endoftext)\|>")
_OTHER_STOP = "<|endoftext|>"


Provable = Callable[[Call, Call], bool]
"""Whether the text between an earlier call and one that goes on from it can be told from the chat template."""


class Judge:
    """Judges one episode."""

    def __init__(self, notebook: Notebook, tokenizer: Any, provable: Provable) -> None:
        """Find out what each call had to extend.

        Args:
            notebook: What was asked, and the server's log.
            tokenizer: Decodes.
            provable: Where not, a call may not extend the earlier one.

        Raises:
            ViolationError: The ids that were sent do not go on from that call.
        """
        self.calls, self._notices, self._tokenizer = notebook.calls, notebook.notices, tokenizer
        self._other_stop = tokenizer.convert_tokens_to_ids(_OTHER_STOP)
        has_agents = False
        for call in self.calls:
            call.is_auxiliary = call.is_structured or (has_agents and call.owner is None)
            has_agents = has_agents or call.owner is not None
            self._place(call, provable)
            self._check_prompt(call)

    # --- what was sent ---

    def _place(self, call: Call, provable: Provable) -> None:
        """Find the call that this one has to extend: the deepest one whose conversation and answer it begins with."""
        begins = [
            earlier
            for earlier in self.calls[: call.index]
            if earlier.full is not None
            and earlier.known_from <= call.index
            and (earlier.system, earlier.tools) == (call.system, call.tools)
            and call.asked[: len(earlier.full)] == earlier.full
        ]
        depth = max((len(earlier.full or ()) for earlier in begins), default=0)
        deepest = [earlier for earlier in begins if len(earlier.full or ()) == depth]
        # Of several that said the same after the same, an agent goes on from its own.
        own = [earlier for earlier in deepest if earlier.owner == call.owner] or deepest
        own = [earlier for earlier in own if provable(earlier, call)]
        if not own:
            return
        for earlier in reversed(own):
            kept = len(earlier.output_ids) - (earlier.output_ids[-1:] == [self._other_stop])
            before = earlier.input_ids + earlier.output_ids[:kept]
            if call.input_ids[: len(before)] == before:
                call.parent, call.kept = earlier, kept
                return
        facts = {"call": call.index, "goes on from": [earlier.index for earlier in own]}
        raise ViolationError(
            "what goes on from a call extends its ids", {**facts, "prompt": self._decode(call.input_ids)}
        )

    def _check_prompt(self, call: Call) -> None:
        """The prompt is well formed, and holds each message once, in order, under its role, and nothing else."""
        text = self._decode(call.input_ids)
        turns = _TURN.findall(text)
        whole = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns) + _GENERATION_PROMPT
        require(
            text == whole and not any(_CONTROL.search(said) for _, said in turns),
            "a prompt is a chat",
            call=call.index,
            prompt=text,
        )
        found = [(role, mark) for role, said in turns for mark in _MARK.findall(said)]
        tools = [("system", mark) for mark in _MARK.findall(call.tools)]
        require([entry for entry in found if entry in tools] == tools, "each tool is told once", call=call.index)
        found = [entry for entry in found if entry not in tools]
        i = 0
        for role, mark, is_needed in self._expected(call):
            if i < len(found) and found[i] == (role, mark):
                i += 1
            else:
                require(not is_needed, "no message is missing", call=call.index, mark=mark, role=role, prompt=text)
        require(i == len(found), "nothing else is in the prompt", call=call.index, found=found[i:], prompt=text)

    def _expected(self, call: Call) -> list[tuple[str, str, bool]]:
        """The marks that a prompt has to hold: role, mark, and whether it may not be left out.

        Templates leave earlier reasoning out; a call that did not parse is in the sampled ids, but not in a message.
        """
        expected = [("system", mark, True) for mark in _MARK.findall(call.system or "")]
        uses: list[str] = []
        for message in call.messages:
            results: list[tuple[int, list[tuple[str, str, bool]]]] = []
            others: list[list[tuple[str, str, bool]]] = [[], [], []]  # reasoning, text, calls
            for block in message["content"]:
                marks = [(message["role"], mark, "reasoningContent" not in block) for mark in _MARK.findall(str(block))]
                use_id = block.get("toolUse", block.get("toolResult", {})).get("toolUseId")
                if use_id in self._notices:
                    marks = [(message["role"], self._notices[use_id], "toolResult" in block)]
                if "toolResult" in block:
                    results.append((uses.index(use_id) if use_id in uses else len(uses), marks))
                else:
                    others[0 if "reasoningContent" in block else 2 if "toolUse" in block else 1] += marks
            if message["role"] == "assistant":
                uses = [block["toolUse"]["toolUseId"] for block in message["content"] if "toolUse" in block]
            for _, marks in sorted(results, key=lambda result: result[0]):
                expected += marks
            expected += [entry for kind in others for entry in kind]
        return expected

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    # --- what was recorded ---

    def judge(self, trajectory: Trajectory) -> dict[str, int]:
        """Compare everything that a trajectory holds with what was sent and sampled.

        Returns:
            How many calls there were, how many of them extended an earlier one, how many forked (had earlier ones and
            began anew, or went another way than one before), the number of sequences; and whether any call did.

        Raises:
            ViolationError: They differ.
        """
        self._check_turns(trajectory)
        leaves = self.leaves()
        sequences = trajectory.sequences(discarded=True, auxiliary=True)
        require(
            len(sequences) == len(leaves),
            "there are as many sequences as it takes",
            n=len(sequences),
            least=len(leaves),
        )
        trained: dict[int, int] = {}
        for leaf, sequence in zip(leaves, sequences, strict=True):
            self._check_sequence(leaf, sequence, trained)
        # What the masks say is compared token by token; that they cover everything is counted on its own.
        sampled = sum(len(call.output_ids) for call in self._recorded() if not call.is_structured)
        masks = sum(sum(sequence.loss_mask) for sequence in sequences)
        require(masks == sampled, "each sampled token is trained once", masks=masks, sampled=sampled)
        discarded = {turn.index for turn in trajectory.turns if turn.status is TurnStatus.DISCARDED}
        self._check_main(trajectory.latest_main_sequence(), discarded)
        extended = sum(call.parent is not None for call in self.calls)
        forked = sum(map(self._is_fork, self.calls))
        return {
            "cases": 1,
            "calls": len(self.calls),
            "extending calls": extended,
            "forking calls": forked,
            "extending cases": int(extended > 0),
            "forking cases": int(forked > 0),
            "sequences": len(sequences),
        }

    def leaves(self) -> list[Call]:
        """The calls that sequences end with, in their order; fewer could not hold every sampled token.

        A call from outside the agents' loops goes on in a sequence of its own, and a sampled token that a later call
        did not keep has to stand at the end of one.
        """
        covered = {
            id(call.parent)
            for call in self._recorded()
            if call.parent is not None
            and call.kept == len(call.parent.output_ids)
            and (call.parent.is_auxiliary or not call.is_auxiliary)
        }
        leaves = [call for call in self._recorded() if id(call) not in covered]
        return sorted(leaves, key=lambda call: (call.is_auxiliary, call.outcome == "cut", call.index))

    def _recorded(self) -> list[Call]:
        return [call for call in self.calls if call.outcome != "failed"]

    def _is_fork(self, call: Call) -> bool:
        earlier = self.calls[: call.index]
        if call.parent is None:
            return any(other.outcome != "failed" for other in earlier)
        return call.kept < len(call.parent.output_ids) or any(other.parent is call.parent for other in earlier)

    def _check_turns(self, trajectory: Trajectory) -> None:
        turns = {turn.index: turn for turn in trajectory.turns}
        for call in self._recorded():
            require(call.index in turns, "each answered call is recorded", call=call.index)
            turn = turns[call.index]
            known = len(call.input_ids) - len(turn.prompt_ids)
            begun = 0 if call.parent is None else len(call.parent.input_ids) + call.kept
            parent = None if call.parent is None else call.parent.index
            recorded = None if turn.parent is None else turn.parent.index
            require(recorded == parent, "a turn names what it extends", call=call.index, parent=parent, named=recorded)
            require(known == begun, "a turn holds the prompt that it added", call=call.index, known=known, begun=begun)
            require_equal(list(turn.output_ids), call.output_ids, "sampled ids stay as they came", call=call.index)
            require(turn.is_auxiliary == call.is_auxiliary, "auxiliary calls are told apart", call=call.index)
            self._check_reason(call, turn.reason)

    def _check_reason(self, call: Call, reason: str) -> None:
        """What the reason says is true."""
        facts = {"call": call.index, "reason": reason}
        if call.parent is None:
            require(reason.startswith("opens "), "a reason says whether a sequence is new", **facts)
        elif call.kept < len(call.parent.output_ids):
            require(reason.startswith(f"forks inside call {call.parent.index}:"), "a fork says where", **facts)
        else:
            begun = (f"extends call {call.parent.index} with", f"forks after call {call.parent.index}: ")
            require(reason.startswith(begun), "a reason names what is extended", **facts)
        compared = re.search(r"compared with call (\d+)", reason)
        if compared is None:
            return
        other = self.calls[int(compared[1])]
        full = other.full or [*other.asked, "an answer that no history holds"]
        first = next(
            (i for i, (a, b) in enumerate(zip(call.asked, full, strict=False)) if a != b),
            min(len(call.asked), len(full)),
        )
        said = re.search(r"message (\d+) \(\w+\) is not the recorded one|stops after message (-?\d+)", reason)
        if "the system prompt changed" in reason:
            require(call.system != other.system, "a reason is true", **facts)
        elif "the tools changed" in reason:
            require(call.tools != other.tools, "a reason is true", **facts)
        elif said is not None:
            named = int(said[1]) if said[1] is not None else int(said[2]) + 1
            require(first == named, "a reason names the first difference", first=first, **facts)

    def _check_sequence(self, leaf: Call, sequence: TokenManager, trained: dict[int, int]) -> None:
        """A sequence is token by token what the server saw and sampled.

        Args:
            leaf: The call that it ends with.
            sequence: The sequence.
            trained: By call, how many of its sampled ids an earlier sequence trains; brought up to date.
        """
        require_equal(sequence.token_ids, leaf.ids, "a sequence is what was sent and sampled", leaf=leaf.index)
        mask: list[int] = []
        logprobs: list[float | None] = []
        path = leaf.path()
        for call, after in zip(path, [*path[1:], None], strict=True):
            kept = len(call.output_ids) if after is None else after.kept
            prompt = len(call.input_ids) - len(mask)
            done = trained.get(call.index, 0)
            mask += [0] * prompt + [int(not call.is_structured and i >= done) for i in range(kept)]
            logprobs += [None if call.parent is None else 0.0] * prompt + call.logprobs[:kept]
            trained[call.index] = max(done, kept)
        once = "a sampled token is trained in the first sequence that holds it"
        require_equal(sequence.loss_mask, mask, once, leaf=leaf.index)
        require_equal(sequence.logprobs, logprobs, "logprobs are the server's", leaf=leaf.index)

    def _check_main(self, main: TokenManager, discarded: set[int]) -> None:
        """The main sequence is the latest one of the conversation that was answered first.

        Args:
            main: The main sequence.
            discarded: Which answers the library takes for thrown away; whether they are is judged once it is settled.
        """
        answered = [call for call in self._recorded() if not call.is_auxiliary]
        opening = next((call for call in answered if call.parent is None), None)
        if opening is None:
            return

        def conversation(call: Call) -> tuple[str | None, str, list[str]]:
            return call.system, call.tools, call.asked

        ends = [call for call in answered if conversation(call.path()[0]) == conversation(opening)]
        latest = ([call for call in ends if call.index not in discarded] or ends)[-1]
        require_equal(main.token_ids, latest.ids, "the main sequence is the latest of the first conversation")

    # --- what became of answers ---

    def judge_settled(self, trajectory: Trajectory, histories: dict[str, list[Message]]) -> None:
        """Check what is given out once the agents' messages have settled it.

        Args:
            trajectory: Settled.
            histories: What each agent ended with, as it would be sent.

        Raises:
            ViolationError: An answer that was kept is missing, or one that was thrown away is given out.
        """
        ends = {owner: [as_line(message) for message in messages] for owner, messages in histories.items()}
        main = [call for call in self._recorded() if not call.is_auxiliary]
        given_out: set[tuple[int, ...]] = set()
        for sequence in trajectory.sequences():
            leaf = next((call for call in main if call.ids == sequence.token_ids), None)
            require(leaf is not None, "a sequence is what was sent and sampled")
            assert leaf is not None
            given_out.update(tuple(call.ids) for call in leaf.path())
        for call in main:
            children = [other for other in main if other.parent is call]
            stands = call.full is not None and any(end[: len(call.full)] == call.full for end in ends.values())
            own_end = ends.get(call.owner or "", [])
            is_kept = call.full is not None and own_end[: len(call.full)] == call.full
            is_alone = all(other is call or other.ids != call.ids for other in main)
            # Of several attempts of one agent that say the same one was kept, and nothing tells which.
            twins = [other for other in main if _said(other) == _said(call)]
            if children or is_kept:
                shown = [call] if children else twins
                is_shown = any(tuple(other.ids) in given_out for other in shown)
                require(is_shown, "what an agent kept is given out", call=call.index)
            elif is_alone and not stands and self._is_thrown_away(call):
                require(tuple(call.ids) not in given_out, "what an agent threw away is not given out", call=call.index)

    def _is_thrown_away(self, call: Call) -> bool:
        """Whether the agent threw the answer away, and its next call shows it."""
        after = next((other for other in self.calls[call.index + 1 :] if other.owner == call.owner), None)
        return (
            call.is_thrown_away
            and call.outcome == "answered"
            and call.owner is not None
            and call.finish != "length"
            and after is not None
            and (after.system, after.tools) == (call.system, call.tools)
            and after.asked[: len(call.asked)] == call.asked
            and after.asked[: len(call.full or ())] != call.full
        )


def _said(call: Call) -> tuple[object, ...]:
    return call.owner, call.system, call.tools, call.full


__all__ = ["Judge", "Provable"]
