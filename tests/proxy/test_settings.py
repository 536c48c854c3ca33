"""Settings: where a value comes from, what is refused, and that no secret is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from proxy.settings import (
    MAX_SECONDS,
    OLD_NAMES,
    Loaded,
    Secrets,
    Settings,
    SettingsError,
    is_loopback,
    load,
    options,
    read_secrets,
    replica_url,
)

URL = "http://gpu1:8000"


def loaded(given: dict[str, Any] | None = None, /, **environ: str) -> Loaded:
    return load({"replicas": [URL], **(given or {})}, environ)


def refusal(given: dict[str, Any] | None = None, /, **environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        loaded(given, **environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "rollmux.toml"
    path.write_text(text, "utf-8")
    return str(path)


# --- where a value comes from ---------------------------------------------------------------------


def test_defaults_are_those_of_the_contract():
    settings = loaded().settings
    assert settings == Settings(replicas=(URL,))
    assert (settings.host, settings.port, settings.router) == ("127.0.0.1", 8000, "prefix")
    assert (settings.load_timeout_s, settings.load_retry_s, settings.load_retry_max_s) == (
        300,
        0.25,
        2,
    )
    assert (settings.hold_s, settings.outage_s, settings.drain_s) == (60, 1500, 20)
    assert (settings.min_replicas, settings.start_timeout_s) == (1, 1800)


def test_command_line_wins_over_environment_over_file(tmp_path):
    config = toml(tmp_path, 'port = 1\nhold-s = 1\nprobe_s = 1.5\nreplicas = ["http://a", "b://"]')
    given = {"config": config, "port": "3", "replicas": [URL]}
    settings = load(given, {"ROLLMUX_PORT": "2", "ROLLMUX_HOLD_S": "2"}).settings
    assert (settings.port, settings.hold_s, settings.probe_s) == (3, 2, 1.5)
    assert settings.replicas == (URL,)


def test_every_option_can_come_from_the_environment_and_from_the_file(tmp_path):
    token = tmp_path / "token"
    token.write_text("t")
    values: dict[str, str] = {
        "replicas": URL,
        "replicas_file": str(token),
        "replicas_dns": "fleet:8000",
        "replicas_hf_label": "me/run=r1",
        "host": "0.0.0.0",
        "port": "9",
        "token_env": "SECRET",
        "token_over_http": "true",
        "token_hosts": "a.example",
        "api_key_env": "SECRET",
        "admin_key_env": "SECRET",
        "insecure": "true",
        "router": "round-robin",
        "min_replicas": "all",
        "own_copies": "never",
        "adapter_transport": "push",
        "push_key_env": "SECRET",
        "push_cache": str(tmp_path / "cache"),
        "bucket_gate": "me/run=/lora",
        "hub_endpoint": "http://hub",
        "pause": "eager",
        "log_format": "json",
        "log_level": "error",
        "record": str(tmp_path / "trace"),
        "state_file": str(tmp_path / "state"),
        "trust_env": "true",
    }
    left = {i.field for i in options() if i.env} - set(values) - {"token_file", "ca_file"}
    values |= dict.fromkeys(left, "7")
    environ = {f"ROLLMUX_{name.upper()}": value for name, value in values.items()}
    from_environ = load({}, {**environ, "SECRET": "s"}).settings
    config = toml(tmp_path, "".join(f"{k.replace('_', '-')} = '{v}'\n" for k, v in values.items()))
    from_file = load({}, {"ROLLMUX_CONFIG": config, "SECRET": "s"}).settings
    assert from_environ == from_file
    for name in values:
        assert getattr(from_environ, name) != getattr(Settings(), name), name


def test_toml_values_keep_their_types(tmp_path):
    config = toml(
        tmp_path, 'replicas = ["http://a", "http://b"]\nhold-s = 3\nmin-replicas = 2\ninsecure=true'
    )
    settings = load({"config": config}, {}).settings
    assert settings.replicas == ("http://a", "http://b")
    assert (settings.hold_s, settings.min_replicas, settings.insecure) == (3.0, 2, True)


def test_replicas_of_the_environment_are_separated_by_commas_or_space():
    environ = {"ROLLMUX_REPLICAS": " http://a:1, http://b:1\nhttp://c:1 ,"}
    assert load({}, environ).settings.replicas == ("http://a:1", "http://b:1", "http://c:1")


def test_empty_variable_counts_as_not_set():
    assert loaded(ROLLMUX_PORT="", ROLLMUX_API_KEY_ENV="  ").settings == Settings(replicas=(URL,))


def test_switch_can_be_turned_off_again_on_the_command_line():
    assert loaded({"insecure": False}, ROLLMUX_INSECURE="1").settings.insecure is False


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("ROLLMUX_REPLICSA", "ROLLMUX_REPLICAS"),
        ("ROLLMUX_LOAD_TIMEOUT", "ROLLMUX_LOAD_TIMEOUT_S"),
        ("ROLLMUX_API_KEY", "ROLLMUX_API_KEY_ENV"),
        ("ROLLMUX_HOTS", "ROLLMUX_HOST"),
    ],
)
def test_unknown_environment_name_is_refused_with_the_nearest(name, nearest):
    message = refusal(**{name: "5ecret"})
    assert name in message
    assert f"nearest is {nearest};" in message
    assert "5ecret" not in message


def test_unknown_key_of_the_file_is_refused_with_the_nearest(tmp_path):
    config = toml(tmp_path, "spill-treshold = 3")
    message = refusal({"config": config})
    assert "'spill-treshold'" in message
    assert "'spill-threshold'" in message


def test_internal_option_cannot_come_from_environment_or_file(tmp_path):
    assert "ROLLMUX_FD" in refusal(ROLLMUX_FD="3")
    assert "'fd'" in refusal({"config": toml(tmp_path, "fd = 3")})
    assert loaded({"fd": "3"}).settings.fd == 3


def test_names_of_recipes_tests_and_chosen_secrets_are_no_errors():
    given = {"token_env": "ROLLMUX_TOKEN"}
    loaded(
        given,
        ROLLMUX_TOKEN="t",
        ROLLMUX_URL="u",
        ROLLMUX_PUSH_KEY="k",
        ROLLMUX_E2E_ENV="/somewhere",
    )
    assert "ROLLMUX_TOKEN:" in refusal(ROLLMUX_TOKEN="t")


def test_kubernetes_service_links_are_skipped_with_one_line():
    links = {
        "ROLLMUX_PORT": "tcp://10.0.0.1:8000",
        "ROLLMUX_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ROLLMUX_PORT_8000_TCP_ADDR": "10.0.0.1",
        "ROLLMUX_SERVICE_HOST": "10.0.0.1",
        "ROLLMUX_SERVICE_PORT": "8000",
        "ROLLMUX_SERVICE_PORT_HTTP": "8000",
        "ROLLMUX_REPLICAS_PORT": "tcp://10.0.0.2:8000",
        "PROXY_PORT": "tcp://10.0.0.3:80",
    }
    result = loaded(**links)
    assert result.settings == Settings(replicas=(URL,))
    (note,) = result.notes
    assert all(name in note for name in links)


def test_names_of_the_reference_are_understood_and_told():
    environ = {
        "UPSTREAM_URLS": "http://a:1,http://b:1",
        "PROXY_PORT": "9000",
        "PROXY_BLOCK_SIZE": "32",
        "PROXY_MAX_TRACKED_BLOCKS": "1000",
        "PROXY_IMBALANCE": "4",
        "PROXY_LORA_LOAD_TIMEOUT_S": "100",
        "PROXY_LORA_RETRY_S": "5",
    }
    assert environ.keys() == OLD_NAMES.keys()
    result = load({}, environ)
    assert result.settings == Settings(
        replicas=("http://a:1", "http://b:1"),
        port=9000,
        block_size=32,
        max_tracked_blocks=1000,
        spill_threshold=4,
        load_timeout_s=100,
        load_retry_s=5,
        load_retry_max_s=5,
    )
    assert [note.split()[0] for note in result.notes] == list(OLD_NAMES)
    assert "ROLLMUX_LOAD_RETRY_S" in result.notes[-1]


def test_new_name_wins_over_the_name_of_the_reference():
    assert loaded(PROXY_PORT="1", ROLLMUX_PORT="2").settings.port == 2


def test_names_that_would_start_more_workers_are_ignored_and_told():
    (note,) = loaded(WEB_CONCURRENCY="4", UVICORN_WORKERS="4").notes
    assert "WEB_CONCURRENCY" in note
    assert "UVICORN_WORKERS" in note


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", "x"),
        ("port", "65536"),
        ("port", "-1"),
        ("port", "80.5"),
        ("block_size", "0"),
        ("spill_threshold", "-1"),
        ("max_tracked_blocks", "0"),
        ("load_timeout_s", "0"),
        ("load_timeout_s", "5m"),
        ("load_timeout_s", "nan"),
        ("load_timeout_s", "inf"),
        ("hold_s", "-0.1"),
        ("hold_s", str(2 * MAX_SECONDS)),
        ("min_replicas", "0"),
        ("min_replicas", "most"),
        ("own_copies", "always"),
        ("pause", "never"),
        ("log_level", "trace"),
        ("router", " "),
        ("host", "http://0.0.0.0"),
        ("host", "127.0.0.1:8000"),
        ("host", "a..b"),
        ("replicas_dns", "fleet"),
        ("replicas_dns", "fleet..svc:8000"),
        ("replicas_dns", f"{'a' * 64}:8000"),
        ("bucket_gate", "me/run"),
        ("token_hosts", "a.*"),
        ("record", "a\x00b"),
        ("api_key_env", "a b"),
    ],
)
def test_bad_value_is_refused_by_its_name(field, value):
    flag = f"--{field.replace('_', '-')}"
    env = f"ROLLMUX_{field.upper()}"
    assert refusal({field: value}).startswith(f"{flag}: ")
    if value.strip():
        assert refusal(**{env: value}).startswith(f"{env}: ")


@pytest.mark.parametrize(
    "line",
    ["port = true", "port = 1.5", "hold-s = true", "hold-s = []", "insecure = 1", "router=1"],
)
def test_toml_value_of_a_wrong_type_is_refused(tmp_path, line):
    assert refusal({"config": toml(tmp_path, line)}).startswith(line.partition("=")[0].strip())


def test_zero_is_a_value_where_it_means_something():
    zeros = dict.fromkeys(("port", "hold_s", "outage_s", "drain_s", "retire_grace_s"), "0")
    settings = loaded(zeros).settings
    assert (settings.port, settings.hold_s, settings.drain_s) == (0, 0, 0)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("gpu1:8000", "write http://gpu1:8000"),
        ("ftp://gpu1", "http:// or https://"),
        ("http://", "no host"),
        ("http://:8000", "no host"),
        ("http://gpu..lan:8000", "cannot be a host's name"),
        (f"http://{'a' * 64}:8000", "too long"),
        ("http://gpu1:x", "not a URL"),
        ("http://gpu1:70000", "not a URL"),
        ("http://gpu1:0", "port 0"),
        ("http://[::1", "not a URL"),
        ("http://gpu1?x=1", "query"),
        ("http://gpu1#x", "fragment"),
        ("http://gpu1:8000/v1", "/v1"),
        ("http://gpu1:8000/v1/", "/v1"),
        ("http://gpu 1", "space"),
        ("", "empty"),
    ],
)
def test_bad_replica_url_is_refused_with_the_reason(url, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        replica_url(url)


def test_password_in_a_url_is_refused_and_not_shown():
    message = refusal({"replicas": ["http://me:hunter2@gpu1"]})
    assert "hunter2" not in message
    assert "--token-env" in message


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("HTTP://GPU1:8000/", "http://gpu1:8000"),
        ("https://a.hf.jobs/base//", "https://a.hf.jobs/base"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://gpu1/Base/v1x", "http://gpu1/Base/v1x"),
    ],
)
def test_replica_url_has_one_spelling(url, clean):
    assert replica_url(url) == clean
    assert replica_url(clean) == clean


# --- the whole ------------------------------------------------------------------------------------


def test_no_replica_says_how_to_give_one():
    with pytest.raises(SettingsError, match="no replica is configured") as caught:
        load({}, {})
    assert all(way in str(caught.value) for way in ("--replica", "ROLLMUX_REPLICAS", "--config"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://gpu1:8000", "http://GPU1:8000/"),
        ("http://gpu1", "http://gpu1:80"),
        ("https://gpu1", "https://gpu1:443/"),
        ("http://gpu1:443", "https://gpu1"),
    ],
)
def test_same_replica_twice_is_refused(one, other):
    assert "given twice" in refusal({"replicas": [one, other]})


def test_two_base_paths_on_one_host_are_two_replicas():
    replicas = ["http://edge/a", "http://edge/b"]
    assert loaded({"replicas": replicas}).settings.replicas == tuple(replicas)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:8000"])
def test_own_address_as_a_replica_is_refused(url):
    assert "daemon's own address" in refusal({"replicas": [url]})
    assert loaded({"replicas": [url], "port": "8001"})


def test_another_loopback_address_with_our_port_is_a_replica():
    assert loaded({"replicas": ["http://127.0.0.2:8000"]})
    given = {"replicas": ["http://127.0.0.2:8000"], "host": "0.0.0.0", "insecure": True}
    assert "own address" in refusal(given)


def test_more_min_replicas_than_replicas_is_refused():
    assert "--min-replicas: 2" in refusal({"min_replicas": "2"})
    assert loaded({"min_replicas": "all"}).settings.min_replicas == "all"


def test_longest_wait_below_the_first_is_refused_only_when_both_are_given():
    assert refusal({"load_retry_s": "3", "load_retry_max_s": "1"}).startswith("--load-retry-max-s")
    assert loaded({"load_retry_s": "3"}).settings.load_retry_max_s == 3


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.1", "trainer", "a.localhost"])
def test_host_beyond_loopback_needs_a_key_or_insecure(host):
    assert "--insecure" in refusal({"host": host})
    assert loaded({"host": host, "insecure": True})
    assert loaded({"host": host, "api_key_env": "KEY"}, KEY="k")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_host_needs_no_key(host):
    assert is_loopback(loaded({"host": host}).settings.host)


def test_files_that_are_not_there_are_refused(tmp_path):
    missing = str(tmp_path / "missing")
    for field in ("token_file", "ca_file"):
        assert missing in refusal({field: missing})
    assert missing in refusal({"config": missing})
    assert "not TOML" in refusal({"config": toml(tmp_path, "a = ")})


def test_ca_file_without_a_certificate_is_refused(tmp_path):
    path = tmp_path / "ca.pem"
    path.write_text("no certificate")
    assert "PEM" in refusal({"ca_file": str(path)})


# --- secrets --------------------------------------------------------------------------------------


def test_secrets_are_read_under_the_names_given_and_never_shown(tmp_path):
    settings = loaded({"token_env": "T", "api_key_env": "K"}, T=" tok3n\n", K="k3y").settings
    secrets = read_secrets(settings, {"T": " tok3n\n", "K": "k3y", "HF_TOKEN": "hf_x"})
    assert (secrets.token, secrets.api_key, secrets.admin_key) == ("tok3n", "k3y", None)
    assert secrets.hf_token is None, "a token was named, so this one is not for us"
    assert repr(secrets) == "Secrets()"


def test_hf_token_is_read_when_no_token_is_named_and_left_alone_when_unfit():
    both = Secrets(hf_token="hf_x", hub_token="hf_x")
    assert read_secrets(Settings(), {"HF_TOKEN": "hf_x\n"}) == both
    assert read_secrets(Settings(), {"HF_TOKEN": "a b"}) == Secrets()


def test_token_file_is_read_without_the_white_space_around(tmp_path):
    path = tmp_path / "token"
    path.write_text("tok3n\n")
    settings = loaded({"token_file": str(path)}).settings
    assert read_secrets(settings, {}).token == "tok3n"


@pytest.mark.parametrize("content", [b"", b" \n", b"one two", b"a\nb", b"\xff"])
def test_token_file_that_is_no_token_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    message = refusal({"token_file": str(path)})
    assert message.startswith("--token-file: ")
    assert "one" not in message.partition(str(path))[2]


def test_missing_or_unfit_secret_is_refused():
    assert "TOKEN" in refusal({"token_env": "TOKEN"})
    assert "TOKEN" in refusal({"token_env": "TOKEN"}, TOKEN="")
    message = refusal({"token_env": "TOKEN"}, TOKEN="5e cret")
    assert "TOKEN" in message
    assert "5e" not in message


@pytest.mark.parametrize("pasted", ["hf_aBcDeFgHiJkLmNoP", "sk-aBcDeFgHiJkLmNoP"])
def test_token_pasted_instead_of_its_name_is_not_shown(pasted):
    assert pasted not in refusal({"token_env": pasted})
    assert pasted not in refusal(ROLLMUX_API_KEY_ENV=pasted)


def test_two_sources_of_one_token_are_refused(tmp_path):
    path = tmp_path / "token"
    path.write_text("t")
    assert "keep one" in refusal({"token_env": "T", "token_file": str(path)}, T="t")


def test_the_usual_variable_of_the_push_key_is_read_and_is_no_unknown_name():
    given = {"replicas": URL}
    assert read_secrets(load(given, {}).settings, {}).push_key is None
    environ = {"ROLLMUX_PUSH_KEY": "k"}
    assert read_secrets(load(given, environ).settings, environ).push_key == "k"
    environ |= {"OTHER": "o"}
    named = load({**given, "push_key_env": "OTHER"}, environ)
    assert read_secrets(named.settings, environ).push_key == "o"


def test_pushing_without_a_key_is_refused_with_the_fix():
    with pytest.raises(SettingsError, match="set ROLLMUX_PUSH_KEY"):
        load({"replicas": URL, "adapter_transport": "push"}, {})
