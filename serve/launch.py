"""Starts SGLang's own server as a subprocess and stops it again: for the demo, the benchmarks and the tests.

    with ServerProcess(model, "--speculative-algorithm", "D3D", ...) as server:
        print(server.generate("Once upon a time", sampling={"max_new_tokens": 16})["text"])

The server listens on 127.0.0.1 only, in a process group of its own, and writes to a log file. It runs on a
CUDA GPU if there is one. This module imports neither sglang nor d3d_sglang.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import torch

HOST = "127.0.0.1"
LOG_FOLDER = Path(__file__).resolve().parents[1] / "build" / "logs"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = 600.0
POLL_S = 0.25
PORTS = (20_000, 32_000)
TAIL_LINES = 40

CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native"),
    # In lower precision, verifying a block rounds differently from decoding a token.
    *("--dtype", "float32"),
    # The default is most of the machine's memory, and its pages are all touched at start-up.
    *("--max-total-tokens", "8192", "--max-running-requests", "16"),
    # The scheduler would otherwise keep a core busy while there is nothing to do.
    *("--sleep-on-idle", "--skip-server-warmup"),
)
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # Threads that spin while they wait slow each other down several times once cores are shared.
    "OMP_WAIT_POLICY": "PASSIVE",
    # A few small functions are compiled at their first call: tens of seconds each, for no gain here.
    "TORCH_COMPILE_DISABLE": "1",
}
# What a log line with the first text says about the start-up that follows it.
STAGES = (
    ("server_args=", "starting processes"),
    ("Init parallel begin", "preparing the model"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "allocating memory"),
    ("Uvicorn running", "answering a first request"),
)


class ServerError(RuntimeError):
    """The server did not start or died; the message ends with the tail of its log."""


def pick_device(device: str = "auto") -> str:
    """`cpu` or `cuda`; `auto` takes a CUDA GPU if there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}: allowed are 'auto', 'cpu', 'cuda'")
    return device


def server_command(model: Path, *args: str, device: str, port: int) -> list[str]:
    """The command line; `args` come last, so they override what is chosen here."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", HOST, "--port", str(port)]
    return [*command, *(CPU_FLAGS if device == "cpu" else ()), *args]


def server_environment(env: Mapping[str, str] | None = None, *, device: str) -> dict[str, str]:
    """This process's environment, what the device needs, and `env` on top."""
    own = CPU_ENVIRONMENT if device == "cpu" else {}
    return {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **own, **(env or {})}


def require_plugin() -> None:
    """Raise ServerError if SGLang would not find the plugin, which on a CPU it cannot start without."""
    names = [point.name for point in entry_points(group="sglang.srt.plugins")]
    if "d3d" not in names:
        raise ServerError("the d3d plugin is not installed in this environment: use the Makefile's targets")


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on.

    It lies below the range outgoing connections take theirs from: until the server binds it, half a minute
    later, one of those could have taken it.
    """
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def print_progress(message: str) -> None:
    """Show progress on stderr: one changing line on a terminal, else a line every few seconds."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)
    else:
        print(message.rstrip(), file=sys.stderr, flush=True)


def no_progress(_message: str) -> None:
    """Show nothing."""


