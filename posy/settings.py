"""Declare and check settings. Each topic's package declares its own group of settings.

A setting is a field of a frozen dataclass, declared with :func:`setting`. The declaration is the only source of its
flat kebab-case key, default, range and other properties.
"""

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

Scalar = bool | int | float | str
P = ParamSpec("P")
T = TypeVar("T")
LARGEST = float.fromhex("0x1.fffffep127")
"""The largest allowed number: the largest float32, because models are trained in float32."""
MOST = 1_000_000_000
"""Default maximum of an integer setting: downstream code may use 32-bit integers."""
SHOWN = 1_000_000
"""Maxima from this number on only protect the arithmetic. Only the error for a larger value shows them."""
CUSTOM_NAME = re.compile(r"[^:\0]+:[A-Za-z_]\w*")
"""Format in which a setting names custom code: ``file:function`` or ``package.module:function``."""
COMPARISON = re.compile(r"([a-z][\w-]*) (=|!=|<|>) ([^\s|]+(?: \| [^\s|]+)*)")
"""One comparison in a condition, for example ``optimizer = adam | adamw``."""
LIMIT = re.compile(r"([a-z][\w-]*)(?: - ([0-9]+))?")
"""A limit that another setting imposes, for example ``num-clients - 1``."""
LONGEST = 120
"""Maximum number of characters of a value in an error message."""
COMMAND_LINE = "the command line"
"""The source that error messages give for command-line settings."""
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


class RunError(RuntimeError):
    """A run has failed. The message is one line for the user."""


class LaunchError(Exception):
    """A Flower process, such as the SuperLink, did not start, did not respond, or rejected the run."""


class NothingTrainedError(RunError):
    """A run has ended without any accepted reply."""


class DivergedError(RunError):
    """A run has ended, but its training diverged."""


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type, or outside its range."""

    shareable = True
    """Whether a node with data may send the message to the server: True if it quotes only the run's settings."""


class NodeConfigError(SettingsError):
    """The node config is wrong. The message may contain paths on the node, so it stays in the node's log."""

    shareable = False


class Comparison(NamedTuple):
    """A comparison of a setting with constants, as part of a condition in :attr:`Setting.needs`."""

    key: str
    sign: str
    """``=``, ``!=``, ``<`` or ``>``."""
    alternatives: tuple[str, ...]
    """The constants as strings. Only ``=`` and ``!=`` allow more than one constant. ``""`` means the empty string."""

    def holds(self, value: Scalar) -> bool:
        """Return whether the comparison is true for a value of its setting."""
        if self.sign in ("=", "!="):
            return any(_equals(value, text) for text in self.alternatives) == (self.sign == "=")
        if isinstance(value, str):  # a word in place of a number, such as `off`
            return False
        limit = float(self.alternatives[0])
        return value > limit if self.sign == ">" else value < limit


def _equals(value: Scalar, text: str) -> bool:
    """Return whether a value equals a constant in a condition."""
    if isinstance(value, str):
        return value == ("" if text == '""' else text)
    if isinstance(value, bool):
        return text == str(value).lower()
    try:
        return value == float(text)
    except ValueError:  # a word in place of a number, such as `off`
        return False


@lru_cache(maxsize=512)
def parse_condition(condition: str) -> tuple[tuple[Comparison, ...], ...]:
    """Parse a condition into its alternatives, which ``or`` separates.

    Each alternative is a tuple of the comparisons that ``and`` joins. Raise ``ValueError`` for a malformed condition.
    """
    return tuple(
        tuple(_parse_comparison(text, condition) for text in alternative.split(" and "))
        for alternative in (condition.split(" or ") if condition else ())
    )


def _parse_comparison(text: str, condition: str) -> Comparison:
    """Parse one comparison in a condition; raise ``ValueError`` if it is malformed."""
    match = COMPARISON.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} in the condition {condition!r} is not a comparison such as `dp-clip > 0`")
    key, sign, constants = match.groups()
    return Comparison(key, sign, tuple(constants.split(" | ")))


@lru_cache(maxsize=512)
def parse_limit(limit: str) -> tuple[str, int]:
    """Parse a limit into its key and the number to subtract; raise ``ValueError`` if it is malformed."""
    match = LIMIT.fullmatch(limit)
    if match is None:
        raise ValueError(f"the limit {limit!r} is not of the form `num-clients - 1`")
    return match[1], int(match[2] or 0)


