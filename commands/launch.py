"""Carry out a run: inside this process, or with Flower's simulation on a SuperLink of its own."""

import fcntl
import http.client
import ipaddress
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from posy.commands.runlog import RunLog
from posy.server_app.resume import reached, read_summary
from posy.settings import RunError, Scalar
from posy.storage import replace
from posy.strategies.settings import RunSettings

if TYPE_CHECKING:
    from posy.server_app.recorder import Recorder

APP = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
INTERRUPTED = 130
"""Exit status after Ctrl-C."""

CLIENTS_PER_GPU = 4
START_SECONDS = 60.0
OUTAGE_SECONDS = 600.0
"""For so long a SuperLink that does not answer is waited for."""
STOP_SECONDS = 15.0
_ROUND = re.compile(r"round +(\d+)/(\d+) ")


class LaunchError(Exception):
    """Flower could not be started, or did not take the run."""


def run_in_process(config: Mapping[str, Scalar]) -> int:
    """Run the whole federation in this process, with a live progress bar; return the exit status.

    Raises
    ------
    SettingsError, DataError
        If a setting or the data is wrong.
    """
    begun: list[Path] = []
    try:
        record_in_process(config, begun.append)
    except KeyboardInterrupt:
        _tell("stopped", *begun)
        raise
    except RunError as error:
        print(f"posy: {error}", file=sys.stderr)
        if begun:
            _tell("failed", *begun)
        return 1
    except Exception:
        if begun:
            _tell("failed", *begun)
        raise
    return 0


