"""The `posy` command: runs, tables of runs, and lists of what there is to choose from."""

import ast
import importlib.util
import os
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast

import typer
import typer.core

from posy.commands.deploy import commands as deployment
from posy.commands.deploy.commands import Insecure, RootCertificates, Verbose, connection
from posy.commands.launch import APP, INTERRUPTED, run_in_process, toml
from posy.data.errors import DataError
from posy.data.settings import SITES
from posy.listing import print_table
from posy.paths import is_file
from posy.server_app.progress import size
from posy.settings import LaunchError, Setting, SettingsError, meant, nearest
from posy.signals import interruptible
from posy.storage import DamagedFileError
from posy.strategies.methods import METHODS, check_method
from posy.strategies.registry import declared, groups, parse_words, read_settings, setting_of, with_experiment
from posy.yaml12 import dump

UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""Wrong use of a command. Older versions of Typer import it from click, and newer versions bring a copy of click."""
WRONG_USE = 2
"""Exit status where a command or a setting is wrong."""
WHERE = "the command line"
"""Where settings come from that are typed, as messages say it."""

typer.core.HAS_RICH = False  # plain help: typer escapes brackets in it (`\\[default: 1]`) wherever rich is installed
app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="""\b
examples:
  posy run                                           FedFew on scikit-learn's digits
  posy run method=ppfe dataset=mnist num-clients=20
  posy run ppfe-cifar10-s2 data-dir=datasets         a paper's setting (papers/ppfe/settings/)
  posy settings fedfew                               what can be set
  posy COMMAND --help                                more about a command""",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command and return the exit status: 0, 1 (failed), 2 (wrong use or settings), 130 (interrupted)."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    try:
        _check_command(words, command)
        with interruptible():
            status = command.main(words or ["--help"], "posy", standalone_mode=False)
    except UsageError as error:
        print(f"posy: {_wrong_use(error, words, command)}", file=sys.stderr)
        return WRONG_USE
    except (SettingsError, DataError, LaunchError, DamagedFileError) as error:
        print(f"posy: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        return INTERRUPTED
    return int(status or 0) if words else WRONG_USE


def _show_version(wanted: bool) -> None:
    """Show the versions of what runs, without importing it."""
    if wanted:
        file = APP / "pyproject.toml"
        own = (
            tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"] if file.is_file() else version("posy")
        )
        print(f"posy {own} (flwr {version('flwr')}, torch {version('torch')}, Python {sys.version.partition(' ')[0]})")
        raise typer.Exit


@app.callback()
def posy(
    show_version: Annotated[
        bool, typer.Option("-V", "--version", is_eager=True, callback=_show_version, help="Show the versions and exit.")
    ] = False,
) -> None:
    """Personalised federated learning on Flower."""


@app.command(
    epilog="""\b
