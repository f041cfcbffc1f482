"""Which pages of the pool are free, on the host. Pages are plain numbers, shared by counting."""

import heapq
from collections import Counter


class Pages:
    """The free list of one shard's pages 0..count-1."""

    def __init__(self, count: int):
        self._free = list(range(count))  # a heap: low numbers first, so that use stays compact
        self._holders = Counter()  # of a page
        self.count = count
        self.peak = 0  # most pages in use at a time

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """n fresh pages, each with one holder. IndexError: there are fewer."""
        pages = self.share([heapq.heappop(self._free) for _ in range(n)])
        self.peak = max(self.peak, self.count - self.free)
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """The same pages for one more holder."""
        self._holders.update(pages)
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """One holder less; a page without holders is free."""
        self._holders.subtract(pages)
        for page in pages:
            if not self._holders[page]:
                heapq.heappush(self._free, page)
