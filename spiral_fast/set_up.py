"""What training, evaluation and a dry run all need before they begin."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spiral_fast.config import Config, ConfigError
from spiral_fast.learner.model import LoadedModel, load_model
from spiral_fast.problems import ProblemSets, load_problems
from spiral_fast.prompts import make_prompts
from spiral_fast.rollout.fits import WorstCase, check_fits


@dataclass(frozen=True)
class SetUp:
    problems: ProblemSets
    loaded: LoadedModel
    prompts: object  # spiral_fast.prompts.Prompts
    worst: WorstCase  # longest sequences that can come up, tokens


def set_up(config: Config) -> SetUp:
    """Problems, model with a seeded adapter, prompts; refuses what could not fit. Raises ConfigError."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)  # of the fresh adapter
    problems = load_problems(config)
    loaded = load_model(config.model, _device(config))
    prompts = make_prompts(config, loaded.tokenizer)
    worst = check_fits(config, prompts, [*problems.train, *problems.eval], loaded.max_context)
    return SetUp(problems, loaded, prompts, worst)


def _device(config: Config) -> str:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' cannot be used: torch finds no CUDA device; set device: cpu")
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device
