"""What a body can do while it runs, once past the screening: spoil its own mark and nothing else."""

import os
import signal
import socket
import tempfile
import time
from pathlib import Path

import pytest

from engine.exercises.catalog import Catalog
from engine.exercises.grading import sandbox
from engine.exercises.grading.bench import Bench, Worker
from engine.exercises.grading.trial import opened, seal
from tests.toy import toy_tree

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="class grading needs a POSIX system")
TEST, NEIGHBOUR = "tests/test_ch07_words.py::test_split", "tests/test_ch07_words.py::test_count"
SECRET = "a token that nobody may see"
RIGHT = "return text.split() if keep_case else text.lower().split()"


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return toy_tree(tmp_path_factory.mktemp("book"))


@pytest.fixture(scope="module")
def worker(book):
    os.environ["CLASS_SECRET"] = SECRET
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        worker = Worker(Bench(Catalog(book), [7], 3, Path(folder), memory=1 << 30), 0)
        yield worker
        worker.close()
    del os.environ["CLASS_SECRET"]


@pytest.fixture
def behind(worker):
    """Skip a test of a wall that this system does not have."""

    def need(*layers):
        missing = set(layers) - set(worker.bench.layers)
        if missing:
            pytest.skip(f"no {', '.join(sorted(missing))} here")

    return need


def run(worker, *lines, tests=(TEST, NEIGHBOUR), limit=4.0, profile=False):
    """Run the body as the exercise `split`; the whole result."""
    text = "\n    ".join("\n".join(lines).splitlines())
    return worker.run({"engine.words.split": text}, dict.fromkeys(tests, limit), profile)


def message(result, test=TEST):
    record = result["records"][test]
    assert record["outcome"] == "failed", result
    return record["text"]


def test_a_right_body(worker):
    result = run(worker, RIGHT)
    assert result["ended"] == "finished" and result["forged"] == 0
    assert {test: r["outcome"] for test, r in result["records"].items()} == {TEST: "passed", NEIGHBOUR: "passed"}
    assert result["records"][TEST]["graded"] == ["engine.words.split"]


