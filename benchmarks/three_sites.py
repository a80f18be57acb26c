"""Run three sites, one with a damaged image and one that is killed and restarted, and document the output.

``python -m benchmarks.three_sites`` starts a SuperLink and three SuperNodes with TLS and node authentication on this
machine. It submits a run, and writes the output of the commands into docs/deploy/three-sites.md.
"""

import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.local_federation import Deployment
from benchmarks.measure import machine
from posy.commands.runlog import COLOUR
from posy.data.datasets import load_dataset
from posy.data.settings import DataSettings

NAMES = ("site-a", "site-b", "site-c")
CLASSES = {"site-a": range(10), "site-b": range(7), "site-c": range(3, 10)}
"""The digits at each site."""
IMAGES = 180
SETTINGS = (
    "dataset=sites",
    "num-clients=3",
    "min-clients=2",
    "method=fedrep",
    "model=mlp",
    "num-server-rounds=40",
    "local-epochs=50",
    "evaluate-every=1",
    "run-name=three-sites",
    "output-dir=runs",
)


def make_sites(folder: Path) -> None:
    """Write each site's images into class folders, and damage an image of site-b."""
    digits = load_dataset(DataSettings(), Path(), 0)
    start = 0
    for name in NAMES:
        indices = np.flatnonzero(np.isin(digits.y, CLASSES[name]))
        for index in indices[indices >= start][:IMAGES]:
            class_folder = folder / name / str(digits.y[index])
            class_folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.asarray(digits.x[index, :, :, 0])).save(class_folder / f"{index:04d}.png")
            start = index + 1
    damaged = sorted((folder / "site-b" / "3").iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:40])


def transcript(folder: Path) -> tuple[str, str]:
    """Run the sites, and return the command that submits the run with its output."""
    make_sites(folder)
    deployment = Deployment(folder, list(NAMES))
    try:
        for name in NAMES:
            node(deployment, name)
        for name in NAMES:
            deployment.until(lambda name=name: deployment.ready(name), name)  # type: ignore[misc]
        run = deployment.start("run", "run", *deployment.where, *SETTINGS)
        deployment.until(lambda: len(deployment.rounds("three-sites")) >= 4, "run", 180)
        print("site-c is killed", file=sys.stderr)
        deployment.kill("site-c")
        deployment.until(lambda: len(deployment.rounds("three-sites")) >= 9, "run", 300)
        print("site-c is restarted", file=sys.stderr)
        node(deployment, "site-c")
        run.wait(600)
        return f"posy run --superlink localhost:8000 {' '.join(SETTINGS)}", deployment.log("run")
    finally:
        deployment.stop()


def node(deployment: Deployment, name: str) -> None:
    """Start the node of a site; site-b skips images that it cannot read."""
    words = [f"data={deployment.folder / name}", f"state-dir={deployment.folder / 'state' / name}"]
    deployment.node(name, *words, *(["skip-unreadable=true"] if name == "site-b" else []))


def shortened(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a run's log. The lines of rounds between two other lines of rounds become one line ``...``."""
    is_round = [False, *(line.startswith("round ") for line in lines), False]
    skipped = False
    for i, line in enumerate(lines):
        skips = all(is_round[i : i + 3])
        if skips and not skipped:
            yield "..."
        elif not skips:
            yield line
        skipped = skips


def page(command: str, output: str, folder: Path) -> str:
    """Return the transcript as Markdown, with example paths instead of the paths of this machine."""
    hardware = machine()
    log = COLOUR.sub("", output).replace(str(folder), "/srv").rstrip()
    paragraphs = [
        "`python -m benchmarks.three_sites` writes this page. It starts a SuperLink and three nodes with TLS "
        f"({hardware['cores']} cores of an {hardware['cpu']}, {hardware['date']}).",
        "site-b has a damaged image, which its node skips. The benchmark kills site-c with `kill -9` after round 4, "
        "and starts it again after round 9. The restarted node joins when it has loaded PyTorch. The sites have the "
        "default [policy](policy.md), so accuracies and losses are rounded. The server "
        "[limits](../how-to/robust.md) large updates and large weights, and lists the "
        "affected sites at the end.",
    ]
    lines = ["# Three sites, one killed and restarted", ""]
    for paragraph in paragraphs:
        lines += [*textwrap.wrap(paragraph, 118, break_on_hyphens=False), ""]
    return "\n".join([*lines, "```console", f"$ {command}", *shortened(log.splitlines()), "```", ""])


def main() -> None:
    """Run the three sites and write docs/deploy/three-sites.md."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="posy-sites-", ignore_cleanup_errors=True) as folder:
        Path("docs/deploy/three-sites.md").write_text(page(*transcript(Path(folder)), Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
