"""Which pages of the pool are free, on the host. Pages are plain numbers, shared by counting."""

import heapq


class Pages:
    """The free list of one shard's pages 0..count-1."""

    def __init__(self, count: int):
        self._free = list(range(count))  # a heap: low numbers first, so that use stays compact
        self._holders = [0] * count
        self.count = count
        self.peak = 0  # most pages in use at a time

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """n fresh pages, each with one holder. Raises ValueError when there are fewer."""
        if n > self.free:
            raise ValueError(f"{n} pages wanted, {self.free} free of {self.count}")
        pages = [heapq.heappop(self._free) for _ in range(n)]
        for page in pages:
            self._holders[page] = 1
        self.peak = max(self.peak, self.count - self.free)
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """The same pages for one more holder."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free: nobody to share it with")
            self._holders[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        """One holder less; a page without holders is free."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is released twice")
            self._holders[page] -= 1
            if not self._holders[page]:
                heapq.heappush(self._free, page)
