"""SPIRAL's two-stage rollout by an SGLang server beside the embedded engine, same model, same traces' lengths.

`spiral-fast bench rollout --engine sglang`, or `python -m bench.rollout.sglang [--problems N] [--rounds N] [--json F]`,
in an environment with SGLang; without a GPU that of `make test-sglang`.

- prefill: leaders and radix cache; radix cache alone; neither (`--disable-radix-cache`); the embedded engine. Ideal is
  each request's prompt less what it shares with an earlier one, its last token never.
- overlap: traces of long-tailed lengths, a problem's aggregations as soon as its search is complete, or all of them
  when the last search trace of the batch is (a barrier).
- swap: a new adapter version in place and proved, caches empty.

Contenders take turns; medians of the rounds after one to warm up. CPU seconds are those of all processes concerned.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from spiral_fast.config import Config, ConfigError, load_config
from spiral_fast.credit.sets import sample_sets
from spiral_fast.learner.model import LoadedModel, load_model
from spiral_fast.learner.policy_source import PolicySource
from spiral_fast.rollout.chosen import sglang_installed
from spiral_fast.rollout.engine import Engine, Request
from spiral_fast.rollout.radix.engine import RadixEngine
from spiral_fast.rollout.sglang import dispatch
from spiral_fast.rollout.sglang.base_model import BaseModel, base_model
from spiral_fast.rollout.sglang.connection import OwnServer
from spiral_fast.rollout.sglang.engine import SglangEngine
from spiral_fast.trace import TraceKey

N_SEARCH, N_SETS, SET_SIZE, N_AGGREGATIONS = 8, 4, 4, 4  # the paper's shape
SEARCH, QUOTE, AGGREGATE = 0, 1, 2  # tokens: end of a prompt, before a candidate, end of a prompt
PROBLEM, TEMPLATE = 48, 16  # tokens; the template is shared by all problems
EVEN, MEDIAN, SIGMA, LONGEST = 64, 32, 1.0, 180  # tokens of a trace: all alike, or log-normal
SUPPORT = Path(__file__).parents[2] / "tests" / "support"
MAX_RUNNING, CACHE_TOKENS = 64, 65536


class Work(NamedTuple):
    """Prompts and lengths of a rollout; what is sampled is another each time."""

    problems: list[list[int]]  # tokens
    search: np.ndarray  # (problems, N_SEARCH) new tokens
    aggregation: np.ndarray  # (problems, N_SETS, N_AGGREGATIONS)


def work(problems: int, vocabulary: int, *, even: bool, seed: int = 0) -> Work:
    rng = np.random.default_rng(seed)

    def lengths(*shape: int) -> np.ndarray:
        if even:
            return np.full(shape, EVEN)
        return np.clip(np.exp(rng.normal(np.log(MEDIAN), SIGMA, shape)), 4, LONGEST).astype(int)

    template = rng.integers(3, vocabulary, TEMPLATE).tolist()
    prompts = [template + rng.integers(3, vocabulary, PROBLEM).tolist() for _ in range(problems)]
    return Work(prompts, lengths(problems, N_SEARCH), lengths(problems, N_SETS, N_AGGREGATIONS))


class Measured(NamedTuple):
    seconds: float  # wall
    cpu_seconds: float
    generated: int  # tokens
    prompt: int  # tokens of all prompts of traces
    computed: int  # by the engine's own count, leaders included
    ideal: int  # of prompt, the fewest that must be computed


def roll_out(engine: Engine, work: Work, *, barrier: bool = False) -> list[Request]:
    """Both stages; the requests in the order of asking."""
    asked: list[Request] = []
    waiting: dict[int, Request] = {}
    search = [[None] * N_SEARCH for _ in work.problems]
    complete: list[int] = []  # problems to aggregate

    def add(p: int, level: int, group: int, i: int, prompt: list[int], n: int) -> None:
        seed = (p * 2 + level) * 1000 + group * 10 + i
        request = Request(TraceKey(str(p), level, group, i), tuple(prompt), int(n), 1.0, seed)
        asked.append(request)
        waiting[engine.add(request)] = request

    def aggregate(p: int) -> None:
        rng = np.random.default_rng(p)
        for k, members in enumerate(sample_sets("uniform", N_SEARCH, SET_SIZE, N_SETS, rng)):
            prompt = work.problems[p] + [token for i in members for token in [QUOTE, *search[p][i]]] + [AGGREGATE]
            for j in range(N_AGGREGATIONS):
                add(p, 1, k, j, prompt, work.aggregation[p, k, j])

    for p, problem in enumerate(work.problems):
        for i in range(N_SEARCH):
            add(p, 0, -1, i, [*problem, SEARCH], work.search[p, i])
    while waiting:
        for ticket, done in engine.step():
            key = waiting.pop(ticket).key
            if key.level == 0:
                p = int(key.problem)
                search[p][key.index] = done.tokens
                if all(search[p]):
                    complete.append(p)
        if not barrier or len(complete) == len(work.problems):
            for p in complete:
                aggregate(p)
            complete = []
    return asked


def ideal(requests: Sequence[Request]) -> int:
    """Prompt tokens that must be computed when they come one after the other and nothing is forgotten."""
    tree: dict = {}
    computed = 0
    for request in requests:
        node, shared = tree, 0
        for n, token in enumerate(request.prompt):
            shared += token in node and shared == n
            node = node.setdefault(token, {})
        computed += len(request.prompt) - min(shared, len(request.prompt) - 1)
    return computed


class NoLeaders(dispatch.Leaders):
    """Every prompt is as good as there: its requests go at once, all together."""

    def there(self, prompt: bytes) -> int:
        return len(prompt) // 4 - 1

    def waits_for(self, prompt: bytes) -> None:
        return None


@contextmanager
def leaders(on: bool) -> Iterator[None]:
    before = dispatch.Leaders
    dispatch.Leaders = before if on else NoLeaders
    try:
        yield
    finally:
        dispatch.Leaders = before


class Contender(NamedTuple):
    name: str
    engine: Engine
    leaders: bool = True


class Clock:
    """Of this process and all it has started."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), self._spent()

    @staticmethod
    def _spent() -> float:
        me = psutil.Process()
        return sum(sum(process.cpu_times()[:2]) for process in [me, *me.children(recursive=True)])

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, self._spent() - self._cpu


