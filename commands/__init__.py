"""The `posy` command-line interface and its subcommands."""
