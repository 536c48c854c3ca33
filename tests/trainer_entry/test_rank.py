"""Which node leads, and where the others find the daemon."""

import pytest

from trainer_entry.rank import RankError, base_url, leader_url, node_rank


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({}, 0),
        ({"MACHINE_RANK": "0"}, 0),
        ({"NODE_RANK": " 3 "}, 3),
        ({"SLURM_NODEID": "12"}, 12),
        ({"MACHINE_RANK": "1", "NODE_RANK": "0", "SLURM_NODEID": "0"}, 1),
        ({"NODE_RANK": "0", "SLURM_NODEID": "4"}, 0),
        ({"RANK": "5", "LOCAL_RANK": "2"}, 0),
    ],
)
def test_first_name_that_is_set_gives_the_rank(env: dict[str, str], rank: int) -> None:
    assert node_rank(env) == rank


@pytest.mark.parametrize("text", ["", "one", "-1", "1.0", "٣"])
def test_a_rank_that_is_no_number_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(RankError, match=r"NODE_RANK=.*unset it"):
        node_rank({"NODE_RANK": text, "SLURM_NODEID": "0"})


@pytest.mark.parametrize(
    ("env", "url"),
    [
        ({}, "http://10.0.0.9:8000"),
        ({"MASTER_ADDR": "node0"}, "http://node0:8000"),
        ({"MAIN_PROCESS_IP": "fd00::1"}, "http://[fd00::1]:8000"),
        ({"MASTER_ADDR": "node0", "MAIN_PROCESS_IP": "node9"}, "http://node0:8000"),
        ({"ROLLMUX_URL": "http://a:1/", "MASTER_ADDR": "node0"}, "http://a:1"),
    ],
)
def test_leader_is_found_by_url_then_by_the_launchers_address(
    env: dict[str, str], url: str
) -> None:
    assert leader_url(env, "10.0.0.9", 8000) == url


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("localhost", "http://localhost:1"),
    ],
)
def test_an_address_to_listen_on_becomes_one_to_connect_to(host: str, url: str) -> None:
    assert base_url(host, 1) == url
