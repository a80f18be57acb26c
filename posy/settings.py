"""How settings are declared and checked; the groups of settings stand beside what they are about.

A setting is a field of a frozen dataclass, declared with :func:`setting`: its flat kebab-case key, its default, its
range and everything else that holds for it are written there and nowhere else.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, ParamSpec, TypeVar

Scalar = bool | int | float | str
P = ParamSpec("P")
T = TypeVar("T")
LARGEST = float.fromhex("0x1.fffffep127")
"""The largest number of a setting: models are trained in float32."""
MOST = 1_000_000_000
"""The largest whole number of a setting that names no other: what comes after may reckon in 32 bits."""
OWN = re.compile(r"[^:\0]+:[A-Za-z_]\w*")
"""How people name what is their own: ``file:function`` or ``package.module:function``."""
COMPARISON = re.compile(r"([a-z][\w-]*) (=|!=|<|>) ([^\s|]+(?: \| [^\s|]+)*)")
"""One comparison of a condition, for example ``optimizer = adam | adamw``."""
LONGEST = 120
"""Characters of a value that a message repeats."""
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


class RunError(RuntimeError):
    """A run has failed: its message is one line for people."""


class LaunchError(Exception):
    """A SuperLink or another process of Flower's could not be started or reached, or did not take the run."""


class NothingTrainedError(RunError):
    """A run has ended without one accepted reply."""


