"""Print what makes a shell complete commands, flags and models: bash, zsh or fish.

    eval "$(monotape completion bash)"        in ~/.bashrc
    eval "$(monotape completion zsh)"         in ~/.zshrc, after compinit
    monotape completion fish | source         in ~/.config/fish/config.fish

Commands and flags are written into the script; only a model's name starts `monotape list --names`.
"""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def main(options: argparse.Namespace) -> int:
    from monotape.cli.completion_scripts import script
    from monotape.cli.main import build_parser

    _, commands = build_parser()
    print(script(options.shell, commands), end="")
    return 0
