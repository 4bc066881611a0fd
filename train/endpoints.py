"""One OpenAI-compatible endpoint: what it is asked, what it answers, and whose fault a failure is.

Owns HTTP and nothing else: which prompt goes to which endpoint, and what is tried again, is the business of
`asking`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from train.conversations import Message
from train.sampling import Sampling

CONNECT_SECONDS = 10.0
MAX_SHOWN = 300
# The request itself is wrong; any other error status says something about the endpoint.
PROMPT_STATUSES = (400, 413, 422)
FINISHED = ("stop", "length")


class PromptRefusedError(Exception):
    """The endpoint works, but gives no usable answer to this prompt."""


class EndpointFailureError(Exception):
    """The endpoint failed. `reached`: it had the prompt, so the prompt may be what makes it fail."""

    def __init__(self, reason: str, *, reached: bool) -> None:
        super().__init__(reason)
        self.reached = reached


@dataclass(frozen=True)
class Question:
    """All of a request except its messages."""

    model: str
    sampling: Sampling
    max_tokens: int
    thinking: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}, allowed are 2 and more")

    def to_request(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The body of a request.

        `return_token_ids` makes SGLang (and vLLM) give the generated ids beside the text: tokenising a text
        anew does not always give back the ids it came from.
        """
        return {
            "model": self.model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "max_tokens": self.max_tokens,
            "stream": False,
            "return_token_ids": True,
            "chat_template_kwargs": {"enable_thinking": self.thinking},
            **self.sampling.to_request(),
        }


class Endpoint:
    """An endpoint, asked over kept-alive connections."""

    def __init__(
        self,
        url: str,
        *,
        connections: int,
        timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        """`url` is the server's, with or without /v1; at most `connections` requests go on at once.

        Raises:
            ValueError: `url` is no http address, or a number is out of range.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {url!r} must be an address such as http://127.0.0.1:30000")
        if connections < 1:
            raise ValueError(f"concurrency is {connections}, allowed are 1 and more")
        if timeout_s <= 0:
            raise ValueError(f"timeout is {timeout_s}, allowed is more than 0 seconds")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        )

    async def models(self) -> list[str]:
        """The models it serves.

        Raises:
            EndpointFailureError: it does not answer as an OpenAI-compatible endpoint does.
        """
        listed = await self._request("GET", "/v1/models", None)
        try:
            return [str(model["id"]) for model in listed["data"]]
        except (KeyError, TypeError) as error:
            raise EndpointFailureError(
                "its /v1/models is not that of an OpenAI-compatible server", reached=False
            ) from error

    async def ask(self, question: Question, messages: Sequence[Message]) -> Message:
        """The answer to `messages`.

        Raises:
            PromptRefusedError: there is none, or it is empty.
            EndpointFailureError: the endpoint failed.
        """
        body = question.to_request(messages)
        return _answer(await self._request("POST", "/v1/chat/completions", body), thinking=question.thinking)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            response = await self._client.request(method, path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise EndpointFailureError(f"cannot connect ({_name(error)})", reached=False) from error
        except httpx.HTTPError as error:
            raise EndpointFailureError(f"the connection broke ({_name(error)})", reached=True) from error
        if response.is_success:
            try:
                return response.json()
            except ValueError as error:
                raise EndpointFailureError("its response is not JSON", reached=True) from error
        reason = f"status {response.status_code}: {_error_text(response)}"
        if response.status_code in PROMPT_STATUSES:
            raise PromptRefusedError(reason)
        raise EndpointFailureError(reason, reached=response.status_code >= 500)


def _answer(response: Any, *, thinking: bool) -> Message:
    try:
        choice = response["choices"][0]
        content = choice["message"]["content"] or ""
        reasoning = choice["message"].get("reasoning_content") or ""
        finish_reason = choice["finish_reason"]
        # SGLang's name, then vLLM's
        given = choice.get("response_token_ids") or choice.get("token_ids")
        output_ids = None if given is None else np.array(given, dtype=np.int32)
        usage = response.get("usage") or {}
        prompt_tokens = usage.get("prompt_tokens")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise EndpointFailureError(
            f"its response is not a chat completion ({_name(error)})", reached=True
        ) from error
    if finish_reason == "abort":
        raise EndpointFailureError("it gave up the request", reached=True)
    if finish_reason not in FINISHED:
        raise PromptRefusedError(f"the answer ended with {finish_reason!r}, wanted is stop or length")
    if not content.strip():
        raise PromptRefusedError("the answer is empty")
    if (thinking or reasoning) and output_ids is None:
        raise PromptRefusedError("an answer with thoughts needs token ids, and the endpoint gave none")
    return Message("assistant", content, output_ids, finish_reason, prompt_tokens)


def _error_text(response: httpx.Response) -> str:
    try:
        body = response.json()
        error = body.get("error") or body
        text = error.get("message") or json.dumps(body)
    except (AttributeError, ValueError):
        text = response.text
    return " ".join(str(text).split())[:MAX_SHOWN] or response.reason_phrase


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip(": ")[:MAX_SHOWN]
