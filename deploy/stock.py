"""An unmodified Flower node: ``python -m posy.deploy.stock`` takes the arguments of ``flower-supernode``.

Flower's node does not share a secret with the process that takes its tasks, so any user of the machine can take tasks.
Here, both processes share a secret. This process becomes the node, and the other process terminates with it.

Flower copies a run's code to a folder file by file, and treats the code as installed as soon as the folder exists. If
nodes on a machine shared ``FLWR_HOME``, one node could import code that another node is still copying. Here, each node
on a machine installs code in its own subfolder of ``FLWR_HOME``.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from posy.deploy.addresses import free_port
from posy.deploy.secret import OPTION, new_secret, pipe_of
from posy.paths import flwr_home
from posy.storage import lock


def main() -> None:
    """Start the process that takes the tasks, and become the node."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="")
    options, node_words = parser.parse_known_args()
    port, secret = options.port or str(free_port()), new_secret()
    path, descriptor = pipe_of(secret)
    address = f"[{options.host}]:{port}" if ":" in options.host else f"{options.host}:{port}"
    executor = [sys.executable, "-P", "-m", "posy.deploy.superexec", "--runtime-api-address", address, "--insecure"]
    executor += ["--parent-pid", str(os.getpid()), OPTION, path]
    home, home_lock = unused_home(flwr_home())
    # The executor holds the lock, so another node can use the folder as soon as the executor has exited.
    environment = os.environ | {"FLWR_HOME": str(home)}
    subprocess.Popen(executor, pass_fds=[descriptor, home_lock], env=environment)
    os.close(descriptor)
    os.close(home_lock)
    path, descriptor = pipe_of(secret)
    os.set_inheritable(descriptor, True)
    node = [str(Path(sysconfig.get_path("scripts")) / "flower-supernode"), *node_words]
    node += ["--isolation", "process", "--host", options.host, "--port", port, OPTION, path]
    os.execv(node[0], node)


def unused_home(home: Path) -> tuple[Path, int]:
    """Lock the first unused subfolder of ``home``, and return the subfolder and the descriptor of its lock."""
    number = 0
    while True:
        folder = home / "nodes" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return folder, lock(folder)
        except BlockingIOError:
            number += 1


if __name__ == "__main__":
    main()
