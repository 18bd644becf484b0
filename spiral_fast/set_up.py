"""What training, evaluation and a dry run all need before they begin."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spiral_fast import ranks
from spiral_fast.algorithms import ALGORITHMS
from spiral_fast.config import Config, ConfigError
from spiral_fast.launched import launched
from spiral_fast.learner.model import LoadedModel, load_model, load_tokenizer
from spiral_fast.plan.budget import check_budget
from spiral_fast.problems import ProblemSets, load_problems
from spiral_fast.prompts import make_prompts
from spiral_fast.rollout.fits import WorstCase, check_fits
from spiral_kernels.dispatch import ENVIRONMENT_VARIABLE, BackendError, choose_backend


@dataclass(frozen=True)
class SetUp:
    problems: ProblemSets
    loaded: LoadedModel
    prompts: object  # spiral_fast.prompts.Prompts
    worst: WorstCase  # longest sequences that can come up, tokens


def set_up(config: Config, *, trains: bool = False) -> SetUp:
    """Problems, model with a seeded adapter, prompts; refuses what could not fit. Raises ConfigError.

    trains: first meet the other ranks of torchrun; where learner.fsdp asks for it, the model is then loaded into FSDP's
    shards, never whole.
    """
    device = device_of(config)
    if trains:
        ranks.join(device)
    elif launched() > 1:
        raise ConfigError(f"torchrun: {launched()} ranks: only `train` shares its work among them")
    backends(config, device)
    if config.threads:
        torch.set_num_threads(config.threads)
    if trains:
        check_budget(config, device)
    torch.manual_seed(config.seed)  # of the fresh adapter
    problems = load_problems(config, lambda: make_prompts(config, load_tokenizer(config.model.path)))
    learner = config.learner
    loaded = load_model(config.model, device, shard=trains and learner.fsdp, offload_base=learner.offload_base)
    prompts = make_prompts(config, loaded.tokenizer)
    both = [*problems.train, *problems.eval]
    worst = check_fits(config, prompts, both, loaded.max_context, cuda=device == "cuda")
    return SetUp(problems, loaded, prompts, worst)


def backends(config: Config, device: str) -> dict[str, str]:
    """The backend of each operation of a run on `device` (docs/kernels.md). Raises ConfigError where the environment
    forces one that cannot serve."""
    dtype = getattr(torch, config.model.dtype)
    used = {"linear_logprob": (device, dtype), "linear_policy_loss": (device, dtype)}
    if config.learner.sharing != "none":
        used["tree_attention"] = device, dtype
    if ALGORITHMS[config.credit.algorithm].draws_sets:
        used["set_advantages"] = "cpu", torch.float64
    try:
        return {name: choose_backend(name, torch.device(on), of) for name, (on, of) in used.items()}
    except BackendError as error:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: {error}") from None


def device_of(config: Config) -> str:
    """cpu or cuda. Raises ConfigError."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' cannot be used: torch finds no CUDA device; set device: cpu")
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device
