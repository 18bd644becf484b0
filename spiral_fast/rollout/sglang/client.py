"""One SGLang server over HTTP: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np

from spiral_fast.learner.policy_source import Adapter
from spiral_fast.rollout.sglang import adapter as wire
from spiral_fast.rollout.sglang.identity import ServerIdentity
from spiral_fast.rollout.sglang.names import KEY_VARIABLE


class ServerLost(ConnectionError):
    """The server is gone, broken or silent; what it was asked may be asked of another."""

    def __init__(self, url: str, why: str):
        super().__init__(f"SGLang server {url} is lost: {why}")
        self.url, self.why = url, why


class RequestRefused(ValueError):
    """The server lives and will not do this; `why` in its own words."""

    def __init__(self, url: str, what: str, why: str):
        super().__init__(f"SGLang server {url} refused {what}: {why}")
        self.url, self.why = url, why


@dataclass(frozen=True)
class Generated:
    tokens: list[int]  # sampled ids, the stop token included when one was sampled
    logp: np.ndarray  # (len(tokens),) float32 log-probs at the sampling temperature; NaN where the server's are none
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int  # of prompt_tokens, served from the server's cache


class Client:
    """For use in one asyncio loop. A call waits as long as the server is at work; after `timeout_s` without an answer
    it is asked whether it lives, and is lost when that is not answered within `timeout_s` either.

    adapter_folder: where adapters for a tensor-parallel server are written, which that server must see too.
    """

    def __init__(
        self, url: str, api_key: str | None = None, *, timeout_s: float = 60.0, adapter_folder: Path | None = None
    ):
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._adapter_folder = adapter_folder
        self._identity: ServerIdentity | None = None
        self._asking: asyncio.Task[bool] | None = None  # whether it lives
        self._unanswered: set[str] = set()  # ids of requests, also of those that were cancelled here
        self._http = httpx.AsyncClient(
            base_url=self.url,
            # One connection a request: SGLang closes an idle one, perhaps as the next request is on its way.
            headers={"Connection": "close"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=httpx.Timeout(None, connect=timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # a proxy between would have its own ideas of time limits
        )

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        adapter: str | None,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Collection[int],
        seed: int | None = None,
    ) -> Generated:
        """Sample up to max_new_tokens (0: only compute the prompt's keys and values) by plain temperature sampling.

        Raises ServerLost; RequestRefused for a prompt that is too long, an unknown adapter, or a stop at a token that
        is none of stop_token_ids.
        """
        sampling = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "stop_token_ids": sorted(stop_token_ids),
        }
        known = self._identity.vocabulary if self._identity else None
        if known is not None and max(prompt) >= known:  # SGLang itself would die of it
            why = f"token {max(prompt)} is beyond its vocabulary of {known}"
            raise RequestRefused(self.url, f"{len(prompt)} tokens of prompt", why)
        if seed is not None:
            sampling["sampling_seed"] = seed
        body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": max_new_tokens > 0}
        answer = await self._generate(body, adapter)
        what = f"{len(prompt)} tokens of prompt"
        with self._reading(what):
            meta, tokens = answer["meta_info"], answer["output_ids"]
            reason, counted = meta["finish_reason"]["type"], (meta["prompt_tokens"], meta["cached_tokens"] or 0)
            logp = np.array([entry[0] for entry in meta.get("output_token_logprobs", ())], dtype=np.float32)
        if max_new_tokens == 0:
            tokens, logp = [], logp[:0]
        if len(logp) != len(tokens) or reason not in ("stop", "length"):
            raise RequestRefused(self.url, what, f"{len(tokens)} tokens, {len(logp)} log-probs, end by {reason!r}")
        if reason == "stop" and tokens[-1] not in stop_token_ids:
            why = f"it stopped at token {tokens[-1]}, which ends no trace by the learner's tokenizer: another model"
            raise RequestRefused(self.url, what, why)
        if reason == "length" and len(tokens) < max_new_tokens:
            why = f"it cut the trace at {len(tokens)} of {max_new_tokens} tokens: its context or cache is too small"
            raise RequestRefused(self.url, what, why)
        return Generated(tokens, logp, reason, *counted)

    async def prompt_log_probs(self, tokens: Sequence[int], *, adapter: str | None) -> np.ndarray:
        """(len(tokens) - 1,) float32 log-probs of tokens[1:] at temperature 1, the only one that SGLang has for
        prompts. Such a request reads nothing from the server's cache."""
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._generate(body, adapter)
        with self._reading("to compute log-probs"):
            entries = answer["meta_info"]["input_token_logprobs"]
            return np.array([logp for logp, *_ in entries[1:]], dtype=np.float32)  # nothing predicts the first

    async def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Under a new name. Raises RequestRefused where the server has no place for it, before anything is sent."""
        identity = await self.identity()
        sent = wire.for_sglang(adapter)
        what = f"adapter {name!r}"
        if not identity.lora:
            raise RequestRefused(self.url, what, "it was started without LoRA; start it with `spiral-fast serve`")
        if identity.max_lora_rank is not None and adapter.rank > identity.max_lora_rank:
            raise RequestRefused(self.url, what, f"rank {adapter.rank} is above its {identity.max_lora_rank}")
        if identity.lora_modules is not None:
            absent = sorted(set(sent.config["target_modules"]) - identity.lora_modules)
            if absent and "all" not in identity.lora_modules:
                raise RequestRefused(self.url, what, f"it takes no adapter on {', '.join(absent)}")
        if identity.tensor_parallel == 1:
            await self._post("/load_lora_adapter_from_tensors", wire.as_request(name, sent), what)
            return
        if self._adapter_folder is None:
            raise RequestRefused(self.url, what, "with tensor parallelism it reads a folder, and none was named")
        folder = (self._adapter_folder / name).absolute()
        wire.write(sent, folder)
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, what)

    async def unload_adapter(self, name: str) -> None:
        """Returns once no request uses it any more."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, f"to unload {name!r}")
        if self._adapter_folder is not None:
            shutil.rmtree(self._adapter_folder / name, ignore_errors=True)

    async def abort(self) -> None:
        """End every request of this client on the server; nobody here may still wait for one."""
        ids, self._unanswered = self._unanswered, set()
        await asyncio.gather(*(self._post("/abort_request", {"rid": id}, "to abort a request") for id in ids))

    async def flush(self) -> None:
        """Empty the cache. Raises RequestRefused while requests are pending."""
        await self._post("/flush_cache", None, "to flush its cache")

    async def identity(self) -> ServerIdentity:
        """Asked once."""
        if self._identity is None:
            info, model = await self._get("/server_info"), await self._get("/model_info")
            vocabulary = await self._vocabulary()
            with self._reading("to say what it is"):
                self._identity = ServerIdentity.of(info.json(), model.json(), vocabulary)
        return self._identity

    async def alive(self, timeout_s: float) -> bool:
        """Whether a token comes out of its model within `timeout_s` (of any request, if it is at work). Raises
        RequestRefused where something else than SGLang answers."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            try:
                answer = await self._http.get("/health_generate", timeout=left)
            except httpx.ConnectError:
                return False
            except httpx.TransportError:
                pass
            else:
                if answer.status_code == 200:
                    return True
                if answer.status_code < 500:
                    why = f"it answers {answer.status_code}: is there an SGLang server?"
                    raise RequestRefused(self.url, "/health_generate", why)
            await asyncio.sleep(min(0.5, max(0.0, end - time.monotonic())))  # starting, or SGLang's own limit of 20 s
        return False

    async def release_memory(self) -> None:
        """Give the GPU memory of the KV cache back until `resume_memory`; the cache must be empty."""
        await self._post("/release_memory_occupation", {"tags": ["kv_cache"]}, "to release its memory")

    async def resume_memory(self) -> None:
        await self._post("/resume_memory_occupation", {"tags": ["kv_cache"]}, "to take its memory again")

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _generate(self, body: dict[str, Any], adapter: str | None) -> dict[str, Any]:
        if adapter is not None:
            body["lora_path"] = adapter  # SGLang's word for the adapter's name
        # All ids have one length: SGLang ends every request whose id begins with the one it is told to end.
        id = body["rid"] = secrets.token_hex(16)
        self._unanswered.add(id)
        what = f"{len(body['input_ids'])} tokens of prompt"
        try:
            answer = await self._post("/generate", body, what)
        except Exception:
            self._unanswered.discard(id)
            raise
        self._unanswered.discard(id)
        with self._reading(what):
            found = answer.json()
            reason = found["meta_info"]["finish_reason"]
            if reason["type"] == "abort":
                why = reason.get("message", "it aborted the request")
                if (reason.get("status_code") or 400) >= 500:
                    raise ServerLost(self.url, why)
                raise RequestRefused(self.url, what, why)
        return found

    async def _vocabulary(self) -> int | None:
        """SGLang tells it only to whoever asks for a token beyond it."""
        beyond = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        try:
            await self._post("/generate", beyond | {"token_ids_logprob": [2**31 - 1]}, "")
        except RequestRefused as error:
            told = re.search(r"valid range is \[0, (\d+)\)", error.why)
            return int(told[1]) if told else None
        return None

    async def _get(self, path: str) -> httpx.Response:
        return await self._answer(self._http.get(path), path)

    async def _post(self, path: str, body: dict[str, Any] | None, what: str) -> httpx.Response:
        return await self._answer(self._http.post(path, json=body), what)

    async def _answer(self, request, what: str) -> httpx.Response:
        asked = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait({asked}, timeout=self.timeout_s))[0]:
                if not await self._lives():
                    why = f"no answer in {self.timeout_s:g} s, and none to the question whether it lives in as many"
                    raise ServerLost(self.url, why)
            answer = asked.result()
        except httpx.TransportError as error:
            raise ServerLost(self.url, f"{type(error).__name__}: {error}".rstrip(": ")) from None
        finally:
            asked.cancel()
        if answer.status_code >= 500:
            raise ServerLost(self.url, f"it answered {answer.status_code}: {_words(answer)}")
        if answer.status_code in (401, 403):
            raise RequestRefused(self.url, what, f"no or another API key; set {KEY_VARIABLE} to the server's")
        if answer.status_code >= 400:
            raise RequestRefused(self.url, what, _words(answer))
        return answer

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Within: an answer that is none of SGLang's, or of another release's, is a refusal."""
        try:
            yield
        except RequestRefused:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"its answer is not SGLang's ({type(error).__name__}: {error})"
            raise RequestRefused(self.url, what, " ".join(why.split())) from None

    async def _lives(self) -> bool:
        """One question for all who wait."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self.alive(self.timeout_s))
        return await asyncio.shield(self._asking)


def _words(answer: httpx.Response) -> str:
    """The server's own, on one line."""
    try:
        found = answer.json()
        found = found.get("error", found.get("error_message", found.get("message", found)))
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        text = answer.text
    text = " ".join(text.split())
    return text if len(text) <= 500 else text[:500] + " ..."
