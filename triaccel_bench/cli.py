"""``triaccel-bench``: compose every job of the sweep, judge all of them, then run them.

Exit codes: 0 done; 1 some runs failed (listed with reasons, and how to run only them); 2 the
configuration, device or data cannot be used; 3 the time is up (``runner.max_minutes``) before all
is done; 130 interrupted by Ctrl-C, SIGTERM, SIGUSR1 or the reader of a closed pipe (as with 3,
finished seeds are kept and reused, and the one under way goes on from its checkpoint).
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from triaccel_bench import deadline, launching, preflight
from triaccel_bench.configuration import CONFIG_PACKAGE, FOLDERS_OF_HYDRA, to_settings
from triaccel_bench.launching import INTERRUPTIONS
from triaccel_bench.outcomes import Asked, Outcome, closing_lines, exit_code
from triaccel_bench.progress import open_reporter
from triaccel_bench.results import read_results
from triaccel_bench.runner import Refused, cell_labels, run_cells
from triaccel_bench.runner import preflight as check_cells
from triaccel_bench.settings import Settings, SettingsError
from triaccel_bench.tables import table1
from triaccel_bench.terminal import print_any_name, render_terminal, silence_output

_OPTIONAL = ("pair", "tuned")
"""Groups that ``conf/config.yaml`` takes a file of where there is one."""


def main() -> NoReturn:
    """Console entry."""
    interruptible(lambda: run(sys.argv[1:]))


def interruptible(command: Callable[[], int]) -> NoReturn:
    """Exit with the code of a command, which whoever may end this process can ask to stop in good order."""
    print_any_name()
    # Slurm and `timeout` ask with SIGTERM, Slurm's --signal with SIGUSR1; left alone, they would end this process and
    # not the child.
    for number in INTERRUPTIONS:
        signal.signal(number, _interrupt_once)
    code = command()
    for number in INTERRUPTIONS:
        # The end of the interpreter would otherwise take its handlers away while it can still be asked.
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def _interrupt_once(*_: object) -> NoReturn:
    """Whoever asks may ask again, as ``timeout`` and Slurm do: the end is under way, and within a fixed time."""
    for number in INTERRUPTIONS:
        signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def run(arguments: list[str]) -> int:
    """Run the command line ``arguments`` and return the exit code."""
    deadline.begin()
    previous = sys.argv
    try:
        try:
            jobs, asked, mistakes = _composed(arguments)
            if not mistakes and jobs and launching.Withhold.kept is not None:
                return exit_code(_launch(launching.Withhold.kept, jobs, asked))
        finally:
            _remove_folders_of_hydra()
        if mistakes:
            raise mistakes[0]
        try:
            outcomes = _run(jobs, asked)
            if sys.stdout is not None:
                sys.stdout.flush()
        except SystemExit:
            # rich answers a closed pipe with it.
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from None
    except (HydraException, OmegaConfBaseException, SettingsError, Refused) as error:
        print(f"triaccel-bench: {sentence(error)}", file=sys.stderr)
        return 2
    except launching.LaunchError as error:
        print(f"triaccel-bench: {error}; finished seeds are kept, run the same command to go on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("triaccel-bench: interrupted; finished seeds are kept, run the same command to go on", file=sys.stderr)
        return 130
    except OSError as error:
        # Runs report their own faults.
        if _output_stands(error):
            print(
                f"triaccel-bench: expected files and processes from the system, got {error}; finished seeds are kept, "
                "run the same command to go on",
                file=sys.stderr,
            )
            return 2
        silence_output()
        print(
            f"triaccel-bench: output closed ({error}); finished seeds are kept, run the same command to go on",
            file=sys.stderr,
        )
        return 130
    finally:
        sys.argv = previous
    return exit_code(outcomes)


def jobs_of(arguments: list[str]) -> list[Settings]:
    """Every job that a command line asks for, judged as ``run`` would, and none of them run.

    Raises:
        SettingsError: some job cannot be run, or there is none.
        HydraException, OmegaConfBaseException: the command line cannot be composed.
    """
    previous = sys.argv
    try:
        jobs, _, mistakes = _composed(arguments)
    finally:
        sys.argv = previous
        _remove_folders_of_hydra()
    if mistakes:
        raise mistakes[0]
    return jobs


def _composed(arguments: list[str]) -> tuple[list[Settings], list[Asked], list[Exception]]:
    """All jobs with how they were asked for, and what is wrong with others; leaves ``sys.argv`` changed."""
    # Hydra would print a traceback hint and exit 1 by itself; with this it raises and we say it in a sentence.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    options = _options(arguments)
    jobs: list[Settings] = []
    asked: list[Asked] = []
    mistakes: list[Exception] = []

    @hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_PACKAGE}", config_name="config")
    def job(config: DictConfig) -> None:
        try:
            _require_a_sweep(HydraConfig.get())
            _require_what_was_named(HydraConfig.get())
            # Composing comes first for the whole sweep: a typo in its last job costs no hour of its first.
            jobs.append(to_settings(config))
            asked.append(Asked(tuple(HydraConfig.get().overrides.task), options))
        except (HydraException, OmegaConfBaseException, SettingsError) as error:
            # Raised here, Hydra would add a line of its own.
            mistakes.append(error)

    launching.Withhold.kept = None
    sys.argv = ["triaccel-bench", *_hydra_arguments(arguments)]
    _compose(job)
    return jobs, asked, mistakes


def _require_a_sweep(config: DictConfig) -> None:
    if config.mode == RunMode.RUN and config.launcher._target_ != launching.LOCAL:
        raise SettingsError(
            f"hydra/launcher={config.runtime.choices['hydra/launcher']}: expected -m, without which Hydra runs one job "
            "here, whichever launcher is named; add -m"
        )


def _require_what_was_named(config: DictConfig) -> None:
    """An optional group's file need not be there, but for one that the command itself names."""
    loader = GlobalHydra.instance().config_loader()
    given = [*config.overrides.hydra, *config.overrides.task]
    for override in OverridesParser.create().parse_overrides([*config.overrides.task]):
        group, value = override.key_or_group, override.get_value_element_as_str()
        if group in _OPTIONAL and not override.is_delete() and value not in loader.get_group_options(group):
            # It may be in a folder of hydra.searchpath, where Hydra looks only as it composes. As an addition the file
            # is not optional, and Hydra refuses it as one of any other group.
            loader.load_configuration(config.job.config_name, [*given, f"+{group}@named={value}"], RunMode.RUN)


