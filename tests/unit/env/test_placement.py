"""Every order of events of small evaluations on actors that are lost: each sample ends once, and alone if it has to."""

import pickle

import pytest

from strands_env.eval.placement import Placement


class World:
    """Samples, actors and those that watch them, as in `strands_env.ray`; `Placement` says who runs where.

    A sample that has a place wakes up later. When a process ends, its samples hear of it one by one, while the actor
    may be open again, and its watcher learns of it from them only.
    """

    def __init__(self, kinds, actors, per_actor, *, tries=3, kills=0, absent=(), can_be_left_out=False):
        """Set up.

        Args:
            kinds: What each sample does: "killer" ends its process, "once" does so the first time, "cancelled" may be
                canceled at any time.
            actors: Number of actors.
            per_actor: Samples that share one.
            tries: Runs of a sample that is lost each time, the last one alone.
            kills: Number of processes that are killed from outside.
            absent: Actors that never start.
            can_be_left_out: Whether an actor may turn out to be of no use whenever it is made ready.
        """
        self.placement = Placement(per_actor=per_actor, max_concurrency=per_actor * actors)
        self.kinds, self.per_actor, self.kills, self.absent = kinds, per_actor, kills, absent
        self.can_be_left_out = can_be_left_out
        self.process = dict.fromkeys(range(actors), "dead")  # or "new", or "ready"
        self.cause = {}  # of the latest death
        self.watcher = dict.fromkeys(range(actors), "prepares")  # or "watches", or "has left it out"
        self.lost = set()  # actors of which the watcher has to learn
        self.tries, self.most = [1] * len(kinds), tries
        self.cancelled = set()
        self.told, self.running = {}, {}  # sample -> actor
        self.unheard = {}  # sample -> actor and why it was lost
        self.ended = {}
        for sample in range(len(kinds)):
            self.wait(sample)
        self.place()

    # --- what may happen next ---

    def events(self):
        for actor, process in self.process.items():
            is_left_out = self.watcher[actor] == "has left it out"
            if process == "dead" and actor not in self.absent and not is_left_out:
                yield self.restart, actor
            if process != "dead" and self.kills:
                yield self.kill, actor
            if process != "dead" and self.watcher[actor] == "prepares":
                yield self.make_ready, actor
                if self.can_be_left_out:
                    yield self.leave_out, actor
            if actor in self.lost and self.watcher[actor] == "watches":
                yield self.learn, actor
        for sample, kind in enumerate(self.kinds):
            if sample in self.ended:
                continue
            if sample in self.running:
                yield self.end, sample
            elif sample in self.unheard:
                yield self.hear, sample
            elif sample in self.told or sample in self.cancelled:
                yield self.wake, sample
            if kind == "cancelled" and sample not in self.cancelled:
                yield self.cancelled.add, sample

    def following(self):
        """Return the worlds after each event."""
        frozen = pickle.dumps(self)
        worlds = []
        for number in range(len(list(self.events()))):
            world = pickle.loads(frozen)
            event, subject = list(world.events())[number]
            event(subject)
            world.place()
            worlds.append(world)
        return worlds

    def key(self):
        return repr((vars(self.placement), {name: value for name, value in vars(self).items() if name != "placement"}))

    # --- actors ---

    def restart(self, actor):
        self.process[actor] = "new"

    def kill(self, actor):
        self.kills -= 1
        self.die(actor, "outside")

    def make_ready(self, actor):
        self.process[actor], self.watcher[actor] = "ready", "watches"
        self.placement.open(actor)

    def leave_out(self, actor):
        self.watcher[actor] = "has left it out"

    def learn(self, actor):
        self.lost.remove(actor)
        self.watcher[actor] = "prepares"

    def die(self, actor, cause):
        self.process[actor], self.cause[actor] = "dead", cause
        for sample in [one for one, at in self.running.items() if at == actor]:
            del self.running[sample]
            self.unheard[sample] = actor, cause

    # --- samples ---

    def is_alone(self, sample):
        return self.tries[sample] == self.most

    def wait(self, sample):
        self.placement.wait(sample, f"prompt {sample % 2}", alone=self.is_alone(sample))

    def place(self):
        for sample, actor in self.placement.place():
            assert not any(sample in states for states in (self.told, self.running, self.unheard, self.ended))
            assert self.placement.is_open(actor)
            self.told[sample] = actor
            there = [*self.told.values(), *self.running.values(), *(at for at, _ in self.unheard.values())]
            assert there.count(actor) <= self.per_actor
        if set(self.watcher.values()) == {"has left it out"}:
            self.ended.update(dict.fromkeys(self.placement.clear(), "refused"))

    def wake(self, sample):
        actor = self.told.pop(sample, None)
        if sample in self.cancelled:
            self.leave(sample, "cancelled")
        elif not self.placement.is_open(actor):
            self.placement.leave(sample)
            self.wait(sample)
        elif self.process[actor] == "dead":
            self.unheard[sample] = actor, self.cause[actor]
        elif self.process[actor] == "new":
            self.unheard[sample] = actor, "not run"
        else:
            self.running[sample] = actor
            there = [one for one, at in self.running.items() if at == actor]
            assert len(there) == 1 or not any(map(self.is_alone, there)), "a sample that must be alone has a neighbor"

    def end(self, sample):
        actor, kind = self.running[sample], self.kinds[sample]
        if sample in self.cancelled:
            del self.running[sample]
            self.leave(sample, "cancelled")
        elif kind == "killer" or (kind == "once" and self.tries[sample] == 1):
            del self.running[sample]
            self.unheard[sample] = actor, "itself"
            self.die(actor, "neighbor")
        else:
            del self.running[sample]
            self.leave(sample, "done")

    def hear(self, sample):
        actor, cause = self.unheard.pop(sample)
        self.placement.close(actor)
        self.lost.add(actor)
        if sample in self.cancelled:
            self.leave(sample, "cancelled")
        elif cause != "not run" and self.is_alone(sample):
            self.leave(sample, f"dropped, lost to {cause}")
        else:
            self.placement.leave(sample)
            self.tries[sample] += cause != "not run"
            self.wait(sample)

    def leave(self, sample, end):
        self.placement.leave(sample)
        self.ended[sample] = end