def record_in_process(config: Mapping[str, Scalar], begun: Callable[[Path], object] = lambda path: None) -> "Recorder":
    """Do the same and return the record of the run; ``begun`` is told its directory as soon as it is there."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from posy.server_app.app import run  # noqa: PLC0415 - imports PyTorch

    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        return run(None, config, begun=begun)
    finally:
        logger.setLevel(level)


def run_simulation(overrides: Mapping[str, Scalar], num_clients: int, device: str, *, verbose: bool = False) -> int:
    """Run with Flower's simulation, show its progress, and return the exit status.

    A SuperLink is started for this run alone and ended with it. Its working directory is empty, because
    Ray's actors import what lies there before the app.

    Parameters
    ----------
    overrides : Mapping
        Settings that differ from their defaults; paths absolute.
    num_clients : int
        Number of SuperNodes to simulate.
    device : str
        The setting ``device``.
    verbose : bool
        Show Flower's whole log.

    Raises
    ------
    LaunchError
        If Flower does not start or refuses the run.
    """
    _check_app(overrides)
    overrides, environment, begun = dict(overrides), dict(ENVIRONMENT), time.time()
    if device.startswith("cuda:"):  # an actor sees only the GPU that Ray gives it, as number 0
        environment["CUDA_VISIBLE_DEVICES"] = device.removeprefix("cuda:")
        overrides["device"] = "cuda"
    with tempfile.TemporaryDirectory(prefix="posy-", ignore_cleanup_errors=True) as folder:
        settings = _written(overrides, Path(folder))
        federation = " ".join(f"{key}={value}" for key, value in resources(num_clients, device).items())
        with _superlink(Path(folder), environment) as flower:
            answer = flower.ask("run", str(APP), "--run-config", str(settings), "--federation-config", federation)
            status, results, _ = _follow(flower, answer["run-id"], verbose)
    if status == INTERRUPTED:  # Flower ends the server process without a word
        results = results or _begun_since(begun, Path(str(overrides.get("output-dir", "runs"))))
        if results:
            mark_stopped(Path(results))
        _tell("stopped", *([Path(results)] if results else []))
    elif status and results:
        _tell("failed", Path(results))
    return status


@dataclass(frozen=True)
class Connection:
    """Where a SuperLink takes orders, and how it is recognised.

    Attributes
    ----------
    address : str
        Host and port of its HTTP interface.
    root_certificates : Path or None
        Certificate of the authority that has signed the SuperLink's; None: no TLS.
    """

    address: str
    root_certificates: Path | None = None

    @property
    def local(self) -> bool:
        """Whether it is on this machine."""
        return is_loopback(self.address)

    def words(self) -> list[str]:
        """Return the options that name this SuperLink on the command line."""
        ca = self.root_certificates
        return ["--superlink", self.address, *(["--insecure"] if ca is None else ["--root-certificates", str(ca)])]

    def check(self) -> None:
        """Ask the SuperLink whether it is there.

        Raises
        ------
        LaunchError
            If nobody answers, or not with a certificate that is trusted.
        """
        context = None
        if self.root_certificates is not None:
            try:
                context = ssl.create_default_context(cafile=str(self.root_certificates))
            except (ssl.SSLError, OSError) as error:
                raise LaunchError(f"{self.root_certificates} cannot be used as a certificate: {error}") from error
        opener = _opener({} if self.local else None, context)
        try:
            opener.open(f"{'http' if context is None else 'https'}://{self.address}/health", timeout=10).close()
        except ssl.SSLError as error:
            raise LaunchError(self._distrust(error)) from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLError):
                raise LaunchError(self._distrust(reason)) from error
            raise LaunchError(self._unreached(reason)) from error
        except (http.client.HTTPException, ValueError) as error:
            raise LaunchError(self._unreached(error)) from error

    def _unreached(self, error: object) -> str:
        hint = "" if self.root_certificates else ", or does it want certificates (without --insecure)"
        return f"no SuperLink answers at {self.address} ({error}); does `posy superlink` run there{hint}?"

    def _distrust(self, error: ssl.SSLError) -> str:
        why = getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error)
        if why == "WRONG_VERSION_NUMBER":
            return f"the SuperLink at {self.address} speaks no TLS; was it started with --insecure?"
        return f"the SuperLink at {self.address} is not trusted by {self.root_certificates}: {why}"

    @contextmanager
    def open(self) -> Iterator["Flower"]:
        """Provide Flower's command line for this SuperLink, with settings of its own.

        Raises
        ------
        LaunchError
            If the SuperLink cannot be reached.
        """
        self.check()
        with tempfile.TemporaryDirectory(prefix="posy-", ignore_cleanup_errors=True) as folder:
            yield _connected(self, Path(folder), ENVIRONMENT)


def run_on_superlink(overrides: Mapping[str, Scalar], superlink: Connection, *, verbose: bool = False) -> int:
    """Submit a run to a SuperLink with SuperNodes, show its progress, and return the exit status.

    An outage of the SuperLink is waited for: the run itself may outlive it.

    Parameters
    ----------
    overrides : Mapping
        Settings that differ from their defaults; paths mean places on the SuperLink's machine.
    superlink : Connection
        The SuperLink.
    verbose : bool
        Show Flower's whole log.

    Raises
    ------
    LaunchError
        If the SuperLink cannot be reached or refuses the run.
    """
    _check_app(overrides)
    with superlink.open() as flower:
        settings = _written(overrides, flower.folder)
        answer = flower.ask("run", str(APP), "--run-config", str(settings))
        status, results, rounds = _follow(flower, answer["run-id"], verbose, patience=OUTAGE_SECONDS)
    if status:  # the checkpoints lie on the SuperLink's machine
        how = "stopped" if status == INTERRUPTED else "failed"
        if rounds or (results and overrides.get("resume")):
            folder = [f"output-dir={overrides['output-dir']}"] if "output-dir" in overrides else []
            words = [f"resume={Path(results).name}", *folder, *superlink.words()]
            after = f" after round {rounds}" if rounds else ""
            print(f"posy: {how}{after}; go on with: {shlex.join(['posy', 'run', *words])}", file=sys.stderr)
        elif status == INTERRUPTED:
            print("posy: stopped before a round was finished; start it anew", file=sys.stderr)
    return status


def show_run(superlink: Connection, run_id: str, *, verbose: bool = False) -> int:
    """Show the log of a run from its beginning on until it ends; Ctrl-C leaves it alone. Return the exit status."""
    shown = RunLog(verbose)
    with superlink.open() as flower:
        try:
            run = _watched(flower, run_id, shown, OUTAGE_SECONDS)
        except KeyboardInterrupt:
            shown.end()
            print("\nposy: the run goes on", file=sys.stderr)
            return INTERRUPTED
        return _ended(run, shown)


def resources(num_clients: int, device: str) -> dict[str, float]:
    """Return Flower's federation config: a node for each client, a core for each actor, and its share of a GPU.

    Ray hides the GPUs from an actor that has no share of one, also where ``device`` is ``auto``.
    """
    gpu = device.startswith("cuda") or (device == "auto" and shutil.which("nvidia-smi") is not None)
    return {
        "num-supernodes": num_clients,
        "client-resources-num-cpus": 1,
        "client-resources-num-gpus": 1 / CLIENTS_PER_GPU if gpu else 0.0,
    }


def is_loopback(address: str) -> bool:
    """Tell whether HOST:PORT is reached from this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def toml(value: Scalar) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _check_app(overrides: Mapping[str, Scalar]) -> None:
    """Check what Flower would refuse without saying why.

    Raises
    ------
    LaunchError
        If the app is not there, or does not admit a setting.
    """
    path = APP / "pyproject.toml"
    if not path.is_file():
        raise LaunchError(f"the Flower app is not in {APP}: run from a checkout (`pip install -e .`)")
    admitted = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    for key in overrides.keys() - admitted.keys():
        raise LaunchError(
            f"{key} is not in [tool.flwr.app.config] of {path}, so Flower does not admit it; `posy settings --toml` "
            "prints that table as it must be"
        )


