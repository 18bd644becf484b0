"""The tokens of an engine that keeps no cache of its own."""

from __future__ import annotations

from dataclasses import dataclass

from spiral_fast.rollout.engine import TokenCounts


@dataclass
class SglangCounts(TokenCounts):
    """prompt: of the requests. computed: by the servers, for requests and leaders. cached: the difference."""

    leaders: int = 0  # prompt tokens of leaders, requests for no new token that fill the cache
    hits: int = 0  # prompt tokens, of requests and leaders, that the servers found in their caches
    cacheable: int = 0  # the most that could be: sum of min(shared with what is there, prompt - 1)
    busiest_server: int = 0  # prompt and sampled tokens of the server that had most of each round's
