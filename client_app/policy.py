"""Checks of a run against a site's policy, made before the node processes a message."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, wraps
from hashlib import blake2b, sha256
from logging import ERROR
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from flwr.app import ConfigRecord, Context, Message
from flwr.common.logger import log

from posy.client_app import audit
from posy.client_app.budget import LEDGER, Budget, BudgetExceededError, unprotected
from posy.client_app.node_config import AUDIT_NAME, node_settings
from posy.client_app.secure_aggregation import MIN_CLIENTS
from posy.data.columns import names_in
from posy.data.errors import DataError
from posy.data.policy import ALL, Policy, read_policy
from posy.data.settings import SITES, DataSettings
from posy.data.task import TARGETS
from posy.extensions import is_custom, key_prefix
from posy.metrics import CLASSES, DEFAULTS, METRICS
from posy.mistakes import is_failure, method_error, place_of
from posy.models.catalogue import PRETRAINED
from posy.paths import absolute
from posy.settings import NodeConfigError, Setting, SettingsError, quoted, settings_of
from posy.storage import exclusive, is_folder_name, read_json, write_json
from posy.strategies.client_settings import NodeSettings, bounds_of, check_allowed, checked_entries, layered
from posy.strategies.methods import METHODS, REFERENCES, settings_class
from posy.strategies.replies import LOSS, SCORES
from posy.strategies.run_settings import ALL_METRICS, AUTO, RunSettings, TrainSettings
from posy.strategies.settings import Settings

T = TypeVar("T")
POLICY = "policy"
"""The key of the node config that names the policy file."""
DIGITS = 2
"""Number of decimal places in rounded scores."""
LARGEST_LOSS = 1000.0
"""The cap on rounded scores."""
LONGEST_SETTINGS = 1 << 24
"""Maximum number of characters in a message's settings. A node keeps the settings of several runs in memory."""
PINNED = "run.json"
"""File in a run's state folder with the digest of the run's settings."""
_RECORD, _COUNTED, _CLIENT = "site-run", "site-run-counted", "site-client"
RUNS, ANSWERS = "policy-runs.json", "policy-answers.json"
"""Files in a node's ``state-dir`` with the runs that have begun today, and with today's number of answered queries."""


class Violation(NamedTuple):
    """A rule of the policy that a run violates, and the reason."""

    rule: str
    reason: str


class PolicyError(PermissionError):
    """The site's policy rejects a run. The error message contains only settings of the run."""

    shareable = True

    def __init__(self, violation: Violation) -> None:
        super().__init__(f"the site's policy rejects this run, rule {violation.rule}: {violation.reason}")
        self.violation = violation


class NodeError(RuntimeError):
    """The error that a node with data sends to the server. It contains no samples, labels, file names or paths."""

    shareable = True
    logged = True
    """Whether the node's log already contains the full error."""


def policy_of(node_config: Mapping[str, Any]) -> Policy | None:
    """Return the policy named in a node's config, the default policy for other nodes with data, or None.

    Raises
    ------
    NodeConfigError
        If the file cannot be read or has an invalid rule.
    """
    if path := str(node_config.get(POLICY, "")):
        file = absolute(path)
        try:
            file_stat = file.stat()
        except OSError as error:
            raise NodeConfigError(f"{POLICY} = {path!r} in the node config cannot be read: {error.strerror}") from error
        return _stored_policy(file, file_stat.st_mtime_ns, file_stat.st_size)
    return Policy() if "data" in node_config else None


def site_policy(node_config: Mapping[str, Any]) -> Policy | None:
    """Return the policy of a node with data, or None for a node without data."""
    return policy_of(node_config) if "data" in node_config else None


@lru_cache(maxsize=8)
def _stored_policy(path: Path, modified: int, size: int) -> Policy:
    """Return the policy that a file contains. The file is read again if its modification time or size changes."""
    return read_policy(path)


# -- settings ---------------------------------------------------------------------------------------------


