"""SGLang on the CPU (see peer.py): its torch_native attention, radix cache on, leaders first.

Each distinct prompt is prefilled once (max_new_tokens 0, a prompt after the one it shares most with), then all traces
are asked for together. The stand-in of tests/support must be on PYTHONPATH.
"""

from __future__ import annotations

from bench.rollout.peer import Sample, serve
from spiral_fast.rollout.sglang.leaders import Leaders, encode


def make(job: dict) -> Sample:
    from sglang.srt.entrypoints.engine import Engine

    lora = {}
    if job["adapter"]:
        lora = dict(enable_lora=True, lora_backend="torch_native", lora_paths={"policy": job["adapter"]})
        lora |= dict(max_loras_per_batch=1, lora_target_modules=["all"], max_lora_rank=job["rank"])
    engine = Engine(
        model_path=job["folder"],
        device="cpu",
        attention_backend="torch_native",
        dtype=job["dtype"],
        max_total_tokens=job["cache_tokens"],
        max_running_requests=job["max_running"],
        context_length=1024,
        skip_tokenizer_init=True,
        log_level="error",
        random_seed=0,
        **lora,
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[dict]:
        settings = [dict(max_new_tokens=n, temperature=1.0, top_p=1.0, top_k=-1, ignore_eos=True) for n in lengths]
        names = {"lora_path": ["policy"] * len(prompts)} if lora else {}
        log_probs = [n > 0 for n in lengths]
        return engine.generate(input_ids=prompts, sampling_params=settings, return_logprob=log_probs, **names)

    def sample(prompts: list[list[int]], lengths: list[list[int]]) -> tuple[list[int], int]:
        engine.flush_cache()
        computed, leaders, pending = 0, Leaders(), prompts
        while pending:
            wave, later = [], []
            for prompt in pending:
                if leaders.waits_for(encode(prompt)) is None:
                    leaders.start(encode(prompt))
                    wave.append(prompt)
                else:
                    later.append(prompt)
            done = generate(wave, [0] * len(wave))
            computed += sum(d["meta_info"]["prompt_tokens"] - d["meta_info"]["cached_tokens"] for d in done)
            for prompt in wave:
                leaders.finish(encode(prompt))
            pending = later
        traces = [(prompt, n) for prompt, own in zip(prompts, lengths, strict=True) for n in own]
        done = generate([prompt for prompt, _ in traces], [n for _, n in traces])
        computed += sum(d["meta_info"]["prompt_tokens"] - d["meta_info"]["cached_tokens"] for d in done)
        return [len(d["output_ids"]) for d in done], computed

    return sample


if __name__ == "__main__":  # SGLang's own processes import this file
    serve(make)
