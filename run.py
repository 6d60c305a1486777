"""The command line: `python run.py` lists the commands. Each `cmd_NAME` is short; the work is in engine/."""

import argparse
import os
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent

OVERVIEW = """\
A book that is also an engine: you write a modern LLM inference engine, chapter by chapter, in engine/.
What you have not written yet is borrowed from solutions/, so the whole always runs.

  python run.py core --requests 16    the milestone of chapter 31: one core for every request, measured and checked
  python run.py kernels               the milestone of chapter 32: attention backends beside what memory allows
  python run.py graphs                the milestone of chapter 33: a decode step beside what the device allows
  python run.py overhead              host time of a step, the queue and the prefix cache, at growing sizes
  python run.py soak --minutes 30     random traffic and injected faults; a failure prints a case to replay
  python run.py simulate chat         the same scheduler under hours of load: no model, a cost model, a virtual clock
  python run.py generate --prompt "In the beginning"      text from a model, through that core
  python run.py models                the models it knows, and the command that brings each
  python run.py doctor                is this machine set up?

To write it yourself:
  python run.py list [CHAPTER]        the exercises, with file and line
  python run.py hint NAME             a hint, a stronger one each time
  python -m pytest tests/test_ch31_engine_v2.py      grade a chapter
  python run.py progress [CHAPTER]    what is written, passing, failing, and what to do next
  python run.py watch CHAPTER         on save, the graders of what you changed; keys for a hint and what is next
  python run.py blame CHAPTER         which of your functions is at fault when tests fail
  python run.py core --impl engine    the milestone on your code

To teach it:
  python run.py solve CHAPTER|NAME    write the reference answer into engine/
  python run.py reset CHAPTER|NAME    put the stub back
  python run.py handout --chapters N --out DIR                  a tree for students, without those answers
  python run.py grade SUBMISSIONS --chapters N --out DIR        mark a class: chapters/00-for-instructors.md

Start with chapters/, or with `python run.py list`. Options of a command: python run.py COMMAND --help
"""


class Parser(argparse.ArgumentParser):
    """Bad arguments are one line on stderr and status 2, as everywhere else here."""

    def error(self, message):
        complain(self.prog, f"{message} ({self.prog} --help)")
        sys.exit(2)


def complain(who: str, message: object) -> int:
    print(f"{who}: {' '.join(str(message).split())}", file=sys.stderr)
    return 2


def cmd_list(args) -> int:
    from engine.exercises.catalog import Catalog
    from engine.exercises.listing import listing

    print(listing(Catalog(ROOT), args.chapter))
    return 0


def cmd_hint(args) -> int:
    from engine.exercises.catalog import Catalog
    from engine.exercises.hints import hint

    print(hint(Catalog(ROOT), args.name, args.level, args.all))
    return 0


def cmd_solve(args) -> int:
    from engine.exercises import splice
    from engine.exercises.catalog import Catalog

    outcome = (splice.solve if args.command == "solve" else splice.reset)(Catalog(ROOT), args.what, args.force)
    for line in outcome.done + outcome.unchanged:
        print(line)
    if outcome.backup:
        print(f"the files as they were: {outcome.backup}")
    for line in outcome.refused:
        print(line, file=sys.stderr)
    return 1 if outcome.refused else 0


def cmd_progress(args) -> int:
    from engine.exercises.catalog import Catalog
    from engine.exercises.progress import progress

    return progress(Catalog(ROOT), args.chapter, args.cached)


def cmd_blame(args) -> int:
    from engine.exercises.blame import blame
    from engine.exercises.catalog import Catalog

    return blame(Catalog(ROOT), args.chapter)


def cmd_watch(args) -> int:
    from engine.exercises.watch import watch

    return watch(ROOT, args.chapter)


def cmd_handout(args) -> int:
    from engine.exercises.catalog import Catalog
    from engine.exercises.handout import handout

    print("\n".join(handout(Catalog(ROOT), args.chapters, args.out)))
    return 0


def cmd_grade(args) -> int:
    from engine.exercises.catalog import Catalog
    from engine.exercises.grading.grade import grade

    return grade(Catalog(ROOT), args.submissions, args.chapters, args.out, args.jobs, args.seed)


def cmd_doctor(args) -> int:
    from engine.exercises.doctor import doctor

    return doctor(ROOT)


def cmd_models(args) -> int:
    from engine.models.known import KNOWN

    choose_cache(args)
    for name, known in KNOWN.items():
        print(f"{name:10} {'here' if known.is_here() else known.command}\n           {known.what}")
    return 0


def cmd_get(args) -> int:
    from engine.models.known import bring

    choose_cache(args)
    print(bring(args.name))
    return 0


def cmd_generate(args) -> int:
    choose_code(args)
    choose_cache(args)
    from engine.milestones import generate

    return generate.main(args)


def cmd_core(args) -> int:
    choose_code(args)
    choose_cache(args)
    from engine.milestones import core

    return core.main(args)


def cmd_kernels(args) -> int:
    choose_code(args)
    from engine.milestones.kernels import main as run_kernels

    return run_kernels(args)


def cmd_graphs(args) -> int:
    choose_code(args)
    from engine.milestones.graphs import main as run_graphs

    return run_graphs(args)


