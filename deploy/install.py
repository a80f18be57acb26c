"""The code of a run, installed all at once.

Flower copies the code file by file to a folder, and takes the folder as installed as soon as it exists. If two runs of
the same code start together, the second one then fails with a missing file. A run after an interrupted copy fails too.
"""

import contextlib
import io
import tempfile
from pathlib import Path

from flwr.cli.install import install_from_fab
from flwr.common.constant import APP_DIR, FAB_HASH_TRUNCATION
from flwr.supercore.fab import Fab
from flwr.supercore.utils import get_flwr_home


def install_whole(fab: Fab) -> None:
    """Install the code of a bundle in Flower's folder, all of it or nothing; skip code that is already installed.

    Raises
    ------
    click.ClickException
        If this is not a Flower bundle, or its files do not match its list.
    OSError
        If the folder cannot be written.
    """
    apps = get_flwr_home() / APP_DIR
    if any(apps.glob(f"*.{fab.hash_str[:FAB_HASH_TRUNCATION]}")):
        return
    apps.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=apps, prefix=".new-") as temporary:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints this temporary folder
            code = install_from_fab(fab.content, Path(temporary), skip_prompt=True)
        installed = apps / code.name
        try:
            code.rename(installed)
        except OSError:
            if not installed.is_dir():  # another process has not installed it meanwhile
                raise
