"""Sites with their own data on a real SuperLink and SuperNodes of their own processes."""

import json
import os
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from nodes import pfllib, table

from data.image import load_digits
from posy.launch import APP, ENVIRONMENT, _Flower

SECONDS = 400.0


def script(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts")) / name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(folder: Path, environment: Mapping[str, str], name: str, *words: str) -> Iterator[None]:
    """Run one of Flower's servers with all it starts, its output in a file."""
    with (folder / f"{name}.log").open("w") as output:
        started = subprocess.Popen(
            words, cwd=folder, env=dict(environment), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield
        finally:
            os.killpg(started.pid, signal.SIGTERM)
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_three_sites_and_a_bad_one_on_their_own_nodes(tmp_path: Path) -> None:
    digits = load_digits()
    x, y = digits.x.reshape(len(digits), -1).astype(np.float32), digits.y
    few = np.flatnonzero(y[200:400] < 7) + 200
    np.savez(tmp_path / "a.npz", x_train=x[:150], y_train=y[:150], x_test=x[150:200], y_test=y[150:200])
    table(tmp_path / "b.csv", x[few], y[few])
    pfllib(tmp_path / "c", x[400:500], y[400:500], 20)
    broken = x[500:520].copy()
    broken[3, 5] = np.nan
    np.savez(tmp_path / "d.npz", x_train=broken, y_train=y[500:520])

    home = tmp_path / "flwr"
    home.mkdir()
    control, fleet = free_port(), free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "posy"\n[superlink.posy]\naddress = "127.0.0.1:{control}"\ninsecure = true\n'
    )
    paths = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    environment = {**os.environ, **ENVIRONMENT, "FLWR_HOME": str(home), "PATH": paths, "NO_PROXY": "127.0.0.1"}
    flower = _Flower(tmp_path, environment)
    settings = {
        "dataset": "sites",
        "num-clients": 4,
        "min-clients": 3,
        "join-timeout": 120.0,
        "method": "fedavg",
        "model": "mlp",
        "device": "cpu",
        "num-server-rounds": 2,
        "evaluate-every": 2,
        "local-epochs": 10,
        "output-dir": str(tmp_path / "runs"),
        "run-name": "one",
    }
    with ExitStack() as stack:
        stack.enter_context(
            process(
                tmp_path,
                environment,
                "superlink",
                *(script("flower-superlink"), "--insecure", "--disable-runtime-dependency-installation"),
                *("--host", "127.0.0.1", "--port", str(control), "--fleet-api-address", f"127.0.0.1:{fleet}"),
            )
        )
        for name in ("c", "d.npz", "a.npz", "b.csv"):
            config = f'data="{tmp_path / name}" name="site-{name[0]}"'
            stack.enter_context(
                process(
                    tmp_path,
                    environment,
                    f"node-{name[0]}",
                    *(script("flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{fleet}"),
                    *("--host", "127.0.0.1", "--port", str(free_port()), "--node-config", config),
                )
            )
        (tmp_path / "run.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in settings.items()))
        end = time.monotonic() + SECONDS
        while True:  # until the SuperLink listens
            try:
                with socket.create_connection(("127.0.0.1", control), 1):
                    break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.2)
        number = flower.ask("run", str(APP), "--run-config", str(tmp_path / "run.toml"))["run-id"]
        while not (status := flower.ask("list", "--run-id", number)["runs"][0]["status"]).startswith("finished"):
            assert time.monotonic() < end, status
            time.sleep(2)
        with flower.start("log", number, "--show") as told:
            log, _ = told.communicate(timeout=60)
    assert status == "finished:completed", log
    summary = json.loads((tmp_path / "runs/one/summary.json").read_text())
    assert (summary["status"], summary["dropped"], summary["system-accuracy"]) == ("completed", {}, None)
    assert summary["sites"] == ["site-a", "site-b", "site-c", None]
    ((reason, times),) = summary["left-out"].items()
    assert times == 1
    assert reason == f"{tmp_path / 'd.npz'}: nan at index (3, 5); only finite numbers are allowed"
    assert log.count("is left out") == 1
    assert summary["served"]["last"]["mean"] > 0.6
    rows = (tmp_path / "runs/one/clients.csv").read_text().splitlines()[1:]
    counts = {tuple(row.split(",")[1:4]) for row in rows}
    assert counts == {
        ("0", "150", "50"),
        ("1", str(len(few) - round(len(few) / 4)), str(round(len(few) / 4))),
        ("2", "80", "20"),
    }
