"""Write screenshots of a report to docs/pictures. The program needs Chromium.

usage: python docs/screenshots.py [BROWSER]

BROWSER is the browser's command. The default is ``chromium``.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

PICTURES = Path(__file__).resolve().parent / "pictures"
COMMANDS = (
    "run run-name=first",
    "run method=local run-name=local",
    "report runs/first runs/local -o compared.html",
)
"""The commands of docs/start/first-run.md."""
SECTIONS = {"report-rounds": ("s2", 385), "report-clients": ("s5", 462)}
"""Picture → the id of the report's section, and the height of the window in pixels."""
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")


def main(browser: str = "chromium") -> None:
    """Create the report in a temporary folder, and write a screenshot of each section."""
    with TemporaryDirectory() as folder:
        for command in COMMANDS:
            subprocess.run([sys.executable, "-m", "posy", *command.split()], cwd=folder, check=True)
        report = Path(folder, "compared.html")
        text = report.read_text()
        for name, (section, height) in SECTIONS.items():
            report.write_text(f"{text}<style>h1, nav, section:not(#{section}) {{ display: none }}</style>")
            shot = [f"--window-size=1280,{height}", f"--screenshot={PICTURES / f'{name}.png'}"]
            profile = f"--user-data-dir={folder}/profile"
            subprocess.run([browser, *OPTIONS, profile, *shot, report.as_uri()], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
