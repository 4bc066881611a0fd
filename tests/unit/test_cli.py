"""The `d3d` command: exit codes, messages without tracebacks, and a doctor that shows what SGLang hides."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from d3d_sglang.cli import doctor
from d3d_sglang.cli.doctor import (
    Check,
    check_devices,
    check_drafter,
    check_options,
    check_plugin,
    check_versions,
)
from d3d_sglang.cli.main import main
from tests import tiny_folders as tiny

NO_ENVIRONMENT: Mapping[str, str] = {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-model"
    tiny.write_model(folder)
    return folder


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters") / "tiny-drafter"
    tiny.write_drafter(folder)
    return folder


# main


def test_the_parser_is_made_without_heavy_imports() -> None:
    code = "import sys; from d3d_sglang.cli.main import make_parser; make_parser(); print(*sys.modules)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "sglang"}.isdisjoint(done.stdout.split())


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert {"doctor", "init-drafter"} <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["init-drafter"], ["doctor", "--colour"], ["init-drafter", "--layers", "a"]]
)
def test_bad_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert "usage: d3d" in capsys.readouterr().err


def test_init_drafter_makes_one_and_shows_progress(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ["init-drafter", "--from", str(model), "--out", str(out), "--block-size", "8", "--layers", "0,3"]
    more = ["--dtype", "bfloat16", "--coverage", "3", "--fanout", "1", "--thinking", "on"]
    assert main([*argv, *more, "--mask-token-id", "30", "--target", str(model)]) == 0
    d3d_config = json.loads((out / "config.json").read_text())["d3d_config"]
    assert (d3d_config["block_size"], d3d_config["mask_token_id"]) == (8, 30)
    assert (d3d_config["source_layers"], d3d_config["thinking_mode"]) == ([0, 3], "on")
    assert d3d_config["async"] == {"coverage": 3, "fanout": 1}
    text = capsys.readouterr().out
    for step in (
        "reading",
        "comparing",
        "mask token: id 30",
        "loading",
        "kept 2 of 4",
        "writing",
        "reading it back",
    ):
        assert step in text
    assert "2 layers, block size 8, mask token 30, torch.bfloat16. Not trained yet" in text


def test_a_user_error_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "init-drafter",
        "--from",
        str(tmp_path / "none"),
        "--out",
        str(tmp_path / "out"),
        "--block-size",
        "8",
    ]
    assert main(argv) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"d3d: error: --from {tmp_path / 'none'}: give a model folder")
    assert "Traceback" not in errors
    with pytest.raises(ValueError, match="give a model folder"):
        main(["--traceback", *argv])


def test_an_interrupt_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(**_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupt)
    assert main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


# doctor: plugin


def use_plugin(monkeypatch: pytest.MonkeyPatch, folder: Path, *, source: str, name: str = "d3d") -> None:
    """Make `register` of a module written here the only entry point that is visible."""
    (folder / "doctor_case.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "doctor_case", raising=False)
    point = metadata.EntryPoint(name=name, value="doctor_case:register", group=doctor.PLUGIN_GROUP)
    monkeypatch.setattr(
        doctor.metadata, "entry_points", lambda group: [point] if group == doctor.PLUGIN_GROUP else []
    )


GOOD = "def register():\n    pass\n"


def pretend_sglang(monkeypatch: pytest.MonkeyPatch, *, knows_d3d: bool) -> None:
    """Importing SGLang takes many seconds: only one test here does."""
    monkeypatch.setattr(doctor, "_is_registered", lambda: knows_d3d)
    monkeypatch.setattr(doctor, "_apply_hooks", list)


@pytest.mark.parametrize(
    ("source", "in_traceback"),
    [
        ("import a_library_that_is_not_there\n", "No module named 'a_library_that_is_not_there'"),
        ("def register():\n    deep()\ndef deep():\n    raise KeyError('lost hook')\n", "in deep"),
        ("import = 3\n", "SyntaxError"),
        ("x = 1\n", "has no attribute 'register'"),
    ],
    ids=["import", "call", "syntax", "no function"],
)
def test_the_true_traceback_of_a_broken_plugin_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, in_traceback: str
) -> None:
    use_plugin(monkeypatch, tmp_path, source=source)
    check = check_plugin(NO_ENVIRONMENT)
    assert check.status == "FAIL"
    assert "SGLang would only log this" in check.message
    assert check.detail.startswith("Traceback") and in_traceback in check.detail


def test_a_plugin_that_registers_is_ok(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_plugin(monkeypatch, tmp_path, source=GOOD)
    pretend_sglang(monkeypatch, knows_d3d=True)
    assert check_plugin(NO_ENVIRONMENT).status == "ok"


def test_a_plugin_that_runs_but_registers_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_plugin(monkeypatch, tmp_path, source=GOOD)
    pretend_sglang(monkeypatch, knows_d3d=False)
    check = check_plugin(NO_ENVIRONMENT)
    assert check.status == "FAIL" and "SGLang does not know D3D" in check.message


def test_a_hook_that_sglang_cannot_apply_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    # Hooks of this process, the real plugin's among them, are out of reach for the time of the test.
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    source = (
        "from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
        "def register():\n"
        "    HookRegistry.register('sglang.srt.moved_away.f', print, HookType.AFTER)\n"
    )
    use_plugin(monkeypatch, tmp_path, source=source)
    check = check_plugin(NO_ENVIRONMENT)
    assert check.status == "FAIL" and "could not apply its hooks" in check.message
    assert "Traceback" in check.detail and "moved_away" in check.detail


def test_an_invisible_entry_point_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_plugin(monkeypatch, tmp_path, source=GOOD, name="another")
    check = check_plugin(NO_ENVIRONMENT)
    assert (
        check.status == "FAIL" and "no entry point 'd3d'" in check.message and "pip install" in check.message
    )


@pytest.mark.parametrize(
    ("plugins", "status"), [("other", "FAIL"), ("other, d3d", "ok"), ("d3d", "ok"), ("", "ok")]
)
def test_sglang_plugins_may_leave_it_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugins: str, status: str
) -> None:
    use_plugin(monkeypatch, tmp_path, source=GOOD)
    pretend_sglang(monkeypatch, knows_d3d=True)
    check = check_plugin({"SGLANG_PLUGINS": plugins})
    assert check.status == status
    assert (status == "ok") or "SGLANG_PLUGINS=other leaves out 'd3d': add it, or unset" in check.message


# doctor: versions, devices, options, drafter


def use_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    def requires(name: str) -> list[str]:
        version(name)
        return ["torch==2.14.1", 'transformers==5.19.0 ; python_version > "3"', "pytest ; extra == 'dev'"]

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", requires)


GOOD_VERSIONS = {
    "d3d-sglang": "0.1.0",
    "sglang": "0.5.23",
    "torch": "2.14.1+cu130",
    "transformers": "5.19.0",
    "flashinfer-python": "0.7.2",
}


@pytest.mark.parametrize(
    ("name", "installed", "status", "message"),
    [
        ("sglang", "0.5.24", "FAIL", "0.5.24 is installed, D3D is made for 0.5.23"),
        ("sglang", None, "FAIL", "not installed"),
        ("torch", "2.9.0", "warn", "2.9.0 is installed, D3D is made for 2.14.1"),
        ("transformers", "4.57.0", "warn", "D3D is made for 5.19.0"),
        ("flashinfer-python", None, "warn", "a GPU server needs it"),
        ("d3d-sglang", None, "FAIL", "SGLang cannot find the plugin"),
    ],
)
def test_a_wrong_version_is_the_only_complaint(
    monkeypatch: pytest.MonkeyPatch, name: str, installed: str | None, status: str, message: str
) -> None:
    versions = {key: value for key, value in GOOD_VERSIONS.items() if key != name}
    use_versions(monkeypatch, versions if installed is None else versions | {name: installed})
    complaints = [check for check in check_versions() if check.status != "ok"]
    assert [check.status for check in complaints] == [status]
    assert message in complaints[0].message


def test_good_versions_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    use_versions(monkeypatch, GOOD_VERSIONS)
    assert {check.status for check in check_versions()} == {"ok"}


@pytest.mark.parametrize(("environ", "status"), [({}, "warn"), ({"SGLANG_USE_CPU_ENGINE": "1"}, "ok")])
def test_without_a_gpu_the_cpu_engine_is_named(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], status: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (check,) = check_devices(environ)
    assert (check.status, "SGLANG_USE_CPU_ENGINE" in check.message) == (status, True)


def test_gpus_are_listed_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda i: f"Card {i}")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda i: (2**30 * (i + 1), 2**32))
    checks = list(check_devices(NO_ENVIRONMENT))
    assert checks[1] == Check("cuda:1", "ok", "Card 1, 2.0 of 4.0 GiB free")


def test_an_unknown_option_fails() -> None:
    assert check_options(NO_ENVIRONMENT).status == "ok"
    check = check_options({"SGLANG_D3D_SPEED": "11"})
    assert check.status == "FAIL" and "SGLANG_D3D_SPEED" in check.message


def test_a_drafter_and_its_target_are_checked(drafter: Path, model: Path, tmp_path: Path) -> None:
    checks = list(check_drafter(str(drafter), str(model)))
    assert [(check.name, check.status) for check in checks] == [("drafter", "ok"), ("target", "ok")]
    assert "4 layers, block size 4, mask token 6" in checks[0].message
    checks = list(check_drafter(str(model), None))
    assert [check.status for check in checks] == ["FAIL"] and "d3d init-drafter" in checks[0].message
    checks = list(check_drafter(str(drafter), str(tmp_path)))
    assert [(check.name, check.status) for check in checks] == [("drafter", "ok"), ("target", "FAIL")]


def test_warnings_about_a_pair_are_shown(model: Path, tmp_path: Path) -> None:
    tiny.write_drafter(tmp_path / "drafter", thinking_mode="on")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    tiny.edit_json(tmp_path / "drafter/config.json", rope_parameters=rope)
    checks = list(check_drafter(str(tmp_path / "drafter"), str(model)))
    warnings = [check.message for check in checks if check.status == "warn"]
    assert len(warnings) == 2
    assert "no CUDA graphs" in warnings[0] and "trained for thinking on" in warnings[1]


# doctor: the command


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    use_versions(monkeypatch, GOOD_VERSIONS)
    use_plugin(monkeypatch, tmp_path, source="print('noise')\n" + GOOD)
    pretend_sglang(monkeypatch, knows_d3d=True)


@pytest.mark.usefixtures("healthy")
def test_a_healthy_machine_exits_with_0(
    drafter: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--drafter", str(drafter), "--target", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warn"}
    assert "noise" not in lines


@pytest.mark.usefixtures("healthy")
def test_a_failure_exits_with_1_and_says_so_in_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_plugin(monkeypatch, tmp_path, source="print('noise')\nraise RuntimeError('the true reason')\n")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    (failed,) = [check for check in report["checks"] if check["status"] == "FAIL"]
    assert failed["name"] == "plugin" and "the true reason" in failed["detail"]
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert (
        "FAIL  plugin: doctor_case:register failed" in text and "      RuntimeError: the true reason" in text
    )


def test_a_target_needs_a_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--target", "x"]) == 2
    assert "--target is given without --drafter" in capsys.readouterr().err
