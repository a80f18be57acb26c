"""The `posy` command, tables of runs, and the processes of a deployment."""
