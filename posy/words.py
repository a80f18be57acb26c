"""Names of clients in sentences, and texts from elsewhere on one line."""

from collections.abc import Iterable, Mapping


def title(client: int, name: str = "") -> str:
    """Return the name of a client for people: ``site-c (client 2)``, or ``client 2`` where it has no name."""
    return f"{name} (client {client})" if name else f"client {client}"


def are(clients: Iterable[int], names: Mapping[int, str], total: int, most: int = 3) -> str:
    """Return the beginning of a sentence about some clients: all their names, or, of more than ``most``, the first.

    ``names`` holds those of clients that have one; ``total`` is the number of clients of the run. Such as
    ``client 2 is``, ``site-a (client 0) and site-b (client 1) are``, ``12 of 100 clients (3, 7, 9, …) are``.
    """
    chosen = list(clients)
    if len(chosen) > most:
        first = ", ".join(names.get(client, str(client)) for client in chosen[:most])
        return f"{len(chosen)} of {total} clients ({first}, …) are"
    *others, last = (title(client, names.get(client, "")) for client in chosen)
    return f"{', '.join(others)} and {last} are" if others else f"{last} is"


def one_line(text: str, most: int) -> str:
    """Return a text from elsewhere as one printable line of at most ``most`` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 1] + "…"
