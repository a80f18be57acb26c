"""Format client names and external text for messages."""

from collections.abc import Iterable, Mapping, Sequence


def title(client: int, name: str = "") -> str:
    """Return the display name of a client: ``site-c (client 2)``, or ``client 2`` if it has no name."""
    return f"{name} (client {client})" if name else f"client {client}"


def describe_clients(clients: Iterable[int], names: Mapping[int, str], total: int, most: int = 3) -> str:
    """Return the subject and verb of a sentence about clients, naming at most the first ``most`` of them.

    Examples: ``client 2 is``, ``site-a (client 0) and site-b (client 1) are``, ``12 of 100 clients (3, 7, 9, …) are``.
    ``names`` contains the names of clients that have one, and ``total`` is the number of clients in the run.
    """
    indices = list(clients)
    if len(indices) > most:
        first = ", ".join(names.get(client, str(client)) for client in indices[:most])
        return f"{len(indices)} of {total} clients ({first}, …) are"
    titles = [title(client, names.get(client, "")) for client in indices]
    return f"{joined(titles)} {'are' if len(titles) > 1 else 'is'}"


def joined(items: Sequence[str]) -> str:
    """Return items as a list with commas and ``and``."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def listed(items: Sequence[str], most: int = 5) -> str:
    """Return items separated by commas, at most the first ``most`` of them."""
    return ", ".join(items[:most]) + ", …" * (len(items) > most)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 round``, ``15 rounds``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def capitalised(text: str) -> str:
    """Capitalise the first letter of a text."""
    return text[:1].upper() + text[1:]


def one_line(text: str, most: int) -> str:
    """Format external text as one printable line of at most ``most`` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 1] + "…"