class Search(NamedTuple):
    """Range in which `posy tune` searches for a number, on a logarithmic scale if ``log`` is true."""

    low: float
    high: float
    log: bool = False


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting."""

    default: Any
    """The default value, which also determines the type of all values."""
    help: str
    source: str = field(default="", kw_only=True)
    """Source of the default: the paper's section or table, or a file in the authors' code."""
    needs: str = field(default="", kw_only=True)
    """The condition under which the setting has an effect, for example ``dp-clip > 0`` or
    ``optimizer = adam | adamw and local-steps = 0``. It combines comparisons of a key (``=``, ``!=``, ``>`` or ``<``)
    with ``and`` and ``or``; ``and`` binds more tightly. ``|`` separates alternatives of one comparison, and ``""`` is
    the empty string. In a setting that several methods inherit, ``{method}`` in a key is replaced by the method's name.
    While the condition is false, any value other than the default is an error."""
    limit: str = field(default="", kw_only=True)
    """The largest value that has an effect in a run, given as the key of another setting, or as an expression such as
    ``num-clients - 1``. Any larger value other than the default is an error."""
    samples: Literal["", "image", "text", "table", "features"] = field(default="", kw_only=True)
    """The only kind of samples for which the setting has an effect. Empty if it applies to all kinds."""
    choices: tuple[str, ...] = ()
    """The allowed values. Empty if the setting is not restricted to a list."""
    custom_kind: str = ""
    """Kind of object that a custom ``file:function`` must define. Empty if the setting allows no custom code."""
    number_or: str = ""
    """A word that the setting allows in place of a number. If set, this word is also the default."""
    minimum: float = -math.inf
    above: float = -math.inf
    maximum: float = math.inf
    """The range, which includes ``minimum`` and ``maximum`` but not ``above``."""
    place: bool = False
    """Whether the value is a path. A relative path is resolved against the working directory of the run."""
    path_or: str = ""
    """A word that the setting allows in place of a path."""
    resumable: bool = False
    """Whether a resumed run may have a different value."""
    once: bool = False
    """Whether the value applies to a single start of a run. A resumed or repeated run does not inherit it."""
    synonyms: tuple[str, ...] = ()
    """Names of the setting in other tools, which users may type by mistake."""
    search: Search | None = None
    """Search range for `posy tune`, or None if `posy tune` does not tune the setting."""
    earlier: Any = None
    """Value for runs that were started before the setting existed. None means the default."""
    affects_results: bool = True
    """Whether the results depend on the setting. False if it controls only where and how Posy executes the run."""

    @property
    def decides(self) -> bool:
        """Whether the results of a run and of its repetitions depend on the setting."""
        return self.affects_results and not self.once

    @property
    def before(self) -> Any:
        """The value of the setting for runs that were started before the setting existed."""
        return self.default if self.earlier is None else self.earlier

    @property
    def kind(self) -> type:
        """The type of the values."""
        return float if self.number_or else type(self.default)

    @property
    def most(self) -> float:
        """The largest allowed value."""
        return MOST if self.kind is int and self.maximum == math.inf else self.maximum

    def unmet(self, values: Mapping[str, Scalar]) -> str:
        """Return the assignments that make the condition false, such as ``dp-clip = 0.0``, or an empty string.

        Parameters
        ----------
        values : mapping
            A value for each key that the condition names.
        """
        alternatives = [
            [comparison.key for comparison in comparisons if not comparison.holds(values[comparison.key])]
            for comparisons in parse_condition(self.needs)
        ]
        failed = dict.fromkeys(key for keys in alternatives for key in keys) if all(alternatives) else ()
        return " and ".join(f"{key} = {quoted(values[key])}" for key in failed)

    def largest(self, values: Mapping[str, Scalar]) -> float:
        """Return the largest value that has an effect in a run: the limit, or infinity if there is none.

        Parameters
        ----------
        values : mapping
            A value for the key that the limit names.
        """
        if not self.limit:
            return math.inf
        key, offset = parse_limit(self.limit)
        return max(float(values[key]) - offset, self.minimum)

    @property
    def described(self) -> str:
        """The meaning of the setting, its limit, and the condition under which it has an effect."""
        limit = f"; at most {self.limit}" if self.limit else ""
        return self.help + limit + (f"; needs {self.needs}" if self.needs else "")

    def allowed(self) -> str:
        """Return a description of the allowed values."""
        if self.choices:
            return (
                "one of "
                + ", ".join(self.choices)
                + (f", or file:name of {self.custom_kind}" if self.custom_kind else "")
            )
        kind = (f"`{self.number_or}` or " if self.number_or else "") + KINDS[self.kind]
        if math.isfinite(self.minimum) and self.most < SHOWN:
            return f"{kind} from {self.minimum:g} to {self.most:g}"
        limits = [f"above {self.above:g}"] * math.isfinite(self.above)
        limits += [f"of at least {self.minimum:g}"] * math.isfinite(self.minimum)
        limits += [f"at most {self.most:g}"] * (self.most < SHOWN)
        return " ".join(filter(None, (kind, " and ".join(limits))))

    def _allowed_instead_of(self, value: Any) -> str:
        """Return a description of the allowed values for an error about a value, with the maximum that it exceeds."""
        most = min(self.most, LARGEST)
        if self.most < SHOWN or type(value) not in (int, float) or not value > most:
            return self.allowed()
        return f"{self.allowed()} and at most {f'{most:,.0f}' if most < LARGEST else f'{most:.4g}'}"

    def admits(self, value: Any) -> bool:
        """Return whether the setting allows a value, which must have the right type."""
        if self.choices:
            return value in self.choices or bool(self.custom_kind and CUSTOM_NAME.fullmatch(value))
        if isinstance(value, str):
            return "\0" not in value  # no path or name can contain a null character
        return abs(value) <= LARGEST and self.minimum <= value <= self.most and value > self.above

    def checked(self, key: str, value: Any, where: str) -> Any:
        """Check a value and convert it to the setting's type, or raise :class:`SettingsError` like :func:`checked`."""
        if self.number_or and value == self.number_or:
            return value
        if self.kind is float and type(value) is int and abs(value) <= LARGEST:
            value = float(value)
        if type(value) is self.kind and self.admits(value):  # the exact type, because a bool is an int in Python
            return value
        allowed = self._allowed_instead_of(value)
        near = nearest(value, self.choices) if isinstance(value, str) else ""
        hint = f"; did you mean {near}?" if near else ""
        raise SettingsError(f"{key} = {quoted(value)} {set_in(where)}: it must be {allowed} ({self.help}){hint}")


