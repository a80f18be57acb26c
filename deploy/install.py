"""The code of a run, installed all at once.

Flower copies it file by file to a folder that counts as installed as soon as it is there. Of two runs of the same code
that start together, the second then ends with a file not found, and so does whatever follows an interrupted copy.
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
    """Install the code of a bundle where Flower looks for it, unless it is there: as a whole or not at all.

    Raises
    ------
    click.ClickException
        If this is not a bundle of Flower's, or its files are not those it lists.
    OSError
        If the folder cannot be written.
    """
    apps = get_flwr_home() / APP_DIR
    if any(apps.glob(f"*.{fab.hash_str[:FAB_HASH_TRUNCATION]}")):
        return
    apps.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=apps, prefix=".new-") as made:
        with contextlib.redirect_stdout(io.StringIO()):  # it tells where this folder is
            code = install_from_fab(fab.content, Path(made), skip_prompt=True)
        installed = apps / code.name
        try:
            code.rename(installed)
        except OSError:
            if not installed.is_dir():  # nobody else was faster
                raise
