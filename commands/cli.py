"""The `posy` command-line interface."""

import ast
import importlib.util
import logging
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast

import typer
import typer.core

from posy.commands import guide
from posy.commands.deploy import commands as deployment
from posy.commands.deploy import policy
from posy.commands.deploy.commands import Insecure, RootCertificates, Verbose
from posy.commands.deploy.next_steps import after_check_site
from posy.commands.deploy.options import connection
from posy.commands.help import EXPERIMENTS, MODELS, RESULTS, SITE, Group, commands_in
from posy.commands.launch import APP, INTERRUPTED, run_in_process, toml, without_colours
from posy.data.errors import DataError
from posy.data.settings import SITES
from posy.extensions import is_custom
from posy.listing import print_table
from posy.paths import exists, is_file
from posy.server_app.progress import size
from posy.settings import COMMAND_LINE, LaunchError, Setting, SettingsError, nearest, set_in, suggest_keys, suggestions
from posy.signals import interruptible
from posy.storage import DamagedFileError
from posy.strategies.methods import METHODS, REFERENCES
from posy.strategies.registry import declared, groups, merge_experiment, parse_words, read_settings, setting_of
from posy.strategies.run_settings import RunSettings
from posy.strategies.settings import folder_name
from posy.words import counted
from posy.yaml12 import dump

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]...", help="Settings that override the file (`posy settings` lists them)."),
]
Jobs = Annotated[
    int,
    typer.Option("-j", "--jobs", min=1, metavar="N", help="Number of parallel runs.", show_default="number of cores"),
]
TableFile = Annotated[Path, typer.Argument(metavar="FILE", help="Table in YAML, such as those in benchmarks/tables/.")]

UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""click's ``UsageError``, or the ``UsageError`` of the copy of click that newer versions of Typer bundle."""
CORES = os.cpu_count() or 1
OUT_OF_RANGE = re.compile(r"(-?[\d.]+) is not in the range (?:([\d.]+)<=)?x(?:>=([\d.]+))?(?:<=([\d.]+))?")
"""Pattern of click's error about a number that is too small or too large."""
USAGE_ERROR = 2
"""Exit status for an invalid command or setting."""