def _declares(make_setting: Callable[P, Setting]) -> Callable[P, Any]:
    def declare(*args: P.args, **kwargs: P.kwargs) -> Any:
        declared = make_setting(*args, **kwargs)
        return field(default=declared.default, metadata={"setting": declared})

    return declare


setting = _declares(Setting)
"""A function that declares a field of a settings dataclass. It takes the parameters of :class:`Setting`."""


def key_of(name: str, prefix: str = "") -> str:
    """Return the kebab-case key of a field: ``mu`` with the prefix ``fedfew`` becomes ``fedfew-mu``."""
    return "-".join(filter(None, (prefix, name.replace("_", "-"))))


def settings_of(cls: type, prefix: str = "") -> Mapping[str, Setting]:
    """Return the declarations of a settings dataclass by key. ``prefix`` is the name of a method, or empty."""
    return _settings_of(cls, prefix)


@lru_cache(maxsize=256)
def _settings_of(cls: type, prefix: str) -> Mapping[str, Setting]:
    declared: dict[str, Setting] = {key_of(f.name, prefix): f.metadata["setting"] for f in dataclasses.fields(cls)}
    return {key: _with_method(setting, prefix) for key, setting in declared.items()}


def _with_method(setting: Setting, method: str) -> Setting:
    """Return a setting with ``{method}`` in its condition replaced by the method's name."""
    return dataclasses.replace(setting, needs=setting.needs.replace("{method}", method))


def check_keys(config: Iterable[str], declarations: Mapping[str, Setting], where: str) -> None:
    """Raise :class:`SettingsError` for unknown keys, and suggest a similar setting."""
    for key in config:
        if key not in declarations:
            name = suggest_keys(key, declarations)
            hint = f"did you mean {name}?" if name else "`posy settings` lists all keys"
            raise SettingsError(f"{key if key.isprintable() else quoted(key)} {set_in(where)} is not a setting; {hint}")


def check_conditions(settings: Mapping[str, Setting], declarations: Mapping[str, Setting]) -> None:
    """Check the conditions (:attr:`Setting.needs`) and limits (:attr:`Setting.limit`) of some settings.

    Parameters
    ----------
    settings : mapping
        The settings to check, by key.
    declarations : mapping
        The settings that a condition or limit may name, by key.

    Raises
    ------
    ValueError
        For a malformed condition or limit, an unknown key, or a value that the compared setting does not allow.
    """
    for key, setting in settings.items():
        if setting.limit and (limiting := parse_limit(setting.limit)[0]) not in declarations:
            raise ValueError(f"{key} is at most {setting.limit}: {limiting} is not a setting")
        for comparison in itertools.chain(*parse_condition(setting.needs)):
            if comparison.key not in declarations:
                raise ValueError(f"{key} needs {setting.needs}: {comparison.key} is not a setting")
            compared = declarations[comparison.key]
            for text in comparison.alternatives:
                if not _is_constant(text, compared, comparison.sign):
                    raise ValueError(f"{key} needs {setting.needs}: {comparison.key} must be {compared.allowed()}")


def _is_constant(text: str, setting: Setting, sign: str) -> bool:
    """Return whether a condition may compare a setting with a constant."""
    if setting.kind is bool:
        return sign in ("=", "!=") and text in ("true", "false")
    if setting.kind is str:
        return sign in ("=", "!=") and setting.admits("" if text == '""' else text)
    try:
        return text == setting.number_or or setting.admits(setting.kind(text))
    except ValueError:
        return False


