"""The `headrace` command, cluster files and Ray bring-up."""
