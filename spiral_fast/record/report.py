"""report.html: one run on one page that needs no network. Everything shown is escaped: model output is untrusted."""

from __future__ import annotations

from html import escape
from math import fsum, isnan
from pathlib import Path

import yaml

from spiral_fast.evaluate.plots import figures
from spiral_fast.record.charts import charts, svg
from spiral_fast.record.files import written_aside
from spiral_fast.record.headline import headline
from spiral_fast.record.page import gallery, page, pre, table
from spiral_fast.record.run_folder import RunFolder, read_run
from spiral_fast.record.trace_samples import SampleTrace, sample_traces

SHOWN_CHARACTERS = 4000  # of a sample trace
SHOWN_SKIPPED = 20  # steps without an update
NO_SUMS = (
    *("time/grader_restarts", "time/peak_rss_mb", "time/peak_cuda_mb", "problems/epoch"),
    *("time/learner_tokens_per_s_logical", "time/learner_tokens_per_s_computed"),
    *("time/learner_tflops_per_s", "time/learner_mfu"),
)


def write_report(run_dir: str | Path) -> Path:
    """Write run_dir/report.html from whatever the run has left so far, and return its path.

    Raises ConfigError where there is no run.
    """
    run = read_run(run_dir)
    title = f"spiral-fast: {run.path.name}"
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            _status(run),
            _evaluations(run),
            _totals(run),
            "<h2>Training</h2>",
            gallery(picture for _, picture in charts(run)) or "<p>No step was recorded.</p>",
            _traces(run),
            "<h2>Config and environment</h2>",
            _folded("config.yaml", run.config),
            _folded("environment.json", run.environment),
        ]
    )
    path = run.path / "report.html"
    with written_aside(path) as aside:
        aside.write_text(page(title, body), encoding="utf-8")
    return path


def _status(run: RunFolder) -> str:
    model, problems = run.config["model"]["path"], run.config["problems"]["source"]
    line = f"<p>{escape(run.config['credit']['algorithm'])} on {escape(problems)} with {escape(model)}, seed "
    line += f"{run.config['seed']}, {run.steps_done} steps.</p>"
    if run.replayed is not None:
        line += f"<p>Replayed: the learner ran alone on the traces of {escape(run.replayed)}.</p>"
    if run.incomplete:
        line += f'<p class="note">This run is incomplete: {escape(run.incomplete)}.</p>'
    line += _skipped(run)
    limit = run.config["record"]["logp_gap_warning"]
    wide = [row["step"] for row in run.metrics if (row.get("logp_gap/mean") or 0) > limit]
    if wide:
        line += (
            f'<p class="note">In {len(wide)} steps (first: {wide[0]}) learner and engine log-probs differed by more '
            f"than record.logp_gap_warning {limit} on average.</p>"
        )
    return line


def _skipped(run: RunFolder) -> str:
    skipped = [row for row in run.metrics if row.get("skipped")]
    if not skipped:
        return ""
    lines = []
    for row in skipped[:SHOWN_SKIPPED]:
        problems = row.get("skipped_problems") or []
        blamed = f" (problems {', '.join(map(str, problems))})" if problems else ""
        lines.append(f"<li>step {row['step']}: {escape(str(row['skipped']) + blamed)}</li>")
    if len(skipped) > SHOWN_SKIPPED:
        lines.append(f"<li>{len(skipped) - SHOWN_SKIPPED} more in metrics.jsonl</li>")
    return f'<div class="note">{len(skipped)} steps made no update:<ul>{"".join(lines)}</ul></div>'