def _written(overrides: Mapping[str, Scalar], folder: Path) -> Path:
    """Write settings to a file that `flwr run` reads."""
    path = folder / "run.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in overrides.items()), encoding="utf-8")
    return path


def _begun_since(begun: float, folder: Path) -> str:
    """Return the one run in a folder that is younger than a time: the log comes seconds after what it tells."""
    young = [path.parent for path in folder.glob("*/config.yaml") if path.stat().st_mtime >= begun]
    return str(young[0]) if len(young) == 1 else ""


def mark_stopped(run: Path) -> None:
    """Write into the summary of a run that was ended from outside that it is not running any more."""
    path, summary = run / "summary.json", read_summary(run)
    if summary.get("status") == "running":
        text = json.dumps({**summary, "status": "stopped"}, indent=2, ensure_ascii=False) + "\n"
        replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _tell(how: str, run: Path | None = None) -> None:
    """Tell how a run has ended, and the command that goes on with it."""
    after, rounds = reached(run) if run is not None else (0, 0)
    if run is None or not rounds:
        print(f"posy: {how} before the first checkpoint; results so far: {run or 'none'}", file=sys.stderr)
        return
    if how == "failed" and after >= rounds:  # to go on would be of no use
        return
    words = [f"resume={run.name}"]
    if run.parent != Path(RunSettings.output_dir).absolute():
        words.append(f"output-dir={run.parent}")
    print(f"posy: {how} after round {after}; go on with: {shlex.join(['posy', 'run', *words])}", file=sys.stderr)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let `kill` and a closed terminal end this process as Ctrl-C does: nothing that it started stays behind."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Flower:
    """Flower's command line, bound to one SuperLink."""

    folder: Path
    environment: Mapping[str, str]

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """Start `flwr`, out of reach of the terminal's Ctrl-C."""
        return subprocess.Popen(
            [script("flwr"), *words],
            cwd=self.folder,
            env=dict(self.environment),
            text=True,
            encoding="utf-8",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def ask(self, *words: str) -> dict[str, Any]:
        """Run `flwr` and return its answer.

        Raises
        ------
        LaunchError
            If it fails.
        """
        with self.start(*words, "--format", "json") as process:
            output, _ = process.communicate()
        start = output.find("{")
        answer = json.loads(output[start : output.rfind("}") + 1]) if start >= 0 else {}
        if process.returncode or not answer.get("success"):
            raise LaunchError(f"`flwr {words[0]}` failed: {answer.get('error-message') or output.strip()}")
        return dict(answer)


@contextmanager
def _superlink(folder: Path, environment: Mapping[str, str]) -> Iterator[Flower]:
    """Start a SuperLink for simulations that keeps its state in memory; end it and all it started."""
    address = f"127.0.0.1:{free_port()}"
    flower = _connected(Connection(address), folder, environment)
    command = [
        script("flower-superlink"),
        "--insecure",
        "--simulation",
        "--host",
        "127.0.0.1",
        "--port",
        address.rpartition(":")[2],
    ]
    log, lock = folder / "superlink.log", folder / "lock"
    with log.open("w", encoding="utf-8") as output, lock.open("w+") as empty:
        fcntl.flock(empty, fcntl.LOCK_EX)  # all descendants inherit it as their stdin: locked until the last one ends
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(flower.environment),
            stdin=empty,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await(process, f"http://{address}/health", log)
        yield flower
    finally:
        _end(process, lock)


def _connected(superlink: Connection, folder: Path, environment: Mapping[str, str]) -> Flower:
    """Write Flower's settings for a SuperLink into a folder, and return the command line that uses them."""
    home = folder / "flwr"
    home.mkdir()
    write_connection(home, superlink)
    return Flower(folder, flower_environment(home, environment))


def write_connection(home: Path, superlink: Connection) -> None:
    """Write into the directory that Flower's commands know as ``FLWR_HOME`` which SuperLink they talk to."""
    trust = "insecure = true"
    if superlink.root_certificates is not None:
        trust = f"root-certificates = {toml(str(superlink.root_certificates.absolute()))}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "posy"\n[superlink.posy]\naddress = {toml(superlink.address)}\n{trust}\n',
        encoding="utf-8",
    )