app = typer.Typer(
    cls=Group,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="""\b
examples:
  posy run                                 FedFew on scikit-learn's digits
  posy run method=ppfe dataset=mnist num-clients=20
  posy run ppfe-cifar10-s2                 settings of the PPFE paper
  posy settings fedfew                     the settings of a method
  posy COMMAND --help                      the help of a command""",
)
experiments, results, trained, site = (commands_in(app, group) for group in (EXPERIMENTS, RESULTS, MODELS, SITE))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 (failed), 2 (invalid usage or settings) or 130 (interrupted)."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    logging.getLogger("flwr").addFilter(without_colours)
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    try:
        _check_command(words, command)
        with interruptible():
            status = command.main(words or ["--help"], "posy", standalone_mode=False)
    except UsageError as error:
        print(f"posy: {_wrong_use(error, words, command)}", file=sys.stderr)
        return USAGE_ERROR
    except (SettingsError, DataError, LaunchError, DamagedFileError) as error:
        print(f"posy: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return int(status or 0) if words else USAGE_ERROR


def _show_version(wanted: bool) -> None:
    """Print the versions of Posy, Flower, PyTorch and Python, without importing any of the packages, and exit."""
    if wanted:
        file = APP / "pyproject.toml"
        posy_version = (
            tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"] if file.is_file() else version("posy")
        )
        flower, torch, python = version("flwr"), version("torch"), sys.version.partition(" ")[0]
        print(f"posy {posy_version} (flwr {flower}, torch {torch}, Python {python})")
        raise typer.Exit


@app.callback()
def posy(
    show_version: Annotated[
        bool, typer.Option("-V", "--version", is_eager=True, callback=_show_version, help="Show the versions and exit.")
    ] = False,
) -> None:
    """Personalised federated learning on Flower."""


@experiments(
    epilog="""\b
examples:
  posy run num-server-rounds=5 dataset=heart-disease
  posy run method=fedavg dataset=mnist partition=classes classes-per-client=2
  posy run fedfew-agnews method=fedavg     a paper's settings, another method
  posy run my.yaml lr=0.01 seed=1          your file, two settings changed
  posy run resume=my-run                   resume runs/my-run
  posy run --superlink localhost:8000 dataset=sites num-clients=3"""
)
def run(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[EXPERIMENT] [key=value]...",
            help="A settings file (its path, or the name of a paper's settings), and settings that override the file.",
        ),
    ] = None,
    superlink: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Submit the run to this SuperLink (its --control address).")
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    verbose: Verbose = False,
) -> int:
    """Train a method on this machine or on a federation.

    By default, Posy trains FedFew on scikit-learn's digits. `posy settings`, `posy methods` and `posy datasets` list
    the settings and their values. EXPERIMENT is a YAML file of settings (key: value): its path, or its name in
    papers/PAPER/settings/. The results are in a new folder in runs/ (settings output-dir and run-name).

    Without --superlink, all clients run in this process. With --superlink, Posy submits the run to a federation and
    shows its log. To use Flower's simulation engine, run `flwr run .` in a checkout. Ctrl-C stops the run.
    """
    words = settings or []
    if words and words[0] and ("=" not in words[0] or is_file(Path(words[0]))):
        words[0] = f"experiment={words[0]}"
    config = parse_words(words, COMMAND_LINE)
    if superlink is None:
        return run_in_process(config, COMMAND_LINE)
    merged = merge_experiment(config, COMMAND_LINE)
    if merged.notice:
        print(f"posy: {merged.notice}", file=sys.stderr)
    config = merged.values
    checked = None
    if not config.get("resume"):  # the other settings of a resumed run are on the SuperLink's machine
        checked = read_settings(config, COMMAND_LINE, sources=merged.sources)
    endpoint = connection(superlink, root_certificates, insecure)
    subject = guide.subject(checked) if checked else f"resuming {config['resume']}"
    print(f"{subject}; on the nodes of {superlink}", flush=True)
    from posy.commands.deploy import control  # noqa: PLC0415 - imports Flower

    if checked and checked.data.dataset == SITES and checked.data.folds and not checked.data.fold:
        typed = [word for word in words if not word.startswith("run-name=")]
        folds = control.Folds(folder_name(checked, f"folds{checked.data.folds}"), checked.data.folds, typed)
        return control.run_folds_on_superlink(config, folds, endpoint, verbose=verbose)
    return control.run_on_superlink(config, endpoint, verbose=verbose)


@experiments(
    epilog="""\b
examples:
  posy table benchmarks/tables/compare-digits.yaml
  posy table my.yaml -j 4 num-server-rounds=5
  posy table my.yaml --only-print          the table of the finished runs"""
)
def table(
    file: TableFile,
    settings: Settings = None,
    jobs: Jobs = CORES,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Directory for the results (default: `output` in FILE, or results/ and the name of FILE).",
        ),
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--only-print", help="Print the table of the finished runs, without starting new runs.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Address of a Ray cluster whose workers execute the runs, such as `auto`."
        ),
    ] = None,
    ray_gpus: Annotated[float, typer.Option(min=0, metavar="N", help="With --ray: GPUs per run.")] = 0,
) -> int:
    """Compare methods over data sets and seeds.

    FILE contains the rows (`runs`), `seeds` and, optionally, `variants`, `settings` for all runs, `title` and `output`.
    Each combination of row, variant and seed is a run in a separate process. Posy skips finished runs, so you can
    interrupt the command and repeat it.
    """
    from posy.commands.table import next_commands, read_plan, run_table  # noqa: PLC0415 - imports pandas and the methods

    plan = read_plan(file, parse_words(settings or [], COMMAND_LINE), output)
    if ray is None or only_print:
        status = run_table(plan, jobs=jobs, only_print=only_print)
        guide.show_next([] if status or only_print else next_commands(plan, file))
        return status
    if importlib.util.find_spec("ray") is None:
        raise SettingsError("--ray needs Ray, which is not installed; install it: pip install 'flwr[simulation]'")
    from posy.commands.on_ray import cluster  # noqa: PLC0415 - imports Ray

    with cluster(ray, ray_gpus) as begin:
        status = run_table(plan, jobs=len(plan.cells), begin=begin)
    guide.show_next([] if status else next_commands(plan, file))
    return status


