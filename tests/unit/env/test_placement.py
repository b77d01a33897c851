"""Every order of events of small evaluations on actors that are lost: each sample ends once, and alone if it has to."""

import copy

import pytest

from strands_env.eval.placement import Placement

TRIES = 3


class World:
    """Actors and samples, of which some kill their actor each time; `Placement` says who runs where.

    When an actor is lost, its samples hear of it one by one, while the actor may already be open again.
    """

    def __init__(self, kinds, actors, per_actor):
        self.placement = Placement(per_actor=per_actor, max_concurrency=per_actor * actors)
        self.kinds, self.per_actor = dict(enumerate(kinds)), per_actor
        self.closed = set(range(actors))
        self.tries = dict.fromkeys(self.kinds, 1)
        self.running = {}  # sample -> actor
        self.lost = {}  # sample -> actor that it was lost with, until it hears of it
        self.ended = {}
        for sample in self.kinds:
            self.placement.wait(sample, f"prompt {sample % 2}", alone=False)

    def start(self):
        for sample, actor in self.placement.place():
            assert sample not in self.running and sample not in self.lost and sample not in self.ended
            if actor in self.closed:  # lost, of which nothing was heard yet
                assert not self.is_alone(sample)
                self.lost[sample] = actor
                continue
            self.running[sample] = actor
            neighbors = [one for one, at in self.running.items() if at == actor and one != sample]
            assert not any(self.is_alone(one) for one in neighbors), "a sample shares the actor of one that is alone"
            assert not (self.is_alone(sample) and neighbors), "a sample that must be alone has neighbors"
            assert len(neighbors) < self.per_actor

    def is_alone(self, sample):
        return self.tries[sample] == TRIES

    def events(self):
        yield from (("open", actor) for actor in sorted(self.closed))
        yield from (("end", sample) for sample in sorted(self.running))
        yield from (("hear", sample) for sample in sorted(self.lost))
        yield from (
            ("cancel", sample)
            for sample, kind in self.kinds.items()
            if kind == "cancelled" and sample not in {*self.running, *self.lost, *self.ended}
        )

    def after(self, event, subject):
        world = copy.deepcopy(self)
        getattr(world, event)(subject)
        world.start()
        return world

    def open(self, actor):
        self.closed.remove(actor)
        self.placement.open(actor)

    def end(self, sample):
        actor = self.running.pop(sample)
        if self.kinds[sample] != "killer":
            self.ended[sample] = "done"
            self.placement.leave(sample)
            return
        self.closed.add(actor)
        self.lost[sample] = actor
        for other in [one for one, at in self.running.items() if at == actor]:
            self.lost[other] = self.running.pop(other)

    def hear(self, sample):
        actor = self.lost.pop(sample)
        self.closed.add(actor)
        self.placement.close(actor)
        self.placement.leave(sample)
        if self.is_alone(sample):
            self.ended[sample] = "dropped"
        else:
            self.tries[sample] += 1
            self.placement.wait(sample, f"prompt {sample % 2}", alone=self.is_alone(sample))

    def cancel(self, sample):
        self.ended[sample] = "cancelled"
        self.placement.leave(sample)

    def key(self):
        placement = self.placement
        parts = (
            placement._open,
            placement._queue,
            sorted(placement._reserved.items()),
            sorted(placement._latest.items()),
        )
        own = (sorted(self.closed), self.tries, self.running, self.lost, self.ended)
        return repr((parts, own))


@pytest.mark.parametrize(
    ("kinds", "actors", "per_actor"),
    [
        (["killer", "good", "good"], 1, 2),
        (["killer", "good", "good"], 2, 2),
        (["killer", "killer", "good"], 1, 3),
        (["killer", "killer"], 2, 1),
        (["good", "cancelled", "killer"], 1, 2),
    ],
)
def test_every_order_of_events_ends_every_sample(kinds, actors, per_actor):
    waiting, seen, ends = [World(kinds, actors, per_actor)], set(), 0
    while waiting:
        world = waiting.pop()
        following = [world.after(*event) for event in world.events()]
        if not following:
            ends += 1
            assert len(world.ended) == len(kinds), f"samples wait for ever: {world.key()}"
            for sample, kind in enumerate(kinds):
                assert world.ended[sample] in {"killer": ("dropped",), "good": ("done",)}.get(
                    kind, ("done", "cancelled")
                )
        for one in following:
            if (key := one.key()) not in seen:
                seen.add(key)
                waiting.append(one)
    assert ends and len(seen) > 20
