"""Other users of the machine cannot read the secret or the tokens of a SuperLink or a node."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from posy.deploy.secret import new_secret, pipe_of, write_secret
from posy.deploy.superexec import MOST_REFUSALS, HidingPopen, signed_again

# -- the secret and the tokens ----------------------------------------------------------------------------


def test_secret_file_is_private_and_new_at_every_start(tmp_path: Path) -> None:
    path = tmp_path / "private" / "secret"
    first = write_secret(path).read_bytes()
    assert len(first) == 32
    path.chmod(0o644)  # a file from an earlier start
    assert write_secret(path).read_bytes() != first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_flower_reads_a_piped_secret_once() -> None:
    from flwr.supercore.auth import load_superexec_auth_secret

    secret = new_secret()
    path, descriptor = pipe_of(secret)
    try:
        assert load_superexec_auth_secret(path) == secret
        with pytest.raises(ValueError, match="empty"):
            load_superexec_auth_secret(path)
    finally:
        os.close(descriptor)


def test_command_line_does_not_contain_the_token() -> None:
    program = "import sys; print(open(sys.argv[sys.argv.index('--token-file') + 1]).read(), *sys.argv[1:])"
    command = [sys.executable, "-c", program, "--first", "1", "--token", "s3cret", "--insecure"]
    with HidingPopen(command, stdout=subprocess.PIPE, text=True) as process:
        output = process.communicate()[0].split()
    assert output[0] == "s3cret"
    assert output[1:4] == ["--first", "1", "--token-file"]
    assert output[5:] == ["--insecure"]
    assert "s3cret" not in process.args
    with HidingPopen([sys.executable, "-c", "print(7)"], stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0] == "7\n"


def test_rejected_signature_is_retried_a_few_times() -> None:
    statuses = [401] * (MOST_REFUSALS + 1) + [200, 401]

    def send(client: httpx.Client, request: httpx.Request, **options: object) -> httpx.Response:
        return httpx.Response(statuses.pop(0), request=request)

    checked, request = signed_again(send), httpx.Request("POST", "http://here")
    with httpx.Client() as client:
        for _ in range(MOST_REFUSALS):
            with pytest.raises(httpx.ReadError, match="signature of the request"):
                checked(client, request)
        assert [checked(client, request).status_code for _ in range(2)] == [401, 200]
        with pytest.raises(httpx.ReadError):
            checked(client, request)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_cannot_read_the_secret() -> None:
    def readable(path: Path) -> bool:
        """Return whether the user `nobody` can read a file."""
        process = os.fork()
        if not process:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os._exit(0 if os.access(path, os.R_OK) else 3)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        secret = write_secret(Path(folder, "private", "secret"))
        public = Path(folder, "public")
        public.write_text("for all")
        public.chmod(0o644)
        secret.parent.chmod(0o755)  # the mode of the file is sufficient
        assert readable(public)
        assert not readable(secret)