@experiments(
    epilog="""\b
examples:
  posy tune benchmarks/tables/tune-digits.yaml
  posy tune my.yaml -n 20 num-server-rounds=10"""
)
def tune(
    file: TableFile,
    settings: Settings = None,
    trials: Annotated[int, typer.Option("-n", "--trials", min=1, metavar="N", help="Trials per row and variant.")] = 12,
    jobs: Jobs = CORES,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Table with the best settings (default: FILE-tuned.yaml)."),
    ] = None,
) -> int:
    """Tune every row of a table with the same number of trials.

    FILE is the same as for `posy table`. Posy tunes the learning rate and every setting for which the method declares a
    search range (`posy settings METHOD` lists the ranges). It scores trials on the clients' validation splits, never on
    test data, and skips finished trials. The output is a table with the best settings, for `posy table`.
    """
    if importlib.util.find_spec("optuna") is None:
        raise SettingsError("posy tune needs Optuna, which is not installed; install it: pip install 'posy[compare]'")
    from posy.commands.table import as_words, read_plan  # noqa: PLC0415 - imports pandas and the methods
    from posy.commands.tuning import tune as search  # noqa: PLC0415 - imports Optuna

    overrides = parse_words(settings or [], COMMAND_LINE)
    plan = read_plan(file, overrides)
    target = output or file.with_name(f"{file.stem}{guide.TUNED}.yaml")
    text = dump(search(plan, trials=trials, jobs=jobs))
    words = f" {as_words(overrides)}" if overrides else ""
    target.write_text(f"# Written by `posy tune {file}{words}`: {trials} trials per row.\n{text}", encoding="utf-8")
    print(f"wrote {target}")
    guide.show_next([f"posy table {shlex.quote(str(target))}"])
    return 0