def _output_stands(error: OSError) -> bool:
    """Whether it is not our output that failed, closed by its reader or on a full disk."""
    if error.filename is not None:
        return True
    if isinstance(error, BrokenPipeError):
        return False
    try:
        if sys.stdout is not None:
            # Python forgets what it could not write, so that flushing alone would tell nothing.
            print(flush=True)
    except OSError:
        return False
    return True


def _remove_folders_of_hydra() -> None:
    """Hydra makes a folder a command, and nothing of ours goes into it: settings are in each run's record.

    A folder that the user named is the user's; of ours, only what is empty goes.
    """
    while FOLDERS_OF_HYDRA:
        folder = FOLDERS_OF_HYDRA.pop()
        with contextlib.suppress(OSError):
            (folder / "multirun.yaml").unlink(missing_ok=True)
            jobs = [*folder.iterdir()]
            for empty in (*jobs, folder):
                with contextlib.suppress(OSError):
                    empty.rmdir()


def _hydra_arguments(arguments: list[str]) -> list[str]:
    """Overrides first, for Hydra's parser takes none after an option, and in quotes where its grammar needs them."""
    overrides = [text for text in arguments if _is_override(text)]
    return [*map(_quoted, overrides), *(text for text in arguments if text not in overrides)]


def _is_override(argument: str) -> bool:
    return re.match(r"~|[^-./][^=]*=|=", argument) is not None


def _options(arguments: list[str]) -> tuple[str, ...]:
    """What stands beside overrides and holds for each of a sweep's jobs by itself."""
    return tuple(text for text in arguments if not _is_override(text) and text not in ("-m", "--multirun"))


def _quoted(override: str) -> str:
    """``dataset.path=~/a b`` is what people type, and Hydra reads ``~``, accents and blanks only in quotes."""
    try:
        OverridesParser.create().parse_override(override)
    except (HydraException, AssertionError):
        if "=" not in override:
            return override
        key, value = override.split("=", 1)
        escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\" + found[2] if found[2] else ""), value)
        return f"{key}='{escaped}'"
    return override


def _compose(job: Callable[[], None]) -> None:
    """Let Hydra call ``job`` for every job; what it raises for a setting of its own becomes a ``SettingsError``."""
    try:
        job()
    except (HydraException, OmegaConfBaseException, SettingsError, Refused, BrokenPipeError):
        raise
    except OSError as error:
        if not _output_stands(error):
            raise
        raise SettingsError(
            f"results.root: expected a folder in which Hydra can make its own, got {error}; name another by "
            "results.root, or where you set those by hydra.run.dir and hydra.sweep.dir"
        ) from None
    except Exception as error:
        what = str(error).split("\n")[0] or type(error).__name__
        raise SettingsError(
            f"expected a command line that Hydra can use, got one that it stops at ({what}); "
            "write overrides as key=value, and see --hydra-help"
        ) from None


