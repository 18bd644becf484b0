"""`train --dry-run`: everything a run needs is loaded and shown, nothing is trained or written."""

from __future__ import annotations

import yaml
from rich.console import Console

from spiral_fast.config import Config
from spiral_fast.credit import credit_of
from spiral_fast.problems.counts import count_lines
from spiral_fast.rewards import make_grader
from spiral_fast.rollout.chosen import chosen_engine
from spiral_fast.rollout.make_engine import make_engine
from spiral_fast.set_up import set_up


def dry_run(config: Config) -> None:
    """Print the resolved config, counts, worst-case lengths and one prompt of each kind. Raises what `train` would."""
    parts = set_up(config)
    with make_grader(config):  # a reward function is imported and checked
        pass
    credit_of(config)  # so is a diversity function
    engine = chosen_engine(config.rollout, cuda=parts.loaded.causal_lm.device.type == "cuda")
    if engine == "sglang":
        make_engine(config, parts.loaded).close()  # asks and starts nothing yet
    say = Console(highlight=False, soft_wrap=True)

    def heading(text: str) -> None:
        say.rule(text, align="left")

    def show(text: str) -> None:
        say.print(text, markup=False)

    heading("config")
    show(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    heading("problems")
    for line in count_lines(parts.problems.counts):
        show(line)
    model = parts.loaded.causal_lm
    heading("model")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    name, total = type(model).__name__, model.num_parameters()
    show(f"{name} on {model.device}: {trained:,} trained of {total:,} parameters")
    show(f"end-of-sequence ids {sorted(parts.loaded.eos_token_ids)}, context {parts.loaded.max_context:,} tokens")
    rollout, worst = config.rollout, parts.worst
    where = f", servers {', '.join(rollout.servers)}" if rollout.servers else ""
    show(f"rollout engine {engine}{where}")
    heading("lengths, tokens")
    show(f"longest search prompt {worst.search_prompt:,} + {rollout.search_max_new_tokens:,} new")
    if worst.aggregation_prompt:
        show(f"longest aggregation prompt {worst.aggregation_prompt:,} + {rollout.aggregation_max_new_tokens:,} new")
    n_aggregations = rollout.n_sets * rollout.n_aggregations
    ceiling = rollout.n_search * rollout.search_max_new_tokens + n_aggregations * rollout.aggregation_max_new_tokens
    traces = f"{rollout.n_search} search + {n_aggregations} aggregation traces"
    show(f"sampled per problem: {traces}, at most {ceiling:,} tokens")
    problem = parts.problems.train[0]
    prompt = parts.prompts.search(problem)
    decode = parts.loaded.tokenizer.decode
    heading(f"search prompt of problem {problem.id}, {len(prompt)} tokens")
    show(decode(prompt))
    if n_aggregations:
        prompt = parts.prompts.aggregation(problem, [[]] * rollout.set_size)
        heading(f"aggregation prompt of that problem with empty candidates, {len(prompt)} tokens")
        show(decode(prompt))