class DivergedError(RunError):
    """A run has come to its end, but its training has left the range of useful numbers."""


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type, or outside its range."""


class Comparison(NamedTuple):
    """A comparison of a setting with constants, as a condition in :attr:`Setting.needs` holds it."""

    key: str
    sign: str
    """``=``, ``!=``, ``<`` or ``>``."""
    alternatives: tuple[str, ...]
    """The constants as text; several with ``=`` or ``!=`` only. ``""`` stands for the empty text."""

    def holds(self, value: Scalar) -> bool:
        """Return whether the comparison is true for a value of its setting."""
        if self.sign in ("=", "!="):
            return any(_equals(value, text) for text in self.alternatives) == (self.sign == "=")
        if isinstance(value, str):  # a word in place of a number, such as `off`
            return False
        limit = float(self.alternatives[0])
        return value > limit if self.sign == ">" else value < limit


def _equals(value: Scalar, text: str) -> bool:
    """Return whether a value equals a constant of a condition."""
    if isinstance(value, str):
        return value == ("" if text == '""' else text)
    if isinstance(value, bool):
        return text == str(value).lower()
    try:
        return value == float(text)
    except ValueError:  # a word in place of a number, such as `off`
        return False


@lru_cache(maxsize=512)
def parse_condition(condition: str) -> tuple[Comparison, ...]:
    """Return the comparisons that a condition joins by ``and``; raise ``ValueError`` if it has another form."""
    comparisons = []
    for text in condition.split(" and ") if condition else ():
        match = COMPARISON.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} in the condition {condition!r} is not a comparison such as `dp-clip > 0`")
        key, sign, constants = match.groups()
        comparisons.append(Comparison(key, sign, tuple(constants.split(" | "))))
    return tuple(comparisons)


class Search(NamedTuple):
    """Where good values of a number lie: what `posy tune` searches, on a logarithmic scale if ``log``."""

    low: float
    high: float
    log: bool = False


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting."""

    default: Any
    """Its value where nobody sets it; its type is that of all its values."""
    help: str
    source: str = field(default="", kw_only=True)
    """Where the default comes from: the paper's section or table, or the file of the authors' program."""
    needs: str = field(default="", kw_only=True)
    """The condition under which the setting has an effect, for example ``dp-clip > 0`` or
    ``optimizer = adam | adamw and local-steps = 0``: comparisons of a key with ``=``, ``!=``, ``>`` or ``<``, joined by
    ``and``; ``|`` separates alternatives of one comparison, and ``""`` is the empty text. ``{method}`` in a key stands
    for the method's name, for a setting that several methods inherit. Setting it to another value than its default
    while the condition is false is an error."""
    choices: tuple[str, ...] = ()
    """The only values that it may have, if there are any."""
    or_own: str = ""
    """What people's own may stand in place of a choice, as ``file:function``: what it names."""
    number_or: str = ""
    """A word that may stand in place of a number, which then is the default."""
    minimum: float = -math.inf
    above: float = -math.inf
    maximum: float = math.inf
    """Its range: ``minimum`` and ``maximum`` are in it, ``above`` is not."""
    place: bool = False
    """It is a path; a relative one starts where the run was started."""
    path_or: str = ""
    """A word that may stand in place of a path."""
    resumable: bool = False
    """A run may have another value of it when it is resumed."""
    once: bool = False
    """It is about one start of a run only; whatever resumes or repeats the run does not take it over."""
    synonyms: tuple[str, ...] = ()
    """What other tools call it, and people type for it."""
    search: Search | None = None
    """What `posy tune` tries of it; None: it is left as it is."""
    earlier: Any = None
    """What a run had that is older than the setting, where the default has changed since; None: the default."""
    affects_results: bool = True
    """What a run computes depends on it. False: it says where and how the run is carried out, and no more."""

    @property
    def decides(self) -> bool:
        """Whether what a run computes depends on it, now and when the run is repeated."""
        return self.affects_results and not self.once

    @property
    def before(self) -> Any:
        """Its value in a run that is older than the setting."""
        return self.default if self.earlier is None else self.earlier

    @property
    def kind(self) -> type:
        """The type of its values."""
        return float if self.number_or else type(self.default)

    @property
    def most(self) -> float:
        """The largest value that it may have."""
        return MOST if self.kind is int and self.maximum == math.inf else self.maximum

    def unmet(self, values: Mapping[str, Scalar]) -> str:
        """Return the assignments that make its condition false, such as ``dp-clip = 0.0``; empty if it holds.

        Parameters
        ----------
        values : mapping
            A value for each key that the condition names.
        """
        failed = (
            comparison.key for comparison in parse_condition(self.needs) if not comparison.holds(values[comparison.key])
        )
        return " and ".join(f"{key} = {shown(values[key])}" for key in failed)

    @property
    def described(self) -> str:
        """Its meaning, and the condition under which it has an effect."""
        return self.help + (f"; needs {self.needs}" if self.needs else "")

    def allowed(self) -> str:
        """Return in words which values it may have."""
        if self.choices:
            return "one of " + ", ".join(self.choices) + (f", or file:name of {self.or_own}" if self.or_own else "")
        bounds = {">=": self.minimum, ">": self.above, "<=": self.most}
        given = [f"{sign} {bound}" for sign, bound in bounds.items() if math.isfinite(bound)]
        word = f"`{self.number_or}` or " if self.number_or else ""
        return " ".join(filter(None, (word + KINDS[self.kind], " and ".join(given))))

    def admits(self, value: Any) -> bool:
        """Tell whether a value of the right type is one that it may have."""
        if self.choices:
            return value in self.choices or bool(self.or_own and OWN.fullmatch(value))
        if isinstance(value, str):
            return "\0" not in value  # no path or name can hold it
        return abs(value) <= LARGEST and self.minimum <= value <= self.most and value > self.above

    def checked(self, key: str, value: Any, where: str) -> Any:
        """Return a value in the type of the setting, or raise :class:`SettingsError`, as :func:`checked` does."""
        if self.number_or and value == self.number_or:
            return value
        if self.kind is float and type(value) is int and abs(value) <= LARGEST:
            value = float(value)
        if type(value) is self.kind and self.admits(value):  # exactly: a bool is an int to Python
            return value
        too_large = type(value) in (int, float) and self.most == math.inf and value > LARGEST
        allowed = self.allowed() + (f", at most {LARGEST:.4g}" if too_large else "")
        near = nearest(value, self.choices) if isinstance(value, str) else ""
        hint = f"; did you mean {near}?" if near else ""
        raise SettingsError(f"{key} = {shown(value)} in {where}: it must be {allowed} ({self.help}){hint}")


