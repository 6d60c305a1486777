"""One run of the graders on one tree, in a fork behind the sandbox, and how its results come out.

They leave through a pipe, a record as soon as there is one. Each carries its number and a keyed hash of both; the key
was drawn for this run before anything of the tree was imported. So a record can be neither invented nor sent twice by
code that merely finds the pipe; code that goes through the memory of its process can find the key.
"""

import dis
import hashlib
import hmac
import json
import os
import sys
from types import BuiltinFunctionType, FunctionType, ModuleType

import pytest

CUT = 2_000  # characters of a message
GIVEN = ("engine", "tests")  # packages whose functions must stay what they are
LIBRARIES = ("builtins", "math", "torch", "torch.nn.functional", "pytest", "_pytest.runner", "hypothesis", "hmac")


class Channel:
    def __init__(self, pipe: int, key: bytes):
        def send(record: dict) -> None:
            nonlocal number
            number += 1
            text = json.dumps(record)
            line = f"\n{number} {seal(key, number, text)} {text}\n".encode()
            while line:
                line = line[os.write(pipe, line) :]

        number = 0
        self.send = send


def seal(key: bytes, number: int, text: str) -> str:
    return hmac.new(key, f"{number} {text}".encode(), hashlib.sha256).hexdigest()


def opened(key: bytes, number: int, line: bytes) -> dict | None:
    """The record of a line if it is the genuine number `number`, else None."""
    try:
        first, mac, text = line.decode().split(" ", 2)
        genuine = first == str(number) and hmac.compare_digest(mac, seal(key, number, text))
        return json.loads(text) if genuine else None
    except (ValueError, UnicodeDecodeError):
        return None


def run(job: dict, pipe: int, key: bytes, seen) -> int:
    """Import the tree of the job, run its tests, report. seen: shared memory for the name of the exercise at work."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("engine", "tests", "solutions")]:
        del sys.modules[name]
    tree = job["tree"]
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(tree)
    sys.path[:] = [tree, *(p for p in sys.path if p not in ("", ".", job["root"]))]
    sys.path_importer_cache.clear()
    sys.dont_write_bytecode = True
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    channel = Channel(pipe, key)
    options = ["-q", "-W", "ignore", "--tb=native", "--no-summary", "--show-capture=no", "-p", "pytest_timeout"]
    options += [f"--rootdir={tree}", f"--confcutdir={tree}"]
    arguments = [*options, "--impl=engine", f"--grade-seed={job['seed']}", *job["files"]]
    status = pytest.main(arguments, plugins=[_Reporter(job, channel, seen)])
    channel.send({"kind": "end", "status": int(status)})
    return int(status)


class _Reporter:
    def __init__(self, job: dict, channel: Channel, seen):
        self.job, self.send, self.seen = job, channel.send, seen
        self.record: dict = {}

    def pytest_sessionstart(self, session):
        self.session = session

    def pytest_pycollect_makemodule(self):
        """After conftest.py's: looking for the smallest example that fails would cost more than all the rest."""
        if "hypothesis" in sys.modules:
            from hypothesis import Phase, settings

            settings.register_profile("marks", settings(), phases=(Phase.explicit, Phase.generate))
            settings.load_profile("marks")

    def pytest_collectreport(self, report):
        if report.failed:
            self.send({"kind": "trouble", "text": f"{report.nodeid} cannot be imported: {report.longreprtext[-CUT:]}"})

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        wanted = self.job["tests"]
        if wanted is not None:
            items[:] = [item for item in items if item.nodeid in wanted]
            for item in items:
                item.add_marker(pytest.mark.timeout(wanted[item.nodeid]), append=False)

    def pytest_collection_finish(self):
        self.given = _functions()
        if self.job["profile"]:
            sys.setprofile(_noting(self.job["exercises"], self.job["tree"], self.seen))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        graded = list({ex.name: None for mark in item.iter_markers("grades") for ex in mark.args})
        self.record = {"kind": "test", "test": item.nodeid, "graded": graded, "outcome": "failed", "text": ""}
        self.record |= {"verdict": "", "at": [], "cpu": 0.0}
        self.send({"kind": "start", "test": item.nodeid})
        start = _computed()
        result = yield
        self.record["cpu"] = _computed() - start
        self._look_for_changes()
        self.send(self.record)
        if self.record["verdict"] == "late":
            self.session.shouldstop = "a test did not finish"
        return result

    def pytest_runtest_logreport(self, report):
        if report.failed:
            verdict = getattr(report, "verdict", None)
            text = verdict.text if verdict else report.longreprtext[-CUT:]
            self.record.update(outcome="failed", text=_cut(text), verdict=verdict.kind if verdict else "error")
            self.record["at"] = [ex.name for ex in verdict.exercises] if verdict else []
            self.record["broken"] = True
        elif report.when == "call" and not self.record.get("broken"):
            self.record["outcome"] = report.outcome
        elif report.skipped and not self.record.get("broken"):
            self.record["outcome"] = "skipped"

    def _look_for_changes(self) -> None:
        """Given functions that are not what they were; some libraries replace their own, the reference shows which."""
        changed = [name for name, owner, key, value in self.given if owner.get(key) is not value]
        self.record["changed"] = changed
        if self.job["may_change"] is not None and (bad := set(changed) - set(self.job["may_change"])):
            text = f"while it ran, {sorted(bad)[0]} was replaced"
            self.record.update(outcome="failed", verdict="tampered", text=text)


