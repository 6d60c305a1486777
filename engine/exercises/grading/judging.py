"""Which exercises of a submission are right: from runs of the graders to a mark for each.

All bodies run together first. Whoever ends that run (leaves the process, never returns) is taken out and the rest goes
on without it. A test that fails together is tried again with less of the student's code, in the end with one body alone
among answers: so no body loses its point by a mistake in another, and one that works only with its author's others is
right as well.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

OWN = 3  # a test that grades no more than so many exercises says whose fault a failure is
SHOWN = 3  # messages for an exercise
Run = Callable[[dict[str, str], dict[str, float], bool], dict]


@dataclass
class Graders:
    """By test: the exercises that it grades and how many seconds it may take."""

    graded: dict[str, list[str]]
    limits: dict[str, float]

    def of(self, names: Iterable[str]) -> list[str]:
        wanted = set(names)
        return [test for test, graded in self.graded.items() if wanted & set(graded)]


@dataclass
class Mark:
    """right: all of its tests passed. stopped: it ended a run, or did not end."""

    passed: int
    total: int
    right: bool = False
    stopped: bool = False
    messages: list[str] = field(default_factory=list)


class Judge:
    def __init__(self, graders: Graders, run: Run):
        self.graders, self.run = graders, run

    def marks(self, bodies: dict[str, str]) -> dict[str, Mark]:
        """A mark for each body, by full name; `flags` afterwards has what an instructor should know."""
        self.bodies, self.flags = bodies, []
        self.passed: dict[str, set[str]] = {name: set() for name in bodies}
        self.failed: dict[str, dict[str, str]] = {name: {} for name in bodies}
        self.stopped: dict[str, str] = {}
        for name in self._together(list(bodies)):
            self._alone(name, self.graders.of([name]))
        if len(bodies) > 1:
            self._acquit()
        return {name: self._mark(name) for name in bodies}

    def _mark(self, name: str) -> Mark:
        total, passed = len(self.graders.of([name])), len(self.passed[name])
        if name in self.stopped:
            return Mark(passed, total, stopped=True, messages=[self.stopped[name]])
        if passed == total:
            return Mark(passed, total, right=True)
        messages = list(dict.fromkeys(self.failed[name].values()))
        more = [f"… and {len(messages) - SHOWN} more"] if len(messages) > SHOWN else []
        return Mark(passed, total, messages=messages[:SHOWN] + more)

    def _together(self, names: list[str]) -> list[str]:
        """Run all tests of these; those who ended a run, in that order. The others' results are noted."""
        out: list[str] = []
        done: set[str] = set()
        for _ in range(2 * len(names) + 1):
            now = [name for name in names if name not in out]
            left = [test for test in self.graders.of(now) if test not in done]
            if not left:
                break
            result = self._run(now, left)
            ended = _ended_in(result)
            done |= self._note(result, now, left, ended)
            if ended is None:
                break
            culprits = self._culprits(result, ended, now)
            done |= set() if culprits else {ended}
            out += culprits
        return out

    def _run(self, names: list[str], tests: list[str], profile: bool = False) -> dict:
        limits = {test: self.graders.limits[test] for test in tests}
        result = self.run({name: self.bodies[name] for name in names}, limits, profile)
        if result["forged"]:
            self._flag("wrote into the channel of the results")
        return result

    def _note(self, result: dict, names: list[str], tests: list[str], ended: str | None) -> set[str]:
        """Take over what is settled; the tests that are."""
        settled = set()
        for test in tests:
            record = result["records"].get(test)
            if test == ended or record is None and ended is not None:
                continue
            settled.add(test)
            if record is not None and record["verdict"] == "tampered":
                self._flag(f"{record['text']} ({test.split('::')[-1]})")
            for name in set(names) & set(self.graders.graded[test]):
                if record is not None and record["outcome"] == "passed":
                    self.passed[name].add(test)
                    self.failed[name].pop(test, None)
                elif test not in self.passed[name]:
                    self.failed[name][test] = _message(record, test, result)
        return settled

    def _culprits(self, result: dict, ended: str, names: list[str]) -> list[str]:
        """Whose code ended the run: as the traceback tells, or as a second run of that test under a profiler does."""
        late = result["records"].get(ended, {})
        found = [name for name in late.get("at", ()) if name in names]
        if not found and ended:
            again = self._run(names, [ended], profile=True)
            if _ended_in(again) is None:
                self._note(again, names, [ended], None)
                return []
            seen = [again["inside"], *again["records"].get(ended, {}).get("at", ())]
            found = [name for name in seen if name in names]
        return found[:1] or [n for n in names if n in self.graders.graded.get(ended, ())] or names

    def _alone(self, name: str, tests: list[str]) -> None:
        """One body among answers."""
        tests = [test for test in tests if test not in self.passed[name]]
        result = self._run([name], tests)
        ended = _ended_in(result)
        self._note(result, [name], tests, ended)
        if ended is not None:
            self.stopped[name] = _end_message(result, ended)

    def _acquit(self) -> None:
        """Find out who fails by somebody else's fault: take out who fails alone, try the rest again.

        Each round ends at the first who passes alone, as the others' failures may well go with those just found.
        """
        wrong: set[str] = set()
        while suspects := self._suspects(wrong):
            before = len(wrong)
            for name in suspects:
                self._alone(name, self._own_failures(name))
                if self._own_failures(name) or name in self.stopped:
                    wrong.add(name)
                elif len(wrong) > before:
                    break
            left = [name for name in self.bodies if name not in wrong and name not in self.stopped]
            tests = list(dict.fromkeys(test for name in left for test in self.failed[name]))
            if tests and len(left) < len(self.bodies):
                result = self._run(left, tests)
                self._note(result, left, tests, _ended_in(result))
        for name in [name for name in self.bodies if self.failed[name] and name not in wrong | self.stopped.keys()]:
            self._alone(name, list(self.failed[name]))

    def _suspects(self, wrong: set[str]) -> list[str]:
        """Those whose own tests fail, the likeliest first."""
        names = [name for name in self.bodies if name not in wrong and name not in self.stopped]
        share = {name: len(own) / len(self.graders.of([name])) for name in names if (own := self._own_failures(name))}
        return sorted(share, key=lambda name: -share[name])

    def _own_failures(self, name: str) -> list[str]:
        return [test for test in self.failed[name] if len(self.graders.graded[test]) <= OWN]

    def _flag(self, text: str) -> None:
        if text not in self.flags:
            self.flags.append(text)


def _ended_in(result: dict) -> str | None:
    """The test in which a run ended before its end, "" outside of any, None when it reached the end."""
    for test, record in result["records"].items():
        if record["verdict"] == "late":
            return test
    return None if result["ended"] == "finished" else result["running"]


def _message(record: dict | None, test: str, result: dict) -> str:
    if record is None:
        return f"{test} did not run" + "".join(f": {error}" for error in result["errors"][:1])
    if record["outcome"] == "skipped":
        return f"{test} was skipped from inside"
    return record["text"]


def _end_message(result: dict, ended: str) -> str:
    record = result["records"].get(ended)
    if record:
        return record["text"]
    where = ended.partition("::")[2] or "no test"
    return f"{result['ended']}, in {where}; the other exercises were graded without it"
