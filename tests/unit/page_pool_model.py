"""The page pool against a simple model: a memory that says for which tokens each slot was written.

The state machine plays a scheduler on a few rows. Its model knows nothing of the pool's structures: it writes
K/V where the contract says a row writes, garbage for rejected candidates included, and checks what rows read.
It predicts from whole token prefixes which pages are found, evicted and free.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from d3d_sglang.drafter.page_pool import PagePool, PoolStats

NUM_ROWS = 4
BLOCK = 3
Tokens = tuple[int, ...]


@dataclass
class Request:
    """A row of the model. Its last token is the anchor, not cached before the next round."""

    generation: int
    tokens: Tokens
    pages: list[int]
    cached_len: int
    reported_len: int  # tokens the host knows: those of the round before
    num_known: int  # pages whose ids the pool has seen: the row's full pages that count for reuse
    alive: bool = True
    drafting: bool = True


class PoolModel:
    """Which prefixes are published where, and when each was used last. Slow and direct."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.memory: list[list[Tokens]] = [[()] * page_size for _ in range(num_pages)]
        self.rows: dict[int, Request] = {}
        self.published: dict[Tokens, int] = {}
        self.last_use: dict[Tokens, int] = {}
        self.clock = self.evictions = self.failures = self.shared = self.recomputed = 0

    def held(self) -> set[int]:
        return {page for request in self.rows.values() for page in request.pages}

    def cached(self) -> list[Tokens]:
        """Published prefixes nobody holds, in the order they are to be evicted."""
        held = self.held()
        idle = [prefix for prefix, page in self.published.items() if page not in held]
        return sorted(idle, key=lambda prefix: (self.last_use[prefix], -len(prefix)))

    def free(self) -> set[int]:
        return set(range(self.num_pages)) - self.held() - set(self.published.values())

    def run(self, tokens: Tokens) -> list[int]:
        pages: list[int] = []
        while (end := (len(pages) + 1) * self.page_size) <= len(tokens) and tokens[:end] in self.published:
            pages.append(self.published[tokens[:end]])
        return pages

    def pages_for(self, length: int) -> int:
        return (length + self.page_size - 1) // self.page_size

    def release(self, row: int) -> None:
        request = self.rows.pop(row, None)
        if request is None:
            return
        self.clock += 1
        for index in range(request.num_known):
            prefix = request.tokens[: (index + 1) * self.page_size]
            self.published.setdefault(prefix, request.pages[index])
            self.last_use[prefix] = self.clock

    def take(self, pages: tuple[int, ...]) -> None:
        """The pool gave these private pages: they were free, or the oldest cached ones."""
        free, num_evicted = self.free(), max(0, len(pages) - len(self.free()))
        evicted = self.cached()[:num_evicted]
        assert len(set(pages)) == len(pages)
        allowed = free | {self.published[prefix] for prefix in evicted}
        assert set(pages) <= allowed and (not num_evicted or set(pages) == allowed)
        for prefix in evicted:
            del self.published[prefix]
        self.evictions += num_evicted

    def has_room(self, num_new: int) -> bool:
        if num_new <= len(self.free()) + len(self.cached()):
            return True
        self.failures += 1
        return False

    def write(self, request: Request, start: int, values: list[Tokens]) -> None:
        for position, value in enumerate(values, start):
            page = request.pages[position // self.page_size]
            self.memory[page][position % self.page_size] = value

    def stats(self) -> PoolStats:
        return PoolStats(
            free_pages=len(self.free()),
            held_pages=len(self.held()),
            cached_pages=len(self.cached()),
            shared_tokens=self.shared,
            recomputed_tokens=self.recomputed,
            evictions=self.evictions,
            failures=self.failures,
        )


rows = st.integers(0, NUM_ROWS - 1)
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)


