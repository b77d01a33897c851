"""Trajectories of made-up tokens, recorded without a model."""

from array import array
from dataclasses import replace

from strands_sglang import Trajectory
from strands_sglang.messages import fingerprint
from strands_sglang.protocol.generation import Generation
from strands_sglang.trajectory import Caller

from .agents import assistant


def generation(*ids, finish="stop"):
    return Generation(output_ids=array("i", ids), logprobs=array("d", [-0.5] * len(ids)), finish_type=finish)


class Recorder:
    """Makes calls the way the model does, with made-up tokens: each call's prompt and answer are ids of their own."""

    def __init__(self):
        self.trajectory = Trajectory()
        self.next_id = 0

    def ids(self, count=2):
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def ask(self, messages, *, agent=None, kept=None, constrained=False, auxiliary=None, prompt=None, **parts):
        conversation = fingerprint({"system prompt": None, **parts}, messages)
        caller = Caller(agent, auxiliary=auxiliary)
        place = replace(self.trajectory.attach(conversation, messages, caller), kept=kept)
        ids = self.ids() if prompt is None else prompt
        return self.trajectory.ask(place, conversation, ids, caller, constrained=constrained)

    def call(self, messages, answer="ok", *, finish="stop", **options):
        turn = self.ask(messages, **options)
        self.trajectory.answer(turn, generation(*self.ids(), finish=finish), assistant(answer))
        return turn