def checked(config: Mapping[str, Any], declarations: Mapping[str, Setting], where: str) -> dict[str, Scalar]:
    """Check settings and convert them to their declared types.

    Raises
    ------
    SettingsError
        For an unknown key, a wrong type, or a value outside its range. The message names ``where``, their source.
    """
    check_keys(config, declarations, where)
    return {key: declarations[key].checked(key, value, where) for key, value in config.items()}


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Build a settings dataclass from checked values. Missing keys take their defaults, and other keys are ignored."""
    return cls(**{name: values[key] for key, name in _names_by_key(cls, prefix) if key in values})  # type: ignore[arg-type]


def as_config(settings: Any, prefix: str = "") -> dict[str, Scalar]:
    """Return a settings dataclass as a flat mapping of kebab-case keys."""
    return {key: getattr(settings, name) for key, name in _names_by_key(type(settings), prefix)}  # type: ignore[arg-type]


@lru_cache(maxsize=512)
def _names_by_key(cls: Any, prefix: str) -> tuple[tuple[str, str], ...]:
    """Return the key and the name of each field of a settings dataclass."""
    return tuple((key_of(f.name, prefix), f.name) for f in dataclasses.fields(cls))


def set_in(where: str) -> str:
    """Return a source of settings with its preposition, such as ``in my.yaml``, for error messages."""
    return f"{'on' if where == COMMAND_LINE else 'in'} {where}"


def with_sources(message: str, values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Add to an error message the sources of the settings that it quotes as ``key = value``.

    The function adds each source once, after the first quoted setting from that source. If the message does not quote
    any setting but begins with the key of a setting, the function appends this setting's source.

    Parameters
    ----------
    message : str
        The message. A quoted setting that is already followed by a source remains unchanged.
    values : mapping
        The values of the settings by key.
    sources : mapping
        The sources of the settings by key. A setting without a source has its default value.
    """
    quotations = []
    for key in values.keys() & sources.keys():
        forms = "|".join(re.escape(form) for form in sorted(_forms(values[key]), key=len, reverse=True))
        if first := re.search(rf"(?<![\w-]){re.escape(key)} = (?:{forms})(?![\w'-]|\.\d)", message):
            quotations.append((first.end(), set_in(sources[key])))
    text, end, named_sources = "", 0, set()
    for position, source in sorted(quotations):
        text, end = text + message[end:position], position
        if source not in named_sources and not re.match(" (in|on) ", message[end:]):
            text += f" {source}"
        named_sources.add(source)
    text += message[end:]
    subject = re.match(r"[a-z][\w-]*(?= = |: )", message)
    if not quotations and subject and (key := subject[0]) in sources:
        text += f" ({key} is set {set_in(sources[key])})"
    return text


def _forms(value: Any) -> set[str]:
    """Return the forms in which messages quote a value."""
    return {quoted(value), str(value) or quoted(value)} | ({f"{value:g}"} if isinstance(value, float) else set())


def quoted(value: Any) -> str:
    """Format a value for a message: on one line, with true and false as users type them, and shortened if long."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value)
    except ValueError:  # by default, Python does not convert integers of more than 4,300 digits to strings
        return "a number with thousands of digits"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the most similar candidate, or an empty string. ``cutoff`` (0..1) is the minimum similarity."""
    near = difflib.get_close_matches(word.lower().replace("_", "-"), list(candidates), 1, cutoff)
    return near[0] if near else ""


def suggestions(word: str, candidates: Iterable[str], most: int = 3, cutoff: float = 0.6) -> str:
    """Return the candidates that resemble a word, joined by `or`, or an empty string.

    Candidates that begin with the word come first. The comparison ignores case.

    Parameters
    ----------
    word : str
        The misspelt word.
    candidates : iterable of str
        The possible words.
    most : int
        Maximum number of suggestions.
    cutoff : float
        Minimum similarity, from 0 to 1.
    """
    by_lower = {name.lower(): name for name in candidates}
    lower = word.lower().replace("_", "-")
    longer = [name for name in by_lower if len(lower) > 2 and name.startswith(lower)]
    close = difflib.get_close_matches(lower, by_lower, most, cutoff)
    return " or ".join(by_lower[name] for name in list(dict.fromkeys([*longer, *close]))[:most])


def suggest_keys(key: str, declarations: Mapping[str, Setting]) -> str:
    """Return the keys that the user may have meant by an unknown key, joined by `or`, or an empty string."""
    word = key.lower().replace("_", "-")
    exact_matches = [name for name, setting in declarations.items() if word == name or word in setting.synonyms]
    suffix_matches = [name for name in declarations if name.endswith(f"-{word}")]  # the user may omit the method
    return " or ".join((exact_matches or suffix_matches)[:3]) or nearest(word, declarations)
