"""The launcher, with small scripts in the place of SGLang: what it starts, notices and leaves behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from serve import launch
from serve.launch import ServerError, ServerProcess, server_command, server_environment

# Answers every request with its path, from a process that has a child; both write their ids to a file.
ANSWERING = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/die":
            os._exit(3)

    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DYING = "import sys; print('no such model'); sys.exit(7)"
SILENT = "import time; print('thinking', flush=True); time.sleep(600)"


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


def make_server(monkeypatch: pytest.MonkeyPatch, script: str, pids: Path) -> ServerProcess:
    """A ServerProcess that runs `script PORT PIDS` and reports no progress."""
    monkeypatch.setattr(launch, "require_plugin", lambda: None)
    monkeypatch.setattr(
        launch,
        "server_command",
        lambda _model, *_args, device, port: [sys.executable, "-c", script, str(port), str(pids)],
    )
    return ServerProcess(
        Path("model"), device="cpu", log=pids.with_suffix(".log"), progress=launch.no_progress
    )


def is_running(pid: int) -> bool:
    """A zombie, which its new parent has yet to reap, does not run."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def assert_all_gone(pids: Path) -> None:
    numbers = [int(number) for number in pids.read_text().split()]
    assert len(numbers) == 2
    assert not any(is_running(number) for number in numbers)


def test_the_whole_process_tree_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch, pids: Path) -> None:
    with make_server(monkeypatch, ANSWERING, pids) as server:
        assert all(is_running(int(number)) for number in pids.read_text().split())
        assert server.request("GET", "/anything").status_code == 200
        assert server.start_seconds > 0
    assert_all_gone(pids)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_process_tree_is_gone_after_an_error(
    monkeypatch: pytest.MonkeyPatch, pids: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), make_server(monkeypatch, ANSWERING, pids):
        raise error
    assert_all_gone(pids)


def test_an_interrupted_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, pids: Path) -> None:
    def interrupt(_server: ServerProcess) -> bool:
        if pids.exists() and pids.read_text().count(" "):
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(ServerProcess, "_is_healthy", interrupt)
    server = make_server(monkeypatch, ANSWERING, pids)
    with pytest.raises(KeyboardInterrupt), server:
        pass
    assert_all_gone(pids)


def test_a_server_that_dies_at_start_is_noticed_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, pids: Path
) -> None:
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"exit status 7(.|\n)*no such model"):
        make_server(monkeypatch, DYING, pids).start()
    assert time.monotonic() - started < 30


def test_a_server_that_dies_later_is_named_instead_of_the_connection(
    monkeypatch: pytest.MonkeyPatch, pids: Path
) -> None:
    with make_server(monkeypatch, ANSWERING, pids) as server:
        # The answer may still arrive; the request after it cannot.
        with pytest.raises(ServerError, match="exit status 3"):
            for _ in range(10):
                server.request("GET", "/die")
                time.sleep(0.2)


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, pids: Path) -> None:
    monkeypatch.setattr(launch, "START_TIMEOUT_S", 1.0)
    with (
        pytest.raises(ServerError, match=r"did not answer within 1 s(.|\n)*thinking"),
        make_server(monkeypatch, SILENT, pids),
    ):
        pass


def test_arguments_of_the_caller_come_last() -> None:
    command = server_command(Path("m"), "--dtype", "bfloat16", device="cpu", port=1234)
    assert command[-2:] == ["--dtype", "bfloat16"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "torch_native" in command
    assert "torch_native" not in server_command(Path("m"), device="cuda", port=1234)


def test_a_cpu_server_sees_no_gpu_and_a_gpu_server_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert server_environment(device="cpu")["CUDA_VISIBLE_DEVICES"] == ""
    assert server_environment(device="cuda")["CUDA_VISIBLE_DEVICES"] == "1"
    assert server_environment({"A": "b"}, device="cpu")["A"] == "b"


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'tpu': allowed are 'auto', 'cpu', 'cuda'"):
        ServerProcess(Path("m"), device="tpu")
