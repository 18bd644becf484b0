"""On which server each problem is sampled: all its requests share one cache, and servers get equally many tokens."""

from __future__ import annotations

from collections.abc import Collection

MOST_ABOVE = 1.05  # times the tokens of the least loaded server, that one may have when it gets a problem


class Placement:
    """Servers are numbered. A problem goes to one when its first request can start, so that what earlier problems
    really took is known by then."""

    def __init__(self, servers: int):
        self._known = [0.0] * servers  # prompt tokens, and the sampled tokens of requests that have finished
        self._open = [0] * servers  # max_new_tokens of those that have not
        self._sampled = self._allowed = 0  # tokens and max_new_tokens of all that have finished
        self._server: dict[str, int] = {}
        self._of_problem: dict[str, tuple[float, int]] = {}  # its part of _known and _open

    def tokens(self, server: int) -> float:
        """Prompt and sampled tokens; of a request that runs, as large a part of what it may sample as others took."""
        share = self._sampled / self._allowed if self._allowed else 1.0
        return self._known[server] + share * self._open[server]

    def server_of(self, problem: str) -> int | None:
        return self._server.get(problem)

    def place(self, problem: str, free: Collection[int], up: Collection[int]) -> int | None:
        """The least loaded of the `free` servers, from now on the problem's; None where all of them have clearly more
        than another that is `up`: that one, which is slower, is waited for."""
        server = min(free, key=self.tokens, default=None)
        if server is None or self.tokens(server) > MOST_ABOVE * min(map(self.tokens, up)):
            return None
        self._server[problem], self._of_problem[problem] = server, (0, 0)
        return server

    def start(self, problem: str, prompt: int, max_new_tokens: int) -> None:
        self._add(problem, prompt, max_new_tokens)

    def finish(self, problem: str, max_new_tokens: int, sampled: int) -> None:
        self._add(problem, sampled, -max_new_tokens)
        self._sampled += sampled
        self._allowed += max_new_tokens

    def lose(self, server: int) -> list[str]:
        """Forget the problems of a server and what was counted for them; returns them."""
        lost = [problem for problem, at in self._server.items() if at == server]
        for problem in lost:
            known, waiting = self._of_problem[problem]
            self._add(problem, -known, -waiting)
            del self._server[problem], self._of_problem[problem]
        return lost

    def join(self, server: int, up: Collection[int]) -> None:
        """A server is back. Its share is an even one from here on: it need not catch up with the others."""
        if up:
            self._known[server] += max(0.0, sum(map(self.tokens, up)) / len(up) - self.tokens(server))

    def _add(self, problem: str, known: float, waiting: int) -> None:
        server, before = self._server[problem], self._of_problem[problem]
        self._of_problem[problem] = before[0] + known, before[1] + waiting
        self._known[server] += known
        self._open[server] += waiting