@pytest.mark.parametrize(
    ("kinds", "actors", "per_actor", "trouble"),
    [
        (["killer", "good", "good"], 1, 1, {}),
        (["killer", "good", "good"], 1, 2, {}),
        (["killer", "good", "good"], 2, 2, {"tries": 2}),
        (["once", "cancelled"], 2, 2, {}),
        (["killer", "once", "good"], 1, 3, {"tries": 2}),
        (["killer", "killer"], 2, 1, {"tries": 2}),
        (["killer", "killer"], 1, 2, {}),
        (["good", "cancelled", "killer"], 1, 2, {}),
        (["good", "good"], 1, 2, {"kills": 3}),
        (["once", "good"], 2, 1, {"kills": 1}),
        (["killer", "good"], 2, 2, {"absent": [1]}),
        (["killer", "good"], 2, 1, {"can_be_left_out": True}),
    ],
)
def test_every_order_of_events_ends_every_sample(kinds, actors, per_actor, trouble):
    possible = {"killer": {"dropped, lost to itself"}, "cancelled": {"done", "cancelled"}}
    outside = {"dropped, lost to outside"} if "kills" in trouble else set()
    outside |= {"refused"} if "can_be_left_out" in trouble else set()
    seen, path, on_path = set(), [], set()

    def enter(world):
        key = world.key()
        assert key not in on_path, "events can repeat for ever"
        if key in seen:
            return
        following = world.following()
        if not following:
            assert len(world.ended) == len(kinds), f"samples wait for ever: {key}"
            for sample, kind in enumerate(kinds):
                assert world.ended[sample] in possible.get(kind, {"done"}) | outside
        seen.add(key)
        on_path.add(key)
        path.append((key, following))

    enter(World(kinds, actors, per_actor, **trouble))
    while path:
        key, following = path[-1]
        if following:
            enter(following.pop())
        else:
            on_path.remove(key)
            path.pop()


def placement_of(*actors, per_actor=4, max_concurrency=8):
    placement = Placement(per_actor=per_actor, max_concurrency=max_concurrency)
    for actor in actors:
        placement.open(actor)
    return placement


def placed(placement, *samples, alone=False):
    """Add samples, named after their prompts, and return the actors of those that start."""
    for sample in samples:
        placement.wait(sample, sample[0], alone=alone)
    return dict(placement.place())


def test_samples_of_a_prompt_share_an_actor_up_to_its_share():
    placement = placement_of("x", "y", per_actor=4, max_concurrency=4)
    assert placed(placement, "a1", "b1", "a2", "b2") == {"a1": "x", "b1": "y", "a2": "x", "b2": "y"}
    placement = placement_of("x", "y", per_actor=4, max_concurrency=4)
    assert placed(placement, "a1", "a2", "a3", "a4") == {"a1": "x", "a2": "x", "a3": "y", "a4": "y"}


def test_a_sample_that_must_be_alone_takes_the_emptiest_actor():
    placement = placement_of("x", "y")
    assert placed(placement, "a1", "a2", "b1") == {"a1": "x", "a2": "x", "b1": "y"}
    placement.leave("b1")
    assert placed(placement, "a3", alone=True) == {"a3": "y"}


def test_a_sample_whose_reserved_actor_is_lost_is_the_next():
    placement = placement_of("x", per_actor=2)
    assert placed(placement, "a1") == {"a1": "x"}
    assert not placed(placement, "a2", alone=True) and not placed(placement, "b1")
    placement.close("x")
    placement.leave("a1")
    placement.open("x")
    assert dict(placement.place()) == {"a2": "x"}


def test_cleared_samples_never_start():
    placement = placement_of()
    assert not placed(placement, "a1", "b1")
    assert placement.clear() == ["a1", "b1"]
    placement.open("x")
    assert not placement.place()
