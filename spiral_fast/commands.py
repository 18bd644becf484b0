"""The subcommands of `spiral-fast`. Heavy imports happen inside each, so that --help is instant."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from spiral_fast.config import Config, ConfigError, load_config
from spiral_fast.launched import launched, launched_rank

EXAMPLES = """
Train SPIRAL (arXiv 2606.23595): reinforcement learning of search and aggregation in one adapter.

    spiral-fast doctor                               what is installed

    spiral-fast train configs/demo.yaml --dry-run    show prompts, lengths

    spiral-fast verify configs/demo.yaml             is everything right here

    spiral-fast plan configs/paper_qwen3_4b.yaml --gpus 8    memory and hours before they are paid for

    spiral-fast train configs/demo.yaml              minutes on 2 CPU cores

    spiral-fast train configs/demo.yaml learner.steps=20 run_dir=runs/short

    spiral-fast train --resume runs/short            go on after a stop

    spiral-fast eval configs/demo.yaml --adapter runs/demo/checkpoints/step_000160

    spiral-fast compare base=base.json spiral=spiral.json    evaluations over each other

    spiral-fast cross configs/demo.yaml --search base --search spiral=S --aggregation spiral=S

    spiral-fast report runs/demo                     write its report again

    spiral-fast prepare configs/prepare_polaris.yaml --out data/polaris

    spiral-fast serve configs/paper_qwen3_4b.yaml    an SGLang server to train on
