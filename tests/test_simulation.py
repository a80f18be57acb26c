"""Flower's simulation on Ray: methods give the models of a single process, and a run survives kill -9.

Ray takes longer to start than these methods together. The tests therefore start it once for several methods and a run
that is killed, and once for each `flwr run`. The last `flwr run` resumes the killed run.
"""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from recorded import assert_same_results, models_of, rounds_of, summary_of

import posy
from posy.deploy.addresses import free_port
from posy.strategies.methods import settings_class

pytestmark = pytest.mark.xdist_group("simulation")

CORE = ("fedfew",)
"""Methods with several models, with stages, and with several arrays in a message and in a client's state."""
FURTHER = (
    "ppfe",
    "scaffold",
    "cwfedavg",
    "fedacs",
    "feddrm",
    "fedavg",
    "fedproto",
    "fedpac",
    "pfedfda",
    "fedfomo",
    "apfl",
)
"""Methods for `pytest -m federation`, because they take minutes."""
CLIENTS = 4
TIMEOUT = 400.0
"""Timeout in seconds of every step, for a busy machine."""
ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sysconfig.get_path("scripts"))

# Run all methods in one simulation with one worker, and last a run whose server is killed. The script has the name of
# Flower's simulation, so each run stores its clients' states in its directory.
SIMULATION = """
import json, os, signal, sys
sys.argv[0] = "flwr-simulation"
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from posy.client_app.app import app as clients
from posy.server_app.app import run
from posy.server_app.pictures import Pictures
from posy.server_app.recorder import Recorder

configs = json.loads(sys.stdin.read())
server = ServerApp()
original = Recorder.finish_round
Pictures.draw = Pictures.draw_partition = lambda self, *_, **__: None

def finish_round(self, server_round, arrays):
    result = original(self, server_round, arrays)
    if self.directory.path.name == "cut" and server_round == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

@server.main()
def main(grid, context):
    Recorder.finish_round = finish_round
    for config in configs:
        run(grid, config)

if __name__ == "__main__":
    run_simulation(server, clients, int(sys.argv[1]), backend_config={"client_resources": {"num_cpus": os.cpu_count()}})
"""


def settings(folder: Path, method: str, name: str, **more: Any) -> dict[str, Any]:
    """Return the settings of a run in a folder, with a central test set in this folder."""
    folder.mkdir(exist_ok=True)
    images = np.random.default_rng(3).integers(0, 256, (40, 8, 8), np.uint8)
    np.savez(folder / "central.npz", x_train=images, y_train=np.arange(40) % 10)
    config = {
        "central-test-data": str(folder / "central.npz"),
        "method": method,
        "num-clients": CLIENTS,
        "num-server-rounds": 2,
        "max-samples": 240,
        "fraction-train": 0.75,
        "model": "mlp",
        "local-epochs": 1,
        "device": "cpu",
        "stack": "loop",
        "output-dir": str(folder),
        "run-name": name,
        "join-timeout": 2 * TIMEOUT,  # on a busy machine, Ray's first worker has taken more than 5 minutes to start
    }
    if method == "ppfe":
        config |= {"ppfe-stages": 2}
    return {**config, **more}


def run_in_process(settings: dict[str, Any]) -> None:
    posy.run(**{key.replace("-", "_"): value for key, value in settings.items()})