class ServerProcess:
    """A running server; starts on entering the context, ends on leaving it, whatever the reason.

    Args:
        model: folder of the model to serve.
        args: further arguments of `sglang.launch_server`.
        env: further environment variables.
        device: `auto`, `cpu` or `cuda`.
        log: file for the server's output (default: a new one in build/logs).
        progress: called with a line of text a few times a second while the server starts, or less often where
            the lines do not replace each other.
    """

    def __init__(
        self,
        model: Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        device: str = "auto",
        log: Path | None = None,
        progress: Callable[[str], None] = print_progress,
    ) -> None:
        self.device = pick_device(device)
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.log = log if log is not None else LOG_FOLDER / f"server-{os.getpid()}-{self.port}.log"
        self._command = server_command(model, *args, device=self.device, port=self.port)
        self._environment = server_environment(env, device=self.device)
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S, trust_env=False)
        self.start_seconds = 0.0

    def __enter__(self) -> ServerProcess:
        try:
            self.start()
        except BaseException:  # Ctrl-C as well: nothing may be left running
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the server; also the id of its process group."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    def start(self) -> None:
        """Start the server and return when it has answered a request.

        Raises:
            ServerError: it died, or did not answer within START_TIMEOUT_S.
        """
        assert self._process is None, "a ServerProcess starts once"
        require_plugin()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A group of its own: it can be ended as a whole, and Ctrl-C reaches it only through us.
                start_new_session=True,
            )
        self._wait_until_healthy(started)
        self.start_seconds = time.monotonic() - started

    def stop(self) -> None:
        """End the server and every process it started; safe to call again."""
        self._client.close()
        if self._process is None:
            return
        # SIGTERM ends the children at once. The first process would take that for a crash and spend seconds
        # on a diagnosis, so it is killed. Python's resource tracker gets a moment to end by itself.
        self._signal(signal.SIGTERM)
        self._process.kill()
        self._process.wait()
        given_up = time.monotonic() + STOP_TIMEOUT_S
        while self._signal(0) and time.monotonic() < given_up:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)

    def generate(
        self, prompt: str | Sequence[int], *, sampling: Mapping[str, Any] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Answer of `/generate` to a text or to token ids; `fields` go into the request as they are.

        Raises:
            httpx.HTTPStatusError: the server refused the request.
            ServerError: the server died.
        """
        source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        body = {**source, "sampling_params": dict(sampling or {}), **fields}
        return self._json("POST", "/generate", json=body)

    def chat(self, message: str, **fields: Any) -> dict[str, Any]:
        """Answer of `/v1/chat/completions` to one message of the user. Raises as `generate` does."""
        body = {"model": "default", "messages": [{"role": "user", "content": message}], **fields}
        return self._json("POST", "/v1/chat/completions", json=body)

    def flush_cache(self) -> None:
        """Empty the prefix cache. Raises as `generate` does, and also if requests are running."""
        self.request("POST", "/flush_cache", params={"timeout": 30})

    def server_info(self) -> dict[str, Any]:
        """The server's settings and internal state. Raises as `generate` does."""
        return self._json("GET", "/server_info")

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """Any other request. Raises as `generate` does."""
        try:
            return self._client.request(method, path, **kwargs).raise_for_status()
        except httpx.TransportError as error:
            self._raise_if_dead(error)
            raise

    def _json(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.request(method, path, **kwargs).json()
        return answer

    def _wait_until_healthy(self, started: float) -> None:
        next_report = 0.0
        while not self._is_healthy():
            self._raise_if_dead()
            elapsed = time.monotonic() - started
            if elapsed > START_TIMEOUT_S:
                raise ServerError(f"the server did not answer within {START_TIMEOUT_S:.0f} s\n{self._tail()}")
            if elapsed >= next_report:
                self._progress(f"server on {self.device}: {elapsed:.0f} s, {self._stage()}")
                next_report = elapsed + (POLL_S if sys.stderr.isatty() else 5.0)
            time.sleep(POLL_S)
        self._progress(f"server on {self.device}: ready after {time.monotonic() - started:.0f} s\n")

    def _is_healthy(self) -> bool:
        # Before the port is open this fails at once. Afterwards the server answers by running a request, or
        # says 503 while it starts.
        with contextlib.suppress(httpx.TransportError):
            return self._client.get("/health", timeout=30.0).status_code == httpx.codes.OK
        return False

    def _stage(self) -> str:
        text = self.log.read_text(errors="replace")
        return next((stage for mark, stage in reversed(STAGES) if mark in text), "importing SGLang")

    def _raise_if_dead(self, cause: BaseException | None = None) -> None:
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            raise ServerError(f"the server ended with exit status {status}\n{self._tail()}") from cause

    def _tail(self) -> str:
        with self.log.open(errors="replace") as lines:
            tail = "".join(deque(lines, maxlen=TAIL_LINES))
        return f"The end of {self.log}:\n{tail}\nFor a check of the installation, run `d3d doctor`."

    def _signal(self, number: int) -> bool:
        """Signal the process group; False if nothing is left of it."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True