@pytest.mark.parametrize(
    "body, ended",
    [
        ("import os\nos._exit(0)", "ended the test process (exit status 0)"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended the test process (SIGKILL)"),
        ("import ctypes\nctypes.string_at(1)", "ended the test process (SIGSEGV)"),
        ("raise KeyboardInterrupt", "stopped the whole run"),
        ("import pytest\npytest.exit('done')", "stopped the whole run"),
    ],
)
def test_leaving_is_noticed(worker, body, ended):
    result = run(worker, body, profile=True)
    assert (result["ended"], result["running"], result["inside"]) == (ended, TEST, "engine.words.split")
    assert TEST not in result["records"]


@pytest.mark.parametrize("body", ["while True:\n    pass", "import time\ntime.sleep(1000)"])
def test_never_returning(worker, body):
    result = run(worker, body, limit=1.0)
    assert result["records"][TEST]["verdict"] == "late" and "split did not finish within 1 s" in message(result)
    assert result["records"][TEST]["at"] == ["engine.words.split"]


def test_a_loop_that_no_exception_ends(worker):
    """Blocked signals: the worker ends it."""
    body = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\nwhile True:\n    pass"
    start = time.monotonic()
    result = run(worker, body, limit=1.0)
    assert result["ended"] == "did not finish and could not be interrupted" and result["running"] == TEST
    assert time.monotonic() - start < 120


@pytest.mark.parametrize("raised", ["pytest.skip('no')", "pytest.xfail('no')", "raise __import__('unittest').SkipTest"])
def test_skipping_is_not_passing(worker, raised):
    assert run(worker, f"import pytest\n{raised}")["records"][TEST]["outcome"] != "passed"


def test_memory_and_recursion(worker):
    assert "MemoryError" in message(run(worker, "kept = []\nwhile True:\n    kept.append(bytearray(1 << 26))"))
    assert "RecursionError" in message(run(worker, "return split(text)"))


@pytest.mark.parametrize(
    "stream", ["print('x' * 1_000_000)", "import os\n    os.write(int(text is None) + 1, b'x' * 65536)"]
)
def test_output_without_end(worker, stream):
    result = run(worker, f"while True:\n    {stream}")
    assert TEST not in result["records"] or result["records"][TEST]["outcome"] == "failed"
    assert len(result["output"]) < 10_000


def test_output_past_the_capture(worker):
    """Into every descriptor that there is, also those that pytest saved."""
    body = "import os\nwhile True:\n    for fd in range(3, 20):\n        try:\n            os.write(fd, b'x' * 65536)\n"
    result = run(worker, body + "        except OSError:\n            pass")
    assert TEST not in result["records"] or result["records"][TEST]["outcome"] == "failed"


def test_a_fork_bomb_stays_small(worker):
    if not sandbox.bounds_processes(worker.bench.layers):
        pytest.skip("root without a way to limit processes")
    result = run(worker, "import os\nfor _ in range(2_000):\n    os.fork()")
    assert result["records"].get(TEST, {}).get("outcome") != "passed"
    assert run(worker, RIGHT)["records"][TEST]["outcome"] == "passed"


def test_nothing_is_left_running(worker):
    body = "import os\nif os.fork() == 0:\n    os.setsid()\n    os.execv('/bin/sleep', ['sleep', '98765.4321'])\n"
    run(worker, body + "import time\ntime.sleep(0.5)\nreturn []")
    commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not any(b"98765.4321" in command for command in commands)


def test_nobody_else_is_hit(worker, behind):
    behind("namespaces")
    pid = worker.process.pid
    for target in (f"os.kill({pid}, signal.SIGKILL)", "os.kill(os.getppid(), 9)", "os.killpg(0, 9)", "os.kill(-1, 9)"):
        run(worker, f"import os, signal\ntry:\n    {target}\nexcept OSError:\n    pass\nreturn []")
        assert worker.process.pid == pid and worker.process.poll() is None, target


def test_the_worker_is_replaced_when_it_is_lost(worker):
    before = worker.process.pid
    os.kill(before, signal.SIGKILL)
    assert run(worker, RIGHT)["ended"] == "ended the process that was to watch it"
    assert run(worker, RIGHT)["records"][TEST]["outcome"] == "passed" and worker.process.pid != before


def test_answers_are_not_in_the_tree(worker):
    seen = "import pathlib\nraise ValueError(sorted(p.name for p in pathlib.Path('.').iterdir()))"
    assert "solutions" not in message(run(worker, seen)) and "engine" in message(run(worker, seen))
    assert "No module named 'solutions'" in message(run(worker, "import solutions.words"))


@pytest.mark.parametrize("what", ["solutions/words.py", "engine/words.py"])
def test_the_book_cannot_be_read(worker, book, behind, what):
    behind("files")
    assert "PermissionError" in message(run(worker, f"return open({str(book / what)!r}).read()"))


def test_other_runs_cannot_be_read(worker, behind):
    behind("files")
    folder = worker.bench.folder
    assert "PermissionError" in message(run(worker, f"import os\nraise ValueError(os.listdir({str(folder)!r}))"))


def test_the_tree_cannot_be_written(worker, behind):
    behind("files")
    assert "PermissionError" in message(run(worker, "open('tests/test_ch07_words.py', 'w')"))
    assert "PermissionError" in message(run(worker, "open('/tmp/left-behind', 'w')"))
    assert not Path("/tmp/left-behind").exists()
    own = "import tempfile\nwith tempfile.TemporaryFile() as file:\n    file.write(b'x')\n" + RIGHT
    assert run(worker, own)["records"][TEST]["outcome"] == "passed"


def test_no_network(worker, behind):
    behind("namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        body = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)"
        assert "Error" in message(run(worker, body))
        with pytest.raises(TimeoutError):
            server.accept()


def test_the_environment_is_clean(worker):
    text = "import os\nraise ValueError([os.environ.get(k) for k in ('CLASS_SECRET', 'BORROW', 'PYTHONPATH')])"
    assert "[None, None, None]" in message(run(worker, text))
    home = message(run(worker, "import os\nraise ValueError(os.environ['HOME'])"))
    assert str(worker.bench.folder) in home and home.split(" at ")[0].endswith("/home")


def test_given_code_that_is_replaced_is_noticed(worker):
    body = "import sys\nfor module in list(sys.modules.values()):\n    if hasattr(module, 'expect_equal'):\n"
    result = run(worker, body + "        module.expect_equal = lambda *a, **k: None\nreturn []")
    assert result["records"][TEST]["verdict"] == "tampered"
    assert "expect_equal was replaced" in message(result)


def test_results_cannot_be_invented(worker):
    """By writing what looks like a record into every descriptor."""
    record = '{"kind": "test", "test": "' + TEST + '", "graded": [], "outcome": "passed", "text": "", "verdict": "", '
    record += '"at": [], "cpu": 0}'
    body = f"""import os
for fd in range(3, 30):
    for n in range(6):
        try:
            os.write(fd, b'\\n%d ' % n + b'0' * 64 + b' ' + {record.encode()!r} + b'\\n')
        except OSError:
            pass
os._exit(0)"""
    result = run(worker, body)
    assert TEST not in result["records"] and result["forged"] > 0


def test_records_are_genuine_once():
    key, text = b"k" * 32, '{"kind": "end"}'
    line = f"3 {seal(key, 3, text)} {text}".encode()
    assert opened(key, 3, line) == {"kind": "end"}
    assert opened(key, 4, line) is None and opened(b"l" * 32, 3, line) is None
    assert opened(key, 3, line.replace(b"end", b"and")) is None and opened(key, 3, b"\xff") is None
