"""Which model is loaded next and which ones leave: by hand, and against the optimum."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest

from edgespec.serve.pool import Seen, Step, Values, next_step, patience_s

SIZES = {"a": 4, "b": 4, "c": 4, "small": 1}


def fits(names: Collection[str], room: int = 8) -> bool:
    return sum(SIZES[name] for name in names) <= room


def values_of(**uses: int) -> Values:
    """Models that were loaded in this order, each in a second, and used so often."""
    values = Values()
    for name, count in uses.items():
        values.add(name, SIZES[name], 1.0)
        for _ in range(count):
            values.use(name)
    return values


def test_a_value_is_inflation_and_seconds_per_byte_times_uses() -> None:
    values = values_of(a=1, b=3)
    assert (values.of("a"), values.of("b")) == (1 / 4, 3 / 4)
    values.remove("a", evicted=True)
    assert values.inflation == 1 / 4
    values.add("c", 4, 2.0)
    values.use("c")
    assert values.of("c") == 1 / 4 + 2 / 4
    values.remove("b", evicted=False)
    assert values.inflation == 1 / 4, "who was idle too long says nothing of the others"


def test_what_was_used_often_leaves_in_the_end() -> None:
    """Counts alone would keep a model of yesterday for ever."""
    values = values_of(a=10)
    left = []
    for turn in range(30):
        name = ("b", "c")[turn % 2]
        values.add(name, 4, 1.0)
        values.use(name)
        if values.of("a") < values.of(name):
            left.append("a")
            break
        values.remove(name, evicted=True)
    assert left == ["a"] and 8 <= turn <= 11


def test_there_is_nothing_to_do_where_nobody_waits() -> None:
    models = [Seen("a", True), Seen("b", False)]
    assert next_step(models, values_of(a=1), fits, 0.0) == Step()


def test_what_fits_beside_the_others_needs_nobody_to_leave() -> None:
    models = [Seen("a", True, is_busy=True), Seen("b", False, since_s=1.0)]
    assert next_step(models, values_of(a=1), fits, 1.0) == Step("b")


def test_the_least_valuable_idle_model_leaves() -> None:
    models = [Seen("a", True), Seen("b", True), Seen("c", False, since_s=0.0)]
    assert next_step(models, values_of(a=2, b=1), fits, 0.0) == Step("c", ("b",))
    models[1] = Seen("b", True, is_busy=True)
    assert next_step(models, values_of(a=2, b=1), fits, 0.0) == Step("c", ("a",))
    models[1] = Seen("b", True, is_pinned=True)
    assert next_step(models, values_of(a=2, b=1), fits, 0.0) == Step("c", ("a",))


def test_what_is_not_in_the_way_stays() -> None:
    """The small one is worth least, and without it there is no room either."""
    values = values_of(small=0, a=1)
    models = [Seen("small", True), Seen("a", True), Seen("b", False, since_s=0.0)]
    assert next_step(models, values, lambda names: fits(names, 5), 0.0) == Step("b", ("a",))


def test_a_model_that_answers_takes_no_more_requests_when_patience_is_over() -> None:
    busy = [Seen("a", True, is_busy=True), Seen("b", True, is_busy=True)]
    models = [*busy, Seen("c", False, since_s=0.0, reload_s=2.0)]
    values = values_of(a=5, b=1)
    assert next_step(models, values, fits, 7.9) == Step()
    assert next_step(models, values, fits, 8.0) == Step(drained=frozenset("b"))


def test_nobody_is_overtaken_after_that() -> None:
    """A small model would fit at once, and keeps the large one waiting."""
    models = [
        Seen("a", True, is_busy=True),
        Seen("b", False, since_s=0.0),
        Seen("small", False, since_s=0.1),
    ]
    room = lambda names: fits(names, 6)  # noqa: E731
    assert next_step(models, values_of(a=1), room, 0.2) == Step("small")
    assert next_step(models, values_of(a=1), room, 1.0) == Step(drained=frozenset("a"))


def test_pinned_models_are_never_drained() -> None:
    models = [
        Seen("a", True, is_busy=True, is_pinned=True),
        Seen("b", True, is_busy=True),
        Seen("c", False, since_s=0.0),
    ]
    assert next_step(models, values_of(a=0, b=9), fits, 5.0) == Step(drained=frozenset("b"))


def test_patience_is_a_multiple_of_a_load_within_bounds() -> None:
    assert [patience_s(reload_s) for reload_s in (0.0, 0.5, 3.0, 100.0)] == [1.0, 2.0, 12.0, 60.0]


# -- against an optimal choice ---------------------------------------------------------------------


def belady_loads(asked: Sequence[str], room: int) -> int:
    """Loads of who knows the future: the one leaves whose next request is farthest.

    L. Belady, "A study of replacement algorithms for a virtual-storage computer" (1966); optimal
    for models of one size.
    """
    there, loads = set[str](), 0
    for now, name in enumerate(asked):
        if name in there:
            continue
        loads += 1
        later = {one: [*asked[now:], one].index(one) for one in there}
        while not fits({*there, name}, room):
            there.remove(max(there, key=lambda one: later[one]))
        there.add(name)
    return loads


class Clients:
    """Who asks for one of three models again as soon as an answer is there. All in made-up time."""

    def __init__(self, seed: int, *, reload_s: float, answer_s: float, clients: int = 8) -> None:
        self.names = "aabbc"
        self.random, self.reload_s, self.answer_s = random.Random(seed), reload_s, answer_s
        self.values, self.now_s = Values(), 0.0
        self.ready, self.loading, self.loads = set[str](), "", 0
        self.drained: frozenset[str] = frozenset()
        self.ends: dict[int, tuple[float, str]] = {}  # of answers, by client
        self.waits: dict[int, tuple[float, str]] = {}  # since when, by client
        self.loaded_s = 0.0
        self.asked: list[str] = []
        self.longest_s = 0.0
        for client in range(clients):
            self.ask(client)

    def ask(self, client: int) -> None:
        name = self.random.choice(self.names)
        self.asked.append(name)
        self.waits[client] = (self.now_s, name)

    def answer(self) -> None:
        """Give every request its model that may have it."""
        for client, (since_s, name) in sorted(self.waits.items()):
            if name in self.ready and name not in self.drained:
                del self.waits[client]
                self.longest_s = max(self.longest_s, self.now_s - since_s)
                self.values.use(name)
                spent_s = self.random.expovariate(1 / self.answer_s)
                self.ends[client] = (self.now_s + spent_s, name)

    def step(self) -> None:
        busy = {name for _, name in self.ends.values()}
        models = []
        for name in "abc":
            since = [since_s for since_s, asked in self.waits.values() if asked == name]
            first = min(since, default=None)
            models.append(Seen(name, name in self.ready, name in busy, False, first, self.reload_s))
        if not self.loading:
            step = next_step(models, self.values, fits, self.now_s)
            self.drained = step.drained
            for name in step.leaving:
                assert name not in busy, "a model that answers never leaves"
                self.ready.remove(name)
                self.values.remove(name, evicted=True)
            if step.load:
                self.loading, self.loaded_s = step.load, self.now_s + self.reload_s
                self.loads += 1
        self.answer()

    def run(self, requests: int) -> None:
        while len(self.asked) < requests:
            self.step()
            moments = [end for end, _ in self.ends.values()] + [self.now_s + 0.05]
            self.now_s = min([*moments, self.loaded_s] if self.loading else moments)
            if self.loading and self.now_s >= self.loaded_s:
                self.ready.add(self.loading)
                self.values.add(self.loading, SIZES[self.loading], self.reload_s)
                self.loading = ""
                self.answer()  # before anything else is decided
            for client, (end, _) in list(self.ends.items()):
                if end <= self.now_s:
                    del self.ends[client]
                    self.ask(client)


@pytest.mark.parametrize(("reload_s", "answer_s"), [(1.0, 0.5), (0.3, 2.0), (2.0, 0.2), (0.1, 0.1)])
def test_loads_are_near_those_of_who_knows_the_future(reload_s: float, answer_s: float) -> None:
    for seed in range(5):
        clients = Clients(seed, reload_s=reload_s, answer_s=answer_s)
        clients.run(300)
        optimum = belady_loads(clients.asked, 8)
        assert clients.loads <= 1.5 * optimum, f"{clients.loads} loads, {optimum} of the optimum"
        most_s = patience_s(reload_s) + 2 * reload_s + 20 * answer_s
        assert clients.longest_s <= 2 * most_s, "nobody waits for ever"


def test_a_stream_of_requests_for_others_does_not_starve_a_model() -> None:
    """Both models that are there always answer somebody."""
    clients = Clients(1, reload_s=0.5, answer_s=1.0, clients=8)
    clients.names = "ab"
    clients.run(40)
    clients.waits[99] = (clients.now_s, "c")
    clients.run(200)
    assert "c" in {name for _, name in clients.ends.values()} or 99 not in clients.waits
    assert clients.longest_s < 20
