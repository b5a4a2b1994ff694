"""`paceline --completion SHELL`: a script that completes commands, options and their values."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, cast, get_args

from cyclopts import App

from paceline.errors import HelpShown, UsageError
from paceline.options.command_line import LIST_OPTIONS, callable_with
from paceline.options.fields import OptionField, unknown_name
from paceline.recipes.registry import BUILT_IN

Shell = Literal["bash", "zsh", "fish"]

_OF_RECIPES = frozenset({"train", "scale", "verify", "doctor"})
"""Commands whose first word is a recipe, with arguments of its own."""
_OF_RUNS = tuple("compare evaluate export report resume".split())
"""Commands that take a run by its name below runs/, as well as its directory."""
_BASH_LAST = "complete -F _paceline paceline"
_BASH_RUNS = f"""
# Names of runs where a run is wanted; files where nothing else is known, such as after --config.
_paceline_or_run() {{
  _paceline
  local cur="${{COMP_WORDS[COMP_CWORD]}}" run
  [[ $COMP_CWORD -ge 2 && $cur != -* && ${{COMP_WORDS[COMP_CWORD-1]}} != -* ]] || return 0
  case "${{COMP_WORDS[1]}}" in
    {"|".join(_OF_RUNS)})
      for run in runs/"$cur"*/run.json; do
        [[ -e $run ]] && run="${{run#runs/}}" && COMPREPLY+=("$(printf %q "${{run%/run.json}}")")
      done ;;
  esac
  return 0
}}
complete -o default -F _paceline_or_run paceline
"""
_ZSH_OPEN = re.compile(r"(\]:[\w-]+)'(?= \\$)", re.MULTILINE)
_ZSH_RUNS = """
# Names of runs where a run is wanted, and files.
_paceline_run_or_file() {
  local -a names=(runs/*/run.json(N:h:t))
  compadd -a names
  _files
}
# As a file _paceline in $fpath it is run at each completion; with `source` it registers itself.
if [[ $funcstack[1] == _paceline ]]; then
  _cyclopts_paceline "$@"
else
  (( $+functions[compdef] )) || { autoload -U compinit; compinit; }
  compdef _cyclopts_paceline paceline
fi
"""
_FISH_RUNS = f"""
# Names of runs where a run is wanted, beside files.
function __fish_paceline_runs
    for run in runs/*/run.json
        string split -f 2 / $run
    end
end
for name in {" ".join(_OF_RUNS)}
    complete -c paceline -n "__fish_paceline_using_command $name" -a '(__fish_paceline_runs)'
end
"""
_WORDS: Mapping[str, object] = {"init": Literal["recipe", "script"]}
_WITHOUT_WORD = frozenset({"recipes", "aws"})


def completion_script(shell: str, commands: Mapping[str, tuple[str, str]]) -> str:
    """Write the script that a shell reads once; it starts nothing when it completes.

    Raises:
        UsageError: It is for no such shell.
    """
    if shell not in get_args(Shell):
        raise UsageError(unknown_name(shell, get_args(Shell), "shell"))
    app = App(name="paceline", help_flags=["--help"], version_flags=["--version"])
    for name, (module, text) in commands.items():
        options = {option.name: option for option in _options_of(name, module)}
        app.command(_with_word(name, list(options.values())), name=name, help=text)
    wanted = {"shell": cast(Shell, shell)}  # whose syntax it is; none is started
    script = app.generate_completion(**wanted)
    if shell == "bash":
        return script.replace(_BASH_LAST, _BASH_RUNS)
    return script + _FISH_RUNS if shell == "fish" else _with_runs_in_zsh(script)


def _with_runs_in_zsh(script: str) -> str:
    """Complete runs, any number of them, where commands that take some have their first word.

    Where nothing else is known, such as after --config, files are completed.
    """
    script = _ZSH_OPEN.sub(r"\1:_files'", script)
    for name in _OF_RUNS:
        first = re.compile(rf"(\n        {name}\)\n.*?)'1:TARGET:_files'", re.DOTALL)
        script = first.sub(r"\1'*:TARGET:_paceline_run_or_file'", script, count=1)
    return script + _ZSH_RUNS


def _options_of(name: str, module: str) -> Iterator[OptionField]:
    """List a command's options, with those of every built-in recipe where it takes one."""
    main = importlib.import_module(module).main
    for target in BUILT_IN if name in _OF_RECIPES else [None]:
        try:
            main([*([target] if target else []), LIST_OPTIONS])
        except HelpShown as listed:
            yield from listed.args


def _with_word(name: str, options: list[OptionField]) -> Callable[..., None]:
    """Make a function with a command's first word, a recipe or a path, and its options."""
    command = callable_with(options)
    if name in _WITHOUT_WORD:
        return command
    kind = Literal[tuple(BUILT_IN)] if name in _OF_RECIPES else _WORDS.get(name, Path)
    word = inspect.Parameter(
        "target", inspect.Parameter.POSITIONAL_ONLY, annotation=kind, default=None
    )
    signature = inspect.signature(command)
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[word, *signature.parameters.values()]
    )
    return command
