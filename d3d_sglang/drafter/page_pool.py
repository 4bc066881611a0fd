"""Pages of the drafter's K/V: who holds them, and which can be reused by their token ids.

Only bookkeeping: the K/V themselves are elsewhere. A page holds the K/V of `page_size` consecutive tokens,
which depend on all token ids up to its end and on nothing else. So a page that is full, and whose ids have
reached the host, is *published* under those ids, and any row whose tokens begin with them may read it. Until
then it is private to its row. Nobody writes to a published page. Imports nothing of the project and no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary


@dataclass(frozen=True)
class Grant:
    """What a row got. It writes K/V from position `shared_len` on, which is where a page starts."""

    pages: tuple[int, ...]  # all pages of the row, in the order of its positions
    shared_len: int  # tokens whose K/V are there already


@dataclass(frozen=True)
class PoolStats:
    """Pages by state (they add up to all pages), then counts since the pool was made."""

    free_pages: int  # hold nothing
    held_pages: int  # held by at least one row
    cached_pages: int  # published and held by no row: reusable, and the first to go
    shared_tokens: int  # prompt tokens whose K/V were found
    recomputed_tokens: int  # prompt tokens whose K/V were not
    evictions: int
    failures: int  # requests for pages that were refused


class _Prefix:
    """The token ids of a run of full pages from position 0. Equal runs are one object while it is in use.

    That makes comparing the object and the ids of the next page the same as comparing all ids, so pages are
    never confused by two prefixes with one hash.
    """

    __slots__ = ("__weakref__", "page", "parent")

    def __init__(self, parent: _Prefix | None) -> None:
        self.parent = parent  # the run without its last page
        self.page: int | None = None  # the published page with the K/V of its last page


@dataclass(slots=True)
class _Row:
    generation: int
    pages: list[int]
    prefixes: list[_Prefix]  # of the pages that were shared, published, or found to be published already
    room: int  # tokens that fit
    next_full: int  # tokens that must be safe for another page to become shareable


class PagePool:
    """Pages of `page_size` tokens for `num_rows` request rows.

    A row that holds nothing (never begun, released, refused, or forgotten by `clear`) is passed over by every
    method but `begin`, so a caller may treat all rows of a batch alike.

    Raises:
        ValueError: a size is not positive.
    """

    def __init__(self, *, num_pages: int, page_size: int, num_rows: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size), ("num_rows", num_rows)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_rows = num_rows
        self._shared_tokens = self._recomputed_tokens = self._evictions = self._failures = 0
        self.clear()

    def clear(self) -> None:
        """Forget every row and every published page (a flush). Counts go on."""
        self._rows: dict[int, _Row] = {}
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._holders = [0] * self.num_pages
        self._published: list[_Prefix | None] = [None] * self.num_pages
        # Oldest first. A page is always older than the pages before it in its prefix, so eviction shortens
        # runs from their end and leaves no page behind that cannot be reached.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._prefixes: WeakValueDictionary[tuple[_Prefix | None, tuple[int, ...]], _Prefix] = (
            WeakValueDictionary()
        )

    def begin(self, row: int, token_ids: Sequence[int], *, generation: int, reserve: int) -> Grant | None:
        """Give a row pages for its tokens and `reserve` more, the first of them shared where they can be.

        Whatever the row held is released first, so a row may begin again with more tokens (a retracted
        request) and finds its own published pages.

        Args:
            token_ids: all tokens of the request so far.
            generation: which request the row serves, for `sweep`.

        Returns:
            None if there are not enough pages, even after eviction. The row then holds nothing, and nothing
            was evicted.

        Raises:
            ValueError: `row` or `reserve` is out of range.
        """
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row is {row}; it must be in [0, {self.num_rows})")
        if reserve < 0:
            raise ValueError(f"reserve is {reserve}; it must not be negative")
        self.release(row)
        held = self._hold_longest_run(token_ids, generation=generation)
        self._rows[row] = held
        shared_len = held.room
        if self._extend(held, length=len(token_ids) + reserve) is None:
            self.release(row)
            return None
        self._shared_tokens += shared_len
        self._recomputed_tokens += len(token_ids) - shared_len
        return Grant(pages=tuple(held.pages), shared_len=shared_len)

    def count_read(self, num_tokens: int) -> None:
        """Count prompt tokens that a row has to read after it began: a further chunk of its prompt."""
        self._recomputed_tokens += num_tokens

    def grow(self, row: int, *, length: int) -> tuple[int, ...] | None:
        """Append pages to a row until `length` tokens fit.

        Returns:
            The new pages, none if the tokens fit already. None if they cannot be had: not enough pages even
            after eviction, and the row keeps what it has, or the row holds nothing.
        """
        held = self._rows.get(row)
        if held is None:
            return None
        if length <= held.room:
            return ()
        return self._extend(held, length=length)

    def publish(self, row: int, token_ids: Sequence[int], *, safe_len: int) -> None:
        """Let other rows share the row's full pages below `safe_len`.

        The row must have written the K/V of the first `safe_len` tokens, and must not write below again.
        A page whose equal is published already stays private.

        Args:
            token_ids: the row's tokens, the first of them those it began with. Read only where a page became
                full, so it may be any sequence that is cheap to make.

        Raises:
            ValueError: `safe_len` exceeds the tokens or the row's pages.
        """
        held = self._rows.get(row)
        if held is None or safe_len < held.next_full:
            return
        if safe_len > min(len(token_ids), held.room):
            raise ValueError(
                f"safe_len is {safe_len}; it must be at most {len(token_ids)} (tokens) and {held.room} (room)"
            )
        size = self.page_size
        parent = held.prefixes[-1] if held.prefixes else None
        for index in range(len(held.prefixes), safe_len // size):
            parent = self._intern(parent, tuple(token_ids[index * size : (index + 1) * size]))
            held.prefixes.append(parent)
            if parent.page is None:
                self._list_page(held.pages[index], parent)
        held.next_full = (len(held.prefixes) + 1) * size

    def release(self, row: int) -> None:
        """Take a row's pages back. Published pages stay until they are evicted, private ones are free."""
        held = self._rows.pop(row, None)
        if held is None:
            return
        known = len(held.prefixes)
        for index in range(len(held.pages) - 1, -1, -1):  # from the end: see `_cached`
            page = held.pages[index]
            self._holders[page] -= 1
            if index < known:
                self._retire(page, held.prefixes[index])
            else:
                self._free.append(page)

    def sweep(self, alive: Callable[[int, int], bool]) -> int:
        """Release every row for which `alive(row, generation)` is false; returns how many."""
        dead = [row for row, held in self._rows.items() if not alive(row, held.generation)]
        for row in dead:
            self.release(row)
        return len(dead)

    def stats(self) -> PoolStats:
        """Pages by state, and counts."""
        return PoolStats(
            free_pages=len(self._free),
            held_pages=self.num_pages - len(self._free) - len(self._cached),
            cached_pages=len(self._cached),
            shared_tokens=self._shared_tokens,
            recomputed_tokens=self._recomputed_tokens,
            evictions=self._evictions,
            failures=self._failures,
        )

    def check(self) -> None:
        """Assert what must hold between calls. Walks over everything: for tests."""
        holders = [0] * self.num_pages
        for held in self._rows.values():
            assert held.room == len(held.pages) * self.page_size
            assert held.next_full == (len(held.prefixes) + 1) * self.page_size
            for page in held.pages:
                holders[page] += 1
            for page in held.pages[len(held.prefixes) :]:
                assert self._published[page] is None and holders[page] == 1, f"page {page} is not private"
        assert holders == self._holders
        used = {page for page in range(self.num_pages) if holders[page]}
        assert sorted([*self._free, *self._cached, *used]) == list(range(self.num_pages))
        assert not any(self._published[page] for page in self._free)
        for page, prefix in enumerate(self._published):
            assert prefix is None or prefix.page == page
        age = {page: place for place, page in enumerate(self._cached)}
        for page in self._cached:
            prefix = self._published[page]
            assert prefix is not None
            if prefix.parent is not None:
                parent_page = prefix.parent.page
                assert parent_page is not None, f"page {page} cannot be reached"
                assert age.get(parent_page, self.num_pages) > age[page], f"page {page} outlives its prefix"

    def _hold_longest_run(self, token_ids: Sequence[int], *, generation: int) -> _Row:
        """A row that holds the longest run of published pages with which `token_ids` begins."""
        size = self.page_size
        held = _Row(generation=generation, pages=[], prefixes=[], room=0, next_full=size)
        parent: _Prefix | None = None
        for start in range(0, len(token_ids) - size + 1, size):
            parent = self._prefixes.get((parent, tuple(token_ids[start : start + size])))
            if parent is None or parent.page is None:
                break
            self._cached.pop(parent.page, None)
            self._holders[parent.page] += 1
            held.pages.append(parent.page)
            held.prefixes.append(parent)
        held.room = len(held.pages) * size
        held.next_full = held.room + size
        return held

    def _extend(self, held: _Row, *, length: int) -> tuple[int, ...] | None:
        """Append private pages until `length` tokens fit, or none at all if there are not enough."""
        num_new = -(-length // self.page_size) - len(held.pages)
        if num_new > len(self._free) + len(self._cached):
            self._failures += 1
            return None
        pages = tuple(self._take() for _ in range(num_new))
        held.pages.extend(pages)
        held.room = len(held.pages) * self.page_size
        return pages

    def _take(self) -> int:
        """A page for one holder: a free one, or the oldest of the cached."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            prefix = self._published[page]
            assert prefix is not None
            prefix.page = self._published[page] = None
            self._evictions += 1
        self._holders[page] = 1
        return page

    def _intern(self, parent: _Prefix | None, ids: tuple[int, ...]) -> _Prefix:
        """The one object for `parent` and a page of `ids` after it."""
        prefix = self._prefixes.get((parent, ids))
        if prefix is None:
            prefix = self._prefixes[parent, ids] = _Prefix(parent)
        return prefix

    def _list_page(self, page: int, prefix: _Prefix) -> None:
        prefix.page = page
        self._published[page] = prefix

    def _retire(self, page: int, prefix: _Prefix) -> None:
        """A row let go of `page`, which holds the K/V of `prefix`."""
        shared = prefix.page
        if shared is None:
            # The equal page that was published before ours has been evicted since.
            shared = page
            self._list_page(page, prefix)
        elif shared != page:
            self._free.append(page)
        if not self._holders[shared]:
            self._cached[shared] = None
            self._cached.move_to_end(shared)