@experiments(
    epilog="""\b
examples:
  posy paper                               the papers and their claims
  posy paper fedfew                        redraw docs/papers/fedfew.md
  posy paper fedfew table1                 run a table, then redraw the page
  posy paper fedfew table1 --seeds 5       add seeds, for undecided claims
  posy paper cwfedavg all -j 2 data-dir=datasets"""
)
def paper(
    name: Annotated[
        str, typer.Argument(metavar="[PAPER]", help="A paper; without one, Posy lists the papers.", show_default=False)
    ] = "",
    part: Annotated[
        str,
        typer.Argument(
            metavar="[TABLE|FIGURE|all]", help="The part to run, such as table1 or figure2.", show_default=False
        ),
    ] = "",
    settings: Settings = None,
    scale: Annotated[
        str, typer.Option(metavar="small|full", help="Reduced runs for a laptop, or the paper's full-size runs.")
    ] = "small",
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", min=1, metavar="N", help="Use seeds 0 to N - 1 instead of the file's seeds."),
    ] = None,
    jobs: Jobs = CORES,
) -> int:
    """Reproduce a paper's tables and figures.

    Posy writes its results next to the paper's in docs/papers/PAPER.md. Each table or figure is a YAML file in papers/.
    Posy skips finished runs, including runs for other tables and figures of the paper.
    """
    from posy.commands.papers.run import list_papers, run_part, show_paper  # noqa: PLC0415 - imports pandas

    if seeds and not part:
        raise SettingsError(f"--seeds {seeds} requires the name of a table or figure, or `all`")
    if not name:
        return list_papers()
    if not part:
        return show_paper(name)
    return run_part(name, part, scale, parse_words(settings or [], COMMAND_LINE), jobs, seeds)


Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run, or its name in runs/.")]
Samples = Annotated[list[str], typer.Argument(metavar="FILE...", help="Inputs: images, texts, or tables (see above).")]
Client = Annotated[str, typer.Argument(metavar="CLIENT", help="Number of a client (from 0), or name of a site.")]
Point = Annotated[
    str,
    typer.Option(
        metavar="served|local",
        help="Use the model before or after local training (default: the model by which the method is scored).",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@trained(
    epilog="""\b
examples:
  posy predict my-run 0 photo.png
  posy predict my-run hospital-a patients.csv --json
  posy predict my-run 3 "Oil prices rise again"
  posy predict /srv/posy-state hospital-a patients.csv     at a site"""
)
def predict(
    run: Run,
    client: Client,
    files: Samples,
    point: Point = "",
    as_json: Json = False,
) -> int:
    """Predict classes or values with a client's model.

    At a site, RUN is the state-dir or models folder of the node, and Posy uses the site's current model (see `posy
    models`).

    FILE is an image, a text file, a .csv file or a .npy array. You may also pass the text itself. A .csv file has a
    header and one sample per row. The first axis of a .npy array indexes the samples.
    """
    from posy.commands.predict import predict as show  # noqa: PLC0415 - imports PyTorch

    show(run, client, files, point, as_json=as_json)
    return 0


@trained(
    epilog="""\b
examples:
  posy models runs                              the models on this machine
  posy models /srv/posy-state                   the models of a site
  posy models /srv/posy-state --use my-run      predict with this run's model
  posy models /srv/posy-state --keep 3 --yes    remove all but the newest runs"""
)
def models(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="State-dir or models folder of a node, directory of a run, or runs/."),
    ],
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="RUN", help="Remove a run. Repeatable.")
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", min=0, metavar="N", help="Remove all runs except the N newest and the current one."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm the removal; without it, Posy removes nothing.")] = False,
    use: Annotated[
        str, typer.Option("--use", metavar="RUN", help="Make a run the current one.", show_default=False)
    ] = "",
    use_newest: Annotated[
        bool, typer.Option("--use-newest", help="Make the newest final model the current one again.")
    ] = False,
    as_json: Json = False,
) -> int:
    """List and remove stored models, or choose a site's model.

    The current model is the newest model from the last round of a run. `posy predict DIR SITE` uses it.

    At a site, removing a run deletes its models, predictions and states. In runs/, it deletes only the models. Posy
    does not remove a run that may be in progress.
    """
    from posy.commands import models as stored  # noqa: PLC0415 - imports NumPy

    library = stored.library_in(folder)
    if remove or keep is not None:
        return stored.remove(library, remove or [], keep, confirmed=yes)
    if use or use_newest:
        stored.use(library, use)
        return 0
    stored.show(library, as_json=as_json)
    return 0


@trained(
    epilog="""\b
examples:
  posy export my-run 0
  posy export my-run hospital-a --format torchscript -o model.pt"""
)
def export(
    run: Run,
    client: Client,
    file_format: Annotated[
        str, typer.Option("--format", metavar="onnx|torchscript|safetensors", help="Format of the file.")
    ] = "onnx",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Output file (default: RUN-CLIENT.onnx, .pt or .safetensors)."
        ),
    ] = None,
    point: Point = "",
) -> int:
    """Export a client's model with its preprocessing.

    An ONNX or TorchScript file takes raw samples, and returns the
    probabilities or values that `posy predict` shows. Posy compares both on random samples before it keeps the file. A
    safetensors file contains only the tensors. Each file contains a model card in JSON, and no samples.
    """
    from posy.commands.export import export as write  # noqa: PLC0415 - imports PyTorch

    write(run, client, file_format, output, point)
    return 0


