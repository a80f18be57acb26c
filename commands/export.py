"""`posy export`: write a client's stored model to a file that other programs can use."""

import re
import time
from pathlib import Path

from posy.client_app.export.files import SUFFIXES, export_model
from posy.client_app.schema import model_card
from posy.server_app.progress import size
from posy.server_app.record import Record
from posy.settings import SettingsError
from posy.words import title


def export(run: str, client: str, file_format: str, output: Path | None = None, point: str = "") -> None:
    """Write a client's model to a file, and print the name and size of the file.

    Raises
    ------
    SettingsError
        If the run, the client or the model does not exist, or the model cannot be exported to the format.
    """
    if file_format not in SUFFIXES:
        raise SettingsError(f"--format {file_format}: it must be {', '.join(SUFFIXES)}")
    record = Record.find(run)
    model = record.predictor(client, point)
    name = re.sub(r"[^\w.-]+", "-", f"{record.name}-{model.site or model.client}")
    path = output or Path(name + SUFFIXES[file_format])
    start = time.monotonic()
    difference = export_model(model, model_card(model, record.name, record.scores(model)), path, file_format)
    seconds = time.monotonic() - start
    compared = f"equals posy predict within {difference:.1g}" if file_format != "safetensors" else "tensors only"
    heading = f"{title(model.client, model.site)}, {model.point} model of round {model.round}"
    print(f"{path}: {heading}, {size(path.stat().st_size)}, {compared} ({seconds:.1f} s)")