class Versions:
    """Each time another, so that nothing is served from an earlier round's cache."""

    last = 0

    @classmethod
    def new(cls, engine: Engine) -> None:
        cls.last += 1
        engine.set_policy(cls.last)


def measure(contender: Contender, work: Work, *, barrier: bool = False) -> Measured:
    engine = contender.engine
    with leaders(contender.leaders):
        Versions.new(engine)
        before, clock = dataclasses.replace(engine.counts), Clock()
        asked = roll_out(engine, work, barrier=barrier)
        seconds, cpu = clock.read()
    spent = engine.counts - before
    return Measured(seconds, cpu, spent.generated, spent.prompt, spent.computed, ideal(asked))


def medians(rounds: list[Measured]) -> Measured:
    return Measured(*(median(values) for values in zip(*rounds[1:], strict=True)))


def without_end(folder: Path, base: BaseModel) -> BaseModel:
    """The same model without an end-of-sequence token, so that every trace has the length that was asked for."""
    shutil.copytree(base.folder, folder)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": None}))
    return dataclasses.replace(base, folder=folder)


def load(config: Config) -> LoadedModel:
    """The model under an adapter that is not zero."""
    torch.manual_seed(0)
    loaded = load_model(config.model, "cuda" if torch.cuda.is_available() else "cpu")
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return dataclasses.replace(loaded, eos_token_ids=frozenset())


def sglang_engine(config: Config, loaded: LoadedModel, base: BaseModel, folder: Path, **flags: bool) -> SglangEngine:
    rollout = config.rollout.model_copy(
        update={"sglang": config.rollout.sglang.model_copy(update={"args": dict(flags)})}
    )
    config = config.model_copy(update={"rollout": rollout})
    return SglangEngine(
        lambda folder: [OwnServer(config, base, folder / "server.log", folder / "adapters")],
        PolicySource(loaded),
        temperature=1.0,
        max_running=MAX_RUNNING,
        timeout_s=config.rollout.sglang.timeout_s,
        start_timeout_s=config.rollout.sglang.start_timeout_s,
        folder=folder,
        say=print,
    )