def cmd_overhead(args) -> int:
    choose_code(args)
    from engine.milestones import overhead

    return overhead.main(args)


def cmd_soak(args) -> int:
    choose_code(args)
    from engine.milestones import soak

    return soak.main(args)


def cmd_simulate(args) -> int:
    choose_code(args)
    from engine.milestones.simulate import main as run_simulation

    return run_simulation(args)


def choose_code(args) -> None:
    """Say whose code runs; must come before anything of the engine is imported."""
    from engine.exercises.catalog import Catalog

    if args.borrow and args.impl != "engine":
        raise ValueError("--borrow only means something with --impl engine")
    os.environ["IMPL"] = args.impl
    os.environ["BORROW"] = ",".join(Catalog(ROOT).one(name).name for name in args.borrow)


def choose_cache(args) -> None:
    if args.cache:
        os.environ["MODEL_CACHE"] = args.cache


def parser() -> Parser:
    from engine.milestones import options

    top = Parser(prog="run.py", description="Without a command: an overview.", allow_abbrev=False)
    top.set_defaults(traceback=False)
    commands = top.add_subparsers(dest="command", metavar="COMMAND")

    def add(name, function, help):
        command = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        command.set_defaults(function=function)
        command.add_argument("--traceback", action="store_true", help="show where an error was raised")
        return command

    add("list", cmd_list, "the exercises, with file and line").add_argument("chapter", nargs="?")
    hint = add("hint", cmd_hint, "a hint for an exercise; each call shows one more")
    hint.add_argument("name")
    hint.add_argument("--level", type=int, metavar="N", help="only hint N, 1 to 3")
    hint.add_argument("--all", action="store_true", help="all hints at once")
    for name, help in (("solve", "write reference answers into engine/"), ("reset", "put the stubs back")):
        edit = add(name, cmd_solve, help)
        edit.add_argument("what", metavar="CHAPTER|NAME")
        edit.add_argument("--force", action="store_true", help="also where that overwrites code of yours")
    progress = add("progress", cmd_progress, "run the graders of what is written, chapter by chapter")
    progress.add_argument("chapter", nargs="?")
    progress.add_argument("--cached", action="store_true", help="the last results, without running anything")
    add("watch", cmd_watch, "on save, run the graders of what changed").add_argument("chapter")
    add("blame", cmd_blame, "find the function that makes a chapter's tests fail").add_argument("chapter")
    handout = add("handout", cmd_handout, "write a tree for students, without the answers of some chapters")
    grade = add("grade", cmd_grade, "mark the submissions of a class")
    grade.add_argument("submissions", type=Path, metavar="SUBMISSIONS", help="a folder of folders and zips, or one")
    for command in (handout, grade):
        command.add_argument("--chapters", required=True, metavar="N,N", help="the chapters concerned: 24,31")
        command.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write")
    grade.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="at once; default: the cores")
    grade.add_argument("--seed", type=int, metavar="N", help="of the tests' inputs; default: another one each time")
    add("doctor", cmd_doctor, "check versions, threads, GPU, Triton, weights")

    options.core(add("core", cmd_core, "slots against the core: same tokens, measured (chapter 31)"))
    options.kernels(add("kernels", cmd_kernels, "attention backends beside what memory allows (chapter 32)"))
    options.graphs(add("graphs", cmd_graphs, "a decode step from plain to asynchronous, beside its floor (chapter 33)"))
    options.overhead(add("overhead", cmd_overhead, "what the host does in a step, from 1 to 1,024 requests"))
    options.soak(add("soak", cmd_soak, "random traffic and faults, for as long as you like"))
    options.simulate(add("simulate", cmd_simulate, "a trace through the scheduler on a virtual clock (chapter 31)"))
    options.generate(add("generate", cmd_generate, "continue prompts, or answer them with --chat"))

    models = add("models", cmd_models, "the known models, and the command that brings each")
    get = add("get", cmd_get, "install a model into this Python environment")
    get.add_argument("name")
    for command in (models, get):
        options.add_cache(command)
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command is None:
        print(OVERVIEW, end="")
        return 0
    who = f"run.py {args.command}"
    try:
        return args.function(args)
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("engine", "solutions", "tests", ""):
            raise
        return complain(who, f"needs {error.name}: python -m pip install -r {ROOT / 'requirements.txt'}")
    except (ValueError, OSError) as error:
        if args.traceback:
            traceback.print_exc()
        return complain(who, f"{error}{origin(error) if getattr(args, 'impl', '') == 'engine' else ''}")


def origin(error: BaseException) -> str:
    """Where in the engine it was raised, as that may be the reader's own code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(ROOT / "engine")]
    frames = [f for f in frames if not {"exercises", "milestones"} & set(Path(f.filename).relative_to(ROOT).parts)]
    if not frames:
        return ""
    path = Path(frames[-1].filename).relative_to(ROOT).as_posix()
    return f" ({path}:{frames[-1].lineno} {frames[-1].name}; --traceback shows the way there)"


def entry() -> int:
    """`main`, with the ways out that a shell expects."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # an ASCII terminal shows ? instead of stopping the run
    try:
        status = main()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `run.py … | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(entry())
