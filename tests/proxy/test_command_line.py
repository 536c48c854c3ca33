"""The command line: help, exit codes, and that bad usage is one line and starts nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.__main__ import main
from proxy.settings import SECRET_NAMES, options

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("ROLLMUX_", "PROXY_", "UPSTREAM_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", list(sys.path))


def usage_error(capsys, *argv: str) -> str:
    """The one line of a refusal, however it is made."""
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("rollmux")
    return err.strip()


def shown(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "run", "doctor"])
def test_help_shows_every_option_with_default_and_unit(capsys, command):
    text = " ".join(shown(capsys, command, "--help").split())
    for info in options():
        if info.field == "fd" and command != "serve":
            assert "--fd" not in text
            continue
        assert info.flag in text
        assert f"(default: {info.default_text}" in text
    assert "(default: 300 s)" in text
    assert "(default: 500000 blocks)" in text
    assert "(default: the replicas' own, else 16; in tokens)" in text


@pytest.mark.parametrize("command", ["demo", "routers"])
def test_help_of_the_other_commands_shows_defaults(capsys, command):
    assert "(default:" in shown(capsys, command, "--help")


def test_help_is_plain_ascii_for_a_plain_terminal(capsys):
    for command in ([], ["serve"], ["run"], ["demo"], ["doctor"]):
        assert shown(capsys, *command, "--help").isascii()


def test_help_lists_no_command_that_is_not_there(capsys):
    text = shown(capsys, "--help")
    assert "serve" in text
    assert "doctor" in text


def test_version_is_that_of_the_project(capsys):
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert shown(capsys, "--version") == f"rollmux {version[1]}\n"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "COMMAND"),
        (["bogus"], "'bogus'"),
        (["replay", "no-such-trace"], "no-such-trace: cannot be read"),
        (["replay", "trace", "--model", "m"], "--model: goes with --url only"),
        (["replay"], "TRACE"),
        (["serve", "--replicaa", "http://a"], "--replica"),
        (["serve", "--load-timeout", "3"], "--load-timeout-s"),
        (["serve", "--api-key", "x"], "--api-key-env"),
        (["serve", "http://a"], "'http://a'"),
        (["serve", "--port"], "--port"),
        (["serve"], "no replica is configured"),
        (["serve", "--replica", "gpu1:8000"], "http://gpu1:8000"),
        (["serve", "--replica", "http://a", "--port", "http"], "--port: 'http'"),
        (["serve", "--replica", "http://a", "--host", "0.0.0.0"], "--api-key-env"),
        (["serve", "--replica", "http://a", "--", "x"], "rollmux run"),
        (["run", "--replica", "http://a"], "--"),
        (["run", "--replica", "http://a", "--"], "no trainer command"),
        (["run", "--", "python", "train.py"], "no replica is configured"),
        (["run", "--fd", "3", "--", "true"], "unknown option --fd"),
        (["demo", "--seconds", "soon"], "--seconds"),
        (["demo", "--replicas", "0"], "--replicas"),
        (["doctor"], "no replica is configured"),
        (["doctor", "--replica", "http://a", "--staleness", "0.5"], "--staleness"),
        (["doctor", "--replica", "http://a", "--beacon", "/no/such"], "--beacon: /no/such"),
        (["doctor", "--replica", "http://a", "--hold-reply-s", "0"], "--hold-reply-s"),
    ],
)
def test_bad_usage_is_one_line_with_the_fix(capsys, argv, told):
    assert told in usage_error(capsys, *argv)


def test_bad_setting_of_the_environment_is_named_as_it_was_given(capsys, monkeypatch):
    monkeypatch.setenv("ROLLMUX_REPLICAS", "http://a")
    monkeypatch.setenv("ROLLMUX_PORT", "x")
    assert "ROLLMUX_PORT: 'x'" in usage_error(capsys, "serve")


def test_trainers_command_is_passed_on_untouched_and_so_are_the_daemons_options(monkeypatch):
    """``run`` looks neither at the trainer's own options nor at a second ``--``."""
    seen = {}

    def run(serve_args, command, env, **rest):
        seen.update(rest, serve_args=serve_args, command=command)
        return 7

    monkeypatch.setattr("trainer_entry.run.run", run)
    monkeypatch.setenv("ROLLMUX_PORT", "9000")
    monkeypatch.setenv("KEY", "k")
    trainer = ["python", "train.py", "--take-over", "--bogus", "--", "--port", "x y", ""]
    options = ["--replica", "http://a", "--drain-s=3", "--api-key-env", "KEY"]
    options += ["--bucket-gate", "me/run=/lora"]
    ours = ["--take-over", "--flush-path", "/lora/out"]
    assert main(["run", *ours, *options, "--", *trainer]) == 7
    assert seen == {
        "serve_args": options,
        "command": trainer,
        "host": "127.0.0.1",
        "port": 9000,
        "start_timeout_s": 1800,
        "drain_s": 3,
        "take_over": True,
        "flush_path": "/lora/out",
        "api_key": "k",
        "own_state_file": True,
    }


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "--flush-path: which bucket? give --bucket-gate"),
        (["--bucket-gate", "me/run=/bucket"], "--flush-path: /lora/out is not below /bucket"),
    ],
)
def test_a_folder_to_flush_has_to_be_in_the_bucket(capsys, options, line):
    words = ["--replica", "http://a", "--flush-path=/lora/out", *options, "--", "true"]
    assert line in usage_error(capsys, "run", *words)