def _evaluations(run: RunFolder) -> str:
    """Before beside after with their intervals; the figures lay every evaluation over the others."""
    if not run.evaluations:
        return ""
    shown = [label for label in ("before", "after") if label in run.evaluations] or list(run.evaluations)
    numbers = {label: headline(run.evaluations[label]) | _habits(run.evaluations[label]) for label in shown}
    intervals = {label: headline(run.evaluations[label]["intervals"]) for label in shown}
    compare = shown == ["before", "after"]
    rows = []
    for name in dict.fromkeys(name for label in shown for name in numbers[label]):
        values = [numbers[label].get(name) for label in shown]
        cells = [_with_interval(value, intervals[label].get(name)) for label, value in zip(shown, values, strict=True)]
        if compare:
            cells.append("" if None in values else f"{values[1] - values[0]:+.3f}")
        rows.append([name, *cells])
    comparison = table(["", *shown, *(["change"] if compare else [])], rows)
    pictures = gallery(svg(figure) for figure in figures(run.evaluations).values())
    first = run.evaluations[shown[0]]
    return (
        f"<h2>Evaluation</h2>\n<p>{first['problems']} problems, {first['samples']} search traces each. "
        "pass@k, majority@k and RSA (recursive self-aggregation) are shares of problems with "
        f"{first['intervals']['level']:.0%} bootstrap intervals over the problems.</p>\n{comparison}\n{pictures}"
    )


def _habits(evaluation: dict) -> dict[str, float]:
    """How the search traces of an evaluation look, whatever their reward."""
    return {
        "distinct answers per problem": evaluation["distinct_answers"],
        "search entropy, nats per token": evaluation["search_entropy"],
        "search length, tokens": evaluation["stages"][0]["mean_length"],
    }


def _with_interval(value: float | None, interval: list[float] | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def _totals(run: RunFolder) -> str:
    """Sums over the steps, what was saved and what was clipped."""
    total = {}
    summed = ("tokens/", "flops/", "time/", "problems/")
    measured = {key for row in run.metrics for key in row if key.startswith(summed)}
    for key in sorted(measured.difference(NO_SUMS)):
        total[key] = fsum(value for value in run.series(key) if not isnan(value))
    if not total:
        return ""
    rows = [[key, f"{value:,.1f} s" if key.startswith("time/") else f"{value:,.0f}"] for key, value in total.items()]
    for name, logical, computed in (
        ("prompt tokens not computed: shared prefixes", "tokens/prompt", "tokens/computed"),
        ("learner tokens not computed: prefixes, dead rows", "tokens/learner_logical", "tokens/learner_computed"),
        ("learner FLOPs not computed: prefixes, dead rows", "flops/learner_logical", "flops/learner_computed"),
    ):
        if total.get(logical):
            rows.append([name, f"{1 - total.get(computed, 0) / total[logical]:.1%}"])
    clipped = [value for value in run.series("grad/clipped") if not isnan(value)]
    if clipped:
        rows.append(["steps with a clipped gradient", f"{fsum(clipped) / len(clipped):.1%} of {len(clipped)}"])
    return f"<h2>Totals over the steps</h2>\n{table(['', 'sum'], rows)}"


def _traces(run: RunFolder) -> str:
    samples = sample_traces(run.path)
    if samples is None:
        return ""
    shown = [
        f"<h2>Sample traces</h2>\n<p>Step {samples.step}, problem {escape(samples.problem)}. Reference answer: "
        f"{escape(samples.answer)}</p>",
        pre(samples.question),
        *map(_trace, samples.traces),
    ]
    return "\n".join(shown)


def _trace(trace: SampleTrace) -> str:
    facts = [
        trace.name,
        "not graded" if trace.verdict is None else f"{trace.verdict}, reward {trace.reward:g}",
        f"credit {trace.credit:+.4f}{' (gated)' if trace.gated else ''}",
        f"{trace.length} tokens, {trace.finish_reason}",
    ]
    text = trace.text[:SHOWN_CHARACTERS]
    if len(trace.text) > SHOWN_CHARACTERS:
        text += f"\n[{len(trace.text) - SHOWN_CHARACTERS} more characters in the trace store]"
    return f"<p>{escape(' | '.join(facts))}</p>{pre(text)}"


def _folded(name: str, content: dict) -> str:
    return f"<details><summary>{escape(name)}</summary>{pre(yaml.safe_dump(content, sort_keys=False))}</details>"
