"""An unmodified Flower node: ``python -m posy.deploy.stock`` takes the arguments of ``flower-supernode``.

Flower's node gives no secret to the process that takes its tasks, so any user of the machine can take them. Here, both
processes share a secret. This process becomes the node, and the other process terminates with it.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from posy.deploy.addresses import free_port
from posy.deploy.secret import OPTION, new_secret, pipe_of


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
    subprocess.Popen(executor, pass_fds=[descriptor])
    os.close(descriptor)
    path, descriptor = pipe_of(secret)
    os.set_inheritable(descriptor, True)
    node = [str(Path(sysconfig.get_path("scripts")) / "flower-supernode"), *node_words]
    node += ["--isolation", "process", "--host", options.host, "--port", port, OPTION, path]
    os.execv(node[0], node)


if __name__ == "__main__":
    main()
