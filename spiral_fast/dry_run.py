"""`train --dry-run`: everything a run needs is loaded and shown, nothing is trained or written."""

from __future__ import annotations

import yaml
from rich.console import Console

from spiral_fast.config import Config
from spiral_fast.credit import credit_of
from spiral_fast.learner.liger import liger_line
from spiral_fast.levels import largest_set, level_name, levels_of, max_new_tokens, multipliers, populations
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
    engine = chosen_engine(config.rollout, cuda=parts.loaded.device.type == "cuda")
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
    show(liger_line(config.model, parts.loaded.device.type))
    heading("lengths, tokens")
    show(f"longest search prompt {worst.search_prompt:,} + {rollout.search_max_new_tokens:,} new")
    if worst.aggregation_prompt:
        new = max(max_new_tokens(config, level) for level in range(1, 1 + max(1, len(rollout.levels))))
        show(f"longest aggregation prompt {worst.aggregation_prompt:,} + {new:,} new")
    levels = levels_of(config)
    sampled = populations(rollout.n_search, levels)
    ceiling = sum(n * max_new_tokens(config, level) for level, n in enumerate(sampled))
    traces = " + ".join(f"{n} {level_name(level)}" for level, n in enumerate(sampled))
    show(f"sampled per problem: {traces} traces, at most {ceiling:,} tokens")
    if rollout.levels:
        m = multipliers(rollout.n_search, levels)
        show("M of " + ", ".join(f"{level_name(level)} {float(one):.3f}" for level, one in enumerate(m)))
    problem = parts.problems.train[0]
    prompt = parts.prompts.search(problem)
    decode = parts.loaded.tokenizer.decode
    heading(f"search prompt of problem {problem.id}, {len(prompt)} tokens")
    show(decode(prompt))
    if quoted := largest_set(config):
        prompt = parts.prompts.aggregation(problem, [[]] * quoted)
        heading(f"aggregation prompt of that problem with empty candidates, {len(prompt)} tokens")
        show(decode(prompt))