"""

app = typer.Typer(
    name="spiral-fast",
    help=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; every key: docs/config.md")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="change keys of the file, for example learner.steps=20"),
]


def short_errors(command: Callable) -> Callable:
    """What the user can mend becomes one line on stderr: exit code 2 for the config, 1 for the rest."""

    @functools.wraps(command)
    def run(*args, **kwargs):
        from spiral_fast.rewards.grader import GraderFailed, TooManyUngradable
        from spiral_fast.rollout.engine import EngineFailed, PromptTooLong

        try:
            return command(*args, **kwargs)
        except ConfigError as error:
            _fail(error, 2)
        except (EngineFailed, GraderFailed, TooManyUngradable, PromptTooLong, FloatingPointError) as error:
            _fail(error, 1)
        except ModuleNotFoundError as error:
            from spiral_fast.doctor import package_of

            package = package_of(error.name or "")
            if package is None:
                raise
            _fail(f"{package.name} is not installed; run: {package.install}", 1)
        except Exception as error:
            from spiral_fast.record.files import cannot_write

            message = cannot_write(error)
            if message is None:
                if (who := _rank()) and not isinstance(error, typer.Exit):
                    typer.echo(f"{who}{type(error).__name__}: {error}", err=True)  # beside the traceback that follows
                raise
            _fail(f"{message}; what was written before is whole", 1)

    return run


def _fail(message: object, code: int) -> None:
    typer.echo(f"{_rank()}error: {message}", err=True)
    raise typer.Exit(code)


def _rank() -> str:
    """Whose words these are, where torchrun started several processes."""
    return f"rank {launched_rank()}: " if launched() > 1 else ""


def _version(wanted: bool) -> None:
    if wanted:
        from spiral_fast.record.environment import version

        typer.echo(f"spiral-fast {version('spiral-fast') or '(not installed, run from a checkout)'}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    pass


@app.command()
@short_errors
def train(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML file; every key: docs/config.md")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="check the config, show sample prompts and worst-case lengths; train nothing"),
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="go on with the run in this folder, with its own config")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="TRACES", help="only the learner, on the traces that a run stored")
    ] = None,
) -> None:
    """Train one adapter; evaluates before and after and writes report.html into run_dir.

    spiral-fast train configs/demo.yaml learner.steps=20 run_dir=runs/short

    Stopped by Ctrl-C, SIGTERM or a crash, a run goes on as if it had not been stopped:

    spiral-fast train --resume runs/short

    On several GPUs, one process each (docs/multi_gpu.md):

    torchrun --nproc-per-node 8 -m spiral_fast train configs/paper_qwen3_4b.yaml

    To debug the learner without sampling anything:

    spiral-fast train configs/demo.yaml --replay runs/short run_dir=runs/again
    """
    overrides = overrides or []
    from spiral_fast.interrupts import sigterm_raises
    from spiral_fast.record.files import holds_run, refuse_other_run, refuse_unwritable
    from spiral_fast.record.writers.writers import refuse_missing_writers
    from spiral_fast.rollout.engine import EngineFailed

    if resume is not None:
        if replay is not None:
            raise ConfigError("--replay: makes a new run of a config; leave out --resume")
        from spiral_fast.resume import resumed_config

        if config is not None and "=" not in config:
            raise ConfigError(f"--resume: a run goes on with its own config; leave out {config!r}")
        settings = resumed_config(resume, [config, *overrides] if config else overrides)
    elif config is None:
        raise ConfigError("CONFIG is missing; for example: spiral-fast train configs/demo.yaml")
    else:
        settings = load_config(config, overrides)
    if not launched_rank():  # before the model is loaded; of several ranks the one that writes
        refuse_unwritable("run_dir", Path(settings.run_dir))
    refuse_missing_writers(settings)
    if resume is None:
        refuse_other_run(settings.run_dir)
    try:
        with sigterm_raises():  # while everything is loaded too
            if dry_run:
                from spiral_fast.dry_run import dry_run as show

                show(settings)
                return
            if replay is not None:
                from spiral_fast.replay import replay as run

                folder = run(settings, replay)
            else:
                from spiral_fast import ranks
                from spiral_fast.train import train as run

                with ranks.others_alive():
                    folder = run(settings, resume=resume is not None)
    except KeyboardInterrupt as interrupt:
        _stopped(settings, dry_run, interrupt)
    except EngineFailed as error:
        if not holds_run(Path(settings.run_dir)):
            raise
        _fail(f"{error}\n{_how_to_go_on(Path(settings.run_dir))}", 1)
    from spiral_fast import ranks

    if not ranks.rank():
        typer.echo(f"report {folder / 'report.html'}")
    ranks.leave()


def _stopped(settings: Config, dry_run: bool, interrupt: KeyboardInterrupt) -> None:
    from spiral_fast.record.files import holds_run

    folder = Path(settings.run_dir)
    word, code = _how_stopped(interrupt)
    if launched_rank():  # rank 0 says it, once
        raise typer.Exit(code)
    if dry_run or not holds_run(folder):
        _fail(f"{word} before the run began; nothing was written", code)
    _fail(f"{word}; {_how_to_go_on(folder)}", code)


def _how_stopped(interrupt: KeyboardInterrupt) -> tuple[str, int]:
    """In a word, and the exit code."""
    from spiral_fast.interrupts import Terminated

    return ("terminated", 143) if isinstance(interrupt, Terminated) else ("interrupted", 130)


def _how_to_go_on(folder: Path) -> str:
    return f"the run so far lies in {folder}; to go on: spiral-fast train --resume {folder}"


@app.command("eval")
@short_errors
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    adapter: Annotated[Path | None, typer.Option(help="PEFT adapter folder, for example a checkpoint of a run")] = None,
    out: Annotated[Path, typer.Option(help="new file for the numbers; plots and traces go beside it")] = Path(
        "eval.json"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="go on with the traces beside --out")] = False,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="sample only part I of N; the last one writes --out")
    ] = "1/1",
) -> None:
    """Evaluate a model, with or without an adapter: pass@k, majority@k, RSA, length sweep, token budget, verification.

    spiral-fast eval configs/demo.yaml --adapter runs/demo/checkpoints/step_000160 --out runs/demo/eval_again.json
    """
    settings = load_config(config, overrides or [])
    from spiral_fast.evaluate_command import evaluate_adapter, parse_shard

    try:
        evaluate_adapter(settings, adapter, out, resume=resume, shard=parse_shard(shard))
    except KeyboardInterrupt:
        _fail("interrupted; whole chunks of problems are kept beside --out: go on with --resume", 130)


@app.command()
@short_errors
def verify(
    config: ConfigFile,
    overrides: Overrides = None,
    json: Annotated[Path | None, typer.Option("--json", help="file for the figures; nothing else is written")] = None,
) -> None:
    """Check that engine, learner, cache, rewards and memory are right on your model and config, in 3 minutes or less.

    Exit code 1 when a check fails. docs/verify.md says what each one compares.

    spiral-fast verify configs/demo.yaml --json verify.json
    """
    settings = load_config(config, overrides or [])
    from spiral_fast.verify_command import verify as run

    try:
        if not run(settings, json):
            raise typer.Exit(1)
    except KeyboardInterrupt:
        _fail("interrupted; nothing was written", 130)


@app.command()
@short_errors
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option(help="for example h100-80gb, h200-141gb; a wrong name lists all")] = "h100-80gb",
    gpus: Annotated[int, typer.Option(min=1, help="in all; 1: rollout and learner take turns on it")] = 1,
    learner_gpus: Annotated[
        int, typer.Option(min=1, help="of them for the learner, the rest for SGLang servers; 1 is what can be run")
    ] = 1,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="config.json of the model; none = that of model.path")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="of traces, in tokens: uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, fixed:N, a file with one length a "
            "line, or the folder of a run; none = uniform from an eighth of L_max to L_max"
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="of a search prompt; none = 256, at most rollout.max_prompt_tokens")
    ] = None,
    solve_rate: Annotated[
        str, typer.Option(help="chance that a trace is right; uniform = each problem has its own, uniform in 0..1")
    ] = "uniform",
    mfu: Annotated[float, typer.Option(help="share of the peak FLOP/s reached by learner and prefill")] = 0.4,
    bandwidth: Annotated[float, typer.Option(help="share of the peak memory bandwidth reached in decode")] = 0.7,
    problems: Annotated[int, typer.Option(min=1, help="live problems to simulate token by token")] = 16,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write all figures, unrounded")] = None,
) -> None:
    """Memory, tokens, FLOPs, seconds and GPU-hours of a step, without a GPU and without weights; does it fit, and what
    to change if not (exit code 1).

    One GPU, rollout and learner in turns:

    spiral-fast plan configs/paper_qwen3_4b.yaml --gpu h100-80gb --model qwen3-4b/config.json

    A node: one GPU learns, seven serve; keys of the config may be changed as everywhere:

    spiral-fast plan configs/paper_qwen3_4b.yaml learner.micro_batch_tokens=65536 --gpus 8 --model qwen3-4b/config.json

    With the lengths that a run had:

    spiral-fast plan configs/smollm2_cpu.yaml --gpu l4-24gb --lengths runs/smollm2

    docs/plan.md says what each figure is made of and how it was checked.
    """
    settings = load_config(config, overrides or [])
    from spiral_fast.plan_command import plan as run

    fits = run(
        settings,
        gpu,
        gpus,
        learner_gpus=learner_gpus,
        model=model,
        lengths=lengths,
        prompt_tokens=prompt_tokens,
        solve_rate=solve_rate,
        mfu=mfu,
        bandwidth=bandwidth,
        problems=problems,
        json=json,
    )
    if not fits:
        raise typer.Exit(1)


@app.command()
@short_errors
def compare(
    evaluations: Annotated[list[str], typer.Argument(metavar="LABEL=EVAL.JSON...", help="the first is the reference")],
    out: Annotated[Path, typer.Option(help="page to write; one file that needs no network")] = Path("compare.html"),
) -> None:
    """Lay evaluations of the same problems over each other: figures, every number, paired differences.

    spiral-fast compare base=base.json spiral=spiral.json grpo=grpo.json --out compare.html
    """
    from spiral_fast.compare_command import compare_evaluations

    compare_evaluations(evaluations, out)
    typer.echo(out)


@app.command()
@short_errors
def cross(
    config: ConfigFile,
    overrides: Overrides = None,
    search: Annotated[list[str] | None, typer.Option(metavar="LABEL=ADAPTER", help="repeat; base = the model")] = None,
    aggregation: Annotated[list[str] | None, typer.Option(metavar="LABEL=ADAPTER", help="repeat, as above")] = None,
    out: Annotated[Path, typer.Option(help="new file for the matrix; plot and traces go beside it")] = Path(
        "cross.json"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="go on with the traces beside --out")] = False,
) -> None:
    """Pair every search checkpoint with every aggregation checkpoint: accuracy after one step of RSA, as a matrix.

    spiral-fast cross configs/demo.yaml --search base --search spiral=S --aggregation base --aggregation spiral=S
    """
    settings = load_config(config, overrides or [])
    from spiral_fast.cross_command import cross_pair, parse_checkpoints

    sides = parse_checkpoints("--search", search or []), parse_checkpoints("--aggregation", aggregation or [])
    try:
        cross_pair(settings, *sides, out, resume)
    except KeyboardInterrupt:
        _fail("interrupted; whole chunks of problems are kept beside --out: go on with --resume", 130)


@app.command()
@short_errors
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="a run: its newest whole checkpoint")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="new folder")],
    merged: Annotated[bool, typer.Option("--merged", help="a whole model for plain transformers")] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="names the base model of an adapter outside its run")
    ] = None,
    role: Annotated[
        str | None, typer.Option(metavar="ROLE", help="of two adapters search or aggregation alone; none = both")
    ] = None,
) -> None:
    """Write what was trained as a folder for plain peft or, merged, for plain transformers.

    spiral-fast export runs/demo exported/demo --merged
    """
    from spiral_fast.export import export as write

    typer.echo(write(source, out, merged=merged, config=config, role=role))


@app.command()
@short_errors
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run, finished or not")]) -> None:
    """Write RUN/report.html, one file that needs no network, and print its path.

    spiral-fast report runs/demo
    """
    from spiral_fast.record.report import write_report

    typer.echo(write_report(run))


@app.command()
@short_errors
def prepare(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="new folder for the files")] = Path("prepared"),
) -> None:
    """Filter and split the problems of a config into files, with the counts of what was taken out and why.

    spiral-fast prepare configs/prepare_polaris.yaml --out data/polaris
    """
    settings = load_config(config, overrides or [])
    from spiral_fast.prepare_command import prepare as run

    try:
        run(settings, out)
    except KeyboardInterrupt:
        _fail("interrupted; nothing was written", 130)


@app.command()
@short_errors
def serve(
    config: ConfigFile,
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="address to listen to; any but this machine's own needs a key")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen to")] = 30000,
    log: Annotated[Path | None, typer.Option(help="file its log is added to; none = a new one")] = None,
) -> None:
    """Start one SGLang server for the model of a config, with the flags that training on it needs, until Ctrl-C.

    On the machine with the GPUs; one per server, each with its own GPUs and port:

    CUDA_VISIBLE_DEVICES=0 spiral-fast serve run.yaml --port 30000

    It prints how to train on it:

    spiral-fast train run.yaml 'rollout.servers=["http://127.0.0.1:30000"]'

    For other machines it needs a key, the same where it is served and where it is trained:

    SPIRAL_FAST_SERVER_KEY=... spiral-fast serve run.yaml --host 0.0.0.0
    """
    settings = load_config(config, overrides or [])
    from spiral_fast.interrupts import sigterm_raises
    from spiral_fast.serve_command import serve as run

    try:
        with sigterm_raises():
            run(settings, host, port, log, typer.echo)
    except KeyboardInterrupt as interrupt:
        word, code = _how_stopped(interrupt)
        _fail(f"{word}; the server is stopped", code)


@app.command()
@short_errors
def bench(
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE", help="head, learner, prefix_tree, rollout, set_advantages, tree_attention; none = all"
        ),
    ] = "",
    engine: Annotated[str, typer.Option(help="rollout: sglang = an SGLang server beside the embedded engine")] = "",
) -> None:
    """Run the benchmarks of a checkout against their peers.

    spiral-fast bench head

    spiral-fast bench rollout --engine sglang
    """
    from spiral_fast.bench_command import run_suites

    run_suites(suite, engine=engine)


@app.command()
@short_errors
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="also say what a run of it would take here")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Say what is installed, which backend serves each operation here, and what to install for more."""
    from spiral_fast.doctor import examine

    examine(None if config is None else load_config(config, overrides or []))
