"""On which server each problem is sampled: all its requests share one cache, and servers get equally many tokens."""

from __future__ import annotations

from collections.abc import Iterable


class Placement:
    """Servers are numbered. A problem goes to the one with the fewest tokens when its first request can start, so that
    what earlier problems really took is known by then."""

    def __init__(self, servers: int):
        self.tokens = [0] * servers  # prompt and sampled tokens, of unfinished requests the most they can be
        self._server: dict[str, int] = {}
        self._asked: dict[str, int] = {}  # tokens of a problem that are counted on its server

    def server_of(self, problem: str) -> int | None:
        return self._server.get(problem)

    def place(self, problem: str, servers: Iterable[int]) -> int:
        """The least loaded of `servers`, from now on the problem's."""
        server = min(servers, key=lambda server: self.tokens[server])
        self._server[problem] = server
        return server

    def add(self, problem: str, tokens: int) -> None:
        """A request of at most so many tokens has started, or has finished with so many fewer (negative)."""
        self._asked[problem] = self._asked.get(problem, 0) + tokens
        self.tokens[self._server[problem]] += tokens

    def lose(self, server: int) -> list[str]:
        """Forget the problems of a server and what was counted for them; returns them."""
        lost = [problem for problem, at in self._server.items() if at == server]
        for problem in lost:
            self.forget(problem)
        return lost

    def forget(self, problem: str) -> None:
        self.tokens[self._server.pop(problem)] -= self._asked.pop(problem, 0)