def _declares(about: Callable[P, Setting]) -> Callable[P, Any]:
    def declare(*args: P.args, **kwargs: P.kwargs) -> Any:
        declared = about(*args, **kwargs)
        return field(default=declared.default, metadata={"setting": declared})

    return declare


setting = _declares(Setting)
"""Declare a field of a settings dataclass; it takes what :class:`Setting` does."""


def key_of(name: str, prefix: str = "") -> str:
    """Return the kebab-case key of a field: ``mu`` of ``fedfew`` is ``fedfew-mu``."""
    return "-".join(filter(None, (prefix, name.replace("_", "-"))))


def settings_of(cls: type, prefix: str = "") -> Mapping[str, Setting]:
    """Return the declarations of a settings dataclass by key; ``prefix`` is the name of a method, or empty."""
    return _settings_of(cls, prefix)


@lru_cache(maxsize=256)
def _settings_of(cls: type, prefix: str) -> Mapping[str, Setting]:
    declared: dict[str, Setting] = {key_of(f.name, prefix): f.metadata["setting"] for f in dataclasses.fields(cls)}
    return {key: _with_method(setting, prefix) for key, setting in declared.items()}


def _with_method(setting: Setting, method: str) -> Setting:
    """Return a setting whose condition names the method instead of ``{method}``."""
    return dataclasses.replace(setting, needs=setting.needs.replace("{method}", method))


def check_keys(config: Iterable[str], known: Mapping[str, Setting], where: str) -> None:
    """Raise :class:`SettingsError` for keys that are not settings, naming what is meant."""
    for key in config:
        if key not in known:
            name = meant(key, known)
            hint = f"did you mean {name}?" if name else "`posy settings` lists all keys"
            raise SettingsError(f"{key if key.isprintable() else shown(key)} in {where} is not a setting; {hint}")


def check_conditions(settings: Mapping[str, Setting], known: Mapping[str, Setting]) -> None:
    """Check the conditions in :attr:`Setting.needs` of some settings.

    Parameters
    ----------
    settings : mapping
        The settings whose conditions are checked, by key.
    known : mapping
        The settings that a condition may name, by key.

    Raises
    ------
    ValueError
        For a condition of another form, or with an unknown key or a value that its setting cannot have.
    """
    for key, setting in settings.items():
        for comparison in parse_condition(setting.needs):
            if comparison.key not in known:
                raise ValueError(f"{key} needs {setting.needs}: {comparison.key} is not a setting")
            compared = known[comparison.key]
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


def checked(config: Mapping[str, Any], known: Mapping[str, Setting], where: str) -> dict[str, Scalar]:
    """Return settings in the types of their declarations.

    Raises
    ------
    SettingsError
        For an unknown key, a wrong type, or a value outside its range; ``where`` they were set is part of the message.
    """
    check_keys(config, known, where)
    return {key: known[key].checked(key, value, where) for key, value in config.items()}


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Return a settings dataclass with checked values; missing keys take their defaults, others are left alone."""
    names = {key_of(f.name, prefix): f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: values[key] for key, name in names.items() if key in values})


def as_config(settings: Any, prefix: str = "") -> dict[str, Scalar]:
    """Return a settings dataclass as a flat mapping of kebab-case keys."""
    return {key_of(f.name, prefix): getattr(settings, f.name) for f in dataclasses.fields(settings)}


def shown(value: Any) -> str:
    """Return a value as a message repeats it: on one line, truth values as a user types them, long texts shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value)
    except ValueError:  # Python writes whole numbers of at most 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that is meant, or an empty text; ``cutoff`` (0..1) says how alike they must be."""
    near = difflib.get_close_matches(word.lower().replace("_", "-"), list(known), 1, cutoff)
    return near[0] if near else ""


def meant(key: str, known: Mapping[str, Setting]) -> str:
    """Return the setting that is meant by a key that is none, several with `or` between them, or an empty text."""
    word = key.lower().replace("_", "-")
    same = [name for name, setting in known.items() if word == name or word in setting.synonyms]
    parts = [name for name in known if name.endswith(f"-{word}")]  # as in mu, models
    return " or ".join((same or parts)[:3]) or nearest(word, known)