def flower_environment(home: Path, environment: Mapping[str, str] = ENVIRONMENT) -> dict[str, str]:
    """Return the environment for Flower's commands, which keep their own files in ``home``."""
    return {
        **os.environ,
        **environment,
        "FLWR_HOME": str(home),
        "PATH": os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))),
        **no_proxy(),
    }


def no_proxy() -> dict[str, str]:
    """Return the environment that keeps proxies away from this machine's own addresses."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, ("127.0.0.1,localhost", given))))


def _opener(
    proxies: Mapping[str, str] | None = None, context: ssl.SSLContext | None = None
) -> urllib.request.OpenerDirector:
    """Return what opens addresses, through the proxies of the environment unless others are given."""
    handler = urllib.request.ProxyHandler(None if proxies is None else dict(proxies))
    return urllib.request.build_opener(handler, urllib.request.HTTPSHandler(context=context))


def _await(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    opener = _opener({})
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with opener.open(url, timeout=1):
                return
        except OSError:  # not listening yet
            time.sleep(0.1)
    raise LaunchError(f"Flower's SuperLink did not start: {log.read_text(encoding='utf-8').strip()[-2000:]}")


def _follow(flower: Flower, run_id: str, verbose: bool, patience: float = 0.0) -> tuple[int, str, int]:
    """Show a run's log until it ends; Ctrl-C stops the run. Return exit status, results directory and last round."""
    shown = RunLog(verbose)
    try:
        run = _watched(flower, run_id, shown, patience)
    except KeyboardInterrupt:
        shown.end()
        print("\nposy: stopping the run", file=sys.stderr)
        flower.ask("stop", run_id)
        return INTERRUPTED, shown.results, _rounds(shown.lines)
    return _ended(run, shown), shown.results, _rounds(shown.lines)


def _watched(flower: Flower, run_id: str, shown: RunLog, patience: float) -> dict[str, Any]:
    """Show the log of a run until it ends, and return what the SuperLink then tells of the run.

    A SuperLink that cannot be reached is waited for, for up to ``patience`` seconds.
    """
    run: dict[str, Any] = {}
    while not str(run.get("status", "")).startswith("finished"):
        _show_log(flower, run_id, shown)
        run = _told(flower, run_id, patience)
    return run


def _ended(run: Mapping[str, Any], shown: RunLog) -> int:
    """Tell how a run has ended unless it is completed, and return the exit status."""
    completed = run["status"] == "finished:completed"
    shown.end(failed=not completed)
    if not completed:
        details = str(run["status-details"]).removeprefix("Simulation failed with exception: ")
        print(f"posy: the run ended as {run['status']}: {details}", file=sys.stderr)
    return 0 if completed else 1


def _rounds(lines: Iterable[str]) -> int:
    """Return the last round that a run has told to be finished; 0 if there is none, or all are."""
    told = [(int(found[1]), int(found[2])) for line in lines if (found := _ROUND.match(line))]
    return max((finished for finished, rounds in told if finished < rounds), default=0)


def _told(flower: Flower, run_id: str, patience: float) -> dict[str, Any]:
    """Return what the SuperLink tells of a run; one that does not answer is asked again for ``patience`` seconds."""
    end = time.monotonic() + patience
    while True:
        try:
            return dict(flower.ask("list", "--run-id", run_id)["runs"][0])
        except LaunchError:
            if time.monotonic() >= end:
                raise
        time.sleep(1.0)


def _show_log(flower: Flower, run_id: str, shown: RunLog) -> None:
    """Show the log of a run as it grows, until it ends or breaks off; what is shown already is passed over."""
    process = flower.start("log", run_id, "--stream")
    assert process.stdout is not None
    known = Counter(shown.lines)
    try:
        for line in process.stdout:
            if known[line]:  # told again from the beginning
                known[line] -= 1
            else:
                shown.add(line)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _end(process: "subprocess.Popen[bytes]", lock: Path) -> None:
    """End the SuperLink; its children notice and end themselves, which is waited for."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave it behind
    try:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        end = time.monotonic() + STOP_SECONDS
        with lock.open() as file:
            while not _locked(file):
                if time.monotonic() > end:
                    print("posy: Flower's processes are still ending", file=sys.stderr)
                    break
                time.sleep(0.1)
    finally:
        signal.signal(signal.SIGINT, before)


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def script(name: str) -> str:
    """Return a command of the environment that runs this code, whether it is activated or not."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