def test_no_option_takes_a_secret_itself():
    secrets = [i.flag for i in options() if re.search("token|key|secret|password", i.field)]
    paths = ["--token-file", "--token-hosts", "--token-over-http"]
    named = [f"--{name.replace('_', '-')}" for name in SECRET_NAMES]
    assert sorted(secrets) == sorted(paths + named)


def test_unexpected_error_is_one_line_without_a_traceback(capsys, monkeypatch):
    def broken(given, environ):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("proxy.__main__._serve", broken)
    assert main(["serve"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("rollmux serve: RuntimeError: two lines")
    assert err.count("\n") == 1


@pytest.mark.parametrize("how", ["option", "environment"])
def test_unexpected_error_shows_its_traceback_at_debug_level(capsys, monkeypatch, how):
    def broken(given, environ):
        raise RuntimeError("here")

    monkeypatch.setattr("proxy.__main__._serve", broken)
    if how == "environment":
        monkeypatch.setenv("ROLLMUX_LOG_LEVEL", "debug")
    assert main(["serve", "--log-level", "debug"] if how == "option" else ["serve"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_module_runs_from_the_checkout_without_an_install():
    result = subprocess.run(
        [sys.executable, "-m", "proxy", "serve"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("rollmux serve: no replica is configured")


def test_routers_lists_the_built_in_policies(capsys):
    assert main(["routers"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:4] == ["prefix", "least-loaded", "round-robin", "consistent-hash"]


def test_routers_check_is_1_for_a_policy_that_breaks_the_contract(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_policies.py").write_text(
        "from routing.least_loaded import LeastLoaded\n"
        "class Silent(LeastLoaded):\n"
        "    def choose(self, request, candidates, now_s):\n"
        "        return None\n"
    )
    # Found where the command was started, as a console script would not by itself.
    monkeypatch.chdir(tmp_path)
    assert main(["routers", "--check", "my_policies:LeastLoaded"]) == 0
    assert "keeps the contract" in capsys.readouterr().out
    assert main(["routers", "--check", "my_policies:Silent"]) == 1
    assert capsys.readouterr().out.startswith("my_policies:Silent: ")


def test_routers_check_of_what_is_not_there_is_bad_usage(capsys):
    assert "nope" in usage_error(capsys, "routers", "--check", "nope:create")


def run_in_a_shell(script: str, folder: Path) -> tuple[int, str]:
    """Its exit code and what it said on standard error; ``$rollmux`` is the command.

    Buffered, as in a user's shell: output is written when the program ends.
    """
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    environ |= {"PYTHONPATH": str(ROOT), "rollmux": f"{sys.executable} -P -m proxy"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", ["routers", "--help"])
def test_a_reader_that_leaves_is_no_traceback(tmp_path, words):
    assert run_in_a_shell(f"$rollmux {words} | true; exit ${{PIPESTATUS[0]}}", tmp_path) == (1, "")


def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(tmp_path):
    code, err = run_in_a_shell("$rollmux routers > /dev/full", tmp_path)
    assert code == 1
    assert "No space left on device" in err
    assert len(err.splitlines()) == 1


def test_output_may_be_closed(tmp_path):
    assert run_in_a_shell("$rollmux routers >&-", tmp_path) == (0, "")


def test_a_folder_that_was_removed_stops_nothing(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    assert run_in_a_shell(f"rmdir {gone}; $rollmux routers > /dev/null", gone) == (0, "")
