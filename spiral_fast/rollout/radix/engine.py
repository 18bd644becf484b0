"""The embedded engine: continuous batching over the learner's own weights with a radix tree of keys and values.

One `step` admits what fits, prefills it, and decodes until a request finishes. A prompt token is run through the model
once per policy version as long as it stays cached. Generated tokens are not entered into the tree: SPIRAL quotes traces
in another context, so no later prompt continues one.

Counting. A prompt token is `computed` if it was run through the model for this request, else `cached`. The decoder's
output at the end of a prompt is kept, so a prompt seen before costs nothing; one that ends inside a prompt of an
*earlier* prefill, where no output was kept, computes its last token again (computed 1, cached the rest). Of requests
admitted together the first with a prefix computes it.

Memory. `cache_tokens` bounds the prompt tokens in the tree plus `max_new_tokens` of every running request: all keys and
values there are, where the native kernels serve (CPU, float32 and bfloat16). Elsewhere decoding also keeps a padded
copy of each running prompt (one per group of siblings admitted together), outside this budget.

Two adapters. A request's level says which of `roles` serves it: each adapter has a root of its own in the tree and its
own running rows, and a decode step is a forward for each that has any. Rows, cache and head serve both.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from spiral_fast.batch_invariant import ROWS, log_probs, run_decoder
from spiral_fast.learner.roles import Roles
from spiral_fast.rollout.engine import Completion, NonFiniteLogits, PromptTooLong, Request, TokenCounts
from spiral_fast.rollout.radix.decode import DecodeBatch, decode_batch
from spiral_fast.rollout.radix.model import WeightsWatch, serve
from spiral_fast.rollout.radix.pool import Pool
from spiral_fast.rollout.radix.prefill import Chunk, Plan, chunks
from spiral_fast.rollout.radix.rows import Entry, Rows, fill_holes
from spiral_fast.rollout.radix.sampling import sample
from spiral_fast.rollout.radix.tree import RadixTree

Prompt = tuple[str, tuple[int, ...]]  # the adapter that serves it, its tokens


class Running:
    """The running requests of one adapter."""

    def __init__(self, role: str, batch: DecodeBatch):
        self.role, self.batch, self.rows = role, batch, Rows([])


class RadixEngine:
    """See `rollout/engine.py` for the contract, this module's docstring for counts and memory."""

    name = "radix"
    per_request_seed = True
    asked_by = None

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Iterable[int],
        *,
        max_context: int,
        max_running: int,
        prefill_chunk: int,
        cache_tokens: int,
        watch_weights: bool = True,
        batch_invariant: bool = False,
        roles: Roles | None = None,
    ):
        """model: a transformers causal LM, LoRA in place or not, on `spiral_fast.attention.ATTENTION`; eos_token_ids:
        any of them ends a trace; max_running: requests decoded together; prefill_chunk: prompt tokens per forward;
        cache_tokens: see the module; watch_weights: raise RuntimeError where weights change without `set_policy`,
        possible only while parameters stay the same objects (not sharded ones); batch_invariant: a trace and its
        log-probs have the same bits whatever else is in the batch, where batch_invariant.check_possible allows;
        roles: the model's adapters, None = no more than one. A model that cannot be served exactly raises ValueError
        naming the field."""
        self._served = serve(model)
        self._watched = model if watch_weights else torch.nn.Module()
        self._is_eos = np.zeros(self._served.vocabulary, bool)  # an id outside the vocabulary is never sampled
        self._is_eos[[token for token in eos_token_ids if token < self._served.vocabulary]] = True
        self.max_context = max_context
        self.counts = TokenCounts()
        self.bitwise_resume = self._served.device.type == "cpu"
        self._max_running = max_running
        self._prefill_chunk = prefill_chunk
        self._cache_tokens = cache_tokens
        self._next_ticket = 0
        self._version = 0
        self._batch_invariant = batch_invariant
        self._roles = roles or Roles(["default"])
        self._flush()

    def add(self, request: Request) -> int:
        """Queue one request; returns its ticket. Raises PromptTooLong, or ValueError for one that can never run."""
        n = len(request.prompt)
        if n + request.max_new_tokens > self.max_context:
            raise PromptTooLong(request, self.max_context)
        if n + request.max_new_tokens > self._cache_tokens:
            raise ValueError(
                f"problem {request.key.problem!r}: a prompt of {n} tokens + max_new_tokens {request.max_new_tokens} "
                f"never fits into rollout.cache_tokens = {self._cache_tokens}; raise it"
            )
        if not n or request.max_new_tokens < 1 or not request.temperature > 0:
            raise ValueError(
                f"problem {request.key.problem!r}: needs a prompt, max_new_tokens >= 1 and temperature > 0; got {n} "
                f"tokens, {request.max_new_tokens}, {request.temperature}"
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < self._served.vocabulary:
            raise ValueError(
                f"problem {request.key.problem!r}: prompt ids must be in 0..{self._served.vocabulary - 1}, found "
                f"{min(request.prompt)}..{max(request.prompt)}"
            )
        entry = Entry(self._next_ticket, request)
        self._next_ticket += 1
        if not self._n_waiting and not self._n_running:
            self._ranks.clear()
        prompt = self._roles.of(request.key.level), tuple(request.prompt)
        if prompt not in self._waiting:
            self._waiting[prompt] = deque()
            rank = self._ranks.setdefault(request.key.problem, len(self._ranks))
            heapq.heappush(self._order, (rank, entry.ticket, prompt))
        self._waiting[prompt].append(entry)
        self._n_waiting += 1
        return entry.ticket

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        """Work until at least one request finishes; [] when nothing is queued or running.

        Whatever fails inside a step drops the cache and everything pending, and passes on.
        """
        if not self._n_waiting and not self._n_running:
            return []
        try:
            self._check_weights()
            finished: list[tuple[int, Completion]] = []
            while not finished:
                finished = self._admit()
                if not finished:
                    finished = [done for running in self._running for done in self._decode(running)]
            return finished
        except BaseException:
            self.abandon()  # a forward that failed half way left prompts in the tree without keys and values
            raise

    def set_policy(self, version: int) -> None:
        """The weights are now those of `version`: forget what is cached. RuntimeError while a request is pending."""
        pending = self._n_waiting + self._n_running
        if pending:
            raise RuntimeError(f"set_policy({version}) with {pending} requests queued or running; finish them first")
        self._version = version
        self._flush()

    def abandon(self) -> None:
        """Forget every queued and running request, and the cache with them. Their sampled tokens stay counted."""
        self._count_generated(sum(int(running.rows.sampled.sum()) for running in self._running))
        self._flush()

    def close(self) -> None:
        """Drop the cache and everything pending."""
        self._flush()

    def _flush(self) -> None:
        served = self._served
        self._tree = RadixTree(self._roles.names)
        self._pool = Pool(
            served.layers, served.key_value_heads, served.head_dim, self._cache_tokens, served.dtype, served.device
        )
        self._running = [
            Running(role, decode_batch(self._pool, batch_invariant=self._batch_invariant, windows=served.windows))
            for role in self._roles.names
        ]
        self._waiting: dict[Prompt, deque[Entry]] = {}  # siblings together, in whatever order they came
        self._order: list[tuple[int, int, Prompt]] = []  # heap of the waiting prompts
        self._ranks: dict[str, int] = {}  # of problems, by their first request since the engine was idle
        self._n_waiting = 0
        self._reserved = 0  # new tokens the running requests may still ask for, and those they have
        self._full = False  # the first in the queue did not fit, and nothing has finished since
        self._watch: WeightsWatch | None = None  # from the first request under this version on

    @property
    def _n_running(self) -> int:
        return sum(len(running.rows) for running in self._running)

    def _check_weights(self) -> None:
        """Cached keys and values must come from the weights that read them, by whatever path these were changed."""
        if self._watch is None:
            self._watch = WeightsWatch(self._watched)
        elif self._watch.changed():
            raise RuntimeError(
                f"the model's weights or its active adapter changed under policy version {self._version}; "
                "call set_policy with a new version after each change, when no request is pending"
            )

    # Admission and prefill

    def _admit(self) -> list[tuple[int, Completion]]:
        """Admit requests, prompt by prompt, as rows and budget allow; sample first tokens.

        Problems in order of arrival: the aggregations of an early one come before the searches of later ones.
        """
        room = self._max_running - self._n_running
        if self._full or not self._n_waiting or room < min(self._n_waiting, max(1, self._max_running // 8)):
            return []  # a few free rows wait for more of them: a prefill costs a forward however short it is
        groups: dict[str, list[list[Entry]]] = {role: [] for role in self._roles.names}
        plans = {role: Plan() for role in groups}
        while self._waiting and room:
            prompt = role, tokens = self._order[0][2]
            queue = self._waiting[prompt]
            members = self._place(role, tokens, queue, room, plans[role])
            if not members:
                self._full = True
                break
            groups[role].append(members)
            room -= len(members)
            self._n_waiting -= len(members)
            if not queue:
                heapq.heappop(self._order)
                del self._waiting[prompt]
        finished = []
        for running in self._running:
            if of_role := groups[running.role]:
                finished += self._start(running, of_role, plans[running.role])
        return finished

    def _start(self, running: Running, groups: list[list[Entry]], plan: Plan) -> list[tuple[int, Completion]]:
        """Prefill `plan`; groups of entries with one prompt each become running rows."""
        self._prefill(running.role, plan)
        hidden = torch.stack([members[0].node.hidden for members in groups])
        sizes = [len(members) for members in groups]
        rows = Rows([entry for members in groups for entry in members])
        entries = list(rows.entry)
        self._count(entries)
        finished, alive = self._sample(rows, hidden, torch.repeat_interleave(torch.tensor(sizes)).to(hidden.device))
        rows.select(np.flatnonzero(alive))
        left = np.add.reduceat(alive.astype(np.int64), np.cumsum([0] + sizes[:-1])).tolist()
        prompts = [members[0].node for members, n in zip(groups, left, strict=True) if n]
        if prompts:
            running.batch.add(prompts, [n for n in left if n], rows.limit)
            running.rows.append(rows)
        return finished

    def _place(self, role: str, prompt: tuple[int, ...], queue: deque[Entry], room: int, plan: Plan) -> list[Entry]:
        """Take requests with this prompt off the queue, as many as fit, and give the prompt its place in the tree."""
        node, matched = self._tree.find(prompt, role)
        node.pins += 1
        missing = len(prompt) - matched
        members: list[Entry] = []
        needed = missing
        while queue and len(members) < room:
            needed += queue[0].request.max_new_tokens
            over = self._tree.size + self._reserved + needed - self._cache_tokens
            if over > 0:
                freed = self._tree.evict(over)
                self._pool.free(freed)
                if len(freed) < over:
                    needed -= queue[0].request.max_new_tokens
                    break
            members.append(queue.popleft())
        node.pins -= 1
        if not members:
            return []
        self._reserved += needed - missing
        if missing:
            node = self._tree.extend(node, prompt[matched:], self._pool.allocate(missing))
            plan.compute(node, node.path_slots())
        elif node.hidden is None and not plan.brings(node):
            plan.compute_last(node, node.path_slots())
            missing = 1
        for entry in members:
            entry.node = node
            entry.cached = len(prompt)
        members[0].cached -= missing
        members[0].computed = missing
        node.pins += len(members)
        return members

    def _prefill(self, role: str, plan: Plan) -> None:
        if not plan.runs:
            return
        wanted = sorted(plan.wanted, key=lambda pair: pair[1])
        at = np.array([index for _, index in wanted])
        kept, first = [], 0
        for part in chunks(plan.runs, self._prefill_chunk):
            chunk = Chunk(self._pool, part, self._served.device)
            hidden = self._forward(role, chunk.tokens, chunk.positions, chunk)
            inside = at[(at >= first) & (at < first + len(hidden))] - first
            kept.append(hidden[torch.from_numpy(inside).to(hidden.device)])
            first += len(hidden)
        for (node, _), hidden in zip(wanted, torch.cat(kept), strict=True):
            node.hidden = hidden

    # Decode

    def _decode(self, running: Running) -> list[tuple[int, Completion]]:
        """One token for every running request of one adapter."""
        rows = running.rows
        if not len(rows):
            return []
        running.batch.begin_step()
        device = self._served.device
        tokens = torch.from_numpy(rows.last_tokens()).to(device)
        positions = torch.from_numpy(rows.prompt + rows.sampled - 1).to(device)
        finished, alive = self._sample(rows, self._forward(running.role, tokens, positions, running.batch))
        if finished:
            source, target = fill_holes(alive)
            left = int(alive.sum())
            order = np.arange(left)
            order[target] = source
            rows.select(order)
            running.batch.remove((source, target), left)
        return finished

    def _forward(self, role: str, tokens: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:
        """tokens, positions (T,) -> hidden states (T, H)"""
        decoder = self._served.decoder
        with self._roles.serving(role):
            if self._batch_invariant:
                return run_decoder(decoder, tokens, positions, attend)
            out = decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, attend=attend)
            return out.last_hidden_state[0]

    def _sample(self, rows: Rows, hidden: torch.Tensor, row_of: torch.Tensor | None = None):
        """Sample one token per row from hidden (R, H), or hidden[row_of]. Returns completions, and which rows go on."""
        u, temperature = (torch.from_numpy(x).to(hidden.device) for x in (rows.next_uniform(), rows.temperature))
        if self._batch_invariant:
            tokens, logp = self._sample_invariant(hidden if row_of is None else hidden[row_of], temperature, u)
        else:
            logits = self._served.head(hidden)
            tokens, logp = sample(logits if row_of is None else logits[row_of], temperature, u)
        finite = logp.isfinite()
        if not finite.all():
            bad = torch.nonzero(~finite).flatten().tolist()
            raise NonFiniteLogits([rows.entry[row].request for row in bad], self._version)
        tokens = rows.record(tokens, logp)
        stopped = self._is_eos[tokens]
        alive = ~stopped & (rows.sampled < rows.limit)
        return [self._complete(rows, row, stopped[row]) for row in np.flatnonzero(~alive)], alive

    def _sample_invariant(self, hidden: torch.Tensor, temperature: torch.Tensor, u: torch.Tensor):
        """`sample` on a multiple of ROWS rows, and the log-probs as the learner computes them."""
        n = len(hidden)
        extra = -n % ROWS
        logits = self._served.head(pad(hidden, (0, 0, 0, extra)))
        tokens, _ = sample(logits, pad(temperature, (0, extra), value=1.0), pad(u, (0, extra)))
        return tokens[:n], log_probs(hidden, self._served.head.weight, tokens[:n], temperature).logp

    def _complete(self, rows: Rows, row: int, stopped: bool) -> tuple[int, Completion]:
        entry: Entry = rows.entry[row]
        n = int(rows.sampled[row])
        entry.node.pins -= 1
        self._reserved -= entry.request.max_new_tokens
        self._full = False
        self._count_generated(n)
        return entry.ticket, Completion(
            tokens=rows.tokens[row, :n].tolist(),
            logp=rows.logp[row, :n].copy(),
            finish_reason="stop" if stopped else "length",
            policy_version=self._version,
            prompt_tokens=len(entry.request.prompt),
            cached_tokens=entry.cached,
            computed_tokens=entry.computed,
        )

    def _count_generated(self, n: int) -> None:
        counts = self.counts
        self.counts = TokenCounts(counts.prompt, counts.cached, counts.computed, counts.generated + n)

    def _count(self, entries: list[Entry]) -> None:
        cached, computed = (sum(getattr(entry, name) for entry in entries) for name in ("cached", "computed"))
        counts = self.counts
        self.counts = TokenCounts(
            counts.prompt + cached + computed, counts.cached + cached, counts.computed + computed, counts.generated
        )