def _functions() -> list[tuple]:
    """(dotted name, namespace, key, function or class): of the tree and of what its tests rely on."""
    found = []
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name.split(".")[0] in GIVEN or name in LIBRARIES):
            found += _functions_of(module, name)
    return found


def _functions_of(owner, name: str) -> list[tuple]:
    found = []
    for key, value in list(vars(owner).items()):
        if isinstance(value, FunctionType | BuiltinFunctionType | type):
            found.append((f"{name}.{key}", vars(owner), key, value))
            if isinstance(value, type) and value.__module__ == name and isinstance(owner, ModuleType):
                found += _functions_of(value, f"{name}.{key}")
    return found


def _noting(exercises: list[str], tree: str, seen):
    """A profile hook that keeps the number of the exercise at work, the innermost one, in shared memory; from 1."""
    places = {}
    for number, name in enumerate(exercises, 1):
        parts = name.split(".")
        for i in range(1, len(parts)):
            places[f"{tree}/{'/'.join(parts[:i])}.py", ".".join(parts[i:])] = number
    codes: dict = {}
    stack = [0]

    def hook(frame, event, argument):
        if event not in ("call", "return"):
            return
        code = frame.f_code
        number = codes.get(code)
        if number is None:
            number = codes[code] = places.get((code.co_filename, code.co_qualname), 0)
        if number:
            if event == "call":
                stack.append(number)
            elif len(stack) > 1:
                stack.pop()
            if event == "call" or len(stack) > 1 and _returns(frame):  # an exception does not move the blame upwards
                seen[:2] = stack[-1].to_bytes(2, "little")

    return hook


def _returns(frame) -> bool:
    """Whether a frame that ends does so by a return and not by an exception; the profile hook is not told."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("RETURN", "YIELD"))


def _computed() -> float:
    """Seconds of computing, children included."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _cut(text: str) -> str:
    return text if len(text) <= CUT else f"{text[:CUT]} …"


def environment(home: str) -> dict[str, str]:
    """What a run may know of this machine."""
    path = os.pathsep.join(p for p in (os.path.dirname(sys.executable), "/usr/bin", "/bin") if p)
    return {
        **{"PATH": path, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "IMPL": "engine", "OMP_NUM_THREADS": "1"},
        **{"USER": "student", "LOGNAME": "student"},  # its number may have no name
        **{"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"},
        **{"HYPOTHESIS_STORAGE_DIRECTORY": f"{home}/hypothesis", "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"},
    }
