"""The scripts of `monotape completion`, made from the parsers so that they cannot forget a flag."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from monotape.cli.parser import Parser

_MODELS = "{ echo smollm2; echo embedded; monotape list --names 2>/dev/null; } | sort -u"
_FILES = ("FILE", "DIR", "TRACE")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: its spellings, what follows it, and its help."""

    spellings: tuple[str, ...]
    value: str  # "": nothing; "models", "files", "words" (see choices) or "other"
    choices: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its flags and what stands in its arguments without a flag."""

    text: str
    flags: tuple[Flag, ...]
    value: str
    choices: tuple[str, ...]


def script(shell: str, parsers: Mapping[str, Parser]) -> str:
    """The script for a shell."""
    commands = {name: _command(parser) for name, parser in parsers.items()}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _command(parser: Parser) -> Command:
    flags: list[Flag] = []
    value, choices = "other", tuple[str, ...]()
    for action in parser._actions:
        kind, words = _value(action)
        if action.option_strings:
            flags.append(Flag(tuple(action.option_strings), kind, words, _text(parser, action)))
        else:
            value, choices = kind, words
    first = (parser.description or "").strip().split("\n")[0]
    return Command(_brief(first).rstrip("."), tuple(flags), value, choices)


def _value(action: argparse.Action) -> tuple[str, tuple[str, ...]]:
    if action.nargs == 0:
        return "", ()
    if action.choices is not None:
        return "words", tuple(map(str, action.choices))
    if action.metavar == "MODEL":
        return "models", ()
    return "files" if action.metavar in _FILES else "other", ()


def _text(parser: Parser, action: argparse.Action) -> str:
    return _brief((action.help or "") % {"default": action.default, "prog": parser.prog})


def _brief(text: str) -> str:
    """A sentence up to its first pause: lists of completions are narrow."""
    for pause in (";", " (", ":"):
        text = text.partition(pause)[0]
    return " ".join(text.split())


def _spellings(command: Command) -> list[str]:
    return [spelling for flag in command.flags for spelling in flag.spellings]


# --- bash


def _bash(commands: Mapping[str, Command]) -> str:
    cases = "".join(_bash_case(name, command) for name, command in commands.items())
    words = shlex.quote(" ".join([*commands, "--help", "--version"]))
    return f"""# bash completion of monotape
_monotape() {{
  local word=$2 before=$3 command="" index
  COMPREPLY=()
  for ((index = 1; index < COMP_CWORD; index++)); do
    if [[ ${{COMP_WORDS[index]}} != -* ]]; then command=${{COMP_WORDS[index]}}; break; fi
  done
  case $command in
    "") _monotape_words {words} ;;
{cases}  esac
}}
_monotape_words() {{ COMPREPLY=($(compgen -W "$1" -- "$word")); }}
_monotape_files() {{ compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$word")); }}
_monotape_models() {{
  compopt -o filenames 2>/dev/null
  COMPREPLY=($(compgen -W "$({_MODELS})" -- "$word") $(compgen -f -- "$word"))
}}
complete -F _monotape monotape
"""


def _bash_case(name: str, command: Command) -> str:
    lines = [f"    {name})", "      case $before in"]
    for flag in command.flags:
        if flag.value:
            lines.append(
                f"        {'|'.join(flag.spellings)}) {_bash_value(flag.value, flag.choices)}; return ;;"
            )
    lines += [
        "      esac",
        f"      if [[ $word == -* ]]; then _monotape_words {shlex.quote(' '.join(_spellings(command)))}",
        f"      else {_bash_value(command.value, command.choices)}; fi ;;",
    ]
    return "\n".join(lines) + "\n"


def _bash_value(value: str, choices: tuple[str, ...]) -> str:
    if value == "words":
        return f"_monotape_words {shlex.quote(' '.join(choices))}"
    return {"models": "_monotape_models", "files": "_monotape_files"}.get(value, ":")


# --- zsh


def _zsh(commands: Mapping[str, Command]) -> str:
    described = " ".join(_zsh_quoted(f"{name}:{command.text}") for name, command in commands.items())
    cases = "".join(_zsh_case(name, command) for name, command in commands.items())
    return f"""#compdef monotape
# zsh completion of monotape
_monotape_models() {{
  local -a models=(${{(f)"$({_MODELS})"}})
  _alternative "models:model:compadd -a models" "files:file:_files"
}}
_monotape() {{
  local -a commands=({described})
  if (( CURRENT == 2 )); then _describe command commands; return; fi
  local command=$words[2]
  shift words; (( CURRENT-- ))
  case $command in
{cases}  esac
}}
compdef _monotape monotape
"""


def _zsh_case(name: str, command: Command) -> str:
    specifications = [
        _zsh_quoted(f"{spelling}[{_zsh_text(flag.text)}]" + _zsh_value(flag.value, flag.choices))
        for flag in command.flags
        for spelling in flag.spellings
    ]
    specifications.append(_zsh_quoted("*" + (_zsh_value(command.value, command.choices) or ": :")))
    return f"    {name}) _arguments {' '.join(specifications)} ;;\n"


def _zsh_value(value: str, choices: tuple[str, ...]) -> str:
    if value == "words":
        return f":value:({' '.join(choices)})"
    return {"": "", "models": ":model:_monotape_models", "files": ":file:_files"}.get(value, ":value: ")


def _zsh_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish

_FISH_MODELS = "begin; echo smollm2; echo embedded; monotape list --names 2>/dev/null; end | sort -u"
#: Whether the words so far begin with the command that is named, or with none where none is.
_FISH_IS = 'set -l words (commandline -opc); test "$words[2]" = "$argv[1]"'


def _fish(commands: Mapping[str, Command]) -> str:
    lines = [
        "# fish completion of monotape",
        f"function __monotape_models; {_FISH_MODELS}; end",
        f"function __monotape_is; {_FISH_IS}; end",
        "complete -c monotape -f",
    ]
    for name, command in commands.items():
        lines.append(f"complete -c monotape -n __monotape_is -a {name} -d {_fish_quoted(command.text)}")
    for name, command in commands.items():
        here = f"complete -c monotape -n '__monotape_is {name}'"
        if more := _fish_value(command.value, command.choices):
            lines.append(f"{here}{more}")
        lines += [f"{here}{_fish_flag(flag)}" for flag in command.flags]
    return "\n".join(lines) + "\n"


def _fish_flag(flag: Flag) -> str:
    spelled = "".join(
        f" -l {spelling[2:]}" if spelling.startswith("--") else f" -s {spelling[1:]}"
        for spelling in flag.spellings
    )
    needed = (" -r" if flag.value else "") + _fish_value(flag.value, flag.choices)
    return f"{spelled}{needed} -d {_fish_quoted(flag.text)}"


def _fish_value(value: str, choices: tuple[str, ...]) -> str:
    if value == "words":
        return f" -a {_fish_quoted(' '.join(choices))}"
    return {"models": " -F -a '(__monotape_models)'", "files": " -F"}.get(value, "")


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
