"""Method cards: the facts on a method's documentation page that do not follow from its code."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Paper:
    """A publication.

    Parameters
    ----------
    authors : str
        Authors as in a citation, for example ``"Karimireddy et al."``.
    year : int
        Year of publication at the venue.
    title : str
        Full title.
    venue : str
        Conference, journal or preprint server.
    url : str
        URL of the paper.
    """

    authors: str
    year: int
    title: str
    venue: str
    url: str


@dataclass(frozen=True)
class Program:
    """A published program whose results the tests in ``tests/programs`` compare with Posy's.

    Parameters
    ----------
    repository : str
        ``owner/name`` on GitHub.
    commit : str
        Full hash of the commit that produced the results.
    entry : str
        The file, and the function or command, that produced the results.
    difference : float
        Maximum absolute difference that the test allows between the two programs' results; at most 1e-5.
    by_authors : bool
        Whether the paper's authors published the program.
    """

    repository: str
    commit: str
    entry: str
    difference: float
    by_authors: bool = True


@dataclass(frozen=True)
class MethodCard:
    """The facts about a method for its page in ``docs/methods``.

    Parameters
    ----------
    paper : Paper or None
        The publication; None for a method without one, such as local training.
    equations : tuple of str
        Each equation or algorithm line that the code implements, with its number in the paper.
    sent, returned : mapping of str to str
        Arrays of the server's message and of a client's reply, in order: names and shapes, mapped to meanings.
    reveals : str
        The values that the server learns from a client's reply, and the conclusions that it can draw from them.
    server_state, client_state : mapping of str to str
        Arrays that each side stores between rounds: names in the code, mapped to meanings.
    scored : str
        The model that the authors score, which explains the choice of ``point``.
    deviations : tuple of str
        Differences from the paper, each with its reason and, if measured, its effect.
    program : Program or None
        The published program with which a test compares Posy.
    no_program : str
        Why no test compares Posy with a published program, if ``program`` is None.
    """

    paper: Paper | None
    equations: tuple[str, ...]
    sent: Mapping[str, str]
    returned: Mapping[str, str]
    reveals: str
    server_state: Mapping[str, str]
    client_state: Mapping[str, str]
    scored: str
    deviations: tuple[str, ...] = ()
    program: Program | None = None
    no_program: str = field(default="", kw_only=True)