def violations(policy: Policy, config: Mapping[str, Any], chosen: NodeSettings = ()) -> list[Violation]:
    """Return the rules that a run's settings violate, without importing any of the run's code.

    Parameters
    ----------
    policy : Policy
        The policy of the site.
    config : mapping
        The settings, keyed by name. Missing shared settings take their defaults.
    chosen : tuple
        The settings in the node config, which the run must allow. They override the run's settings.
    """
    values = {**_shared_defaults(), **config}
    of_node = {**values, **layered(dict(chosen))}
    rules = (_sources, _rows, _limits, _scores)
    violated = [violation for rule in rules for violation in rule(policy, of_node)]
    try:
        entries = checked_entries(str(values["client-settings"]))
        bounds_of(str(values["client-bounds"]))
    except SettingsError as error:
        return [*violated, Violation("settings", str(error))]
    for entry in entries.values():
        of_client = {**values, **layered(entry, dict(chosen))}
        violated += [violation for rule in (_rows, _limits) for violation in rule(policy, of_client)]
    return list(dict.fromkeys(violated))


def _sources(policy: Policy, values: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield violations of the rules on data, columns, code and files."""
    if values["dataset"] != SITES:
        yield Violation(
            "data", f"dataset = {quoted(values['dataset'])}; a node with data serves only dataset = {SITES}"
        )
    method = str(values["method"])
    for key, setting in _shared_settings().items():
        value = str(values[key])
        if setting.custom_kind and is_custom(value) and not value.startswith(f"{PRETRAINED}:") and policy.code != "any":
            path = value.rpartition(":")[0]
            if policy.code == "installed" or path.startswith("/") or ".." in Path(path).parts:
                yield Violation(
                    "code", f"{key} = {quoted(value)} is custom code; this site allows code = {policy.code}"
                )
    if policy.allowed_methods and method not in policy.allowed_methods:
        yield Violation("methods", f"method = {quoted(method)}; this site allows {', '.join(policy.allowed_methods)}")
    elif method in REFERENCES:
        yield Violation("methods", f"method = {quoted(method)} pools the samples of all clients")
    elif method not in METHODS and not is_custom(method):
        yield Violation("methods", f"method = {quoted(method)} is not a method of Posy")
    if (weights := str(values["weights"])) and not _is_allowed_file(weights, policy.weights):
        yield Violation("weights", f"weights = {quoted(weights)} is not a file that the site offers")
    inputs = names_in("input-columns", values["input-columns"]) if values["input-columns"] else ()
    offered_columns = policy.allowed_columns
    for key, names in (("input-columns", inputs), ("group-column", (values["group-column"],))):
        if forbidden_columns := [name for name in names if name and offered_columns and name not in offered_columns]:
            yield Violation(
                "columns", f"{key} = {quoted(values[key])}; the site does not offer {forbidden_columns[0]!r}"
            )
    if values["label-column"] not in ("", policy.label):
        yield Violation("label", f"label-column = {quoted(values['label-column'])}; the site does not offer this label")


def _is_allowed_file(weights: str, folder: str) -> bool:
    """Return whether a weights file exists inside the folder named in a policy."""
    if not folder or weights == PRETRAINED:
        return False
    root = absolute(folder).resolve()
    file = (root / weights).resolve()
    return file.is_relative_to(root) and file.is_file()


def _rows(policy: Policy, values: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield violations of the rules on rows: no setting may select rows, and each gradient must cover enough rows."""
    if values["test-set"] != DataSettings.test_set:
        yield Violation("test-fraction", f"test-set = {quoted(values['test-set'])}; the site chooses its test rows")
    fraction = values["test-fraction"]
    if fraction not in (DataSettings.test_fraction, policy.test_fraction):
        yield Violation(
            "test-fraction",
            f"test-fraction = {fraction:g}; the site holds out {policy.test_fraction:g} of its rows for testing",
        )
    if (folds := values["folds"]) not in (0, policy.folds):
        reason = (
            f"the site allows only 0 and {policy.folds}" if policy.folds else "the site uses only one split of its rows"
        )
        yield Violation("folds", f"folds = {folds}; {reason}")
    for key in ("validation-fraction", f"{key_prefix(str(values['method']))}-validation"):
        if (fraction := values.get(key, 0)) not in (0, policy.validation_fraction):
            reason = f"{key} = {fraction:g}; the site allows only 0 and {policy.validation_fraction:g}"
            yield Violation("validation-fraction", reason)
    if values["train-samples"]:
        yield Violation("min-rows", f"train-samples = {values['train-samples']}; a run must train on all training rows")
    if values["batch-size"] < policy.min_rows:
        yield Violation(
            "min-rows",
            f"batch-size = {values['batch-size']}; each gradient needs at least {policy.min_rows} rows",
        )


def _limits(policy: Policy, values: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield violations of the numerical limits and of the rules on masks."""
    for rule, key, largest in (
        ("max-local-epochs", "local-epochs", policy.max_local_epochs),
        ("max-rounds", "num-server-rounds", policy.max_rounds),
    ):
        if values[key] > largest:
            yield Violation(rule, f"{key} = {values[key]}; the site allows at most {largest}")
    prefix = f"{key_prefix(str(values['method']))}-"
    method_values = {key: value for key, value in values.items() if key.startswith(prefix) and type(value) is int}
    for key, value in method_values.items():
        if key.endswith("-epochs") and value > policy.max_local_epochs:
            reason = f"{key} = {value}; the site allows at most {policy.max_local_epochs}"
            yield Violation("max-local-epochs", reason)
    inner_steps = method_values.get("pfedme-steps", 1)
    if values["local-epochs"] <= policy.max_local_epochs < inner_steps * values["local-epochs"]:
        reason = f"pfedme-steps = {inner_steps} in each step of local-epochs = {values['local-epochs']}"
        yield Violation("max-local-epochs", f"{reason}; the site allows at most {policy.max_local_epochs} in total")
    if values["num-clients"] < (min_clients := policy.min_clients or MIN_CLIENTS):
        yield Violation(
            "min-clients", f"num-clients = {values['num-clients']}; the site needs at least {min_clients} clients"
        )
    if policy.epsilon and (reason := unprotected(values)):
        yield Violation("epsilon", reason)
    is_masked = values["secure-aggregation"]
    if policy.secure_aggregation == "required" and not is_masked:
        yield Violation("secure-aggregation", "secure-aggregation = false; the site sends only masked updates")


def _scores(policy: Policy, values: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield violations of the rules on scores."""
    target = TARGETS.get(values["task"], CLASSES)
    metric = DEFAULTS[target] if values["metric"] == AUTO else values["metric"]
    if metric not in _metrics_of(policy, target):
        yield Violation("metrics", f"metric = {quoted(values['metric'])}; {_sent_metrics(policy, target)}")
    if values["all-metrics"] not in (AUTO, "none") and policy.metrics != ALL:
        yield Violation("metrics", f"all-metrics = {quoted(values['all-metrics'])}; {_sent_metrics(policy, target)}")
    if policy.scores == "withheld" and not values["secure-aggregation"]:
        yield Violation("scores", "secure-aggregation = false; the site sends scores only in masked sums")


def _metrics_of(policy: Policy, target: str) -> list[str]:
    """Return the names of the metrics for a target that the site sends."""
    return [n for n, metric in METRICS.items() if n in policy.allowed_metrics and target in metric.targets]


def _sent_metrics(policy: Policy, target: str) -> str:
    """Return a part of a message with the metrics that the site sends."""
    return f"the site sends only {', '.join([*_metrics_of(policy, target), LOSS])}"


@lru_cache(maxsize=1)
def _shared_settings() -> Mapping[str, Setting]:
    return {**settings_of(RunSettings), **settings_of(DataSettings), **settings_of(TrainSettings)}


@lru_cache(maxsize=1)
def _shared_defaults() -> Mapping[str, Any]:
    return {key: setting.default for key, setting in _shared_settings().items()}


def size_violations(
    policy: Policy, settings: Settings, rows: int, class_counts: list[int], parameters: int
) -> list[Violation]:
    """Return the rules that a run violates, given this site's data.

    Parameters
    ----------
    policy, settings : Policy, Settings
        The policy of the site and the settings of the run.
    rows : int
        Number of training rows at the site.
    class_counts : list of int
        Number of training rows for each class of the run.
    parameters : int
        Number of parameters of the network.
    """
    train, violation_list = settings.train, []
    per_step = getattr(settings.method, "steps", 1) if settings.run.method == "pfedme" else 1
    tuning = 0 if per_step > 1 else getattr(settings.method, "steps", 0)
    for steps, key in ((train.local_steps * per_step, "local-steps"), (tuning, f"{settings.run.method}-steps")):
        if steps * train.batch_size > policy.max_local_epochs * rows:
            reason = f"{key} = {steps} is more than {policy.max_local_epochs} passes over the rows"
            violation_list.append(Violation("max-local-epochs", reason))
    if parameters > policy.max_parameters:
        violation_list.append(too_many_parameters(parameters, policy))
    if 0 < train.local_steps * train.batch_size < rows:
        violation_list.append(
            Violation(
                "min-rows",
                f"local-steps = {train.local_steps} with batch-size = {train.batch_size} is less than a pass over the "
                "rows; a round must train on all rows",
            )
        )
    has_rare_class = any(0 < count < policy.min_rows for count in class_counts)
    if has_rare_class and train.class_weights != "none":
        violation_list.append(
            Violation(
                "min-rows",
                f"class-weights = {train.class_weights!r} gives a large weight to a class with fewer than "
                f"{policy.min_rows} rows",
            )
        )
    if has_rare_class and settings_class(settings.run.method).class_statistics:
        violation_list.append(
            Violation(
                "min-rows",
                f"method = {settings.run.method!r} sends statistics of each class, and a class of this site has fewer "
                f"than {policy.min_rows} rows",
            )
        )
    return violation_list


def too_many_parameters(parameters: int, policy: Policy) -> Violation:
    """Return the violation for a network with too many parameters."""
    return Violation(
        "max-parameters",
        f"the model has {parameters:,} parameters; the site allows at most {policy.max_parameters:,}",
    )


# -- admission --------------------------------------------------------------------------------------------


def admit(policy: Policy, settings_json: str, context: Context, run_id: int, *, pin: bool = True) -> None:
    """Check a message's run against the policy. The first message with complete settings pins them for the run.

    Raises
    ------
    PolicyError
        If the run violates a rule, the site has begun too many runs today, or the run's settings have changed.
    SettingsError
        If the run does not allow the settings in the node config.
    """
    if len(settings_json) > LONGEST_SETTINGS:
        raise PolicyError(Violation("settings", f"the settings have more than {LONGEST_SETTINGS:,} characters"))
    check_settings(policy, settings_json, node_settings(context.node_config))
    counted = context.state.config_records.get(_COUNTED)
    if counted is None or counted["run"] != str(run_id):  # a run counts once, even if it continues the next day
        _count_run(policy, context.node_config, run_id)
        context.state[_COUNTED] = ConfigRecord({"run": str(run_id)})
    if not pin:
        return
    digest = sha256(settings_json.encode()).hexdigest()
    pinned = context.state.config_records.setdefault(_RECORD, ConfigRecord({"settings": digest}))
    if pinned["settings"] != digest:
        raise PolicyError(Violation("settings", "the settings have changed since the site joined the run"))


@lru_cache(maxsize=8)
def check_settings(policy: Policy, settings_json: str, chosen: NodeSettings = ()) -> None:
    """Raise :class:`PolicyError` for the first rule that the settings violate.

    Raise :class:`SettingsError` if the run does not allow the settings in the node config, ``chosen``.
    """
    config = json.loads(settings_json)
    check_allowed(chosen, str(config.get("client-bounds", "")), shares_values=policy.share_settings)
    if violated := violations(policy, config, chosen):
        raise PolicyError(shareable(violated[0], policy, chosen))


def shareable(violation: Violation, policy: Policy, chosen: NodeSettings) -> Violation:
    """Return a violation, omitting its reason if the reason quotes a setting that the site does not share."""
    quoted_keys = [key for key, _ in chosen if key in violation.reason]
    if policy.share_settings or not quoted_keys:
        return violation
    return Violation(violation.rule, f"with {', '.join(quoted_keys)} in the node config")


def _count_run(policy: Policy, node_config: Mapping[str, Any], run_id: int) -> None:
    """Add a run to today's runs, or raise :class:`PolicyError` if there are too many."""

    def with_run(runs: list[int]) -> list[int]:
        if run_id in runs:
            return runs
        if len(runs) >= policy.max_runs_per_day:
            reason = f"{len(runs)} runs have begun today; try again tomorrow (UTC)"
            raise PolicyError(Violation("max-runs-per-day", reason))
        return [*runs, run_id]

    update_today(node_config, RUNS, list[int](), with_run)


_kept: dict[str, dict[str, Any]] = {}


def update_today(node_config: Mapping[str, Any], file: str, first: T, updated: Callable[[T], T]) -> None:
    """Replace today's value (UTC) in a file of a node's ``state-dir``. Without ``state-dir``, keep it in memory.

    Parameters
    ----------
    node_config : mapping
        The node's config.
    file : str
        The name of the file.
    first : object
        The value at the start of a day.
    updated : callable
        Returns the new value, given the present one.
    """

    def of_today(by_day: Mapping[str, T]) -> dict[str, T]:
        today = time.strftime("%Y-%m-%d", time.gmtime())
        return {today: updated(by_day.get(today, first))}

    folder = str(node_config.get("state-dir", ""))
    if not folder:
        _kept[file] = of_today(_kept.get(file, {}))
        return
    path = absolute(folder) / file
    with exclusive(path.with_suffix(".lock")):
        write_json(path, of_today(read_json(path) if path.exists() else {}))


def is_run_folder(name: str) -> bool:
    """Return whether ``state-dir`` may contain a run's folder with this name. The node's file names are reserved."""
    stems = tuple(f"{Path(file).stem}." for file in (RUNS, ANSWERS, LEDGER, AUDIT_NAME))
    is_file_of_node = name.casefold().startswith((".", *stems)) or name.casefold() == "site-secret"
    return is_folder_name(name) and not is_file_of_node


def pin_state(folder: Path, config: Mapping[str, Any]) -> None:
    """Bind a run's state folder to the run's settings, so that another run cannot read or remove the state.

    Settings that may change when a run resumes are excluded.

    Raises
    ------
    PolicyError
        If the folder belongs to a run with different settings.
    """
    shared = _shared_settings()
    pinned = {key: value for key, value in config.items() if key not in shared or not _may_change(shared[key])}
    digest = sha256(json.dumps(pinned, sort_keys=True).encode()).hexdigest()
    file = folder / PINNED
    if file.exists():
        if read_json(file).get("settings") != digest:
            raise PolicyError(
                Violation("state", "the state under this run name belongs to a run with different settings")
            )
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(file, {"settings": digest})


def _may_change(setting: Setting) -> bool:
    return setting.resumable or setting.once or not setting.affects_results


# -- privacy budget ---------------------------------------------------------------------------------------


def check_budget(policy: Policy, settings: Settings, context: Context, num_train: int) -> None:
    """Raise :class:`PolicyError` if a run with these settings would exceed the site's privacy budget."""
    if policy.epsilon:
        with _budget(policy, context) as budget:
            budget.check_run(settings, num_train)


def spend_budget(policy: Policy, settings: Settings, context: Context, num_train: int, server_round: int) -> None:
    """Record a round in the privacy ledger before it begins. Raise :class:`PolicyError` if it exceeds the budget."""
    if not policy.epsilon:
        return
    with _budget(policy, context) as budget:
        audit.note(context, epsilon=budget.spend(settings, num_train, server_round), delta=policy.delta)


@contextmanager
def _budget(policy: Policy, context: Context) -> Iterator[Budget]:
    """Yield the site's budget, and turn an exceeded budget into a policy violation."""
    folder = str(context.node_config.get("state-dir", ""))
    if not folder:
        raise PolicyError(Violation("epsilon", "the node needs state-dir for the ledger of its privacy budget"))
    try:
        yield Budget(policy, folder)
    except BudgetExceededError as error:
        raise PolicyError(Violation("epsilon", str(error))) from error


# -- scores -----------------------------------------------------------------------------------------------


def check_requested(policy: Policy, config: Mapping[str, Any], target: str) -> None:
    """Raise :class:`PolicyError` if a message requests all metrics of a target, and the policy does not allow all."""
    if config.get(ALL_METRICS) and policy.metrics != ALL:
        raise PolicyError(Violation("metrics", f"the message requests all metrics; {_sent_metrics(policy, target)}"))


def limited_scores(policy: Policy, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics without scores that the policy does not allow, rounded unless the policy allows exact scores.

    Rounded scores have at most two decimal places and three significant digits, and are capped at :data:`LARGEST_LOSS`.
    The server chooses the model, so further digits of a large loss could reveal the exact score. The unit of a
    regression error is arbitrary, so these errors are rounded only to three significant digits.
    """
    allowed = policy.allowed_metrics | {LOSS}
    metrics = {key: value for key, value in metrics.items() if SCORES.get(key, LOSS) in allowed}
    if policy.scores == "exact":
        return metrics
    return {key: _limited(key, value) for key, value in metrics.items()}


def _limited(key: str, value: Any) -> Any:
    """Return a metric, rounded if it is a score."""
    if key.endswith(("-mae", "-rmse", "-r2")):
        return float(f"{float(value):.3g}")
    return _rounded(float(value)) if key in SCORES or key.endswith(("-accuracy", "-loss")) else value


def _rounded(score: float) -> float:
    return float(f"{max(-LARGEST_LOSS, min(round(score, DIGITS), LARGEST_LOSS)):.3g}")


def check_place(settings: Settings, context: Context, client: int, server_round: int) -> None:
    """Raise :class:`PolicyError` unless a message is for this site's only client and for a round of the run.

    The run's first message determines the client, unless the node config has a ``partition-id``.
    """
    index: Any = context.node_config.get("partition-id")
    if index is None:
        index = context.state.config_records.get(_CLIENT, ConfigRecord({"client": client}))["client"]
    if client != int(index) or not 0 <= client < settings.data.num_clients:
        raise PolicyError(
            Violation("scores", f"the message is for client {client}, but the site is client {index} of this run")
        )
    if not 0 <= server_round <= settings.run.num_server_rounds:
        reason = f"round {server_round}; the run has num-server-rounds = {settings.run.num_server_rounds}"
        raise PolicyError(Violation("max-rounds", reason))
    context.state[_CLIENT] = ConfigRecord({"client": client})


def check_once(
    context: Context, client: int, phase: str, server_round: int, arrays: list[Any], entries: Mapping[str, Any]
) -> None:
    """Raise :class:`PolicyError` if a client receives a second model in a phase of a round, or rounds out of order.

    A repeated message with the same arrays and entries is allowed, because the reply may have been lost.
    """
    compared = sorted((key, value) for key, value in entries.items() if key != "state-keep")
    digest = blake2b(repr(compared).encode(errors="surrogatepass"), digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(memoryview(array).cast("B") if array.flags.c_contiguous and array.size else array.tobytes())
    key = f"site-{phase}-{client}"
    if record := context.state.config_records.get(key):
        last: Any = record["round"]
        if server_round < last or (server_round == last and digest.hexdigest() != record["digest"]):
            reason = f"a second model in round {last}, or a different config; the site scores one model per round"
            raise PolicyError(Violation("scores", reason))
    context.state[key] = ConfigRecord({"round": server_round, "digest": digest.hexdigest()})


# -- errors -----------------------------------------------------------------------------------------------


def guarded(work: Callable[[Message, Context], Message]) -> Callable[[Message, Context], Message]:
    """Wrap a message handler so that its errors reveal nothing about a site's data.

    A node with data logs the full error, and the server receives only :func:`shared_text`. On other nodes, a bug in the
    method's code becomes a :class:`MethodError`.
    """

    @wraps(work)
    def handler(message: Message, context: Context) -> Message:
        try:
            return work(message, context)
        except Exception as error:
            if "data" not in context.node_config:
                if is_failure(error):
                    raise
                raise method_error(error) from error
            is_explained = isinstance(error, SettingsError | PolicyError)  # a traceback would bury the message
            log(ERROR, "the node has refused a message: %s", error, exc_info=None if is_explained else error)
            audit.note(context, error=type(error).__name__)
            if isinstance(error, PolicyError):
                audit.note(context, rule=error.violation.rule)
            raise NodeError(shared_text(error, _min_rows(context.node_config))) from None

    return handler


def _min_rows(node_config: Mapping[str, Any]) -> int:
    """Return ``min-rows`` from a node's policy, or the default if the policy cannot be read."""
    try:
        return (policy_of(node_config) or Policy()).min_rows
    except NodeConfigError:
        return Policy.min_rows


def shared_text(error: BaseException, min_rows: int = Policy.min_rows) -> str:
    """Return an error's message in a form that may leave the node, without counts below ``min_rows``."""
    if getattr(error, "shareable", False):
        return str(error)
    if isinstance(error, DataError):
        return error.shared(min_rows)
    return f"{type(error).__name__} at {place_of(error, outside=False)}; see the node's log for the message"