class Scheduler(RuleBasedStateMachine):
    """Random scheduler events; every rule is one event."""

    events = 0  # of all runs

    @initialize(num_pages=st.integers(3, 20), page_size=st.sampled_from([1, 2, 4]))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages=num_pages, page_size=page_size, num_rows=NUM_ROWS)
        self.model = PoolModel(num_pages, page_size)
        self.past: list[Tokens] = [(0,)]
        self.generations = 0
        type(self).events -= 1  # the invariants count this step too

    def begin(self, row: int, tokens: Tokens, reserve: int) -> None:
        model, size = self.model, self.model.page_size
        self.generations += 1
        model.release(row)
        shared = model.run(tokens)
        request = Request(self.generations, tokens, shared, len(tokens), len(tokens), num_known=len(shared))
        model.rows[row] = request
        num_new = model.pages_for(len(tokens) + reserve) - len(shared)
        fits = model.has_room(num_new)
        grant = self.pool.begin(row, tokens, generation=self.generations, reserve=reserve)
        if not fits:
            assert grant is None
            model.release(row)
            return
        assert grant is not None and len(grant.pages) == len(shared) + num_new
        assert grant.shared_len == len(shared) * size and list(grant.pages[: len(shared)]) == shared
        model.take(grant.pages[len(shared) :])
        request.pages = list(grant.pages)
        model.shared += grant.shared_len
        model.recomputed += len(tokens) - grant.shared_len
        model.write(
            request, grant.shared_len, [tokens[: i + 1] for i in range(grant.shared_len, len(tokens))]
        )
        request.tokens = (*tokens, 0)  # the target's first token, the anchor
        self.past.append(request.tokens)

    def grow(self, row: int, request: Request, length: int) -> bool:
        num_new = max(0, self.model.pages_for(length) - len(request.pages))
        fits = self.model.has_room(num_new)
        pages = self.pool.grow(row, length=length)
        if not fits:
            assert pages is None
            return False
        assert pages is not None and len(pages) == num_new
        self.model.take(pages)
        request.pages += pages
        return True

    def publish(self, row: int, request: Request) -> None:
        size, safe_len = self.model.page_size, min(request.reported_len, request.cached_len)
        self.pool.publish(row, request.tokens[: request.reported_len], safe_len=safe_len)
        for index in range(request.num_known, safe_len // size):
            prefix = request.tokens[: (index + 1) * size]
            self.model.published.setdefault(prefix, request.pages[index])
        request.num_known = max(request.num_known, safe_len // size)

    @rule(row=rows, tokens=token_lists, reserve=st.integers(0, 3 * BLOCK))
    def extend(self, row: int, tokens: Tokens, reserve: int) -> None:
        """A new request, or one whose row ended unannounced."""
        self.begin(row, tokens, reserve)

    @rule(row=rows, choice=st.integers(0, 99), cut=st.integers(0, 4), reserve=st.integers(0, 3 * BLOCK))
    def extend_with_old_tokens(self, row: int, choice: int, cut: int, reserve: int) -> None:
        """A prompt seen before, or all but its end."""
        tokens = self.past[choice % len(self.past)]
        self.begin(row, tokens[: max(1, len(tokens) - cut)], reserve)

    @rule(output=st.integers(0, 2 ** (BLOCK + 1) - 1), accept=st.integers(1, BLOCK))
    def decode(self, output: int, accept: int) -> None:
        """A round of all rows: the anchor and `accept` - 1 candidates are right, the rest is overwritten."""
        for row, request in list(self.model.rows.items()):
            if not (request.alive and request.drafting):
                continue
            if not self.grow(row, request, request.cached_len + BLOCK):
                request.drafting = False  # it decodes plainly from here on
                continue
            count = (accept + row) % BLOCK + 1
            old, start = request.tokens, request.cached_len
            request.reported_len = len(old)
            new = tuple((output >> i) & 1 for i in range(count))  # accepted candidates and the bonus
            request.tokens = old + new
            right = [request.tokens[: start + i + 1] for i in range(count)]
            self.model.write(request, start, right + [(-1,)] * (BLOCK - count))
            request.cached_len = start + count
            self.publish(row, request)

    @rule(row=rows)
    def finish(self, row: int) -> None:
        if row in self.model.rows:
            self.past.append(self.model.rows[row].tokens)
        self.pool.release(row)
        self.model.release(row)

    @rule(row=rows)
    def abort(self, row: int) -> None:
        """The request is gone and nobody tells the pool."""
        if row in self.model.rows:
            self.model.rows[row].alive = False

    @rule(row=rows, other=rows, told=st.booleans(), reserve=st.integers(0, 3 * BLOCK))
    def retract(self, row: int, other: int, told: bool, reserve: int) -> None:
        """A request comes back with prompt and output, on any row."""
        request = self.model.rows.get(row)
        if request is None:
            return
        if told:
            self.pool.release(row)
            self.model.release(row)
        request.alive = False
        self.begin(other, request.tokens[:-1], reserve)

    @rule()
    def sweep(self) -> None:
        dead = [row for row, request in self.model.rows.items() if not request.alive]
        generations = {row: request.generation for row, request in self.model.rows.items() if request.alive}
        assert self.pool.sweep(lambda row, generation: generations.get(row) == generation) == len(dead)
        for row in dead:
            self.model.release(row)

    @rule(really=st.integers(0, 3))
    def flush(self, really: int) -> None:
        if not really:
            self.pool.clear()
            self.model.rows.clear()
            self.model.published.clear()

    @invariant()
    def rows_read_their_own_tokens(self) -> None:
        type(self).events += 1
        size = self.model.page_size
        for request in self.model.rows.values():
            for i in range(request.cached_len):
                slot = self.model.memory[request.pages[i // size]][i % size]
                assert slot == request.tokens[: i + 1], f"position {i} holds another row's K/V"

    @invariant()
    def pool_agrees_with_the_model(self) -> None:
        self.pool.check()
        assert self.pool.stats() == self.model.stats()

    def teardown(self) -> None:
        """Nothing leaked: one row can have all pages."""
        pool = self.pool
        pool.sweep(lambda row, generation: False)
        grant = pool.begin(0, [7] * (pool.num_pages * pool.page_size), generation=0, reserve=0)
        assert grant is not None and sorted(grant.pages) == list(range(pool.num_pages))