def _run(jobs: list[Settings], asked: list[Asked]) -> list[Outcome]:
    if not jobs:
        return []
    if jobs[0].preflight == "only":
        return _shown(check_cells(jobs), jobs)
    with open_reporter(jobs[0].progress) as reporter:
        outcomes = run_cells(jobs, reporter)
    _tell(outcomes, jobs, asked)
    return outcomes


def _launch(how: launching.Launch, jobs: list[Settings], asked: list[Asked]) -> list[Outcome]:
    """The same by another launcher."""
    overrides = [list(job.overrides) for job in asked]
    if jobs[0].preflight == "only":
        return _shown(launching.look(how, jobs, overrides), jobs)
    if jobs[0].progress != "none":
        print(f"{len(jobs)} jobs by {how.launcher}, {how.folder}", flush=True)
    outcomes = launching.launch(how, jobs, overrides)
    _tell(outcomes, jobs, asked)
    return outcomes


def _tell(outcomes: list[Outcome], jobs: list[Settings], asked: list[Asked]) -> None:
    for outcome in outcomes:
        if outcome.status == "refused":
            print(f"triaccel-bench: {outcome.label}: {outcome.reason}", file=sys.stderr)
    silent = jobs[0].progress == "none"
    if not silent:
        _summarise(outcomes)
    for line in closing_lines(outcomes, asked, jobs[0].runner.max_minutes):
        print(line, file=sys.stderr if silent else sys.stdout)


def _shown(report: preflight.Report, jobs: list[Settings]) -> list[Outcome]:
    """Show the checks of all cells; a cell that could not run counts as refused."""
    if sys.stdout is not None and sys.stdout.isatty():
        render_terminal(preflight.table(report))
    else:
        print("\n".join(preflight.lines(report)))
    labels = cell_labels(jobs)
    return [
        Outcome(labels[number], jobs[number].seeds[0], "refused", obstacle, None, number=number)
        for number, obstacle in report.obstacles().items()
    ]


def _summarise(outcomes: list[Outcome]) -> None:
    folders = {outcome.path.parent.parent for outcome in outcomes if outcome.path is not None and outcome.path.exists()}
    if folders:
        print()
        render_terminal(table1(read_results(sorted(folders))))


def sentence(error: Exception) -> str:
    """One line: Hydra's and OmegaConf's messages span several, and the cause says more than the wrapper."""
    message = str(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: expected key=value, for example epochs=3; `triaccel-bench --cfg job` lists every key"
    if several := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", message):
        key, value = several.groups()
        return f"{key}={value}: expected one value; add -m to run each of these, or write {key}=[{value}] for a list"
    cause = error.__cause__
    while cause is not None and isinstance(cause, (HydraException, OmegaConfBaseException)):
        message, cause = f"{message} {cause}", cause.__cause__
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("full_key:", "object_type=", "Check that the config"))]
    text = " ".join(dict.fromkeys(lines))
    if missing := re.search(r"Could not find 'hydra/launcher/(joblib|submitit|ray)", text):
        return f"{text}; pip install -e '.[{missing[1]}]' brings it"
    if isinstance(error, MissingConfigException) and (unknown := re.search(r"Could not find '(\w+)/([^']*)'", text)):
        # A group's base is there for its members.
        there = ", ".join(name for name in error.options or () if not name.startswith("_"))
        return f"{unknown[1]}={unknown[2]}: expected one of {there}; choose one of them"
    if unresolved := re.match(r"Error resolving interpolation '([^']+)', possible interpolation keys: (.+)", text):
        # The groups pair and tuned hang on all three; one of them was taken away.
        gone = [key for key in re.findall(r"\w+", unresolved[1]) if key not in unresolved[2].split(", ")]
        return f"{', '.join(gone)}: expected a value, got none; set it or use the shipped conf/ group"
    return text + _suggestion(text)


def _suggestion(text: str) -> str:
    match = re.search(r"Key '([^']+)' is not in struct", text)
    if match is None:
        return ""
    close = difflib.get_close_matches(match.group(1), _field_names(), n=1)
    if close and close[0] != match.group(1):
        return f"; did you mean {close[0]}?"
    return "; `triaccel-bench --cfg job` lists every key"


def _field_names() -> list[str]:
    names: set[str] = set()
    sections = [Settings]
    while sections:
        for name, field in sections.pop().model_fields.items():
            names.add(name)
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                sections.append(field.annotation)
    return sorted(names)


if __name__ == "__main__":
    main()