CUT = {"num-server-rounds": 8, "checkpoint-every": 2}
SECURE = {"secure-aggregation": True}
TABLE = {"dataset": "heart-disease", "max-samples": 0, "validation-fraction": 0.2, "central-test-data": ""}
"""The raw tables of four hospitals, with categories and missing values."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Yield a directory with a short path, because Ray keeps Unix sockets there, and kill its leftover processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:
        yield Path(path)
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"TMPDIR={path}".encode() in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:  # the process has ended, or belongs to another user
                continue


def environment(folder: Path) -> dict[str, str]:
    variables = {
        "PATH": os.pathsep.join((str(SCRIPTS), os.environ["PATH"])),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**os.environ, **variables}


@pytest.fixture(scope="module")
def simulated(folder: Path, request: pytest.FixtureRequest) -> Path:
    """Run the methods of the selected tests in one simulation, then a run that is killed after round 5.

    Return the directory of the runs.
    """
    runs = folder / "runs"
    tests = [item.name for item in request.session.items if item.getparent(pytest.Module) is request.node]
    selected = [method for method in (*CORE, *FURTHER) if any(f"[{method}]" in test for test in tests)]
    configs = [settings(runs, method, method) for method in selected]
    if any("table" in test for test in tests):
        configs.append(settings(runs, "fedavg", "table", **TABLE))
    configs.append(settings(runs, "ppfe", "secure", **SECURE))
    configs.append(settings(runs, "fedrep", "cut", **CUT))
    done = subprocess.run(
        [sys.executable, "-P", "-c", SIMULATION, str(CLIENTS)],
        input=json.dumps(configs), env=environment(folder), cwd=folder,
        capture_output=True, text=True, timeout=3 * TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr[-5000:]
    return runs


@pytest.mark.parametrize("method", [*CORE, *(pytest.param(name, marks=pytest.mark.federation) for name in FURTHER)])
def test_ray_and_one_process_give_the_same_models(method: str, simulated: Path, tmp_path: Path) -> None:
    run_in_process(settings(tmp_path, method, method))
    points = 2 if settings_class(method).point == "served" else 1
    assert len(models_of(simulated / method)) == points * CLIENTS + 1
    assert summary_of(simulated / method)["central"]["served"]["models"] in (1, CLIENTS)  # 1: all clients share it
    assert_same_results(simulated / method, tmp_path / method)


def test_secure_aggregation_gives_the_same_models_on_ray(simulated: Path, tmp_path: Path) -> None:
    run_in_process(settings(tmp_path, "ppfe", "secure", **SECURE))
    assert_same_results(simulated / "secure", tmp_path / "secure")


@pytest.mark.slow
def test_a_raw_table_gives_the_same_models_on_ray(simulated: Path, tmp_path: Path) -> None:
    run_in_process(settings(tmp_path, "fedavg", "table", **TABLE))
    assert_same_results(simulated / "table", tmp_path / "table")
    predictors = [posy.load(folder / "table").predictor("Hungary") for folder in (simulated, tmp_path)]
    row = dict.fromkeys(predictors[0].preprocessing.columns, None) | {"age": 60, "cp": "4", "thal": "?", "restecg": "9"}
    first, second = (predictor.predict(row) for predictor in predictors)
    assert first == second and 0 < first.probabilities["disease"] < 1


@contextmanager
def started_superlink(folder: Path, *words: str) -> Iterator[None]:
    """Start a SuperLink as the default of `flwr`, in a folder whose subfolders have the names of the app's packages."""
    for name in ("posy", "client_app"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('the wrong code')")
    port = free_port()
    (folder / "flwr").mkdir(exist_ok=True)
    (folder / "flwr/config.toml").write_text(
        f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    with (folder / "superlink.log").open("wb") as log:
        where = ["--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(
            [str(SCRIPTS / "flower-superlink"), "--insecure", *words, *where],
            cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    end = time.monotonic() + TIMEOUT
    while True:
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{port}/health").close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < end, (folder / "superlink.log").read_text()
            time.sleep(0.1)
    yield
    process.terminate()
    process.wait(TIMEOUT)


@pytest.fixture(scope="module")
def superlink(folder: Path) -> Iterator[None]:
    """Start a SuperLink for simulations."""
    with started_superlink(folder, "--simulation"):
        yield


def flwr(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(SCRIPTS / "flwr"), *words], cwd=ROOT, env=environment(folder),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip


def check_one_line(setting: str, message: str, folder: Path) -> None:
    """Run `flwr run` with a wrong setting, and check that the log ends with the message and that the run has failed."""
    output = flwr(folder, "run", ".", "--stream", "--run-config", setting).stdout
    plain_output = re.sub(r"\x1b\[[\d;]*m", "", output).rstrip()
    last = plain_output.splitlines()[-1]
    assert last.startswith("ERROR :") and f" raised an exception: {message}" in last, output
    assert "Traceback" not in plain_output and "Exit Code" not in plain_output, output
    [run] = re.findall(r"Successfully started run (\d+)", output)
    [status] = json.loads(flwr(folder, "list", "--run-id", run, "--format", "json").stdout)["runs"]
    assert status["status"] == "finished:failed"


WRONG = [
    ("lr=-1.0", "lr = -1.0 in the run config: it must be a number above 0 (learning rate)"),
    ("dp-epsilon=0.5", "dp-epsilon = 0.5 in the run config has no effect: it needs dp != off"),
    ("num-clients=5000", "num-clients = 5000 in the run config: digits has 1797 samples"),
]


@pytest.mark.federation
@pytest.mark.parametrize(("setting", "message"), WRONG)
def test_simulation_setting_errors_take_one_line(setting: str, message: str, superlink: None, folder: Path) -> None:
    check_one_line(setting, message, folder)


@pytest.mark.federation
def test_stock_superlink_setting_errors_take_one_line() -> None:
    with tempfile.TemporaryDirectory() as path, started_superlink(Path(path)):
        for setting, message in WRONG:
            check_one_line(setting, message, Path(path))


@pytest.mark.federation
def test_flwr_run_resumes_a_run_after_its_server_was_killed(
    simulated: Path, superlink: None, folder: Path, tmp_path: Path
) -> None:
    """Run the README's command. The run's directory contains the clients' states, and the workers are new."""
    assert summary_of(simulated / "cut")["status"] == "running"
    assert len(rounds_of(simulated / "cut")) == 5
    words = ["--run-config", f'resume="cut" output-dir="{simulated}"']
    words += ["--federation-config", f"num-supernodes={CLIENTS} client-resources-num-cpus=1"]
    done = flwr(folder, "run", ".", "--stream", *words)
    assert done.returncode == 0, done.stdout
    assert f"Results of this run: {simulated / 'cut'}" in done.stdout
    run_in_process(settings(tmp_path, "fedrep", "cut", **CUT))
    assert_same_results(simulated / "cut", tmp_path / "cut")
    record = yaml.safe_load((simulated / "cut/config.yaml").read_text())
    # A checkpoint follows every second round, and other rounds if writing it is cheap.
    assert [entry["round"] in (4, 5) for entry in record["resumed"]] == [True]
    assert {p.name for p in (simulated / "cut/state").iterdir()} == {f"client-{c}" for c in range(CLIENTS)}