examples:
  posy run num-server-rounds=5
  posy run method=fedavg dataset=mnist partition=classes classes-per-client=2 num-clients=20
  posy run fedfew-agnews method=fedavg                             an experiment with another method
  posy run my.yaml lr=0.01 seed=1                                  settings over those of a file
  posy run resume=my-run                                           go on with runs/my-run
  posy run --superlink localhost:8000 dataset=sites num-clients=3  on the nodes of a federation"""
)
def run(
    settings: Annotated[list[str] | None, typer.Argument(metavar="[EXPERIMENT] [key=value]...")] = None,
    superlink: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A SuperLink to submit the run to.")
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    verbose: Verbose = False,
) -> int:
    """Run an experiment, here or on a federation.

    EXPERIMENT is a file of settings: a path, or a name in papers/*/settings/. Settings beside it count more. Without
    any, it is FedFew on scikit-learn's digits. All clients are in this process, unless --superlink names a federation,
    whose log is then shown. (Flower's simulation is started with `flwr run .` in a checkout.)
    """
    words = settings or []
    if words and words[0] and ("=" not in words[0] or is_file(Path(words[0]))):
        words[0] = f"experiment={words[0]}"
    given = parse_words(words, WHERE)
    if superlink is None:
        return run_in_process(given, WHERE)
    given = with_experiment(given, WHERE)
    if not given.get("resume"):  # otherwise the run's other settings lie on the SuperLink's machine
        read_settings(given, WHERE)
    reached = connection(superlink, root_certificates, insecure)
    from posy.commands.deploy.control import run_on_superlink  # noqa: PLC0415 - imports Flower

    return run_on_superlink(given, reached, verbose=verbose)


@app.command()
def table(
    file: Annotated[Path, typer.Argument()],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, metavar="N", help="Runs at a time.")] = os.cpu_count()
    or 1,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="DIR", help="Where results go, in place of the file's.")
    ] = None,
    only_print: Annotated[bool, typer.Option("--only-print", help="Run nothing; tabulate what is finished.")] = False,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster whose workers run the cells.")
    ] = None,
    ray_gpus: Annotated[float, typer.Option(min=0, metavar="N", help="GPUs of a cell on the Ray cluster.")] = 0,
) -> int:
    """Run a grid of experiments and tabulate the results.

    FILE is a table in YAML, as in benchmarks/tables/; settings beside it count more. Every row x variant x seed is run
    in a process of its own. What is finished is not run again.
    """
    from posy.commands.table import read_plan, run_table  # noqa: PLC0415 - imports pandas and the methods

    plan = read_plan(file, parse_words(settings or [], WHERE), output)
    if ray is None or only_print:
        return run_table(plan, jobs=jobs, only_print=only_print)
    if importlib.util.find_spec("ray") is None:
        raise SettingsError("--ray needs Ray: pip install 'flwr[simulation]'")
    from posy.commands.on_ray import cluster  # noqa: PLC0415 - imports Ray

    with cluster(ray, ray_gpus) as begin:
        return run_table(plan, jobs=len(plan.cells), begin=begin)


@app.command()
def tune(
    file: Annotated[Path, typer.Argument()],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    trials: Annotated[int, typer.Option("-n", "--trials", min=1, metavar="N", help="Runs for each row.")] = 12,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, metavar="N", help="Runs at a time.")] = os.cpu_count()
    or 1,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="The tuned table; default FILE-tuned.yaml.")
    ] = None,
) -> int:
    """Search good settings for each row of a table, the same number of runs for all.

    FILE is a table, as for `posy table`. The learning rate and what a method declares are searched (`posy settings`
    shows the ranges), on the clients' validation splits alone. What is finished is not run again. The outcome is a
    table with the settings that were found.
    """
    if importlib.util.find_spec("optuna") is None:
        raise SettingsError("posy tune needs Optuna: pip install 'posy[compare]'")
    from posy.commands.table import read_plan  # noqa: PLC0415 - imports pandas and the methods
    from posy.commands.tuning import tune as search  # noqa: PLC0415 - imports Optuna

    plan = read_plan(file, parse_words(settings or [], WHERE))
    target = output or file.with_name(f"{file.stem}-tuned.yaml")
    text = dump(search(plan, trials=trials, jobs=jobs))
    target.write_text(f"# Written by `posy tune {file}`: {trials} trials a row.\n{text}", encoding="utf-8")
    print(f"written to {target}; `posy table {target}` runs it")
    return 0


@app.command(
    epilog="""\b
examples:
  posy paper                                          the papers, and what came of their claims
  posy paper fedfew                                   draw docs/papers/fedfew.md from the runs that there are
  posy paper fedfew table1 --scale small              run a table, then draw
  posy paper fedfew table1 --scale small --seeds 5    with more seeds, where a claim is within the noise
  posy paper cwfedavg all --scale small -j 2 data-dir=datasets"""
)
def paper(
    name: Annotated[str, typer.Argument(metavar="[PAPER]")] = "",
    part: Annotated[str, typer.Argument(metavar="[TABLE|FIGURE|all]")] = "",
    settings: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    scale: Annotated[str, typer.Option(metavar="small|full", help="The paper's own size, or a laptop's.")] = "small",
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, metavar="N", help="Seeds 0 to N - 1 in place of the file's.")
    ] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, metavar="N", help="Runs at a time.")] = os.cpu_count()
    or 1,
) -> int:
    """Run the papers' tables and figures, and set them beside the originals.

    Each is a YAML file in papers/. What is finished is not run again, nor what another table of the paper has run.
    """
    from posy.commands.papers.run import list_papers, run_part, show_paper  # noqa: PLC0415 - imports pandas

    if seeds and not part:
        raise SettingsError(f"--seeds {seeds}: nothing is run without the name of a table or figure, or `all`")
    if not name:
        return list_papers()
    if not part:
        return show_paper(name)
    return run_part(name, part, scale, parse_words(settings or [], WHERE), jobs, seeds)


Run = Annotated[str, typer.Argument(metavar="RUN")]
Samples = Annotated[list[str], typer.Argument(metavar="FILE...")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(
    epilog="""\b
examples:
  posy predict my-run 0 photo.png
  posy predict my-run hospital-a patients.csv --json
  posy predict my-run 3 "Oil prices rise again" """
)
def predict(
    run: Run,
    client: Annotated[str, typer.Argument(metavar="CLIENT")],
    files: Samples,
    point: Annotated[
        str,
        typer.Option(metavar="served|local", help="Before or after own training; default: as the method is used."),
    ] = "",
    as_json: Json = False,
) -> int:
    """Predict classes with a client's model.

    RUN is the folder of a run, or its name in runs/; at a site, the folder where its node stores the model. CLIENT is a
    number, or the name of a site. A FILE is an image, or a text (which may stand there itself); a .csv with a header
    holds a sample in each row, a .npy array along its first axis.
    """
    from posy.commands.predict import predict as show  # noqa: PLC0415 - imports PyTorch

    show(run, client, files, point, as_json=as_json)
    return 0


@app.command(
    epilog="""\b
examples:
  posy route my-run photo.png
  posy route my-run *.png --picture routes.png"""
)
def route(
    run: Run,
    files: Samples,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to draw the clients' probabilities, or the votes.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Answer queries that name no client.

    FedDRM routes each to the client whose data it looks like; of other methods the clients' local models vote. RUN and
    FILE are as for `posy predict`.
    """
    from posy.commands.predict import route as show  # noqa: PLC0415 - imports PyTorch

    show(run, files, picture, as_json=as_json)
    return 0


@app.command(
    epilog="""\b
examples:
  posy report runs/a
  posy report runs/fedfew-* runs/fedacs-* -o compared.html     several runs, compared"""
)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page.")] = Path("report.html"),
) -> int:
    """Write a page on one run or several: a single HTML file.

    RUN is the directory of a run. Runs that differ in their seed only are taken together, and compared with the others.
    """
    from posy.report.page import page  # noqa: PLC0415 - imports pandas and the methods

    text = page(runs)
    output.write_text(text, encoding="utf-8")
    print(f"{output}: {len(runs)} run{'s' * (len(runs) > 1)}, {size(len(text.encode()))}")
    return 0


@app.command()
def watch(
    run: Annotated[str, typer.Argument(metavar="[RUN]")] = "",
    superlink: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the SuperLink takes orders that carries it out.")
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> int:
    """Watch a run until it ends: round, accuracy, dropped replies, time left.

    RUN is the directory of a run, or its name in runs/; with --superlink the run id or run-name of one there, of which
    the nodes that are online are shown too. By default it is the newest. Ctrl-C leaves the run alone.
    """
    if superlink is not None:
        from posy.commands.deploy.control import show_run  # noqa: PLC0415 - imports Flower

        return show_run(connection(superlink, root_certificates, insecure), run, nodes=True)
    from posy.commands.watch import watch_run  # noqa: PLC0415 - imports PyTorch

    return watch_run(run)


@app.command()
def settings(method: Annotated[str, typer.Argument(metavar="[METHOD]")] = "") -> int:
    """List all settings, or those of a method and the common ones."""
    if method:
        check_method(method)
    for title, group in groups([method] if method else METHODS).items():
        if group:
            rows = [(key, toml(item.default), item.allowed(), _meaning(item)) for key, item in group.items()]
            print_table(title, ("key", "default", "allowed", "meaning"), rows)
    return 0


def _meaning(item: Setting) -> str:
    """Return what a setting means, and where `posy tune` searches it."""
    return item.described + (f"; `posy tune`: {item.search.low:g} to {item.search.high:g}" if item.search else "")


@app.command()
def methods() -> int:
    """List the methods."""
    print_table("methods", ("name", "about"), [(name, _about(name)) for name in METHODS])
    return 0


@app.command()
def datasets() -> int:
    """List the data sets."""
    from posy.data.published import describe  # noqa: PLC0415

    print_table("data sets", ("name", "what it holds", "what to put into data-dir", "downloads"), describe())
    return 0


@app.command()
def check_site(words: Annotated[list[str], typer.Argument(metavar="key=value...")]) -> int:
    """Check a site's data before any run.

    Does on a site's data what its node would do in a run with dataset=sites, and shows what is found: kind, shape,
    classes, split, warnings, files that cannot be read. Nothing is sent anywhere. The words are node config (data,
    name, skip-unreadable), and the settings of the run as far as they are known.
    """
    from posy.client_app.node_config import NODE_WORDS, check_node_config  # noqa: PLC0415
    from posy.commands import check_site as site  # noqa: PLC0415 - imports PyTorch

    node_config = dict(word.split("=", 1) for word in words if word.partition("=")[0] in NODE_WORDS)
    check_node_config(node_config)
    given = parse_words([word for word in words if word.partition("=")[0] not in NODE_WORDS], WHERE)
    settings = read_settings({**given, "dataset": SITES}, WHERE)
    site.show(site.check_site(node_config, settings.data, settings.run.seed))
    return 0


app.add_typer(deployment.app)


def _check_command(words: Sequence[str], group: typer.core.TyperGroup) -> None:
    """Raise :class:`SettingsError` for a command that there is not, naming the one that is meant."""
    word = next((word for word in words if not word.startswith("-")), None)
    if word is None or word in group.commands:
        return
    if "=" in word or setting_of(word):
        setting = word if "=" in word else f"{setting_of(word)}={word}"
        raise SettingsError(f"{word!r} is no command; did you mean `posy run {setting}`?")
    near = nearest(word, group.commands)
    hint = f"did you mean `posy {near}`?" if near else f"there are {', '.join(group.commands)}"
    raise SettingsError(f"{word!r} is no command; {hint}")


def _wrong_use(error: Any, words: Sequence[str], group: typer.core.TyperGroup) -> str:
    """Return in one line what is wrong about the options: ``--method fedavg`` is a setting."""
    name = next((word for word in words if word in group.commands), "")
    command, typed = (group.commands[name], f"posy {name}") if name else (group, "posy")
    message = error.format_message().rstrip(".")
    if hasattr(error, "possibilities") and error.option_name.startswith("--"):  # an unknown option
        option = error.option_name
        takes_settings = any(parameter.name == "settings" for parameter in command.params)
        key = meant(option[2:], declared() if takes_settings else {}).partition(" or ")[0]
        near = nearest(option, [known for parameter in command.params for known in parameter.opts], 0.8)
        if near and key != option[2:]:
            return f"{option} is no option of `{typed}`; did you mean {near}?"
        if key:
            word, *following = words[[word.partition("=")[0] for word in words].index(option) :]
            value = word.partition("=")[2] or next((text for text in following[:1] if not text.startswith("-")), "...")
            return f"{word} on {WHERE}: settings are given as key=value: {key}={value}"
        message = f"{option} is no option"
    return f"{message[0].lower()}{message[1:]}; `{typed} --help` tells more"


def _about(method: str) -> str:
    """Return the first sentence of a method's module, without importing it."""
    spec = importlib.util.find_spec("posy.strategies." + method.replace("-", "_"))
    assert spec is not None and spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


if __name__ == "__main__":
    sys.exit(main())
