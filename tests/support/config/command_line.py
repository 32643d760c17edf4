"""The config that a command would run with."""

from collections.abc import Mapping

from headrace.command_line import config_command, run_command


def loaded(config_type: type, flags: Mapping[str, str], argv: list[str], **defaults: object):
    """The config of a command line that must be right."""
    configs: list = []
    command = config_command("test", config_type, flags, lambda config: configs.append(config) or 0, defaults=defaults)
    assert run_command(command, argv, "test") == 0
    (config,) = configs
    return config