def run(problems: int = 8, rounds: int = 3, out: Path | None = None) -> dict[str, Any]:
    """Measure, print and return the tables. Raises ConfigError without SGLang."""
    if not sglang_installed():
        raise ConfigError("bench rollout --engine sglang: SGLang is not installed; see docs/sglang.md")
    if not torch.cuda.is_available():  # the servers find the stand-in sgl_kernel
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    torch.set_num_threads(1)
    small = [f"rollout.max_running={MAX_RUNNING}", f"rollout.cache_tokens={CACHE_TOKENS}", "rollout.engine=sglang"]
    config = load_config(Path(__file__).parents[2] / "configs" / "demo.yaml", small)
    loaded = load(config)
    radix = RadixEngine(
        loaded.causal_lm, (), max_context=1024, max_running=MAX_RUNNING, prefill_chunk=4096, cache_tokens=CACHE_TOKENS
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = without_end(folder / "base", base_model(config.model))
        cached = sglang_engine(config, loaded, base, folder / "cached")
        bare = sglang_engine(config, loaded, base, folder / "bare", disable_radix_cache=True)
        contenders = [
            Contender("sglang, leaders", cached),
            Contender("sglang, radix cache alone", cached, leaders=False),
            Contender("sglang, no radix cache", bare, leaders=False),
            Contender("embedded", radix),
        ]
        try:
            facts = {
                "versions": {name: version(name) for name in ("sglang", "torch", "transformers")},
                "device": str(loaded.causal_lm.device),
                "problems": problems,
                "rounds": rounds,
                "prefill": _prefill(contenders, work(problems, loaded.model.config.vocab_size, even=True), rounds),
                "overlap": _overlap(
                    [contenders[0], contenders[-1]],
                    work(problems, loaded.model.config.vocab_size, even=False),
                    rounds,
                ),
                "swap": _swap(cached, loaded, rounds),
            }
        finally:
            for engine in (cached, bare):
                engine.close()
    if out:
        out.write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def _prefill(contenders: list[Contender], work: Work, rounds: int) -> list[dict]:
    found: dict[str, list[Measured]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds + 1):
        for contender in contenders:
            found[contender.name].append(measure(contender, work))
    print("prefill: traces of", EVEN, "tokens, medians of", rounds)
    print("| engine | wall s | CPU s | tokens/s | prompt tokens | computed | saved | ideal |")
    print("|---|---|---|---|---|---|---|---|")
    lines = []
    for name, one in ((name, medians(measured)) for name, measured in found.items()):
        lines.append({"engine": name, **one._asdict()})
        print(
            f"| {name} | {one.seconds:.1f} | {one.cpu_seconds:.1f} | {one.generated / one.seconds:,.0f} | "
            f"{one.prompt:,.0f} | {one.computed:,.0f} | {1 - one.computed / one.prompt:.1%} | "
            f"{1 - one.ideal / one.prompt:.1%} |",
            flush=True,
        )
    return lines


def _overlap(contenders: list[Contender], work: Work, rounds: int) -> list[dict]:
    cases = [(contender, barrier) for contender in contenders for barrier in (True, False)]
    found: dict[tuple[str, bool], list[Measured]] = {(contender.name, barrier): [] for contender, barrier in cases}
    for _ in range(rounds + 1):
        for contender, barrier in cases:
            found[contender.name, barrier].append(measure(contender, work, barrier=barrier))
    tokens = np.concatenate([work.search.ravel(), work.aggregation.ravel()])
    print(f"overlap: traces of {np.median(tokens):.0f} tokens, the longest {tokens.max()}, medians of {rounds}")
    print("| engine | barrier, wall s | overlapped, wall s | faster | CPU s |\n|---|---|---|---|---|")
    lines = []
    for contender in contenders:
        a, b = (medians(found[contender.name, barrier]) for barrier in (True, False))
        paired = zip(found[contender.name, True][1:], found[contender.name, False][1:], strict=True)
        ratio = median(one.seconds / other.seconds for one, other in paired)
        lines.append({"engine": contender.name, "barrier": a._asdict(), "overlapped": b._asdict(), "faster": ratio})
        print(
            f"| {contender.name} | {a.seconds:.1f} | {b.seconds:.1f} | {ratio:.2f} x | "
            f"{a.cpu_seconds:.1f}, {b.cpu_seconds:.1f} |",
            flush=True,
        )
    return lines


def _swap(engine: SglangEngine, loaded: LoadedModel, rounds: int) -> dict:
    tensors = PolicySource(loaded).adapter().tensors.values()
    seconds = []
    for _ in range(rounds + 3):
        start = time.perf_counter()
        Versions.new(engine)
        seconds.append(time.perf_counter() - start)
    size = sum(tensor.numel() for tensor in tensors)
    print(f"swap: {median(seconds):.2f} s for an adapter of {size:,} parameters, its canary included (median)")
    return {"seconds": seconds, "parameters": size}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    run(arguments.problems, arguments.rounds, arguments.json)