@trained(
    epilog="""\b
examples:
  posy route my-run photo.png
  posy route my-run *.png --picture routes.png"""
)
def route(
    run: Run,
    files: Samples,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a plot of the clients' probabilities or votes to this file."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Classify inputs whose client is unknown.

    FedDRM routes each input to the client whose data it resembles most. With other methods, the clients' local models
    vote. FILE is the same as for `posy predict`.
    """
    from posy.commands.predict import route as show  # noqa: PLC0415 - imports PyTorch

    show(run, files, picture, as_json=as_json)
    return 0


@trained(
    name="serve",
    epilog="""\b
examples:
  posy serve my-run                             for programs on this machine
  posy serve my-run --host 0.0.0.0 --certificate server.pem \\
      --certificate-key server.key --tokens tokens.txt
  posy serve my-run --superlink localhost:8000  from a federation
  posy serve --site /srv/posy-state             at a site: its current model
  curl localhost:8080/v2/models/client-3/infer -d @query.json""",
)
def serve_models(
    run: Run,
    site: Annotated[
        bool,
        typer.Option("--site", help="Offer a site's current model. RUN is the state-dir or models folder of its node."),
    ] = False,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address on which the service listens.")] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port for REST; 0: any free port.")
    ] = 8080,
    grpc_port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port for gRPC; 0: any free port.")
    ] = 8081,
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate of the service (PEM).")] = None,
    certificate_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key of the certificate (PEM).")
    ] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Require clients' certificates that this authority (PEM) has signed."),
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Require one of the tokens in this file, one per line.")
    ] = None,
    max_megabytes: Annotated[
        float, typer.Option(min=0.001, metavar="MB", help="Maximum size of a request in megabytes.")
    ] = 64,
    rate: Annotated[
        float, typer.Option(min=0, metavar="N", help="Maximum requests per second from one address; 0: no limit.")
    ] = 0,
    concurrency: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum number of requests that are answered at once.")
    ] = 1024,
    reload: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Time between checks for newer models and certificates; 0: no checks."
        ),
    ] = 10,
    drain: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Time for which a stopped service still answers.")
    ] = 0,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Let the nodes of this SuperLink (its --control address) answer."),
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    answer_seconds: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="With --superlink: maximum time for a node's answer.")
    ] = 10,
) -> int:
    """Serve the models of a run over REST and gRPC.

    The service speaks the Open Inference Protocol (KServe V2). It offers the
    model of each client, and combinations of these models: `served`, `router`, `ensemble`, `majority-vote` and
    `confidence`, as far as the method has them. Other machines can call the service only with a certificate and with
    tokens or a clients' authority. Ctrl-C stops the service.

    With --site, the service offers the site's current model (`posy models`), and no combination of clients.

    With --superlink, the service routes queries to the nodes of a live federation. It computes the shared layers, and
    the node of the chosen client computes the rest, so it receives embeddings instead of samples.
    """
    try:
        from posy.commands.serve import read_tokens, serve, serving  # noqa: PLC0415 - imports PyTorch
        from posy.serve.limits import Limits  # noqa: PLC0415
        from posy.serve.server import Credentials, Options  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SettingsError(f"`posy serve` needs {error.name}; install it: pip install 'posy[serve]'") from error
    valid_tokens = read_tokens(tokens) if tokens else []
    credentials = Credentials(certificate, certificate_key, client_ca, valid_tokens)
    limits = Limits(int(max_megabytes * 1e6), rate, concurrency)
    options = Options(host, http_port, grpc_port, credentials, limits, reload, drain)
    endpoint = None if superlink is None else connection(superlink, root_certificates, insecure)
    serve(serving(run, options, endpoint, answer_seconds, site=site))
    return 0


@results(
    epilog="""\b
examples:
  posy report my-run
  posy report runs/fedfew-* runs/fedacs-* -o compared.html     compare runs"""
)
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Directories of runs, or their names in runs/.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Output file.")] = Path("report.html"),
) -> int:
    """Write an HTML report on one or more runs.

    The report is a single HTML file. Runs that differ only in their seeds form a group. The report compares the groups.
    """
    from posy.report.page import page  # noqa: PLC0415 - imports pandas and the methods

    named = [(Path(run), Path(RunSettings.output_dir, run)) for run in runs]
    different = list(
        dict.fromkeys((in_runs if exists(in_runs) and not exists(run) else run).resolve() for run, in_runs in named)
    )
    text = page(different)
    output.write_text(text, encoding="utf-8")
    print(f"{output}: {counted(len(different), 'run')}, {size(len(text.encode()))}; open it in a browser")
    return 0


@results(
    epilog="""\b
examples:
  posy watch                               the newest run in runs/
  posy watch my-run --superlink localhost:8000"""
)
def watch(
    run: Annotated[
        str,
        typer.Argument(
            metavar="[RUN]", help="Directory of a run, or its name in runs/ (default: newest run).", show_default=False
        ),
    ] = "",
    superlink: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="SuperLink of the run (its --control address).")
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> int:
    """Show the progress of a run until it ends.

    Posy shows the round, the accuracy, the dropped replies and the time left. With --superlink, RUN is the id or
    run-name of a run on this SuperLink, and Posy also shows the number of online nodes. Ctrl-C stops the display, not
    the run.
    """
    if superlink is not None:
        from posy.commands.deploy.control import show_run  # noqa: PLC0415 - imports Flower

        return show_run(connection(superlink, root_certificates, insecure), run, nodes=True)
    from posy.commands.watch import watch_run  # noqa: PLC0415 - imports PyTorch

    return watch_run(run)


@experiments(
    epilog="""\b
examples:
  posy settings fedfew
  posy settings | grep dirichlet           one line per setting in a pipe"""
)
def settings(
    method: Annotated[
        str,
        typer.Argument(metavar="[METHOD]", help="List only the settings that affect this method.", show_default=False),
    ] = "",
) -> int:
    """List the settings of a run.

    Give a setting as key=value to `posy run`, or as key: value in a settings file.
    """
    if method and method not in (*METHODS, *REFERENCES) and not is_custom(method):
        raise SettingsError(_not_a_method(method))
    for title, group in groups([method] if method else METHODS).items():
        if group:
            rows = [(key, toml(item.default), item.allowed(), _meaning(item)) for key, item in group.items()]
            print_table(title, ("key", "default", "allowed", "meaning"), rows)
    return 0


def _not_a_method(word: str) -> str:
    """Return an error message for a word that is not a method, with suggestions of similar methods."""
    if word in declared():
        return f"{word} {set_in(COMMAND_LINE)} is a setting, not a method; `posy settings` lists all settings"
    similar = suggestions(word, METHODS, cutoff=0.5)
    hint = f"did you mean {similar}? " if similar else ""
    return f"{word} {set_in(COMMAND_LINE)} is not a method; {hint}`posy methods` lists all methods"


def _meaning(item: Setting) -> str:
    """Return a setting's description, with its search range for `posy tune`."""
    return item.described + (f"; `posy tune`: {item.search.low:g} to {item.search.high:g}" if item.search else "")


@experiments()
def methods() -> int:
    """List the methods."""
    print_table("methods", ("name", "about"), [(name, _about(name)) for name in (*METHODS, *REFERENCES)])
    return 0


@experiments()
def datasets() -> int:
    """List the published data sets, and the files that they need.

    `dataset` also accepts the path of your own data (.npz, .csv, .parquet, a folder of images and others), or
    hf:OWNER/NAME, a data set of the Hugging Face Hub. Posy looks for files in data-dir (default: datasets).
    """
    from posy.data.published import describe  # noqa: PLC0415

    print_table("data sets", ("name", "content", "files for data-dir", "downloads"), describe())
    return 0


@site(
    epilog="""\b
examples:
  posy check-site data=/data/patients.csv
  posy check-site data=/data/patients.csv policy=policy.yaml label-column=ill"""
)
def check_site(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="key=value...", help="Node config, such as data=PATH and policy=FILE, and settings of the run."
        ),
    ],
) -> int:
    """Check a site's data and policy before the first run.

    Posy loads the data as the site's node would in a run with dataset=sites. It shows the kind, shape, classes and
    split of the data. It also lists warnings and unreadable files. It sends nothing over the network. The node config
    has the keys data, policy, name and skip-unreadable, and the local-training settings that the site chooses.
    """
    from posy.client_app.node_config import NODE_WORDS, check_node_config  # noqa: PLC0415
    from posy.commands import check_site as checks  # noqa: PLC0415 - imports PyTorch

    node_config = dict(word.split("=", 1) for word in words if word.partition("=")[0] in NODE_WORDS)
    check_node_config(node_config)
    run_words = [word for word in words if word.partition("=")[0] not in NODE_WORDS]
    settings = read_settings({**parse_words(run_words, COMMAND_LINE), "dataset": SITES}, COMMAND_LINE)
    checks.show(checks.check_site(node_config, settings.data, settings.train))
    further = [word for word in run_words if not word.startswith("dataset=")]
    guide.show_next(after_check_site([f"{key}={value}" for key, value in node_config.items()], further))
    return 0


