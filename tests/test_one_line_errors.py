"""A user's error gives one line at once, on the command line and in the ServerApp's log."""

import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from flwr.common.logger import FLOWER_LOGGER

from posy.data import assign
from posy.data.datasets import load_dataset
from posy.data.partitions import partition
from posy.data.settings import DataSettings
from posy.flower import ErrorsOnOneLine
from posy.server_app import app as server
from posy.settings import SettingsError

# -- the log of a ServerApp ---------------------------------------------------------------------------------

SERVER_APP = """
import sys
from logging import ERROR
from flwr.common.logger import FLOWER_LOGGER, log
from flwr.supercore.exit import ExitCode, flwr_exit
from posy.data.errors import DataError
from posy.flower import ErrorsOnOneLine
from posy.settings import RunError, SettingsError

FLOWER_LOGGER.addFilter(ErrorsOnOneLine((SettingsError, DataError, RunError)))
for error in sys.argv[1:]:
    try:
        raise eval(error)
    except Exception as raised:
        log(ERROR, "%s raised an exception", "ServerApp", exc_info=raised)
flwr_exit(ExitCode.SERVERAPP_EXCEPTION, emit_telemetry=False)
"""


def logged(*errors: str) -> str:
    """Return the log of a process that logs exceptions and ends, as Flower's process of a ServerApp does."""
    ended = subprocess.run([sys.executable, "-c", SERVER_APP, *errors], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    return re.sub(r"\x1b\[[\d;]*m", "", ended.stdout + ended.stderr)


@pytest.mark.parametrize("error", ["SettingsError('lr = -1')", "DataError('no\\n  file')", "RunError('no client')"])
def test_user_errors_take_one_line(error: str) -> None:
    message = error.split("'")[1].replace("\\n ", "")
    assert logged(error) == f"ERROR :     ServerApp raised an exception: {message}\n"


@pytest.mark.parametrize("errors", [["KeyError('x')"], ["SettingsError('lr = -1')", "KeyError('x')"]])
def test_program_errors_keep_their_traceback_and_exit_code(errors: list[str]) -> None:
    log = logged(*errors)
    assert "Traceback (most recent call last)" in log
    assert "KeyError: 'x'" in log
    assert "Exit Code: 201" in log


def test_the_server_app_uses_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):  # noqa: N818
        pass

    def stop(*_: object) -> None:
        raise Stop

    before = list(FLOWER_LOGGER.filters)
    monkeypatch.setattr(server, "user_settings_in", stop)
    context = type("Context", (), {"run_config": {}})()
    grid = type("Grid", (), {"run": type("Run", (), {"override_config": {}})()})()
    try:
        with pytest.raises(Stop):
            server.app(grid, context)
        assert any(isinstance(added, ErrorsOnOneLine) for added in FLOWER_LOGGER.filters)
    finally:
        FLOWER_LOGGER.filters[:] = before


# -- partitions that cannot be drawn ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        DataSettings(num_clients=1000),
        DataSettings(num_clients=1000, dirichlet_balanced=True),
        DataSettings(num_clients=20, dirichlet_alpha=1e-4),
        DataSettings(num_clients=1000, partition="classes", samples_per_client=20),
        DataSettings(num_clients=1000, partition="shards"),
        DataSettings(num_clients=1798, partition="iid"),
    ],
    ids=["dirichlet", "balanced", "alpha", "classes", "shards", "iid"],
)
def test_impossible_partitions_fail_fast(settings: DataSettings) -> None:
    digits = load_dataset(DataSettings(), Path(), 0)
    began = time.process_time()
    with pytest.raises(SettingsError, match=f"num-clients = {settings.num_clients}"):
        partition(digits, settings, 42)
    assert time.process_time() - began < 20


def test_the_share_of_draws_that_lack_samples_by_hand() -> None:
    """With a single sample and two clients, one client lacks samples, for any shares."""
    settings = DataSettings(num_clients=2)
    assert assign.share_below(np.array([1]), settings, 1) == 0.5
    assert assign.share_below(np.array([1]), settings, 2) == 1
    assert assign.share_below(np.array([1000, 0]), DataSettings(num_clients=2, dirichlet_alpha=1e3), 1) == 0
    # With alpha = 1 the first client's share is uniform, so it gets neither of two samples with probability 1/2.
    first = assign.share_below(np.array([2]), settings.__class__(num_clients=2, dirichlet_alpha=1.0), 1)
    assert first == pytest.approx((0.5 + 0.0) / 2, abs=0.01)


def test_a_partition_that_needs_several_draws_succeeds() -> None:
    """The estimate uses another generator, so the partition is unchanged, and a rare valid draw is accepted."""
    digits = load_dataset(DataSettings(), Path(), 0)
    parts = partition(digits, DataSettings(num_clients=20, dirichlet_alpha=0.05), 0)
    sizes = [len(train) + len(test) for train, test in zip(parts.train, parts.test, strict=True)]
    assert len(sizes) == 20 and min(sizes) >= 2 and sum(sizes) == 1797


# -- Typer -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vendored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Typer that holds a copy of click, as Typer does from 0.21 on."""
    folder = tmp_path_factory.mktemp("typer")
    spec, click = find_spec("typer"), find_spec("click")
    assert spec is not None and spec.origin is not None and click is not None and click.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / "typer")
    shutil.copytree(Path(click.origin).parent, folder / "typer" / "_click")
    for file in (folder / "typer").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        text = re.sub(r"^(\s*)import click\.(\w+)$", r"\1import typer._click.\2", text, flags=re.MULTILINE)
        text = re.sub(r"^(\s*)import click$", r"\1from typer import _click as click", text, flags=re.MULTILINE)
        text = re.sub(r"^(\s*)from click(?=[. ])", r"\1from typer._click", text, flags=re.MULTILINE)
        file.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--version"], 0, "posy "),
        (["run", "--help"], 0, "EXPERIMENT is a YAML file"),
        (["settings", "fedavg"], 0, "num-clients"),
        (["runn"], 2, "did you mean `posy run`?"),
        (["run", "--lr", "0.1"], 2, "lr is a setting, not an option; type lr=0.1"),
        (["run", "--superlinkk", "x"], 2, "did you mean --superlink?"),
        (["table"], 2, "see `posy table --help`"),
        (["run", "lr=-1"], 2, "lr = -1.0"),
        (["status", "--nothing"], 2, "--nothing is not an option"),
    ],
)
def test_commands_work_with_a_typer_that_vendors_click(
    words: list[str], status: int, message: str, vendored: Path
) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(vendored)!r}); import typer, click; "
        "assert typer.BadParameter.__mro__[1] is not click.UsageError; "
        "from posy.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stderr
    assert message in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
