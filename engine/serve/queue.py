"""Waiting requests, by arrival or by priority; any of them can leave at any time."""

import heapq
from collections import OrderedDict

from engine.serve.request import Request


class QueueFullError(ValueError):
    """A request that is right in itself came when `max_waiting` others were waiting; later it may be welcome."""


class FCFSQueue:
    """First come, first served; a preempted request returns to the front. Every operation O(1)."""

    def __init__(self):
        self._requests: OrderedDict[Request, None] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request] = None

    def put_back(self, request: Request) -> None:
        self._requests[request] = None
        self._requests.move_to_end(request, last=False)

    def first(self) -> Request:
        return next(iter(self._requests))

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self):
        return iter(list(self._requests))


class PriorityQueue:
    """By (priority, arrival, order of adding), whether new or preempted. Adding and taking the first: O(log n)."""

    def __init__(self):
        self._heap: list[tuple] = []  # may still hold requests that have left
        self._live: dict[Request, tuple] = {}

    def add(self, request: Request) -> None:
        entry = (*rank(request), request)
        self._live[request] = entry
        heapq.heappush(self._heap, entry)

    put_back = add

    def first(self) -> Request:
        while self._live.get(self._heap[0][-1]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def remove(self, request: Request) -> None:
        del self._live[request]
        if len(self._heap) > 2 * len(self._live) + 16:  # mostly gone ones: sweep, so that memory follows the live ones
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def __contains__(self, request: Request) -> bool:
        return request in self._live

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self):
        return iter(sorted(self._live, key=rank))


def rank(request: Request) -> tuple:
    """Order under the priority policy; unique, since no two requests were added at once."""
    return request.priority, request.arrival_time, request.order