app.add_typer(deployment.app)
app.add_typer(policy.app, name="policy", rich_help_panel=SITE)


def _check_command(words: Sequence[str], group: typer.core.TyperGroup) -> None:
    """Raise :class:`SettingsError` for an unknown command, and suggest a similar command."""
    word = next((word for word in words if not word.startswith("-")), None)
    if word is None or word in group.commands:
        return
    if "=" in word or setting_of(word):
        setting = word if "=" in word else f"{setting_of(word)}={word}"
        raise SettingsError(f"{word!r} is not a command; did you mean `posy run {setting}`?")
    similar = nearest(word, group.commands)
    hint = f"did you mean `posy {similar}`?" if similar else f"choose from {', '.join(group.commands)}"
    raise SettingsError(f"{word!r} is not a command; {hint}")


def _wrong_use(error: Any, words: Sequence[str], group: typer.core.TyperGroup) -> str:
    """Return a one-line error message for a usage error, such as a setting written as ``--method fedavg``."""
    name = next((word for word in words if word in group.commands), "")
    command, typed = (group.commands[name], f"posy {name}") if name else (group, "posy")
    message = OUT_OF_RANGE.sub(_violated_limit, error.format_message().rstrip("."))
    if hasattr(error, "possibilities") and error.option_name.startswith("--"):  # an unknown option
        option = error.option_name
        takes_settings = any(parameter.name == "settings" for parameter in command.params)
        key = suggest_keys(option[2:], declared() if takes_settings else {}).partition(" or ")[0]
        similar = nearest(option, [name for parameter in command.params for name in parameter.opts], 0.8)
        if similar and key != option[2:]:
            return f"{option} is not an option of `{typed}`; did you mean {similar}?"
        if key:
            word, *following = words[[word.partition("=")[0] for word in words].index(option) :]
            value = word.partition("=")[2] or next((text for text in following[:1] if not text.startswith("-")), "...")
            return f"{word} {set_in(COMMAND_LINE)}: {key} is a setting, not an option; type {key}={value}"
        message = f"{option} is not an option"
    return f"{message[0].lower()}{message[1:]}; see `{typed} --help`"


def _violated_limit(match: re.Match[str]) -> str:
    """Return an error about a number outside a range of click, with only the limit that the number violates."""
    value, low, minimum, high = match.groups()
    limit = f"at most {high}" if high and float(value) > float(high) else f"at least {low or minimum}"
    return f"{value}, but it must be {limit}"


def _about(method: str) -> str:
    """Return the first paragraph of the docstring of a method's module, without importing the module."""
    spec = importlib.util.find_spec("posy.strategies." + method.replace("-", "_"))
    assert spec is not None and spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


if __name__ == "__main__":
    sys.exit(main())
